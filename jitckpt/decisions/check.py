"""Input is checked where it enters, so that nonsense never becomes a plan."""

import math

from jitckpt.errors import JitckptError


class InvalidInput(JitckptError, ValueError):
    """A value that cannot be planned with; the text names the value and the allowed range."""


def number(name: str, value: float, *, low: float = 0.0, high: float = math.inf) -> float:
    """Return `value` as a float; raise InvalidInput unless it is a finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"{name} is {value!r}: it must be a finite number {_range(low, high)}")
    if not low <= value <= high:
        raise InvalidInput(f"{name} is {value!r}: it must be a number {_range(low, high)}")
    return float(value)


def positive(name: str, value: float) -> float:
    """Return `value` as a float; raise InvalidInput unless it is finite and above zero."""
    if number(name, value) == 0.0:
        raise InvalidInput(f"{name} is 0: it must be above 0")
    return float(value)


def whole(name: str, value: int, *, low: int = 0, high: int | None = None) -> int:
    """Return `value`; raise InvalidInput unless it is an integer in [low, high]."""
    limit = math.inf if high is None else high
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= limit:
        raise InvalidInput(f"{name} is {value!r}: it must be a whole number {_range(low, limit)}")
    return value


def _range(low: float, high: float) -> str:
    return f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
