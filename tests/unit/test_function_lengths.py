"""A function is read at one glance: none is longer than 60 lines, its docstring not counted."""

import ast
from collections.abc import Iterator
from pathlib import Path

from native_source import native_sources, read

ROOT = Path(__file__).parents[2]
FOLDERS = ("jitckpt", "hooks", "scripts", "native")  # native/ has the generators
MOST = 60
# Functions that are a table and nothing else, as file:name; nothing of what runs belongs here.
TABLES = {"native/softgpu/runtime/device_functions.cpp:attribute_of"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def length(function: Function) -> int:
    """Return the lines from `def` to the end, without those of the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def functions(root: Path) -> Iterator[tuple[str, Function]]:
    """Yield every function of the tree in this folder, by its file and name."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, Function):
                    yield f"{file.relative_to(root)}:{node.name}", node


def too_long(root: Path) -> set[str]:
    """Return the functions that are longer, of Python and of C++."""
    native = {
        f"{file.relative_to(root)}:{function.name}"
        for file in native_sources(root)
        for function in read(file.read_text()).functions
        if function.last - function.line + 1 > MOST
    }
    return native | {name for name, function in functions(root) if length(function) > MOST}


def test_no_function_is_longer_than_a_glance() -> None:
    assert too_long(ROOT) - TABLES == set()


def test_every_table_is_one_still() -> None:
    assert TABLES - too_long(ROOT) == set()


def test_a_planted_function_is_found(tmp_path: Path) -> None:
    (tmp_path / "jitckpt" / "worker").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    docstring = '    """Do it.\n' + "\n    More of it.\n" * 40 + '    """\n'
    body = "    print()\n" * (MOST - 1)
    fits = f"def fits() -> None:\n{docstring}{body}"
    (tmp_path / "jitckpt" / "worker" / "job.py").write_text(fits)
    (tmp_path / "scripts" / "campaign.py").write_text(fits)
    assert too_long(tmp_path) == set()
    method = (
        "class Job:\n    async def restore(self) -> None:\n"
        + f"    {body}".replace("\n", "\n    ")
        + "    print()\n"
    )
    (tmp_path / "jitckpt" / "worker" / "job.py").write_text(method)
    (tmp_path / "scripts" / "campaign.py").write_text(f"{fits}    print()\n")
    assert too_long(tmp_path) == {"jitckpt/worker/job.py:restore", "scripts/campaign.py:fits"}


def test_a_planted_function_of_cpp_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "native" / "proxy" / "job.cpp"
    planted.parent.mkdir(parents=True)
    body = "  go_on();\n" * (MOST - 2)
    fits = f"namespace jitckpt {{\nvoid Job::fits() {{\n{body}}}\n}}\n"
    planted.write_text(fits)
    assert too_long(tmp_path) == set()
    planted.write_text(fits.replace("{\n  go_on", "{\n\n  go_on"))
    assert too_long(tmp_path) == {"native/proxy/job.cpp:fits"}
    planted.rename(tmp_path / "native" / "proxy" / "job.h")
    assert too_long(tmp_path) == {"native/proxy/job.h:fits"}
