"""Lightning's loggers: a restart goes on in their versions, which checkpoints go by, and with their rows.

A CSVLogger that begins in a folder removes what is there. So where a job has begun its file is put aside
until it is known whether the training goes on: then it has the rows again that it had at the restored step's
end, and else they are removed after all. A file is written beside the old one and takes its place as a whole,
as a rank may be killed at any time.
"""

import csv
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jitckpt.frameworks import notes, protection
from jitckpt.wire import environment
from jitckpt.worker import directory

FILE = "lightning_versions.json"
LOST = "{path} lacks rows that were logged before the failure: it has {found}, and had {rows}."
ASIDE, NEW = ".before", ".new"  # behind the file's name: as the last start left it; not yet whole
_ROWS = "_jitckpt_rows"

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
        # What begins later, as the logger of a test behind the training, has rows of no save.
        if _file().exists() and not protection.is_taken():
            _put_aside(self)
        else:
            remove(self)

    def _rewrite_with_new_header(self: Any, names: Sequence[str]) -> None:
        _write(self, _rows_in(self, self.metrics_file_path), names)

    kind.log_metrics, kind._check_log_dir_exists = log_metrics, _check_log_dir_exists
    kind._rewrite_with_new_header = _rewrite_with_new_header


def training_begins(trainer: Any, training: "protection.FrameworkProtection | None") -> None:
    """It is known whether the training goes on. training: None if it has no protection."""
    for writer in _writers(trainer):
        if writer is not None and (training is None or training.restored == 0):
            _remove(writer, writer.metrics_file_path + ASIDE)
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
    """Leave the first rows in its file, of those that the last start has left, and its columns."""
    path, aside = writer.metrics_file_path, writer.metrics_file_path + ASIDE
    was_aside = writer._fs.isfile(aside)
    rows = _rows_in(writer, aside if was_aside else path)
    if len(rows) < count:
        protection.tell(LOST.format(path=path, found=len(rows), rows=count))
    if not count:
        _remove(writer, path)
    elif was_aside or len(rows) > count or (rows and [*rows[0]] != writer.metrics_keys):
        _write(writer, rows[:count], writer.metrics_keys)
    _remove(writer, aside)


def _put_aside(writer: Any) -> None:
    """Put its file aside; one that is there already is from before a start that came to no training."""
    path, aside = writer.metrics_file_path, writer.metrics_file_path + ASIDE
    if writer._fs.isfile(aside):
        _remove(writer, path)
    elif writer._fs.isfile(path):
        writer._fs.mv(path, aside)


def _remove(writer: Any, path: str) -> None:
    if writer._fs.isfile(path):
        writer._fs.rm_file(path)


def _rows_in(writer: Any, path: str) -> list[dict[str, Any]]:
    if not writer._fs.isfile(path):
        return []
    with writer._fs.open(path, "r", newline="") as file:
        return [*csv.DictReader(file)]


def _write(writer: Any, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Let its file have these rows."""
    new = writer.metrics_file_path + NEW
    with writer._fs.open(new, "w", newline="") as file:
        table = csv.DictWriter(file, names, extrasaction="ignore")
        table.writeheader()
        table.writerows(rows)
    writer._fs.mv(new, writer.metrics_file_path)


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
