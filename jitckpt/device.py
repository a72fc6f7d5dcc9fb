"""Which device a command runs on, and the environment that gives it to the command."""

import ctypes
import re
from collections.abc import Mapping
from pathlib import Path

from jitckpt.errors import JitckptError

KINDS = ("auto", "softgpu", "cuda")
LIBRARY_DIR = Path(__file__).parent / "lib"


class DeviceError(JitckptError):
    """The device can't be given; the text is a sentence that says why and what to do."""


def device_environment(
    kind: str, devices: int, library_dir: Path, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables to set, beside those of `environment`, for a command to run on the device.

    kind: softgpu or cuda. devices: how many softgpu devices there are, if SOFTGPU_DEVICES does not say it.
    library_dir: where the preloaded libraries lie. The result can be applied twice without harm.
    """
    ours = [library_dir / "libjitckpt.so"]
    variables = {}
    if kind == "softgpu":
        ours.append(library_dir / "libsoftgpu.so")
        driver = str(library_dir / "driver")
        folders = environment.get("LD_LIBRARY_PATH", "").split(":")
        variables["LD_LIBRARY_PATH"] = ":".join([driver, *(f for f in folders if f not in ("", driver))])
        variables["SOFTGPU_DEVICES"] = environment.get("SOFTGPU_DEVICES", str(devices))
    first = [str(library) for library in ours]
    others = [library for library in _preloaded(environment) if library not in first]
    variables["LD_PRELOAD"] = ":".join([*first, *others])
    return variables


def choose_device(kind: str, environment: Mapping[str, str]) -> str:
    """Return softgpu or cuda for one of KINDS: `auto` is softgpu unless an NVIDIA driver answers.

    Raises DeviceError for cuda where none does.
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
    inside_softgpu = any(Path(library).name == "libsoftgpu.so" for library in _preloaded(environment))
    return "softgpu" if inside_softgpu or not driver_answers() else "cuda"


def check_libraries(kind: str, library_dir: Path) -> None:
    """Raise DeviceError unless the libraries of this kind of device are there and can be preloaded."""
    names = ["libjitckpt.so"]
    if kind == "softgpu":
        names += ["libsoftgpu.so", "driver/libcuda.so.1"]
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
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _preloaded(environment: Mapping[str, str]) -> list[str]:
    return [library for library in re.split(r"[\s:]+", environment.get("LD_PRELOAD", "")) if library]
