"""jitckpt is installed into a fresh environment, whole, and goes without a trace."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What libtorch's headers cost in compile time is left to scripts/setup, which builds all.
NATIVE = {
    *("libjitckpt.so", "libjitckpt_proxy.so", "libsoftgpu.so", "libsoftgpu_host.so", "driver/libcuda.so.1"),
    *("jitckpt-proxy-server", "libjitckpt_store.so", "libjitckpt_clock.so"),
}


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment that sees all our packages but jitckpt."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "jitckpt" not in path.name:
            (packages / path.name).symlink_to(path)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    (site_packages / "packages.pth").write_text(f"{packages}\n")
    return folder


def run(*command: str | Path, **variables: str) -> str:
    result = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=560
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_install_and_uninstall(tmp_path: Path, environment: Path) -> None:
    source = tmp_path / "source"
    unwanted = shutil.ignore_patterns(".git", ".venv*", "build", "lib", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=unwanted)
    (source / "jitckpt" / "lib").mkdir()
    (source / "jitckpt" / "lib" / "libstale.so").touch()  # of an editable install long ago
    before = files_below(environment)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    install = [*pip, "install", "--no-build-isolation", "--no-deps", "--no-compile", str(source)]
    run(*install, CMAKE_ARGS="-DJITCKPT_WITH_TORCH=OFF")

    (package,) = environment.glob("lib/python3*/site-packages/jitckpt")
    modules = {str(path.relative_to(ROOT / "jitckpt")) for path in (ROOT / "jitckpt").rglob("*.py")}
    modules |= {f"hooks/{path.relative_to(ROOT / 'hooks')}" for path in (ROOT / "hooks").rglob("*.py")}
    assert {name for name in files_below(package) if name.endswith(".py")} == modules
    assert {path.name.split(".")[0] for path in package.glob("*.so")} == {
        "_algorithms",
        "_memory_tier",
        "_pages",
        "_seen",
        "_step_barrier",
    }
    libraries = files_below(package / "lib") - {"driver"}  # which is a folder
    assert libraries == NATIVE
    for library in libraries:
        dynamic_section = run("readelf", "--dynamic", package / "lib" / library)
        assert "PATH" not in dynamic_section, f"{library} looks for libraries in a folder of the build"
    assert os.access(package / "lib" / "jitckpt-proxy-server", os.X_OK)
    assert "jitckpt" in run(environment / "bin" / "jitckpt", "--help")

    run(*pip, "uninstall", "--yes", "jitckpt")
    assert files_below(environment) == before
