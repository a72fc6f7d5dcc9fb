"""How a save of another number of ranks, or of another layout, comes back: every rank takes its parts of it.

A save says of each tensor which part of the whole it is (state/parallel.py, cuts). So the parts that this
job's ranks hold are cut out of those that the saved job's ranks held; no tensor is put together. Parameters
and optimizer state are the same bit for bit. What a rank alone knew has no such parts: see NOTE.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from jitckpt.encoding import tree_codec
from jitckpt.errors import CheckpointError, SaveError
from jitckpt.formats import training_state, whole_step
from jitckpt.formats.parts import Parted
from jitckpt.formats.training_state import MadeOfOthers, TrainingState, public
from jitckpt.saves import folders
from jitckpt.saves.folders import SaveRecord
from jitckpt.saves.layout import Identity, Kind
from jitckpt.state import host_state, inner_tensors, parallel
from jitckpt.state.host_state import HostState
from jitckpt.state.optimizer_state import OptimizerState, put_hyperparameters
from jitckpt.state.shards import hear_first
from jitckpt.worker.restoring import completed
from jitckpt.worker.saving.history import History

SHOWN_NAMES = 5
# What a group says of how the step is computed, which suits the layout, and what it does not say.
HOW = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
NOTE = (
    "Step {step} was saved by {saved}; {here} go on from it. Parameters and optimizer state are the same bit "
    "for bit. Random numbers, `extra` and the place in the data, and buffers in which ranks differ, are on "
    "each rank those of the saved rank of its number ({beyond}); but where job.batches reads a DataLoader "
    "with a DistributedSampler the place is that of the whole job, and no sample is left out."
)
REFUSED = (
    "Step {step} in {root} is newer than what this job could go on from, and was saved by {saved}; these are "
    "{here}. Give `jitckpt run --reshard`, and it is cut anew; start the job as it was; or move that step, "
    "and what is newer, away."
)
NEVER_WITH_OTHERS = (
    "--min-hosts: this job could not go on with another number of ranks: {why}. Start it without "
    "--min-hosts: then it waits for a host in the place of one that is lost."
)
UNSETTLED = (
    " The failure came perhaps before the next minibatch. What the script does there now and then (an "
    "evaluation, a scheduler's step) may not have been done, and is not made up."
)


@dataclass(frozen=True)
class Saved:
    """The saves of one step that together are a whole state: one of each shard."""

    records: Sequence[SaveRecord]

    @property
    def step(self) -> int:
        return self.records[0].step

    @property
    def identity(self) -> Identity:
        metadata = self.records[0].metadata
        assert metadata is not None
        return metadata.identity

    def refused(self, identity: Identity) -> str:
        """Return why a job that was not told to cut anew does not go on from an older step of its own."""
        root, saved = self.records[0].path.parents[1], _in_words(self.identity)
        return REFUSED.format(step=self.step, root=root, saved=saved, here=_in_words(identity))

    def record_of(self, root: Path, kind: Kind, rank: int) -> SaveRecord | None:
        """Return a save of this job and layout, of this step; None if that is not whole."""
        record = folders.look_at(root, self.step, kind, rank)
        if record.metadata is None or _is_other(record.metadata.identity, self.identity):
            return None
        return None if record.metadata.identity.job != self.identity.job else record


def newer(root: Path, identity: Identity, step: int, store: Store | None) -> Saved | None:
    """Return the newest whole step that another layout saved, if it is newer than `step`.

    Rank 0 looks, and reads every byte; all ranks have to call it. store: None for one rank alone. Raises
    CheckpointError if this rank does not see those saves.
    """
    told = _found(root, identity, step) if identity.rank == 0 else ""
    if store is not None:
        told = hear_first(store, "save of another layout", identity.rank, told)
    if not told:
        return None
    found, ranks = json.loads(told)
    records = [folders.look_at(root, found, "rank", rank) for rank in ranks]
    unseen = [record for record in records if record.metadata is None]
    if unseen:
        raise CheckpointError(
            f"Rank {identity.rank} does not see {unseen[0].path}, from which rank 0 would go on. A save of "
            "another layout is read by all ranks: give all hosts a checkpoint directory that they share."
        )
    return Saved(records)


def _found(root: Path, identity: Identity, step: int) -> str:
    """Return the step and the ranks of its saves, as JSON; "" if there is none."""
    newer = [one.metadata for one in folders.find(root) if one.metadata is not None and one.step > step]
    if not any(_is_other(one.identity, identity) for one in newer):
        return ""  # nothing has to be read for that
    try:
        saved = Saved(whole_step.find(root))
    except CheckpointError:  # nothing is whole: then the ranks have said so already, or begin anew
        return ""
    if not _is_other(saved.identity, identity) or saved.step <= step:
        return ""
    return json.dumps([saved.step, [record.rank for record in saved.records]])


def _is_other(found: Identity, identity: Identity) -> bool:
    """Return whether a save is of another number of ranks, or of another layout."""
    return whole_step.laid_out(found) != whole_step.laid_out(identity)


def refuse_if_never_cut(host: HostState, *, has_save_function: bool) -> None:
    """Raise CheckpointError where no save of this job could be cut anew, as far as that is known by now."""
    why = [reason for one in host.optimizers if (reason := one.why_not_cut_anew()) is not None]
    cuts = {} if host.model is None else host.model.held().cuts
    if has_save_function:
        why = ["only who wrote it knows what its save function has saved"]
    elif flat := [name for name, cut in cuts.items() if cut["offsets"] is None]:
        why.append(
            f"which part of {flat[0]} a rank holds is not known (FullyShardedDataParallel's parameters)"
        )
    if why:
        raise CheckpointError(NEVER_WITH_OTHERS.format(why=why[0]))


def load(
    saved: Saved, root: Path, identity: Identity, host: HostState, history: History
) -> tuple[dict[str, Any], str]:
    """Put the state of the saves into the job's objects.

    Returns what this rank takes for its own beside it, decoded, and a sentence on what is not the same.
    Raises CheckpointError or SaveError, which name what can't be cut anew.
    """
    state = put_shared(saved, host)
    document, _ = state.first
    history.expect_scheduler_steps(host.usual_scheduler_steps(document))
    parts = _local(saved, root, identity, host)
    _complete_modules(parts, state, host)
    host.restore_local(parts)
    other = saved.identity
    beyond = f"of rank r modulo {other.world_size} from r = {other.world_size} on"
    if identity.world_size <= other.world_size:
        beyond = "those of ranks that there are no more are left out"
    told = NOTE.format(step=saved.step, saved=_in_words(other), here=_in_words(identity), beyond=beyond)
    told = " ".join([told, *host.unlike_saved(document)])
    return parts, told + (UNSETTLED if document["unsettled"] else "")


def put_shared(saved: Saved, host: HostState) -> TrainingState:
    """Put parameters, optimizers, schedulers and scaler into the job's objects; return what was saved.

    Raises CheckpointError or SaveError, which name what can't be cut anew.
    """
    state = training_state.gather(saved.records, with_made_of_others=True)
    if host.model is None:
        raise CheckpointError("Give jitckpt.init the model: without it a save can't be cut anew.")
    _put_parameters(state, host)
    document, tensors = state.first
    host.check_optimizers(document)
    for optimizer, tree in zip(host.optimizers, document["optimizers"], strict=True):
        if any(tree_codec.decode((tree["beside"] or {}).get("attributes", []), tensors)):
            raise CheckpointError(
                f"The {optimizer} was saved with attributes that the training had changed, and nobody can "
                "tell what they are in another layout."
            )
        _put_optimizer(state, optimizer, host)
    host.restore_schedules(document, tree_codec.decode(document["progress"], tensors))
    gradients = state.gradients
    host.restore_gradients(
        {name: gradients[called] for name in host.trained() if (called := public(name)) in gradients}
    )
    return state


def _in_words(identity: Identity) -> str:
    of = f" laid out as '{identity.layout}'" if identity.layout else ""
    return f"{identity.world_size} rank{'s' if identity.world_size != 1 else ''}{of}"


def _put_parameters(state: TrainingState, host: HostState) -> None:
    assert host.model is not None
    held = host.model.held()
    saved: dict[str, Tensor] = {}
    for name, tensor in held.parameters.items():
        cut = held.cuts.get(name)
        whole = cut["shape"] if cut is not None else list(tensor.shape)
        part = _part(state.model.get(public(name)), f"the parameter {name}", whole, cut, tensor)
        saved[name] = part
    own = {public(name) for name in (*held.parameters, *held.aliases)}
    others = sorted(state.model.keys() - own - _module_names(host))
    if others and not host.model.has_stages:
        raise CheckpointError(
            f"The save holds {', '.join(others[:SHOWN_NAMES])}, which the model has not: build it as it was."
        )
    host.model.restore_parameters(saved, [name for name in saved if public(name) in state.frozen])


def _part(found: Any, what: str, whole: Sequence[int], cut: Mapping[str, Any] | None, here: Tensor) -> Tensor:
    """Return this rank's part of a tensor of this shape, laid out as `here`, which has its shape and type."""
    if not isinstance(found, Parted):
        raise CheckpointError(f"The save has not {what}: build the model and its optimizers as they were.")
    if found.shape != tuple(whole) or found.dtype != here.dtype:
        raise CheckpointError(
            f"The save has {what} as {list(found.shape)} of {found.dtype}; here it is {list(whole)} of "
            f"{here.dtype}."
        )
    offsets = (0,) * len(whole) if cut is None else cut["offsets"]
    if offsets is None:
        raise CheckpointError(
            f"Which part of {what} this rank holds is not known: that is so of the flat parameters of "
            "FullyShardedDataParallel. Shard the model with fully_shard (FSDP2)."
        )
    part = torch.empty_strided(here.shape, here.stride(), dtype=here.dtype, device="cpu")
    return part.copy_(found.part(offsets, here.shape))


def _put_optimizer(state: TrainingState, optimizer: OptimizerState, host: HostState) -> None:
    if (reason := optimizer.why_not_cut_anew()) is not None:
        raise CheckpointError(f"The {optimizer} can't take a save of another layout: {reason}.")
    assert host.model is not None
    names = host.model.names()
    of_all = parallel.own_state(optimizer.optimizer)
    of_all.clear()
    groups = {name: group for group in state.groups for name in group["params"]}
    written: dict[int, Tensor] = {}
    for own in optimizer.optimizer.param_groups:
        called = [public(names[id(parameter)].removeprefix("model.")) for parameter in own["params"]]
        saved = [groups[name] for name in called if name in groups]
        if len(saved) != len(called) or any(one is not saved[0] for one in saved):
            raise CheckpointError(
                f"The {optimizer} has {', '.join(called[:SHOWN_NAMES])} in other groups than the save: build "
                "it as it was."
            )
        if saved:
            kept = {key: value for key, value in saved[0].items() if key not in HOW}
            put_hyperparameters(own, kept, written)
        for name, parameter in zip(called, own["params"], strict=True):
            for key, value in state.optimizer_state.get(name, {}).items():
                on_device = own.get("capturable") or own.get("fused")
                of_all[parameter][key] = _state_of(value, f"{key} of {name}", parameter, bool(on_device))
    optimizer.look_again()


def _state_of(value: Any, what: str, parameter: Tensor, numbers_on_device: bool) -> Any:
    """Return what an optimizer keeps of a parameter, as it keeps it here."""
    if isinstance(value, MadeOfOthers):
        parts = {
            name: part.whole().to("cpu" if name in value.on_host else parameter.device, copy=True)
            for name, part in value.parts.items()
        }
        return inner_tensors.made(value.description, "", parts)
    if not isinstance(value, Parted):
        return value
    device = parameter.device
    if value.shape == tuple(parameter.shape):
        how = parallel.placement(parameter)
        local = parallel.local(parameter)
        here = torch.empty_strided(local.shape, local.stride(), dtype=value.dtype, device="meta")
        part = _part(value, what, value.shape, how, here)
        if value.shape or numbers_on_device:
            part = part.to(device)
        return parallel.placed(part, parameter, how)
    if value.shape and parallel.is_distributed(parameter):
        raise CheckpointError(
            f"What the optimizer keeps as {what} has not the parameter's shape, so nobody can tell which "
            "part of it belongs to which part of the parameter."
        )
    whole = value.whole()
    return whole.to(device) if value.shape or numbers_on_device else whole


def _local(saved: Saved, root: Path, identity: Identity, host: HostState) -> dict[str, Any]:
    """Return what the saved rank of this rank's number alone knew; what it did not keep is of another."""
    rank = identity.rank % saved.identity.world_size
    first = folders.read(saved.records[0])
    own = None
    tensors = first.tensors
    kinds: tuple[Kind, ...] = ("rank", "local")
    for record in (saved.record_of(root, kind, rank) for kind in kinds):
        if own is None and record is not None and folders.verify(record) is None:
            found = folders.read(record)
            own, tensors = found.document["local"], tensors | found.tensors
    return host_state.local_parts(completed(own, first.document["local"]), tensors, host.device)


def _module_names(host: HostState) -> set[str]:
    assert host.model is not None
    extra = {f"{name}._extra_state".lstrip(".") for name in host.model.extra_state_names()}
    return {public(name) for name in (*host.model.buffers(), *extra)}


def _complete_modules(parts: dict[str, Any], state: TrainingState, host: HostState) -> None:
    """Have parts name the buffers and extra states that the model has here: stages have others."""
    assert host.model is not None
    try:
        parts["buffers"] = {
            name: _of_model(parts.get("buffers", {}), name, public(name), state)
            for name in host.model.buffers()
        }
        parts["modules"] = {
            name: _of_model(parts.get("modules", {}), name, public(f"{name}._extra_state".lstrip(".")), state)
            for name in host.model.extra_state_names()
        }
    except KeyError as error:
        raise SaveError(f"The save has not {error}, which the model has: build it as it was.") from error


def _of_model(own: Mapping[str, Any], name: str, called: str, state: TrainingState) -> Any:
    return own[name] if name in own else state.model[called]
