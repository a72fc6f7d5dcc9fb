import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitckpt import events
from jitckpt.events import FILE_NAME, EventLog, read_events


def test_events_are_kept_until_the_directory_is_known(tmp_path: Path) -> None:
    log = EventLog()
    log.write("job_started", world_size=2)
    log.restart = 1
    log.open(tmp_path / "new" / "ckpt")
    log.open(tmp_path / "another")
    log.write("restart")
    events, damages = read_events(tmp_path / "new" / "ckpt")
    assert [(event["event"], event["restart"]) for event in events] == [("job_started", 0), ("restart", 1)]
    assert events == log.events
    assert damages == []
    assert events[0]["clock"] <= events[1]["clock"]
    assert not (tmp_path / "another").exists()


def test_several_processes_append_whole_lines(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from jitckpt.events import EventLog
log = EventLog(Path(sys.argv[1]))
for number in range(200):
    log.write("e", writer=sys.argv[2], number=number, text="x" * 500)
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "ab"]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    events, damages = read_events(tmp_path)
    assert damages == []
    for name in "ab":
        assert [e["number"] for e in events if e["writer"] == name] == list(range(200))


def test_damaged_lines_are_passed_over_and_named(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write("first")
    path = tmp_path / FILE_NAME
    with path.open("ab") as file:
        for line in (b"\xff\xfe", b'{"event": "x"}', b"[]", b'{"event": 1, "time": 1, "clock": 1}'):
            file.write(line + b"\n")
    log.write("last")
    with path.open("ab") as file:
        file.write(b'{"event": "cut o')
    events, damages = read_events(tmp_path)
    assert [event["event"] for event in events] == ["first", "last"]
    assert damages == [f"Line {n} of {path} is damaged and passed over." for n in (2, 3, 4, 5, 7)]


def test_a_directory_that_cannot_be_written_is_said_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    log = EventLog(tmp_path / "file")
    log.write("detected")
    assert "events can't be written" in capsys.readouterr().err
    assert len(log.events) == 1


def test_a_full_disk_is_said_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    EventLog(tmp_path).write("detected")
    assert "No space left on device" in capsys.readouterr().err


def test_every_event_is_one_json_line(tmp_path: Path) -> None:
    EventLog(tmp_path).write("warning", text="two\nlines", rank=1)
    (line,) = (tmp_path / FILE_NAME).read_text().splitlines()
    event = json.loads(line)
    assert event["text"] == "two\nlines"
    assert set(event) == {"event", "time", "clock", "restart", "text", "rank"}


def test_a_file_system_that_blocks_holds_up_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / FILE_NAME)  # which nobody reads: to open it for writing takes for ever
    monkeypatch.setattr(events, "LAST_SECONDS", 0.1)
    log = EventLog(tmp_path, aside=True)
    for name in ("first", "second"):
        log.write(name)
    log.finish()
    assert f"the file system of {tmp_path} does not answer" in capsys.readouterr().err
    reader = os.open(tmp_path / FILE_NAME, os.O_RDONLY)  # now it answers
    monkeypatch.setattr(events, "LAST_SECONDS", 60)
    log.finish()
    lines = os.read(reader, 1 << 16).splitlines()
    os.close(reader)
    assert [json.loads(line)["event"] for line in lines] == ["first", "second"]
    assert capsys.readouterr().err == ""


def test_what_is_said_waits_for_nobody_who_reads_it() -> None:
    code = """
import sys
from jitckpt import console
console.LAST_SECONDS = 0.1
with console.said_aside():
    for _ in range(100):
        console.say("x" * 10_000)
print("went on", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"went on\n"
    process.communicate(timeout=300)


def test_a_disk_that_is_full_is_said_once_until_it_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path)
    (tmp_path / FILE_NAME).mkdir()  # nothing can be written there
    log.write("first")
    log.write("second")
    assert capsys.readouterr().err.count("events can't be written") == 1
    (tmp_path / FILE_NAME).rmdir()
    log.write("third")
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    log.write("fourth")
    assert capsys.readouterr().err.count("events can't be written") == 1
