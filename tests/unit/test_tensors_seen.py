"""What is read of many tensors in C++ is what torch's own interface says of each."""

import contextlib
import gc
import os
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from jitckpt import _seen
from jitckpt.device import LIBRARY_DIR
from jitckpt.state import tensors_seen
from jitckpt.state.tensors_seen import OneByOne

native = pytest.mark.skipif(not tensors_seen.is_known_torch, reason="jitckpt was built without torch")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    """DTensors lie on a mesh of ranks."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """All tensors lie there unless something else is said."""
    with torch.device(DEVICE):
        yield


class Logged(torch.Tensor):
    """A subclass that answers through Python."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def without_memory() -> Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def distributed_tensor(placement: Replicate | Shard) -> Tensor:
    mesh = init_device_mesh(DEVICE, (1,))
    return distribute_tensor(torch.ones(4), mesh, [placement], src_data_rank=None)


# Torch tells where these lie, and how often it has written to them.
KINDS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.arange(6.0).view(2, 3),
    "parameter": lambda: nn.Parameter(torch.ones(4)),
    "a part of another": lambda: torch.ones(5)[2:],
    "empty": lambda: torch.ones(0),
    "one number": lambda: torch.tensor(3),
    "of no memory": without_memory,
    "a subclass": lambda: torch.ones(4).as_subclass(Logged),
    "a parameter of a subclass": lambda: nn.Parameter(torch.ones(4).as_subclass(Logged)),
    "fake": fake,
    "conjugated": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "a lazy copy": lambda: torch._lazy_clone(torch.ones(4)),
    "expanded": lambda: torch.ones(1).expand(3),
    "half": lambda: torch.ones(4, dtype=torch.bfloat16),
    "on the host": lambda: torch.ones(4, device="cpu"),
    "a DTensor": lambda: distributed_tensor(Replicate()),
    "a part of a DTensor": lambda: nn.Parameter(distributed_tensor(Shard(0))),
    "what a DTensor has here": lambda: distributed_tensor(Shard(0)).to_local(),  # type: ignore[attr-defined]
    "of 8 bits": lambda: torch.ones(4).to(torch.float8_e4m3fn),
}
# It doesn't of these: OutsideChanges asks that first.
UNTOLD: dict[str, Callable[[], Tensor]] = {
    "inference": inference,
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.ones(2, 2, device="cpu").to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("kind", [*KINDS, *UNTOLD])
def test_what_is_fetched_stays_as_it_is(kind: str) -> None:
    tensor = (KINDS | UNTOLD)[kind]()
    is_lazy: Any = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    before = not tensor.is_sparse and is_lazy(tensor)
    tensors_seen.fetch((tensor, tensor))
    assert (not tensor.is_sparse and is_lazy(tensor)) == before


def swap(tensor: Tensor) -> None:
    torch.utils.swap_tensors(tensor, torch.ones(4))


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda tensor: None,
    "written in its place": lambda tensor: tensor.mul_(2),
    "written through a part": lambda tensor: tensor.view(-1)[:1].zero_(),
    "written through detach": lambda tensor: tensor.detach().add_(1),
    "another data": lambda tensor: setattr(tensor, "data", tensor.detach().clone()),
    "data of another type": lambda tensor: setattr(tensor, "data", tensor.detach().double()),
    "data of another beginning": lambda tensor: setattr(tensor, "data", tensor.detach()[1:]),
    "another memory": lambda tensor: tensor.set_(torch.ones(4)),  # type: ignore[call-overload]
    "another size": lambda tensor: tensor.resize_(100),
    "no memory": lambda tensor: tensor.untyped_storage().resize_(0),
    "more memory": lambda tensor: tensor.untyped_storage().resize_(4096),
    "without gradients": lambda tensor: tensor.requires_grad_(False),
    "with gradients": lambda tensor: tensor.requires_grad_(True),
    "with a gradient": lambda tensor: setattr(tensor, "grad", torch.zeros_like(tensor)),
    "with a sparse gradient": lambda tensor: setattr(tensor, "grad", torch.zeros_like(tensor).to_sparse()),
    "with no gradient": lambda tensor: setattr(tensor, "grad", None),
    "uncounted": lambda tensor: torch._C._autograd._unsafe_set_version_counter((tensor,), (0,)),
    "swapped": swap,
    "a lazy copy's twin": lambda tensor: torch._lazy_clone(tensor).add_(1),
    "read": lambda tensor: tensor.data_ptr(),
}
NEED_MEMORY = {name for name in CHANGES if name.startswith(("written", "another data", "data of", "a lazy"))}


def answers(tensors: list[Tensor]) -> tuple[object, object]:
    """Return what is said of them in one call, and what torch's own interface says."""
    return (
        (
            tensors_seen.gradients_required(tuple(tensors)),
            tensors_seen.addresses(tensors),
            tensors_seen.gradients_there(tuple(tensors)),
        ),
        (
            tensors_seen.required_one_by_one(tuple(tensors)),
            struct.pack(f"{len(tensors)}Q", *map(Tensor.data_ptr, tensors)),
            tensors_seen.there_one_by_one(tuple(tensors)),
        ),
    )


@native
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=70),
    st.lists(st.tuples(st.integers(0, 69), st.sampled_from(sorted(CHANGES)), st.booleans()), max_size=12),
)
def test_both_say_the_same_of_any_changes(kinds: list[str], changes: list[tuple[int, str, bool]]) -> None:
    tensors = [KINDS[kind]() for kind in kinds]
    fast, slow = tensors_seen.writes(tensors), OneByOne(tensors)
    assert not isinstance(fast, OneByOne)
    assert fast.changed() == [*range(len(tensors))]  # nothing was looked at
    fast.look()
    slow.look()
    for number, change, looks in changes:
        with torch.no_grad():
            tensor = tensors[number % len(tensors)]
            # Torch does not look whether there is memory. Not every kind can be changed in every way.
            with contextlib.suppress(RuntimeError, TypeError, IndexError, AssertionError):
                if tensor.untyped_storage().nbytes() or change not in NEED_MEMORY:
                    CHANGES[change](tensor)
        assert fast.changed() == slow.changed()
        said, by_torch = answers([one for one, kind in zip(tensors, kinds, strict=True) if kind != "fake"])
        assert said == by_torch
        if looks:
            fast.look()
            slow.look()


@native
@pytest.mark.parametrize("kind", UNTOLD)
def test_what_cannot_be_told_raises_the_same(kind: str) -> None:
    tensors = [torch.ones(2), UNTOLD[kind]()]
    raised = []
    for one in (tensors_seen.writes(tensors), OneByOne(tensors)):
        with pytest.raises(RuntimeError) as error:
            one.look()
        raised.append(str(error.value).split("\n")[0])
    assert raised[0] == raised[1]


@native
def test_a_look_that_fails_leaves_the_one_before() -> None:
    tensor, other = torch.ones(2), torch.ones(2)
    writes = tensors_seen.writes([tensor, other])
    writes.look()
    tensor.add_(1)
    torch.utils.swap_tensors(other, inference())
    with pytest.raises(RuntimeError):
        writes.look()
    torch.utils.swap_tensors(other, torch.ones(2))
    assert 0 in writes.changed()


@native
def test_tensors_live_as_long_as_they_are_watched() -> None:
    tensor = torch.ones(2)
    reference = weakref.ref(tensor)
    writes = tensors_seen.writes([tensor])
    writes.look()
    del tensor
    gc.collect()
    assert reference() is not None
    assert writes.changed() == []
    del writes
    gc.collect()
    assert reference() is None


def test_another_torch_is_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_seen, "is_known_torch", False)
    tensors = [torch.ones(2), nn.Parameter(torch.ones(2))]
    writes = tensors_seen.writes(tensors)
    assert isinstance(writes, OneByOne)
    writes.look()
    tensors[1].data = torch.zeros(2)
    assert writes.changed() == [1]
    assert tensors_seen.required_one_by_one(tuple(tensors)) == b"\0\1"
    sparse, dense = torch.ones(2, device="cpu"), torch.ones(2)
    sparse.grad, dense.grad = torch.zeros(2, device="cpu").to_sparse(), torch.zeros(2)
    assert tensors_seen.there_one_by_one((*tensors, sparse, dense)) == b"\0\0\2\1"
    assert tensors_seen.addresses(tensors) == struct.pack("2Q", *[one.data_ptr() for one in tensors])


@native
def test_numbers_on_the_host_are_read_as_they_are() -> None:
    host = torch.device("cpu")
    wide = torch.arange(4, dtype=torch.float64, device=host)
    with torch.device(host):
        several: tuple[Tensor, ...] = (
            *(
                torch.tensor(7.5),
                wide[2],
                nn.Parameter(torch.tensor(2.0)),
                torch.tensor(3, dtype=torch.uint8),
            ),
            *(torch.tensor(True), torch.ones(2, 3)[1, 1], torch._lazy_clone(torch.tensor(4.0))),
        )
    expected = b"".join(one.detach().clone().numpy().tobytes() for one in several)
    assert tensors_seen.numbers(several) == expected == _seen.numbers([*several])
    several[0].fill_(1.0)
    assert tensors_seen.numbers(several)[:4] == struct.pack("f", 1.0)
    assert tensors_seen.numbers(()) == b""
    with pytest.raises(ValueError, match="one number"):
        tensors_seen.numbers((wide,))
    if DEVICE == "cuda":
        with pytest.raises(ValueError, match="on the host"):
            tensors_seen.numbers((torch.tensor(1.0),))


def test_a_generator_on_the_host_has_no_counter() -> None:
    assert tensors_seen.counter_of(torch.default_generator) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors_seen, "is_known_torch", False)
        assert tensors_seen.counter_of(torch.default_generator) is None


@native
@pytest.mark.skipif(DEVICE != "cuda", reason="it is of a device")
def test_how_far_a_devices_generator_has_come_is_what_torch_tells() -> None:
    generator = torch.Generator(DEVICE)
    counter = tensors_seen.counter_of(generator)
    assert counter is not None
    other = torch.Generator(DEVICE).manual_seed(5)
    torch.rand(3, generator=other)

    def draw() -> None:
        torch.rand(1000, generator=generator)

    for change in (
        draw,
        lambda: generator.manual_seed(2**63 + 11),
        draw,
        lambda: generator.set_offset(8),
        lambda: generator.set_state(other.get_state()),
        draw,
        lambda: generator.graphsafe_set_state(other),  # from now on both are one
        lambda: torch.rand(1000, generator=other),
        generator.seed,
        draw,
    ):
        before = counter()
        change()
        assert counter() != before
        assert counter() == struct.pack("2Q", generator.initial_seed(), generator.get_offset())
        assert counter() == generator.get_state().numpy().tobytes()


@native
@pytest.mark.skipif(DEVICE == "cuda", reason="this is the run on a device")
def test_of_tensors_on_a_device_all_of_this_holds() -> None:
    environment = os.environ | {
        "LD_PRELOAD": str(LIBRARY_DIR / "libsoftgpu.so"),
        "LD_LIBRARY_PATH": str(LIBRARY_DIR / "driver"),
        "SOFTGPU_DEVICES": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 skipped" in ended.stdout
