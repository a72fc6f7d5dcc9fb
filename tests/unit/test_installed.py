"""What is installed and what is the user's own."""

import os
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import torch

from jitckpt.system import installed


def test_installed_is_what_lies_where_packages_do(tmp_path: Path) -> None:
    other, own = tmp_path / "lib" / "site-packages", tmp_path / "scripts"
    elsewhere = types.ModuleType("torch")
    elsewhere.__file__ = str(tmp_path / "target" / "torch" / "__init__.py")
    given = tmp_path / "given"  # as of `pip install --target`
    (given / "lightning-2.6.6.dist-info").mkdir(parents=True)
    (given / "lightning-2.6.6.dist-info" / "METADATA").touch()
    (given / "no-file").touch()
    path = [str(one) for one in (own, other, given, given / "no-file", "")]
    found = installed.folders(path, {"torch": elsewhere})
    assert os.path.join(sysconfig.get_path("purelib"), "") in found
    assert os.path.join(other, "") in found
    assert os.path.join(given, "") in found
    assert os.path.join(tmp_path / "target", "") in found
    assert not any(str(own / "train.py").startswith(folder) for folder in found)


def test_a_torch_that_pythonpath_names_is_no_part_of_the_script() -> None:
    """Its events would be looked into as if they were the script's own objects."""
    packages = Path(torch.__file__).parents[1]
    code = """
import sys, torch
from jitckpt.worker import script_variables
for kind in (torch.cuda.Event, type("Own", (), {})):
    print(script_variables.is_scripts_class(kind))
"""
    command = [sys.executable, "-c", code]
    # A Python whose own folders are others, as that of a virtual environment is to its base.
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    root = Path(__file__).parents[2]
    if base.exists():
        command[0] = str(base)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(packages), str(root)])}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "True"]


def test_what_torch_makes_up_is_no_module_of_the_script() -> None:
    """Its operators would be kept as the script's settings."""
    assert not any(map(installed.is_scripts_module, (torch, torch.ops, torch.classes)))
    assert installed.is_scripts_module(sys.modules[__name__])
