"""What is shown of a job follows from its events: sums that hold for any log, the meaning of some."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jitckpt.agent import protection
from jitckpt.decisions.memory_state import HEALTHS
from jitckpt.reports.document import as_document, from_document
from jitckpt.reports.following import SILENT_AFTER, Follower
from jitckpt.reports.job_model import MEMORY_IS_OFF, JobModel, model_of
from jitckpt.reports.present import CAUSES, AgentsProgress, MemoryHost, Present

RANKS = 2
STARTED = 1000.0

Event = dict[str, Any]


def event(event: str, at: float, restart: int = 0, /, **fields: Any) -> Event:
    return {"event": event, "time": STARTED + at, "clock": 50 + at, "restart": restart} | fields


def registered(at: float, rank: int, restart: int = 0, shard: int = 0, shards: int = 1) -> Event:
    where = {"checkpoint_dir": "/ckpt", "fingerprint": "f"}
    return event("registered", at, restart, rank=rank, shard=shard, shards=shards, **where)


def started(at: float = 0.0, restart: int = 0, ranks: int = RANKS) -> Event:
    name = "restart" if restart else "job_started"
    return event(name, at, restart, world_size=ranks, max_restarts=3)


def killed(at: float, rank: int = 1, restart: int = 0) -> Event:
    text = f"rank {rank} was killed by SIGKILL"
    return event("detected", at, restart, cause="died", text=text, first=True, ranks=[rank])


# Two ranks: 4 s of starting, 10 s of steps of a second, a kill, 6 s until the first new step, 4 s of steps.
KILLED = [
    started(),
    registered(3, 0),
    registered(3, 1),
    event("first_step", 3.5, rank=0, step=1),
    event("first_step", 4, rank=1, step=1),
    event("fault", 13.9, rank=1, fault="rank=1 step=11 kind=kill"),
    killed(14),
    event("save_ordered", 14, save_id=1, ranks=[0]),
    event("save_begun", 14.2, save_id=1, rank=0, step=10),
    event("save_ended", 14.9, save_id=1, rank=0, shard=0, step=10, path="/x", bytes=100, seconds=0.7),
    event("saved", 15, step=10),
    event("ranks_ended", 15, kill=[0, 1], terminate=[]),
    started(16, 1),
    registered(18, 0, 1),
    registered(18, 1, 1),
    event("restored", 18.5, 1, rank=0, step=10),
    event("restored", 19, 1, rank=1, step=10),
    event("first_step", 19.5, 1, rank=0, step=11),
    event("first_step", 20, 1, rank=1, step=11),
    event("at_end", 24, 1, rank=0),
    event("at_end", 24, 1, rank=1),
    event("job_ended", 25, 1, outcome="succeeded"),
]


def after(events: list[Event], now: float | None = None, progress: AgentsProgress | None = None) -> Present:
    found = model_of(events).present(events[-1]["time"] if now is None else STARTED + now, progress)
    assert found is not None
    return found


def test_a_kill_from_its_first_second_to_its_last() -> None:
    assert after(KILLED[:1]).state == "starting"
    assert after(KILLED[:5]).state == "training"
    in_recovery = after(KILLED[:9])
    assert in_recovery.state == "recovering"
    assert [rank.state for rank in in_recovery.ranks] == ["saving", "failed"]
    assert in_recovery.protected == 0.0  # nobody else has what rank 0 has
    assert in_recovery.recoveries[0].outcome == "under way"
    assert after(KILLED[:-1]).protected == 1.0
    ended = after(KILLED)
    assert ended.state == "succeeded"
    assert ended.safe_step == 10
    assert ended.repeated == 1
    [recovery] = ended.recoveries
    assert (recovery.tier, recovery.cause, recovery.ranks) == ("just_in_time", "died", (1,))
    assert recovery.seconds == 6
    rounded = {name: round(seconds, 3) for name, seconds in recovery.phases.items()}
    assert rounded == {"detect": 0.1, "save": 1, "end": 1, "restart": 2, "restore": 1, "first step": 1}


def test_where_the_time_of_a_kill_went() -> None:
    ended = after(KILLED)
    step = 10 / 9.5  # ten seconds from the end of step 1 into step 11
    expected = {"starting": 4, "died": 6, "done_again": step / 2, "useful": 14 - step / 2, "ending": 1}
    assert {name: seconds for name, seconds in ended.spent.items() if seconds} == {
        name: math.isclose(ended.spent[name], seconds) and ended.spent[name]
        for name, seconds in expected.items()
    }
    assert ended.goodput is not None
    assert math.isclose(ended.goodput, (14 - step / 2) / 25)


def test_a_hang_begins_when_its_collective_stopped() -> None:
    hang = [
        *KILLED[:5],
        event("hang", 20, rank=0, operation="ncclAllReduce", seconds=6.0),
        event("detected", 20, cause="hang", text="rank 0 waits", first=True, ranks=[1]),
    ]
    seen = after(hang, 22)
    assert seen.spent["hang"] == 8
    assert seen.spent["useful"] == 10
    assert seen.segments == (("starting", 0, 4), ("useful", 4, 14), ("hang", 14, 22))
    assert seen.recoveries[0].phases == {"detect": 6}


def test_a_hang_that_no_rank_has_reported_begins_when_it_is_found() -> None:
    found = event("detected", 20, cause="hang", text="rank 1 does not answer", first=True, ranks=[1])
    seen = after([*KILLED[:5], found], 22)
    assert (seen.spent["hang"], seen.recoveries[0].phases) == (2, {"detect": 0})


def test_a_late_rank_is_waited_for_and_comes() -> None:
    late = [
        *KILLED[:5],
        event("hang", 20, rank=0, operation="ncclAllReduce", seconds=6.0),
        event("straggler", 20, ranks=[1], text="rank 1 is late"),
    ]
    seen = after(late, 23)
    assert seen.state == "late"
    assert [(rank.rank, rank.late) for rank in seen.late] == [(1, 9.0)]
    assert seen.spent["late"] == 9
    over = after([*late, event("hang_over", 24, text="")], 30)
    assert (over.state, over.late, over.spent["late"], over.spent["useful"]) == ("training", (), 10, 16)


def test_late_ranks_in_transparent_mode_and_before_their_first_step() -> None:
    """There nobody tells of a hang first, and only some of them may have come."""
    events = [
        started(),
        event("proxy_connected", 2, rank=0),
        event("straggler", 9, ranks=[1], waiting=[0], seconds=6.0),
    ]
    seen = after(events, 10)
    assert [(rank.rank, rank.state, rank.late) for rank in seen.ranks] == [(0, "training", 0), (1, "late", 7)]
    assert (seen.state, seen.spent["late"]) == ("starting", 0)
    connected = after([*events, event("proxy_connected", 11, rank=1)])
    assert [(rank.state, rank.late) for rank in connected.ranks] == [("training", 0)] * 2, "it has come"
    events += [event("hang_over", 11, text=""), event("proxy_connected", 12, rank=1)]
    assert [rank.state for rank in after(events[:4]).ranks] == ["training", "starting"]
    events.append(event("straggler", 30, ranks=[0, 1], waiting=[0], seconds=8.0))
    seen = after(events, 31)
    assert (seen.state, [rank.late for rank in seen.late], seen.spent["late"]) == ("late", [9, 9], 9)
    events.append(event("straggler", 32, ranks=[1], waiting=[0], seconds=10.0))
    seen = after(events, 33)
    assert [(rank.rank, rank.late) for rank in seen.late] == [(1, 11)]
    assert (seen.ranks[0].state, seen.spent["late"]) == ("training", 11)


def test_a_recovery_in_place() -> None:
    events = [
        started(),
        *(event("proxy_connected", 2, rank=rank) for rank in range(RANKS)),
        event("state_stays", 5, replicas=[[0, 1]]),
        event("device_alarm", 10, rank=1, text="CUDA error 700"),
        event("recovery_begun", 10, recovery=2),
        *(event("rank_stopped", 10.1, rank=rank, ended=5, seconds=0.1) for rank in range(RANKS)),
        *(event("server_restarted", 11, rank=rank, ending=0.4, starting=0.5) for rank in range(RANKS)),
        event(
            "calls_made_again", 12, rank=1, handles=0.5, image=0.1, communicators=0.2, replay=0.2, log_bytes=7
        ),
    ]
    under_way = after(events)
    assert (under_way.state, under_way.spent["device"]) == ("recovering", 2)
    assert after(events[:4]).protected == 1.0
    seen = after([*events, event("recovered", 13, state=5)], 20)
    [recovery] = seen.recoveries
    assert (recovery.scope, recovery.tier, recovery.seconds, recovery.step) == ("in_place", "in_memory", 3, 5)
    assert recovery.phases["starting"] == 0.5
    assert (seen.state, seen.spent["useful"], seen.spent["device"], seen.log_bytes) == ("training", 15, 3, 7)


def test_a_process_that_dies_in_transparent_mode_without_init() -> None:
    """What no recovery in place mends is a restart like any other, and nobody counts the steps."""
    events = [
        started(),
        *(event("proxy_connected", 2, rank=rank) for rank in range(RANKS)),
        event("device_alarm", 4, rank=1, text="CUDA error 700"),
        event("recovery_begun", 4, recovery=1),
        event("rank_stopped", 4.5, rank=0, ended=3, seconds=0.5),
        event("recovered", 5, state=3),
        killed(10),
        event("recovery_given_up", 10, text="rank 1 is gone"),
        started(12, 1),
    ]
    assert (after(events[:3]).in_place, after(events).in_place) == (True, False)
    seen = after(events[:7])
    assert ([rank.step for rank in seen.ranks], seen.step, seen.recoveries[0].step) == ([None, None], None, 3)
    under_way = after(events, 15)
    assert (under_way.state, under_way.spent["died"], under_way.spent["starting"]) == ("recovering", 5, 2)
    events += [event("proxy_connected", 20, 1, rank=rank) for rank in range(RANKS)]
    seen = after(events, 30)
    assert [one.outcome for one in seen.recoveries] == ["recovered", "recovered"]
    assert (seen.recoveries[1].seconds, seen.spent["died"], seen.spent["device"]) == (10, 10, 1)
    assert (seen.in_place, after([*events, event("switched_off", 31, 1, text="t")]).in_place) == (True, False)


def test_nothing_could_be_saved() -> None:
    events = [*KILLED[:7], event("not_saved", 15, text="", step=11), started(16, 1)]
    events += [event("first_step", 20, 1, rank=rank, step=1) for rank in range(RANKS)]
    seen = after(events)
    assert (seen.recoveries[0].tier, seen.repeated, seen.safe_step) == ("nothing", 11, None)
    assert math.isclose(seen.spent["done_again"], 10)  # all of it


def test_the_memory_tier_protects_what_has_no_replica() -> None:
    events = [started(), registered(1, 0, 0, 0, 2), registered(1, 1, 0, 1, 2)]
    events += [event("first_step", 2, rank=rank, step=1) for rank in range(RANKS)]
    assert after(events).protected == 0
    events.append(event("memory_safe", 5, step=4, bytes=1, waited=0.0))
    seen = after(events)
    assert (seen.protected, seen.memory_step, seen.safe_step) == (1, 4, None)
    hosts = [{"host": "a", "ranks": [0], "kept_by": [0, 1]}, {"host": "b", "ranks": [1], "kept_by": [1, 9]}]
    events.append(event("memory_placement", 5, hosts=hosts))
    assert after(events).memory_hosts == (MemoryHost("a", (0,), (0, 1)), MemoryHost("b", (1,), (1,)))
    hosts[1]["in_parts_on"] = [0, 7]
    assert after(events).memory_hosts[1] == MemoryHost("b", (1,), (1,), (0,))
    events.append(event("memory_state", 5, state="healthy", ranks=[0, 1], step=4))
    off = event("warning", 6, text="the memory tier protects this job no more: a host is lost")
    assert MEMORY_IS_OFF in Path(str(protection.__file__)).read_text(), "the agent says so"
    assert (after([*events, off]).protected, after([*events, off]).memory_step) == (0, None)
    events += [killed(10), event("kept_in_memory", 10.1, step=8, newest=10), started(11, 1)]
    events += [event("restored", 12, 1, rank=rank, step=8) for rank in range(RANKS)]
    events += [event("first_step", 13, 1, rank=rank, step=9) for rank in range(RANKS)]
    [recovery] = after(events).recoveries
    assert (recovery.tier, recovery.step, recovery.redone, recovery.outcome) == (
        "memory_tier",
        8,
        2,
        "recovered",
    )


def test_what_the_events_say_of_a_ranks_memory_goes_before_what_its_agent_told_last() -> None:
    def states(*events: Event, told: AgentsProgress | None = None) -> list[str]:
        return [rank.memory_state for rank in after([started(), *events], 10, told).ranks]

    healthy = event("memory_state", 5, state="healthy", ranks=[0, 1], step=4)
    assert states() == ["", ""]
    assert states(healthy) == ["healthy", "healthy"]
    told = AgentsProgress(STARTED + 9, 0, {}, None, {0: "snap", 1: "completed"})
    assert states(told=told) == ["", ""], "no step of this start is safe"
    assert states(healthy, told=told) == ["snap", "completed"]
    failed = event("memory_state", 6, state="unhealthy", ranks=[1], step=4)
    lost = event("memory_state", 7, state="offline", ranks=[0], step=None)
    assert states(healthy, failed, lost, told=told) == ["offline", "unhealthy"]
    assert states(healthy, failed, lost, started(8, 1)) == ["", ""]
    assert (
        states(healthy, event("memory_state", 6, state="next year's", ranks=[1], step=4)) == ["healthy"] * 2
    )
    assert states(healthy, event("warning", 6, text=MEMORY_IS_OFF)) == ["", ""]
    assert states(healthy, failed, event("job_ended", 9, outcome="failed")) == ["", ""]


def test_the_agents_tell_newer_steps_than_the_events() -> None:
    told = AgentsProgress(STARTED + 9, 0, {0: 7, 1: 6}, 0.5)
    seen = after(KILLED[:5], 10, told)
    assert ([rank.step for rank in seen.ranks], seen.step, seen.step_seconds) == ([7, 6], 7, 0.5)
    old = AgentsProgress(STARTED + 9, 1, {0: 70, 1: 60})  # of another start
    assert after(KILLED[:5], 10, old).step == 1


def test_a_shard_is_safe_when_all_shards_are_saved() -> None:
    events = [started(), registered(1, 0, 0, 0, 2), registered(1, 1, 0, 1, 2)]
    save = {"path": "/x", "bytes": 1, "seconds": 0.1}
    events.append(event("periodic_save", 5, rank=0, shard=0, step=4, **save))
    assert after(events).safe_step is None
    assert after(events).protected == 0.0
    own = event("periodic_save", 6, rank=1, shard=1, step=4, of_shard=False, **save)
    assert after([*events, own]).safe_step is None, "what rank 1 alone knows is not its shard"
    assert after([*events, event("periodic_save", 6, rank=1, shard=1, step=4, **save)]).safe_step == 4


def anything(fields: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=dict(fields))


names = st.sampled_from(sorted({one["event"] for one in KILLED} | {
    "hang", "straggler", "hang_over", "device_alarm", "recovery_begun", "rank_stopped", "server_restarted",
    "calls_made_again", "recovered", "recovery_given_up", "not_saved", "periodic_save", "suspect", "warning",
    "proxy_connected", "memory_safe", "memory_placement", "kept_in_memory", "state_stays", "group",
    "memory_state", "hang_report", "finished", "what_comes_next_year",
}))  # fmt: skip
rank = st.integers(0, RANKS)
number = st.integers(0, 20)
rest = anything(
    {
        "rank": rank, "step": number, "shard": rank, "shards": st.integers(1, 2), "seconds": st.floats(0, 99),
        "ranks": st.lists(rank, max_size=3), "kill": st.lists(rank, max_size=2), "terminate": st.just([]),
        "first": st.booleans(), "cause": st.sampled_from([*CAUSES, "new"]), "text": st.just("t"),
        "world_size": st.integers(0, 3), "max_restarts": number, "checkpoint_dir": st.just("/c"),
        "fingerprint": st.just("f"), "fault": st.just("kill"), "operation": st.just("x"),
        "state": number | st.sampled_from([*HEALTHS, "new"]),
        "replicas": st.just([[0, 1]]), "outcome": st.just("failed"), "path": st.just("/p"),
        "name": st.just("dp"),
        "hosts": st.lists(
            st.just({"host": "a", "ranks": [0], "kept_by": [0, 1]}) | st.just({"ranks": 1}), max_size=2
        ),
        "device": st.just("0"), "host": st.just("h"), "ended": number,
    }
)  # fmt: skip
logs = st.lists(st.tuples(names, st.floats(-2, 50), st.integers(0, 3), rest), max_size=40)


@settings(max_examples=200, deadline=None)
@given(logs, st.floats(0, 100), st.integers(0, 40))
def test_of_any_log_the_parts_of_the_time_are_all_of_it(
    log: list[tuple[str, float, int, dict[str, Any]]], later: float, cut: int
) -> None:
    at, events = 0.0, [started()]
    for name, seconds, restart, fields in log:
        at += seconds
        events.append(event(name, at, restart, **fields))
    model, other = JobModel(), JobModel()
    model.take_all(events[:cut])
    model.present(STARTED)  # a look changes nothing
    model.take_all(events[cut:])
    other.take_all(events)
    now = events[-1]["time"] + later
    seen = model.present(now)
    assert seen is not None
    assert seen == other.present(now)
    assert set(seen.spent) == set(CAUSES)
    assert min(seen.spent.values()) >= 0
    edges = [edge for _, begin, end in seen.segments for edge in (begin, end)]
    assert edges == sorted(edges)
    assert math.isclose(sum(end - begin for _, begin, end in seen.segments), seen.seconds, abs_tol=1e-6)
    shown, silent, problem = from_document(json.loads(json.dumps(as_document(seen, 3.0, "p"))))
    assert (shown, silent, problem) == (seen, 3.0, "p")
    assert math.isclose(sum(seen.spent.values()), seen.seconds, abs_tol=1e-6)
    assert 0 <= seen.protected <= 1
    assert len(seen.ranks) == seen.world_size
    assert all(one.seconds is None or one.seconds >= 0 for one in seen.recoveries)
    assert [one.outcome for one in seen.recoveries[:-1]].count("under way") == 0


def test_a_follower_reads_what_is_new_and_survives_damage(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert not follower.look()
    assert "no job writes there" in follower.problem
    assert follower.present() is None
    log = tmp_path / "events.jsonl"
    lines = [json.dumps(one) + "\n" for one in KILLED]
    log.write_text("".join(lines[:5]) + "{broken\n" + lines[5][:20])
    assert follower.look()
    assert not follower.look()
    assert (len(follower.events), follower.damaged, follower.problem) == (5, 1, "")
    with log.open("a") as file:
        file.write(lines[5][20:] + "".join(lines[6:]))
    assert follower.look()
    whole = follower.present()
    assert whole == after(KILLED)
    log.write_text(lines[0])  # somebody has begun anew
    follower.look()
    assert len(follower.events) == 1


def test_a_silent_agent_is_told_and_its_time_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in KILLED[:5]))
    told = {"time": STARTED + 10, "restart": 0, "steps": {"0": 7, "1": 6}, "step_seconds": 1.0}
    (tmp_path / "progress-0.json").write_text(json.dumps(told))
    (tmp_path / "progress-1.json").write_text("{")
    follower = Follower(tmp_path)
    follower.look()
    soon, late = STARTED + 20, STARTED + 11 + SILENT_AFTER
    assert follower.silent(soon) is None
    assert follower.silent(late) == 1 + SILENT_AFTER
    seen = follower.present(late)
    assert seen is not None
    assert (seen.seconds, seen.step) == (10, 7)
