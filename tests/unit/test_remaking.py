"""Optimizer steps that another host makes again from gradients, in the place of a whole copy."""

import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import xxhash
from test_protection import Agents
from torch import Tensor, nn

from jitckpt.saves.layout import Identity
from jitckpt.tiers import host_memory, remaking, shard
from jitckpt.tiers.host_memory import GRADIENTS, READY
from jitckpt.tiers.optimizer_step import OptimizerStep, ParameterGroup, Stepped

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.01}),
]
SIZES = (1003, 17)  # elements, so that there are gaps between the tensors


class Training:
    """A rank that trains on the host what stands for its device, and puts its state into host memory.

    others: of its parameters those that another rank steps, as in ZeRO.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        options: dict[str, Any],
        own: Any = SIZES,
        shapes: Sequence[Any] = SIZES,
    ) -> None:
        torch.manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        self.own = [one for one in self.parameters if one.numel() in own]
        self.optimizer = kind(self.own, **options)
        self.step = 0

    def train(self) -> None:
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        for one in self.parameters:
            one.grad = torch.randn(one.shape, generator=generator)
        self.before = {
            id(one): {
                key: ("float32", float(value))
                for key, value in self.optimizer.state[one].items()
                if value.numel() == 1
            }
            for one in self.own
        }
        self.optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model.{n}": one.detach() for n, one in enumerate(self.parameters)}
        for n, one in enumerate(self.parameters):
            for key, value in self.optimizer.state.get(one, {}).items():
                if value.numel() > 1:
                    found[f"optimizer.0.state.{n}.{key}"] = value
        return found

    def put(self, agents: Agents, rank: int, *, wrong: bool = False) -> None:
        """Make a snapshot, as the rank does. wrong: gradients are said to be of no shape of a parameter."""
        gradients = {n: one.grad for n, one in enumerate(self.parameters) if any(one is o for o in self.own)}
        data = bytearray()
        of_gradients = {}
        places = {}

        def add(tensor: Tensor) -> tuple[str, list[int], int]:
            offset = len(data)
            data.extend(tensor.numpy().tobytes())
            data.extend(bytes(-len(data) % shard.ALIGNMENT))
            return "float32", list(tensor.shape), offset

        for n, gradient in gradients.items():
            assert gradient is not None
            of_gradients[n] = add(gradient[:2] if wrong else gradient)
        sent = len(data)
        for name, tensor in self.tensors().items():
            places[name] = add(tensor)
        host_from = len(data)
        places["random"] = add(random_of(rank, self.step))
        stepped = [
            Stepped(f"model.{n}", f"optimizer.0.state.{n}.", of_gradients[n], self.before[id(one)])
            for n, one in enumerate(self.parameters)
            if n in of_gradients
        ]
        options = {key: value for key, value in self.optimizer.param_groups[0].items() if key != "params"}
        elsewhere = [f"model.{n}" for n in range(len(self.parameters)) if n not in of_gradients]
        made_by = OptimizerStep(
            type(self.optimizer).__name__, [ParameterGroup(options, stepped)], elsewhere, sent
        )
        cut = [bytes(data[begin : begin + shard.CHUNK]) for begin in range(0, len(data), shard.CHUNK)]
        index = shard.Index(
            identity=Identity("job", "fingerprint", agents.count, rank, rank, agents.count),
            step=self.step,
            timeline="first",
            time=1.0,
            checksums=[xxhash.xxh3_128_hexdigest(one) for one in cut],
            tensors=places,
            host_from=host_from,
            document={"step": self.step},
            made_by=made_by if self.step > 1 else None,
        ).encode()
        memory = agents.tiers[rank].memory
        host_memory.put_word(memory.of(rank), READY, 1)
        slot = self.step % 2
        host_memory.unseal(memory.of(rank), slot)
        host_memory.write(memory.of(rank), bytes(data), host_memory.data_place(slot))
        host_memory.seal(memory.of(rank), slot, index, shard.seal_of(index, self.step, len(data)))

    def is_kept(self, agents: Agents, host: int, rank: int) -> bool:
        """Whether a host has the state as it is now, bit for bit."""
        _, state = host_memory.read(agents.tiers[host].memory.of(rank), self.step)
        expected = self.tensors() | {"random": random_of(rank, self.step)}
        assert state.tensors.keys() == expected.keys()
        return all(torch.equal(state.tensors[name], tensor) for name, tensor in expected.items())


def random_of(rank: int, step: int) -> torch.Tensor:
    """Return what a rank alone knows: so no two states are the same, of which one would not be sent."""
    return torch.tensor([step + rank / 16])


@pytest.fixture
def agents() -> Iterator[Agents]:
    found = Agents(uuid.uuid4().hex, 2)
    found.start()
    for tier in found.tiers:
        tier.wanted = replace(tier.wanted, optimizer=True)
    found.meet()
    yield found
    found.close()


def told(agents: Agents) -> list[str]:
    """Return what host 0 has warned of."""
    return [str(one["text"]) for one in agents.protections[0]._log.events if one["event"] == "warning"]


def sent(agents: Agents, rank: int) -> int:
    return agents.protections[rank]._own[rank].size


def steps(agents: Agents, trainings: list[Training], count: int) -> None:
    for _ in range(count):
        for rank, one in enumerate(trainings):
            one.train()
            one.put(agents, rank)
        agents.until_safe(trainings[0].step)


@pytest.mark.parametrize("way", remaking.WAYS)
@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_gradients_are_enough_for_the_same_bits(
    agents: Agents, kind: type[torch.optim.Optimizer], options: dict[str, Any], way: str
) -> None:
    trainings = [Training(kind, {**options, **remaking.WAYS[way]}) for _ in range(2)]
    steps(agents, trainings, 1)
    whole = sent(agents, 0)
    for one in trainings:
        one.optimizer.param_groups[0]["lr"] = 0.003  # as a scheduler does
    steps(agents, trainings, 3)
    assert trainings[0].is_kept(agents, 1, 0)
    assert trainings[1].is_kept(agents, 0, 1)
    assert sent(agents, 0) < whole
    assert told(agents) == []


def test_what_other_ranks_step_does_not_come_either(agents: Agents) -> None:
    kind, options = OPTIMIZERS[2]
    trainings = [Training(kind, options, own) for own in ((SIZES[1],), (SIZES[0],))]
    for _ in range(3):
        for one in trainings:
            one.train()
        with torch.no_grad():  # what each has stepped all get
            trainings[0].parameters[0].copy_(trainings[1].parameters[0])
            trainings[1].parameters[1].copy_(trainings[0].parameters[1])
        for rank, one in enumerate(trainings):
            one.put(agents, rank)
        agents.until_safe(trainings[0].step)
    assert trainings[0].is_kept(agents, 1, 0)
    assert trainings[1].is_kept(agents, 0, 1)
    # Of rank 0's state the large parameter is not sent.
    assert sent(agents, 0) < SIZES[0] * 4
    assert told(agents) == []


def sends_whole_copies_from_now_on(agents: Agents, trainings: list[Training], text: str) -> None:
    """Rank 0, of which this text was said; rank 1's steps are made again as before."""
    assert "whole copies are sent" in text
    assert agents.word(0, GRADIENTS) == 0
    assert agents.word(1, GRADIENTS) == 1
    steps(agents, trainings, 1)
    assert trainings[0].is_kept(agents, 1, 0)


def test_where_a_tensor_differs_it_is_named_and_whole_copies_go_on(agents: Agents) -> None:
    kind, options = OPTIMIZERS[2]
    trainings = [Training(kind, options) for _ in range(2)]
    steps(agents, trainings, 2)
    for rank, one in enumerate(trainings):
        one.train()
        if rank == 0:  # as a device that rounds otherwise
            one.optimizer.state[one.parameters[1]]["exp_avg_sq"][3] *= 1 + 2**-23
        one.put(agents, rank)
    agents.until_safe(3)
    assert trainings[0].is_kept(agents, 1, 0)
    (text,) = told(agents)
    assert "rank 0's optimizer step 3 again, and optimizer.0.state.1.exp_avg_sq is not bit for bit" in text
    sends_whole_copies_from_now_on(agents, trainings, text)


@pytest.mark.parametrize("shapes", [(1003, (0, 16), 0), ((0, 16), 0)])
def test_a_rank_may_have_no_row_of_some_parameters_or_of_any(
    agents: Agents, shapes: tuple[int | tuple[int, int], ...]
) -> None:
    kind, options = OPTIMIZERS[2]
    trainings = [Training(kind, options, (*SIZES, 0), of) for of in (SIZES, shapes)]
    steps(agents, trainings, 3)
    assert trainings[0].is_kept(agents, 1, 0)
    assert trainings[1].is_kept(agents, 0, 1)
    assert told(agents) == []


def test_a_step_that_no_host_can_make_ends_it_at_once(
    agents: Agents, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever torch raises there: with a sentence, and not anew in each minibatch."""
    kind, options = OPTIMIZERS[2]
    trainings = [Training(kind, options) for _ in range(2)]
    steps(agents, trainings, 2)
    for rank, one in enumerate(trainings):
        one.train()
        one.put(agents, rank, wrong=rank == 0)
    agents.until_safe(3)
    assert trainings[0].is_kept(agents, 1, 0)
    (text,) = told(agents)
    assert "can't make rank 0's optimizer steps again: ValueError: a parameter and its gradient" in text
    sends_whole_copies_from_now_on(agents, trainings, text)
    assert len(told(agents)) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_after_a_step_that_was_left_out_a_whole_copy_goes_once(agents: Agents) -> None:
    kind, options = OPTIMIZERS[1]
    trainings = [Training(kind, options) for _ in range(2)]
    steps(agents, trainings, 3)
    less = sent(agents, 0)
    for one in trainings:
        one.train()
    steps(agents, trainings, 1)
    assert sent(agents, 0) > less
    steps(agents, trainings, 1)
    assert sent(agents, 0) == less
    assert trainings[0].is_kept(agents, 1, 0)
    assert told(agents) == []


def test_a_copy_that_was_damaged_is_not_the_devices_fault(agents: Agents) -> None:
    kind, options = OPTIMIZERS[0]
    trainings = [Training(kind, options) for _ in range(2)]
    steps(agents, trainings, 3)
    descriptor = agents.tiers[1].memory.of(0)
    place = host_memory.data_place(1) + 2000 * 4 + 400  # behind the gradients
    (before,) = os.pread(descriptor, 1, place)
    os.pwrite(descriptor, bytes([before ^ 1]), place)
    steps(agents, trainings, 2)
    assert trainings[0].is_kept(agents, 1, 0)
    assert told(agents) == []
    assert agents.word(0, GRADIENTS) == 1
