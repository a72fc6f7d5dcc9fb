"""The instructions of a function's code, as CPython has compiled it."""

import dis
import opcode
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, cast

_PREFIX = "EXTENDED_ARG"  # of an instruction whose argument is large: no instruction of its own
_FIRST_OF_A_CALL = dis.opmap.get("PRECALL")  # in CPython 3.11


def place_in(frame: FrameType) -> int:
    """Return the place of the instruction that a frame is at.

    Of the two that CPython 3.11 has for a call it is the second, as in the first rounds of a loop; once that
    has gone round some times, both are made at the first.
    """
    place = frame.f_lasti
    if place < 0 or frame.f_code.co_code[place] != _FIRST_OF_A_CALL:
        return place
    caches: list[int] = cast(Any, opcode)._inline_cache_entries
    return place + 2 * (1 + caches[_FIRST_OF_A_CALL])


@lru_cache(maxsize=64)
def instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    """Return them in order; a jump leads to the instruction, and not to a prefix of it.

    A prefix stands before each jump that is far, so a loop of some 30 lines has them, and a short one none.
    """
    behind: dict[int, int] = {}  # where the instruction is that a prefix belongs to
    found: list[dis.Instruction] = []
    prefixes: list[int] = []
    for one in dis.get_instructions(code):
        if one.opname == _PREFIX:
            prefixes.append(one.offset)
            continue
        behind.update(dict.fromkeys(prefixes, one.offset))
        prefixes.clear()
        found.append(one)
    return tuple(
        one._replace(argval=behind[one.argval]) if leads_elsewhere(one) and one.argval in behind else one
        for one in found
    )


def leads_elsewhere(one: dis.Instruction) -> bool:
    """Whether an instruction's argument is a place in the code."""
    return one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
