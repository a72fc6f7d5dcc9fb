"""Nested state as JSON and tensors, and back."""

import json
import math
import random
import struct
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from jitckpt.encoding import tree_codec
from jitckpt.errors import TreeError

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float16]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


arrays = hnp.arrays(
    dtype=st.one_of(
        hnp.scalar_dtypes(), hnp.unicode_string_dtypes(max_len=4), hnp.byte_string_dtypes(max_len=4)
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
turned = st.builds(
    lambda array, seed: array.transpose(random.Random(seed).sample(range(array.ndim), array.ndim)),
    arrays,
    st.integers(0, 5),
)
hashables = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**9000), 2**9000),
    st.floats(),
    st.text(),
    st.binary(max_size=20),
    st.complex_numbers(),
    st.sampled_from(
        [torch.float32, torch.int8, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3])]
    ),
    st.tuples(st.integers(), st.text()),
)
numbers = arrays.filter(lambda a: a.size > 0).map(lambda a: a.flat[0])
leaves = st.one_of(hashables, tensors(), arrays, turned, numbers)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(hashables, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
        st.sets(st.integers()),
        st.frozensets(st.text()),
        st.dictionaries(st.text(), st.integers(), max_size=3).map(Counter),
        st.binary().map(bytearray),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:  # noqa: PLR0911
    """Equal in kind and value, bit for bit, NaN too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        equal = torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
        return a.dtype == b.dtype and a.shape == b.shape and equal
    if isinstance(a, numpy.ndarray):
        dense = [axis for axis in range(a.ndim) if a.shape[axis] > 1]
        if a.size and [a.strides[axis] for axis in dense] != [b.strides[axis] for axis in dense]:
            return False
    if isinstance(a, numpy.ndarray | numpy.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y)
            for one, other in zip(a.items(), b.items(), strict=True)
            for x, y in zip(one, other, strict=True)
        )
    if isinstance(a, list | tuple | deque):
        limits = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return limits and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(trees)
def test_whatever_is_written_comes_back_exactly(value: Any) -> None:
    encoded = tree_codec.encode(value, "state")
    text = json.dumps(encoded.tree, allow_nan=False)
    assert same(tree_codec.decode(json.loads(text), encoded.tensors), value)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.text(), inner, max_size=3),
            st.dictionaries(st.sampled_from(sorted(tree_codec._DECODERS)), inner, min_size=1, max_size=1),
            st.fixed_dictionaries({"$array": st.just("t"), "dtype": inner, "shape": inner}),
            st.fixed_dictionaries(
                {"$array": st.just("t"), "dtype": st.just("i1"), "shape": st.just([2, 4]), "order": inner}
            ),
            st.fixed_dictionaries(
                {"$array": st.just("t"), "dtype": st.sampled_from(["<f4", "|O", "i1"]), "shape": inner}
            ),
        ),
        max_leaves=10,
    )
)
def test_a_tree_from_anywhere_is_a_value_or_a_tree_error(tree: Any) -> None:
    with suppress(TreeError):
        tree_codec.decode(tree, {"t": torch.zeros(8, dtype=torch.uint8)})


class Sampler:
    def next(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"sampler": {"fn": random.random}}, "extra.sampler.fn"),
        ({"a": [0, (Sampler(),)]}, "extra.a.1.0"),
        ({3: {"b": Sampler().next}}, "extra.3.b"),
        ([numpy.array([None])], "extra.0"),
        ([torch.zeros(2).to_sparse()], "extra.0"),
        ([torch.zeros(2, device="meta")], "extra.0"),
        ({"key": {Sampler: 1}}, "extra.key"),
    ],
)
def test_what_cant_be_saved_is_named_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(TreeError, match=f"^{path}[ .]"):
        tree_codec.encode(value, "extra")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TreeError, match="contains itself"):
        tree_codec.encode(loop, "extra")


def test_a_subclass_is_not_taken_for_its_base() -> None:
    class Special(dict[str, int]):
        pass

    with pytest.raises(TreeError, match="Special"):
        tree_codec.encode({"a": Special()}, "extra")


def test_a_host_tensor_is_copied() -> None:
    tensor = torch.zeros(3)
    encoded = tree_codec.encode(tensor, "t")
    tensor += 1
    assert tree_codec.decode(encoded.tree, encoded.tensors).tolist() == [0, 0, 0]


def test_names_that_are_spelled_alike_are_kept_apart() -> None:
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    encoded = tree_codec.encode(value, "extra")
    assert len(encoded.tensors) == 2
    assert same(tree_codec.decode(encoded.tree, encoded.tensors), value)


def test_tensor_views_come_back_whole_and_lying_as_they_lay() -> None:
    base = torch.arange(12.0).view(3, 4)
    value = [base.t(), base[1:, ::2], base.to(torch.complex64).conj(), torch.nn.Parameter(base)]
    encoded = tree_codec.encode(value, "extra")
    for before, after in zip(value, tree_codec.decode(encoded.tree, encoded.tensors), strict=True):
        assert torch.equal(before.detach().resolve_conj(), after)
        assert after.stride() == before.stride()
        assert not after.requires_grad
