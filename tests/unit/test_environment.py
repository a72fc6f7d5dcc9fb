"""The table of environment variables: read within its limits, and the only place that names them."""

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_arrows import ROOT, files_of

from jitckpt.wire import environment
from jitckpt.wire.environment import EnvironmentVariableError, Variable, all_variables

NUMBERS = [variable for variable in all_variables() if variable.limits is not None]
NAMED = re.compile(r"JITCKPT_[A-Z_]+")
# Of the build and of C, no variables of a running program.
OTHERS = {"JITCKPT_ABI", "JITCKPT_H", "JITCKPT_PROXY_H", "JITCKPT_PROXY_CALL"}


def test_the_names_are_the_constants() -> None:
    for variable in all_variables():
        assert getattr(environment, variable.name.removeprefix("JITCKPT_")) is variable


@pytest.mark.parametrize("variable", all_variables(), ids=lambda variable: variable.name)
def test_what_is_not_set_or_empty_has_its_default(variable: Variable[object]) -> None:
    assert variable.get({}) == variable.get({variable.name: ""}) == variable.default


@given(st.text(max_size=12), st.sampled_from(all_variables()))
def test_any_text_is_read_or_refused_in_a_sentence(text: str, variable: Variable[object]) -> None:
    try:
        variable.get({variable.name: text})
    except EnvironmentVariableError as error:
        said = str(error)
    else:
        return
    assert said.startswith(f"{variable.name} is ")
    assert variable.allowed in said


@given(st.data())
def test_a_number_is_taken_within_its_limits_alone(data: st.DataObject) -> None:
    variable = data.draw(st.sampled_from(NUMBERS))
    number = data.draw(st.integers(-(1 << 62), 1 << 62))
    limits = variable.limits
    assert limits is not None
    if limits.least <= number <= limits.most:
        assert variable.get({variable.name: str(number)}) == number
    else:
        with pytest.raises(EnvironmentVariableError):
            variable.get({variable.name: str(number)})


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1 s", "0x10"])
def test_no_such_hang_timeout(text: str) -> None:
    with pytest.raises(
        EnvironmentVariableError, match=r"JITCKPT_HANG_TIMEOUT is .* a number of seconds from"
    ):
        environment.HANG_TIMEOUT.get({"JITCKPT_HANG_TIMEOUT": text})


def test_what_is_written_is_read() -> None:
    assert environment.HANG_TIMEOUT.get(environment.HANG_TIMEOUT.to(2.5)) == 2.5
    assert environment.PROXY_SPARE.get(environment.PROXY_SPARE.to(True)) is True
    paths = {"ckpt": "/somewhere else/ckpt"}
    assert environment.FIRST_DIRECTORIES.get(environment.FIRST_DIRECTORIES.to(paths)) == paths
    assert environment.STEPS_RECORD.get(environment.STEPS_RECORD.to(Path("/a b"))) == Path("/a b")


def test_nothing_else_of_the_package_names_a_variable() -> None:
    named = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.value}"
        for _, file in files_of(ROOT)
        if file.name != "environment.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value)
    ]
    assert named == []


def test_every_variable_that_is_spoken_of_is_in_the_table() -> None:
    known = {variable.name for variable in all_variables()} | OTHERS
    spoken = {
        name
        for folder, pattern in (
            ("jitckpt", "*.py"),
            ("hooks", "*.py"),
            ("native", "*.cpp"),
            ("native", "*.h"),
        )
        for file in (ROOT / folder).rglob(pattern)
        if "tests" not in file.parts
        for name in NAMED.findall(file.read_text())
        if not name.endswith("_")
    }
    assert spoken - known == set()


def test_cpp_reads_variables_through_its_table() -> None:
    reads = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "native").rglob("*")
        if file.suffix in {".cpp", ".h"} and not {"tests", "bench"} & {*file.parts}
        if re.search(r'getenv\(("JITCKPT_|.*environment::)', file.read_text())
    ]
    assert reads == []
