"""--health-check: what it says of a host, and what becomes of its processes."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from jitckpt.agent import health
from jitckpt.errors import HostsMissing


def test_a_host_whose_check_ends_with_0_is_well() -> None:
    assert health.why_unfit("echo all is well") == ""


def test_the_last_line_says_what_is_wrong() -> None:
    assert health.why_unfit("echo first; echo GPU 3 has fallen off the bus >&2; exit 4") == (
        "`echo first; echo GPU 3 has fallen off the bus >&2; exit 4` ended with status 4: "
        "GPU 3 has fallen off the bus"
    )
    assert health.why_unfit("kill -9 $$") == "`kill -9 $$` ended with signal 9"
    assert health.why_unfit(r"printf '\033[31mred\033[0m'; exit 1").endswith("status 1: ?[31mred?[0m")


def test_a_check_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    command = f"sleep 600 & echo $! > {tmp_path}/made; mv {tmp_path}/made {tmp_path}/pid; wait"
    seconds = 1
    while not (tmp_path / "pid").exists():  # on a busy machine it has not come so far by then
        seconds *= 2
        assert health.why_unfit(command, seconds=seconds).endswith(f"has not ended in {seconds} s")
    started = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{started}/stat").read_text().rpartition(") ")[2][0]
        except FileNotFoundError:
            return
        if state == "Z":  # whoever adopted it has not looked yet
            return
        time.sleep(0.01)
    os.kill(started, 9)
    pytest.fail("a process of the check still runs")


def test_a_host_is_waited_for_until_its_check_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "PAUSE_SECONDS", 0)
    command = f"cd {tmp_path}; echo x >> tries; test $(wc -l < tries) -ge 4 || {{ echo sick; exit 1; }}"
    health.wait_until_well(command, timeout=600)
    said = capsys.readouterr().err
    assert said.count("this host is not taken") == 1
    assert "status 1: sick" in said
    assert said.count("it may be taken again") == 1


def test_others_are_told_each_time_why_a_host_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PAUSE_SECONDS", 0)
    told: list[str] = []
    health.wait_until_well(f"cd {tmp_path}; rm well || ! touch well", timeout=600, tell=told.append)
    assert len(told) == 2
    assert told[0].endswith("ended with status 1: rm: cannot remove 'well': No such file or directory")
    assert told[1] == "", "it is well again"


def test_who_reports_a_host_is_given_its_name_why_and_what_kind_of_report_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = health.HostReports(f"printf '%s|' \"$@\" >> {tmp_path}/told")
    reports.tell("node 7", "it is silent; $(rm -r /)", health.LOST)
    reports.finish()
    reports.tell("node 7", "it is silent again", health.LOST)  # it is known
    reports.finish()
    reports.tell("node 7", "rank 3 has failed twice on device 1", health.SUSPECT)
    reports.finish()
    assert (tmp_path / "told").read_text() == (
        "node 7|it is silent; $(rm -r /)|lost|node 7|rank 3 has failed twice on device 1|suspect|"
    )
    said = capsys.readouterr().err
    assert said.count("node 7 is reported: ") == 2


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo there is no such node; exit 1", "ended with status 1: there is no such node."),
        ("sleep 600", "has not ended in 0 s."),
        ("x" * 200_000, "can't be run: [Errno 7] Argument list too long"),
    ],
)
def test_a_report_that_fails_is_said_and_harms_nobody(
    command: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "sleep 600":
        monkeypatch.setattr(health, "why_unfit", partial(health.why_unfit, seconds=0))
    reports = health.HostReports(command)
    reports.tell("node 8", "it is silent", health.LOST)
    reports.finish()
    said = capsys.readouterr().err
    assert "node 8 could not be reported: " in said
    assert why in said


def test_the_end_of_a_job_does_not_wait_for_a_scheduler_that_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LAST_SECONDS", 0)
    reports = health.HostReports(f"while ! test -e {tmp_path}/go; do sleep 0.01; done; touch {tmp_path}/told")
    reports.tell("node 8", "it is silent", health.LOST)
    reports.finish()
    assert not (tmp_path / "told").exists()
    (tmp_path / "go").touch()
    monkeypatch.undo()
    reports.finish()
    assert (tmp_path / "told").exists()


def test_a_host_that_stays_unwell_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PAUSE_SECONDS", 0)
    with pytest.raises(HostsMissing, match="has not passed in 0 s: `false` ended with status 1"):
        health.wait_until_well("false", timeout=0)


def test_a_daemon_of_the_check_holds_up_nobody(tmp_path: Path) -> None:
    number = tmp_path / "number"
    began = time.monotonic()
    why = health.why_unfit(f"setsid sh -c 'echo $$ > {number}; exec sleep 60' & exit 0", seconds=2)
    os.kill(int(number.read_text()), signal.SIGKILL)
    assert time.monotonic() - began < 30
    assert "has not ended in 2 s" in why
