"""Which device a command runs on, and the environment that gives it to the command."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from jitckpt.bindings import cuda_driver
from jitckpt.errors import JitckptError
from jitckpt.wire.environment import PROXY_LIBRARY_PATH, PROXY_ONE_CORE, PROXY_PRELOAD

KINDS = ("auto", "softgpu", "cuda")
LIBRARY_DIR = Path(__file__).parent / "lib"
CUDA_LIBRARIES = ("libcudart", "libnccl", "libcublasLt", "libcublas")
STORE_LIBRARY = "libjitckpt_store.so"


class DeviceError(JitckptError):
    """The device can't be given; the text is a sentence that says why and what to do."""


def device_environment(
    kind: str,
    devices: int,
    library_dir: Path,
    environment: Mapping[str, str],
    *,
    proxy: bool = False,
    relay: bool = False,
) -> dict[str, str]:
    """Return the variables to set, beside those of `environment`, for a command to run on the device.

    kind: softgpu or cuda. devices: how many softgpu devices there are, if SOFTGPU_DEVICES does not say it.
    library_dir: where the preloaded libraries lie. proxy: each process that uses the device does so through a
    server of its own (docs/how-it-works/proxy.md). relay: it reaches the job's store by the agent, if that
    says so. The result can be applied twice.
    """
    ours = [library_dir / "libjitckpt.so"]
    variables = {}
    driver = str(library_dir / "driver")
    folders = environment.get("LD_LIBRARY_PATH", "").split(":")
    others_folders = [folder for folder in folders if folder not in ("", driver)]
    if kind == "softgpu" or proxy:
        variables["LD_LIBRARY_PATH"] = ":".join([driver, *others_folders])
    if kind == "cuda" and proxy:
        ours.append(library_dir / "libjitckpt_proxy.so")
        libraries = cuda_libraries()
        variables |= PROXY_PRELOAD.to(":".join(str(library) for library in libraries))
        folders = list(dict.fromkeys(str(library.parent) for library in libraries if library.is_absolute()))
        variables |= PROXY_LIBRARY_PATH.to(":".join([*_torch_folders(), *folders, *others_folders]))
    if kind == "softgpu":
        variables["SOFTGPU_DEVICES"] = environment.get("SOFTGPU_DEVICES", str(devices))
        if proxy:
            ours += [library_dir / "libjitckpt_proxy.so", library_dir / "libsoftgpu_host.so"]
            variables |= PROXY_PRELOAD.to(str(library_dir / "libsoftgpu.so"))
            variables |= PROXY_LIBRARY_PATH.to(":".join([driver, *_torch_folders(), *others_folders]))
            # Its kernels run in the server's threads.
            variables |= PROXY_ONE_CORE.to(
                not PROXY_ONE_CORE.is_set(environment) or PROXY_ONE_CORE.get(environment)
            )
        else:
            ours.append(library_dir / "libsoftgpu.so")
    if relay:
        ours.append(library_dir / STORE_LIBRARY)
    first = [str(library) for library in ours]
    others = [library for library in _preloaded(environment) if library not in first]
    variables["LD_PRELOAD"] = ":".join([*first, *others])
    return variables


def choose_device(kind: str, environment: Mapping[str, str]) -> str:
    """Return softgpu or cuda for one of KINDS: `auto` is softgpu unless an NVIDIA driver answers.

    Raises DeviceError for cuda where none does, and for `auto` where Slurm has given GPUs: a node whose
    driver is dead is not to train on softgpu in silence.
    """
    if kind == "softgpu":
        return kind
    if kind == "cuda":
        if not driver_answers():
            raise DeviceError(
                "No NVIDIA driver with a device answers here, so there is no CUDA. Choose --device softgpu, "
                "which needs none."
            )
        return kind
    softgpus = ("libsoftgpu.so", "libsoftgpu_host.so")
    if any(Path(library).name in softgpus for library in _preloaded(environment)):
        return "softgpu"
    if driver_answers():
        return "cuda"
    if (given := environment.get("SLURM_GPUS_ON_NODE", "0")) not in ("", "0"):
        raise DeviceError(
            f"Slurm has given this step {given} GPUs of its node, and no NVIDIA driver answers here: drain "
            "the node (scontrol update NodeName=... State=DRAIN Reason=...), or choose --device softgpu."
        )
    return "softgpu"


def check_libraries(kind: str, library_dir: Path, *, proxy: bool = False, relay: bool = False) -> None:
    """Raise DeviceError unless the libraries of this kind of device are there and can be preloaded."""
    names = ["libjitckpt.so", *([STORE_LIBRARY] if relay else [])]
    if kind == "softgpu":
        names += ["libsoftgpu.so", "driver/libcuda.so.1"]
    if proxy:
        names += ["libjitckpt_proxy.so", "jitckpt-proxy-server", "driver/libcuda.so.1"]
        names += ["libsoftgpu_host.so"] if kind == "softgpu" else []
    missing = [name for name in names if not (library_dir / name).is_file()]
    if missing:
        raise DeviceError(
            f"{' and '.join(missing)} not found in {library_dir}: jitckpt was installed without its native "
            "libraries. Install it again with `pip install .`."
        )
    if re.search(r"[\s:]", str(library_dir)):
        raise DeviceError(
            f"The folder {library_dir} has a space or a colon in its name, and LD_PRELOAD can't hold that. "
            "Install jitckpt in a folder without."
        )


def driver_answers() -> bool:
    """Return whether there is a CUDA driver with at least one device."""
    return cuda_driver.has_device()


def cuda_libraries() -> list[Path]:
    """Return NVIDIA's libraries that a device proxy's server loads first: torch's own, or else their names.

    The server finds their calls in what is loaded, and torch's library of kernels, which comes later, too.
    """
    package = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (package.submodule_search_locations or [])] if package else []
    folders += [Path(folder) for folder in _torch_folders()]
    found = []
    for name in CUDA_LIBRARIES:
        brought = [path for folder in folders for path in sorted(folder.glob(f"**/{name}.so.*"))]
        found.append(brought[0] if brought else Path(f"{name}.so"))
    return found


def _torch_folders() -> list[str]:
    """Where the libraries of torch lie that softgpu's operators run on; none without torch."""
    torch = importlib.util.find_spec("torch")
    return [f"{folder}/lib" for folder in (torch.submodule_search_locations or [])] if torch else []


def _preloaded(environment: Mapping[str, str]) -> list[str]:
    return [library for library in re.split(r"[\s:]+", environment.get("LD_PRELOAD", "")) if library]
