"""By which exceptions of the script's own its loops are left, so that a restart leaves them by the same.

Such as one that ends a training early. Only if it is known that the script goes on: by an `except` of a class
of its own. What `except Exception` catches may be a failure, after which the script ends all the same.
"""

import builtins
import dis
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, cast

from jitckpt.bindings.frame_variables import own_variables
from jitckpt.encoding import packed, tree_codec
from jitckpt.errors import TreeError
from jitckpt.system.bytecode import instructions as instructions_of
from jitckpt.system.installed import is_scripts_class

NOWHERE = (
    "The script has left a loop by an exception whose class is not there where the restart passes by it: it "
    "comes out at the loop's end. Define the class before the loop, as in the start that has saved."
)


def told(exception: BaseException | None, frame: FrameType | None) -> bytes:
    """Return what tells of an exception on its way through a frame, packed; b"" if it may be a failure.

    At the interpreter's end there is no frame.
    """
    if exception is None or isinstance(exception, StopIteration) or not is_scripts_class(type(exception)):
        return b""
    kind = type(exception)
    has_slots = any(vars(one).get("__slots__") for one in kind.__mro__ if is_scripts_class(one))
    if has_slots or _class_called(kind.__module__, kind.__qualname__) is not kind:
        return b""
    if not _is_caught(exception, frame):
        return b""
    with suppress(TreeError):
        names = [kind.__module__, kind.__qualname__]
        values = [exception.args, {**vars(exception)}]
        return packed.pack(tree_codec.encode([*names, *values], "exit"))
    return b""


def made(exit: bytes) -> BaseException | None:
    """Return the exception of which was told; None if its class is not there."""
    module, name, arguments, attributes = packed.unpack(exit)
    kind = _class_called(module, name)
    if kind is None or not issubclass(kind, BaseException):
        return None
    # Not by the script's own __new__, which takes what it will.
    base: Any = next(one for one in kind.__mro__ if not is_scripts_class(one))
    exception: BaseException = base.__new__(kind, *arguments)
    exception.args = arguments
    vars(exception).update(attributes)
    return exception


def _class_called(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _is_caught(exception: BaseException, frame: FrameType | None) -> bool:
    """Whether the first `except` that fits is of a class of the script's, and does not raise it again."""
    while frame is not None:
        for handler in _handlers(frame):
            for kinds, raises in _clauses(frame, handler):
                fitting = [kind for kind in kinds if isinstance(kind, type) and isinstance(exception, kind)]
                if fitting or not kinds:
                    return not raises and any(map(is_scripts_class, fitting))
        frame = frame.f_back
    return False


def _handlers(frame: FrameType) -> Iterator[int]:
    """Yield where a frame goes on with an exception that is raised where it is, from the innermost on."""
    table: Any = cast(Any, dis)._parse_exception_table(frame.f_code)
    place, seen = frame.f_lasti, set[int]()
    while True:
        target = next((one.target for one in table if one.start <= place < one.end), None)
        if target is None or target in seen:
            return
        seen.add(target)
        yield target
        place = target


def _clauses(frame: FrameType, handler: int) -> Iterator[tuple[list[Any], bool]]:
    """Yield of each `except` there its classes, and whether it may raise; no classes: it takes all.

    Nothing of a `finally` or a `with`.
    """
    place: int | None = handler
    while place is not None:
        kinds: list[Any] = []
        following = [one for one in instructions_of(frame.f_code) if one.offset >= place]
        place = None
        for number, one in enumerate(following):
            if one.opname == "CHECK_EXC_MATCH":
                jump = following[number + 1]
                body = [inside for inside in following[number + 2 :] if inside.offset < jump.argval]
                yield kinds, any(inside.opname == "RAISE_VARARGS" for inside in body)
                place = jump.argval
                break
            if one.opname == "POP_TOP" and not kinds and number and following[0].opname == "PUSH_EXC_INFO":
                yield [], True
            if not _load(frame, one, kinds):
                break


def _load(frame: FrameType, one: dis.Instruction, kinds: list[Any]) -> bool:
    """Do what leads to the classes of an `except`; return whether it may."""
    name = one.argval
    if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        kinds.append(frame.f_globals.get(name, getattr(builtins, name, None)))
    elif one.opname in ("LOAD_FAST", "LOAD_DEREF"):
        kinds.append(own_variables(frame).get(name))
    elif one.opname == "LOAD_ATTR" and kinds:
        kinds.append(getattr(kinds.pop(), name, None))
    return one.opname in (
        *("PUSH_EXC_INFO", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF", "LOAD_ATTR"),
        *("BUILD_TUPLE", "NOP", "COPY"),
    )
