"""Tensors as safetensors, written piece by piece."""

import threading
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jitckpt.encoding import staging, tensor_file
from jitckpt.encoding.staging import Staging
from jitckpt.errors import SaveError

ALL_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


def same(a: Tensor, b: Tensor) -> bool:
    a, b = (one.resolve_conj().resolve_neg().contiguous() for one in (a, b))
    bits = [one.flatten().view(torch.uint8) for one in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def written(tensors: dict[str, Tensor], buffers: Staging | None = None) -> bytes:
    content = bytearray()
    tensor_file.write(content.extend, tensors, buffers)
    return bytes(content)


def check_both_ways(tensors: dict[str, Tensor], folder: Path) -> None:
    content = written(tensors)
    assert written(tensors, Staging(1 << 20)) == content
    (folder / "t.safetensors").write_bytes(content)
    for found in (tensor_file.read(content), tensor_file.read(folder / "t.safetensors")):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert same(found[name], tensor), name


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_type_and_shape_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    def filled(*shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        raw = tensor.reshape(-1).view(torch.uint8)
        raw.copy_(torch.arange(raw.numel(), dtype=torch.int64) % (2 if dtype == torch.bool else 251))
        return tensor

    check_both_ways(
        {"scalar": filled(), "empty": filled(0, 3), "none": filled(2, 0), "matrix": filled(3, 4)}, tmp_path
    )


def test_strides_shared_storage_and_lazy_bits_come_back(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    complex_base = torch.complex(base, base + 1)
    check_both_ways(
        {
            "base": base,
            "transposed": base.t(),
            "slice": base[1::2, ::3],
            "expanded": base[0].expand(5, 6),
            "tied": base,
            "conjugate": complex_base.conj()[:, ::2],
            "negative": complex_base.conj().imag[1:],
            "overlapping": base.as_strided((3, 3), (1, 1), 2),
        },
        tmp_path,
    )


def test_the_file_is_what_safetensors_itself_reads(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3, dtype=torch.int8), "a": torch.randn(2, 2, dtype=torch.float64)}
    (tmp_path / "t.safetensors").write_bytes(written(tensors))
    found = safetensors.torch.load_file(tmp_path / "t.safetensors")
    assert all(same(found[name], tensor) for name, tensor in tensors.items())


def test_no_tensors_at_all(tmp_path: Path) -> None:
    check_both_ways({}, tmp_path)


def test_a_large_tensor_is_written_in_the_order_of_its_bytes(tmp_path: Path) -> None:
    large = torch.arange(staging.BUFFER_BYTES // 4 + 1001, dtype=torch.int64)
    check_both_ways({"large": large, "small": torch.ones(1)}, tmp_path)


def test_what_lies_on_the_host_is_written_as_it_lies_there() -> None:
    """As in each optimizer step, where a thread and a copy would cost more than all the rest."""
    weight = torch.arange(8.0)
    pieces: list[tuple[int, int]] = []

    def sink(piece: bytes | memoryview) -> None:
        address = torch.frombuffer(piece, dtype=torch.uint8).data_ptr() if len(piece) == 32 else 0
        pieces.append((threading.get_ident(), address))

    tensor_file.write(sink, {"weight": weight})
    assert pieces[-1] == (threading.get_ident(), weight.data_ptr())


def test_a_host_copy_has_the_same_elements() -> None:
    base = torch.randn(4, 5, dtype=torch.complex64)
    for tensor in (base, base.t(), base.conj()[1:], base[:0], base[2, 3]):
        copy = tensor_file.to_host(tensor)
        assert same(copy, tensor)
        assert copy.is_contiguous()
        assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


GOOD = written({"a": torch.arange(4), "b": torch.ones(3, dtype=torch.complex128)})


@given(
    st.one_of(
        st.binary(max_size=300),
        st.tuples(st.integers(0, len(GOOD) - 1), st.binary(max_size=4)).map(
            lambda change: GOOD[: change[0]] + change[1] + GOOD[change[0] + len(change[1]) :]
        ),
    )
)
def test_damaged_bytes_are_tensors_or_a_save_error(content: bytes) -> None:
    with suppress(SaveError):
        assert all(isinstance(tensor, Tensor) for tensor in tensor_file.read(content).values())


def test_a_cut_or_missing_file_is_a_save_error(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(SaveError, match=r"t\.safetensors can't be read"):
        tensor_file.read(path)
    path.write_bytes(GOOD[:-1])
    with pytest.raises(SaveError, match=r"t\.safetensors can't be read"):
        tensor_file.read(path)
