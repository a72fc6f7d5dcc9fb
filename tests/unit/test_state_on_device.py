"""Whether parameters and optimizer state can stay on the device, and what the proxy is told of them."""

import ctypes
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from jitckpt.errors import RecoveryError
from jitckpt.worker import job
from jitckpt.worker.in_place import naming, state_on_device
from jitckpt.worker.in_place.naming import BLOCK_BYTES
from jitckpt.worker.in_place.state_on_device import StateOnDevice, digest, gradients, unfit, unpacked

NO_OPTIMIZER: Any = SimpleNamespace()


class OnDevice(Tensor):
    """A tensor that says it lies on a device."""

    is_cuda = True


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


@pytest.fixture(autouse=True)
def _as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitckpt.state.parallel.local", lambda tensor: tensor)


class Proxy:
    """answers: what it says of them, one after the other. changed: the blocks that a check finds."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.answers = [0]
        self.others_stay = 1
        self.communicated = self.recovered = self.written = self.written_for_good = 0
        self.storages: list[tuple[int, int]] = []
        self.places: list[tuple[int, int]] = []
        self.changed = b""
        self.process = SimpleNamespace(
            jitckpt_proxy_answers=lambda: self.answers.pop(0) if len(self.answers) > 1 else self.answers[0],
            jitckpt_proxy_step_begins=lambda places, count: self.hear("begins", places, count),
            jitckpt_proxy_step_ended=lambda places, count, digest: self.hear("ended", places, count, digest),
            jitckpt_proxy_state_stays=lambda: self.others_stay,
            jitckpt_proxy_state_leaves=lambda: self.hear("leaves"),
            jitckpt_proxy_state_ends=lambda: self.hear("ends"),
            jitckpt_proxy_check=self.check,
            jitckpt_proxy_keep_again=lambda: self.hear("keeps"),
            jitckpt_proxy_state_changed=lambda: self.recovered,
            jitckpt_proxy_state_was_written=lambda: self.written,
            jitckpt_proxy_state_was_changed=lambda: self.written_for_good,
            jitckpt_proxy_watch_state=partial(Proxy.watch, self),
            jitckpt_proxy_communicated=lambda: self.communicated,
            cudaGetLastError=lambda: 0,
            cudaGetErrorString=lambda error: f"error {error}".encode(),
        )

    def hear(self, what: str, places: bytes = b"", count: int = 0, *digest: int) -> int:
        found = unpacked(places)
        assert len(found) == count
        self.heard.append((what, found, *digest))
        return 0

    def watch(self, storages: bytes, count: int) -> None:
        self.storages = unpacked(storages)
        assert len(self.storages) == count

    def check(self, reference: Any) -> int:
        memory = reference._obj
        self.kept_alive = ctypes.create_string_buffer(self.changed, max(1, len(self.changed)))
        memory.block_count, memory.changed = len(self.changed), ctypes.addressof(self.kept_alive)
        self.pieces = (type(memory.places._type_()) * len(self.places))(*self.places)
        memory.place_count, memory.places = len(self.places), self.pieces
        return 0


def begins(one: StateOnDevice, state: Mapping[str, Tensor], optimizers: list[Any]) -> None:
    one.step_begins(optimizers[0] if optimizers else NO_OPTIMIZER, lambda: state, lambda: optimizers)


def ended(one: StateOnDevice, state: Mapping[str, Tensor], optimizers: list[Any]) -> int:
    optimizer = optimizers[0] if optimizers else NO_OPTIMIZER
    return one.step_ended(optimizer, lambda: state, lambda: optimizers, lambda optimizer: None)


def state() -> dict[str, Tensor]:
    return {
        "optimizer.0.parameter.1": on_device(torch.arange(300.0)),
        "optimizer.0.parameter.0": on_device(torch.ones(2, 3)),
        "optimizer.0.state.0.empty": on_device(torch.ones(0)),
    }


def places(state: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    return [naming.extent(state[name]) for name in sorted(state) if state[name].numel()]


def test_places_are_told_in_the_order_of_their_names_before_and_after_each_step() -> None:
    proxy, here = Proxy(), state()
    one = StateOnDevice(proxy.process)
    one.stays = True
    begins(one, here, [])
    assert ended(one, here, []) == 0
    assert [what for what, *_ in proxy.heard] == ["begins", "ended"]
    assert proxy.heard[0][1] == proxy.heard[1][1] == places(here)
    # A replica has other addresses, and the same names and sizes; another shard's sizes are others.
    replica, other = Proxy(), Proxy()
    for found, tensors in (
        (replica, state()),
        (other, here | {"optimizer.0.parameter.2": here["optimizer.0.state.0.empty"]}),
    ):
        again = StateOnDevice(found.process)
        again.stays = True
        begins(again, tensors, [])
        ended(again, tensors, [])
    assert proxy.heard[1][2] == replica.heard[1][2] != other.heard[1][2]
    assert one.stays


def test_once_another_rank_has_left_this_one_does_too() -> None:
    proxy = Proxy()
    one = StateOnDevice(proxy.process)
    one.stays, proxy.others_stay = True, 0
    begins(one, state(), [])
    assert not one.stays
    assert proxy.heard == []


def test_a_step_that_can_not_begin_so_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    proxy = Proxy()
    proxy.process.jitckpt_proxy_step_begins = lambda places, count: 801
    one = StateOnDevice(proxy.process)
    one.stays = True
    begins(one, state(), [])
    assert not one.stays
    assert proxy.heard == [("leaves", []), ("ends", [])]
    assert "the state does not stay on the device any more: error 801" in capsys.readouterr().err


def test_a_first_step_after_which_the_state_could_not_stay_is_found_with_the_state_in_an_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy, here = Proxy(), state()
    running = on_device(torch.zeros(2 * BLOCK_BYTES // 4))
    free = on_device(torch.zeros(BLOCK_BYTES // 4))
    proxy.places = sorted([naming.extent(running), naming.extent(free), *places(here)])
    blocks = naming.Places(proxy.places).blocks(*naming.extent(running))
    count = sum(-(-size // BLOCK_BYTES) for _, size in proxy.places)
    used = [naming.extent(running), *places(here)]
    monkeypatch.setattr("jitckpt.worker.in_place.state_on_device.given_out", lambda: used)

    def tried(changed: bytes) -> str:
        proxy.changed = changed
        one = StateOnDevice(proxy.process)
        assert one.trial_begins(here, []) == 0
        return one.trial_ended(5, here, [])

    # All of the state changes, and what is free.
    assert tried(bytes(number not in blocks for number in range(count))) == ""
    # And half of what is neither.
    assert tried(bytes(number != blocks.start for number in range(count))) == (
        f"step 5 has changed {naming.extent(running)[0] + BLOCK_BYTES:#x} (512 bytes), which is no state of "
        "the optimizer"
    )
    assert proxy.heard == [("keeps", [])] * 2
    proxy.communicated = 1
    assert tried(bytes(count)) == "a collective runs in optimizer step 5"
    proxy.communicated, proxy.answers = 0, [3, 4]
    assert tried(bytes(count)) == "in its optimizer step the program waits for the device"


def test_steps_begin_and_end_so_until_all_ranks_have_left(capsys: pytest.CaptureFixture[str]) -> None:
    proxy, here = Proxy(), state()
    one = StateOnDevice(proxy.process)
    one.stays = True
    begins(one, here, [])
    one.leave("a test")
    one.leave("another")
    assert (one.begun, one.stays) == (True, True)
    ended(one, here, [])
    begins(one, here, [])
    proxy.others_stay = 0  # that was the last
    assert one.begun
    ended(one, here, [])
    begins(one, here, [])
    assert (one.begun, one.stays) == (False, False)
    assert [what for what, *_ in proxy.heard] == ["begins", "leaves", "ended", "begins", "ended"]
    assert all(len(held) == 2 for what, held, *_ in proxy.heard if what != "leaves")
    assert "another" not in capsys.readouterr().err
    # One that was left by an exception has no end.
    one = StateOnDevice(Proxy().process)
    one.stays = True
    begins(one, here, [])
    one.leave("a test")
    one.stays = False
    begins(one, here, [])
    assert not one.begun


@pytest.mark.parametrize("within", [False, True])
def test_a_state_that_becomes_unfit_leaves_and_nothing_is_left_out_for_it(within: bool) -> None:
    proxy, here = Proxy(), state()
    turned = {**here, "optimizer.0.parameter.0": on_device(torch.ones(3, 2)).t()}
    one = StateOnDevice(proxy.process)
    one.stays = True
    for before, after in ((here, turned if within else here), (turned, turned)):
        begins(one, before, [])
        ended(one, after, [])
    found = [(what, len(held)) for what, held, *_ in proxy.heard]
    at_end = [("leaves", 0), ("ended", 0), ("begins", 0), ("ended", 0)]
    at_begin = [("ended", 2), ("leaves", 0), ("begins", 0), ("ended", 0)]
    assert found == [("begins", 2), *(at_end if within else at_begin)]


@pytest.mark.parametrize("how", ["written", "replaced"])
def test_a_parameter_that_changes_outside_of_the_step_leaves_with_its_name(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy, here = Proxy(), state()
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = [torch.optim.SGD(parameters)]
    one = StateOnDevice(proxy.process)
    one.stays = True
    for _ in range(2):
        begins(one, here, optimizers)
        with torch.no_grad():
            parameters[1].add_(1)  # by the step itself
        ended(one, here, optimizers)
    assert one.stays
    assert [what for what, *_ in proxy.heard] == ["begins", "ended"] * 2

    def change() -> None:
        with torch.no_grad():
            if how == "written":
                parameters[2].mul_(0.5)
            else:
                parameters[2].data = torch.ones(2)

    change()
    proxy.heard.clear()
    begins(one, here, optimizers)
    said = "optimizer.0.parameter.2 has changed outside of the optimizer step"
    assert f"the state does not stay on the device any more: {said}" in capsys.readouterr().err
    assert proxy.heard == [("leaves", []), ("begins", [])]  # the image has all
    ended(one, here, optimizers)
    # What was made again with the state on the device may have been made twice.
    change()
    proxy.recovered = 1
    with pytest.raises(RecoveryError, match="may have changed it twice"):
        begins(one, here, optimizers)


def test_an_optimizer_that_gets_another_parameter_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    proxy, here = Proxy(), state()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2)) for _ in range(3)])
    one = StateOnDevice(proxy.process)
    one.stays = True
    begins(one, here, [optimizer])
    ended(one, here, [optimizer])
    optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.ones(2))
    proxy.heard.clear()
    begins(one, {**here}, [optimizer])
    assert "the optimizer has got other parameters" in capsys.readouterr().err
    assert [what for what, *_ in proxy.heard] == ["leaves", "begins"]


def test_a_state_that_a_call_has_changed_leaves_and_what_was_recovered_from_meanwhile_is_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    proxy, here = Proxy(), state()
    one = StateOnDevice(proxy.process)
    one.stays = True
    for written in (0, 1, 1):
        proxy.heard.clear()
        proxy.written = proxy.written_for_good = proxy.recovered = written
        begins(one, here, [])
        image = [] if written else places(here)
        assert [what for what in proxy.heard if what[0] == "begins"] == [("begins", image)]
        ended(one, here, [])
    said = "the program has written to the state outside of the optimizer step"
    assert capsys.readouterr().err.count(said) == 1


def test_a_counted_change_that_the_proxy_has_seen_coming_is_made_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    proxy, here = Proxy(), state()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2)) for _ in range(3)])
    one = StateOnDevice(proxy.process)
    one.stays = True
    begins(one, here, [optimizer])
    ended(one, here, [optimizer])
    with torch.no_grad():
        optimizer.param_groups[0]["params"][2].mul_(0.5)
    proxy.written = proxy.written_for_good = proxy.recovered = 1
    begins(one, here, [optimizer])  # and raises nothing
    said = "optimizer.0.parameter.2 has changed outside of the optimizer step"
    assert said in capsys.readouterr().err


def test_a_state_that_is_given_to_kernels_anew_in_most_minibatches_leaves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for many, leaves in ((state_on_device.OFTEN - 1, False), (state_on_device.OFTEN, True)):
        proxy, here = Proxy(), state()
        one = StateOnDevice(proxy.process)
        one.stays = True
        for number in range(2 * state_on_device.OFTEN):
            proxy.written = number < many
            begins(one, here, [])
            ended(one, here, [])
        assert (("leaves", []) in proxy.heard) == leaves
        assert ("given the state in ways that were not seen before" in capsys.readouterr().err) == leaves


def test_the_proxy_is_told_of_the_storages_that_the_state_lies_in() -> None:
    proxy, whole = Proxy(), torch.zeros(64)
    here = {"optimizer.0.parameter.0": on_device(whole[16:32])}
    one = StateOnDevice(proxy.process)
    one.stays = True
    begins(one, here, [])
    assert proxy.storages == [(whole.data_ptr(), whole.nbytes)]


@pytest.mark.parametrize("wanted", [False, True])
def test_beside_init_the_state_stays_only_if_that_is_wanted(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, proxy = state(), Proxy()
    known = naming.Places(sorted(places(here)))
    same = torch.zeros(sum(-(-size // BLOCK_BYTES) for _, size in known.pieces), dtype=torch.bool)
    one = StateOnDevice(proxy.process, beside_init=wanted)
    assert one.why_not(here, [None], known, same) == ""
    monkeypatch.setattr(job, "_current", object())
    said = "" if wanted else "the script has called jitckpt.init"
    assert one.why_not(here, [None], known, same) == said


def test_why_a_state_can_not_stay() -> None:
    here = state()
    parameter = here["optimizer.0.parameter.1"]
    known = naming.Places(sorted(places(here)))
    same = torch.zeros(sum(-(-size // BLOCK_BYTES) for _, size in known.pieces), dtype=torch.bool)

    def why(optimizers: int = 1, waits: bool = False, changed: Tensor = same, pieces: Any = known) -> str:
        proxy = Proxy()
        proxy.answers = [3, 4 if waits else 3, 9, 9, 12, 12]
        one = StateOnDevice(proxy.process)
        for _ in range(2):
            one.watch()
            one.watched([])
        return one.why_not(here, [None] * optimizers, pieces, changed)

    assert why() == ""
    assert why(optimizers=2) == "there are several optimizers"
    assert why(waits=True) == "in its optimizer step the program waits for the device"
    changed = same.clone()
    changed[known.blocks(*naming.extent(parameter)).start + 1] = True
    assert why(changed=changed) == "optimizer.0.parameter.1 has changed outside of the optimizer step"
    unknown = naming.Places([])
    assert why(pieces=unknown).endswith("lies in memory that the proxy does not know")
    one = StateOnDevice(Proxy().process)
    one.leave("it was left with an exception")
    assert one.why_not(here, [None], known, same) == "it was left with an exception"
    proxy = Proxy()
    proxy.others_stay = 0
    found = StateOnDevice(proxy.process).why_not(here, [None], known, same)
    assert found == "some rank has made it leave before"


def test_tensors_that_can_not_stay() -> None:
    here = state()
    parameter = here["optimizer.0.parameter.1"]
    assert unfit(here) == ""
    assert unfit({**here, "host": torch.ones(2)}) == "host is not on the device"
    assert unfit({**here, "turned": on_device(torch.ones(2, 3)).t()}) == "turned does not lie in one piece"
    assert unfit({**here, "part": parameter[10:20]}) == "part and optimizer.0.parameter.1 share memory"


def test_a_digest_tells_names_types_shapes_and_contents_apart() -> None:
    here = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(0), "c": torch.tensor(1.5)}
    assert digest(here) == digest({name: here[name].clone() for name in ("c", "b", "a")})
    others = [
        {**here, "a": here["a"].view(3, 2)},
        {**here, "a": here["a"].view(torch.int32)},
        {**here, "a": here["a"] + 1},
        {**here, "b": torch.ones(0, 2)},
        {"a": here["a"], "b": here["b"], "d": here["c"]},
    ]
    assert len({digest(one) for one in [here, *others]}) == 6
    assert digest({"a": torch.ones(3, dtype=torch.bfloat16)}) != digest(
        {"a": torch.zeros(3, dtype=torch.bfloat16)}
    )


def test_images_leave_out_gradients_that_a_validation_has_not_found_to_be_needed() -> None:
    proxy, here = Proxy(), state()
    parameter = torch.ones(200, requires_grad=True)
    parameter.grad = on_device(torch.ones(200))
    optimizer = torch.optim.SGD([parameter])
    gradient = naming.extent(parameter.grad)
    known = naming.Places(sorted([*places(here), gradient]))
    own = known.blocks(*gradient)

    def told(shadow: Tensor) -> list[tuple[int, int]]:
        proxy.heard = []
        one = StateOnDevice(proxy.process)
        one.watched([optimizer])
        changed = torch.zeros(len(shadow), dtype=torch.uint8)
        tried = torch.zeros(len(shadow), dtype=torch.bool)
        one.doubt_gradients(known, changed, tried)
        for blocks in (changed, tried):
            assert blocks.nonzero().flatten().tolist() == [*own]
        one.learn(known, shadow)
        one.stays = True
        begins(one, here, [optimizer])
        assert ended(one, here, []) == 0
        assert proxy.heard[1][1] == places(here)  # they are no state
        found: list[tuple[int, int]] = proxy.heard[0][1]
        return found

    needed = torch.zeros(known.blocks(*known.pieces[-1]).stop, dtype=torch.bool)
    assert told(needed) == [*places(here), gradient]
    needed[own.stop - 1] = True
    assert told(needed) == places(here)


def test_gradients_that_do_not_lie_in_one_piece_are_no_extents() -> None:
    parameters = [torch.ones(4, 6, requires_grad=True) for _ in range(5)]
    gradients_of = [on_device(torch.ones(4, 6)), on_device(torch.ones(6, 4)).t(), torch.ones(4, 6), None]
    gradients_of.append(torch.ones(4, 6).to_sparse())
    for parameter, gradient in zip(parameters, gradients_of, strict=True):
        parameter.grad = gradient
    assert gradients_of[0] is not None
    assert unpacked(gradients([torch.optim.SGD(parameters), None])) == [naming.extent(gradients_of[0])]
