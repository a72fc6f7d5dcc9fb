"""The parser of every command: a wrong call ends in one sentence, with what was probably meant."""

import argparse
import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn

MOST_SECONDS = 1_000_000  # 11 days: the system's calls take no longer times


class Parser(argparse.ArgumentParser):
    """argparse's own, but that a wrong call isn't answered with the whole usage."""

    def error(self, message: str) -> NoReturn:
        """End with status 2, one sentence, and what was probably meant."""
        self.exit(
            2, f"{self.prog}: error: {message}{self._meant(message)} (`{self.prog} --help` tells more)\n"
        )

    def _meant(self, message: str) -> str:
        if match := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            return did_you_mean(match[1], re.findall(r"[\w.-]+", match[2]))
        if match := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            return did_you_mean(match[1], re.findall(r"--[a-z][\w-]+", self.format_help()))
        return ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the known word nearest to this one; "" where none is near."""
    known_by_name = {name.lstrip("-"): name for name in sorted(set(known))}  # dashes are no likeness
    near = get_close_matches(word.lstrip("-"), known_by_name, n=1)
    return f"; did you mean {known_by_name[near[0]]}?" if near else ""


def seconds(text: str) -> float:
    """Read the value of an option that is a time."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, up to {MOST_SECONDS}")
    return found
