"""The frames of the script's own code, and what variables they have."""

import inspect
from collections.abc import Iterator
from types import FrameType

from jitckpt.bindings.frame_variables import own_variables
from jitckpt.system import installed
from jitckpt.system.bytecode import place_in
from jitckpt.worker.carried_names import loops_around

_LIBRARIES = installed.folders()


def variables_of(frame: FrameType) -> dict[str, object]:
    """Return what a frame's code can read by name, and leave nothing of it with the frame."""
    return frame.f_globals | own_variables(frame)


def names_of(frame: FrameType) -> set[str]:
    """Return the names of a frame's own variables, and of those that it shares with functions around it."""
    code = frame.f_code
    return {*code.co_varnames, *code.co_cellvars, *code.co_freevars}


def place_of(frame: FrameType, name: str = "") -> str:
    """Return the place (state/kept_variables.py) in which a frame's variable of this name lies.

    Without a name that of the frame's own variables.
    """
    module = f"{frame.f_globals.get('__name__', '')}:"
    is_module = not frame.f_code.co_flags & inspect.CO_OPTIMIZED or (name and name not in names_of(frame))
    return module if is_module else f"{module}{frame.f_code.co_qualname}"


def is_scripts(frame: FrameType) -> bool:
    """Whether its code is the user's own, and no library's."""
    ours = is_ours(frame.f_globals.get("__name__", ""))
    return not ours and not frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen"))


def is_ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "jitckpt"


def scripts_frames(frame: FrameType | None, *, generators: bool = False) -> Iterator[FrameType]:
    """Yield the frames of the script's own functions, from the innermost on."""
    while frame is not None:
        if (generators or not frame.f_code.co_flags & inspect.CO_GENERATOR) and is_scripts(frame):
            yield frame
        frame = frame.f_back


def frames_that_ask(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of the script's generators around the job's loop, and the one with the loop in it.

    That may be the caller of a function that draws a batch.
    """
    between: list[FrameType] = []
    functions: list[FrameType] = []
    for one in scripts_frames(frame, generators=True):
        is_generator = bool(one.f_code.co_flags & inspect.CO_GENERATOR)
        if is_generator and not functions:
            between.append(one)
        elif not is_generator:
            functions.append(one)
            if loops_around(one.f_code, (place_in(one),)):
                return [*between, one]
    return [*between, *functions[:1]] if functions else []
