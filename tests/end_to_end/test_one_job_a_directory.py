"""A checkpoint directory that another job uses, has used, or has ended with."""

import errno
import re
import signal

import preloads
import pytest
from gpt import RUN, TRAINING, digests
from launcher import Launcher
from programs_of_tests import text_of

IMPATIENT = text_of("one_job_a_directory_impatient")
FAULT = ["--fault", "rank=1 step=8 phase=backward kind=kill"]


def test_a_second_job_is_refused_until_the_first_has_ended_however_it_does(launcher: Launcher) -> None:
    long = [*TRAINING, "--steps", "100000"]
    first = launcher.start(*RUN, *long)
    assert first.stdout is not None
    while "step 3 of" not in first.stdout.readline():
        pass
    second = launcher.run(*RUN, launcher.script(IMPATIENT), *TRAINING)
    assert second.status == 1
    assert f"{launcher.directory / 'ckpt'} is in use by another job, which took it at" in second.err
    assert "Restart 1" not in second.err
    assert first.poll() is None
    first.send_signal(signal.SIGKILL)  # its ranks save, and end a moment later
    again = launcher.start(*RUN, *long)
    assert again.stderr is not None
    while "goes on from step" not in (line := again.stderr.readline()):
        assert line
    again.send_signal(signal.SIGTERM)
    launcher.finish(again)


def test_a_start_says_what_it_goes_on_from_and_what_differs(
    launcher: Launcher, undisturbed: list[str]
) -> None:
    first = launcher.run(*RUN, *FAULT, *TRAINING)
    assert first.status == 0, first.err
    assert "goes on from" not in first.err, "a restart tells it at the end"
    again = launcher.run(*RUN, *TRAINING, "--learning-rate", "0.5")
    assert again.status == 0, again.err
    assert re.search(r"goes on from step [67], saved at .* by job [0-9a-f]{32} in ", again.err), again.err
    assert "that job has ended successfully at" in again.err
    assert "this start differs from the one before" in again.err
    assert "(was AdamW(lr=0.002" in again.err
    assert digests(again.out) == undisturbed, "the save's hyperparameters hold"


def test_a_lost_job_file_is_made_again(launcher: Launcher, undisturbed: list[str]) -> None:
    assert launcher.run(*RUN, *FAULT, *TRAINING).status == 0
    (launcher.directory / "ckpt" / "job.json").unlink()
    again = launcher.run(*RUN, *TRAINING)
    assert again.status == 0, again.err
    assert re.search("goes on from step [67]", again.err), again.err  # the device may be behind its host
    assert digests(again.out) == undisturbed


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_once_and_stops_nothing(
    launcher: Launcher, undisturbed: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Checkpoint directory and folder for temporary files alike."""
    library = preloads.compiled(launcher.directory, "locks")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("NO_LOCKS", str(number))
    ended = launcher.run(*RUN, *FAULT, *TRAINING)
    assert ended.status == 0, ended.err
    assert digests(ended.out) == undisturbed
    assert len(re.findall(r"Restart \d went on", ended.err)) == 1
    sentence = f"The file system of {launcher.directory / 'ckpt'} has no locks"
    assert ended.err.count(f"{sentence} (") in (1, 2), "once a start"
    assert "see to it that no other job uses this checkpoint directory" in ended.err
