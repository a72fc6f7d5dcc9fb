import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jitckpt.encoding.staging import BUFFER_BYTES, StagedWriter, Staging


def as_bytes(sizes: list[int]) -> list[Tensor]:
    return [torch.arange(size, dtype=torch.int64).to(torch.uint8) + index for index, size in enumerate(sizes)]


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(3, 20))
def test_every_byte_once_and_in_order(sizes: list[int], staging_bytes: int) -> None:
    tensors, content, shown, pieces = as_bytes(sizes), bytearray(), bytearray(), []

    def sink(piece: memoryview) -> None:
        content.extend(piece)
        assert shown.startswith(content)
        pieces.append(len(piece))

    with StagedWriter(sink, Staging(staging_bytes), shown.extend) as writer:
        for tensor in tensors:
            writer.add(tensor)
    assert shown == content == b"".join(tensor.numpy().tobytes() for tensor in tensors)
    assert all(0 < size <= staging_bytes // 3 for size in pieces)


@pytest.mark.parametrize("size", [1, 2, 1000, BUFFER_BYTES, 5 * BUFFER_BYTES + 3])
def test_the_memory_is_bounded(size: int) -> None:
    buffers = Staging(size).buffers
    assert len(buffers) >= 3
    assert sum(buffer.numel() for buffer in buffers) <= max(3, size)


def test_an_error_of_the_sink_is_raised() -> None:
    def sink(piece: memoryview) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), StagedWriter(sink, Staging(4)) as writer:  # noqa: PT012
        for tensor in as_bytes([10] * 5):
            writer.add(tensor)
    with pytest.raises(OSError, match="No space left"), StagedWriter(sink, Staging(400)) as writer:
        writer.add(as_bytes([10])[0])  # all of it is written on leaving


def test_an_error_of_the_caller_ends_the_thread() -> None:
    with pytest.raises(KeyError), StagedWriter(lambda piece: None, Staging(4)) as writer:
        raise KeyError("tensor")
    assert not writer._thread.is_alive()
