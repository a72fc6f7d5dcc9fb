"""The agent's decisions, against a simulated job whose ranks misbehave in every way there is."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.decisions.hang import Waiting
from jitckpt.decisions.recovery import (
    GOING_ON_GRACE,
    LOCAL_STATE_SECONDS,
    NEWER_STEP_GRACE,
    STOPPED_GRACE,
    TERMINATION_GRACE,
    Close,
    EndRanks,
    KnownJob,
    LetEnd,
    OrderSave,
    Outcome,
    Rank,
    Wait,
    WriteLocalState,
    brings_no_progress,
    decide,
    incurable,
    mistakes,
    whole_steps,
)

DEADLINE = 60.0


@dataclass(frozen=True)
class Behaviour:
    """What one simulated rank does, each with its time in seconds; None: never."""

    registers: float | None
    exits: float | None
    exit_code: int
    raises: float | None
    dies: float | None  # its end begins
    alarm: float | None
    begins_save: float | None  # seconds after the order; None: only with its answer
    answers_order: float | None  # seconds after the order
    answer: str  # ended, failed, or die
    steps_ahead: int
    obeys_sigterm: float | None  # seconds after it


@dataclass
class Simulation:
    behaviours: list[Behaviour]
    shards: int
    restarts_left: int
    interrupts: list[float]
    ranks: list[Rank] = field(default_factory=list)
    now: float = 0.0
    trouble_at: float | None = None
    ended_at: float | None = None
    due: list[tuple[float, int, str]] = field(default_factory=list)

    def run(self) -> tuple[Outcome, KnownJob]:
        self.ranks = [Rank(i, shard=i % self.shards, shards=self.shards) for i in range(len(self.behaviours))]
        for i, b in enumerate(self.behaviours):
            events = {"register": b.registers, "exit": b.exits, "raise": b.raises, "dies": b.dies}
            events["alarm"] = b.alarm
            self.due += [(time, i, what) for what, time in events.items() if time is not None]
        self.due += [(time, -1, "interrupt") for time in self.interrupts]
        job = KnownJob(tuple(self.ranks), self.now, DEADLINE, self.restarts_left)
        for _ in range(1000):
            job = replace(job, ranks=tuple(self.ranks), now=self.now)
            if job.whole_at is None and whole_steps(self.ranks):
                job = replace(job, whole_at=self.now)
            match decide(job):
                case Close(outcome):
                    return outcome, job
                case OrderSave(ranks):
                    self.order_save(ranks)
                    if job.save_ordered_at is None:
                        job = replace(job, save_ordered_at=self.now)
                case EndRanks(kill, terminate):
                    self.check_that_nothing_is_lost(job)
                    self.end(kill, terminate)
                    if job.ending_since is None:
                        job = replace(job, ending_since=self.now)
                case WriteLocalState():
                    assert not any(rank.alive for rank in self.ranks)
                    job = replace(job, local_state_written=True)
                case Wait(until):
                    job = self.advance(job, until)
        raise AssertionError("the agent goes round in circles")

    def order_save(self, ranks: tuple[int, ...]) -> None:
        assert ranks
        for i in ranks:
            assert self.ranks[i].can_save
            assert self.ranks[i].save == "none"
            self.change(i, save="ordered")
            answers = self.behaviours[i].answers_order
            begins = self.behaviours[i].begins_save
            if begins is not None and (answers is None or begins < answers):
                self.due.append((self.now + begins, i, "begun"))
            if answers is not None:
                self.due.append((self.now + answers, i, self.behaviours[i].answer))

    def end(self, kill: tuple[int, ...], terminate: tuple[int, ...]) -> None:
        assert kill or terminate
        for i in kill:
            self.change(i, told="kill")
            self.due.append((self.now, i, "killed"))
        for i in terminate:
            assert not self.ranks[i].registered
            self.change(i, told="terminate")
            obeys = self.behaviours[i].obeys_sigterm
            if obeys is not None:
                self.due.append((self.now + obeys, i, "terminated"))

    def change(self, i: int, **fields: object) -> None:
        self.ranks[i] = replace(self.ranks[i], **fields)  # type: ignore[arg-type]

    def advance(self, job: KnownJob, until: float | None) -> KnownJob:
        self.due.sort()
        if self.due and (until is None or self.due[0][0] <= until):
            time, i, what = self.due.pop(0)
            self.now = max(self.now, time)
            return self.happen(job, i, what)
        assert until is not None, f"waits for ever: {job}"
        assert until > self.now
        self.now = until
        return job

    def happen(self, job: KnownJob, i: int, what: str) -> KnownJob:
        if what == "interrupt":
            self.trouble_at = self.now if self.trouble_at is None else self.trouble_at
            return replace(job, interrupted=True, impatient=job.interrupted)
        rank, behaviour = self.ranks[i], self.behaviours[i]
        if not rank.alive:
            return job
        match what:
            case "register":
                self.change(i, registered=True, reachable=True)
            case "exit":
                self.change(i, exit_code=behaviour.exit_code)
            case "raise" if rank.registered:
                self.change(i, raised=True)
            case "dies" if rank.registered:
                self.change(i, dying=True, reachable=False)
            case "die" | "killed":
                self.change(i, exit_code=-9)
            case "terminated":
                self.change(i, exit_code=-15)
            case "begun":
                self.change(i, saving_step=10 + behaviour.steps_ahead)
            case "ended":
                self.change(i, save="ended", saved_step=10 + behaviour.steps_ahead)
            case "failed":
                self.change(i, save="failed")
        alarm = what == "alarm" and rank.registered
        if self.trouble_at is None and (alarm or self.ranks[i].failed):
            self.trouble_at = self.now
        return replace(job, alarmed=job.alarmed or alarm)

    def check_that_nothing_is_lost(self, job: KnownJob) -> None:
        """Ranks may be ended only if a whole replica is saved, the deadline is over, or nobody can save."""
        deadline_over = job.save_ordered_at is not None and self.now >= job.save_ordered_at + DEADLINE
        assert (
            job.ending_since is not None
            or whole_steps(self.ranks)
            or deadline_over
            or job.impatient
            or not any(rank.can_save for rank in self.ranks)
        )


seconds = st.floats(min_value=0, max_value=200)
behaviours = st.builds(
    Behaviour,
    registers=st.none() | seconds,
    exits=st.none() | seconds,
    exit_code=st.sampled_from([0, 0, 1, -9]),
    raises=st.none() | seconds,
    dies=st.none() | seconds,
    alarm=st.none() | seconds,
    begins_save=st.none() | seconds,
    answers_order=st.none() | seconds,
    answer=st.sampled_from(["ended", "ended", "failed", "die"]),
    steps_ahead=st.integers(0, 1),
    obeys_sigterm=st.none() | seconds,
)
simulations = st.builds(
    Simulation,
    behaviours=st.lists(behaviours, min_size=1, max_size=6),
    shards=st.integers(1, 2),
    restarts_left=st.integers(0, 2),
    interrupts=st.lists(seconds, max_size=2),
)


def is_undisturbed_for_ever(simulation: Simulation) -> bool:
    """A job in which somebody runs on for ever and nobody fails has no end, and needs none."""
    return any(b.exits is None for b in simulation.behaviours) and not simulation.interrupts


@given(simulations)
def test_every_job_ends_and_no_save_is_cut_short(simulation: Simulation) -> None:
    if is_undisturbed_for_ever(simulation):
        simulation.interrupts = [150.0]
    outcome, job = simulation.run()
    assert not any(rank.alive for rank in job.ranks)
    exit_codes = {rank.exit_code for rank in job.ranks}
    if job.interrupted:
        assert outcome in (Outcome.INTERRUPTED, Outcome.SUCCEEDED)
    elif job.ending_since is not None or exit_codes != {0}:
        assert outcome is (Outcome.RESTART if job.restarts_left else Outcome.FAILED)
    elif not any(rank.dying or rank.raised for rank in job.ranks):
        # Of one that is told dead, or to have raised, and then exits with 0, decide() says success or failure
        # as others stand.
        assert outcome is Outcome.SUCCEEDED
    if outcome is Outcome.SUCCEEDED:
        assert exit_codes == {0}
        assert job.ending_since is None


@given(simulations)
def test_the_time_from_the_failure_to_the_end_is_limited(simulation: Simulation) -> None:
    """Nobody prolongs it: not a rank that registers while others save, nor one that dies meanwhile."""
    simulation.interrupts = [*simulation.interrupts, 150.0]
    simulation.run()
    if simulation.trouble_at is not None:
        # A newer step is waited for at most as long as the first took, which the deadline limits.
        longest = 200 + 2 * DEADLINE + NEWER_STEP_GRACE + TERMINATION_GRACE
        assert simulation.now <= simulation.trouble_at + longest


def registered(rank: int, **fields: object) -> Rank:
    return replace(Rank(rank, registered=True, reachable=True), **fields)  # type: ignore[arg-type]


def job(*ranks: Rank, **fields: object) -> KnownJob:
    return replace(KnownJob(ranks, now=100.0, save_deadline=DEADLINE, restarts_left=1), **fields)  # type: ignore[arg-type]


KILLED = registered(1, exit_code=-9)


def test_a_healthy_job_is_left_alone() -> None:
    assert decide(job(registered(0), registered(1))) == Wait()


def test_a_rank_that_ends_well_is_no_failure() -> None:
    assert decide(job(registered(0), registered(1, exit_code=0))) == Wait()


def test_when_a_rank_dies_all_others_save() -> None:
    assert decide(job(registered(0), KILLED, registered(2))) == OrderSave((0, 2))


def test_ranks_that_go_back_to_a_snapshot_are_not_asked_to_end() -> None:
    """What their programs would do then has no use, and may reach the outside."""
    dead = Rank(1, exit_code=-9)
    assert decide(job(Rank(0), dead)) == EndRanks((), (0,))
    assert decide(job(Rank(0), dead, goes_back=True)) == EndRanks((0,), ())


@pytest.mark.parametrize("why", ["alarmed", "interrupted"])
def test_a_hang_and_a_preemption_make_all_ranks_save(why: str) -> None:
    assert decide(job(registered(0), registered(1), **{why: True})) == OrderSave((0, 1))


def test_the_agent_waits_for_the_save_until_the_deadline() -> None:
    saving = job(registered(0, save="ordered"), KILLED, save_ordered_at=99.0)
    assert decide(saving) == Wait(159.0)
    assert decide(replace(saving, now=159.0)) == EndRanks(kill=(0,), terminate=())


def test_a_rank_that_stays_stopped_is_not_waited_for_where_another_has_its_state() -> None:
    """It may have been stopped for a moment by somebody who looks at it."""
    stopped = registered(0, save="ordered", stopped_since=100.0)
    beside = job(stopped, registered(2, save="ordered"), KILLED, save_ordered_at=99.0)
    assert decide(beside) == Wait(100.0 + STOPPED_GRACE)
    assert decide(replace(beside, now=100.0 + STOPPED_GRACE)) == Wait(159.0), "rank 2 still saves"


def test_a_stopped_rank_that_alone_has_the_state_is_waited_for_until_the_deadline() -> None:
    """Two of three hosts were lost at once, and somebody stops the process of the third for a while."""
    stopped = registered(0, save="ordered", stopped_since=100.0)
    saving = job(stopped, KILLED, registered(2, exit_code=-9), save_ordered_at=99.0)
    assert decide(replace(saving, now=100.0 + STOPPED_GRACE)) == Wait(159.0)
    assert decide(replace(saving, now=159.0)) == EndRanks(kill=(0,), terminate=())
    another = replace(saving, ranks=(stopped, replace(stopped, rank=1), registered(2, exit_code=-9)))
    assert decide(replace(another, now=100.0 + STOPPED_GRACE)) == Wait(159.0), "either may be continued"
    assert decide(replace(saving, now=100.0 + STOPPED_GRACE, impatient=True)) == EndRanks((0,), ())


def test_a_stopped_rank_is_not_waited_for_where_that_saves_nothing() -> None:
    """It is what hangs; or the state is elsewhere, or lost anyway."""
    stopped = registered(0, save="ordered", stopped_since=100.0, shards=2)
    other = registered(1, save="ended", saved_step=7, shard=1, shards=2)
    late = 100.0 + STOPPED_GRACE
    hangs = job(stopped, other, save_ordered_at=99.0, now=late, alarmed=True)
    assert decide(hangs) == EndRanks(kill=(0, 1), terminate=())
    kept = job(stopped, other, registered(2, exit_code=-9), save_ordered_at=99.0, now=late, in_memory=7)
    assert decide(kept) == EndRanks(kill=(0, 1), terminate=())
    lost = job(stopped, replace(other, exit_code=-9, save="none"), save_ordered_at=99.0, now=late)
    assert decide(lost) == EndRanks(kill=(0,), terminate=())


def test_one_whole_replica_is_enough() -> None:
    """Rank 3 is stopped and never answers: nobody waits for it."""
    ranks = (
        registered(0, shard=0, shards=2, save="ended", saved_step=7),
        registered(1, shard=1, shards=2, save="ended", saved_step=7),
        registered(2, shard=0, shards=2, exit_code=-9),
        registered(3, shard=1, shards=2, save="ordered"),
    )
    assert decide(job(*ranks, save_ordered_at=99.0)) == EndRanks(kill=(0, 1, 3), terminate=())


def test_shards_of_different_steps_are_no_whole_replica() -> None:
    ranks = (
        registered(0, shard=0, shards=2, save="ended", saved_step=7),
        registered(1, shard=1, shards=2, save="ended", saved_step=8),
        registered(2, shard=0, shards=2, save="ordered"),
        registered(3, shard=1, shards=2, exit_code=-9),
    )
    assert whole_steps(ranks) == set()
    assert decide(job(*ranks, save_ordered_at=99.0)) == Wait(159.0)
    saved = (*ranks[:2], replace(ranks[2], save="ended", saved_step=8), ranks[3])
    assert whole_steps(saved) == {8}


def test_a_newer_step_that_is_being_saved_is_waited_for() -> None:
    """Rank 0's host was held before the optimizer step, rank 1's after it."""
    ranks = (
        registered(0, save="ended", saved_step=7),
        registered(1, save="ordered", saving_step=8),
        registered(2, exit_code=-9),
    )
    saving = job(*ranks, save_ordered_at=98.0, whole_at=100.0)
    until = 102.0 + NEWER_STEP_GRACE
    assert decide(saving) == Wait(until)
    assert decide(replace(saving, now=until)) == EndRanks(kill=(0, 1), terminate=())
    for end in ({"save": "ended", "saved_step": 8}, {"save": "failed"}, {"exit_code": -9}):
        over = replace(saving, ranks=(ranks[0], replace(ranks[1], **end), ranks[2]))
        assert isinstance(decide(over), EndRanks)
    older = replace(saving, ranks=(ranks[0], replace(ranks[1], saving_step=7), ranks[2]))
    assert isinstance(decide(older), EndRanks)


def test_a_newer_step_that_cannot_become_whole_is_not_waited_for() -> None:
    ranks = (
        registered(0, shard=0, shards=2, save="ended", saved_step=7),
        registered(1, shard=1, shards=2, save="ended", saved_step=7),
        registered(2, shard=0, shards=2, save="ordered", saving_step=8),
        registered(3, shard=1, shards=2, exit_code=-9),
    )
    assert isinstance(decide(job(*ranks, save_ordered_at=99.0, whole_at=100.0)), EndRanks)
    both = (*ranks[:3], replace(ranks[3], exit_code=None, save="ordered", saving_step=8))
    assert isinstance(decide(job(*both, save_ordered_at=99.0, whole_at=100.0)), Wait)


def test_a_rank_that_has_not_begun_to_save_gets_a_moment_to_say_of_which_step() -> None:
    ranks = (registered(0, save="ended", saved_step=7), registered(1, save="ordered"), KILLED)
    saving = job(*ranks, save_ordered_at=98.0, whole_at=100.0)
    assert decide(saving) == Wait(100.0 + NEWER_STEP_GRACE)
    assert isinstance(decide(replace(saving, now=100.0 + NEWER_STEP_GRACE)), EndRanks)


def test_a_rank_inside_of_its_iteration_is_waited_for_until_it_has_saved_what_it_alone_knows() -> None:
    saved, going_on = registered(0, save="ended", saved_step=7), registered(1, save="ordered", goes_on=True)
    saving = job(saved, going_on, KILLED, save_ordered_at=98.0, whole_at=100.0)
    until = 102.0 + GOING_ON_GRACE
    assert decide(saving) == Wait(until)
    begun = replace(going_on, saving_step=7)
    assert decide(replace(saving, ranks=(saved, begun, KILLED))) == Wait(until)
    assert isinstance(decide(replace(saving, now=until)), EndRanks)
    for end in ({"save": "ended", "saved_step": 7}, {"save": "failed"}, {"exit_code": -9}):
        over = replace(saving, ranks=(saved, replace(begun, **end), KILLED))
        assert isinstance(decide(over), EndRanks)


def test_a_second_failure_during_the_save() -> None:
    """The only rank that saves dies: there is no more to wait for."""
    ranks = (registered(0, save="ordered", exit_code=-9), KILLED, registered(2, save="failed"))
    assert decide(job(*ranks, save_ordered_at=99.0)) == EndRanks(kill=(2,), terminate=())


def test_a_rank_that_raised_is_a_failure_before_it_has_ended() -> None:
    ranks = (registered(0), registered(1, raised=True))
    assert decide(job(*ranks)) == OrderSave((0,))
    saved = (registered(0, save="ended", saved_step=3), ranks[1])
    assert decide(job(*saved, save_ordered_at=99.0)) == EndRanks(kill=(0, 1), terminate=())


def test_a_rank_that_dies_is_a_failure_before_it_has_ended() -> None:
    ranks = (registered(0), registered(1, dying=True, reachable=False))
    assert decide(job(*ranks)) == OrderSave((0,))
    saved = (registered(0, save="ended", saved_step=3), ranks[1])
    assert decide(job(*saved, save_ordered_at=99.0)) == EndRanks(kill=(0, 1), terminate=())


def test_a_rank_that_dies_while_it_saves_is_not_waited_for() -> None:
    ranks = (registered(0, save="ordered", dying=True, reachable=False), KILLED, registered(2, save="failed"))
    assert decide(job(*ranks, save_ordered_at=99.0)) == EndRanks(kill=(0, 2), terminate=())


def test_a_rank_that_raises_while_it_saves_is_waited_for() -> None:
    ranks = (registered(0, save="ordered", raised=True), KILLED)
    assert decide(job(*ranks, save_ordered_at=99.0)) == Wait(159.0)


def test_a_rank_whose_training_has_finished_is_not_waited_for() -> None:
    ranks = (registered(0, reachable=False), KILLED)
    assert decide(job(*ranks)) == EndRanks(kill=(0,), terminate=())


def test_ranks_that_never_registered_end_as_under_torchrun() -> None:
    ending = job(Rank(0), Rank(1, exit_code=1))
    assert decide(ending) == EndRanks(kill=(), terminate=(0,))
    told = replace(ending, ranks=(Rank(0, told="terminate"), ending.ranks[1]), ending_since=100.0)
    assert decide(told) == Wait(130.0)
    assert decide(replace(told, now=130.0)) == EndRanks(kill=(0,), terminate=())
    assert decide(replace(told, ranks=(Rank(0, exit_code=-15), ending.ranks[1]))) == Close(Outcome.RESTART)


def test_a_rank_of_another_host_is_waited_for_but_not_by_who_is_impatient() -> None:
    """Its own agent ends it; until then what it saves counts."""
    ranks = (registered(0, told="kill", exit_code=-9), registered(1, own=False, told="kill"))
    ending = job(*ranks, interrupted=True, ending_since=99.0)
    assert decide(ending) == Wait()
    assert decide(replace(ending, impatient=True)) == WriteLocalState()


ends = st.builds(
    Rank,
    rank=st.integers(0, 3),
    exit_code=st.sampled_from([0, 0, 1, -9]),
    registered=st.just(True),
    save=st.sampled_from(["none", "ordered", "failed"]),
    told=st.sampled_from(["nothing", "nothing", "terminate", "kill"]),
)
views = st.tuples(st.booleans(), st.none() | seconds, st.none() | seconds)


@given(st.lists(ends, min_size=1, max_size=4), views, views)
def test_all_hosts_come_to_the_same_end(
    ranks: list[Rank], one: tuple[object, ...], other: tuple[object, ...]
) -> None:
    """They may have heard of things, and ordered things, at other times."""
    outcomes = []
    for host, (alarmed, ordered, ending) in enumerate((one, other)):
        seen = tuple(replace(rank, own=rank.rank % 2 == host) for rank in ranks)
        facts = {"alarmed": alarmed, "save_ordered_at": ordered, "ending_since": ending}
        outcomes.append(decide(job(*seen, local_state_written=True, **facts)))
    assert outcomes[0] == outcomes[1]
    assert isinstance(outcomes[0], Close)


def test_asked_twice_to_end_nothing_is_waited_for() -> None:
    ranks = (registered(0, save="ordered"), Rank(1, told="terminate"))
    asked_twice = job(*ranks, interrupted=True, impatient=True, save_ordered_at=99.0)
    assert decide(asked_twice) == EndRanks(kill=(0, 1), terminate=())


@pytest.mark.parametrize(
    ("restarts_left", "interrupted", "outcome"),
    [(1, False, Outcome.RESTART), (0, False, Outcome.FAILED), (1, True, Outcome.INTERRUPTED)],
)
def test_the_local_states_are_written_before_the_restart(
    restarts_left: int, interrupted: bool, outcome: Outcome
) -> None:
    ranks = (registered(0, save="ended", saved_step=3, told="kill", exit_code=-9), KILLED)
    ended = job(*ranks, ending_since=99.0, restarts_left=restarts_left, interrupted=interrupted)
    assert decide(ended) == WriteLocalState()
    assert decide(replace(ended, local_state_written=True)) == Close(outcome)
    begun = replace(ended, local_state_begun_at=ended.now)
    until = ended.now + max(DEADLINE, LOCAL_STATE_SECONDS)
    assert decide(begun) == Wait(until)
    assert decide(replace(begun, now=until)) == Close(outcome), "a file system that blocks stops nobody"
    assert decide(replace(begun, impatient=True, interrupted=True)) == Close(Outcome.INTERRUPTED)


def test_an_alarm_after_which_all_ranks_end_well_was_false() -> None:
    ranks = (registered(0, exit_code=0), registered(1, exit_code=0))
    assert decide(job(*ranks, alarmed=True)) == Close(Outcome.SUCCEEDED)


def test_ranks_that_end_with_status_0_because_they_were_told_to_are_no_success() -> None:
    ranks = (Rank(0, exit_code=0, told="terminate"), registered(1, exit_code=0))
    ended = job(*ranks, alarmed=True, ending_since=99.0, local_state_written=True)
    assert decide(ended) == Close(Outcome.RESTART)


def test_a_rank_stays_until_all_scripts_are_at_their_ends() -> None:
    ranks = (registered(0, finished=True), registered(1))
    assert decide(job(*ranks)) == Wait()
    assert decide(job(ranks[0], KILLED)) == OrderSave((0,))
    assert decide(job(ranks[0], registered(1, exit_code=0, reachable=False))) == LetEnd((0,))


def test_ranks_at_their_ends_are_let_go_once_and_by_their_own_agent() -> None:
    other = registered(2, finished=True, own=False)
    ranks = (registered(0, finished=True), registered(1, finished=True))
    assert decide(job(*ranks, other)) == LetEnd((0, 1))
    gone = tuple(replace(rank, let_end=True) for rank in ranks)
    assert decide(job(*gone, other)) == Wait()
    assert not gone[0].can_save


def test_a_hang_may_be_about_a_rank_at_its_end() -> None:
    """Its exit status may tell a failure, and no other rank hears of that as long as it stays."""
    ranks = (registered(0, finished=True), registered(1), registered(2, finished=True))
    assert decide(job(*ranks, suspected=True)) == LetEnd((0, 2))


@pytest.mark.parametrize(
    ("exit_codes", "finished", "outcome"),
    [
        ((0, -11), (True, True), Outcome.FAILED),
        ((-9, -11), (True, True), Outcome.FAILED),
        ((0, -11), (True, False), Outcome.RESTART),
        ((0, 3), (True, True), Outcome.RESTART),  # its script wants to have failed
    ],
)
def test_nothing_is_done_again_once_the_training_is_over(
    exit_codes: tuple[int, int], finished: tuple[bool, bool], outcome: Outcome
) -> None:
    ranks = tuple(
        Rank(rank, exit_code=code, registered=True, finished=done)
        for rank, (code, done) in enumerate(zip(exit_codes, finished, strict=True))
    )
    job = KnownJob(ranks, 0.0, DEADLINE, restarts_left=3, ending_since=0.0, local_state_written=True)
    assert decide(job) == Close(outcome)


def test_what_jitckpt_refuses_is_not_tried_again() -> None:
    ended = (Rank(0, exit_code=1, refused="No."), Rank(1, exit_code=-9, told="kill"))
    assert decide(job(*ended)) == Close(Outcome.FAILED)
    assert "rank 0" in (incurable(job(*ended)) or "")


def test_a_mistake_is_tried_again_once() -> None:
    ended = job(Rank(0, exit_code=1, torch_loaded=True, failing="TypeError: no"))
    assert decide(ended) == Close(Outcome.RESTART)
    before = mistakes(ended.ranks)
    assert decide(replace(ended, mistakes_before=before)) == Close(Outcome.FAILED)
    other = job(Rank(0, exit_code=1, torch_loaded=True, failing="TypeError: 7"), mistakes_before=before)
    assert decide(other) == Close(Outcome.RESTART)


def test_a_mistake_is_the_same_whatever_addresses_and_process_ids_its_words_have() -> None:
    def ended(address: str, process: int) -> Rank:
        text = f"TypeError: <Data object at {address}> of process {process} in /tmp/tmp{address} has no len()"
        return Rank(0, exit_code=1, torch_loaded=True, failing=text)

    before = mistakes([ended("0x7f01a2", 4711)])
    assert decide(job(ended("0x7fffb3", 12345), mistakes_before=before)) == Close(Outcome.FAILED)


def test_a_variable_without_a_value_has_a_hint() -> None:
    """Behind an epoch's last batch the loop over batches, which would have set it, has none."""
    for error, has_hint in (("NameError: name 'loss' is not defined", True), ("TypeError: no", False)):
        ended = (Rank(0, exit_code=1, torch_loaded=True, failing=error),)
        why = incurable(job(*ended, mistakes_before=mistakes(ended))) or ""
        assert error in why
        assert ("set it before the loop" in why) == has_hint


def test_the_same_mistake_of_another_rank_is_the_same() -> None:
    """The first that makes it may be any: the others are ended."""
    before = mistakes([Rank(0, exit_code=1, failing="a"), Rank(1, exit_code=-15, told="terminate")])
    again = job(
        Rank(0, exit_code=-15, told="terminate"), Rank(1, exit_code=1, failing="a"), mistakes_before=before
    )
    assert decide(again) == Close(Outcome.FAILED)


@pytest.mark.parametrize(
    ("rank", "mistake"),
    [
        (Rank(0, exit_code=2), "exit status 2 before torch was imported"),
        (Rank(0, exit_code=2, torch_loaded=True), None),  # it may have trained without jitckpt.init
        (Rank(0, exit_code=-9), None),
        (Rank(0, exit_code=0), None),
        (Rank(0, exit_code=1, told="terminate"), None),
        (registered(0, exit_code=1), None),
        (registered(0, exit_code=1, failing="a"), "a"),
    ],
)
def test_what_is_a_mistake(rank: Rank, mistake: str | None) -> None:
    assert rank.mistake == mistake


def test_an_interrupted_job_is_interrupted_whatever_else() -> None:
    refused = job(Rank(0, exit_code=1, refused="No."), interrupted=True)
    assert decide(refused) == Close(Outcome.INTERRUPTED)


def two_shards(*, replicas: int = 1, **first: object) -> tuple[Rank, ...]:
    """Return the ranks of a job with two shards; first: facts of rank 0."""
    ranks = [Rank(i, registered=True, reachable=True, shard=i % 2, shards=2) for i in range(2 * replicas)]
    return (replace(ranks[0], **first), *ranks[1:])  # type: ignore[arg-type]


def test_what_only_memory_has_is_not_saved_in_vain() -> None:
    """A lost shard has no replica, so saves of the others would be of no use."""
    killed = KnownJob(two_shards(exit_code=-9), 1.0, DEADLINE, 1)
    assert decide(killed) == OrderSave((1,))
    assert decide(replace(killed, in_memory=7)) == EndRanks(kill=(1,), terminate=())


def test_an_alarm_may_be_that_of_a_shards_only_rank() -> None:
    alarmed = KnownJob(two_shards(), 1.0, DEADLINE, 1, alarmed=True)
    assert decide(alarmed) == OrderSave((0, 1))
    assert decide(replace(alarmed, in_memory=7)) == EndRanks(kill=(0, 1), terminate=())


def test_replicas_save_the_newest_step_whatever_memory_has() -> None:
    killed = KnownJob(two_shards(replicas=2, exit_code=-9), 1.0, DEADLINE, 1, in_memory=7)
    assert decide(killed) == OrderSave((1, 2, 3))


def test_a_job_that_is_asked_to_end_saves_to_files() -> None:
    """Memory ends with the host."""
    asked = KnownJob(two_shards(), 1.0, DEADLINE, 1, interrupted=True, in_memory=7)
    assert decide(asked) == OrderSave((0, 1))


def test_all_ranks_that_are_well_save_to_take_in_hosts_whatever_memory_has() -> None:
    """Nothing is done again for it; where one fails meanwhile, there is what memory has."""
    asked = KnownJob(two_shards(), 1.0, DEADLINE, 1, alarmed=True, takes_in=True, in_memory=7)
    assert decide(asked) == OrderSave((0, 1))
    killed = replace(asked, ranks=two_shards(exit_code=-9))
    assert decide(killed) == EndRanks(kill=(1,), terminate=())


def hang(rank: int, seconds: float, operation: str) -> str:
    waiting = Waiting(rank, operation, "7", (0, 1), 2, 5, 128, seconds, ())
    return f"{waiting}"


@pytest.mark.parametrize(
    ("ends", "progress"),
    [
        ([(5, "killed")] * 3, False),
        ([(5, "killed")] * 2, True),
        ([(5, "killed"), (5, "killed"), (5, "hung")], True),
        ([(4, "killed"), (5, "killed"), (5, "killed")], True),
        ([(4, "killed"), *[(5, "killed")] * 3], False),
        (
            [(5, hang(0, 60.1, "ncclAllReduce")), (5, hang(1, 60.0, "ncclBcast")), (5, hang(0, 61, "x"))],
            False,
        ),
        ([(0, "killed")] * 3, True),  # a start that does not come to a step may yet: hosts come and go
    ],
)
def test_a_start_brings_progress_unless_three_before_it_have_failed_alike(
    ends: list[tuple[int, str]], progress: bool
) -> None:
    assert brings_no_progress(ends) is not progress


def test_a_shard_is_lost_once_no_rank_of_it_can_save_or_has() -> None:
    of_shards = [registered(rank, shard=rank % 2, shards=2) for rank in range(4)]
    assert not job(*of_shards).has_lost_shard()
    dead = replace(of_shards[1], exit_code=-9)
    assert not job(of_shards[0], dead, *of_shards[2:]).has_lost_shard()
    assert job(of_shards[0], dead, of_shards[2]).has_lost_shard()
    saved = replace(dead, save="ended", saved_step=3)
    assert not job(of_shards[0], saved, of_shards[2]).has_lost_shard()
