"""Nested Python state as a JSON tree plus named tensors, and back, exactly; without pickle.

JSON's own kinds stand for themselves. Everything else is an object with one key that starts with "$":
{"$tuple": [...]}, {"$float": "7ff8000000000000"}, {"$tensor": "extra.weights"} ... A dict becomes a plain
object if its keys are strings that don't start with "$", else {"$dict": [[key, value], ...]}.
"""

import base64
import json
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from jitckpt.encoding.strides import laid_out, row_by_row
from jitckpt.errors import TreeError

Json = Any
_PLAIN = frozenset({type(None), bool, str})
to_json = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
# The keys that lead to a value, as linked pairs: cheap to extend, spelled out only when needed.
Path = tuple[Any, Any] | str
# What Python, numpy and torch raise when they are given what encode does not write.
_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, SyntaxError, RuntimeError, struct.error)


class Encoded(NamedTuple):
    """A tree and the tensors that it names.

    Tensors on the host are copies; tensors on a device are the given ones (detached), because
    reading them here would wait for the device.
    """

    tree: Json
    tensors: dict[str, Tensor]


def encode(value: object, name: str) -> Encoded:
    """Return `value` as JSON and tensors; `name` begins the tensors' names and the paths in errors.

    Raises TreeError, naming the path, for what is none of: None, bool, int, float, complex, str, bytes,
    bytearray, list, tuple, dict, OrderedDict, Counter, set, frozenset, deque, torch.Size, torch.dtype,
    torch.device, dense torch tensors, numpy arrays and scalars without Python objects in them.
    """
    tensors: dict[str, Tensor] = {}
    try:
        return Encoded(_encode(value, name, tensors), tensors)
    except RecursionError:
        raise TreeError(f"{name} is nested too deeply or contains itself; it can't be saved.") from None


def decode(tree: Json, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Return what `encode` was given; tensors that were on a device go to `device`, where one is given.

    Raises TreeError for anything that `encode` does not write.
    """
    try:
        return _decode(tree, tensors, device)
    except TreeError:
        raise
    except RecursionError:
        raise TreeError("A saved tree is nested too deeply.") from None
    except _MALFORMED as error:
        raise TreeError(f"A saved tree is malformed: {error}.") from error


def spell(path: Path) -> str:
    """Return a path as a dotted name: extra.sampler.3.epoch."""
    parts = []
    while isinstance(path, tuple):
        path, key = path
        parts.append(key if isinstance(key, str) else repr(key))
    return ".".join([path, *reversed(parts)])


def _encode(value: Any, path: Path, tensors: dict[str, Tensor]) -> Json:
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, path, tensors)
    if isinstance(value, numpy.generic):
        return {"$scalar": [_numpy_dtype(value.dtype, path), value.tobytes().hex()]}
    kind = type(value)
    raise TreeError(
        f"{spell(path)} is a {kind.__module__}.{kind.__qualname__}: {value!r:.80}. It can't be saved without "
        "pickle; let state_dict() return numbers, strings, containers, arrays and tensors only."
    )


def _is_plain(value: Any) -> bool:
    """Whether it stands for itself, in JSON as well."""
    kind = type(value)
    return (
        kind in _PLAIN
        or (kind is float and isfinite(value))
        # Python refuses to read decimal integers of more than 4300 digits; hexadecimal ones have no limit.
        or (kind is int and -(1 << 63) <= value < 1 << 64)
    )


def _encode_plain(value: Any, path: Path, tensors: dict[str, Tensor]) -> Json:
    return value


def _encode_int(value: int, path: Path, tensors: dict[str, Tensor]) -> Json:
    return value if _is_plain(value) else {"$int": hex(value)}


def _encode_float(value: float, path: Path, tensors: dict[str, Tensor]) -> Json:
    return value if _is_plain(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_items(value: Any, path: Path, tensors: dict[str, Tensor]) -> list[Json]:
    return [
        item if _is_plain(item) else _encode(item, (path, index), tensors) for index, item in enumerate(value)
    ]


def _encode_pairs(value: Mapping[Any, Any], path: Path, tensors: dict[str, Tensor]) -> list[Json]:
    return [
        [_encode(key, (path, key), tensors), _encode(item, (path, key), tensors)]
        for key, item in value.items()
    ]


def _are_names(keys: Iterable[Any]) -> bool:
    """Whether all are strings that don't start with "$"."""
    if not {*map(type, keys)} <= {str}:
        return False
    return "$" not in "".join(keys) or not any(key.startswith("$") for key in keys)


def _encode_dict(value: dict[Any, Any], path: Path, tensors: dict[str, Tensor]) -> Json:
    if _are_names(value):
        items = value.items()
        return {key: one if _is_plain(one) else _encode(one, (path, key), tensors) for key, one in items}
    return {"$dict": _encode_pairs(value, path, tensors)}


def _encode_tensor(value: Tensor, path: Path, tensors: dict[str, Tensor]) -> Json:
    if value.layout != torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        raise TreeError(
            f"{spell(path)} is a tensor without plain dense storage ({value.layout}, {value.dtype}, "
            f"{value.device}); only dense tensors can be saved."
        )
    name = _free_name(spell(path), tensors)
    value = value.detach()
    how: dict[str, Json] = {"$tensor": name}
    if value.stride() != row_by_row(value.shape):
        how["stride"] = list(value.stride())
    if value.device.type == "cpu":
        tensors[name] = value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return how
    tensors[name] = value
    return how | {"device": value.device.type}


def _encode_array(value: numpy.ndarray[Any, Any], path: Path, tensors: dict[str, Tensor]) -> Json:
    dtype = _numpy_dtype(value.dtype, path)
    name = _free_name(spell(path), tensors)
    data = bytearray(value.tobytes())
    tensors[name] = (
        torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    told = {"$array": name, "dtype": dtype, "shape": list(value.shape)}
    if value.flags.c_contiguous:
        return told
    # From the axis with the largest steps on: how numpy adds up depends on it.
    order = sorted(range(value.ndim), key=lambda axis: -abs(value.strides[axis]))
    return told | {"order": order}


def _free_name(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Return `name`, numbered if another path is spelled the same ("a.b" in one dict, "b" in "a")."""
    free, number = name, 1
    while free in tensors:
        number += 1
        free = f"{name}#{number}"
    return free


def _numpy_dtype(dtype: numpy.dtype[Any], path: Path) -> str:
    if dtype.hasobject or dtype.fields or dtype.subdtype or numpy.dtype(dtype.str) != dtype:
        raise TreeError(f"{spell(path)} is a numpy value of type {dtype}; it can't be saved.")
    return dtype.str


_ENCODERS: dict[type, Callable[[Any, Path, dict[str, Tensor]], Json]] = {
    type(None): _encode_plain,
    bool: _encode_plain,
    str: _encode_plain,
    int: _encode_int,
    float: _encode_float,
    list: _encode_items,
    dict: _encode_dict,
    Tensor: _encode_tensor,
    torch.nn.Parameter: _encode_tensor,
    numpy.ndarray: _encode_array,
    tuple: lambda v, p, t: {"$tuple": _encode_items(v, p, t)},
    set: lambda v, p, t: {"$set": _encode_items(v, p, t)},
    frozenset: lambda v, p, t: {"$frozenset": _encode_items(v, p, t)},
    deque: lambda v, p, t: {"$deque": _encode_items(v, p, t), "maxlen": v.maxlen},
    torch.Size: lambda v, p, t: {"$size": list(v)},
    OrderedDict: lambda v, p, t: {"$ordered": _encode_pairs(v, p, t)},
    Counter: lambda v, p, t: {"$counter": _encode_pairs(v, p, t)},
    bytes: lambda v, p, t: {"$bytes": base64.b64encode(v).decode()},
    bytearray: lambda v, p, t: {"$bytearray": base64.b64encode(v).decode()},
    complex: lambda v, p, t: {"$complex": struct.pack(">dd", v.real, v.imag).hex()},
    torch.dtype: lambda v, p, t: {"$dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v, p, t: {"$device": str(v)},
}


def _decode(tree: Json, tensors: Mapping[str, Tensor], device: torch.device | None) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors, device) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {key: _decode(item, tensors, device) for key, item in tree.items()}
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise TreeError(
            f"A saved tree holds the unknown kind {tag!r:.40}; was it written by a newer jitckpt?"
        )
    return decoder(tree, tree[tag], lambda item: _decode(item, tensors, device), tensors, device)


Decode = Callable[[Json], Any]


def _pairs(value: Json, decode_item: Decode) -> list[tuple[Any, Any]]:
    return [(decode_item(key), decode_item(item)) for key, item in _list(value)]


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TreeError(f"A saved tree holds {value!r:.40} where a list belongs.")
    return value


def _named_tensor(name: Json, tensors: Mapping[str, Tensor]) -> Tensor:
    if not isinstance(name, str) or name not in tensors:
        raise TreeError(f"A saved tree names the tensor {name!r:.80}, which is not there.")
    return tensors[name]


def _decode_tensor(
    tree: Json, name: Json, _item: Decode, tensors: Mapping[str, Tensor], device: torch.device | None
) -> Tensor:
    found = _named_tensor(name, tensors)
    if found.device.type == "meta":  # it is described alone
        return found
    # A copy in any case: what was read from a file is only mapped.
    copy = found.to(device if "device" in tree else None, copy=True)
    return laid_out(copy, _list(tree["stride"])) if "stride" in tree else copy


def _decode_array(
    tree: Json, name: Json, _item: Decode, tensors: Mapping[str, Tensor], _device: torch.device | None
) -> numpy.ndarray[Any, Any]:
    dtype = numpy.dtype(str(tree["dtype"]))
    if dtype.hasobject:
        raise TreeError("A saved array is of Python objects.")
    data = _named_tensor(name, tensors).numpy().tobytes()
    shape = tuple(int(size) for size in _list(tree["shape"]))
    found: numpy.ndarray[Any, Any] = (
        numpy.ndarray(shape, dtype, bytearray(data)) if data else numpy.empty(shape, dtype)
    )
    return _in_order(found, _list(tree["order"])) if "order" in tree else found


def _in_order(value: numpy.ndarray[Any, Any], order: Sequence[Any]) -> numpy.ndarray[Any, Any]:
    """Return an array with its axes in memory in this order."""
    if sorted(order) != [*range(value.ndim)]:
        raise TreeError(f"A saved array of {value.ndim} axes has them in the order {order}.")
    return numpy.ascontiguousarray(value.transpose(order)).transpose(numpy.argsort(order))


def _decode_scalar(value: Json) -> Any:
    dtype_name, data = _list(value)
    dtype = numpy.dtype(str(dtype_name))
    if dtype.hasobject:
        raise TreeError("A saved number is a Python object.")
    return numpy.ndarray((), dtype, bytearray(bytes.fromhex(data)))[()]


def _decode_dtype(value: Json) -> torch.dtype:
    dtype = getattr(torch, str(value), None)
    if not isinstance(dtype, torch.dtype):
        raise TreeError(f"A saved tree names the type {value!r:.40}, which torch does not know.")
    return dtype


_DECODERS: dict[str, Callable[[Json, Json, Decode, Mapping[str, Tensor], torch.device | None], Any]] = {
    "$tensor": _decode_tensor,
    "$array": _decode_array,
    "$int": lambda tree, v, item, *_: int(v, 16),
    "$float": lambda tree, v, item, *_: struct.unpack(">d", bytes.fromhex(v))[0],
    "$complex": lambda tree, v, item, *_: complex(*struct.unpack(">dd", bytes.fromhex(v))),
    "$tuple": lambda tree, v, item, *_: tuple(item(i) for i in _list(v)),
    "$set": lambda tree, v, item, *_: {item(i) for i in _list(v)},
    "$frozenset": lambda tree, v, item, *_: frozenset(item(i) for i in _list(v)),
    "$deque": lambda tree, v, item, *_: deque((item(i) for i in _list(v)), tree["maxlen"]),
    "$size": lambda tree, v, item, *_: torch.Size(_list(v)),
    "$dict": lambda tree, v, item, *_: dict(_pairs(v, item)),
    "$ordered": lambda tree, v, item, *_: OrderedDict(_pairs(v, item)),
    "$counter": lambda tree, v, item, *_: Counter(dict(_pairs(v, item))),
    "$bytes": lambda tree, v, item, *_: base64.b64decode(v, validate=True),
    "$bytearray": lambda tree, v, item, *_: bytearray(base64.b64decode(v, validate=True)),
    "$scalar": lambda tree, v, item, *_: _decode_scalar(v),
    "$dtype": lambda tree, v, item, *_: _decode_dtype(v),
    "$device": lambda tree, v, item, *_: torch.device(str(v)),
}
