"""One word, one meaning: a class's name says by itself which of the package's classes is meant."""

import ast
from collections.abc import Iterable
from pathlib import Path

from test_arrows import ROOT, files_of


def names_of_several(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return the public names that more than one class has, with the files of these."""
    found: dict[str, list[str]] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(str(file))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def test_no_two_classes_have_the_same_public_name() -> None:
    assert names_of_several(file for _, file in files_of(ROOT)) == {}


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.py", "other.py")]
    for file in files:
        file.write_text(f"class Place: ...\nclass _Own: ...\nclass Of{file.stem.title()}: ...\n")
    assert names_of_several(files) == {"Place": [*map(str, files)]}
