"""Tensors as a safetensors file, written one after another through a few host buffers (staging.py).

Types that safetensors does not know are written as bytes (U8, one more dimension) and named in the file's
own metadata.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from jitckpt.encoding.staging import BUFFER_BYTES, DEFAULT_BYTES, StagedWriter, Staging
from jitckpt.encoding.tree_codec import to_json
from jitckpt.errors import SaveError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def write(
    sink: Callable[[bytes | memoryview], object],
    tensors: Mapping[str, Tensor],
    staging: Staging | None = None,
    show: Callable[[bytes | memoryview], object] = lambda piece: None,
) -> None:
    """Write `tensors` in safetensors format to `sink`, which takes one piece of bytes after another.

    The pieces are not to be kept: their memory is used again. `sink` may be called on another thread.
    Tensors may lie on a device, have any strides and share storage (each is written whole). Of a device
    tensor only copies to host memory are made: no memory is allocated on the device and no kernel runs
    there, so that a device behind a hung collective can be read, and stays as it was.
    staging: the buffers to use; else pageable ones are made, no larger than needed, if any tensor is on a
    device.
    show: is given every piece as well, before `sink`, on this thread, while `sink` has others.
    """
    order, head, size = head_of(tensors)
    show(head)
    sink(head)
    if staging is None and all(tensor.device.type == "cpu" for tensor in tensors.values()):
        for name in order:
            content = bytes_of(tensors[name])
            for begin in range(0, len(content), BUFFER_BYTES):
                show(content[begin : begin + BUFFER_BYTES])
                sink(content[begin : begin + BUFFER_BYTES])
        return
    with StagedWriter(sink, staging or Staging(min(size, DEFAULT_BYTES)), show) as writer:
        for name in order:
            if tensors[name].numel():
                writer.add(_as_bytes(tensors[name].detach()))


def head_of(tensors: Mapping[str, Tensor]) -> tuple[list[str], bytes, int]:
    """Return the names in the order in which `write` writes, what it writes before them, and their bytes."""
    # Wide types first, so that every tensor is aligned to its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {}
    foreign: dict[str, str] = {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        shape = list(tensor.shape)
        if tensor.dtype not in _NAMES:
            foreign[name] = str(tensor.dtype).removeprefix("torch.")
            shape.append(tensor.element_size())
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES.get(tensor.dtype, "U8"),
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    if foreign:
        header["__metadata__"] = foreign
    text = to_json(header).encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text, offset


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor on the host, as `write` writes them."""
    return _as_bytes(tensor.detach()).numpy().data


def read(data: Path | bytes) -> dict[str, Tensor]:
    """Return all tensors of a file (mapped, not read) or of bytes, on the host.

    Raises SaveError if it is not a whole safetensors file.
    """
    try:
        if isinstance(data, bytes):
            return _read_bytes(data)
        with safetensors.safe_open(data, framework="pt", device="cpu") as file:
            foreign = file.metadata() or {}
            return {name: _retyped(file.get_tensor(name), foreign.get(name)) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, LookupError) as error:
        where = "bytes in memory" if isinstance(data, bytes) else str(data)
        raise SaveError(f"{where} can't be read as safetensors: {error}.") from error


def to_host(tensor: Tensor) -> Tensor:
    """Return a contiguous host copy of `tensor`, made as `write` makes it."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return _strided_to_host(tensor)
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    result.copy_(tensor)
    return result


def _read_bytes(data: bytes) -> dict[str, Tensor]:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]) if 0 < length <= len(data) - 8 else None
    if not isinstance(header, dict):
        raise SaveError("Bytes in memory are no safetensors: the header is damaged.")
    foreign = header.get("__metadata__", {})
    entries = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    types = {name: dtype for dtype, name in _NAMES.items()}
    result = {}
    for name, entry in entries:
        raw = _as_tensor(entry["data"])
        result[name] = _retyped(raw.view(types[entry["dtype"]]).view(entry["shape"]), foreign.get(name))
    return result


def _as_tensor(data: bytearray) -> Tensor:
    return (
        torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _retyped(tensor: Tensor, name: str | None) -> Tensor:
    if name is None:
        return tensor
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or tensor.dtype != torch.uint8:
        raise SaveError(f"A saved tensor is of the type {name!r:.40}, which torch does not know.")
    return tensor.flatten().view(dtype).view(tensor.shape[:-1])


def _strided_to_host(tensor: Tensor) -> Tensor:
    """Copy the span of storage that `tensor` covers and take its elements apart on the host."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    flat = torch.empty(span, dtype=tensor.dtype, device="cpu")
    flat.copy_(_storage_span(tensor, span))
    view = flat.as_strided(tensor.shape, tensor.stride())
    if tensor.is_conj():
        view = view.conj()
    if tensor.is_neg():
        view = torch._neg_view(view)
    return view.resolve_conj().resolve_neg().contiguous()


def _storage_span(tensor: Tensor, span: int) -> Tensor:
    """Return the stored elements from the tensor's first on, without its conjugate or negative bit."""
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a flat view of bytes, or of a host copy where the tensor is not contiguous."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = _strided_to_host(tensor)
    return tensor.reshape(-1).view(torch.uint8)
