"""The few calls of the CUDA driver that are made without torch."""

import ctypes

_LIBRARY = "libcuda.so.1"
_NAME_BYTES = 100


def has_device() -> bool:
    """Return whether there is a driver with at least one device."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def facts() -> tuple[str, int, int]:
    """Return the first device's name, the driver's CUDA version (12040: 12.4) and the number of devices."""
    driver = ctypes.CDLL(_LIBRARY)
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetName(name, len(name), 0)
    return name.value.decode(), version.value, count.value
