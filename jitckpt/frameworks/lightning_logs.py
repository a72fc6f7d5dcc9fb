"""Lightning's loggers: a restart goes on in their versions, which checkpoints go by, and with their rows.

A CSVLogger that begins in a folder removes what is there. So where a job has begun it is left until it is
known whether the training goes on: then it has the rows again that it had at the restored step's end, and
else they are removed after all.
"""

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jitckpt.frameworks import notes, protection
from jitckpt.wire import environment
from jitckpt.worker import directory

FILE = "lightning_versions.json"
LOST = "{path} lacks rows that were logged before the failure: it has {found}, and had {rows}."
_ROWS, _REMOVE = "_jitckpt_rows", "_jitckpt_remove"

_versions: list[Any] = []  # that loggers have found for themselves in this start


def install(loggers: Any, csv_logs: Any) -> None:
    """Change the classes of loggers, and the module of CSVLogger's."""
    for kind in (loggers.CSVLogger, loggers.TensorBoardLogger):
        kind._get_next_version = _as_before(kind._get_next_version)
    kind = csv_logs.ExperimentWriter
    log, remove = kind.log_metrics, kind._check_log_dir_exists

    def log_metrics(self: Any, *args: Any, **kwargs: Any) -> None:
        log(self, *args, **kwargs)
        vars(self)[_ROWS] = vars(self).get(_ROWS, 0) + 1

    def _check_log_dir_exists(self: Any) -> None:
        if _file().exists():
            vars(self)[_REMOVE] = lambda: remove(self)
        else:
            remove(self)

    kind.log_metrics, kind._check_log_dir_exists = log_metrics, _check_log_dir_exists


def training_begins(trainer: Any, training: "protection.FrameworkProtection | None") -> None:
    """It is known whether the training goes on. training: None if it has no protection."""
    for writer in _writers(trainer):
        remove = None if writer is None else vars(writer).pop(_REMOVE, None)
        if remove is not None and (training is None or training.restored == 0):
            remove()
    if training is not None and training.job.identity.rank == 0:
        notes.write(_file(), {"run": _run(), "versions": _versions})


def state_of(trainer: Any) -> list[dict[str, Any] | None]:
    """Return how far each logger's file is, and what is not in it yet."""
    return [
        None
        if writer is None
        else {
            "rows": vars(writer).get(_ROWS, 0) - len(writer.metrics),
            "waiting": json.dumps(writer.metrics, default=str),
            "names": [*writer.metrics_keys],
        }
        for writer in _writers(trainer)
    ]


def put_back(trainer: Any, state: list[dict[str, Any] | None]) -> None:
    """Let loggers be as `state_of` said, in this start or another one."""
    for writer, before in zip(_writers(trainer), state, strict=False):
        if writer is None or before is None:
            continue
        writer.metrics, writer.metrics_keys = json.loads(before["waiting"]), [*before["names"]]
        vars(writer)[_ROWS] = before["rows"] + len(writer.metrics)
        _leave_rows(writer, before["rows"])


def _leave_rows(writer: Any, count: int) -> None:
    """Leave the first rows in its file, and its columns."""
    path, files, rows = writer.metrics_file_path, writer._fs, []
    if files.isfile(path):
        with files.open(path, "r", newline="") as file:
            rows = [*csv.DictReader(file)]
    if len(rows) < count:
        protection.tell(LOST.format(path=path, found=len(rows), rows=count))
    if rows and not count:
        files.rm_file(path)
    elif rows and (len(rows) > count or [*rows[0]] != writer.metrics_keys):
        with files.open(path, "w", newline="") as file:
            table = csv.DictWriter(file, writer.metrics_keys, extrasaction="ignore")
            table.writeheader()
            table.writerows(rows[:count])


def _writers(trainer: Any) -> list[Any]:
    """Return what writes the file of each logger that is a CSVLogger, on the rank that does."""
    found = [vars(logger).get("_experiment") for logger in trainer.loggers]
    return [one if hasattr(one, "metrics_file_path") else None for one in found]


def _as_before(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _get_next_version(self: Any) -> Any:
        before = _versions_before()
        version = before[len(_versions)] if len(_versions) < len(before) else find(self)
        _versions.append(version)
        return version

    return _get_next_version


def _versions_before() -> list[Any]:
    """Return those of the start before, if that was one of this run."""
    before = None if environment.RESTART.get() == 0 else notes.read(_file())
    return [*before["versions"]] if before is not None and before["run"] == _run() else []


def _file() -> Path:
    return directory.root_of(None) / FILE


def _run() -> str:
    return os.environ.get("TORCHELASTIC_RUN_ID", "")
