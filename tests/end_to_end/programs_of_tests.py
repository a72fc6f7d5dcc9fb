"""The programs that tests start: files of programs/, some of which a test changes a little."""

from pathlib import Path
from typing import SupportsIndex

PROGRAMS = Path(__file__).parent / "programs"


class Program(str):
    """The text of one. What is to be replaced in it has to be there, or the test would prove nothing."""

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> "Program":
        assert old in self, f"no such text in the program: {old}"
        return Program(super().replace(old, new, count))


def text_of(name: str) -> Program:
    """Return the text of programs/NAME.py."""
    return Program((PROGRAMS / f"{name}.py").read_text())
