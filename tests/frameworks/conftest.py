"""What came back from what, as records for the guide's table: `pytest tests/frameworks --records FILE`."""

import datetime
import importlib.metadata
import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cases import PROGRAMS, Case
from jobs import Ends, run

Record = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, help="put the results into this file, for older ones")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Ends]:
    """Return what a program ends with that nobody protects; it runs once for all tests."""
    known: dict[tuple[str, int], Ends] = {}

    def ends(name: str, ranks: int) -> Ends:
        if (name, ranks) not in known:
            folder = tmp_path_factory.mktemp("plain") / "job"
            known[name, ranks], _ = run(PROGRAMS[name], ranks, folder, "--no-frameworks")
        return known[name, ranks]

    return ends


def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> None:
    specification = getattr(item, "callspec", None)
    case = None if specification is None else specification.params.get("case")
    file = item.config.getoption("--records")
    if not isinstance(case, Case) or file is None or (call.when != "call" and call.excinfo is None):
        return
    if call.excinfo is not None and not call.excinfo.errisinstance((AssertionError, pytest.fail.Exception)):
        return  # left out, or interrupted
    result = "differs" if call.excinfo else "bit for bit" if case.is_protected else "not protected"
    _write(file, _record(case, result))  # after each, as they take minutes and may be interrupted


def _record(case: Case, result: str) -> Record:
    program = PROGRAMS[case.program]
    return {
        "program": case.program,
        "mode": case.mode,
        "ranks": case.ranks,
        "disturbance": case.disturbance,
        "result": result,
        "version": importlib.metadata.version(program.framework),
        "torch": importlib.metadata.version("torch"),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "commit": _commit(),
    }


@cache
def _commit() -> str:
    """Return the commit that is tested, as it was before records were added; where there is no Git, none."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _write(file: Path, new: Record) -> None:
    """Put a record in the place of the older one of the same case, or behind all."""
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    same = [number for number, one in enumerate(records) if _case(one) == _case(new)]
    if same:
        records[same[0]] = new
    else:
        records.append(new)
    file.write_text("".join(json.dumps(one) + "\n" for one in records))


def _case(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("program", "mode", "ranks", "disturbance", "torch"))
