"""What `jitckpt watch` prints, once and live, and whom it asks."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from simulated_job import SimulatedJob

from jitckpt.cli import main
from jitckpt.reports.following import Follower
from jitckpt.reports.live import LOOKS, view
from jitckpt.web.beside import is_loopback, parse_address, token_for

LIMIT = 60.0  # seconds, for a hang


@pytest.fixture
def job(tmp_path: Path) -> SimulatedJob:
    job = SimulatedJob(tmp_path / "ckpt", ranks=4, shards=2, started=time.time() - 50)
    job.begin()
    job.at = 30
    job.progress(20)
    return job


def shown(job: SimulatedJob, width: int = 100) -> str:
    follower = Follower(job.directory)
    follower.look()
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view(follower.present(), follower.silent(), follower.problem, width))
    return console.export_text()


def test_a_job_from_its_start_to_its_end(job: SimulatedJob) -> None:
    text = shown(job)
    assert "training  step 20  1 s a step  restart 0 of 5" in text
    assert "shard 0 ##\nshard 1 ##\n# 4 training" in "\n".join(line.rstrip() for line in text.splitlines())
    assert "100% of the ranks have a living replica: 2 or more copies of each of 2 shards" in text
    assert "no step lies whole on the disk" in text
    job.at = 40
    job.fail(1, 29)
    text = shown(job)
    assert "recovering" in text
    assert "shard 1 Xs" in text
    assert "50% of the ranks have a living replica" in text
    assert "not so shard 1" in text
    job.save(1, 29)
    job.begin(29)
    text = shown(job, 160)
    assert "step 29 (just in time, 1 again)" in text
    assert "step 29 lies whole on the disk" in text
    assert "a rank died" in text
    job.write("restart", world_size=4, max_restarts=5)  # no rank has a step yet
    assert re.search(r"recovering  [0-9.]+ s a step  restart|starting  [0-9.]+ s a step", shown(job)), shown(
        job
    )
    job.write("job_ended", outcome="failed")
    text = shown(job)
    assert "the job is over; no rank holds its state any more\nstep 29 lies whole on the disk" in plain(text)
    assert "living replica" not in text


def test_what_protects_a_job_in_transparent_mode_that_has_called_no_init(tmp_path: Path) -> None:
    job = SimulatedJob(tmp_path, ranks=2, shards=1, started=time.time() - 50)
    job.write("job_started", world_size=2, max_restarts=5)
    assert "nothing is protected yet: no rank has come through jitckpt.init" in shown(job, 200)
    job.each("proxy_connected")
    assert "failures of devices are recovered from in place; after the loss of a process" in shown(job, 200)


def plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("width", [20, 40, 80, 300])
@pytest.mark.parametrize("ranks", [1, 1024])
def test_any_width_and_many_ranks(tmp_path: Path, ranks: int, width: int) -> None:
    job = SimulatedJob(tmp_path, ranks=ranks, shards=min(ranks, 8), started=time.time() - 50)
    job.begin()
    text = shown(job, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "training" in text


def test_every_state_has_a_look_of_its_own() -> None:
    letters = [letter for letter, _ in LOOKS.values()]
    assert len(set(letters)) == len(letters)


def test_without_a_terminal_it_is_printed_once(job: SimulatedJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(job.directory)]) == 0
    assert "training" in capsys.readouterr().out
    assert main(["watch", "--json", str(job.directory)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["job"]["step"], document["silent"], document["problem"]) == (20, None, "")


def test_the_only_folder_with_events_is_found(
    job: SimulatedJob, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.directory.parent)
    assert main(["watch"]) == 0
    assert "training" in capsys.readouterr().out
    SimulatedJob(job.directory.parent / "other", ranks=1, shards=1, started=0.0).begin()
    with pytest.raises(SystemExit):
        main(["watch"])
    assert "name the checkpoint directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere"], "there is no directory /nowhere"),
        (["--page", "99999", "."], "'99999' is not a port from 0 to 65535"),
        (["--page", "1", "http://127.0.0.1:1/"], "--page is for a directory"),
        (["http://127.0.0.1:1/"], "http://127.0.0.1:1/ can't be watched: <urlopen error"),
    ],
)
def test_wrong_calls(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(["watch", *arguments]))
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_an_empty_folder_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path)])
    assert "events.jsonl: no job writes there." in capsys.readouterr().err
    (tmp_path / "events.jsonl").touch()
    for command in ("watch", "timeline"):
        with pytest.raises(SystemExit) as caught:
            main([command, str(tmp_path)])
        assert caught.value.code == 2
        assert re.search("no event|No job has written an event", capsys.readouterr().err, re.I)


def test_events_that_lack_something_are_passed_over(
    job: SimulatedJob, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever may write the log may write anything; and it may be of another version."""
    job.write("straggler", ranks=[[1], {"a": 2}])
    job.write("save_ordered", ranks=[[1]])
    job.write("state_stays", replicas=[[0, "[red]"], 3])
    job.write("detected", cause="died")
    job.write("recovery_begun")
    job.write("validated", log_bytes="many")
    assert main(["watch", "--json", str(job.directory)]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["state"] == "training"
    assert main(["timeline", str(job.directory)]) == 0
    said = capsys.readouterr()
    assert said.err.count("lack what they should have") == 6
    assert "first_step" in said.out


def watch_in_a_terminal(directory: Path) -> tuple["subprocess.Popen[bytes]", int]:
    """Start `jitckpt watch`; return it and our end of its terminal."""
    ours, theirs = pty.openpty()
    call = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
    process = subprocess.Popen(
        [*call, "watch", str(directory)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "50"},
    )
    os.close(theirs)
    return process, ours


def test_in_a_terminal_a_job_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    """Who starts both at once has no checkpoint directory yet."""
    process, ours = watch_in_a_terminal(tmp_path / "ckpt")
    try:
        read_until(ours, "It is waited for")
        job = SimulatedJob(tmp_path / "ckpt", ranks=2, shards=1, started=time.time())
        job.begin()
        read_until(ours, "training")
        job.write("job_ended", outcome="succeeded")
        read_until(ours, None)
        assert process.wait(LIMIT) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def test_live_in_a_terminal_until_the_job_ends(job: SimulatedJob) -> None:
    process, ours = watch_in_a_terminal(job.directory)
    try:
        text = read_until(ours, "training")
        job.at = 45
        job.fail(1, 29)
        text = read_until(ours, "recovering")
        assert "rank 1 was killed by SIGKILL" in text + read_until(ours, "where the time went")
        job.write("job_ended", outcome="failed")
        rest = read_until(ours, None)
        assert re.search(r"failed\s+step 29", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", rest))
        assert process.wait(LIMIT) == 0
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(ours)


def read_until(terminal: int, wanted: str | None) -> str:
    """Read until that has come, or until nobody writes any more."""
    text, end = "", time.monotonic() + LIMIT
    while wanted is None or wanted not in text:
        assert time.monotonic() < end, text
        try:
            text += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:
            assert wanted is None, text
            break
    return text


def test_addresses() -> None:
    assert parse_address("9400") == ("127.0.0.1", 9400)
    assert parse_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert parse_address("[::1]:0") == ("::1", 0)
    for wrong in ("", "x", "1.2.3.4", "host:", "host:-1", "65536"):
        with pytest.raises(ValueError, match="is not a port"):
            parse_address(wrong)
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "node7")] == [
        *[True] * 3,
        *[False] * 2,
    ]


def test_a_token_is_asked_for_where_others_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JITCKPT_PAGE_TOKEN", raising=False)
    assert token_for("127.0.0.1") is None
    first, second = token_for("0.0.0.0"), token_for("0.0.0.0")
    assert first is not None
    assert len(first) >= 24
    assert first != second
    monkeypatch.setenv("JITCKPT_PAGE_TOKEN", "ours")
    assert token_for("127.0.0.1") == "ours"
