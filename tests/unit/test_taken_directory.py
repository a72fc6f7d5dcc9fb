"""A launcher with snapshots and another one on the same directory."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from jitckpt.cli.run import _take_directory
from jitckpt.errors import CheckpointError
from jitckpt.saves import directory_lock

HOLD = """
import sys
from pathlib import Path
from jitckpt.saves import directory_lock
directory_lock.hold(Path(sys.argv[1]), "another")
print(flush=True)
sys.stdin.read()
"""


def test_the_second_launcher_is_refused_while_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", 0.0)
    args = argparse.Namespace(snapshot_every=5.0, standalone=True, checkpoint_dir=tmp_path / "job")
    args.checkpoint_dir.mkdir()
    command = [sys.executable, "-c", HOLD, str(args.checkpoint_dir)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with pytest.raises(CheckpointError, match="is in use by another job"):
            _take_directory(args)
        first.communicate()
    assert len(_take_directory(args)) == 32
    directory_lock.release(args.checkpoint_dir)


def test_without_snapshots_the_directory_is_the_ranks_affair(tmp_path: Path) -> None:
    args = argparse.Namespace(snapshot_every=None, checkpoint_dir=tmp_path)
    assert _take_directory(args)
    assert list(tmp_path.iterdir()) == []
