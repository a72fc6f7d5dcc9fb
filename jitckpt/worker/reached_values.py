"""What the script's functions read that a loop calls, or that torch calls for the objects in use."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from jitckpt.state.kept_variables import place_inside
from jitckpt.system import installed
from jitckpt.system.bytecode import instructions as instructions_of
from jitckpt.system.installed import is_scripts_class
from jitckpt.worker.carried_names import overwritten
from jitckpt.worker.frames import is_ours, place_of, variables_of
from jitckpt.worker.holders import defaults_of, path_to
from jitckpt.worker.value_marks import CONSTANTS, DEPTH, attributes_of, carried_in, is_own

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
_LIBRARIES = installed.folders()


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


class _Way(NamedTuple):
    """A name that leads to what is called.

    place: where it lies; "": in no variable. holder: as in Reached.
    """

    name: str
    value: object
    place: str = ""
    holder: str = ""
    depth: int = DEPTH
    kind: type | None = None  # of a method, whose others it may call

    @property
    def called(self) -> str:
        return f"{self.holder}.{self.name}" if self.holder else self.name

    @property
    def inside(self) -> str:
        """The place of what the value holds."""
        return self.place and place_inside(self.place, self.name)


class Reached(NamedTuple):
    """Variables outside of one of the script's functions that it reads, and the names that it sets of them.

    place: where they lie; "": where a restart does not find them. holder: what has them; "": a module.
    """

    values: dict[str, object]
    written: set[str]
    place: str
    holder: str
    carried: frozenset[str] = frozenset()  # attributes of anything that the function reads, and sets then

    def is_of(self, frame: FrameType, name: str) -> bool:
        """Whether a variable is this frame's, or its module's."""
        root, code = name.partition(".")[0], frame.f_code
        if self.place == place_of(frame):
            return root in self.values
        if self.holder or not self.place:
            return root in code.co_cellvars and self.values.get(root) is variables_of(frame).get(root)
        is_local = root in (*code.co_varnames, *code.co_freevars, *code.co_cellvars)
        return self.place == _module_of(frame) and root in self.values and not is_local

    def name(self, name: str, frame: FrameType) -> tuple[str, tuple[str, str] | None]:
        """Return how to call what `_marks_of` calls so, and its place if that is not this frame's."""
        if self.is_of(frame, name):
            return name, None
        root, _, attribute = name.partition(".")
        if root not in self.values:
            return name, of_classes([name], self.values).get(name)
        if not self.place:
            return name, None
        called = self.holder or self.place.partition(":")[0].rpartition(".")[2]
        inside = (place_inside(self.place, root), attribute) if attribute else (self.place, root)
        return (name if self.place == _module_of(frame) else f"{called}.{name}"), inside


def reached_from(frame: FrameType, read: Iterable[str], used: Iterable[object]) -> list[tuple[Reached, bool]]:
    """Return what the functions read that a loop calls, and those that torch calls for objects in use.

    read: the names that the loop reads. With each whether torch calls it.
    """
    scope = variables_of(frame)
    called = [_Way(name, scope[name], place_of(frame, name)) for name in read if name in scope]
    by_torch = [_Way(name, one) for part in used for name, one in _called_by_torch(part)]
    ways = (called, False), (by_torch, True)
    return [(one, notes) for of, notes in ways for one in _of_functions(of, frame.f_code)]


def _module_of(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}:"


def _of_functions(ways: Iterable[_Way], code: CodeType) -> Iterator[Reached]:
    """Yield what the script's functions to which these ways lead read, and those that they call themselves.

    code: that calls them.
    """
    waiting = [*ways]
    loaded = attributes_in(code)
    known: set[int] = set()
    while waiting:
        way = waiting.pop()
        one, kind = way.value, way.kind
        function = one
        if isinstance(one, MethodType):
            yield Reached({way.name: one.__self__}, set(), way.place, way.holder)
            function, kind = one.__func__, type(one.__self__)
        elif is_own(one):
            yield Reached({way.name: one}, set(), way.place, way.holder)
            waiting += _methods(type(one), {"__call__", *loaded}, way.depth)
            waiting += [
                _Way(name, part, way.inside, way.called, way.depth)
                for name, part in attributes_of(one).items()
                if isinstance(part, FunctionType | partial)
            ]
            continue
        elif isinstance(one, partial):
            parts = {str(number): part for number, part in enumerate(one.args)} | one.keywords
            yield Reached(parts, {*one.keywords}, way.inside, way.called)  # which may be set
            inside = way._replace(place=way.inside, holder=way.called)
            parts["func"] = one.func
            waiting += [inside._replace(name=key, value=part) for key, part in parts.items()]
        if not way.depth or id(function) in known or not isinstance(function, FunctionType):
            continue
        known.add(id(function))
        code = function.__code__
        if code.co_filename.startswith((*_LIBRARIES, "<frozen")) or is_ours(function.__module__):
            continue
        variables, held = _variables_of(function, way)
        yield from (variables, held)
        waiting += [
            _Way(name, part, of.place, of.holder, way.depth - 1)
            for of in (variables, held)
            for name, part in of.values.items()
        ]
        if kind is not None:
            waiting += _methods(kind, attributes_in(code), way.depth - 1)


def _variables_of(function: FunctionType, way: _Way) -> tuple[Reached, Reached]:
    """Return what a function reads of its module, and what it holds itself."""
    names, written = _outside(function.__code__)
    outer = {name: function.__globals__[name] for name in names if name in function.__globals__}
    module = f"{function.__globals__.get('__name__', '')}:"
    held = {name: part for name, part in defaults_of(function).items() if not isinstance(part, CONSTANTS)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is there yet
            held[name] = cell.cell_contents
    place, holder = way.inside, way.called
    if (path := path_to(function)) is not None:
        place, holder = place_inside(f"{path[0]}:", path[1]), path[1]
    carried = carried_in(function.__code__)
    return Reached(outer, written, module, "", carried), Reached(held, written, place, holder)


def _methods(kind: type, names: Collection[str], depth: int) -> list[_Way]:
    """Return the methods of a class of the script's that are called so."""
    return [
        _Way(name, one, depth=depth, kind=kind)
        for base in kind.__mro__
        if is_scripts_class(base)
        for name, one in vars(base).items()
        if name in names and isinstance(one, FunctionType)
    ]


def of_classes(names: Iterable[str], scope: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return the places of what classes of these variables' values hold, by the names of `_marks_of`."""
    kinds = {base.__name__: base for value in scope.values() for base in type(value).__mro__ if names}
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        root, _, attribute = name.partition(".")
        if root not in scope and (path := path_to(kinds.get(root))) is not None:
            found[name] = place_inside(f"{path[0]}:", path[1]), attribute
    return found


@cache
def attributes_in(code: CodeType) -> frozenset[str]:
    """Return the attributes that some code reads."""
    found = {one.argval for one in instructions_of(code) if one.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return frozenset(found).union(
        *(attributes_in(one) for one in code.co_consts if isinstance(one, CodeType))
    )


@cache
def attributes_set_in(code: CodeType) -> frozenset[str]:
    """Return the attributes that some code sets, of whatever object."""
    found = {one.argval for one in instructions_of(code) if one.opname == "STORE_ATTR"}
    return frozenset(found).union(
        *(attributes_set_in(one) for one in code.co_consts if isinstance(one, CodeType))
    )


@cache
def _outside(code: CodeType) -> tuple[frozenset[str], set[str]]:
    """Return the global variables that a function reads, and those of others that it sets."""
    loaded: set[str] = set()
    written: set[str] = set()
    for one in instructions_of(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded.add(one.argval)
        elif one.opname in ("STORE_GLOBAL", "STORE_DEREF"):
            written.add(one.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):  # a comprehension's, a lambda's
            loaded |= _outside(inner)[0]
    return frozenset(loaded - overwritten(code, 0, len(code.co_code))), written
