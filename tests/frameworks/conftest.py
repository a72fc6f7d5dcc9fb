"""Which framework came back from what, as a table for the guide: `pytest tests/frameworks --table FILE`."""

import importlib.metadata
from pathlib import Path

import pytest

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


def pytest_sessionfinish(session: pytest.Session) -> None:
    document: Path | None = session.config.getoption("--table")
    if document is None or not _results:
        return
    columns = [*dict.fromkeys(name for results in _results.values() for name in results)]
    lines = [f"| user mode, 2 ranks | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for framework, results in _results.items():
        cells = [results.get(name, "not tried") for name in columns]
        lines.append(f"| {framework} {_version(framework)} | {' | '.join(cells)} |")
    before, _, rest = document.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    document.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{after}")


def _version(framework: str) -> str:
    try:
        return importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
