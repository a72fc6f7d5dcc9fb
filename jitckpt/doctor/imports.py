"""Which training frameworks a script imports, read from its text: known long before torch is imported."""

import ast
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# By the package that is imported: the framework that has the training in hand, as it is installed.
FRAMEWORKS = {
    "transformers": "transformers",
    "trl": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
}
MOST_FILES = 50  # of the script's own modules


def sentence(command: list[str]) -> str | None:
    """Return what is known at once of a script, given with its arguments; None if it imports no framework."""
    found = {FRAMEWORKS[one] for one in _packages(command) if one in FRAMEWORKS}
    if not found:
        return None
    named = ", ".join(_with_version(one) for one in sorted(found))
    return (
        f"{named}: imported by the script. `jitckpt run` protects its training with no line changed, where "
        "that can be; what is protected, and what is not, its first steps say."
    )


def _with_version(distribution: str) -> str:
    try:
        return f"{distribution} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{distribution} (not installed)"


def _packages(command: list[str]) -> set[str]:
    """Return the packages that the script imports, and its own modules beside it."""
    if command[:1] == ["-m"]:
        return {command[1].partition(".")[0]} if command[1:] else set()
    waiting, found = [Path(command[0])] if command else [], set[str]()
    read: set[Path] = set()
    while waiting and len(read) < MOST_FILES:
        file = waiting.pop(0)
        if file in read:
            continue
        read.add(file)
        for name in _imported(file):
            found.add(name.partition(".")[0])
            beside = Path(command[0]).parent / Path(*name.split("."))
            waiting += [one for one in (beside.with_suffix(".py"), beside / "__init__.py") if one.is_file()]
    return found


def _imported(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # to run it will say why
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
