"""What ranks print of all that they hold in the end."""

import re

RANK = r"rank \d: "


def finals(out: str, start: str = RANK, ranks: int | None = None) -> list[str]:
    """Return the lines that begin with this pattern, in order; where `ranks` is given, one of each rank."""
    lines = sorted(line for line in out.splitlines() if re.match(start, line))
    assert ranks in (None, len(lines)), out
    return lines
