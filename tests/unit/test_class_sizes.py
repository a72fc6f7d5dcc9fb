"""A class has one idea, its own state, and fits into the head: so many lines and methods, and no more."""

import ast
from collections.abc import Iterator
from pathlib import Path

from test_function_lengths import FOLDERS, Function

ROOT = Path(__file__).parents[2]
MOST_LINES = 400
MOST_METHODS = 35
# Classes that are larger still, with the most lines and methods that they may have: they only shrink, and
# who fits by now leaves the list. They are split by state: fields that one group of methods uses go with it.
LARGE = {
    "Agent": (740, 44),
    "HostState": (400, 42),
    "Hosts": (400, 40),
    "JobModel": (540, 66),
    "LastingRendezvous": (560, 50),
    "Loop": (500, 40),
    "MemoryProtection": (600, 37),
    "MemoryTier": (540, 42),
    "OptimizerState": (460, 32),
    "PlainAttributes": (410, 31),
    "ProcessSnapshots": (440, 34),
    "Proxies": (440, 41),
    "WorkerProcesses": (570, 32),
}

Size = tuple[int, int]


def sizes(root: Path) -> Iterator[tuple[str, Size]]:
    """Yield every class of the tree in this folder with its lines and methods."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    assert node.end_lineno is not None
                    methods = sum(isinstance(one, Function) for one in node.body)
                    yield node.name, (node.end_lineno - node.lineno + 1, methods)


def too_large(found: Iterator[tuple[str, Size]], large: dict[str, Size]) -> dict[str, Size]:
    """Return the classes over their bounds, with their sizes."""
    return {
        name: (lines, methods)
        for name, (lines, methods) in found
        for most_lines, most_methods in [large.get(name, (MOST_LINES, MOST_METHODS))]
        if lines > most_lines or methods > most_methods
    }


def test_no_class_is_too_large() -> None:
    assert too_large(sizes(ROOT), LARGE) == {}


def test_every_class_of_the_list_is_large_still() -> None:
    assert LARGE.keys() - too_large(sizes(ROOT), {}).keys() == set()


def test_a_planted_class_is_found(tmp_path: Path) -> None:
    (tmp_path / "jitckpt").mkdir()
    method = "    def go_on(self) -> None:\n        print()\n"
    planted = tmp_path / "jitckpt" / "job.py"
    planted.write_text("class Job:\n" + method * MOST_METHODS)
    assert too_large(sizes(tmp_path), {}) == {}
    planted.write_text("class Job:\n" + method * (MOST_METHODS + 1))
    assert too_large(sizes(tmp_path), {}) == {"Job": (2 * MOST_METHODS + 3, MOST_METHODS + 1)}
    assert too_large(sizes(tmp_path), {"Job": (100, MOST_METHODS + 1)}) == {}
    planted.write_text("class Job:\n    numbers = (\n" + "        1,\n" * MOST_LINES + "    )\n")
    assert too_large(sizes(tmp_path), {}) == {"Job": (MOST_LINES + 3, 0)}
