"""Builds jitckpt's native libraries with CMake and Ninja into the wheel (editable: into the tree).

torch is never imported here: in pip's isolated builds it can't be. It is found by its path in the environment
that jitckpt is installed into, and its version.py is read as text. JITCKPT_SITE_PACKAGES names another folder
that holds torch/ and nvidia/; CMAKE_ARGS adds options for CMake.
"""

import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar, NamedTuple

from setuptools import Command, Distribution, find_packages, setup
from setuptools.command.build import build
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).resolve().parent
OLDEST_TORCH = (2, 11)
NATIVE_SOURCES = ("CMakeLists.txt", "cmake", "native")


class Torch(NamedTuple):
    site_packages: Path
    version: str
    cuda: str | None


def read_torch(site_packages: Path) -> Torch | None:
    """The torch installed in this folder, as its version.py says, or None."""
    version_file = site_packages / "torch" / "version.py"
    if not version_file.is_file():
        return None
    text = version_file.read_text()
    version = re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.* = '(.+)'$", text, re.MULTILINE)
    return Torch(site_packages, version[1] if version else "0", cuda[1] if cuda else None)


def candidate_site_packages() -> list[Path]:
    """Where the torch of the target environment may be, the likeliest first."""
    if named := os.environ.get("JITCKPT_SITE_PACKAGES"):
        return [Path(named)]
    candidates = []
    if spec := importlib.util.find_spec("torch"):
        candidates += [Path(folder).parent for folder in spec.submodule_search_locations or []]
    system = {"base": sys.base_prefix, "platbase": sys.base_prefix}
    candidates += [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    candidates += [Path(site.getusersitepackages()), Path(sysconfig.get_path("purelib", vars=system))]
    return candidates


def find_tool(name: str) -> str | None:
    """A program of the environment (which need not be active), else of PATH."""
    folders = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    return shutil.which(name, path=os.pathsep.join(folders))


def find_compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def complaint(torch: Torch | None, compiler: str | None) -> str | None:
    """What keeps jitckpt from being built here, in one sentence, or None."""
    if torch is None:
        return (
            "jitckpt needs torch in the environment that it is installed into and found none: "
            "run `pip install torch==2.11.0` first, or name the folder that has it in JITCKPT_SITE_PACKAGES."
        )
    if torch.cuda is None:
        return (
            f"jitckpt needs a torch that was built with CUDA, and {torch.version} in {torch.site_packages} "
            "was not: install PyPI's own wheel (it needs no GPU to run), `pip install torch==2.11.0`."
        )
    if tuple(int(part) for part in re.findall(r"\d+", torch.version)[:2]) < OLDEST_TORCH:
        return (
            f"jitckpt needs torch 2.11 or newer and the one in {torch.site_packages} is {torch.version}: "
            "run `pip install --upgrade torch`."
        )
    if compiler is None:
        return (
            f"jitckpt needs a C++20 compiler and found no `{os.environ.get('CXX', 'c++')}`: "
            "install g++ (`apt-get install g++`) or name another compiler in CXX."
        )
    return None


def find_torch_or_end() -> Torch:
    torch = next(filter(None, map(read_torch, candidate_site_packages())), None)
    if reason := complaint(torch, find_compiler()):
        sys.exit(reason)
    assert torch is not None  # complaint() has said so otherwise
    return torch


def find_crt_include(torch: Torch) -> Path | None:
    """The folder of crt/host_defines.h, which an isolated build has in another place than torch."""
    for folder in [str(torch.site_packages), *sys.path]:
        for header in sorted(Path(folder).glob("nvidia/*/include/crt/host_defines.h")):
            return header.parent.parent
    return None


def cmake_configuration(torch: Torch) -> list[str]:
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "Python3_EXECUTABLE": sys.executable,
        "JITCKPT_SITE_PACKAGES": torch.site_packages,
        "JITCKPT_TESTS": "OFF",
    }
    if ninja := find_tool("ninja"):
        options["CMAKE_MAKE_PROGRAM"] = ninja
    if crt_include := find_crt_include(torch):
        options["JITCKPT_CRT_INCLUDE"] = crt_include
    users_own = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    return [f"-D{name}={value}" for name, value in options.items()] + users_own


def build_and_install(torch: Torch, prefix: Path) -> list[str]:
    """Builds in build/ what has changed since the last time and returns the files installed below prefix."""
    cmake = find_tool("cmake")
    if cmake is None:
        sys.exit("jitckpt is built by CMake and found none: run `pip install cmake ninja`.")
    build_dir = ROOT / "build" / f"wheel-torch-{torch.version}"
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))
    for command in (
        # Fresh: the cached paths of an earlier isolated build are gone.
        ["--fresh", "-G", "Ninja", "-S", str(ROOT), "-B", str(build_dir), *cmake_configuration(torch)],
        ["--build", str(build_dir), "--parallel", jobs],
        ["--install", str(build_dir), "--prefix", str(prefix)],
    ):
        status = subprocess.run([cmake, *command], check=False).returncode
        if status != 0:
            shown = shlex.join(["cmake", *command])
            sys.exit(f"jitckpt could not be built: `{shown}` ended with status {status}, see above.")
    return (build_dir / "install_manifest.txt").read_text().splitlines()


class CheckedDistInfo(dist_info):
    """Metadata is what pip asks for first: say here what is missing, before it fetches gigabytes."""

    def run(self) -> None:
        find_torch_or_end()
        super().run()


class CleanBuild(build):
    """Starts from nothing, so that no file of an earlier state of the tree gets into the wheel."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_native", None)]

    def run(self) -> None:
        if os.path.isdir(self.build_lib):
            shutil.rmtree(self.build_lib)
        super().run()


class BuildNative(Command):
    description = "build the native libraries with CMake"
    user_options: ClassVar[list[tuple[str, str, str]]] = []

    def initialize_options(self) -> None:
        self.build_lib = ""
        self.editable_mode = False
        self.installed: list[str] = []

    def finalize_options(self) -> None:
        self.build_lib = self.get_finalized_command("build").build_lib

    def run(self) -> None:
        prefix = ROOT if self.editable_mode else Path(self.build_lib).resolve()
        self.installed = build_and_install(find_torch_or_end(), prefix)

    def get_source_files(self) -> list[str]:
        paths = [path for source in NATIVE_SOURCES for path in [ROOT / source, *(ROOT / source).rglob("*")]]
        sources = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
        return [str(path.relative_to(ROOT)) for path in sources]

    def get_outputs(self) -> list[str]:
        return self.installed

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class NativeDistribution(Distribution):
    """Its wheel belongs to one platform although setuptools builds no extension of it."""

    def has_ext_modules(self) -> bool:
        return True


if __name__ == "__main__":
    setup(
        packages=sorted({*find_packages(ROOT, include=["jitckpt*"]), "jitckpt.hooks"}),
        package_dir={"jitckpt.hooks": "hooks"},
        distclass=NativeDistribution,
        cmdclass={"build": CleanBuild, "build_native": BuildNative, "dist_info": CheckedDistInfo},
    )
