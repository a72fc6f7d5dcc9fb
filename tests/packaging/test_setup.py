"""What setup.py finds, and what it says where jitckpt can't be built."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

WITH_CUDA = "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
WITHOUT_CUDA = "__version__ = '2.11.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n"


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jitckpt_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_setup()


def with_torch(folder: Path, version_file: str) -> Path:
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(version_file)
    return folder


@pytest.mark.parametrize(
    ("text", "version", "cuda"),
    [
        (WITH_CUDA, "2.11.0+cu130", "13.0"),
        (WITHOUT_CUDA, "2.11.0+cpu", None),
        ("__version__ = '2.4.0'\ncuda = '12.1'\n", "2.4.0", "12.1"),
    ],
)
def test_torch_is_read_as_text(tmp_path: Path, text: str, version: str, cuda: str | None) -> None:
    assert setup.read_torch(with_torch(tmp_path, text)) == (tmp_path, version, cuda)


def test_no_torch_is_none(tmp_path: Path) -> None:
    assert setup.read_torch(tmp_path) is None


def test_the_torch_of_this_environment_is_found_without_importing_it() -> None:
    script = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('s', {str(ROOT / 'setup.py')!r})\n"
        "s = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(s)\n"
        "print(s.find_torch_or_end().version)\n"
        "assert 'torch' not in sys.modules\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.startswith("2.")


def test_all_is_well_with_a_cuda_torch_and_a_compiler(tmp_path: Path) -> None:
    for version in ("2.11.0", "2.15.1+cu132", "3.0.0"):
        assert setup.complaint(setup.Torch(tmp_path, version, "13.0"), "/usr/bin/c++") is None


def test_a_torch_that_is_too_old_is_named(tmp_path: Path) -> None:
    said = setup.complaint(setup.Torch(tmp_path, "2.9.1", "12.8"), "/usr/bin/c++")
    assert "2.9.1" in said
    assert "2.11" in said


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what the build reads, so that nothing is left in the tree."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "CMakeLists.txt"):
        shutil.copy(ROOT / name, copy)
    for name in ("cmake", "native", "jitckpt", "hooks"):
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "lib")
        )
    return copy


@pytest.mark.parametrize(
    ("site_packages", "compiler", "sentence"),
    [
        (None, "c++", "jitckpt needs torch in the environment"),
        (WITHOUT_CUDA, "c++", "jitckpt needs a torch that was built with CUDA"),
        (WITH_CUDA, "no-such-compiler", "jitckpt needs a C++20 compiler and found no `no-such-compiler`"),
    ],
)
def test_pip_says_what_is_missing(
    tmp_path: Path, source: Path, site_packages: str | None, compiler: str, sentence: str
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    if site_packages:
        with_torch(folder, site_packages)
    wheels = tmp_path / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(wheels)]
    result = subprocess.run(
        [*command, str(source)],
        env=os.environ | {"JITCKPT_SITE_PACKAGES": str(folder), "CXX": compiler},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    said = result.stdout + result.stderr
    assert result.returncode != 0
    assert said.count(sentence) == 1
    assert "Traceback" not in said
    assert not list(wheels.glob("*.whl"))
