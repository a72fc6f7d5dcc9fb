"""What a script asks of the memory tier, where `jitckpt run` leaves it open: said by a rank in its memory."""

from jitckpt.decisions.memory_wanted import OFF, Wanted
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import COPIES, EVERY, KEEP, LIMIT

MODE = "peer"  # whether a rank takes part in what is automatic it knows itself, and asks or does not


def ask(descriptor: int, wanted: Wanted) -> None:
    """Tell the agent; before the rank registers."""
    if wanted.mode == OFF:
        return
    host_memory.put_word(descriptor, EVERY, wanted.steps)
    host_memory.put_word(descriptor, LIMIT, wanted.limit or 0)
    host_memory.put_word(descriptor, KEEP, int(wanted.keep * 1000))
    host_memory.put_word(descriptor, COPIES, wanted.copies)


def of(descriptor: int) -> Wanted | None:
    """Return what a rank has asked for, if it has."""
    copies = host_memory.word(descriptor, COPIES)
    if not copies:
        return None
    return Wanted(
        MODE,
        copies,
        host_memory.word(descriptor, EVERY),
        host_memory.word(descriptor, LIMIT) or None,
        host_memory.word(descriptor, KEEP) / 1000,
    )
