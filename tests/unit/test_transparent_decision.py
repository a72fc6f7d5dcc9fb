"""The decision of transparent mode against a model of what its orders do, in all combinations of reports."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transparent_model import LOG_END, Place, Rank, World, WrongOrderError

from jitckpt.decisions.transparent.communicators import Communicator
from jitckpt.decisions.transparent.decision import FallBack, RecoveryPlan, decide
from jitckpt.decisions.transparent.orders import (
    Abort,
    DeliverError,
    FinishStep,
    LetGoOn,
    LoadFromHost,
    MakeCommunicators,
    Order,
    Reset,
    RestartServer,
    RestoreLocalState,
    RunLog,
    SaveToHost,
)
from jitckpt.decisions.transparent.report import Device, FailedCall, Report

DEVICES: tuple[Device, ...] = ("healthy", "suspect", "lost")
NONE: frozenset[int] = frozenset()
TRIED: dict[tuple[object, ...], frozenset[int]] = {}
PLACES: list[tuple[int, Place]] = [(1, "middle"), (1, "ready"), (2, "middle"), (2, "ready")]
IN_A_STEP: tuple[int, Place] = (1, "step")  # one that has failed: else it is run to its end before


def rank_at(
    ended: int, place: Place, device: Device = "healthy", before: int = 0, copies: frozenset[int] = NONE
) -> Rank:
    """Return a rank that keeps all since the state `ended - before`."""
    ready = ended + (place in ("ready", "step"))
    found = Rank(0, ended=ended, place=place, state=None if place == "step" else ended, host_copies=copies)
    found.kept_from, found.kept_to, found.host_ended = ended - before, ready, ready
    if device in ("lost", "empty"):
        found.lose()
    if device == "changed":  # which the host has a copy of, made before
        found.state, found.host_copies = None, copies | {ended}
    found.device = device
    return found


def without_kept(rank: Rank) -> Rank:
    return replace(rank, kept_from=rank.ended + 1, kept_to=rank.ended)


def variants(size: int) -> list[Rank]:
    """Return the reports to combine: of one or two ranks all around the states 1 and 2, else fewer."""
    found = [rank_at(ended, place, before=0 if size > 3 else 1) for ended, place in PLACES]
    failed = [*PLACES[:2], IN_A_STEP, *PLACES[2:]]
    if size > 3:
        found += [rank_at(ended, place, "suspect") for ended, place in failed[1:4]]
        return found + [rank_at(ended, place, "lost") for ended, place in failed[:4]]
    found += [rank_at(ended, place) for ended, place in PLACES]
    # The image before a step is whole, but the host has still to make calls of the step.
    found += [replace(rank_at(1, "middle", device), kept_to=2) for device in DEVICES]
    found += [rank_at(ended, place, "suspect") for ended, place in failed]
    found += [rank_at(ended, place, "lost") for ended, place in failed]
    found += [rank_at(ended, place, "changed") for ended, place in PLACES[:2]]
    if size == 3:
        return found
    found += [
        rank_at(ended, place, device, before, frozenset(copies))
        for (ended, place), before, copies in product(failed, (0, 1), ((), (1,), (2,), (1, 2)))
        for device in ("suspect", "empty", "changed", "lost")
        if device != "changed" or place != "step"
    ]
    return [*found, *(without_kept(rank) for rank in found[:20])]


# The shards of one to four ranks, in every way that is different.
MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(0,)],
    2: [(0, 0), (0, 1)],
    3: [(0, 0, 0), (0, 0, 1), (0, 1, 2)],
    4: [(0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 1), (0, 0, 1, 2), (0, 1, 2, 3)],
}


def jobs(size: int, kinds: Sequence[Rank]) -> Iterator[list[Rank]]:
    """Yield every job of that size; of jobs that differ only in the order of replicas or shards, one."""
    for shards in MESHES[size]:
        # How many shards there are of each number of replicas.
        counts = Counter(shards.count(shard) for shard in sorted(set(shards)))
        groups = (
            combinations_with_replacement([*combinations_with_replacement(kinds, replicas)], number)
            for replicas, number in sorted(counts.items(), reverse=True)
        )
        for chosen in product(*groups):
            ranks = [kind for group in chosen for shard in group for kind in shard]
            yield [replace(kind, number=n, shard=shards[n]) for n, kind in enumerate(ranks)]


def alone(state: int) -> list[list[Order]]:
    """Return all that a rank can do by itself to come to hold `state`."""
    reset, load = Reset(state), LoadFromHost(state, 0)
    begins: list[list[Order]] = [[Abort()], [Abort(), FinishStep(state)], []]
    ends: list[list[Order]] = [
        [reset],
        [SaveToHost(state), RestartServer(), reset, load],
        [reset, load],
        [RestartServer(), reset, load],
    ]
    return [[*begin, *end] for begin, end in product(begins, ends)]


def possible_alone(rank: Rank) -> frozenset[int]:
    """Return the states that a rank can come to hold by itself: try all there is."""
    # What the model's orders look at.
    content = (rank.device, rank.state, rank.ended, rank.place, rank.kept_from, rank.kept_to, rank.host_ended)
    key = (*content, rank.images, rank.host_copies, rank.right)
    if key not in TRIED:
        TRIED[key] = frozenset(state for state in range(5) if any(works(rank, o) for o in alone(state)))
    return TRIED[key]


def works(rank: Rank, orders: Sequence[Order]) -> bool:
    """Return whether it then has a state from which its log can be run again."""
    tried = replace(rank, number=0)
    try:
        for order in orders:
            tried.do(order, 1)
        ready = tried.ended <= tried.host_ended
    except WrongOrderError:
        return False
    return tried.device == "healthy" and tried.state is not None and ready


def possible(ranks: Sequence[Rank]) -> list[int]:
    """Return the states that the job can be brought to, from the model alone."""
    own = [(rank, possible_alone(rank)) for rank in ranks]
    given = [(rank, possible_alone(replace(rank, images=NONE))) for rank in ranks]
    return [
        state
        for state in frozenset().union(*(states for _, states in own))
        if all(
            state in states
            or (
                rank.kept_from <= state <= min(rank.kept_to, rank.host_ended)
                and any(state in theirs for other, theirs in given if other.shard == rank.shard)
            )
            for rank, states in own
        )
    ]


def check(ranks: Sequence[Rank]) -> World | None:
    """Decide, carry it out, and see that the job goes on as if nothing had been; None where it can't."""
    world = World([replace(rank) for rank in ranks])
    decided = decide(world.reports())
    states = possible(ranks)
    if isinstance(decided, FallBack):
        assert not states, (decided, ranks)
        return None
    assert decided.state == max(states)
    world.begin(decided.orders)
    world.run()
    for rank in world.ranks.values():
        assert rank.resumed
        assert rank.right
        assert rank.ended == decided.state or rank.got_error
    return world


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_combination_of_reports(size: int) -> None:
    outcomes = {check(ranks) is None for ranks in jobs(size, variants(size))}
    assert outcomes == {True, False}


@pytest.mark.parametrize("size", [2, 3])
def test_states_that_some_have_on_their_devices_and_others_in_images_of_their_own(size: int) -> None:
    found = [rank_at(*place, device) for place, device in product(PLACES[1:3], DEVICES)]
    # What a device has after a step of which the image is whole is told of nobody.
    last = [
        rank_at(1, "middle", before=1),
        rank_at(1, "middle", "suspect"),
        rank_at(2, "middle", "lost", before=1),
    ]
    kinds = [*found, *(replace(rank, kept_to=2, host_ended=2, images=frozenset({2})) for rank in last)]
    outcomes = {check(ranks) is None for ranks in jobs(size, kinds)}
    assert outcomes == {True, False}
    # Whose own is an image has nothing for others.
    mixed = [rank_at(2, "middle", "lost"), replace(rank_at(2, "middle", "lost"), images=frozenset({2}))]
    assert check([replace(rank, number=number) for number, rank in enumerate(mixed)]) is None


def with_barrier(ranks: Sequence[Rank]) -> bool:
    """Whether the step barrier allows it: no rank has begun a step that another is not ready for."""
    reports = [rank.report() for rank in ranks]
    return max(report.begun for report in reports) <= min(report.ready for report in reports)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_with_the_step_barrier_one_healthy_device_in_each_shard_is_enough(size: int) -> None:
    kinds = [rank_at(*place, device) for place in PLACES for device in DEVICES]
    kinds.append(rank_at(*IN_A_STEP, "lost"))
    if size == 4:
        kinds = [kind for kind in kinds if kind.device != "suspect"]
    seen = 0
    for ranks in jobs(size, kinds):
        shards = {rank.shard for rank in ranks}
        if with_barrier(ranks) and {rank.shard for rank in ranks if rank.device == "healthy"} == shards:
            seen += 1
            assert check(ranks) is not None, ranks
    assert seen > size


def test_without_the_step_barrier_stages_of_a_pipeline_may_have_no_state_in_common() -> None:
    ahead, behind = rank_at(2, "middle", before=1), rank_at(1, "middle")
    ranks = [replace(r, number=n, shard=n // 2) for n, r in enumerate([ahead, ahead, behind, behind])]
    assert not with_barrier(ranks)
    assert check(ranks) is None


def interrupted(
    ranks: Sequence[Rank], lost: Sequence[int], plan: RecoveryPlan, choose: str
) -> Iterator[World]:
    """Yield the job after every single step of a recovery, where `lost` lose their devices all at once."""
    world = World([replace(rank) for rank in ranks])
    world.begin(plan.orders)
    while not world.over():
        after = world.copy()
        for rank in lost:
            after.ranks[rank].lose()
        yield after
        able = world.able()
        world.go_on(able[0] if choose == "first" else able[-1])


@pytest.mark.parametrize("choose", ["first", "last"])
def test_a_second_failure_at_every_step_of_a_recovery_loses_nothing(choose: str) -> None:
    for ranks in jobs(2, variants(3)):
        plan = decide([rank.report() for rank in ranks])
        if isinstance(plan, FallBack):
            continue
        for world in interrupted(ranks, [], plan, choose):
            # Nothing but a transient error: all that could be brought back before still can.
            assert check([*world.ranks.values()]) is not None
        for lost in ([0], [1], [0, 1]):
            for world in interrupted(ranks, lost, plan, choose):
                check([*world.ranks.values()])  # right, or no rank has the state any more


@st.composite
def large_jobs(draw: st.DrawFn) -> list[Rank]:
    size = draw(st.integers(5, 12))
    shards = draw(st.integers(1, 4))
    kinds = draw(st.lists(st.sampled_from(variants(2)), min_size=1, max_size=5))
    return [
        replace(draw(st.sampled_from(kinds)), number=rank, shard=draw(st.integers(0, shards - 1)))
        for rank in range(size)
    ]


@given(large_jobs())
def test_larger_jobs(ranks: list[Rank]) -> None:
    check(ranks)


@given(st.data())
def test_failures_upon_failures(data: st.DataObject) -> None:
    healthy = [rank_at(1, "middle", before=1), rank_at(1, "ready"), rank_at(2, "middle", before=1)]
    shards = data.draw(st.integers(1, 3))
    size = shards * data.draw(st.integers(2, 3))
    one = data.draw(st.sampled_from(healthy))  # all at the same place, so at first nothing is impossible
    world = World([replace(one, number=n, shard=n % shards) for n in range(size)])
    numbers = st.sampled_from(range(size))
    for _ in range(data.draw(st.integers(1, 4))):
        before = [replace(rank) for rank in world.ranks.values()]
        decided = decide(world.reports())
        if isinstance(decided, FallBack):
            assert not possible(before)
            return
        world.begin(decided.orders)
        for _ in range(data.draw(st.integers(0, 40))):
            if not world.over():
                world.go_on(data.draw(st.sampled_from(world.able())))
        for rank in data.draw(st.sets(numbers, max_size=2)):
            world.ranks[rank].lose()
        for rank in data.draw(st.sets(numbers, max_size=1)):
            if world.ranks[rank].device == "healthy":
                world.ranks[rank].device = "suspect"
    check([*world.ranks.values()])


# The kinds of failures, with every order, for the reader.


def orders(ranks: Sequence[Rank]) -> dict[int, tuple[Order, ...]]:
    world = check(ranks)
    assert world is not None
    plan = decide([rank.report() for rank in ranks])
    assert isinstance(plan, RecoveryPlan)
    return plan.orders


def two(first: Rank, second: Rank, shards: tuple[int, int] = (0, 0)) -> list[Rank]:
    return [replace(first, number=0, shard=shards[0]), replace(second, number=1, shard=shards[1])]


MADE = MakeCommunicators(())
AGAIN = (MADE, RestoreLocalState(1), RunLog(1, LOG_END), LetGoOn())
STAYS = (Abort(), Reset(1), *AGAIN)
GIVES = (Abort(), SaveToHost(1), Reset(1), *AGAIN)


def test_a_transient_collective_failure_leaves_the_state_on_the_devices() -> None:
    assert orders(two(rank_at(1, "middle"), rank_at(1, "middle"))) == {0: STAYS, 1: STAYS}


def test_a_suspect_driver_takes_its_state_through_the_host() -> None:
    through = (Abort(), SaveToHost(1), RestartServer(), Reset(1), LoadFromHost(1, 1), *AGAIN)
    assert orders(two(rank_at(1, "middle"), rank_at(1, "middle", "suspect")))[1] == through


def test_all_go_through_the_host_where_nobody_knows_which_server_is_at_fault() -> None:
    ranks = two(rank_at(1, "middle"), rank_at(2, "ready", before=1), shards=(0, 0))
    for rank in ranks:
        rank.kept_from = 1
    plan = decide([rank.report() for rank in two(rank_at(1, "ready"), rank_at(2, "middle"))], False, False)
    assert isinstance(plan, RecoveryPlan)
    after = (MADE, RestoreLocalState(2), RunLog(2, LOG_END), LetGoOn())
    renewed = (SaveToHost(2), RestartServer(), Reset(2))
    assert plan.orders[0] == (Abort(), FinishStep(2), *renewed, LoadFromHost(2, 0), *after)
    assert plan.orders[1] == (Abort(), *renewed, LoadFromHost(2, 1), *after)


def test_a_lost_device_takes_its_state_from_a_replica_and_what_is_its_own_from_the_host() -> None:
    taken = (RestartServer(may_stay=True), Reset(1), LoadFromHost(1, 0), *AGAIN)
    assert orders(two(rank_at(1, "middle"), rank_at(1, "middle", "lost"))) == {0: GIVES, 1: taken}


def test_a_failure_in_the_optimizer_step_takes_the_next_state() -> None:
    found = orders(two(rank_at(2, "middle"), rank_at(*IN_A_STEP, "lost")))
    after = (MADE, RestoreLocalState(2), RunLog(2, LOG_END), LetGoOn())
    assert found[1] == (RestartServer(may_stay=True), Reset(2), LoadFromHost(2, 0), *after)


def test_replicas_before_the_step_and_behind_it_are_brought_to_its_end() -> None:
    """What each has still to do of the step it does by itself: nobody runs a finished step again."""
    after = (MADE, RestoreLocalState(2), RunLog(2, LOG_END), LetGoOn())
    ready, ended = rank_at(1, "ready"), rank_at(2, "middle")
    assert orders(two(ready, ended))[0] == (Abort(), FinishStep(2), Reset(2), *after)
    through = (SaveToHost(2), RestartServer(), Reset(2), LoadFromHost(2, 0), *after)
    suspect = rank_at(1, "ready", "suspect")
    assert orders(two(suspect, ended))[0] == (Abort(), FinishStep(2), *through)


def test_a_rank_whose_minibatch_is_not_over_takes_the_others_back() -> None:
    """It has still to give its host what the minibatch computes, so the step can't be skipped."""
    ahead = rank_at(2, "middle", before=1)
    in_the_step = replace(rank_at(1, "middle"), kept_to=2)
    for behind in (rank_at(1, "middle"), in_the_step):
        found = orders(two(ahead, behind))
        assert found[0][:3] == (Abort(), Reset(1), LoadFromHost(1, 1))
        assert found[1] == GIVES
    # Without the log of the minibatch before that can't be done.
    impossible = decide([rank.report() for rank in two(replace(ahead, kept_from=2), in_the_step)])
    assert isinstance(impossible, FallBack)
    assert "rank 1 has not made all calls of step 2" in impossible.reason


def test_two_ranks_at_once() -> None:
    lost, well = rank_at(1, "middle", "lost"), rank_at(1, "middle")
    ranks = [replace(r, number=n, shard=n % 2) for n, r in enumerate([lost, well, well, lost])]
    found = orders(ranks)
    assert LoadFromHost(1, 2) in found[0]
    assert LoadFromHost(1, 1) in found[3]


def test_replicas_take_turns_in_giving_their_state() -> None:
    lost, well = rank_at(1, "middle", "lost"), rank_at(1, "middle")
    ranks = [replace(r, number=n) for n, r in enumerate([well, well, lost, lost])]
    found = orders(ranks)
    assert LoadFromHost(1, 0) in found[2]
    assert LoadFromHost(1, 1) in found[3]


def test_without_a_replica_the_job_ends_with_what_would_have_protected_it() -> None:
    ranks = two(rank_at(1, "middle"), rank_at(1, "middle", "lost"), shards=(0, 1))
    reports = [rank.report() for rank in ranks]
    assert decide(reports) == FallBack(
        False,
        "A transparent recovery is impossible: no device has the state after step 1 of shard 1 any more, "
        "which no other rank holds; a further data-parallel replica of it would have protected the job. The "
        "script has registered no restore function, so the job ends, or begins anew if restarts are left; "
        "jitckpt.init with saves every so many steps (docs/guides/user-level.md) would have let it go on.",
    )
    restarted = decide(reports, restorable=True)
    assert isinstance(restarted, FallBack)
    assert restarted.restart
    assert restarted.reason.endswith("The job restarts from the best save.")


def test_where_all_devices_of_a_shard_are_lost_it_is_named() -> None:
    ranks = two(rank_at(1, "middle", "lost"), rank_at(1, "middle", "lost"))
    decided = decide([rank.report() for rank in ranks])
    assert isinstance(decided, FallBack)
    assert "the state after step 1 of shard 0 any more, held by ranks 0, 1; a further" in decided.reason


def test_where_others_have_come_further_the_lost_devices_are_named_nevertheless() -> None:
    lost = [Report(rank, 0, "lost", 18, 18, 18, 18, 18, host_ended=18) for rank in (0, 2)]
    well = [Report(rank, 1, "healthy", 18, 18, 19, 18, 19, host_ended=19) for rank in (1, 3)]
    decided = decide([*lost, *well])
    assert isinstance(decided, FallBack)
    assert "the state after step 18 of shard 0 any more, held by ranks 0, 2; a further" in decided.reason


def test_a_rank_without_its_own_part_ends_the_job_by_name() -> None:
    bare = without_kept(rank_at(1, "middle", "lost"))
    decided = decide([rank.report() for rank in two(rank_at(1, "middle"), bare)])
    assert isinstance(decided, FallBack)
    assert "host memory of rank 1 lacks its rank-local state after step 1" in decided.reason
    assert "it has none yet" in decided.reason


def test_calls_that_outgrow_the_log_are_what_a_recovery_fails_of() -> None:
    full = [Report(rank, kept_from=1, kept_to=0, device="lost", outgrown=12) for rank in range(2)]
    decided = decide(full)
    assert isinstance(decided, FallBack)
    assert "ranks 0, 1 made more calls since step 12 than the log holds" in decided.reason
    assert "raise JITCKPT_PROXY_LOG_BYTES" in decided.reason
    decided = decide([rank_at(12, "middle").report(), replace(full[1], outgrown=0)])
    assert isinstance(decided, FallBack)
    assert "rank 1 made more calls since the beginning than" in decided.reason


def test_an_ended_worker_ends_the_transparent_recovery() -> None:
    decided = decide([Report(0), Report(1, worker_alive=False)])
    assert isinstance(decided, FallBack)
    assert "the worker process of rank 1 has ended" in decided.reason


def test_the_programs_own_error_is_delivered_the_second_time() -> None:
    failure = FailedCall(40, "cudaErrorAssert")
    failed = replace(rank_at(1, "middle", "lost"), failure=failure)
    first = orders(two(rank_at(1, "middle"), failed))
    assert first[1][-2:] == (RunLog(1, LOG_END), LetGoOn())
    again = orders(two(rank_at(1, "middle"), replace(failed, failure_before=failure)))
    assert again[1][-3:] == (RunLog(1, 40), DeliverError(failure), LetGoOn())
    assert again[0] == first[0]
    # Another call, or another error at the same one, is another failure.
    for other in (FailedCall(41, "cudaErrorAssert"), FailedCall(40, "cudaErrorUnknown")):
        assert orders(two(rank_at(1, "middle"), replace(failed, failure_before=other))) == first


def test_a_step_that_fails_again_is_not_made_by_the_recovery() -> None:
    failure = FailedCall(90, "cudaErrorInvalidValue")
    failing = replace(rank_at(1, "ready"), failure=failure, failure_before=failure)
    plan = decide([rank.report() for rank in two(failing, rank_at(1, "ready"))])
    assert isinstance(plan, RecoveryPlan)
    assert plan.orders[0][:2] == (Abort(), Reset(1))
    assert plan.orders[0][-2:] == (DeliverError(failure), LetGoOn())
    decided = decide([rank.report() for rank in two(failing, rank_at(2, "middle"))])
    assert isinstance(decided, FallBack)
    assert "rank 0 fails again before the end of step 2" in decided.reason


def test_communicators_are_made_by_all_ranks_in_one_order() -> None:
    world, pair = Communicator("b", (0, 1)), Communicator("a", (1, 0))
    # Each made them in another order at first.
    ranks = [
        replace(rank, tables=tables)
        for rank, tables in zip(
            two(rank_at(1, "middle"), rank_at(1, "middle")), [(world, pair), (pair, world)], strict=True
        )
    ]
    found = orders(ranks)
    assert found[0] == found[1]
    reports = [replace(ranks[0], tables=(world,)).report(), ranks[1].report()]
    decided = decide(reports)
    assert isinstance(decided, FallBack)
    assert "the communicator a was destroyed or made on some of its members only" in decided.reason


def test_reports_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="reported twice"):
        decide([Report(0), Report(0)])
    with pytest.raises(ValueError, match="can't have ended step 2, begun 1"):
        Report(0, ended=2, begun=1, ready=3)
    assert Report(0, begun=1, ready=1).phase == "optimizer"
    assert Report(0, ready=1).phase == "forward or backward"
