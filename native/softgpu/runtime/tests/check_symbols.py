"""Compare what torch's libraries take from CUDA with what softgpu's libraries define, and see that softgpu
binds the calls of its own functions itself.

usage: check_symbols.py TORCH_LIBRARY_FOLDER LIBSOFTGPU LIBCUDA
"""

import re
import subprocess
import sys
from pathlib import Path

RUNTIME_CALL = re.compile(r"(__)?cuda[A-Z]\w+")
DRIVER_CALL = re.compile(r"cu(?!File)[A-Z]\w+")  # cuFile is a library of its own


def symbols(library: Path, which: str) -> set[str]:
    """The names that nm lists for a library (--defined-only or --undefined-only), without versions."""
    command = ["nm", "-D", which, str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def calls_through_the_linker(library: Path) -> set[str]:
    """CUDA's and NCCL's functions that a library calls in a way that another library may stand in front."""
    command = ["readelf", "--relocs", "--wide", str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    names = {line.split()[4].split("@")[0] for line in lines if len(line.split()) > 4}
    return {name for name in names if RUNTIME_CALL.fullmatch(name) or re.match("p?nccl[A-Z]", name)}


def main() -> int:
    torch_libraries = sorted(Path(sys.argv[1]).glob("*.so"))
    runtime, driver = (symbols(Path(path), "--defined-only") for path in sys.argv[2:4])
    wanted = set[str]().union(*(symbols(library, "--undefined-only") for library in torch_libraries))
    runtime_calls = {name for name in wanted if RUNTIME_CALL.fullmatch(name)}
    driver_calls = {name for name in wanted if DRIVER_CALL.fullmatch(name)}
    missing = sorted(runtime_calls - runtime) + sorted(driver_calls - driver)
    print(
        f"{len(torch_libraries)} libraries of torch use {len(runtime_calls)} functions of CUDA's runtime"
        f" and {len(driver_calls)} of its driver; softgpu lacks: {', '.join(missing) or 'none'}"
    )
    open_calls = sorted(calls_through_the_linker(Path(sys.argv[2])))
    print(f"softgpu's calls of itself that others can catch: {', '.join(open_calls) or 'none'}")
    return 1 if missing or open_calls or not runtime_calls or not driver_calls else 0


if __name__ == "__main__":
    sys.exit(main())
