"""In which state a rank's memory is: whatever comes in which order, no failure is hidden."""

from hypothesis import given
from hypothesis import strategies as st

from jitckpt.agent.memory_health import MemoryHealth
from jitckpt.decisions.memory_state import HEALTHS, Health, after, snapshot_state
from jitckpt.events import EventLog

RANKS = range(3)
healths = st.sampled_from(HEALTHS)
STEPS = st.integers(0, 20)


@given(st.lists(healths, max_size=6).flatmap(lambda heard: st.tuples(st.just(heard), st.permutations(heard))))
def test_hosts_that_hear_the_same_in_another_order_come_to_the_same(
    orders: tuple[list[Health], list[Health]],
) -> None:
    found = []
    for heard in orders:
        health: Health = "healthy"
        for one in heard:
            before, health = health, after(health, one)
            assert health in (before, one)
            assert HEALTHS.index(health) >= HEALTHS.index(before), "it gets no better"
        found.append(health)
    assert found[0] == found[1]
    assert (found[0] == "healthy") == (set(orders[0]) <= {"healthy"})
    assert (found[0] == "offline") == ("offline" in orders[0])


@given(STEPS, STEPS)
def test_a_snapshot_is_under_way_until_it_is_whole_everywhere(begun: int, safe: int) -> None:
    state = snapshot_state(begun, safe)
    assert (state is None) == (safe == 0)
    assert (state == "snap") == (0 < safe < begun)
    assert (state == "completed") == (safe > 0 and begun <= safe)


heard = st.tuples(st.lists(st.sampled_from(RANKS), max_size=3), healths, st.booleans())


@given(st.lists(heard, max_size=8))
def test_what_is_told_is_what_is_known_and_no_change_is_told_twice(
    story: list[tuple[list[int], Health, bool]],
) -> None:
    """It may be told later, by a host that comes to lead."""
    log = EventLog()
    health = MemoryHealth(RANKS, log)
    health.tell(1)
    for ranks, one, leads in story:
        log.leading = leads
        health.hear(ranks, one)
        health.tell(2)
    log.leading = True
    health.tell(3)
    told: dict[int, Health] = {}
    for event in log.events:
        for rank in event["ranks"]:
            assert told.get(rank) != event["state"]
            told[rank] = event["state"]
    assert told == health._health
