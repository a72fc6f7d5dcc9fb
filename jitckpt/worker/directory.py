"""The checkpoint directory: which it is, whose, and whether all ranks of a host have the same."""

import json
import os
import uuid
import warnings
from pathlib import Path

import torch

from jitckpt.errors import CheckpointError, SaveError
from jitckpt.saves import directory_lock, folders, starts
from jitckpt.saves.starts import Start
from jitckpt.state.shards import hear_first
from jitckpt.wire import environment
from jitckpt.worker.agreements import job_store, told_by_first

DEFAULT_DIRECTORY = "ckpt"


def root_of(checkpoint_dir: str | os.PathLike[str] | None) -> Path:
    """Return the checkpoint directory to use."""
    if rehearsal := environment.REHEARSAL_DIR.get():
        return rehearsal.absolute() / DEFAULT_DIRECTORY
    named = named_directory(checkpoint_dir)
    # A script may make each start a working directory of its own.
    return Path(environment.FIRST_DIRECTORIES.get().get(named, named)).absolute()


def named_directory(checkpoint_dir: str | os.PathLike[str] | None) -> str:
    return os.fspath(checkpoint_dir or environment.CHECKPOINT_DIR.get())


def job_id(root: Path, rank: int) -> str:
    """Return the job's id; each of several hosts may have a checkpoint directory of its own."""
    told = told_by_first("job", rank, folders.open_directory(root) if rank == 0 else "")
    found = folders.open_directory(root, told)
    _check_same(root, rank)
    if (unlocked := directory_lock.hold(root, _run_id(rank))) is not None and rank == 0:
        warnings.warn(f"jitckpt: {unlocked}", RuntimeWarning, stacklevel=4)
    if told not in (None, found):
        raise CheckpointError(
            f"{root} of rank {rank} belongs to another job than that of rank 0. Choose another checkpoint "
            "directory, or move one of them away."
        )
    try:
        starts.note_begun(root, start())
    except (OSError, SaveError) as error:
        raise CheckpointError(f"Rank {rank} can't begin in {root}: {error}") from None
    return found


def start() -> Start:
    """Return which start of the job this is, by a coordination service."""
    return Start.parse(environment.START.get())


def _check_same(root: Path, rank: int) -> None:
    """See to it that all ranks of a host have one checkpoint directory."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    store = job_store()
    status = root.stat()
    own = json.dumps([status.st_dev, status.st_ino, str(root)])
    host, place = os.environ.get("GROUP_RANK", "0"), int(os.environ.get("LOCAL_RANK", rank))
    told = json.loads(hear_first(store, f"checkpoint directory of host {host}", place, own))
    if told[:2] != [status.st_dev, status.st_ino]:
        raise CheckpointError(
            f"Rank {rank} has the checkpoint directory {root}, the first of its host {told[2]}. All have "
            "to have the same: give an absolute path, or change the working directory after jitckpt.init."
        )


def _run_id(rank: int) -> str:
    """Return which run this process is of, as all its ranks and agents call it."""
    run = environment.RUN.get()
    if run is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        store = job_store()
        run = hear_first(store, "run", rank, uuid.uuid4().hex)
    if run is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        run = "/".join(
            os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        )
    return run or uuid.uuid4().hex
