"""A pass over a loader in a loop of the script's own, whose counts beside the batches go on as well."""

from collections.abc import Iterable
from types import FrameType
from typing import Any

from jitckpt.data.loop import Iteration
from jitckpt.frameworks import protection
from jitckpt.system.bytecode import instructions as instructions_of
from jitckpt.system.bytecode import place_in
from jitckpt.worker import carried_names
from jitckpt.worker.job import Job

COUNTS = frozenset({"range", "count", "islice"})
COUNTED = (
    "{function}() beside the batches of a loader counts from 0 again where a restart goes on in the middle "
    "of an epoch, which then has other steps. Write `for number, batch in enumerate(loader):`, and leave the "
    "loop by `break`."
)


class ScriptPass(Iteration):
    """One pass."""

    def __init__(self, job: Job, loader: Iterable[Any], frame: FrameType) -> None:
        """frame: it iterates the loader."""
        super().__init__(job.loop, loader, counts_on=True)
        if function := counts_beside(frame):
            protection.tell(COUNTED.format(function=function))


def counts_beside(frame: FrameType) -> str:
    """Return which function that can't go on counts the batches that this frame iterates; "" for none."""
    place = place_in(frame)
    instruction = next((one for one in instructions_of(frame.f_code) if one.offset == place), None)
    if instruction is None or not instruction.opname.startswith("CALL"):
        return ""
    names = carried_names.names_in(frame.f_code, instruction)
    if "filter" in names and "enumerate" in frame.f_code.co_names:
        return "enumerate"  # of what filter leaves, which is fewer than the batches
    return min(COUNTS & names, default="")
