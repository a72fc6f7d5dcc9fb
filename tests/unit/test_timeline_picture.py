"""The lanes of the picture that jitckpt timeline draws."""

import json
from pathlib import Path
from typing import Any

import pytest

from jitckpt.cli import main
from jitckpt.events import FILE_NAME, Event
from jitckpt.reports.timeline_picture import (
    LOOKS,
    SHOWN_RANKS,
    Lane,
    Phase,
    _pauses,
    draw,
    recoveries,
)


def event(name: str, clock: float, restart: int = 0, **details: Any) -> Event:
    return {"event": name, "time": 1.7e9 + clock, "clock": clock, "restart": restart, **details}


def killed(ranks: int = 2) -> list[Event]:
    found = [event("job_started", 0.0)]
    found += [event("registered", 1.0, rank=rank, checkpoint_dir="ckpt") for rank in range(ranks)]
    found += [
        event("fault", 9.5, rank=1, fault="rank=1 step=20 kind=kill", step=20, phase="backward"),
        event("detected", 10.0, cause="died", text="rank 1 was killed by SIGKILL", first=True),
        event("save_ordered", 10.0, save_id=1, ranks=[0], deadline=60.0),
        event("save_begun", 10.25, rank=0, step=19),
        event("save_ended", 10.75, rank=0, step=19, shard=0, bytes=2_000_000),
        event("saved", 10.75, step=19),
        event("ranks_ended", 11.0, kill=[0], terminate=[]),
        event("restart", 11.5, 1),
    ]
    for rank in range(ranks):
        found.append(event("registered", 13.5 + rank, 1, rank=rank, checkpoint_dir="ckpt"))
        found.append(event("restored", 14.75 + rank, 1, rank=rank, step=19))
        found.append(event("first_step", 16.0 + rank, 1, rank=rank, step=20))
    return found


def test_the_lanes_of_a_kill() -> None:
    (recovery,) = recoveries(killed())
    assert recovery.title == "rank 1 was killed by SIGKILL, 2 MB saved"
    agent, healthy, dead = recovery.lanes
    assert agent == Lane(
        "agent",
        (
            Phase("detect", -0.5, 0.0),
            Phase("save", 0.0, 0.75),
            Phase("end", 0.75, 1.5),
            Phase("restart", 1.5, 4.5),
            Phase("restore", 4.5, 5.75),
            Phase("first step", 5.75, 7.0),
        ),
        None,
    )
    assert healthy.phases == (
        Phase("rest", 0.0, 0.25),
        Phase("save", 0.25, 0.75),
        Phase("end", 0.75, 1.0),
        Phase("restart", 1.5, 3.5),
        Phase("restore", 3.5, 4.75),
        Phase("first step", 4.75, 6.0),
    )
    assert dead.failed == -0.5
    assert [phase.name for phase in dead.phases] == ["detect", "restart", "restore", "first step"]
    assert {phase.name for lane in recovery.lanes for phase in lane.phases} == set(LOOKS)


def test_a_replica_that_was_too_slow_saves_until_it_is_ended() -> None:
    events = [e for e in killed(3) if e["event"] != "save_ended"]
    events.insert(events.index(events[6]), event("save_begun", 10.5, rank=2, step=19))
    (recovery,) = recoveries(events)
    assert Phase("save", 0.5, 1.0) in recovery.lanes[3].phases


def test_a_hang_began_before_it_was_found() -> None:
    events = [
        event("job_started", 0.0),
        event("hang", 70.0, rank=0, seconds=60.0),
        event("detected", 70.0, cause="hang", text="rank 0 hangs", first=True),
    ]
    (recovery,) = recoveries(events)
    assert recovery.lanes[0].phases == (Phase("detect", -60.0, 0.0),)


def test_what_did_not_come_is_left_out() -> None:
    events = [e for e in killed() if e["event"] not in ("restart", "registered", "restored", "first_step")]
    (recovery,) = recoveries(events)
    assert [phase.name for phase in recovery.lanes[0].phases] == ["detect", "save", "end"]


def test_so_many_ranks_are_not_all_drawn() -> None:
    (recovery,) = recoveries(killed(SHOWN_RANKS + 5))
    assert (len(recovery.lanes), recovery.left_out) == (1 + SHOWN_RANKS, 5)


def in_place() -> list[Event]:
    steps: dict[str, Any] = {"handles": 0.25, "image": 0.5, "communicators": 0.0, "replay": 1.25}
    return [
        event("fault", 19.5, rank=1, fault="rank=1 step=30 kind=proxy-kill", step=30, phase="backward"),
        event("device_alarm", 20.0, rank=1, text="rank 1's server was ended", call=0),
        event("recovery_begun", 20.0, recovery=1),
        event("rank_stopped", 20.25, rank=1, recovery=1, seconds=0.25),
        event("server_restarted", 22.0, rank=1, recovery=1, ending=0.25, starting=1.25, seconds=1.75),
        event("calls_made_again", 24.5, rank=1, recovery=1, seconds=2.25, **steps),
        event("recovered", 24.5, recovery=1, state=29, seconds=4.5),
    ]


def test_the_lanes_of_a_recovery_in_place() -> None:
    _, recovery = recoveries(killed() + in_place())
    assert (recovery.title, recovery.left_out) == ("rank 1's server was ended", 0)
    phases = (
        Phase("detect", -0.5, 0.0),
        Phase("stop", 0.0, 0.25),
        Phase("ending", 0.5, 0.75),
        Phase("starting", 0.75, 2.0),
        Phase("handles", 2.5, 2.75),
        Phase("image", 2.75, 3.25),
        Phase("replay", 3.25, 4.5),
    )
    assert recovery.lanes == (Lane("rank 1", phases, -0.5),)


def snapshots() -> list[Event]:
    """A job whose worker dies after two snapshots."""
    parts: dict[str, Any] = {"stop": 0.5, "dump": 2.0, "device": 1.0, "seconds": 3.5}
    return [
        event("job_started", 0.0),
        event("snapshot_pause", 10.0, step=8, **parts),
        event("snapshot_pause", 20.0, step=16, **parts),
        event("detected", 25.0, cause="died", text="rank 1 was killed by SIGKILL", first=True),
        event("ranks_ended", 25.25, kill=[0], terminate=[]),
        event("restart", 25.5, 1),
        event("gone_back", 30.0, 1, step=16, seconds=3.0),
    ]


def test_the_way_back_to_a_snapshot_is_drawn() -> None:
    (recovery,) = recoveries(snapshots())
    assert recovery.lanes[0].phases == (Phase("restore", 0.5, 2.0), Phase("devices", 2.0, 5.0))


def test_pauses_are_drawn(tmp_path: Path) -> None:
    pauses = _pauses(snapshots())
    (part,) = pauses
    assert part.title == "All ranks held for snapshots"
    phases = (Phase("stop", 0.0, 0.5), Phase("dump", 0.5, 2.5), Phase("devices", 2.5, 3.5))
    assert part.lanes == (Lane("step 8", phases, None), Lane("step 16", phases, None))
    for name, events in (("only", snapshots()[:3]), ("both", snapshots())):
        draw(events, tmp_path / f"{name}.svg")
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert "dumping the process" in drawn
        assert "getting devices again" in drawn
        assert "held for snapshots" in drawn


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_it_is_drawn(name: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in killed() + in_place()))
    picture = tmp_path / name
    assert main(["timeline", "--plot", str(picture), str(tmp_path)]) == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert len(content) > 10_000


def test_many_recoveries_fit(tmp_path: Path) -> None:
    events: list[Event] = []
    for number in range(10):
        for e in killed():
            shifted = {"clock": e["clock"] + 100 * number, "restart": e["restart"] + number}
            events.append(dict(e) | shifted)
    draw(events, tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 10_000


def test_without_a_failure_there_is_nothing_to_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps(event("job_started", 0.0)) + "\n")
    assert main(["timeline", "--plot", str(tmp_path / "p.png"), str(tmp_path)]) == 2
    assert "there is no recovery to draw" in capsys.readouterr().err


def test_the_hang_of_an_earlier_start_is_not_this_failures_beginning() -> None:
    hung = [
        event("hang", 3.0, seconds=2.0, rank=0),
        event("detected", 3.0, cause="hang", text="a hang", first=True),
        event("restart", 4.0, 1),
    ]
    later = [{**one, "restart": one["restart"] + 1} for one in killed()[1:]]
    second = recoveries([event("job_started", 0.0), *hung, *later])[1]
    agent = second.lanes[0]
    assert agent.phases[0] == Phase("detect", -0.5, 0.0)  # since the fault of this start
