"""Which variables a loop carries from one iteration to the next, as its code tells."""

import dis
import inspect
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from types import CodeType
from typing import Any

from jitckpt.system.bytecode import instructions as instructions_of

# Methods of a tensor that write to all of it, whatever was there.
WHOLLY = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_"})
# A for statement over something with these in it is the job's own, or begins where the job is.
OF_THE_JOB = frozenset({"steps", "epochs", "batches", "restore"})
COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_GOES_ELSEWHERE = ("JUMP_FORWARD", "JUMP_BACKWARD", "RETURN_", "RAISE_", "RERAISE")
_ACCESS = re.compile(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)")


@cache
def read_first(code: CodeType, at: tuple[int, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Return what the loop around instructions reads before it writes it, and what of that it writes."""
    instructions = instructions_of(code)
    begin, end = _loop_around(instructions, at)
    read, written = _read_between(instructions, begin, end)
    return frozenset(read.keys() - overwritten(code, begin, end)), frozenset(written & read.keys())


def _read_between(
    instructions: Iterable[dis.Instruction], begin: int, end: int
) -> tuple[dict[str, None], set[str]]:
    """Return what is read between two places before it is written there, and what is written.

    By functions that are made there, too: what they carry on, and what a comprehension reads.
    """
    read: dict[str, None] = {}
    written: set[str] = set()
    for one in instructions:
        if begin <= one.offset <= end and "AND_CLEAR" not in one.opname:
            if isinstance(one.argval, CodeType):
                of_inner, written_there = _outer_names(one.argval)
                read |= dict.fromkeys(of_inner - written)
                written |= written_there
                continue
            for kind, name in zip(_kinds(one.opname), _names(one.argval), strict=False):
                if kind == "STORE":
                    written.add(name)
                elif name not in written:
                    read[name] = None
    return read, written


@cache
def _outer_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return what a function that a loop makes reads first of variables from outside, and what it writes.

    Of one that may be called later, as a closure of an optimizer's, read is only what it writes as well.
    """
    read: set[str] = set()
    written: set[str] = set()
    for one in instructions_of(code):
        if isinstance(one.argval, CodeType):
            of_inner, written_there = _outer_names(one.argval)
            read |= of_inner - {*code.co_cellvars} - written
            written |= written_there - {*code.co_cellvars}
        elif one.opname.endswith("_GLOBAL") or (
            one.opname.endswith("_DEREF") and one.argval in code.co_freevars
        ):
            if one.opname.startswith("STORE"):
                written.add(one.argval)
            elif one.opname.startswith("LOAD") and one.argval not in written:
                read.add(one.argval)
    return frozenset(read if code.co_name in COMPREHENSIONS else read & written), frozenset(written)


@cache
def read_later(code: CodeType, place: int) -> frozenset[str]:
    """Return what some code, or a function that it makes, still reads of what there is at a place."""
    instructions = instructions_of(code)
    found = _read_by_inner(code)
    for _, begin, end in _spans_around(instructions, (place,)):
        found |= _read_between(instructions, begin, end)[0].keys()
    return frozenset(found | _places(instructions, place, instructions[-1].offset)[1].keys())


@cache
def carried_around(code: CodeType, place: int, epochs: int | None) -> tuple[frozenset[str], frozenset[str]]:
    """Return what the loops around the one at a place read first, and what of that they set.

    epochs: where the loop over epochs is, if it is in this code: from there on a restart goes on. If it is
    the same place, a generator has that loop, or makes the iterator as it is first asked.
    """
    read: set[str] = set()
    carried: set[str] = set()
    if epochs == place:
        epochs = None
    for _, begin, _ in sorted(_spans_around(instructions_of(code), (place,)))[1:]:
        if epochs is None or begin > epochs:
            first, written = read_first(code, (begin,))
            read |= first
            carried |= written | held(code, (begin,))
    return frozenset(read), frozenset(carried)


@cache
def made_anew(code: CodeType, at: tuple[int, ...]) -> frozenset[str]:
    """Return what the loop around instructions writes, and does not read before that."""
    instructions = instructions_of(code)
    stores, _ = _places(instructions, *_loop_around(instructions, at))
    return frozenset(stores.keys() - read_first(code, at)[0])


@cache
def loops_around(code: CodeType, at: tuple[int, ...]) -> int:
    """Return how many loops there are around these places."""
    return len(_spans_around(instructions_of(code), at))


@cache
def held(code: CodeType, at: tuple[int, ...]) -> frozenset[str]:
    """Return what the loop around instructions sets in some iterations alone, and reads later.

    In an iteration that does not set it, or behind the loop.
    """
    instructions = instructions_of(code)
    begin, end = _loop_around(instructions, at)
    stores, loads = _places(instructions, begin, end)
    read, _ = read_first(code, at)
    return set_now_and_then(code, at) | {
        name
        for name in (stores.keys() & loads.keys()) - read
        if _can_be_left_out(instructions, begin, end, stores[name], loads[name])
    }


@cache
def made_when_missing(code: CodeType, at: tuple[int, ...]) -> frozenset[str]:
    """Return the names that the loop around instructions compares with None: it makes such anew."""
    instructions = instructions_of(code)
    begin, end = _loop_around(instructions, at)
    found = set()
    for one, after in itertools.pairwise(instructions):
        is_compared = after.opname.endswith("NONE") or (after.opname == "LOAD_CONST" and after.argval is None)
        if begin <= one.offset <= end and "LOAD_" in one.opname and is_compared:
            found |= {*_names(one.argval)}
    return frozenset(found)


@cache
def counted_beside(code: CodeType, at: tuple[int, ...]) -> frozenset[str]:
    """Return the variables of for statements in which batches are drawn by next().

    But for those of the job's own loops, and of loops that begin a pass in each round.
    """
    instructions = instructions_of(code)
    if any(one.offset in at and one.opname == "FOR_ITER" for one in instructions):
        return frozenset()
    found = set()
    for number, one in enumerate(instructions):
        if one.opname != "FOR_ITER" or not one.offset < min(at) < one.argval:
            continue
        inside = _attributes(other for other in instructions if one.offset < other.offset < one.argval)
        target = instructions[number + 1]
        if _kinds(target.opname)[:1] == ["STORE"] and not (
            OF_THE_JOB & _attributes(_of_expression(instructions, instructions[number - 1]))
            or "batches" in inside
        ):
            found.add(_names(target.argval)[0])
    return frozenset(found)


def _attributes(instructions: Iterable[dis.Instruction]) -> set[str]:
    return {one.argval for one in instructions if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}


def names_in(code: CodeType, belonging: dis.Instruction) -> frozenset[str]:
    """Return the names that are read in the expression to which an instruction belongs."""
    read = (one for one in _of_expression(instructions_of(code), belonging) if "LOAD_" in one.opname)
    return frozenset(name for one in read for name in _names(one.argval) if isinstance(name, str))


def _of_expression(
    instructions: Iterable[dis.Instruction], belonging: dis.Instruction
) -> Iterator[dis.Instruction]:
    """Yield the instructions of the expression to which one belongs."""
    where = belonging.positions
    for one in instructions:
        there = one.positions
        if where is None or there is None or None in (*where, *there):
            continue
        begins = (where.lineno, where.col_offset) <= (there.lineno, there.col_offset)
        if begins and (there.end_lineno, there.end_col_offset) <= (where.end_lineno, where.end_col_offset):
            yield one


@cache
def target_of(code: CodeType, place: int) -> tuple[tuple[str, ...], Any] | None:
    """Return where the for statement at a place puts its values, if that is no variable.

    The names that lead to the object, and the attribute or the key in it.
    """
    instructions = iter(instructions_of(code))
    at = next((one for one in instructions if one.offset == place), None)
    if at is None or at.opname != "FOR_ITER":
        return None
    path: list[Any] = []
    for one in instructions:
        if one.opname == "STORE_ATTR":
            return (*path,), one.argval
        if one.opname == "STORE_SUBSCR":
            return (*path[:-1],), path[-1]
        if not one.opname.startswith(("LOAD_", "COPY_FREE", "RESUME")):
            return None
        path += _names(one.argval)
    return None


def _places(
    instructions: Iterable[dis.Instruction], begin: int, end: int
) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """Return where the names between two places are set, and where they are read."""
    found: tuple[dict[str, set[int]], dict[str, set[int]]] = {}, {}
    for one in instructions:
        if begin <= one.offset <= end and "AND_CLEAR" not in one.opname:
            for kind, name in zip(_kinds(one.opname), _names(one.argval), strict=False):
                found[kind == "LOAD"].setdefault(name, set()).add(one.offset)
    return found


@cache
def set_now_and_then(code: CodeType, at: tuple[int, ...]) -> frozenset[str]:
    """Return what the loop around instructions sets in some iterations alone, and the code behind it reads.

    The best weights by now, for one. So does a function that is made there, whoever calls it, and when.
    """
    instructions = instructions_of(code)
    begin, end = _loop_around(instructions, at)
    stores, _ = _places(instructions, begin, end)
    read = _read_behind(instructions, begin, end).keys() | _read_by_inner(code)
    return frozenset(
        name for name in stores.keys() & read if _can_be_left_out(instructions, begin, end, stores[name])
    )


@cache
def set_more_than_once(code: CodeType) -> frozenset[str]:
    """Return the variables that some code sets at several places."""
    places, _ = _places(instructions_of(code), 0, len(code.co_code))
    return frozenset(name for name, of in places.items() if len(of) > 1)


def _read_by_inner(code: CodeType) -> set[str]:
    """Return the variables of some code that functions read which it makes."""
    read = {*code.co_cellvars}
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module's are global
        inner = [one for one in code.co_consts if isinstance(one, CodeType)]
        while inner:
            one = inner.pop()
            read |= {part.argval for part in instructions_of(one) if part.opname == "LOAD_GLOBAL"}
            inner += [part for part in one.co_consts if isinstance(part, CodeType)]
    return read


@cache
def attributes_set_now_and_then(code: CodeType) -> frozenset[str]:
    """Return the attributes that a function, or an iteration of a loop in it, sets in some branches alone."""
    instructions = instructions_of(code)
    if code.co_name == "__init__":
        return frozenset()
    stores: dict[tuple[int, int, str], set[int]] = {}
    for one in instructions:
        if one.opname == "STORE_ATTR":
            span = _loop_around(instructions, (one.offset,))
            stores.setdefault((*span, one.argval), set()).add(one.offset)
    ends = {one.offset for one in instructions if one.opname.startswith("RETURN_")}
    return frozenset(
        name
        for (begin, end, name), places in stores.items()
        if (
            _can_be_left_out(instructions, begin, end, places)
            if end >= begin
            else _can_be_left_out(instructions, 0, instructions[-1].offset, places, ends)
        )
    )


@cache
def read_behind(code: CodeType, place: int) -> frozenset[str]:
    """Return what the loop around a place sets, and the code behind it reads."""
    instructions = instructions_of(code)
    return frozenset(_read_behind(instructions, *_loop_around(instructions, (place,))))


def _read_behind(instructions: Iterable[dis.Instruction], begin: int, end: int) -> dict[str, set[int]]:
    """Return what is set between two places, and where, and is read behind them before it is set there."""
    stores: dict[str, set[int]] = {}
    behind: dict[str, str] = {}  # what is done first with a name
    for one in instructions:
        for kind, name in zip(_kinds(one.opname), _names(one.argval), strict=False):
            if one.offset > end:
                behind.setdefault(name, kind)
            elif kind == "STORE" and one.offset >= begin:
                stores.setdefault(name, set()).add(one.offset)
    return {name: places for name, places in stores.items() if behind.get(name) == "LOAD"}


@cache
def set_behind(code: CodeType, place: int, *, asks: bool) -> frozenset[str]:
    """Return what the loop around a place sets, but for what a restart does again before it comes there.

    asks: the loop asks for the next minibatch there, so a restart does nothing of it before that.
    """
    instructions = instructions_of(code)
    begin, end = _loop_around(instructions, (place,))
    stores, _ = _places(instructions, begin, end)
    return frozenset(name for name, places in stores.items() if asks or min(places) > place)


def _can_be_left_out(
    instructions: Sequence[dis.Instruction],
    begin: int,
    end: int,
    places: Collection[int],
    goals: Collection[int] = (),
) -> bool:
    """Whether an iteration can come to its end, or to one of the goals if there are some, without these.

    Loops inside of it are gone through once.
    """
    following = {one.offset: (one, after) for one, after in itertools.pairwise(instructions)}
    waiting, known = [(begin, False)], set(places)
    while waiting:
        place, comes_back = waiting.pop()
        if not begin <= place <= end or (place in known and not comes_back):
            continue
        if place in goals:
            return True
        if place not in following:
            continue
        known.add(place)
        one, after = following[place]
        if one.opname == "FOR_ITER":
            waiting.append((one.argval if comes_back else after.offset, False))
        elif "JUMP" in one.opname and one.argval == begin:
            if not goals:
                return True
        else:
            if "JUMP" in one.opname:
                is_inner_loops = one.argval < place and following[one.argval][0].opname == "FOR_ITER"
                waiting.append((one.argval, is_inner_loops))
            if not one.opname.startswith(_GOES_ELSEWHERE):
                waiting.append((after.offset, False))
    return False


def _loop_around(instructions: Iterable[dis.Instruction], at: tuple[int, ...]) -> tuple[int, int]:
    """Return where the innermost loop around these places begins and ends."""
    return min(_spans_around(instructions, at), default=(0, 0, -1))[1:]


def _spans_around(instructions: Iterable[dis.Instruction], at: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return the loops around these places: how long each is, where it begins, and where it ends."""
    ends: dict[int, int] = {}  # of each loop the last of its jumps, of which `continue` is one
    for one in instructions:
        if "JUMP_BACKWARD" in one.opname and "NO_INTERRUPT" not in one.opname:  # that is of `yield from`
            ends[one.argval] = one.offset
    return [(end - begin, begin, end) for begin, end in ends.items() if begin <= min(at) and max(at) <= end]


def overwritten(code: CodeType, begin: int, end: int) -> set[str]:
    """Return the tensors' names that some code writes to, whole, before it reads them, in whatever branch."""
    inside = [one for one in instructions_of(code) if begin <= one.offset <= end]
    known: set[str] = set()
    found: set[str] = set()
    for place, one in enumerate(inside):
        used = _names(one.argval)[: len(_kinds(one.opname))]
        if not used or used[-1] in known:
            known |= {*used}
            continue
        known |= {*used}
        following = [*itertools.takewhile(lambda other: other.opname != "POP_TOP", inside[place + 1 :])]
        writes = following and "LOAD_" in following[0].opname and following[0].argval in WHOLLY
        reads = any(_kinds(other.opname) and used[-1] in _names(other.argval) for other in following)
        skips = any(
            ("JUMP" in other.opname or other.opname == "FOR_ITER") and one.offset < other.argval <= end
            for other in inside[:place]
            if "BACKWARD" not in other.opname
        )
        if writes and not reads and not skips:
            found.add(used[-1])
    return found


def _names(argument: Any) -> tuple[Any, ...]:
    return argument if isinstance(argument, tuple) else (argument,)


def _kinds(operation: str) -> Sequence[str]:
    return _ACCESS.findall(operation)
