"""Lightning's ModelCheckpoint: files of what a restart makes again are in nobody's way.

It writes over no file that it does not know, and gives its own another name ("last-v1.ckpt") where one is.
After a restart it knows those from before the restored batch. The others, that the start before wrote behind
that batch, are noted as they are written, with the number of batches that were done by then: for
ModelCheckpoint they are not there until it writes them again.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jitckpt.frameworks import notes, protection
from jitckpt.frameworks.protection import FrameworkProtection
from jitckpt.wire import environment
from jitckpt.worker import directory

FILE = "lightning_checkpoints.json"
NOT_IN_STATE = ("_last_checkpoint_saved", "_last_global_step_saved")  # by which ModelCheckpoint goes, too

_again: set[str] = set()  # that this start has not written yet, and the one before it has
_batches_done: Callable[[], int] | None = None  # before the newest batch, while a training is protected


def install(model_checkpoint: Any) -> None:
    """Change the class in this module of Lightning's."""
    kind = model_checkpoint.ModelCheckpoint
    save, link, exists = kind._save_checkpoint, kind._link_checkpoint, kind.file_exists

    def _save_checkpoint(self: Any, trainer: Any, filepath: str) -> None:
        _writes(trainer, filepath)
        save(self, trainer, filepath)

    def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
        _writes(trainer, linkpath)
        link(trainer, filepath, linkpath)

    def file_exists(self: Any, filepath: Any, trainer: Any) -> bool:
        return str(filepath) not in _again and bool(exists(self, filepath, trainer))

    kind._save_checkpoint, kind.file_exists = _save_checkpoint, file_exists
    kind._link_checkpoint = staticmethod(_link_checkpoint)


def training_begins(training: FrameworkProtection, batches_done: Callable[[], int]) -> None:
    """A training begins, or goes on. batches_done: returns how many there were before the newest."""
    global _batches_done  # noqa: PLW0603
    _batches_done = batches_done
    _again.clear()
    noted = _noted()
    if training.restored == 0 and (environment.RESTART.get() == 0 or noted["run"] != _run()):
        noted["files"] = {}  # another training's
    since = batches_done() if training.restored else 0
    written = [path for path, number in noted["files"].items() if number >= since]
    _again.update(protection.agree(written)[0])  # hosts have notes of their own
    if training.job.identity.rank == 0:
        notes.write(_file(), noted | {"run": _run()})


def state_of(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return what each ModelCheckpoint goes by and leaves out of its state."""
    return {
        one.state_key: {name: getattr(one, name) for name in NOT_IN_STATE if hasattr(one, name)}
        for one in trainer.checkpoint_callbacks
        if hasattr(one, "best_k_models")
    }


def put_back(trainer: Any, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Let each be as `state_of` said."""
    for one in trainer.checkpoint_callbacks:
        vars(one).update(states.get(one.state_key, {}))


def _writes(trainer: Any, path: str) -> None:
    """Note a file before it is there, and forget those that are there no more."""
    _again.discard(str(path))
    if _batches_done is None or not trainer.is_global_zero:
        return
    noted = _noted()
    files = {one: number for one, number in noted["files"].items() if "://" in one or os.path.lexists(one)}
    notes.write(_file(), noted | {"files": files | {str(path): _batches_done()}})


def _noted() -> dict[str, Any]:
    return notes.read(_file()) or {"run": "", "files": {}}


def _file() -> Path:
    return directory.root_of(None) / FILE


def _run() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")
