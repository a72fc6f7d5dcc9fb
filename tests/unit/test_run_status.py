"""`jitckpt run` says in a sentence why its host could not go on."""

import errno
import os

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from jitckpt.cli.run import _status_of
from jitckpt.errors import HostsMissing
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
