"""One word, one meaning: a class's name says by itself which of the classes is meant, in C++ too."""

import ast
from collections.abc import Iterable
from pathlib import Path

from native_source import native_sources, read
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


def native_names_of_several(files: Iterable[Path]) -> dict[str, list[str]]:
    """The same of C++: a class that stands in another, or in an anonymous namespace, is no public one."""
    found: dict[str, list[str]] = {}
    for file in files:
        for one in read(file.read_text()).classes:
            if one.public:
                found.setdefault(one.name, []).append(str(file))
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def test_no_two_classes_of_cpp_have_the_same_public_name() -> None:
    assert native_names_of_several(native_sources(ROOT)) == {}


def test_a_second_class_of_a_name_is_found_in_cpp(tmp_path: Path) -> None:
    own = "namespace { struct Own {}; }\nclass Outer%s { struct Place {}; };\n"
    for folder in ("client", "server"):
        (tmp_path / "native" / folder / "tests").mkdir(parents=True)
        (tmp_path / "native" / folder / "tests" / "test.h").write_text("struct Fixture {};\n")
        (tmp_path / "native" / folder / "one.h").write_text(own % folder.title())
    assert native_names_of_several(native_sources(tmp_path)) == {}
    files = [tmp_path / "native" / name for name in ("client/one.h", "server/one.h")]
    for file in files:
        file.write_text(f"namespace {file.parent.name} {{ enum class Place {{ one }}; }}\n")
    assert native_names_of_several(native_sources(tmp_path)) == {"Place": [*map(str, files)]}
