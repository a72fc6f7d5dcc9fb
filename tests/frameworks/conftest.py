"""Which framework came back from what, as a table for the guide: `pytest tests/frameworks --table FILE`."""

import importlib.metadata
from pathlib import Path

import pytest

# The disturbances of test_frameworks.py, in their order.
COLUMNS = [
    "undisturbed",
    "killed in forward",
    "in backward",
    "in the optimizer",
    "behind it",
    "at an epoch's end",
    "after the others' step",
]
BEGIN, END = "<!-- made by scripts/test --frameworks: begin -->\n", "<!-- end -->\n"
_results: dict[str, dict[str, str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, help="put the table of results into this document")


def pytest_runtest_makereport(item: pytest.Item, call: "pytest.CallInfo[None]") -> None:
    case = getattr(item, "callspec", None)
    if case is None or "framework" not in case.params or "disturbance" not in case.params:
        return
    results = _results.setdefault(case.params["framework"], {})
    if call.when == "call" or call.excinfo is not None:
        skipped = call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)
        results[case.params["disturbance"]] = (
            "not tried" if skipped else "differs" if call.excinfo else "bit for bit"
        )

        _write(item.config.getoption("--table"))  # after each, as they take minutes and may be interrupted


def _write(document: Path | None) -> None:
    if document is None:
        return
    columns = COLUMNS
    lines = [f"| user mode, 2 ranks | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    before, _, rest = document.read_text().partition(BEGIN)
    kept, _, after = rest.partition(END)
    tried = tuple(f"| {framework} " for framework in _results)
    if kept.strip().startswith(lines[0]):  # of frameworks that were left out this time
        lines += [line for line in kept.strip().splitlines()[2:] if not line.startswith(tried)]
    for framework, results in _results.items():
        cells = [results.get(name, "not tried") for name in columns]
        lines.append(f"| {framework} {_version(framework)} | {' | '.join(cells)} |")
    document.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}")


def _version(framework: str) -> str:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
