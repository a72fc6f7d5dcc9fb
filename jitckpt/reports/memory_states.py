"""How many ranks are in which state for the memory tier (decisions/memory_state.py), in words."""

from collections.abc import Sequence

from jitckpt.decisions.memory_state import HEALTHS, STATES
from jitckpt.reports.present import RankNow, shown_ranks

FAILED = HEALTHS[1:]  # of these it is said which ranks they are


def ranks_by_state(ranks: Sequence[RankNow]) -> dict[str, list[int]]:
    """Return the ranks of each state that any is in; none without a memory tier that has a step of them."""
    found = {state: [rank.rank for rank in ranks if rank.memory_state == state] for state in STATES}
    return {state: those for state, those in found.items() if those}


def in_words(ranks: Sequence[RankNow]) -> str:
    """Return a clause; "" if nothing is known."""
    return ", ".join(
        f"{len(those)} {state}"
        + (f" (rank{'s' if len(those) > 1 else ''} {shown_ranks(those)})" if state in FAILED else "")
        for state, those in ranks_by_state(ranks).items()
    )
