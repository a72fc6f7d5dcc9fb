"""`jitckpt run` says in a sentence why its host could not go on."""

import errno
import os

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from jitckpt.cli.run import _has_saved, _status_of
from jitckpt.errors import HostsMissing
from jitckpt.events import Event
from jitckpt.wire.exit_statuses import HOSTS_MISSING


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN])
def test_a_host_without_room_for_processes_is_named(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status_of(OSError(number, os.strerror(number))) == 1
    assert f"its host has no room for more: {os.strerror(number)}" in capsys.readouterr().err


def test_another_error_of_the_system_is_not_kept_back() -> None:
    with pytest.raises(FileNotFoundError):
        _status_of(FileNotFoundError(errno.ENOENT, "there is none"))


def test_a_store_that_can_not_be_reached_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = RendezvousConnectionError("see inner exception")
    error.__cause__ = RuntimeError("nobody listens there\nframe 1\nframe 2")
    assert _status_of(error) == 1
    said = capsys.readouterr().err
    assert "the store where the hosts meet can't be reached: nobody listens there" in said
    assert "frame" not in said


def test_hosts_that_are_missing_have_a_status_of_their_own() -> None:
    assert _status_of(HostsMissing("Two are gone.")) == HOSTS_MISSING


def _events(*named: tuple[int, str]) -> list[Event]:
    """Return events of starts: how often the ranks had been restarted, and the name."""
    return [{"restart": restart, "event": name, "in_memory": ""} for restart, name in named]


@pytest.mark.parametrize(
    ("events", "restart", "has_saved"),
    [
        (_events((0, "first_step"), (0, "saved")), 0, True),
        (_events((0, "first_step"), (0, "memory_written")), 0, True),
        (_events((0, "first_step"), (0, "not_saved")), 0, False),
        # The signal comes while the ranks are being started again: nothing is lost of what was saved.
        (_events((0, "first_step"), (0, "saved"), (1, "restart")), 1, True),
        (_events((0, "first_step"), (0, "saved"), (1, "restored"), (2, "restored")), 2, True),
        (_events((0, "first_step"), (0, "saved"), (1, "first_step"), (1, "not_saved")), 1, False),
        (_events((0, "first_step"), (0, "saved"), (1, "first_step"), (2, "restored")), 2, False),
        # The same command a second time, which has come to no step.
        (_events((0, "job_started"), (0, "restored")), 0, True),
        (_events((0, "job_started"), (0, "registered")), 0, False),
    ],
)
def test_a_job_that_a_signal_ends_is_saved_if_no_step_is_lost(
    events: list[Event], restart: int, has_saved: bool
) -> None:
    assert _has_saved(events, restart) is has_saved


def test_what_only_memory_had_is_not_saved() -> None:
    events = [{"restart": 0, "event": "restored", "in_memory": "all hosts have it"}]
    assert not _has_saved(events, 0)
