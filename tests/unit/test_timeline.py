import json
from pathlib import Path
from typing import Any

import pytest

from jitckpt.cli import main
from jitckpt.events import FILE_NAME, Event
from jitckpt.reports.job_model import model_of
from jitckpt.reports.timeline import in_words, jobs, recoveries, rows
from jitckpt.reports.trace import trace


class Story:
    """A job's events, each a second after the one before unless it is said otherwise."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.clock = 100.0
        self.restart = 0

    def add(self, event: str, after: float = 1.0, **details: Any) -> "Story":
        self.clock += after
        common = {"event": event, "time": 1.7e9 + self.clock, "clock": self.clock, "restart": self.restart}
        self.events.append(common | details)
        return self

    def killed_and_saved(self) -> "Story":
        self.add("job_started", world_size=2, max_restarts=3)
        self.add("registered", rank=0, checkpoint_dir="ckpt").add("registered", rank=1, checkpoint_dir="ckpt")
        self.add("fault", rank=1, fault="rank=1 step=20 phase=backward kind=kill", step=20, phase="backward")
        self.add("detected", after=0.01, cause="died", text="rank 1 was killed by SIGKILL", first=True)
        self.add("save_ordered", save_id=1, ranks=[0], deadline=60.0, after=0.0)
        self.add("save_begun", save_id=1, rank=0, step=19, after=0.2)
        self.add("save_ended", save_id=1, rank=0, step=19, shard=0, bytes=12_345_678, after=0.3)
        self.add("saved", step=19, after=0.0)
        return self.add("ranks_ended", kill=[0], terminate=[], after=0.0)

    def restarted(self, step: int) -> "Story":
        self.restart += 1
        self.add("restart", world_size=2, max_restarts=3)
        self.add("restored", rank=0, step=step, path="p", source_rank=0, seconds=0.1)
        self.add("restored", rank=1, step=step, path="p", source_rank=0, seconds=0.1, after=0.0)
        return self.add("first_step", rank=1, step=step + 1).add("first_step", rank=0, step=step + 1)


def test_a_recovery_is_summed_up() -> None:
    (recovery,) = recoveries(Story().killed_and_saved().restarted(19).add("job_ended").events)
    assert recovery.cause == "rank 1 was killed by SIGKILL"
    assert recovery.fault == "rank=1 step=20 phase=backward kind=kill"
    assert recovery.saved_by == (0,)
    assert recovery.save_bytes == 12_345_678
    assert recovery.save_seconds == pytest.approx(0.5)
    assert (recovery.step, recovery.redone, recovery.restarted) == (19, 1, True)
    assert recovery.first_step_seconds == pytest.approx(4.5)


def test_a_save_of_which_only_the_end_was_told_is_said_to_be_there() -> None:
    """The host that tells of all is lost, and who tells in its place has saved before it knew of that."""
    story = Story().add("job_started", world_size=3, max_restarts=3)
    story.add("detected", cause="host", text="host 0 with rank 0 is lost", first=True)
    story.add("save_ordered", save_id=1, ranks=[1], deadline=60.0, after=0.0)
    story.add("saved", step=3, after=0.0).add("job_ended", outcome="failed")
    assert in_words(story.events, "ckpt")[1:] == [
        "The state after step 3 was saved.",
        "The job failed.",
        "The state after step 3 lies in ckpt; the same command goes on from there.",
    ]


def test_it_is_told_in_words() -> None:
    events = Story().killed_and_saved().restarted(19).add("job_ended", outcome="succeeded").events
    found, saved, restarted, ended = in_words(events, "ckpt")
    assert found.endswith(
        ": rank 1 was killed by SIGKILL (rehearsed: rank=1 step=20 phase=backward kind=kill)."
    )
    assert saved == "The state after step 19 was saved in 0.50 s: 12.3 MB by rank 0."
    assert restarted == (
        "Restart 1 went on from step 19, with at most 1 minibatch done again; "
        "its first new step was done 4.5 s after the failure was found."
    )
    assert ended == "The job succeeded after 1 restart."


def test_snapshots_and_what_their_pauses_went_into_are_told_in_words() -> None:
    story = Story().add("job_started", world_size=2, max_restarts=3)
    for step, stored in ((8, 620_000_000), (12, 8_000_000)):
        story.add("snapshot_pause", step=step, stop=0.25, dump=2.5, device=0.75, seconds=3.5)
        story.add("snapshot", step=step, bytes=1_400_000_000, stored=stored, disk=650_000_000, seconds=4.0)
    told = in_words(story.add("job_ended", outcome="succeeded").events, "ckpt")
    assert told[-5:-1] == [
        "2 snapshots were made, of at most 1.4 GB.",
        "Of the last one 8 MB were new; with those before it took 650 MB of the disk.",
        "The ranks were held for them 3.50 s at most, and 7.00 s in all.",
        "Of that it took 0.50 s until their devices were at rest, 5.00 s to write their processes to memory, "
        "and 1.50 s until all had gone on.",
    ]


def test_a_replica_that_was_a_step_ahead_has_done_one_minibatch_more() -> None:
    story = Story().killed_and_saved()
    story.add("save_ended", save_id=1, rank=2, step=20, shard=1, bytes=1, after=0.0)
    (recovery,) = recoveries(story.restarted(19).events)
    assert recovery.redone == 2


def test_what_was_lost_is_told_where_nothing_could_be_saved() -> None:
    story = Story().add("detected", cause="died", text="rank 0 ended with exit status 1", first=True)
    story.add("not_saved", text="both raised an exception", step=24).restarted(20)
    (recovery,) = recoveries(story.events)
    assert (recovery.step, recovery.redone, recovery.lost) == (20, None, 4)
    told = in_words(story.add("job_ended", outcome="succeeded").events, "ckpt")
    assert "Restart 1 went on from step 20, with at most 4 minibatches done again; " in told[2]


@pytest.mark.parametrize("written", [False, True])
def test_what_memory_had_is_told_with_whether_it_went_to_files(written: bool) -> None:
    """It does where another number of ranks goes on from it."""
    story = Story().add("job_started", world_size=4, max_restarts=3)
    story.add("registered", rank=0, checkpoint_dir="ckpt")
    story.add("detected", cause="host", text="host 3 with rank 3 is lost: it is silent", first=True)
    story.add("kept_in_memory", step=7, newest=8).add("ranks_ended", kill=[0], terminate=[])
    if written:
        story.add("memory_written", step=7, bytes=100, seconds=0.1)
    told = in_words(story.restarted(7).add("job_ended", outcome="succeeded").events, "ckpt")
    then = "and was written to files from there" if written else "so no file was written"
    assert told[1] == f"The state after step 7 was in memory, {then}."


def test_where_the_same_command_would_end_the_same_again_it_is_not_said_to_go_on() -> None:
    story = Story().killed_and_saved().restarted(19)
    story.add("incurable", text="jitckpt would refuse rank 0 the same again").add(
        "job_ended", outcome="failed"
    )
    assert in_words(story.events, "ckpt")[-1] == (
        "The state after step 19 lies in ckpt; "
        "once what is said above is mended, the same command goes on from there."
    )


def test_two_failures_are_two_recoveries() -> None:
    story = Story().killed_and_saved().restarted(19)
    story.add("detected", cause="hang", text="rank 0 hangs", first=True)
    story.add("detected", cause="hang", text="rank 1 hangs", first=False)
    story.add("not_saved", text="rank 0 could not save, rank 1 is stopped")
    story.add("job_ended", outcome="failed")
    first, second = recoveries(story.events)
    assert (first.restart, second.restart) == (0, 1)
    assert second.fault is None, "the fault was of the first start"
    assert second.save_seconds is None
    assert second.restarted is False
    assert in_words(story.events, "ckpt")[-3:] == [
        "No whole state could be saved: rank 0 could not save, rank 1 is stopped.",
        "The job failed after 1 restart.",
        "The state after step 19 lies in ckpt; the same command goes on from there.",
    ]


def test_a_failure_before_the_first_step_could_be_told() -> None:
    story = Story().killed_and_saved().restarted(19)
    events = [event for event in story.events if event["event"] != "first_step"]
    assert "Restart 1 went on from step 19, with at most 1 minibatch done again." in in_words(events, "ckpt")


def test_a_job_whose_agent_was_killed_has_no_end() -> None:
    assert in_words(Story().add("job_started").events, "ckpt") == [
        "The job has not ended, or its agent was killed."
    ]


def test_a_file_may_hold_several_jobs() -> None:
    story = Story().add("job_started").add("job_ended").add("job_started").add("job_ended")
    assert [len(job) for job in jobs(story.events)] == [2, 2]
    assert jobs([]) == []


def test_many_ranks_are_named_in_few_words() -> None:
    story = Story().killed_and_saved()
    [saved] = [event for event in story.events if event["event"] == "save_ended"]
    others = [{**saved, "rank": rank} for rank in range(1, 64)]
    [told] = [one for one in in_words([*story.events, *others], "ckpt") if "was saved in" in one]
    assert told.endswith("by ranks 0 to 63.")


def test_every_event_is_a_row() -> None:
    story = Story().killed_and_saved().restarted(19)
    heading, *shown = rows(story.events, None)
    assert heading.split() == ["seconds", "restart", "rank", "event", "details"]
    assert len(shown) == len(story.events)
    for event, row in zip(story.events, shown, strict=True):
        assert event["event"] in row.split()
    assert any("bytes 12.3 MB" in row for row in shown)
    assert any(row.lstrip().startswith("3.010") for row in shown), "seconds from the start to the detection"


def test_what_an_event_does_not_say_is_not_in_its_row() -> None:
    events = Story().add("restored", rank=0, step=5, in_memory="", steps=[]).events
    assert list(rows(events, None))[-1].endswith("step 5")


def test_what_a_reader_has_no_use_for_is_not_in_a_row() -> None:
    events = (
        Story()
        .add("finished", rank=0, step=5, at_exit=True)
        .add("x", steps={"0": [14], "1": [14, 15]})
        .events
    )
    _, finished, other = rows(events, None)
    assert finished.endswith("finished  step 5")
    assert other.endswith("steps 0: 14; 1: 14, 15")


def test_a_screen_breaks_the_details_and_nothing_commands_it() -> None:
    story = Story().add("warning", text="word " * 30 + "[red]\x1b[2J\nend")
    assert len(list(rows(story.events, None))) == 2
    shown = list(rows(story.events, 80))
    assert max(map(len, shown)) <= 80
    assert len(shown) > 3
    assert " ".join(" ".join(shown).split()).endswith("word [red] [2J end")


def test_many_events_take_as_long_as_they_are_many() -> None:
    """Counted are the looks at events: of twice as many failures there are twice as many, not four times."""
    looks = 0

    class Counted(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            nonlocal looks
            looks += 1
            return super().__getitem__(name)

    def counted(failures: int) -> int:
        nonlocal looks
        story = Story().add("job_started")
        for restart in range(failures):
            story.restart = restart
            for step in range(20):
                story.add("periodic_save", rank=0, shard=0, step=step)
            story.killed_and_saved().add("ranks_ended", kill=[0], terminate=[])
            story.add("device_alarm", rank=0, text="an error").add("recovery_begun", recovery=restart)
            story.add("fault", rank=1, fault="x").add("recovered", recovery=restart, state=7, seconds=1.0)
        started, *others = story.events
        events = [Counted(started), *(Counted(one) for one in others if one["event"] != "job_started")]
        looks = 0
        list(rows(events, 80))
        in_words(events, "ckpt")
        model_of(events).present(events[-1]["time"])
        trace([events])
        return looks

    once, twice = counted(20), counted(40)
    assert twice < 2.5 * once, (once, twice)


def test_pauses_for_snapshots_have_bars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story().add("job_started", world_size=2, max_restarts=3)
    for step, dump in ((4, 1.0), (8, 3.0)):
        parts = {"stop": 0.5, "dump": dump, "device": 0.5}
        story.add("snapshot_pause", step=step, **parts, seconds=dump + 1.0)
    (document,) = shown_document(tmp_path, story, capsys)["jobs"]
    assert [one["phases"] for one in document["snapshot_pauses"]] == [
        {"stop": 0.5, "dump": 1.0, "devices": 0.5},
        {"stop": 0.5, "dump": 3.0, "devices": 0.5},
    ]
    assert [one["clock"] for one in document["snapshot_pauses"]] == [100.0, 99.0]
    assert main(["timeline", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    heading, columns, first, second = shown[shown.index("All ranks held for snapshots") :].splitlines()[:4]
    assert heading.strip() == "All ranks held for snapshots, seconds"
    assert " ".join(columns.split()) == "after step stop dump device in all ░ stop, █ dump, ▒ device"
    assert first.split() == ["4", "0.500", "1.000", "0.500", "2.000", "░" * 4 + "█" * 8 + "▒" * 4]
    assert second.split() == ["8", "0.500", "3.000", "0.500", "4.000", "░" * 4 + "█" * 24 + "▒" * 4]


def test_of_many_pauses_the_longest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story().add("job_started", world_size=2, max_restarts=3)
    for step in range(20):
        story.add("snapshot_pause", step=step, stop=0, dump=step % 10, device=0, seconds=step % 10)
    assert main(["timeline", written(tmp_path, story)]) == 0
    shown = capsys.readouterr().out
    rows = shown[shown.index("All ranks held for snapshots, the 8 longest of 20, seconds") :].splitlines()
    assert [row.split()[0] for row in rows[2:10]] == ["6", "7", "8", "9", "16", "17", "18", "19"]


def shown_document(tmp_path: Path, story: Story, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["timeline", "--json", written(tmp_path, story)]) == 0
    return json.loads(capsys.readouterr().out)


def written(tmp_path: Path, story: Story) -> str:
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in story.events))
    return str(tmp_path)


def test_the_command_prints_table_and_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story().killed_and_saved().restarted(19).add("job_ended", outcome="succeeded")
    assert main(["timeline", written(tmp_path, story)]) == 0
    shown = capsys.readouterr().out
    assert "save_ordered" in shown
    assert shown.endswith("The job succeeded after 1 restart.\n")


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story().killed_and_saved().restarted(19).add("job_ended", outcome="succeeded")
    assert main(["timeline", "--json", written(tmp_path, story)]) == 0
    (job,) = json.loads(capsys.readouterr().out)["jobs"]
    assert job["events"] == story.events
    assert job["recoveries"][0]["step"] == 19


def test_damage_is_said_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = written(tmp_path, Story().add("job_started").add("job_ended", outcome="succeeded"))
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write("{cut")
    assert main(["timeline", directory]) == 0
    assert "Line 3 of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["timeline", "/no/such/folder"], ["timeline"], ["timeline", "--x", "."]]
)
def test_wrong_calls_end_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "jitckpt timeline: error:" in capsys.readouterr().err


IN_PLACE: list[tuple[str, dict[str, float]]] = [
    ("rank_stopped", {}),
    ("server_restarted", {"ending": 0.25, "starting": 1.0}),
    ("calls_made_again", {"handles": 0.5, "image": 0.75, "communicators": 1.25, "replay": 1.5}),
]


def recovered_in_place(story: Story) -> Story:
    """Both ranks go back to the state after step 7, at the second attempt."""
    story.add("fault", rank=1, fault="rank=1 step=8 phase=optimizer kind=sticky", step=8, phase="optimizer")
    story.add("device_alarm", rank=1, call=90, text="CUDA error 700").add("recovery_begun", recovery=1)
    story.add("rank_stopped", rank=0, recovery=1, states=[6, 7], text="", seconds=9.0)
    story.add("device_alarm", rank=0, call=0, text="its server was ended by Killed")
    story.add("recovery_begun", recovery=2)
    for event, steps in IN_PLACE:
        for rank in (0, 1):
            stays = {"stays": rank == 0} if event == "server_restarted" else {}
            slower = {name: seconds + rank / 4 for name, seconds in steps.items()}
            story.add(event, rank=rank, recovery=2, seconds=5.0 if steps else 0.5, **slower, **stays)
    return story.add("recovered", recovery=2, state=7, seconds=11.0)


def test_a_transparent_recovery_is_told_with_its_steps() -> None:
    story = recovered_in_place(Story().add("job_started"))
    story.add("device_alarm", rank=0, call=0, text="NCCL error 6").add("recovery_begun", recovery=3)
    story.add("recovery_given_up", text="A transparent recovery is impossible: rank 1 is gone.")
    story.killed_and_saved().add("job_ended", outcome="failed")
    begun, went_on, second, given_up, died, *_ = in_words(story.events, "ckpt")
    assert begun.endswith(": CUDA error 700 (rank 1) (rehearsed: rank=1 step=8 phase=optimizer kind=sticky).")
    assert went_on == (
        "All ranks went on from the state after step 7 in the same processes, 11.00 s later, at attempt 2. "
        "The slowest rank took 0.50 s to stop, 0.50 s to abort what was under way, 1.25 s for a new server, "
        "0.75 s for streams, events, memory and kernels, 1.00 s for the memory's content, 1.50 s for "
        "communicators, 1.75 s for the calls since then. New servers: of rank 1."
    )
    assert second.endswith(": NCCL error 6 (rank 0).")
    assert given_up == "A transparent recovery is impossible: rank 1 is gone."
    assert "rank 1 was killed by SIGKILL" in died


def test_a_rehearsed_failure_is_told_of_one_recovery_alone() -> None:
    story = Story().add("job_started").killed_and_saved()
    story.add("device_alarm", rank=0, call=0, text="NCCL error 6").add("recovery_begun", recovery=1)
    story.add("recovered", recovery=1, state=7, seconds=1.0)
    told = "\n".join(in_words(story.events, "ckpt"))
    assert told.count("rehearsed") == 1
    assert ": NCCL error 6 (rank 0).\n" in told


def test_the_memory_that_transparent_mode_has_taken_is_told() -> None:
    story = Story().add("job_started").add("validated", rank=0, text="", log_bytes=8e6, image_bytes=3e6)
    story.add("calls_made_again", rank=1, log_bytes=4e6, image_bytes=5e6).add(
        "job_ended", outcome="succeeded"
    )
    assert in_words(story.events, "ckpt") == [
        "A rank has taken at most 8 MB of host memory for the log of its calls and 5 MB for images of its "
        "device's memory.",
        "The job succeeded.",
    ]


def test_a_transparent_recovery_is_one_of_the_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = recovered_in_place(Story().add("job_started")).add("recovery_begun", recovery=3).events
    (tmp_path / FILE_NAME).write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["timeline", "--json", str(tmp_path)]) == 0
    (one,) = json.loads(capsys.readouterr().out)["jobs"][0]["transparent_recoveries"]
    assert (one["rank"], one["attempts"], one["state"], one["given_up"]) == (1, 2, 7, None)
    assert one["replaced"] == [1]
    slowest = {"stop": 0.5, "ending": 0.5, "starting": 1.25}
    slowest |= {"handles": 0.75, "image": 1.0, "communicators": 1.5, "replay": 1.75}
    assert one["steps"] == slowest
    first, second = one["ranks"]
    assert (first["rank"], first["replaced"], second["replaced"]) == (0, False, True)
    # Rank 1's calls were made again at 113 s, a second before all went on.
    assert [(step["name"], step["begin"], step["seconds"]) for step in second["steps"]][3:] == [
        ("handles", 108.0, 0.75),
        ("image", 108.75, 1.0),
        ("communicators", 109.75, 1.5),
        ("replay", 111.25, 1.75),
    ]


def test_a_worker_that_was_made_anew_has_two_steps_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story().add("job_started").add("device_alarm", rank=1, call=9, text="CUDA error 999")
    story.add("recovery_begun", recovery=1).add("rank_stopped", rank=1, recovery=1, states=[7], seconds=0.5)
    story.add("device_exchanged", rank=1, broken="1", device="2")
    story.add("worker_moved", rank=1, pids=[5], bytes=4e8, dump=0.25, restore=0.75, seconds=1.25)
    story.add("calls_made_again", rank=1, recovery=1, seconds=1.0, handles=0.5)
    story.add("recovered", recovery=1, state=7, seconds=6.0)
    assert main(["timeline", written(tmp_path, story)]) == 0
    shown = capsys.readouterr().out
    assert "0.50 s to stop, 0.25 s to be dumped, 0.75 s to be restored, 0.00 s to abort" in shown
    assert "Rank 1 has device 2 in the place of device 1, which is broken." in shown
    (row,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["1"]]
    assert row[:4] == ["1", "0.500", "0.250", "0.750"]


@pytest.mark.parametrize(
    ("more", "who"), [({}, "is another one since,"), ({"ranks_of": 0}, "has come for host 0,")]
)
def test_ranks_that_were_moved_to_another_host_have_three_steps_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, int], who: str
) -> None:
    story = Story().add("job_started").add("device_alarm", rank=3, call=9, text="CUDA error 999")
    story.add("recovery_begun", recovery=1)
    for rank in (2, 3):
        story.add("rank_stopped", rank=rank, recovery=1, states=[7], seconds=0.5)
    took = {"dump": 0.25, "transfer": 0.5, "restore": 0.75}
    story.add("ranks_moved", host=1, ranks=[2, 3], bytes=400_000_000, **took, **more)
    # A second failure on the way: what was moved is not moved again.
    story.add("recovery_begun", recovery=2)
    for rank in (2, 3):
        story.add("rank_stopped", rank=rank, recovery=2, states=[7], seconds=0.125)
        story.add("calls_made_again", rank=rank, recovery=2, seconds=1.0, handles=0.5)
    story.add("recovered", recovery=2, state=7, seconds=6.0)
    assert main(["timeline", written(tmp_path, story)]) == 0
    shown = capsys.readouterr().out
    assert "0.12 s to stop, 0.25 s to be dumped, 0.50 s to be sent, 0.75 s to be restored" in shown
    assert f"Host 1 {who} with ranks 2, 3: 400 MB came there." in shown
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] in (["2"], ["3"])]
    assert "transfer" in shown, "a heading is cut off"
    assert [row[:5] for row in rows] == [[rank, "0.125", "0.250", "0.500", "0.750"] for rank in "23"]
    spans = [one for one in trace([story.events])["traceEvents"] if one["ph"] == "X"]
    moves = [(one["name"], one["ts"], one["dur"]) for one in spans if "recovery" in one["args"]]
    assert moves.count(("sending it to another host", 3.75e6, 0.5e6)) == 2


def test_a_rank_that_did_not_come_so_far_has_no_steps_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story().add("job_started").add("device_alarm", rank=0, call=0, text="NCCL error 6")
    story.add("recovery_begun", recovery=1).add("rank_stopped", rank=1, recovery=1, states=[], seconds=0.125)
    story.add("recovery_given_up", text="A transparent recovery is impossible: rank 0 is gone.")
    assert main(["timeline", written(tmp_path, story)]) == 0
    shown = capsys.readouterr().out
    assert "Recovery after NCCL error 6, seconds" in shown
    assert ["1", "0.125", "same"] in [line.split() for line in shown.splitlines()]


def test_a_restart_that_does_not_go_on_from_what_was_saved_says_so() -> None:
    story = Story().add("registered", checkpoint_dir="/first/ckpt").killed_and_saved()
    story.restart = 1
    story.add("restart").add("registered", checkpoint_dir="/second/ckpt").add("first_step", rank=0, step=1)
    (recovery,) = recoveries(story.events)
    assert (recovery.saved_step, recovery.step, recovery.redone) == (19, 0, 20)
    told = in_words(story.events, "ckpt")
    assert told[1].startswith("The state after step 19 was saved")
    assert told[2].startswith(
        "Restart 1 did not go on from the state after step 19, but from step 0, in /second/ckpt, "
        "with at most 20 minibatches done again"
    )
