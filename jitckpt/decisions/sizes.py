"""Sizes for people to read, in binary units."""

_UNITS = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def show_bytes(size: float) -> str:
    """Return a size with the largest unit that leaves at least 1."""
    for unit, in_bytes in _UNITS:
        if abs(size) >= in_bytes:
            return f"{size / in_bytes:.3g} {unit}"
    return f"{size:.0f} B"
