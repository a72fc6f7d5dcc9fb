"""Variables of the script that its loop carries on: counters, histories, generators of random numbers.

No save holds them, so after a restart they are as the script sets them before the loop. Which they are is
seen in the code of the loop and of the script's functions that it calls, by what they read before they write
it, and in what changes between the first steps.
"""

import argparse
import dis
import inspect
import itertools
import operator
import random
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from multiprocessing.sharedctypes import SynchronizedBase
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from jitckpt.data.generators import samplers
from jitckpt.state.attributes import slots_of
from jitckpt.system import installed

LOOKS = 3  # after the first steps: a loop does in each iteration what it does in these
MOST_VALUES = 2000  # that are looked at in one variable
MOST_BYTES = 1 << 26  # of an array, which takes some milliseconds
DEPTH = 3  # to which objects of the script's own classes are looked into
SHOWN = 8  # names
CLOCKS = (time.time, time.perf_counter, time.monotonic)
CLOCK_SECONDS = 3600.0  # what is so near to a clock was read from it
GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
OTHERS_AFFAIR = (nn.Module, Optimizer, DataLoader, Dataset, Sampler)
ITERATORS: tuple[Any, ...] = (
    GeneratorType,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    itertools.count,
)
CONTAINERS = (list, tuple, dict, deque, set)
VALUES = (type(None), bool, int, float, complex, str, bytes, numpy.ndarray, numpy.generic, Tensor)
ARRAYS = (numpy.ndarray, Tensor)
NAMESPACES = (argparse.Namespace, SimpleNamespace)
NUMBERS = (bool, int, float, complex)
OF_MODULES = frozenset(vars(nn.Module()))  # what torch keeps in each
# Methods of a tensor that write to all of it, whatever was there.
WHOLLY = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_"})
# Where torch keeps what it calls for a module, a tensor or an optimizer.
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
_OPAQUE = "*opaque"
_LIBRARIES = installed.folders()
_GOES_ELSEWHERE = ("JUMP_FORWARD", "JUMP_BACKWARD", "RETURN_", "RAISE_", "RERAISE")
_ACCESS = re.compile(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)")

TEXT = (
    "The loop changes variables of the script that no save holds: {names}. After a failure they are as the "
    "script sets them before the loop. If the training, or what you print of it, depends on them, keep them "
    "in `extra` (an object with state_dict and load_state_dict, given to jitckpt.init); what each iteration "
    "writes anew before it reads it needs nothing."
)
COUNTER = " A counter of optimizer steps can begin with job.restore()."


class ScriptVariables:
    """Of one job; told whenever the loop goes on after optimizer steps."""

    def __init__(
        self,
        given: Iterable[object],
        extra: object,
        steps: Callable[[], int],
        warn: Callable[[str], None],
        *,
        of_epochs: bool = False,
        said: set[object] | None = None,
    ) -> None:
        """given: objects that others look after. steps: how many optimizer steps were made.

        of_epochs: of the loop over epochs, which is looked at in each: what changes is named at once.
        said: what was named by now, of this loop and of others that have the same set.
        """
        self._given, self._extra = [*given], extra
        self._of_epochs = of_epochs
        self._said = set() if said is None else said
        self._named: set[str] = set()
        self._steps, self._warn = steps, warn
        self._place: tuple[CodeType, tuple[int, ...]] | None = None  # of the first loop that makes steps
        self._ended: list[tuple[FrameType, int]] = []  # the script's, as a step was made, and where they were
        self._before: dict[str, object] = {}
        self._changed: dict[str, None] = {}
        self._looks = 0
        self.script_restores = False  # it has called restore() itself, and can count from there

    @property
    def is_looking(self) -> bool:
        return self._looks < LOOKS or self._of_epochs

    def look(self, frame: FrameType | None) -> None:
        """The script asks for its next minibatch from this frame; a generator of it may lie between."""
        if self.is_looking and (asks := next(_scripts_frames(frame), None)) is not None:
            self._try(asks, (asks.f_lasti,))

    # Where the loop tells nothing of its minibatches these two tell of it. They are called in its first ones.

    def step_ended(self, frame: FrameType | None) -> None:
        """The script has made an optimizer step, somewhere below this frame."""
        # Kept until the next minibatch begins, as a frame that has ended may leave its address to another.
        self._ended = [(one, one.f_lasti) for one in _scripts_frames(frame)] if self.is_looking else []

    def minibatch_begun(self, frame: FrameType | None) -> None:
        """The script begins a minibatch: the innermost of its frames that made the step has the loop."""
        ended, self._ended = self._ended, []
        for one in _scripts_frames(frame):
            for other, place in ended:
                if one is other:
                    self._try(one, (place, one.f_lasti))
                    return

    def _try(self, frame: FrameType, at: tuple[int, ...]) -> None:
        try:
            self._look(frame, at)
        except Exception:  # what a variable's own methods raise is not the training's affair
            self._looks, self._of_epochs = LOOKS, False

    def _look(self, frame: FrameType, at: tuple[int, ...]) -> None:
        place = frame.f_code, at
        self._place = self._place or place
        if place != self._place:
            return
        self._looks += 1
        now = self._marks(frame, at)
        for name, mark in now.items():
            if name in self._before and self._before[name] != mark and name not in self._named:
                self._changed[name] = None
        self._before = now
        if (self._looks == LOOKS or self._of_epochs) and self._changed:
            changed, self._changed = [*self._changed], {}
            self._named |= {*changed}
            self._say(changed, frame)

    def _say(self, changed: Sequence[str], frame: FrameType) -> None:
        """Name them, but for what another loop has named; two functions' variables may have one name."""
        scope, code = variables_of(frame), frame.f_code
        local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        keys: dict[str, object] = {}
        for name in changed:
            if isinstance(scope.get(name), CONTAINERS):
                keys[name] = name, id(scope[name])
            else:
                keys[name] = (name, code) if name in local else name
        names = [name for name, key in keys.items() if key not in self._said]
        self._said |= {*keys.values()}
        if names:
            text = TEXT.format(names=", ".join(names[:SHOWN]) + (" ..." if names[SHOWN:] else ""))
            self._warn(text + (COUNTER if any("." not in name for name in names) else ""))

    def _marks(self, frame: FrameType, at: tuple[int, ...]) -> dict[str, object]:
        known = _kept_by(self._extra)
        kept = known[1]
        kept |= {id(tensor) for one in self._given for tensor in _tensors_of(one)} | {*map(id, self._given)}
        read, carried = read_first(frame.f_code, at)
        if self._of_epochs:
            read, carried = (names | set_now_and_then(frame.f_code, at) for names in (read, carried))
        tells_nothing = len(at) > 1
        scope = variables_of(frame)
        marks: dict[str, object] = {}
        called = [(name, scope[name]) for name in read if name in scope]
        used = {id(one): one for one in (*self._given, *scope.values())}.values()
        by_torch = [found for one in used for found in _called_by_torch(one)]
        for functions in (called, by_torch):
            for variables, written in _of_functions(functions):
                marks |= self._marks_of(
                    variables,
                    variables.keys(),
                    written,
                    known,
                    tells_nothing=tells_nothing,
                    notes=functions is by_torch,
                )
        marks |= _in_modules([one for one in used if isinstance(one, nn.Module)], kept)
        # Between two passes they may change: as a sampler is when one begins, it is kept.
        loaders = [one for one in used if isinstance(one, DataLoader)]
        marks |= _shared_in(loaders) if self._of_epochs else _in_loaders(loaders, kept, tells_nothing)
        return marks | self._marks_of(
            scope, read, carried, known, tells_nothing=tells_nothing, code=frame.f_code
        )

    def _marks_of(
        self,
        scope: Mapping[str, object],
        read: Collection[str],
        carried: Collection[str],
        known: tuple[set[str], set[int]],
        *,
        tells_nothing: bool,
        code: CodeType | None = None,
        notes: bool = False,
    ) -> dict[str, object]:
        """Return marks of these variables. read, carried: names of those that are read, and set as well.

        known: names of variables and ids of objects that others look after. code: the loop's, of its own.
        tells_nothing: the loop, of its minibatches. notes: as in `_inside`.
        """
        kept_names, kept = known
        attributes = frozenset() if code is None else _carried_in(code)
        marks: dict[str, object] = {}
        for name, value in scope.items():
            if name in kept_names or id(value) in kept or name.startswith("__"):
                continue
            if isinstance(value, GENERATORS):
                marks[name] = _state_of(value)
            elif name in carried and not isinstance(value, (*CONTAINERS, *OTHERS_AFFAIR)):
                if _is_ours(type(value).__module__):  # an iterator over job.batches
                    continue
                if not self._is_known(value, code, tells_nothing):
                    marks[name] = _rebound(value)
            elif name in read and isinstance(value, ITERATORS):
                if tells_nothing:  # else it may be what draws from the loop
                    marks[name] = _advanced(value)
            elif name in read and not isinstance(value, OTHERS_AFFAIR):
                for kind in type(value).__mro__:
                    if kind.__name__ not in kept_names and _is_scripts_class(kind):
                        marks |= _inside(kind.__name__, kind, kept, attributes)
                marks |= _inside(name, value, kept, attributes, notes=notes)
        return marks

    def _is_known(self, value: object, code: CodeType | None, tells_nothing: bool) -> bool:
        if type(value) is int:
            ahead = value - self._steps()
            # In a loop that tells nothing it may have been counted on before the forward pass.
            counts = self.script_restores and (ahead == 0 or (tells_nothing and ahead == 1))
            return counts or (code is not None and "first" in code.co_names)
        return type(value) is float and any(abs(value - clock()) < CLOCK_SECONDS for clock in CLOCKS)


def variables_of(frame: FrameType) -> dict[str, object]:
    """Return what a frame's code can read by name, and leave nothing of it with the frame.

    Before Python 3.13 a function's frame keeps the dict that it was asked for, and all in it (PEP 667): the
    outputs of one minibatch would stay in the device's memory as long as the loop runs.
    """
    local = frame.f_locals
    scope = {**frame.f_globals, **local}
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        local.clear()
    return scope


def is_scripts(frame: FrameType) -> bool:
    """Whether its code is the user's own, and no library's."""
    ours = _is_ours(frame.f_globals.get("__name__", ""))
    return not ours and not frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen"))


def _is_ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "jitckpt"


def _scripts_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the script's own functions, from the innermost on."""
    while frame is not None:
        if not frame.f_code.co_flags & inspect.CO_GENERATOR and is_scripts(frame):
            yield frame
        frame = frame.f_back


def _tensors_of(given: object) -> Iterator[Tensor]:
    """Yield the tensors that are saved with an object."""
    if isinstance(given, nn.Module):
        yield from given.parameters()
        for _, buffer in given.named_buffers():
            yield buffer
    elif isinstance(given, Optimizer):
        for group in given.param_groups:
            yield from group["params"]
            yield from (value for value in group.values() if isinstance(value, Tensor))


def _called_by_torch(one: object) -> Iterator[tuple[str, object]]:
    """Yield the functions that torch calls for an object: forward passes, hooks, what makes samples."""
    keepers: list[Any] = []
    if isinstance(one, nn.Module):
        keepers = [*one.modules(), *one.parameters()]
        yield from ((type(part).__qualname__, getattr(part, "forward", None)) for part in one.modules())
    elif isinstance(one, Optimizer):
        keepers = [one]
    elif isinstance(one, DataLoader):
        yield type(one.collate_fn).__qualname__, one.collate_fn
        for name in ("__getitem__", "__iter__"):
            yield type(one.dataset).__qualname__, getattr(one.dataset, name, None)
    for keeper in keepers:
        for hooks in HOOKS:
            for hook in (getattr(keeper, hooks, None) or {}).values():
                yield type(hook).__qualname__, hook


def _of_functions(called: Iterable[tuple[str, object]]) -> Iterator[tuple[dict[str, object], set[str]]]:
    """Yield, of each of the script's functions among these, the variables outside of it that it reads.

    And the names of those that it sets. Functions that it calls itself are gone through as well; of a method
    its object is such a variable.
    """
    waiting = [(name, one, DEPTH) for name, one in called]
    known: set[int] = set()
    while waiting:
        name, one, depth = waiting.pop()
        function = one
        if isinstance(one, MethodType):
            function = one.__func__
            yield {name: one.__self__}, set()
        elif _is_own(one):
            yield {name: one}, set()
            function = getattr(one.__call__, "__func__", None) if callable(one) else None
        elif isinstance(one, partial):
            waiting += [(name, part, depth) for part in (one.func, *one.args, *one.keywords.values())]
        if not depth or id(function) in known or not isinstance(function, FunctionType):
            continue
        known.add(id(function))
        code = function.__code__
        if code.co_filename.startswith((*_LIBRARIES, "<frozen")) or _is_ours(function.__module__):
            continue
        loaded, written = _outside(code)
        variables = {name: function.__globals__[name] for name in loaded if name in function.__globals__}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing is there yet
                variables[name] = cell.cell_contents
        yield variables, written
        waiting += [(name, value, depth - 1) for name, value in variables.items()]


@cache
def _outside(code: CodeType) -> tuple[frozenset[str], set[str]]:
    """Return the global variables that a function reads, and those of others that it sets."""
    loaded: set[str] = set()
    written: set[str] = set()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(one.argval)
        elif one.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            written.add(one.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # a comprehension's, a lambda's
            loaded |= _outside(inner)[0]
    return frozenset(loaded - _overwritten(code, 0, len(code.co_code))), written


def _overwritten(code: CodeType, begin: int, end: int) -> set[str]:
    """Return the tensors' names that some code writes to, whole, before it reads them, in whatever branch."""
    inside = [one for one in dis.get_instructions(code) if begin <= one.offset <= end]
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


def _loop_around(instructions: Iterable[dis.Instruction], at: tuple[int, ...]) -> tuple[int, int]:
    """Return where the innermost loop around these places begins and ends."""
    spans = [
        (one.offset - one.argval, one.argval, one.offset)
        for one in instructions
        if "JUMP_BACKWARD" in one.opname and one.argval <= min(at) and max(at) <= one.offset
    ]
    return min(spans, default=(0, 0, -1))[1:]


@cache
def set_now_and_then(code: CodeType, at: tuple[int, ...]) -> frozenset[str]:
    """Return what the loop around instructions sets in some iterations alone, and the code behind it reads.

    The best weights by now, for one.
    """
    instructions = [*dis.get_instructions(code)]
    begin, end = _loop_around(instructions, at)
    stores: dict[str, set[int]] = {}
    behind: dict[str, str] = {}  # what is done first with a name
    for one in instructions:
        for kind, name in zip(_kinds(one.opname), _names(one.argval), strict=False):
            if one.offset > end:
                behind.setdefault(name, kind)
            elif kind == "STORE" and one.offset >= begin:
                stores.setdefault(name, set()).add(one.offset)
    return frozenset(
        name
        for name, places in stores.items()
        if behind.get(name) == "LOAD" and _can_be_left_out(instructions, begin, end, places)
    )


def _can_be_left_out(instructions: Sequence[dis.Instruction], begin: int, end: int, places: set[int]) -> bool:
    """Whether an iteration can come to its end without these. Loops inside of it are gone through once."""
    following = {one.offset: (one, after) for one, after in itertools.pairwise(instructions)}
    waiting, known = [(begin, False)], set(places)
    while waiting:
        place, comes_back = waiting.pop()
        if place not in following or not begin <= place <= end or (place in known and not comes_back):
            continue
        known.add(place)
        one, after = following[place]
        if one.opname == "FOR_ITER":
            waiting.append((one.argval if comes_back else after.offset, False))
        elif "JUMP" in one.opname and one.argval == begin:
            return True
        else:
            if "JUMP" in one.opname:
                is_inner_loops = one.argval < place and following[one.argval][0].opname == "FOR_ITER"
                waiting.append((one.argval, is_inner_loops))
            if not one.opname.startswith(_GOES_ELSEWHERE):
                waiting.append((after.offset, False))
    return False


@cache
def read_first(code: CodeType, at: tuple[int, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Return what the loop around instructions reads before it writes it, and what of that it writes."""
    instructions = [*dis.get_instructions(code)]
    begin, end = _loop_around(instructions, at)
    read: dict[str, None] = {}
    written: set[str] = set()
    for one in instructions:
        if begin <= one.offset <= end and "AND_CLEAR" not in one.opname:
            for kind, name in zip(_kinds(one.opname), _names(one.argval), strict=False):
                if kind == "STORE":
                    written.add(name)
                elif name not in written:
                    read[name] = None
    return frozenset(read.keys() - _overwritten(code, begin, end)), frozenset(written & read.keys())


def _kinds(operation: str) -> Sequence[str]:
    return _ACCESS.findall(operation)


def _rebound(value: object) -> object:
    """Return what is another once a variable is set to something else."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    return (id(value), _InPlace(value)) if isinstance(value, ARRAYS) else id(value)


def _in_modules(models: Iterable[nn.Module], kept: set[int]) -> dict[str, object]:
    """Return marks of what modules of the script's own classes keep in attributes, but for numbers.

    Of these those that the training changes are named by who looks after the model.
    """
    marks: dict[str, list[object]] = {}
    for module in {id(one): one for model in models for one in model.modules()}.values():
        kind: Any = type(module)
        if not _is_scripts_class(kind) or kind.get_extra_state is not nn.Module.get_extra_state:
            continue
        for name, mark in _inside(kind.__qualname__, module, kept, notes=True).items():
            marks.setdefault(name, []).append(mark)
    return {**marks}


def _in_loaders(loaders: Iterable[DataLoader[Any]], kept: set[int], tells_nothing: bool) -> dict[str, object]:
    """Return marks of what datasets and samplers keep in attributes; several may be of one class."""
    marks: dict[str, list[object]] = {}
    objects = [one for loader in loaders for one in (loader.dataset, *samplers(loader))]
    for one in {id(one): one for one in objects}.values():
        kind = type(one).__qualname__
        is_placed = isinstance(one, IterableDataset) and not tells_nothing  # its place is kept
        attributes = vars(one) if is_placed else {}
        places = {f"{kind}.{name}" for name, part in attributes.items() if type(part) is int}
        for name, mark in _inside(kind, one, kept, notes=True).items():
            if name not in places:
                marks.setdefault(name, []).append(mark)
    return {**marks}


def _shared_in(loaders: Iterable[DataLoader[Any]]) -> dict[str, object]:
    """Return marks of the numbers in datasets that all of a loader's processes share: nobody keeps these."""
    return {
        f"{type(loader.dataset).__qualname__}.{name}": _state_of(part)
        for loader in loaders
        for name, part in getattr(loader.dataset, "__dict__", {}).items()
        if isinstance(part, SynchronizedBase)
    }


class _InPlace:
    """A mark of a tensor or an array that is another once it was written to; another object tells nothing."""

    def __init__(self, value: Any) -> None:
        self._value = weakref.ref(value)
        self._content: object = None
        if isinstance(value, Tensor):
            self._content = None if value.is_inference() else value._version
        elif not value.dtype.hasobject and value.nbytes <= MOST_BYTES:
            self._content = xxhash.xxh3_64_digest(numpy.ascontiguousarray(value).view(numpy.uint8).data)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _InPlace) and self._value() is other._value() is not None
        return not same or self._content == other._content  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def _advanced(iterator: Any) -> object:
    """Return what is another once an iterator has given its next value."""
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return frame and (frame.f_lasti, {name: _rebound(value) for name, value in frame.f_locals.items()})
    return repr(iterator) if isinstance(iterator, itertools.count) else operator.length_hint(iterator)


def _inside(
    name: str,
    value: object,
    kept: set[int],
    attributes: frozenset[str] = frozenset(),
    *,
    notes: bool = False,
) -> dict[str, object]:
    """Return marks of what an object of the script's changes in its place, by names.

    attributes: those that the loop itself reads before it sets them. notes: other tensors in a container may
    be those of the last forward pass, which nobody reads in the next one.
    What has objects inside that are no values (events, files) is not looked at.
    """
    left = MOST_VALUES

    def marks_in(one: Any, depth: int) -> Iterator[tuple[str, object]]:
        kind: Any = type(one)
        carried = _carried_by(one if isinstance(one, type) else kind)
        if isinstance(one, FunctionType):
            carried = _carried_in(one.__code__)
        for key, part in _attributes_of(one).items():
            if isinstance(one, nn.Module) and (key in OF_MODULES or isinstance(part, NUMBERS)):
                continue
            # What a sampler of the script's own changes in a pass is made again by the pass; a dataset's
            # generators are kept, and a dict of its is a cache as a rule.
            if isinstance(one, Dataset):
                of_tensors = isinstance(part, tuple) and any(isinstance(one, ARRAYS) for one in part)
                lasts = isinstance(part, list | deque) or type(part) is int or of_tensors
            elif isinstance(one, Sampler):
                lasts = isinstance(part, CONTAINERS) and not _is_scripts_class(kind)
            else:
                lasts = key in carried or key in attributes or _lasts(part)
            lasts = lasts or isinstance(part, SynchronizedBase)
            if lasts and isinstance(part, ARRAYS):
                yield key, None if id(part) in kept else (id(part), _InPlace(part))
            elif lasts:
                yield key, mark(part, depth)
            elif isinstance(part, ARRAYS) and id(part) not in kept:
                yield key, _InPlace(part)

    def mark(one: Any, depth: int) -> object:
        nonlocal left
        left -= 1
        if left < 0 or depth < 0 or id(one) in kept:
            return None
        if isinstance(one, (*GENERATORS, SynchronizedBase)):
            return _state_of(one)
        if isinstance(one, CONTAINERS):
            parts = [*one.values()] if isinstance(one, dict) else [*one]
            marks = [mark(part, depth - 1) for part in parts[:MOST_VALUES]]
            return _OPAQUE if any(part is _OPAQUE for part in marks) else (len(one), marks)
        if notes and isinstance(one, ARRAYS):
            return _InPlace(one)
        if _is_own(one):
            return [(key, found) for key, found in marks_in(one, depth - 1) if found is not _OPAQUE]
        return _rebound(one) if isinstance(one, VALUES) else _OPAQUE

    found: dict[str, object] = {}
    if isinstance(value, (*CONTAINERS, *ARRAYS, SynchronizedBase)):
        found[name] = mark(value, DEPTH)
    elif _has_attributes(value):
        found = {f"{name}.{key}": one for key, one in marks_in(value, DEPTH)}
    return {key: one for key, one in found.items() if one is not _OPAQUE}


def _has_attributes(value: object) -> bool:
    """Whether attributes of it may be the script's."""
    if isinstance(value, FunctionType):
        return not value.__code__.co_filename.startswith(_LIBRARIES)
    own = _is_scripts_class(value) if isinstance(value, type) else _is_own(value)
    return own or isinstance(value, nn.Module | Sampler | Dataset)


def _attributes_of(value: Any) -> dict[str, Any]:
    found = {**(getattr(value, "__dict__", None) or {}), **dict(slots_of(value))}
    if isinstance(value, type | FunctionType):
        return {name: one for name, one in found.items() if not name.startswith("__")}
    return found


@cache
def _carried_by(kind: type) -> frozenset[str]:
    """Return the attributes that a class's own functions read before they set them, and set."""
    carried: set[str] = set()
    for one in kind.__mro__ if _is_scripts_class(kind) else ():
        for function in vars(one).values() if _is_scripts_class(one) else ():
            if isinstance(function, FunctionType):
                carried |= _carried_in(function.__code__)
    return frozenset(carried)


@cache
def _carried_in(code: CodeType) -> frozenset[str]:
    read: set[str] = set()
    written: set[str] = set()
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_ATTR" and one.argval not in written:
            read.add(one.argval)
        elif one.opname == "STORE_ATTR":
            written.add(one.argval)
    return frozenset(read & written)


def _lasts(value: object) -> bool:
    """Whether an attribute that changes is more than a note of the last iteration's result."""
    return (type(value) is int or isinstance(value, (*CONTAINERS, *GENERATORS)) or _is_own(value)) and not (
        isinstance(value, OTHERS_AFFAIR)
    )


@cache
def _is_scripts_class(kind: Any) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_main = kind.__module__ == "__main__"
    return is_main or (
        file is not None and not file.startswith(_LIBRARIES) and "jitckpt" not in kind.__module__
    )


def _is_own(value: object) -> bool:
    kind: Any = type(value)
    own = (_is_scripts_class(kind) or kind in NAMESPACES) and not isinstance(value, OTHERS_AFFAIR)
    return own and (isinstance(getattr(value, "__dict__", None), dict) or hasattr(kind, "__slots__"))


def _state_of(generator: Any) -> object:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, SynchronizedBase):  # of multiprocessing, which a loader's workers see, too
        return bytes(generator.get_obj())
    state = (
        generator.bit_generator.state
        if isinstance(generator, numpy.random.Generator)
        else generator.get_state()
    )
    return repr(state)


def _kept_by(extra: Any) -> tuple[set[str], set[int]]:
    """Return names of variables that the state_dict of `extra` reads, and the ids of what it has inside."""
    names: set[str] = set()
    ids: set[int] = set()
    waiting: list[tuple[Any, int]] = [(extra, DEPTH + 1)] if extra is not None else []
    method = getattr(type(extra), "state_dict", None)
    function: Any = inspect.unwrap(method) if method is not None else None
    if (code := getattr(function, "__code__", None)) is not None:
        names = {*code.co_names, *code.co_freevars}
        scope = inspect.getclosurevars(function)
        waiting += [(one, DEPTH) for one in (*scope.globals.values(), *scope.nonlocals.values())]
    while waiting:
        one, depth = waiting.pop()
        if depth and id(one) not in ids and not isinstance(one, type):
            ids.add(id(one))
            waiting += [(part, depth - 1) for part in _parts(one)]
    return names, ids


def _parts(one: object) -> Iterator[object]:
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, list | tuple | set | deque) and len(one) < MOST_VALUES:
        yield from one
    yield from _attributes_of(one).values()
