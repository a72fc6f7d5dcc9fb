"""Tensors that are made of others (wrapper subclasses), by torch's own protocol: `__tensor_flatten__`.

What such a tensor shows is no memory: that is its inner tensors', codes and scales, say. A save has these,
under its name and their own (weight.codes), and a tensor of its class is made of them again.
"""

import enum
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import CheckpointError, TreeError

# The one key of what stands for an enum's member, for an object of named fields, and for a class.
MEMBER, FIELDS, CLASS = "*member", "*fields", "*class"
SAVE_FUNCTION = "give jitckpt.init a save function (save_checkpoint=...)."
_PLAIN = (Tensor, nn.Parameter)


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor is made of others, whose values are not what it shows."""
    kind = type(tensor)
    if kind in _PLAIN or not hasattr(kind, "__tensor_flatten__"):
        return False
    # What a collective is to fill that may be under way is no value yet, and to wait is the script's affair.
    return not hasattr(kind, "trigger_wait")


def leaves(tensor: Tensor, name: str) -> dict[str, Tensor]:
    """Return the plain tensors that one is made of, at any depth, under `name` and theirs; or itself."""
    if not is_wrapper(tensor):
        return {name: tensor}
    return {
        called: leaf
        for attribute, inner in _inner(tensor)
        for called, leaf in leaves(inner, f"{name}.{attribute}").items()
    }


def wrappers(tensor: Tensor) -> Iterator[tuple[Tensor, list[str]]]:
    """Yield what is made of others in a tensor, itself first, each with the names of what it is made of."""
    if is_wrapper(tensor):
        inner = _inner(tensor)
        yield tensor, [attribute for attribute, _ in inner]
        for _, one in inner:
            yield from wrappers(one)


def described(tensor: Tensor, name: str) -> Json:
    """Return what a tensor is beside its leaves, as JSON; None of a plain one.

    Raises TreeError, which names it, for what can't be made of its leaves again, or has no dense ones.
    """
    kind = type(tensor)
    if not is_wrapper(tensor):
        _check_leaf(tensor, name)
        return None
    if not hasattr(kind, "__tensor_unflatten__"):
        raise TreeError(f"{name} is a {kind.__name__}, which has no __tensor_unflatten__: {SAVE_FUNCTION}")
    inner, context = _inner(tensor), tensor.__tensor_flatten__()[1]  # type: ignore[attr-defined]
    sizes = [*tensor.shape, *tensor.stride()] if tensor.layout is torch.strided else [None]
    if not all(type(one) is int for one in sizes):
        raise TreeError(f"{name} is a {kind.__name__}, whose sizes are no plain numbers: {SAVE_FUNCTION}")
    return {
        "class": [kind.__module__, kind.__qualname__],
        "inner": {attribute: described(one, f"{name}.{attribute}") for attribute, one in inner},
        "context": _context(context, name, kind),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": str(tensor.dtype),
    }


def why_not(tensor: Tensor, name: str) -> str | None:
    """Return a sentence on why no save can have a tensor, if so."""
    try:
        described(tensor, name)
    except TreeError as error:
        return str(error)
    return None


def names_in(description: Json, name: str) -> list[str]:
    """Return what the leaves of what is described so are called."""
    if description is None:
        return [name]
    parts = description["inner"].items()
    return [called for attribute, one in parts for called in names_in(one, f"{name}.{attribute}")]


def made(description: Json, name: str, found: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor that is described so, of its leaves.

    Raises CheckpointError if one of these, or its class, is not there.
    """
    if description is None:
        if name not in found:
            raise CheckpointError(f"The save lacks {name}, of which a tensor is made.")
        return found[name]
    kind = _class_called(*description["class"])
    inner = {
        attribute: made(one, f"{name}.{attribute}", found) for attribute, one in description["inner"].items()
    }
    context = _untold(tree_codec.decode(description["context"], {}))
    with torch.no_grad():
        tensor: Tensor = kind.__tensor_unflatten__(  # type: ignore[attr-defined]
            inner, context, torch.Size(description["shape"]), tuple(description["stride"])
        )
    return tensor


def put(here: Tensor, description: Json, name: str, found: Mapping[str, Tensor]) -> bool:
    """Put leaves into the memory of a tensor's. Returns False, and does nothing, if it is made otherwise."""
    own = leaves(here, name)
    try:
        is_alike = described(here, name) == description
    except TreeError:
        is_alike = False
    if not is_alike or any(not _are_alike(leaf, found.get(called)) for called, leaf in own.items()):
        return False
    with torch.no_grad():
        for called, leaf in own.items():
            leaf.detach().copy_(found[called])
    return True


def _are_alike(one: Tensor, other: Tensor | None) -> bool:
    if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return one.device == other.device and one.stride() == other.stride()


def _inner(tensor: Tensor) -> list[tuple[str, Tensor]]:
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [(name, getattr(tensor, name)) for name in names]


def _check_leaf(tensor: Tensor, name: str) -> None:
    kind = type(tensor)
    if type(tensor.detach() if kind not in _PLAIN else tensor) not in _PLAIN:
        raise TreeError(
            f"{name} is a {kind.__name__}, a class that does not say what it is made of (it has no "
            f"__tensor_flatten__): {SAVE_FUNCTION}"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise TreeError(
            f"{name} is a tensor without plain dense storage ({tensor.layout}, {tensor.dtype}): "
            f"{SAVE_FUNCTION}"
        )


def _context(context: object, name: str, kind: type) -> Json:
    try:
        encoded = tree_codec.encode(_told(context), name)
    except (TreeError, RecursionError) as error:
        raise TreeError(
            f"{name} is a {kind.__name__}, and what belongs to it beside its inner tensors can't be saved: "
            f"{error} Or {SAVE_FUNCTION}"
        ) from error
    if encoded.tensors:
        raise TreeError(
            f"{name} is a {kind.__name__}, which has tensors that are none of its inner ones: {SAVE_FUNCTION}"
        )
    return encoded.tree


def _told(value: Any) -> Any:
    """Return what stands for a value that tree_codec does not know: members, objects of fields, classes."""
    kind = type(value)
    if isinstance(value, type):
        return {CLASS: [value.__module__, value.__qualname__]}
    if isinstance(value, enum.Enum):
        return {MEMBER: [kind.__module__, kind.__qualname__, value.name]}
    names = [one.name for one in fields(value)] if is_dataclass(value) else getattr(kind, "_fields", None)
    if names is not None:
        own = {name: _told(getattr(value, name)) for name in names}
        return {FIELDS: [kind.__module__, kind.__qualname__, own]}
    if kind in (list, tuple):
        return kind(map(_told, value))
    if kind is dict:
        return {key: _told(one) for key, one in value.items()}
    return value


def _untold(value: Any) -> Any:
    kind = type(value)
    if kind is dict and len(value) == 1:
        ((what, told),) = value.items()
        if what == CLASS:
            return _known(*told)
        if what == MEMBER:
            return _known(*told[:2])[told[2]]
        if what == FIELDS:
            return _of_fields(_known(*told[:2]), {key: _untold(one) for key, one in told[2].items()})
    if kind in (list, tuple):
        return kind(map(_untold, value))
    return {key: _untold(one) for key, one in value.items()} if kind is dict else value


def _of_fields(kind: Any, own: Mapping[str, Any]) -> Any:
    if issubclass(kind, tuple):
        return kind(**own)
    made = object.__new__(kind)  # as it was, and not as its __init__ would make it
    for name, value in own.items():
        object.__setattr__(made, name, value)
    return made


def _known(module: str, name: str) -> Any:
    """Return a class that a loaded module has. Raises CheckpointError if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise CheckpointError(
            f"The save has a tensor that is made with {module}.{name}, which is not there: import that "
            "before job.restore()."
        )
    return found


def _class_called(module: str, name: str) -> type[Tensor]:
    """Return a class of tensors that is loaded; one of a function's is found, too."""
    waiting: list[type[Tensor]] = [Tensor]
    found: dict[type[Tensor], None] = {}
    while waiting:
        one = waiting.pop()
        if (one.__module__, one.__qualname__) == (module, name):
            found[one] = None
        waiting += type.__subclasses__(one)
    if len(found) != 1:
        times = "is not loaded" if not found else f"is there {len(found)} times"
        raise CheckpointError(
            f"The save has a tensor of the class {module}.{name}, which {times}: import that, once, before "
            "job.restore()."
        )
    (kind,) = found
    return kind
