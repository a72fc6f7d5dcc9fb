"""The optimizer step that made a state of the one before, as data: with it a host makes the step again.

A rank says it in its shard's index, beside the gradients in the shard's data. It names what the step changes;
what that was before it, whoever makes the step has to have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("SGD", "Adam", "AdamW")  # classes of torch.optim
Place = tuple[str, Sequence[int], int]  # of a tensor in a shard's data: type, shape and offset


@dataclass(frozen=True)
class Stepped:
    """One parameter.

    tensor: its name. state: what the names of its state's tensors begin with. gradient: where it lies; None
    if it has none. numbers: of its state on the host, before the step: type and value by key.
    """

    tensor: str
    state: str
    gradient: Place | None
    numbers: Mapping[str, tuple[str, float]]


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with the same hyperparameters, as they were in the step."""

    options: Mapping[str, Any]
    parameters: Sequence[Stepped]


@dataclass(frozen=True)
class OptimizerStep:
    """kind: of KINDS. elsewhere: tensors whose step other ranks have made, and which those hold alike.

    sent: so many bytes at the beginning of the data are no part of what the step makes (gradients, buffers).
    """

    kind: str
    groups: Sequence[ParameterGroup]
    elsewhere: Sequence[str]
    sent: int

    def parameters(self) -> Iterator[Stepped]:
        for group in self.groups:
            yield from group.parameters

    def gradients(self) -> Iterator[Place]:
        yield from (one.gradient for one in self.parameters() if one.gradient is not None)


def parse(content: Any) -> OptimizerStep:
    """Return what asdict has made JSON of. Raises ValueError, TypeError or KeyError for anything else."""
    groups = [
        ParameterGroup(dict(group["options"]), [_stepped(one) for one in group["parameters"]])
        for group in content["groups"]
    ]
    if content["kind"] not in KINDS:
        raise ValueError(f"no host makes the step of {content['kind']!r:.40}")
    return OptimizerStep(content["kind"], groups, [*map(str, content["elsewhere"])], int(content["sent"]))


def _stepped(content: Mapping[str, Any]) -> Stepped:
    gradient = content["gradient"]
    if gradient is not None:
        kind, shape, offset = gradient
        gradient = str(kind), [*map(int, shape)], int(offset)
    numbers = {str(key): (str(kind), float(value)) for key, (kind, value) in content["numbers"].items()}
    return Stepped(str(content["tensor"]), str(content["state"]), gradient, numbers)
