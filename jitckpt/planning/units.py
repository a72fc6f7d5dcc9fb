"""Quantities with units, written as people write them ("80 GiB", "400 Gbit/s") and read as plain numbers.

Decimal prefixes are powers of 1000, binary ones (KiB, MiB, ...) powers of 1024. A result is in
seconds, bytes or bytes per second.
"""

import re
from collections.abc import Mapping

from jitckpt.decisions.check import InvalidInput, number

MINUTE_SECONDS = 60.0
HOUR_SECONDS = 3600.0
DAY_SECONDS = 86400.0
MONTH_DAYS = 30.0

SECONDS: Mapping[str, float] = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": MINUTE_SECONDS, "h": HOUR_SECONDS, "days": DAY_SECONDS,
}  # fmt: skip
BYTES: Mapping[str, float] = {
    "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
BYTES_PER_SECOND: Mapping[str, float] = {
    **{f"{unit}/s": size for unit, size in BYTES.items()},
    **{
        f"{prefix}bit/s": size / 8
        for prefix, size in [("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)]
    },
}

_QUANTITY = re.compile(r"\s*([-+]?[0-9][0-9_]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*(\S+)\s*")


def quantity(name: str, text: object, units: Mapping[str, float]) -> float:
    """Read `text` ("80 GiB") in one of `units`; raise InvalidInput that names the key and its units."""
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise InvalidInput(
            f'{name} is {text!r}: it must be a number and a unit in quotes, such as "5 {_usual(units)}"; '
            f"units: {', '.join(units)}"
        )
    return number(name, float(match[1]) * units[match[2]])


def _usual(units: Mapping[str, float]) -> str:
    return "s" if units is SECONDS else "GiB" if units is BYTES else "GB/s"


def show_seconds(seconds: float) -> str:
    """A duration for people: the largest unit that leaves at least 1."""
    for unit in ("days", "h", "min", "s", "ms"):
        if abs(seconds) >= SECONDS[unit]:
            return f"{seconds / SECONDS[unit]:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / SECONDS['us']:.3g} us"
