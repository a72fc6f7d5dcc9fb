"""Where a loop goes on that the script leaves before its end.

A restart passes by such a loop: it comes out at the end, where one with no batches left comes out. That is
where `break` leads to, but for a loop with `else`, and `return` leads elsewhere.
"""

import dis
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import islice
from types import CodeType, FrameType

from jitckpt.system.bytecode import instructions as instructions_of

ForStatement = tuple[CodeType, int]  # its code, and where in it the next minibatch is asked for
GOES_ELSEWHERE = (
    "A loop over epochs or minibatches was left by `return`, or by `break` with an `else` behind the loop. A "
    "restart that passes by it comes out at the loop's end, as if it had run to its end: it does what stands "
    "there, and in a loop around it goes on. Leave it by `break` alone, and have a variable say what follows."
)
_LETS_GO = ("POP_TOP", "POP_ITER")  # of the iterator
_CLEANS_UP = ("END_FOR",) + (_LETS_GO if sys.version_info >= (3, 13) else ())
_COMPARED = 8  # instructions: that many alike are the same place


def for_statement(frame: FrameType | None) -> ForStatement | None:
    """Return the one that asks for a minibatch, in this frame or around generators."""
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_back is not None:
        frame = frame.f_back
    if frame is None or dis.opname[frame.f_code.co_code[frame.f_lasti]] != "FOR_ITER":
        return None
    return frame.f_code, frame.f_lasti


def goes_elsewhere(frame: FrameType, asks: ForStatement | None) -> bool:
    """Whether the script, in a loop that this frame leaves, goes on elsewhere than at its end."""
    if asks is None or frame.f_code is not asks[0]:
        return False
    code, loop = asks
    if _instructions(code)[frame.f_lasti].opname not in _LETS_GO:
        return False  # it is at its end: what is around our iterator, as islice, has had enough
    end = _behind_clean_up(code, _instructions(code)[loop].argval)
    behind, leaves = (islice(_from(code, place), _COMPARED) for place in (end, _next(code, frame.f_lasti)))
    return [*behind] != [*leaves]


@cache
def _instructions(code: CodeType) -> dict[int, dis.Instruction]:
    return {one.offset: one for one in instructions_of(code)}


def _next(code: CodeType, offset: int) -> int:
    return min(one for one in _instructions(code) if one > offset)


def _behind_clean_up(code: CodeType, offset: int) -> int:
    """Return where the script goes on at a loop's end, once its iterator is away."""
    for name in _CLEANS_UP:
        if _instructions(code)[offset].opname == name:
            offset = _next(code, offset)
    return offset


def _from(code: CodeType, offset: int) -> Iterator[tuple[str, object]]:
    """Yield what is done from a place on, up to the end or the first loop, wherever it lies."""
    instructions = _instructions(code)
    for _ in instructions:  # jumps may lead round in a circle
        one = instructions[offset]
        is_jump = one.opname.startswith("JUMP")
        if not (is_jump or one.opname == "NOP"):
            yield one.opname.removesuffix("_CHECK"), one.argval  # of a name that may not be set
        if one.opname.startswith(("RETURN", "RAISE", "RERAISE")) or "_ITER" in one.opname:
            return
        offset = one.argval if is_jump else _next(code, offset)
