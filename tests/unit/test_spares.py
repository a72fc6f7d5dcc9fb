import json
import os
import sys
import types

import pytest

from jitckpt import spare, spares
from jitckpt.spare import Order, can_become, encode_order, importable_modules


def test_only_python_with_a_script_or_module_can_be_warm() -> None:
    python = sys.executable
    assert can_become([python, "-u", "train.py"])
    assert can_become([python, "-u", "-m", "trainer", "--steps", "7"])
    assert not can_become([python, "-u", "-m"])
    assert not can_become([python, "-u", "-c", "pass"])
    assert not can_become([python, "train.py"])
    assert not can_become(["/usr/bin/python9", "-u", "train.py"])
    assert not can_become(["numactl", python, "-u", "train.py"])


def test_the_scripts_folder_comes_first() -> None:
    assert spare.first_on_path(["python", "-u", "-m", "trainer"]) == os.getcwd()
    assert spare.first_on_path(["python", "-u", "some/where/train.py"]) == os.path.join(
        os.getcwd(), "some/where"
    )


def test_modules_beside_the_script_are_not_imported_early() -> None:
    own = types.ModuleType("helpers")
    own.__file__ = os.path.join(os.getcwd(), "helpers.py")
    loaded = {"json": sys.modules["json"], "sys": sys, "helpers": own, "__main__": sys.modules["json"]}
    assert importable_modules(loaded) == ["json"]


def test_every_module_is_told_once() -> None:
    names = [f"module{number}" for number in range(1203)]
    messages = [json.loads(data)["import"] for data in spare.import_messages(names)]
    assert [name for names_of_one in messages for name in names_of_one] == names
    assert list(spare.import_messages([])) == []


def test_an_order_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be sent to a spare"):
        encode_order(Order({"A": "x" * spare.MAX_BYTES}, [], []))


def test_variables_that_came_too_late_for_the_training_stay_as_they_were() -> None:
    ours = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "libjitckpt.so"}
    theirs = {"OMP_NUM_THREADS": "4", "LD_PRELOAD": "other.so", "PYTHONHASHSEED": "3", "NCCL_DEBUG": "INFO"}
    assert spares.loading_environment(ours, theirs) == {
        "OMP_NUM_THREADS": "4",
        "LD_PRELOAD": "libjitckpt.so",
        "NCCL_DEBUG": "INFO",
    }


def test_changed_variables_are_those_set_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_A_TEST", "1")
    assert spare.changed_environment(os.environ)["SET_BY_A_TEST"] == "1"
    assert "PATH" not in spare.changed_environment(os.environ)


def test_memory_is_known() -> None:
    assert 0 < spares.available_memory() < 1 << 60
