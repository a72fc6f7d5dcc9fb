"""Logs of Lightning's loggers, in which a restart goes on."""

import csv
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jitckpt.frameworks import lightning_logs, protection
from jitckpt.wire import environment
from jitckpt.worker import directory


class Files:
    """As fsspec's of the local file system."""

    isfile = staticmethod(os.path.isfile)
    rm_file = staticmethod(os.unlink)
    mv = staticmethod(os.replace)
    open = staticmethod(open)


def new_classes() -> tuple[Any, Any]:
    """Return classes as Lightning's, to be changed."""

    class ExperimentWriter:
        def __init__(self, folder: Path) -> None:
            self.metrics: list[dict[str, float]] = []
            self.metrics_keys: list[str] = []
            self._fs, self.metrics_file_path = Files(), str(folder / "metrics.csv")
            folder.mkdir(parents=True, exist_ok=True)
            self._check_log_dir_exists()

        def _check_log_dir_exists(self) -> None:
            Path(self.metrics_file_path).unlink(missing_ok=True)

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.metrics.append(metrics | {"step": step})

        def save(self) -> None:
            exists = self._fs.isfile(self.metrics_file_path)
            new = {key for one in self.metrics for key in one} - {*self.metrics_keys}
            self.metrics_keys = sorted({*self.metrics_keys, *new})
            if new and exists:
                self._rewrite_with_new_header(self.metrics_keys)
            with self._fs.open(self.metrics_file_path, "a", newline="") as file:
                table = csv.DictWriter(file, self.metrics_keys)
                if not exists:
                    table.writeheader()
                table.writerows(self.metrics)
            self.metrics = []

        def _rewrite_with_new_header(self, names: list[str]) -> None:
            with self._fs.open(self.metrics_file_path, newline="") as file:
                rows = [*csv.DictReader(file)]
            with self._fs.open(self.metrics_file_path, "w", newline="") as file:
                table = csv.DictWriter(file, names)
                table.writeheader()
                table.writerows(rows)

    class CSVLogger:
        def __init__(self, root: Path, version: int | None = None) -> None:
            self._root, self._version, self._experiment = root, version, None

        def begin(self) -> Any:
            if self._version is None:
                self._version = self._get_next_version()
            self._experiment = ExperimentWriter(self._root / f"version_{self._version}")  # type: ignore[assignment]
            return self._experiment

        def _get_next_version(self) -> int:
            return len([*self._root.glob("version_*")])

    class TensorBoardLogger:
        def _get_next_version(self) -> int:
            return 0

    loggers = SimpleNamespace(CSVLogger=CSVLogger, TensorBoardLogger=TensorBoardLogger)
    return loggers, SimpleNamespace(ExperimentWriter=ExperimentWriter)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    saves = tmp_path / "saves"
    saves.mkdir()
    monkeypatch.setattr(directory, "root_of", lambda given: saves)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "this run")
    monkeypatch.setattr(protection, "tell", pytest.fail)
    monkeypatch.setattr(protection, "_taken", "")
    return tmp_path / "logs"


def start(root: Path, monkeypatch: pytest.MonkeyPatch, number: int, version: int | None) -> tuple[Any, Any]:
    """Return a start's trainer, and what writes its file."""
    monkeypatch.setattr(lightning_logs, "_versions", [])
    monkeypatch.setenv(environment.RESTART.name, str(number))
    loggers, csv_logs = new_classes()
    lightning_logs.install(loggers, csv_logs)
    logger = loggers.CSVLogger(root, version)
    writer = logger.begin()
    return SimpleNamespace(loggers=[logger, SimpleNamespace()]), writer


def training(restored: int) -> Any:
    return SimpleNamespace(restored=restored, job=SimpleNamespace(identity=SimpleNamespace(rank=0)))


def log(writer: Any, steps: range, **more: float) -> None:
    for step in steps:
        writer.log_metrics({"loss": step / 7} | more, step)


def test_rows_and_version_go_on_after_a_failure(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (None, 0):
        texts = []
        for fails in (False, True):
            where = root / f"{version}{fails}"
            trainer, writer = start(where, monkeypatch, 0, version)
            lightning_logs.training_begins(trainer, training(0))
            log(writer, range(3))
            writer.save()
            log(writer, range(3, 5))
            state = lightning_logs.state_of(trainer)
            if fails:
                log(writer, range(5, 6))  # which is made again
                writer.save()
                trainer, writer = start(where, monkeypatch, 1, version)
                lightning_logs.training_begins(trainer, training(5))
                lightning_logs.put_back(trainer, state)
                lightning_logs.put_back(trainer, lightning_logs.state_of(trainer))
            log(writer, range(5, 7), accuracy=0.5)
            writer.save()
            texts.append((where / "version_0" / "metrics.csv").read_text())
            assert [one.name for one in where.rglob("*")] == ["version_0", "metrics.csv"]
        assert texts[0] == texts[1]
        assert len(texts[0].splitlines()) == 8


def test_a_training_that_begins_anew_has_no_rows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, writer = start(root, monkeypatch, 0, 3)
    lightning_logs.training_begins(trainer, training(0))
    log(writer, range(3))
    writer.save()
    trainer, writer = start(root, monkeypatch, 1, 3)
    lightning_logs.training_begins(trainer, training(0))
    assert [*Path(writer.metrics_file_path).parent.iterdir()] == []


def test_rows_that_are_logged_before_the_training_are_those_of_the_first_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation before the training: in a restart its names were not those of the file, which raised."""
    texts = []
    for fails in (False, True):
        where = root / str(fails)
        trainer, writer = start(where, monkeypatch, 0, 0)
        writer.log_metrics({"accuracy": 0.5}, 0)
        writer.save()
        lightning_logs.training_begins(trainer, training(0))
        log(writer, range(4))
        writer.save()
        state = lightning_logs.state_of(trainer)
        for restart in (1, 2) if fails else ():
            trainer, writer = start(where, monkeypatch, restart, 0)
            writer.log_metrics({"accuracy": 0.5}, 0)
            writer.save()
            if restart == 2:  # the first one came no further
                lightning_logs.training_begins(trainer, training(4))
                lightning_logs.put_back(trainer, state)
        log(writer, range(4, 6))
        writer.save()
        texts.append((where / "version_0" / "metrics.csv").read_text())
        assert [one.name for one in where.rglob("*")] == ["version_0", "metrics.csv"]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 8


def test_what_is_logged_behind_the_training_is_logged_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another Trainer's logger, for which no save has rows: those of before the failure stayed."""
    for restart in (0, 1):
        trainer, _ = start(root, monkeypatch, restart, 0)
        lightning_logs.training_begins(trainer, training(0))
        monkeypatch.setattr(protection, "_taken", "lightning")
        trainer.loggers[0]._version = 1
        writer = trainer.loggers[0].begin()
        log(writer, range(2))
        writer.save()
        monkeypatch.setattr(protection, "_taken", "")
    assert len(Path(writer.metrics_file_path).read_text().splitlines()) == 3


@pytest.mark.parametrize("adds_names", [False, True])
def test_a_rank_that_is_killed_as_a_file_is_written_loses_no_rows(
    root: Path, monkeypatch: pytest.MonkeyPatch, adds_names: bool
) -> None:
    trainer, writer = start(root, monkeypatch, 0, 0)
    lightning_logs.training_begins(trainer, training(0))
    log(writer, range(3))
    writer.save()
    state, before = lightning_logs.state_of(trainer), Path(writer.metrics_file_path).read_text()
    log(writer, range(3, 5))
    if not adds_names:
        writer.save()
        trainer, writer = start(root, monkeypatch, 1, 0)
        lightning_logs.training_begins(trainer, training(3))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(csv.DictWriter, "writerows", killed)
        log(writer, range(5, 6), accuracy=0.5)
        with pytest.raises(KeyboardInterrupt):
            writer.save() if adds_names else lightning_logs.put_back(trainer, state)
    trainer, writer = start(root, monkeypatch, 2, 0)
    lightning_logs.training_begins(trainer, training(3))
    lightning_logs.put_back(trainer, state)
    assert Path(writer.metrics_file_path).read_text() == before


def test_a_writer_can_be_copied_before_the_training(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Trainer may be pickled or copied before it trains: a function of ours in it could not be."""
    trainer, _ = start(root, monkeypatch, 0, 0)
    lightning_logs.training_begins(trainer, training(0))
    _, writer = start(root, monkeypatch, 1, 0)
    assert not any(callable(one) for one in vars(writer).values())


def test_another_run_has_a_version_of_its_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = start(root, monkeypatch, 0, None)
    lightning_logs.training_begins(trainer, training(0))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    trainer, _ = start(root, monkeypatch, 0, None)
    assert trainer.loggers[0]._version == 1


def test_rows_that_are_lost_are_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, writer = start(root, monkeypatch, 0, 0)
    told: list[str] = []
    monkeypatch.setattr(protection, "tell", told.append)
    lightning_logs.put_back(trainer, [{"rows": 2, "waiting": "[]", "names": []}, None])
    assert told == [lightning_logs.LOST.format(path=writer.metrics_file_path, found=0, rows=2)]
