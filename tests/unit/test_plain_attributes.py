"""What modules and the script's own objects keep in plain attributes comes back."""

import enum
import gc
import io
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from jitckpt.encoding import packed, tree_codec
from jitckpt.state import plain_attributes, plain_values
from jitckpt.state.host_state import HostState
from jitckpt.state.model_state import ModelState
from jitckpt.state.module_attributes import owners_of
from jitckpt.state.plain_attributes import PlainAttributes, what_tells
from jitckpt.state.plain_values import NEW


class Phase(enum.Enum):
    WARM_UP = 1
    TRAIN = 2


@dataclass(frozen=True)
class Stage:
    name: str


class Meter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.sum += value
        self.count += 1


class Slotted:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2)
        self.calls = 0
        self.best: float | None = None
        self.losses: list[Any] = []
        self.history: deque[int] = deque(maxlen=3)
        self.meter = Meter()
        self.meters = {"a": Meter(), "b": Meter()}
        self.slotted = Slotted()
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.metrics: dict[str, Any] = {"train": defaultdict(list)}  # as trl's Trainers have it
        self.phase = Phase.WARM_UP
        self.hidden = torch.zeros(2)
        self.table = numpy.zeros(3)
        self.width = (3, 2)
        self.config = SimpleNamespace(rate=0.1)
        self.shared = self.config
        self.stage = Stage("first")
        self.callback = print

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(self.drop(self.linear(inputs)))  # type: ignore[no-any-return]

    def go(self, number: int) -> None:
        """As a minibatch would."""
        self.calls += 1
        self.best = 0.5 * number
        self.losses.append(torch.tensor(float(number)))
        self.history.append(number)
        self.meter.add(number)
        self.meters["b"].add(2 * number)
        self.slotted.seen += 1
        self.counts[f"{number}"] += 1
        self.metrics["train"]["loss"].append(number / 2)
        self.phase = Phase.TRAIN
        self.hidden += number
        self.table[0] += number
        self.config.rate *= 0.5
        self.later = ("set", number)
        self.drop.p = 0.1 * number
        self.norm.eval()


def attributes_of(model: nn.Module) -> PlainAttributes:
    return PlainAttributes(owners_of(model))


def carried(one: PlainAttributes) -> Any:
    """As it is after a save and a restart."""
    return packed.unpack(packed.pack(tree_codec.encode(one.changed(), "attributes")))


def told(model: Net) -> Any:
    values = vars(model) | {"p": model.drop.p, "mode": model.norm.training}
    return {
        name: repr([value.sum, value.count] if isinstance(value, Meter) else value)
        for name, value in values.items()
        if name[0] != "_" and name not in ("slotted", "meters", "callback")
    } | {"slotted": model.slotted.seen, "meters": [vars(one) for one in model.meters.values()]}


def test_all_kinds_of_attributes_come_back() -> None:
    model, other = Net(), Net()
    kept, restored = attributes_of(model), attributes_of(other)
    for number in range(5):
        model.go(number)
        kept.changed()
    known = other.losses, other.meter, other.hidden, other.counts, other.table, other.metrics["train"]
    restored.restore(carried(kept))
    assert told(other) == told(model)
    assert restored.problems == []
    # Others may know them.
    now = other.losses, other.meter, other.hidden, other.counts, other.table, other.metrics["train"]
    assert all(one is before for one, before in zip(now, known, strict=True))
    assert other.shared is other.config
    assert isinstance(other.counts, defaultdict)
    # From then on both go on alike, and the next save has it all.
    for one in (model, other):
        one.go(7)
    assert told(other) == told(model)
    assert repr(carried(restored)) == repr(carried(kept))


def test_what_never_changes_is_in_no_save() -> None:
    kept = attributes_of(Net())
    assert kept.changed() == {}
    assert kept.changed() is kept.changed()
    assert kept.is_same()
    assert kept.kept() == set()


def test_a_copy_is_of_its_moment() -> None:
    model = Net()
    kept = attributes_of(model)
    model.go(1)
    first = kept.changed()
    assert first[""]["losses"] != []
    hidden, losses = first[""]["hidden"], first[""]["losses"]
    model.go(2)
    model.losses[0] += 10
    assert hidden.tolist() == [1, 1]
    assert losses == [{NEW: 1}]
    second = kept.changed()
    assert second is not first
    assert second[""]["losses"] == [{NEW: 11}, {NEW: 2}]
    third = kept.changed()
    assert third is second
    assert kept.is_same()
    model.losses.append(torch.ones(()))
    assert kept.changed()[""]["losses"][1][NEW] is second[""]["losses"][1][NEW]  # not copied again


def test_what_was_deleted_is_in_no_save() -> None:
    model = Net()
    kept = attributes_of(model)
    model.go(1)
    assert "later" in kept.changed()[""]
    del model.later
    assert "later" not in kept.changed()[""]


def test_data_that_is_set_to_other_memory_is_seen_where_values_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a device."""
    monkeypatch.setattr(plain_values, "_words_of", lambda tensor: b"")
    model = Net()
    kept = attributes_of(model)
    kept.changed()
    model.hidden.data = model.hidden.data + 1
    assert carried(kept)[""]["hidden"].tolist() == [1.0, 1.0]


def test_what_the_script_builds_and_has_deleted_is_not_there_after_a_restart() -> None:
    model, other = Net(), Net()
    kept, restored = attributes_of(model), attributes_of(other)
    assert kept.changed() == {}
    del model.calls, model.callback, model.meter, model.norm.eps
    assert "calls" not in plain_values.spelled_out(carried(kept))[""]
    assert kept.is_same()
    restored.restore(carried(kept))
    assert not [name for name in ("calls", "callback", "meter") if hasattr(other, name)]
    assert not hasattr(other.norm, "eps")
    for one in (model, other):
        one.meter = Meter()
    assert repr(carried(restored)) == repr(carried(kept))
    assert carried(kept)[""]["meter"] == {NEW: ANY}


def test_a_tensor_with_a_graph_is_let_go() -> None:
    model = Net()
    kept = attributes_of(model)
    last = weakref.ref(torch.zeros(0))
    for _ in range(3):
        output = model(torch.ones(4, 3))
        model.output, model.outputs = output, [output]  # type: ignore[assignment]
        kept.changed()
        assert last() is None
        last = weakref.ref(output)
        del output
        del model.output, model.outputs
        gc.collect()
    assert not any(tensor.requires_grad for tensor in _tensors(kept.changed()))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def test_parameters_modules_and_functions_are_not_told() -> None:
    model = Net()
    kept = attributes_of(model)
    model.other = [model.linear.weight]  # type: ignore[assignment]
    model.call = lambda: 1  # type: ignore[assignment]
    model.stage = Stage("second")
    assert kept.changed() == {}
    model.callback = None  # type: ignore[assignment]
    assert kept.changed() == {"": {"callback": None}}


def test_what_has_grown_too_large_is_named_once_and_what_began_so_is_not() -> None:
    model = Net()
    model.vocabulary = list(range(5000))  # type: ignore[assignment]
    kept = attributes_of(model)
    model.losses += [1.0]
    model.vocabulary.append(1)  # type: ignore[operator, union-attr]
    assert [*kept.changed()[""]] == ["losses"]
    model.losses += [1.0] * plain_values.MOST_VALUES
    assert kept.changed() == {}
    model.losses.append(2.0)
    assert kept.changed() == {}
    (problem,) = kept.problems
    assert "the attribute 'losses', which has grown beyond 1000 values" in problem
    model.output = torch.zeros(1 << 20)
    assert kept.changed() == {}
    assert len(kept.problems) == 1


def test_library_modules_keep_numbers_and_modes_alone() -> None:
    linear = nn.Linear(2, 2)
    linear.notes = []  # type: ignore[assignment]
    linear.scale = 1.0  # type: ignore[assignment]
    kept = attributes_of(linear)
    linear.notes.append(1)  # type: ignore[operator, union-attr]
    linear.scale = 2.0  # type: ignore[assignment]
    linear.eval()
    assert kept.changed() == {"": {"scale": 2.0, "training": False}}


def test_a_sharded_module_is_the_script_s_all_the_same() -> None:
    model = Net()
    theirs = {"__module__": "torch.distributed.fsdp._fully_shard._fully_shard"}
    model.__class__ = type("FSDPNet", (type("FSDPModule", (), theirs), Net), theirs)
    kept = attributes_of(model)
    model.go(1)
    assert kept.changed()[""]["calls"] == 1
    assert kept.changed()[""]["losses"] == [{NEW: 1}]


def test_a_module_with_a_state_of_its_own_is_left_to_it() -> None:
    class Own(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def get_extra_state(self) -> Any:
            return self.calls

    model = Own()
    kept = attributes_of(model)
    model.calls = 1
    assert kept.changed() == {}


def test_what_has_no_place_is_named() -> None:
    model, other = Net(), Net()
    kept = attributes_of(model)
    model.go(1)
    other.meter = None  # type: ignore[assignment]
    restored = attributes_of(other)
    saved = carried(kept) | {"gone": {"calls": 3}}
    saved[""]["meter"]["*object"][0] = "Renamed"
    restored.restore(saved)
    assert len(restored.problems) == 2
    assert "'meter'" in restored.problems[0]
    assert "'calls' of gone" in restored.problems[1]


def test_modules_that_come_later_are_looked_at_from_then_on() -> None:
    model = Net()
    kept = attributes_of(model)
    model.go(1)
    inner = Net()
    model.inner = inner
    inner.go(1)
    kept.look_again(owners_of(model))
    assert "inner" not in kept.changed()
    assert kept.changed()[""]["calls"] == 1
    inner.go(2)
    assert kept.changed()["inner"]["calls"] == 2


def test_the_job_s_state_has_them() -> None:
    def host(model: nn.Module) -> HostState:
        return HostState(model=model, optimizers=[], schedulers=[], scaler=None, extra=None, device=None)

    model, other = Net(), Net()
    saved, restored = host(model), host(other)
    first = saved.local()["attributes"]
    assert saved.local()["attributes"] is first
    unchanged = saved.unchanged()
    model.go(3)
    assert saved.local()["attributes"] is not first
    assert unchanged is None or not all(one.is_same() for one in (*unchanged.looks, *unchanged.others))
    parts = {name: packed.unpack(packed.pack(one)) for name, one in saved.local().items()}
    restored.restore_local(parts)
    assert told(other) == told(model)


def test_what_tells_by_itself_tells_no_more_than_it_knows() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 2))
    kept = PlainAttributes(owners_of(model))
    told = what_tells(kept)
    assert told is not None
    assert told.is_same()
    setattr(model[0], "p", 0.2)  # noqa: B010
    assert not told.is_same()
    assert kept.changed() == {"0": {"p": 0.2}}
    assert what_tells(kept) is None, "what has changed is looked at by its value"
    kept = PlainAttributes(owners_of(model))
    told = what_tells(kept)
    assert told is not None
    assert kept.is_same()
    assert told.is_same()
    kept.look_again(owners_of(nn.Sequential()))
    assert not told.is_same(), "it knows of others"
    told = what_tells(kept)
    assert told is not None
    kept.begin_with("", "training")
    kept.has_changed("", "training")
    assert not told.is_same(), "more is looked at from now on"
    assert what_tells(kept) is None


def test_a_save_function_is_told_the_values_alone() -> None:
    model = Net()
    kept = attributes_of(model)
    model.go(2)
    told = plain_values.spelled_out(carried(kept))[""]
    assert told["losses"] == [2]
    assert told["meter"] == {"sum": 2, "count": 1}
    assert told["meters"] == {"a": {"sum": 0, "count": 0}, "b": {"sum": 4, "count": 1}}
    assert (told["phase"], told["later"], told["history"]) == ("TRAIN", ("set", 2), deque([2], 3))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict)
        | st.lists(st.text(max_size=2), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


@given(before=plain, after=plain, in_place=st.booleans())
def test_whatever_is_there_becomes_what_was_saved(before: Any, after: Any, in_place: bool) -> None:
    copy, *_ = plain_values.copy(after, set(), {}, {(): after} if in_place else {})
    saved = packed.unpack(packed.pack(tree_codec.encode(copy, "value")))
    put = plain_values.put(before, saved)
    assert put == after
    assert type(put) is type(after)
    marks = plain_values.mark(after, set()), plain_values.mark(put, set())
    assert marks[0] == marks[1]


@pytest.mark.parametrize("value", [print, object(), nn.Linear(1, 1), [nn.Linear(1, 1)], {"a": print}, type])
def test_no_plain_value(value: Any) -> None:
    with pytest.raises(plain_values.NotPlain):
        plain_values.mark(value, set())


def test_cycles_end() -> None:
    one, other = SimpleNamespace(number=1), SimpleNamespace(number=2)
    one.other, other.one = other, one
    told_one, *_ = plain_values.copy(one, set(), {}, None)
    assert told_one["*object"][1]["other"]["*object"][1]["number"] == 2
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(plain_values.NotPlain):
        plain_values.mark(endless, set())


class Sharing(nn.Module):
    """Whose attributes are other names of what others have, until the training sets them anew."""

    CONSTANT = numpy.zeros(2)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.anchor = self.linear.weight.detach()
        self.initial = torch.zeros(2)
        self.state = self.initial
        self.first = self.second = torch.zeros(2)
        self.array = self.CONSTANT
        self.one: list[int] = []
        self.other = self.one
        self.queue = [torch.zeros(2), self.initial]
        self.last = self.queue[0]

    def go(self) -> None:
        self.queue[0] += 1
        self.queue[1] = self.queue[1] + 4
        self.anchor = self.linear.weight.detach().clone() + 1
        self.state = self.state + 1
        self.first, self.second = self.first + 1, self.second + 2
        self.array = self.array + 3
        self.one, self.other = [1], [2]


def test_what_others_have_is_not_written_to() -> None:
    model, other = Sharing(), Sharing()
    kept, restored = attributes_of(model), attributes_of(other)
    model.go()
    weight = other.linear.weight.detach().clone()
    restored.restore(carried(kept))
    assert torch.equal(other.linear.weight, weight)
    assert torch.equal(other.anchor, model.anchor)
    assert other.initial.tolist() == [0, 0]
    assert [other.first.tolist(), other.second.tolist()] == [[1, 1], [2, 2]]
    assert Sharing.CONSTANT.tolist() == [0, 0]
    assert other.array.tolist() == [3, 3]
    assert (other.one, other.other) == ([1], [2])
    # One was written to, where it lies, and one replaced.
    assert [one.tolist() for one in (*other.queue, other.last)] == [[1, 1], [4, 4], [1, 1]]
    assert other.last is other.queue[0]
    assert restored.problems == []


def test_a_tensor_that_has_moved_to_another_device_stays_there() -> None:
    """A recurrent state that begins on the host."""
    put = plain_values.put(torch.zeros(2), {NEW: torch.ones(2, device="meta")})
    assert put.device.type == "meta"


def test_another_name_of_an_object_that_is_kept_is_named() -> None:
    model = Net()
    kept = attributes_of(model)
    model.go(1)
    model.meter = model.meters["a"]
    model.best = model.meters  # type: ignore[assignment]
    kept.changed()
    assert any("'meters'" in one and "another name" in one for one in kept.problems), kept.problems


def test_another_name_of_what_is_kept_stays_one() -> None:
    """What is written to one of them is written to all: they come back as the same object."""

    def built() -> Any:
        net: Any = Net()
        net.a = net.b = net.c = net.view = net.words = None
        return net

    def go(net: Any) -> None:
        net.b = net.a = torch.ones(2)
        net.c = net.b
        net.view, net.words = net.losses, numpy.zeros(2)
        net.inner = net.words
        net.losses.append(1.0)

    model, other = built(), built()
    kept, restored = attributes_of(model), attributes_of(other)
    losses = other.losses
    kept.changed()
    go(model)
    for _ in range(2):
        restored.restore(carried(kept))
        assert other.a is other.b is other.c
        assert other.view is other.losses is losses
        assert other.inner is other.words
        other.a.mul_(3)
        assert carried(restored)[""]["b"] == {plain_values.SAME: ["", "a"]}
        assert restored.problems == kept.problems == []
    model.a = torch.zeros(2)  # the others are what they were
    model.view = [2.0]
    restored.restore(carried(kept))
    assert [one.tolist() for one in (other.a, other.b)] == [[0, 0], [1, 1]]
    assert other.b is other.c
    assert (other.view, other.losses) == ([2.0], [1.0])
    assert other.losses is losses
    model.b.add_(1)
    assert carried(kept)[""]["b"][NEW].tolist() == [2, 2]


def test_another_name_of_what_a_restart_does_not_build_is_named() -> None:
    model, other = Net(), Net()
    kept, restored = attributes_of(model), attributes_of(other)
    model.view = model.more = torch.ones(2)
    saved = carried(kept)
    saved[""]["view"] = {plain_values.SAME: ["of none", "more"]}
    restored.restore(saved)
    assert any("'view'" in one for one in restored.problems), restored.problems


def test_what_is_set_to_a_part_of_a_parameter_is_named_and_what_was_built_so_is_not() -> None:
    net: Any = Net()
    net.built, net.row, net.own = (net.linear.weight.data[0] for _ in range(3))
    state = ModelState(net)
    net.row, net.own = net.linear.weight.data[1], net.linear.weight.data[1].clone()
    net.linear.weight.data += 1
    assert state.attributes.changed()[""].keys() == {"built", "own"}
    (problem,) = state.attributes.problems
    assert "the attribute 'row'" in problem
    assert "lies in the memory of a parameter" in problem


def test_a_write_that_torch_does_not_count_is_seen_on_the_host() -> None:
    model = Net()
    kept = attributes_of(model)
    model.hidden.data.add_(1)
    assert kept.changed()[""]["hidden"].tolist() == [1, 1]
    model.hidden.numpy()[:] = 5
    assert kept.changed()[""]["hidden"].tolist() == [5, 5]


def test_all_attributes_together_have_a_limit() -> None:
    model = nn.Sequential(*[Net() for _ in range(5)])
    kept = attributes_of(model)
    for net in model:
        net.notes = torch.zeros(12_500)
    changed = kept.changed()
    sizes = [one["notes"][NEW].nbytes for one in changed.values() if "notes" in one]
    assert sum(sizes) <= plain_attributes.MOST_BYTES
    assert 0 < len(sizes) < 5


def test_odd_values_are_named_and_end_nothing() -> None:
    model = Net()
    model.leaf = None  # type: ignore[assignment]
    kept = attributes_of(model)
    model.record = numpy.zeros(1, dtype=[("a", "i4")])[0]
    model.leaf = torch.zeros(2, requires_grad=True)
    model.losses.append(defaultdict(list))
    changed = kept.changed()
    tree_codec.encode(changed, "attributes")
    assert "record" not in changed.get("", {})
    assert len(kept.problems) == 2, kept.problems
    assert any("'leaf'" in one for one in kept.problems)
    assert any("'losses'" in one for one in kept.problems)


def test_the_order_of_a_dict_counts() -> None:
    model = Net()
    model.queue = {"a": 1, "b": 2}  # type: ignore[assignment]
    kept = attributes_of(model)
    queue: Any = model.queue
    queue["a"] = queue.pop("a")
    assert [*kept.changed()[""]["queue"]] == ["b", "a"]


def test_what_is_waited_for_is_no_state_and_is_not_named() -> None:
    """Such as events of the device in a queue of steps, each until it has come."""
    steps = SimpleNamespace(pending=deque(), sums=[0.0])
    kept = PlainAttributes({"steps": plain_attributes.Owner(steps, lambda *_: True)})
    for number, handle in enumerate((torch.Event(), threading.Event(), io.StringIO())):
        steps.pending.append((number, handle))
        assert kept.changed() == {}
        steps.pending.clear()
        kept.changed()
    assert kept.problems == []


def test_what_can_not_be_kept_now_and_then_is_named_once() -> None:
    steps = SimpleNamespace(pending=deque())
    kept = PlainAttributes({"steps": plain_attributes.Owner(steps, lambda *_: True)})
    for number in range(3):
        steps.pending.append((number, object()))
        kept.changed()
        steps.pending.clear()
        kept.changed()
    (problem,) = kept.problems
    assert "'pending' of steps, which has become a deque" in problem
