"""Which states of ranks fit each other, and who is late, compared with programs of which all is known."""

from dataclasses import dataclass, field
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.transparent.cuts import Misfit, ahead, newest_that_fit
from jitckpt.decisions.transparent.stragglers import late
from jitckpt.wire.communicators import EVERYBODY, FOREVER, Count, Membership
from jitckpt.wire.proxy_messages import Standing

SECOND = 1_000_000


@dataclass
class Program:
    """What ranks have done: calls that all members of a group make, messages, and images.

    groups: by key, the members. calls: by number, the group and, of a message, from whom to whom. rows: of
    each rank its events in order: the number of a call, or "image".
    """

    groups: dict[str, tuple[int, ...]]
    calls: list[tuple[str, tuple[int, int] | None]] = field(default_factory=list)
    rows: dict[int, list[int | str]] = field(default_factory=dict)

    def who(self, call: int) -> tuple[int, ...]:
        key, ends = self.calls[call]
        return self.groups[key] if ends is None else ends

    def before(self, rank: int, state: int) -> list[int]:
        """The calls before the rank's image `state`, from 1; FOREVER: all."""
        row = self.rows[rank]
        images = [place for place, event in enumerate(row) if event == "image"]
        end = len(row) if state == FOREVER else images[state - 1]
        return [event for event in row[:end] if isinstance(event, int)]

    def images(self, rank: int) -> list[int]:
        return list(range(1, self.rows[rank].count("image") + 1))

    def counts(self, rank: int, key: str, state: int) -> list[Count]:
        members = self.groups[key]
        made = [self.calls[call][1] for call in self.before(rank, state) if self.calls[call][0] == key]
        counts = [Count(state, EVERYBODY, made.count(None), 0)]
        for place, peer in enumerate(members):
            counts += [Count(state, place, made.count((rank, peer)), made.count((peer, rank)))]
        return [count for count in counts if count.sent or count.received]

    def places(self, rank: int, states: list[int]) -> tuple[Membership, ...]:
        return tuple(
            Membership(
                key,
                "",
                0,
                members.index(rank),
                len(members),
                counts=tuple(count for state in states for count in self.counts(rank, key, state)),
            )
            for key, members in self.groups.items()
            if rank in members
        )

    def fits(self, states: dict[int, int]) -> bool:
        """Whether every call was made by all who take part, or by none of them."""
        made = {rank: set(self.before(rank, state)) for rank, state in states.items()}
        return all(
            len({call in made[rank] for rank in self.who(call)}) == 1 for call in range(len(self.calls))
        )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks = draw(st.integers(2, 4))
    groups = {"11" * 16: tuple(range(ranks))}
    if ranks > 2:
        groups["22" * 16] = draw(st.sampled_from([(0, 1), (2, 0), (1, 2, 0)]))
    program = Program(groups, rows={rank: [] for rank in range(ranks)})
    for _ in range(draw(st.integers(0, 14))):
        what = draw(st.sampled_from(["image", "image of all", "collective", "message"]))
        if what == "image":
            program.rows[draw(st.integers(0, ranks - 1))].append("image")
            continue
        if what == "image of all":
            for row in program.rows.values():
                row.append("image")
            continue
        key = draw(st.sampled_from([*groups]))
        pair = draw(st.permutations(groups[key]))[:2] if what == "message" else None
        program.calls.append((key, None if pair is None else (pair[0], pair[1])))
        for rank in program.who(len(program.calls) - 1):
            program.rows[rank].append(len(program.calls) - 1)
    return program


@given(programs(), st.integers(1, 3))
def test_the_newest_states_that_fit_are_found_if_there_are_any(program: Program, most: int) -> None:
    kept = {rank: program.images(rank)[-most:] for rank in program.rows}
    places = {rank: program.places(rank, states) for rank, states in kept.items()}
    choices = [dict(zip(kept, states, strict=True)) for states in product(*kept.values())]
    fitting = [states for states in choices if program.fits(states)]
    for states in choices:
        assert (not ahead(places, states)) == (states in fitting)
    found = newest_that_fit(places, kept)
    if not fitting:
        assert isinstance(found, Misfit)
        assert found.reason
    else:
        assert found in fitting
        assert found == {rank: max(states[rank] for states in fitting) for rank in kept}


@given(programs(), st.data())
def test_who_is_late_is_who_has_not_made_a_call_that_others_wait_in(
    program: Program, data: st.DataObject
) -> None:
    ends = {rank: data.draw(st.integers(0, len(row))) for rank, row in program.rows.items()}
    program.rows = {rank: row[: ends[rank]] for rank, row in program.rows.items()}
    waits = {rank: data.draw(st.sampled_from([0, 3, 60, 70])) for rank in program.rows}
    standings = {
        rank: Standing((0, 0), seconds * SECOND, 60 * SECOND, program.places(rank, [FOREVER]))
        for rank, seconds in waits.items()
    }
    missing = {
        rank
        for call in range(len(program.calls))
        for rank in program.who(call)
        if call not in program.before(rank, FOREVER)
        and any(call in program.before(other, FOREVER) for other in program.who(call))
    }
    assert late(standings) == {rank for rank in missing if waits[rank] < 60}


def test_a_communicator_that_some_have_not_made_has_no_state_in_common() -> None:
    both, new = "11" * 16, "22" * 16
    old = Membership(both, "", 0, 0, 2, 0), Membership(both, "", 0, 1, 2, 0)
    places = {0: (old[0], Membership(new, "", 0, 0, 2, since=7)), 1: (old[1],)}
    assert newest_that_fit(places, {0: [6, 7], 1: [6, 7]}) == {0: 6, 1: 7}
    unfit = newest_that_fit(places, {0: [7], 1: [7]})
    assert isinstance(unfit, Misfit)
    assert "made on some of its members only" in unfit.reason
    ended = {0: (Membership(both, "", 0, 0, 2, 0, until=6),), 1: (old[1],)}
    assert newest_that_fit(ended, {0: [6, 7], 1: [6, 7]}) == {0: 6, 1: 7}
    assert newest_that_fit(places, {0: [6], 1: []}) == Misfit("rank 1 keeps no state")


def test_a_rank_that_others_await_in_a_new_communicator_is_late() -> None:
    place = Membership("11" * 16, "", 0, 0, 2)
    waiting, elsewhere = Standing((0, 0), 61 * SECOND, 60 * SECOND, (place,)), Standing((0, 0), 0, 0, ())
    assert late({0: waiting, 1: elsewhere}) == {1}
    assert late({0: waiting, 1: waiting}) == set()
