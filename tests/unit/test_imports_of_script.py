"""Which frameworks a script imports is told from its text, before anything of it is imported."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from jitckpt import cli
from jitckpt.cli import doctor
from jitckpt.doctor import imports

INSTALLED = {"jitckpt": "9.0", "transformers": "9.1", "accelerate": "9.2", "megatron-core": "9.3"}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name not in INSTALLED:
            raise metadata.PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("import transformers", "transformers 9.1: imported"),
        ("from trl import SFTTrainer", "transformers 9.1: imported"),
        ("def main():\n    import megatron.core.optimizer", "megatron-core 9.3: imported"),
        ("import deepspeed", "deepspeed (not installed): imported"),
        ("import accelerate\nimport transformers", "accelerate 9.2, transformers 9.1: imported"),
    ],
)
def test_a_framework_is_named(text: str, named: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    told = imports.sentence([str(script), "--steps", "3"])
    assert told is not None
    assert told.startswith(named)


@pytest.mark.parametrize(
    "text", ["import torch", "from . import transformers", "import transformers as (", ""]
)
def test_without_one_nothing_is_said(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert imports.sentence([str(script)]) is None
    assert imports.sentence([str(tmp_path / "lacks.py")]) is None
    assert imports.sentence([]) is None


def test_modules_beside_the_script_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from own.parts import model")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "parts.py").write_text("import accelerate\nimport train")
    told = imports.sentence([str(tmp_path / "train.py")])
    assert told is not None
    assert told.startswith("accelerate 9.2")


def test_a_module_that_is_run_is_a_frameworks_own() -> None:
    told = imports.sentence(["-m", "transformers.train"])
    assert told is not None
    assert told.startswith("transformers 9.1")


@pytest.mark.parametrize("options", [(), ("--device", "softgpu")])
def test_the_doctor_names_it_at_once(
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without an option before the script it named none: argparse takes a `--` that comes first."""
    script = tmp_path / "train.py"
    script.write_text("import transformers")
    monkeypatch.setattr(doctor, "import_module", lambda name: SimpleNamespace(main=lambda arguments: 0))
    assert cli.main(["doctor", *options, "--", str(script)]) == 0
    assert "transformers 9.1: imported" in capsys.readouterr().err


def test_nothing_of_torch_is_needed_for_it() -> None:
    code = "import sys, jitckpt.cli, jitckpt.cli.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
