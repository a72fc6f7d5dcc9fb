"""How tensors lie in memory, and come to lie so again."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.encoding.strides import laid_out, others_than_rows, row_by_row

SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(SHAPES, st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_tensor_comes_to_lie_as_it_lay(shape: list[int], random: Random, gap: int) -> None:
    order = [*range(len(shape))]
    random.shuffle(order)
    stored = torch.arange(float(torch.Size(shape).numel() * gap)).view(
        *[shape[place] for place in order], gap
    )
    tensor = stored[..., 0].permute([order.index(place) for place in range(len(shape))])
    assert list(tensor.shape) == shape
    rows = tensor.contiguous()
    assert rows.stride() == row_by_row(shape) or tensor.is_contiguous()
    again = laid_out(rows, tensor.stride())
    assert again.stride() == tensor.stride()
    assert torch.equal(again, tensor)


def test_only_those_that_lie_otherwise_are_named() -> None:
    rows, last = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert others_than_rows({"rows": rows, "last": last}) == {"last": [48, 1, 12, 3]}


def test_strides_of_a_dimension_of_one_are_kept_too() -> None:
    """They say which memory format it is in, although the elements lie the same."""
    last = torch.zeros(8, 1, 3, 3).to(memory_format=torch.channels_last)
    assert last.is_contiguous()
    stride = others_than_rows({"last": last})["last"]
    assert laid_out(torch.ones(8, 1, 3, 3), stride).stride() == last.stride()


def test_an_expanded_tensor_comes_back_row_by_row() -> None:
    expanded = torch.ones(3, 1).expand(3, 4)
    assert laid_out(expanded.contiguous(), expanded.stride()).stride() == (4, 1)


@pytest.mark.parametrize("stride", [[1], [1, -1], [1, 1.5], ["a", 1], [1, 1, 1]])
def test_what_are_no_strides_is_refused(stride: list[int]) -> None:
    with pytest.raises(ValueError, match="can't have the strides"):
        laid_out(torch.zeros(2, 2), stride)
