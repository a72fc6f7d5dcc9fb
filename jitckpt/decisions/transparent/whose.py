"""Whether a snapshot that a launcher has left is of the very job that is started now, and may go on here."""

from collections.abc import Mapping, Sequence
from typing import Any

FIRST_NUMBER = 300  # of a process: the kernel goes back to it after the highest
MOST_NAMED = 3  # flags of a processor

# What has to be equal, with the words for it.
_EQUAL = {
    "command": "of another command",
    "folder": "of a job in another working folder",
    "ranks": "of a job of another number of ranks",
    "place": "of another host's place in a job of so many hosts",
    "devices": "of a job with other devices",
    "user": "another user's",
    "versions": "of other versions of jitckpt, torch or Python",
    "kernel": "of another kernel",
}


def why_not(was: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return why a snapshot of `was` is not of `here`, as the end of "it is ..."; "" if it is.

    Both: what `_EQUAL` names; files: digests of those that the command names; processor: its flags.
    """
    for name, words in _EQUAL.items():
        if was[name] != here[name]:
            shown = f" ({_short(was[name])}, and here it is {_short(here[name])})"
            return f"{words}{'' if isinstance(here[name], dict) else shown}"
    changed = sorted(
        name
        for name in was["files"].keys() | here["files"].keys()
        if was["files"].get(name) != here["files"].get(name)
    )
    if changed:
        return f"of a job whose {changed[0]} was another"
    if lacking := sorted(set(was["processor"]) - set(here["processor"])):
        return f"of a processor that has {', '.join(lacking[:MOST_NAMED])}, which this one has not"
    return ""


def begin_of_largest_gap(numbers: Sequence[int], most: int) -> int:
    """Return the number of a first process that leaves the most room for others before one of `numbers`.

    most: the kernel's highest. Who has these numbers later is made with them.
    """
    bounds = [FIRST_NUMBER, *sorted(number for number in numbers if number > FIRST_NUMBER), most]
    return bounds[max(range(len(bounds) - 1), key=lambda at: bounds[at + 1] - bounds[at])]


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
