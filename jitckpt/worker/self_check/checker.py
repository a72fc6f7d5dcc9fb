"""After the first steps: is what a save would hold enough to bring this training back, and do replicas agree?

What a save would hold is encoded and restored into copies of the objects as they were when jitckpt.init was
called (fresh_copy.py), and these are compared with the training's (self_check.py). The training's thread
notes how its objects look, and has the device copy their values beside its work; another does all else.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from jitckpt.encoding import tensor_file
from jitckpt.encoding.tree_codec import Encoded, Json, to_json
from jitckpt.state import parallel
from jitckpt.state.host_state import HostState, Shared
from jitckpt.state.model_state import COUNT
from jitckpt.state.unwrapping import unwrapped
from jitckpt.wire import protocol
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.host_copies import HostCopies
from jitckpt.worker.saving.saver import document_of
from jitckpt.worker.self_check import comparison
from jitckpt.worker.self_check.comparison import (
    BUFFER,
    NON_PERSISTENT,
    PARAMETER,
    STATE,
    Described,
    Difference,
    Snapshot,
    TensorLeaf,
    TooManyError,
    torchs_own,
)
from jitckpt.worker.self_check.fresh_copy import (
    MOST_SAMPLED,
    STATE_OF_A_PARAMETER,
    FreshCopy,
    parameters_of,
    worth_looking_at,
)
from jitckpt.worker.self_check.not_given import NotGiven

CHECKED_STEPS = (2, 6)  # counted from this start
SAMPLED_BYTES = 16 << 20
PIECE_BYTES = 4 << 20  # of the file that is tried
SMALL_BYTES = 1 << 20  # of a tensor on the host that is copied in the training's thread
LOOK_SECONDS = 0.01
LAST_SECONDS = 1.0  # for what the thread is in the middle of
REASON = "self-check"
SCALER = "scaler"
WRAPPED = "nothing was restored into copies of the objects: an optimizer's state is made of other tensors"
# post(names and digests): what the first replica to come has posted, and its rank; None if that is this one.
Post = Callable[[int, Mapping[str, str]], tuple[int, Mapping[str, str]] | None]
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


@dataclass
class _Begun:
    """A check of which the host's part is complete only as the next minibatch begins."""

    step: int
    copies: int  # their number
    held: dict[str, TensorLeaf | str]
    where: dict[str, Place]  # of the described tensors
    values: dict[Place, Tensor]  # of them, on the host; copies are there later
    save: dict[str, Tensor]  # what a save would hold
    parameters: dict[str, Place]  # where they lay: the next forward pass may set their `data` anew
    local: dict[str, Json]
    shared: set[str]
    seconds: float  # of the training's thread
    document: dict[str, Json] = field(default_factory=dict)
    not_given: list[Difference] = field(default_factory=list)


class SelfChecker:
    """Told by the training's thread; raises nothing, and switches itself off with a sentence."""

    def __init__(
        self,
        *,
        model: nn.Module,
        host: HostState,
        history: History,
        rank: int,
        full: bool,
        write_word: Callable[[int, int, int], None],
        post: Post | None,
        may_say: Callable[[], bool],
        found_scaler: Callable[[], object],
        report: Callable[[protocol.WorkerMessage], None],
        warn: Callable[[str], None],
    ) -> None:
        """full: look at all tensors, not only at some small ones of each kind.

        may_say: whether this rank is the one to warn of replicas that differ. found_scaler: one that is used,
        given or not.
        """
        self._host, self._history, self._rank = host, history, rank
        self._post, self._may_say, self._report, self._warn = post, may_say, report, warn
        self._found_scaler = found_scaler
        self._optimizers = [state.optimizer for state in host.optimizers]
        self._schedulers = [state.scheduler for state in host.schedulers]
        self._skipped: list[str] = []
        self._fresh: FreshCopy | None = None
        self._module = unwrapped(model)
        limit = None if full else SAMPLED_BYTES
        try:
            self._fresh = FreshCopy(
                model=model,
                optimizers=host.given,
                schedulers=self._schedulers,
                scaler=host.scaler,
                kept=[*host.kept.schedulers],
                limit=limit,
            )
            self._names, self._sampled = self._fresh.names, self._fresh.sampled
            # What functions close over can't be copied: it is compared with what it is now.
            self._initial = self._describe_all()
        except Exception as error:  # a training is not to fail for its check
            self._fresh = None
            self._skipped.append(f"nothing was restored into copies of the objects: {error}")
            own = parallel.parameters(self._module)
            self._names = {id(parameter): name for name, parameter in own.items()}
            self._sampled = _sample(own, limit)
            self._initial = Described()
        self._copies = HostCopies(host.device, write_word)
        self._first: int | None = None
        self._begun: _Begun | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._kept: dict[str, str] = {}  # digests of non-persistent buffers in the first check
        self._not_given: NotGiven | None = None
        self._named: set[str] = set()
        self._left = len(CHECKED_STEPS)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to be done by the training's thread."""
        return self._left == 0 and self._begun is None

    def is_pending(self, step: int) -> bool:
        """Whether the state after `step` is being copied."""
        return self._begun is not None and self._begun.step == step

    def has_named(self, optimizer: object) -> bool:
        """Whether it has said of this optimizer that it was not given."""
        return self._not_given is not None and optimizer in self._not_given.named

    def step_ended(self, step: int, local: Callable[[], Mapping[str, Encoded]], shared: Shared) -> None:
        """Begin a check of the state after `step`, if one is due."""
        if self._first is None:
            self._first = step
        due = (
            step - self._first + 1 >= CHECKED_STEPS[len(CHECKED_STEPS) - self._left] if self._left else False
        )
        if not due or (self._thread is not None and self._thread.is_alive()):
            return
        self._left -= 1
        begun = time.monotonic()
        try:
            self._begun = self._begin(step, local(), shared)
            self._begun.seconds = time.monotonic() - begun
        except Exception as error:  # not the training's affair
            self._give_up(error)

    def step_begins(self) -> None:
        """The next optimizer step changes what is being copied."""
        self._copies.step_begins()

    def settled(self, step: int, changed: Callable[[], Mapping[str, Encoded]] | None = None) -> None:
        """The host's state after `step` is complete.

        changed: returns the rank's local state, where parameters or optimizer state were changed since the
        optimizer step (masters copied back): what was copied then may be either, so it is copied once more.
        """
        begun = self._begun
        if begun is None or begun.step != step:
            return
        self._begun = None
        started = time.monotonic()
        try:
            if changed is not None:
                begun = self._begin(step, changed(), self._history.shared(step))
            snapshot = self._history.snapshot(step)
            if snapshot is None:
                return
            begun.document, tensors = document_of(
                self._host, self._history, snapshot, step=step, reason=REASON, local=begun.local
            )
            begun.save |= tensors
            described = self._describe_progress()
            described.add(begun.document["scaler"], SCALER)
            begun.held |= described.texts
            begun.held |= comparison.leaves(described.tensors, _small(described.tensors))
            begun.shared |= described.shared
            begun.not_given = self._look_for_others(begun)
            begun.seconds += time.monotonic() - started
            self._thread = threading.Thread(
                target=self._run, args=(begun,), name="jitckpt-self-check", daemon=True
            )
            self._thread.start()
        except Exception as error:
            self._give_up(error)

    def wait(self, seconds: float) -> None:
        """Wait for a check that is being made."""
        if self._thread is not None:
            self._thread.join(seconds)

    def stop(self) -> None:
        """Give up a check that is being made: no thread may be inside of torch as Python ends."""
        self._stopping.set()
        self.wait(LAST_SECONDS)

    def _begin(self, step: int, local: Mapping[str, Encoded], shared: Shared) -> _Begun:
        described = self._describe_state()
        save = {name: tensor for part in local.values() for name, tensor in part.tensors.items()}
        for optimizer in shared.optimizers:
            save |= optimizer.device
        own = {name: parallel.local(tensor) for name, tensor in described.tensors.items()}
        where = {name: _place(tensor) for name, tensor in own.items()}
        values = {_place(tensor): tensor.clone() for tensor in own.values() if _is_small(tensor)}
        parameters = self._host.parameters()
        buffers: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        copied: set[Place] = set()
        for name, tensor in own.items():
            if tensor.device.type != "cpu" and where[name] not in copied:
                copied.add(where[name])
                (buffers if name.startswith((BUFFER, NON_PERSISTENT)) else others)[name] = tensor
        number, copies = self._copies.begin(buffers, others)
        held: dict[str, TensorLeaf | str] = {**described.texts}
        for name, leaf in comparison.leaves(own, {}).items():
            held[name] = replace(leaf, requires_grad=described.tensors[name].requires_grad)
        return _Begun(
            step=step,
            copies=number,
            held=held,
            where=where,
            values=values | {where[name]: copy for name, copy in copies.items()},
            save=save | parameters,
            parameters={name: _place(tensor) for name, tensor in parameters.items()},
            local={
                "final": True,
                "trees": {name: part.tree for name, part in local.items()},
                "missing": [],
                "left_out": [],
            },
            shared=described.shared,
            seconds=0.0,
        )

    def _run(self, begun: _Begun) -> None:
        """The checking thread."""
        started = time.monotonic()
        try:
            while not self._copies.are_there(begun.copies):
                if self._stopping.wait(LOOK_SECONDS):
                    return
            held = self._with_values(begun)
            if self._stopping.is_set():
                return
            differences = self._restore_and_compare(begun, held)
            differences += self._changing_buffers(held) + begun.not_given
            if self._stopping.is_set():
                return
            apart = self._compare_with_replicas(begun.step, held)
        except Exception as error:
            self._give_up(error)
            return
        new = [one for one in differences if one.name not in self._named]
        self._named |= {one.name for one in differences}
        clauses = comparison.sentences(new)
        if clauses:
            self._warn(
                f"A save of step {begun.step} would not bring this training back as it is: "
                f"{'; '.join(clauses)}. A restart would go on otherwise than an undisturbed run. Keep it in "
                "what state_dict() says or in jitckpt.init(extra=...). (self_check=False silences this.)"
            )
        if apart and self._may_say():
            self._warn(apart)
        self._report(
            protocol.SelfCheck(
                rank=self._rank,
                step=begun.step,
                tensors=len(begun.where),
                bytes=sum(value.nbytes for value in begun.values.values()),
                seconds=time.monotonic() - started,
                held_up=begun.seconds,
                differences=[*clauses, *([apart] if apart else [])],
                skipped=self._skipped,
                kept=self._host.kept_names(),
            )
        )

    def _with_values(self, begun: _Begun) -> dict[str, TensorLeaf | str]:
        held = dict(begun.held)
        for name, place in begun.where.items():
            leaf, value = held[name], begun.values.get(place)
            if self._stopping.is_set():
                break
            if isinstance(leaf, TensorLeaf) and value is not None:
                held[name] = replace(leaf, digest=comparison.digest(value))
        return held

    def _restore_and_compare(self, begun: _Begun, held: Snapshot) -> list[Difference]:
        save = _as_saved(begun)
        differences = changed_by_a_file(save)
        fresh = self._fresh
        model = self._host.model
        if fresh is None or (model is not None and any(model.structure())):  # which was said as it came
            return differences
        document = json.loads(to_json(begun.document))
        if any(tree["wrapped"] for tree in document["optimizers"]):
            if WRAPPED not in self._skipped:
                self._skipped.append(WRAPPED)
            return differences
        try:
            fresh.restore(document, save)
        except Exception as error:  # a restart would raise it, too
            return [*differences, Difference(f"{error!r:.300}", "all of it can't be restored")]
        described = _describe_state(fresh.copy, fresh.optimizers, fresh.names, fresh.sampled)
        progress = _describe_progress(fresh.optimizers, fresh.schedulers)
        progress.add(None if fresh.scaler is None else fresh.scaler.state_dict(), SCALER)
        tensors = described.tensors | progress.tensors
        restored: dict[str, TensorLeaf | str] = {**described.texts, **progress.texts}
        restored |= comparison.leaves(tensors, _restored(tensors))
        initial = {name: self._initial.texts[name] for name in begun.shared if name in self._initial.texts}
        return differences + comparison.compare(held, restored | initial)

    def _changing_buffers(self, held: Snapshot) -> list[Difference]:
        """Return the buffers that no save holds and that have changed since the last check."""
        now = {
            name: leaf.digest
            for name, leaf in held.items()
            if isinstance(leaf, TensorLeaf) and leaf.digest and name.startswith(NON_PERSISTENT)
        }
        saved = set() if self._host.model is None else {*self._host.model.buffers()}
        changed = [
            name
            for name, value in now.items()
            if self._kept.get(name, value) != value and name.removeprefix(NON_PERSISTENT) not in saved
        ]
        self._kept = now
        return [Difference("changes in the training, and no save holds it", name) for name in changed]

    def _look_for_others(self, begun: _Begun) -> list[Difference]:
        """Return what trains along, but jitckpt.init does not know of."""
        if self._not_given is None:
            fresh = self._fresh
            ours = [] if fresh is None else [*fresh.copy.modules(), *fresh.optimizers]
            self._not_given = NotGiven(self._host, self._module, ours)
        extra = {name: one for name, one in begun.save.items() if name.startswith("extra")}
        return self._not_given.look(extra, begun.local["trees"].get("extra"), self._found_scaler())

    def _compare_with_replicas(self, step: int, held: Snapshot) -> str:
        """Return the sentence about replicas that differ, if they do."""
        if self._post is None:
            return ""
        own = {
            name: leaf.digest
            for name, leaf in held.items()
            if isinstance(leaf, TensorLeaf) and leaf.digest and name.startswith((PARAMETER, STATE))
        }
        first = self._post(step, own)
        if first is None:
            return ""
        rank, others = first
        names = comparison.differing(own, others)
        if not names:
            return ""
        return (
            f"Rank {self._rank} and rank {rank} are taken for replicas, but after step {step} they hold "
            f"different values of {comparison.some(names)}: after a failure the others go on from what one "
            "of them saves. Give jitckpt.init shard and shards if they are to differ."
        )

    def _describe_state(self) -> Described:
        return _describe_state(self._module, self._optimizers, self._names, self._sampled)

    def _describe_progress(self) -> Described:
        return _describe_progress(self._optimizers, self._schedulers)

    def _describe_all(self) -> Described:
        state, progress = self._describe_state(), self._describe_progress()
        return Described({}, state.texts | progress.texts, state.shared | progress.shared)

    def _give_up(self, error: Exception) -> None:
        self._left, self._begun = 0, None
        text = str(error) if isinstance(error, TooManyError) else repr(error)
        self._report(
            protocol.SelfCheck(
                self._rank, 0, 0, 0, 0.0, 0.0, [], [*self._skipped, f"it has failed: {text:.500}"]
            )
        )


def _describe_state(
    module: nn.Module, optimizers: list[Optimizer], names: Mapping[int, str], sampled: set[str]
) -> Described:
    """Describe what an optimizer step leaves."""
    found = Described()
    parameters = _parameters(module, optimizers, names)
    if put := {id(one): name for name, one in reversed(parameters.items()) if id(one) not in names}:
        names = {**names, **put}  # in another's place since jitckpt.init was called
    for name, parameter in parameters.items():
        if name in sampled:
            found.add_tensor(PARAMETER + name, parameter)
    for prefix, part in module.named_modules():
        for key, buffer in part._buffers.items():
            name = f"{prefix}.{key}".lstrip(".")
            # An average is updated behind the step, and how often comes with what follows it.
            is_count = key == COUNT and isinstance(part, AveragedModel)
            if buffer is not None and name in sampled and not is_count:
                kind = NON_PERSISTENT if key in part._non_persistent_buffers_set else BUFFER
                found.add_tensor(kind + name, buffer)
    for index, optimizer in enumerate(optimizers):
        for place, (parameter, state) in enumerate(parallel.own_state(optimizer).items()):
            known = names.get(id(parameter))
            if known is None or known in sampled:
                found.add(state, f"{STATE}optimizer {index}: {known or place}", known=names.keys())
        own = {name: value for name, value in vars(optimizer).items() if name not in torchs_own()}
        found.add(own, f"optimizer {index}", known=names.keys(), optimizers=True)
    return found


def _describe_progress(optimizers: list[Optimizer], schedulers: list[Any]) -> Described:
    """Describe what may still change until the next minibatch begins."""
    found = Described()
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            own = {name: value for name, value in group.items() if name != "params"}
            found.add(own | {"parameters": len(group["params"])}, f"optimizer {index}, group {number}")
    known = {*map(id, optimizers)}
    for index, scheduler in enumerate(schedulers):
        found.add(scheduler, f"scheduler {index}", known=known)
    return found


def _parameters(
    module: nn.Module, optimizers: list[Optimizer], names: Mapping[int, str]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    if any(id(parameter) not in names for parameter in found.values()):
        found = parallel.parameters(module)
    known = {*map(id, found.values())}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            if id(parameter) not in known and id(parameter) in names:
                found[names[id(parameter)]] = parameter
    return found


def _as_saved(begun: _Begun) -> dict[str, Tensor]:
    """Return what a save would hold, on the host; what was not copied has no values."""
    found = {}
    for name, tensor in begun.save.items():
        place = begun.parameters.get(name) or _place(tensor)
        value = tensor if tensor.device.type == "cpu" else begun.values.get(place)
        found[name] = tensor.to("meta") if value is None else value
    return found


def changed_by_a_file(tensors: Mapping[str, Tensor], piece: int = PIECE_BYTES) -> list[Difference]:
    """Write tensors as a save's file and read that, at most so many bytes at a time, or one tensor."""
    differences: list[Difference] = []
    waiting: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            continue
        if waiting and size + tensor.nbytes > piece:
            differences += _differ_in_a_file(waiting)
            waiting, size = {}, 0
        waiting[name], size = tensor, size + tensor.nbytes
    return differences + _differ_in_a_file(waiting)


def _differ_in_a_file(tensors: Mapping[str, Tensor]) -> list[Difference]:
    file = bytearray()
    tensor_file.write(file.extend, tensors)
    read = tensor_file.read(bytes(file))
    return [
        Difference("not read from a file as it was written", name)
        for name, value in tensors.items()
        if (value.dtype, value.shape) != (read[name].dtype, read[name].shape)
        or comparison.digest(value) != comparison.digest(read[name])
    ]


def _sample(tensors: Mapping[str, Tensor], limit: int | None) -> set[str]:
    """Return the names of those that take no more than so many bytes with their optimizer state."""
    found: set[str] = set()
    size = 0
    for name in worth_looking_at(tensors):
        size += (1 + STATE_OF_A_PARAMETER) * parallel.held_bytes(tensors[name])
        if limit is not None and (size > limit or len(found) == MOST_SAMPLED):
            break
        found.add(name)
    return found


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _restored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose values a restart has to bring back, as far as they are known."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.device.type == "cpu" and not name.startswith(NON_PERSISTENT)
    }


def _is_small(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes <= SMALL_BYTES


def _small(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if _is_small(tensor)}
