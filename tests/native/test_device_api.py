"""The table of calls: complete for the installed torch, and refused where it contradicts NVIDIA's headers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOM = Path(__file__).parents[2] / "native" / "device_api"
SITE = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOM / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def include() -> list[str]:
    """The folders of NVIDIA's headers, and the compiler's own."""
    listed = subprocess.run(
        ["c++", "-E", "-v", "-x", "c++", "/dev/null"], capture_output=True, text=True, check=True
    ).stderr
    own = re.findall(r"^ (/\S+)$", listed, re.MULTILINE)
    cuda = sorted(SITE.glob("nvidia/cu1*/include"))
    return [*map(str, cuda), str(SITE / "nvidia" / "nccl" / "include"), *own]


def symbols_that_torch_needs(pattern: str, libraries: str = "*.so") -> set[str]:
    needed: set[str] = set()
    for library in (SITE / "torch" / "lib").glob(libraries):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout
        names = (line.split()[-1].split("@")[0] for line in listed.splitlines())
        needed |= {name for name in names if re.match(pattern, name)}
    return needed


def test_the_table_has_every_call_that_torch_makes() -> None:
    table = tomllib.loads((ROOM / "calls.toml").read_text())
    known = set(table["cudart"]) | set(table["cuda"]) | set(table["nccl"])
    needed = symbols_that_torch_needs(r"(__)?cuda[A-Z]|cuLaunch|nccl[A-Z]")
    assert "cuLaunchKernel" in needed
    assert len(needed) > 100, "the symbols of torch's libraries could not be read"
    assert needed - known == set()


def test_the_proxy_carries_what_torch_calls_of_cublas(generate: ModuleType) -> None:
    table = tomllib.loads((ROOM / "calls.toml").read_text())
    known = {name for names in table["cublas"] for name in generate.spelled_out(names)}
    needed = symbols_that_torch_needs(r"cublas(Lt)?[A-Z]", "libtorch_cuda.so")
    assert len(needed) > 50, "the symbols of torch's library could not be read"
    assert needed - known == {"cublasLtGetVersion"}, "which needs no device"


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ('cudaMemcpyy = {kind = "enqueue"}', "cudaMemcpyy is in calls.toml, but no header declares it"),
        ('cudaMemcpy = {kind = "sometimes"}', "cudaMemcpy is of the unknown kind 'sometimes'"),
        ('cudaMemcpy = {kind = "other", strem = "x"}', r"cudaMemcpy has the unknown fields \['strem'\]"),
        (
            'cudaMemcpy = {kind = "other", either = ["to"]}',
            r"cudaMemcpy has no pointer argument 'to' \(either\)",
        ),
        (
            'cudaMemcpy = {kind = "synchronous", save = "cudaMemset"}',
            "cudaMemcpy becomes 'cudaMemset' in a save",
        ),
        ('cudaFree = {kind = "free", observe = "often"}', "cudaFree is observed 'often'"),
        ('ncclAllReduce = {kind = "collective"}', "ncclAllReduce is a collective: it needs a count"),
    ],
)
def test_a_wrong_table_is_refused(
    generate: ModuleType, include: list[str], tmp_path: Path, entry: str, complaint: str
) -> None:
    table = tmp_path / "calls.toml"
    table.write_text(f"[cudart]\n{entry}\n")
    with pytest.raises(generate.TableError, match=complaint):
        generate.read_table(table, include)


def test_headers_that_can_not_be_read_are_named(generate: ModuleType) -> None:
    with pytest.raises(generate.TableError, match=r"(?s)headers can.t be read.*cuda\.h"):
        generate.read_table(ROOM / "calls.toml", [])


def test_per_thread_stream_twins_come_from_the_headers(generate: ModuleType, include: list[str]) -> None:
    calls = {call.name: call for call in generate.read_table(ROOM / "calls.toml", include)}
    for name, twin in {
        "cudaMemcpy": "cudaMemcpy_ptds",
        "cudaMemcpyAsync": "cudaMemcpyAsync_ptsz",
        "cudaLaunchKernelExC": "cudaLaunchKernelExC_ptsz",
        "cudaStreamWaitEvent": "cudaStreamWaitEvent_ptsz",
    }.items():
        assert calls[twin].prototype.arguments == calls[name].prototype.arguments
        assert calls[twin].kind == calls[name].kind
    assert not any(name.endswith("_ptds_ptds") for name in calls)
