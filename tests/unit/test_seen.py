"""Whether objects are as they were when they were looked at."""

import ctypes
import gc
import mmap
import os
import struct
import threading
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from jitckpt._seen import (
    Seen,
    all_same,
    call_if_none,
    call_native,
    gone_on,
    gradients,
    numbers,
    plain_copy,
    same_settings,
    settings_of,
    versions,
    write_sealed,
)
from jitckpt.ring.format import BLOB_HEADER, seal
from jitckpt.state import tensors_seen


class Thing:
    """What is looked at, in each way there is."""

    def __init__(self) -> None:
        self.attribute = object()
        self.entries: dict[Any, Any] = {"there": object(), "none": None}
        self.list = [1, 2]
        self.others = [object(), object()]
        self.tensor = torch.arange(6.0).view(2, 3)
        self.memory = ctypes.create_string_buffer(b"0123456789")

    def look(self) -> Seen:
        seen = Seen()
        seen.attribute(self, "attribute")
        for key in ("there", "none", "missing"):
            seen.entry(self.entries, key)
        seen.values(self.entries)
        seen.size(self.list)
        seen.elements(self.others)
        seen.place(self.tensor)
        seen.memory(ctypes.addressof(self.memory) + 2, 5)
        return seen


def set_memory(thing: Thing, index: int) -> None:
    thing.memory[index] = b"x"


def reorder(thing: Thing) -> None:
    thing.entries["there"] = thing.entries.pop("there")


CHANGES: dict[str, Callable[[Thing], object]] = {
    "another attribute": lambda thing: setattr(thing, "attribute", object()),
    "another entry": lambda thing: thing.entries.update(there=object()),
    "no entry": lambda thing: thing.entries.pop("none"),
    "one more entry": lambda thing: thing.entries.update(more=1),
    "an entry that was missing": lambda thing: (thing.entries.pop("none"), thing.entries.update(missing=1)),
    "another order": reorder,
    "another element": lambda thing: thing.others.__setitem__(1, object()),
    "elements in another order": lambda thing: thing.others.reverse(),
    "one element less": lambda thing: thing.others.pop(),
    "one more in the list": lambda thing: thing.list.append(3),
    "the tensor elsewhere": lambda thing: setattr(thing.tensor, "data", thing.tensor.clone()),
    "the tensor's shape": lambda thing: thing.tensor.resize_(3, 2),
    "the tensor's strides": lambda thing: thing.tensor.t_(),
    "the tensor's beginning": lambda thing: setattr(thing.tensor, "data", thing.tensor[1:]),
    "the first byte": lambda thing: set_memory(thing, 2),
    "the last byte": lambda thing: set_memory(thing, 6),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    thing = Thing()
    seen = thing.look()
    assert seen.is_same()
    CHANGES[name](thing)
    assert not seen.is_same()
    assert thing.look().is_same()


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_after_all_was_seen_to_be_the_same(name: str) -> None:
    thing = Thing()
    seen, before = thing.look(), {**thing.entries}
    assert seen.is_same()  # from here on dicts that nobody touches are not gone through again
    assert seen.is_same()
    CHANGES[name](thing)
    assert not seen.is_same()
    assert not seen.is_same()
    thing.entries.clear()
    thing.entries.update(before)
    again = Seen()
    again.values(thing.entries)
    assert again.is_same()


class WithAttributes:
    """Its attributes are written in all ways that Python has."""

    def __init__(self) -> None:
        self.number, self.text = 0, "a"

    def write(self, number: int) -> None:
        self.number = number


WRITES: dict[str, Callable[[WithAttributes], object]] = {
    "in a method": lambda one: one.write(1),
    "by setattr": lambda one: setattr(one, "number", 1),
    "by object's own": lambda one: object.__setattr__(one, "number", 1),
    "deleted": lambda one: delattr(one, "number"),
    "in the dict": lambda one: vars(one).__setitem__("number", 1),
    "by update": lambda one: vars(one).update(number=1),
    "by |=": lambda one: vars(one).__ior__({"number": 1}),
    "popped": lambda one: vars(one).pop("number"),
    "popped as the last": lambda one: [vars(one).popitem() for _ in range(2)],
    "cleared": lambda one: vars(one).clear(),
    "one more": lambda one: setattr(one, "more", 1),
    "one more by setdefault": lambda one: vars(one).setdefault("more", 1),
    "another dict": lambda one: setattr(one, "__dict__", {"number": 1}),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_seen_in_whatever_way_it_is_made(name: str) -> None:
    for _ in range(100):  # Python has its own ways for what is done often
        one = WithAttributes()
        seen, values = Seen(), vars(one)
        seen.size(values)
        seen.entry(values, "number")
        assert seen.is_same()
        one.write(0)
        assert seen.is_same()  # it was written, and is the same
        WRITES[name](one)
        assert seen.is_same() == (vars(one) is not values)
        if vars(one) is values:
            one.__dict__.clear()
            one.__dict__.update(number=0, text="a")
            assert seen.is_same()  # again


def test_two_looks_at_one_dict_are_both_kept() -> None:
    entries, first, second = {"a": 1}, object(), object()
    seen = Seen()
    for value in (first, second):
        entries["a"] = value  # type: ignore[assignment]
        seen.values(entries)
    assert not seen.is_same()
    seen = Seen()
    for value in (first, second):
        entries["a"] = value  # type: ignore[assignment]
        seen.entry(entries, "a")
        assert seen.is_same() == (value is first)
    seen = Seen()
    seen.size(entries)
    assert seen.is_same()
    seen.entry(entries, "b")
    entries["b"] = 1
    del entries["a"]
    assert not seen.is_same()


def test_of_several_all_have_to_be_the_same() -> None:
    things = [Thing(), Thing()]
    several = tuple(thing.look() for thing in things)
    assert all_same(())
    assert all_same(several)
    reorder(things[1])
    assert not all_same(several)
    assert all_same(several[:1])
    with pytest.raises(TypeError, match="tuple"):
        all_same([*several])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="of Seen"):
        all_same((several[0], 3))  # type: ignore[arg-type]


def test_one_that_was_ended_is_never_the_same_again() -> None:
    seen = Seen()
    assert seen.is_same()
    seen.end()
    assert not seen.is_same()
    assert not all_same((seen,))


def test_what_was_not_looked_at_may_change() -> None:
    thing = Thing()
    seen = thing.look()
    thing.tensor += 1
    thing.list[0] = 7
    set_memory(thing, 1)
    set_memory(thing, 7)
    assert seen.is_same()


def test_each_value_counts_whether_its_keys_have_names_or_not() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    state: dict[Any, Any] = {parameter: {} for parameter in parameters}
    seen = Seen()
    seen.values(state)
    assert seen.is_same()
    state[parameters[1]] = {}
    assert not seen.is_same()


def test_an_error_while_looking_is_not_taken_for_an_answer() -> None:
    class Broken:
        fails = False

        @property
        def attribute(self) -> int:
            if self.fails:
                raise OSError("broken")
            return 1

    broken = Broken()
    seen = Seen()
    seen.attribute(broken, "attribute")
    broken.fails = True
    with pytest.raises(OSError, match="broken"):
        seen.is_same()
    with pytest.raises(AttributeError):
        seen.attribute(broken, "no such")
    with pytest.raises(RuntimeError, match="storage"):
        seen.place(torch.zeros(3).to_sparse())
    with pytest.raises(AttributeError, match="dlpack"):
        seen.place(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a dict"):
        seen.values([])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        seen.size(3)  # type: ignore[arg-type]


def test_it_keeps_what_it_looked_at_and_lets_all_of_it_go() -> None:
    thing = Thing()
    seen = thing.look()
    tensor = weakref.ref(thing.tensor)
    del thing
    assert tensor() is not None
    assert seen.is_same()
    ring: dict[str, Any] = {"seen": seen}
    seen.entry(ring, "seen")
    del seen, ring
    gc.collect()
    assert tensor() is None


def with_gradient(gradient: torch.Tensor | None) -> torch.Tensor:
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = gradient
    return parameter


def test_gradients_are_those_on_a_gpu_alone() -> None:  # tests/softgpu has those
    on_host = [with_gradient(torch.ones(3)), with_gradient(None)]
    assert gradients(on_host, torch.Tensor) == gradients([], torch.Tensor) == b""
    with pytest.raises(TypeError, match=r"gradients\(\) takes a list"):
        gradients((*on_host,), torch.Tensor)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="grad"):
        gradients([*on_host, None], torch.Tensor)  # type: ignore[list-item]


def test_gradients_of_another_kind_are_not_told() -> None:
    for other in (torch.nn.Parameter(torch.ones(3)), torch.ones(3).to_sparse()):
        assert gradients([with_gradient(torch.ones(3)), with_gradient(other)], torch.Tensor) is None


def test_versions_count_what_torch_writes() -> None:
    one, other = torch.nn.Parameter(torch.ones(3)), torch.ones(2)
    before = versions([one, other])
    with torch.no_grad():
        one.add_(1)
    after = versions([one, other])
    assert [*struct.iter_unpack("=QQ", before)] == [(0, one.data_ptr()), (0, other.data_ptr())]
    assert [*struct.iter_unpack("=QQ", after)] == [(1, one.data_ptr()), (0, other.data_ptr())]
    one.data = other
    assert struct.unpack("=QQ", versions([one])) == (1, other.data_ptr())
    with pytest.raises(AttributeError, match="_version"):
        versions([1])  # type: ignore[list-item]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers().filter(lambda number: number > 1), inner)
    ),
)


@given(PLAIN)
def test_a_plain_value_is_copied_at_all_depths(value: Any) -> None:
    copy = plain_copy({"value": value})
    assert repr(copy) == repr({"value": value})
    kept = repr(value)
    spoil(copy["value"])
    assert repr(value) == kept


def spoil(value: Any) -> None:
    """Change all that can be changed in it."""
    if isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            spoil(one)
    if isinstance(value, list):
        value.append("spoiled")
    elif isinstance(value, dict):
        value["spoiled"] = True


class Text(str):
    """Not plain: it may carry anything."""


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1), Counter("a"), {1.5: 2}, {None: 1}, Text("x"), [{"deep": ({2},)}], b"x", 1j],
    ids=str,
)
def test_nothing_else_is_copied(value: object) -> None:
    assert plain_copy(value) is plain_copy([value]) is plain_copy({"value": (value,)}) is None


SETTINGS = st.dictionaries(
    st.sampled_from(["lr", "betas", "fused"]),
    st.recursive(
        st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, 0.5, "x", Text("x")]) | st.just([1]),
        lambda inner: st.lists(inner, max_size=2).map(tuple),
        max_leaves=3,
    ),
)


def are_same(before: object, after: object) -> bool:
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple) and isinstance(after, tuple):
        return len(before) == len(after) and all(map(are_same, before, after))
    return type(before) in {type(None), bool, int, float, str} and before == after


@given(SETTINGS, SETTINGS, st.sampled_from([frozenset[str](), frozenset({"lr", "momentum"})]))
def test_settings_are_the_same_where_nobody_can_have_changed_one(
    before: dict[str, Any], other: dict[str, Any], besides: frozenset[str]
) -> None:
    for after in (other, {**before}, {**before, **other}):
        values = [(before[key], after[key]) for key in before if key in after and key not in besides]
        same = before.keys() == after.keys() and all(are_same(*pair) for pair in values)
        assert same_settings([[before]], [[after]], besides) == same
        assert same_settings([[{}], [{}, before]], [[{}], [{}, after]], besides) == same
    assert not same_settings([[before]], [[before], []], besides)
    assert not same_settings([[before]], [[before, before]], besides)
    assert not same_settings([[before], []], [[], [before]], besides)


def test_of_tensors_nobody_can_tell() -> None:
    rate = torch.tensor(0.1)
    assert not same_settings([[{"lr": rate}]], [[{"lr": rate}]], frozenset())
    assert same_settings([[{"lr": rate}]], [[{"lr": torch.ones(2)}]], frozenset({"lr"}))


def test_what_groups_say_beside_their_parameters_is_copied() -> None:
    weight, rate = nn.Parameter(torch.ones(2)), torch.tensor(0.1)
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [], "lr": rate, "own": [1]}]
    optimizer = torch.optim.AdamW(groups)
    settings = settings_of(optimizer.param_groups)
    assert settings is not None
    expected = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "parameters": len(group["params"]),
        }
        for group in optimizer.param_groups
    ]
    assert settings == expected
    assert [[*one] for one in settings] == [[*one] for one in expected]  # in the same order
    assert settings[1]["lr"] is rate
    optimizer.param_groups[0]["lr"] = 5.0
    assert settings[0]["lr"] == 1e-3
    assert len(optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    "groups", [({"params": []},), [[]], [{"lr": 1}], [{"params": []}, {"params": ()}], [Text("x")]]
)
def test_of_groups_of_another_kind_nothing_is_said(groups: Any) -> None:
    assert settings_of(groups) is None


def test_tells_what_has_gone_on_while_all_else_is_the_same() -> None:
    thing, drawn = Thing(), {"random": b"1", "loop": b"2"}
    seen = thing.look()
    going_on = tuple((name, partial(drawn.__getitem__, name)) for name in drawn)
    known = {**drawn, "other": b"3"}
    assert gone_on((seen,), going_on, known) == []
    drawn["loop"] = b"4"
    assert gone_on((seen,), going_on, known) == [("loop", b"4")]
    assert gone_on((), (("new", lambda: b"5"),), known) == [("new", b"5")]
    thing.attribute = object()
    assert gone_on((seen,), going_on, known) is None


def test_what_fails_as_it_is_asked_how_far_it_has_come_is_told() -> None:
    def broken() -> bytes:
        raise LookupError("no generator")

    with pytest.raises(LookupError, match="no generator"):
        gone_on((), (("random", broken),), {})
    with pytest.raises(TypeError, match="Seen"):
        gone_on((Thing(),), (), {})  # type: ignore[arg-type]


def test_calls_a_c_function_with_numbers() -> None:
    library = ctypes.CDLL(None)

    def address(name: str) -> int:
        found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert found
        return found

    assert call_native(address("abs"), 2**64 - 5) == 5  # numbers have 64 bits, and this function takes 32
    text, other = ctypes.create_string_buffer(b"same"), ctypes.create_string_buffer(b"sama")
    places = ctypes.addressof(text), ctypes.addressof(other)
    assert call_native(address("memcmp"), *places, 3) == 0
    assert call_native(address("memcmp"), *places, 4) > 0
    printed = ctypes.create_string_buffer(64)
    assert call_native(address("getpid")) == os.getpid()
    call_native(address("snprintf"), ctypes.addressof(printed), 64, places[0])
    assert printed.value == b"same"


def test_other_threads_run_while_a_c_function_is_called() -> None:
    begun, counted = threading.Event(), []
    library = ctypes.CDLL(None)
    usleep = ctypes.cast(library.usleep, ctypes.c_void_p).value
    assert usleep

    def count() -> None:
        begun.wait()
        counted.append(time.monotonic())

    thread = threading.Thread(target=count)
    thread.start()
    begun.set()
    call_native(usleep, 500_000)
    ended = time.monotonic()
    thread.join()
    assert counted[0] < ended


@pytest.mark.parametrize("numbers", [(), (0, *range(7))])
def test_takes_no_more_numbers_than_it_can_give(numbers: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match="six"):
        call_native(*numbers)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_numbers_that_have_no_64_bits_are_refused(number: int) -> None:
    with pytest.raises((OverflowError, TypeError)):
        call_native(1, number)


def test_a_value_without_end_is_an_error() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        plain_copy(endless)


@pytest.mark.parametrize(("dtype", "code"), [(torch.float32, "f"), (torch.float64, "d"), (torch.int64, "q")])
def test_numbers_are_the_tensors_values(dtype: torch.dtype, code: str) -> None:
    tensors = [*torch.tensor([1, -5, 1 << 20], dtype=dtype), torch.nn.Parameter(torch.tensor(0.0)).to(dtype)]
    assert array(code, numbers(tensors)).tolist() == [1, -5, 1 << 20, 0]
    assert numbers([]) == b""


def test_what_is_no_number_on_the_host_is_refused() -> None:
    for wrong in (torch.zeros(1), torch.zeros(0)):
        with pytest.raises(ValueError, match="one number, on the host"):
            numbers([torch.tensor(1.0), wrong])
    with pytest.raises(TypeError, match="list of tensors"):
        numbers(torch.zeros(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [0, 2])
def test_a_number_whose_storage_was_freed_is_refused(place: int) -> None:
    freed = torch.arange(4.0)[place]
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="have memory"):
        numbers([freed])
    with pytest.raises(ValueError, match="have memory"):
        tensors_seen.numbers((freed,))


NUMBER = st.integers(0, 2**64 - 1)


@given(st.binary(max_size=3000), NUMBER, NUMBER, st.integers(0, 50))
def test_what_is_written_is_sealed_as_in_python(content: bytes, sequence: int, step: int, start: int) -> None:
    blob, expected = (bytearray(b"?" * BLOB_HEADER.size + content) for _ in range(2))
    size = start + len(blob) + 5
    with mmap.mmap(-1, size) as memory:
        write_sealed(memory, start, blob, sequence, step)
        seal(expected, sequence, step)
        assert blob == expected
        assert memory[:] == bytes(start) + expected + bytes(5)


@pytest.mark.parametrize(("start", "size"), [(-1, 50), (51, 50), (0, 101), (0, 39)])
def test_nothing_is_written_outside_of_a_ring_or_without_a_head(start: int, size: int) -> None:
    blob = bytearray(b"?" * size)
    with mmap.mmap(-1, 100) as memory:
        with pytest.raises(ValueError, match="have no place"):
            write_sealed(memory, start, blob, 1, 1)
        assert memory[:] == bytes(100)
    assert blob == b"?" * size


def test_one_of_two_functions_is_called_by_what_a_third_one_answers() -> None:
    def fail(*_: object) -> None:
        raise LookupError

    assert call_if_none(lambda: None, dict, fail, [(1, 2)], name=3) == {1: 2, "name": 3}
    assert call_if_none(lambda: False, fail, dict, [(1, 2)], name=3) == {1: 2, "name": 3}
    assert call_if_none(lambda: None, dict, fail) == {}
    with pytest.raises(LookupError):
        call_if_none(lambda: None, fail, dict, 1)
    with pytest.raises(LookupError):
        call_if_none(fail, dict, dict)
    with pytest.raises(TypeError, match="three functions"):
        call_if_none(lambda: None, dict)  # type: ignore[call-arg]
