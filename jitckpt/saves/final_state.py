"""What a rank ended with, as digests by part: two runs of a job are equal bit for bit if these are."""

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from jitckpt.encoding import tree_codec
from jitckpt.saves import folders
from jitckpt.state.host_state import HostState
from jitckpt.system import regular_file

FOLDER = "final-state"
RANDOM = "random numbers"
CHUNK_BYTES = 16 << 20
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)


@dataclass(frozen=True)
class FinalState:
    """The optimizer steps done, a SHA-256 of each part, and the values of unknown kinds that are in none."""

    step: int
    digests: dict[str, str]
    left_out: tuple[str, ...]


class Digest:
    """A SHA-256 of nested values: of tensors type, shape and bytes; the order of a dict does not count."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.left_out: list[str] = []

    def add(self, value: object, name: str) -> None:
        local = getattr(value, "to_local", None)  # a DTensor's own part
        if callable(local):
            value = local()
        if isinstance(value, numpy.ndarray | numpy.generic):
            value = torch.from_numpy(numpy.array(value, copy=True))
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, Mapping):
            self._word(f"dict {len(value)}")
            for key in sorted(value, key=repr):
                self._word(repr(key))
                self.add(value[key], f"{name}.{key}")
        elif isinstance(value, Set):
            self._word(f"set {sorted(map(repr, value))}")
        elif isinstance(value, list | tuple) or type(value).__name__ == "deque":
            self._word(f"list {len(value)}")  # type: ignore[arg-type]
            for index, item in enumerate(value):  # type: ignore[arg-type, var-annotated]
                self.add(item, f"{name}.{index}")
        elif isinstance(value, _PLAIN):
            self._word(f"{type(value).__name__} {value!r}")
        else:
            self._word(f"unknown {type(value).__qualname__}")
            self.left_out.append(f"{name} ({type(value).__qualname__})")

    def text(self) -> str:
        return self._hash.hexdigest()

    def _word(self, text: str) -> None:
        # Its length first, so that no two series of words run into the same bytes.
        data = text.encode(errors="surrogatepass")
        self._hash.update(len(data).to_bytes(8, "little") + data)

    def _add_tensor(self, tensor: Tensor) -> None:
        self._word(f"tensor {tensor.dtype} {tuple(tensor.shape)}")
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), CHUNK_BYTES):
            self._hash.update(flat[start : start + CHUNK_BYTES].cpu().numpy().data)


def of(step: int, host: HostState) -> FinalState:
    """Return the digests of all that a job keeps and of its optimizers' parameters; waits for the device."""
    optimizers = [_own_part(state.optimizer) for state in host.optimizers]
    parts: dict[str, Any] = {
        "parameters": [
            {} if host.model is None else host.model.parameters(),
            [[group["params"] for group in optimizer.param_groups] for optimizer in optimizers],
        ],
        "buffers": None if host.model is None else [host.model.buffers(), host.model.extra_states()],
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "schedulers": [state.scheduler.state_dict() for state in host.schedulers],
        "scaler": None if host.scaler is None else host.scaler.state_dict(),
        "extra": None if host.extra is None else host.extra.state_dict(),
        **_generators(host),
    }
    digests, left_out = {}, []
    for name, part in parts.items():
        digest = Digest()
        digest.add(part, name)
        digests[name] = digest.text()
        left_out += digest.left_out
    return FinalState(step, digests, tuple(left_out))


def _own_part(optimizer: Optimizer) -> Optimizer:
    """Return what holds this rank's part: ZeroRedundancyOptimizer's state_dict wants all ranks' together."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _generators(host: HostState) -> dict[str, Any]:
    """Return the random number generators apart: a script that seeds one may leave another to chance."""
    captured = host.random.capture()
    state = tree_codec.decode(captured.tree, captured.tensors)
    python, of_torch = state["raw"].split(state["sizes"])
    torchs = [of_torch, state["device"]]
    own = {"Python's": [state["python"], python], "numpy's": state["numpy"], "torch's": torchs}
    return {f"{RANDOM}, {name}": value for name, value in own.items()}


def write(folder: Path, rank: int, state: FinalState) -> None:
    """Put it where `read` finds it; what the rank wrote before a restart is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    folders.write_by_rename(folder / f"rank-{rank:05d}.json", json.dumps(asdict(state)).encode())


def read(folder: Path) -> dict[int, FinalState]:
    """Return the final states of all ranks that came to their end."""
    found = {}
    for path in sorted(folder.glob("rank-*.json")):
        content = json.loads(regular_file.content_of(path))
        found[int(path.stem.removeprefix("rank-"))] = FinalState(
            content["step"], content["digests"], tuple(content["left_out"])
        )
    return found
