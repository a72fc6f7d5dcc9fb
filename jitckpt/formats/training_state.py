"""A job's whole state, by the names that torch's own state dicts have, from one save of each shard."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import SaveError
from jitckpt.formats import parts
from jitckpt.formats.parts import Parted, Piece
from jitckpt.saves import folders
from jitckpt.saves.folders import SavedState, SaveRecord
from jitckpt.state import inner_tensors
from jitckpt.state.host_state import local_parts
from jitckpt.state.optimizer_state import on_host

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # which torch's state dicts leave out of names, too
_MODEL = "model."
SHOWN_NAMES = 5


@dataclass
class TrainingState:
    """What torch.distributed.checkpoint.state_dict.get_state_dict would return, and what is beside it.

    model: parameters, buffers and extra states of modules. optimizers: state by the parameters' names, and
    groups of all optimizers. schedulers, scaler: their state dicts. frozen: parameters that are not trained.
    gradients: the kinds of those that are there (state/zero_gradients.py), by the names in a save.
    first: the document of the first shard's save, and its tensors. notes: sentences on what is not there.
    """

    step: int
    model: dict[str, Any]
    optimizer_state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    schedulers: list[Any]
    scaler: Any
    frozen: frozenset[str]
    gradients: Mapping[str, int]
    first: tuple[Json, Mapping[str, Tensor]]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class MadeOfOthers:
    """A tensor of an optimizer's state that is made of others: as inner_tensors describes it, and these.

    parts: by their names behind the tensor's. on_host: those that lay there.
    """

    description: Json
    parts: Mapping[str, Parted]
    on_host: frozenset[str]


class _Shard:
    """One shard's save, decoded."""

    def __init__(self, record: SaveRecord) -> None:
        if record.metadata is None or record.metadata.saver != "builtin":
            raise SaveError(
                f"{record.path} was written by the job's own save function, whose files only that can read."
            )
        saved: SavedState = folders.read(record)
        self.record, self.document, self.tensors = record, saved.document, saved.tensors
        if "cuts" not in self.document:
            raise SaveError(
                f"{record.path} was written by a jitckpt that did not note how tensors are cut and which "
                "share memory: go on from it once with this one, and export the next save."
            )
        self.progress = tree_codec.decode(self.document["progress"], self.tensors)
        self.local = local_parts(self.document["local"], self.tensors, None)


def gather(
    records: Sequence[SaveRecord], *, with_optimizers: bool = True, with_made_of_others: bool = False
) -> TrainingState:
    """Return the state that these saves hold, one of each shard; tensors are mapped, not read.

    with_made_of_others: whoever asks knows MadeOfOthers, for which torch's state dicts have no name.
    Raises SaveError, which names the tensor, if the saves don't tell how to put one together.
    """
    shards = [_Shard(record) for record in records]
    first = shards[0]
    state = TrainingState(
        step=records[0].step,
        model=_parameters(shards),
        optimizer_state={},
        groups=[],
        schedulers=first.progress["schedulers"],
        scaler=first.document["scaler"],
        frozen=frozenset(public(name) for shard in shards for name in shard.document["frozen"]),
        gradients={
            public(name): kind
            for shard in shards
            for name, kind in shard.document.get("gradients", {}).items()
        },
        first=(first.document, first.tensors),
    )
    _add_buffers(state, shards)
    if with_optimizers:
        for number in range(len(first.document["optimizers"])):
            _refuse_made_of_others(shards, number, knows_whole=with_made_of_others)
            _add_optimizer(state, shards, number)
    return state


def public(name: str) -> str:
    """Return what torch's state dicts call a parameter that the save calls so."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _parameters(shards: Sequence[_Shard]) -> dict[str, Any]:
    held: dict[str, list[tuple[Tensor, Json]]] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name.startswith(_MODEL):
                own = name.removeprefix(_MODEL)
                held.setdefault(own, []).append((tensor, shard.document["cuts"].get(own)))
    result: dict[str, Any] = {
        public(name): _joined(f"the parameter {name}", pieces) for name, pieces in held.items()
    }
    for shard in shards:
        for alias, name in shard.document["aliases"].items():
            result[public(alias)] = result[public(name)]
    return result


def _joined(name: str, pieces: Sequence[tuple[Tensor, Json]]) -> Parted:
    """Return a tensor from the parts that the shards hold, each with how it is cut; None: it is whole."""
    how = next((cut for _, cut in pieces if cut is not None), None)
    if how is None:
        whole = pieces[0][0]
        if not all(parts.same(whole, other) for other, _ in pieces[1:]):
            raise SaveError(
                f"The shards hold different values of {name}, and no save says which part each is: they "
                "may be of pipeline stages that call their layers alike, or cut by hand. So it can't be put "
                "together."
            )
        return Parted(tuple(whole.shape), whole.dtype, (Piece(whole, (0,) * whole.dim()),))
    if any(cut is None or cut["offsets"] is None or cut["shape"] != how["shape"] for _, cut in pieces):
        raise SaveError(
            f"No save says where each shard's part of {name} begins: that is known of DTensors (FSDP2, "
            "tensor parallel) alone, not of the flat parameters of FullyShardedDataParallel."
        )
    return parts.joined(name, how["shape"], [Piece(tensor, tuple(cut["offsets"])) for tensor, cut in pieces])


def _add_buffers(state: TrainingState, shards: Sequence[_Shard]) -> None:
    """Take what modules keep beside parameters from the first shard that has it: ranks may differ in that."""
    differ = []
    for shard in shards:
        for name, buffer in shard.local.get("buffers", {}).items():
            known = state.model.setdefault(public(name), buffer)
            if known is not buffer and not (isinstance(known, Tensor) and parts.same(known, buffer)):
                differ.append(name)
        for name, extra in shard.local.get("modules", {}).items():
            state.model.setdefault(public(f"{name}._extra_state".lstrip(".")), extra)
    if differ:
        rank = shards[0].record.rank
        state.notes.append(
            f"Ranks differ in buffers, and those of rank {rank} are taken: "
            f"{', '.join(sorted(set(differ))[:SHOWN_NAMES])}."
        )


def _add_optimizer(state: TrainingState, shards: Sequence[_Shard], number: int) -> None:
    """Add what one optimizer keeps, of all its parameters, and its groups."""
    held: dict[tuple[str, str], list[tuple[Tensor, Json]]] = {}
    groups: list[dict[str, Any]] = []
    for shard in shards:
        tree = shard.document["optimizers"][number]
        _refuse_others(tree, number, shard)
        names = [[public(name.removeprefix(_MODEL)) for name in group] for group in tree["names"]]
        flat = [name for group in names for name in group]
        for place, values in on_host(tree, shard.tensors, None).items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    held.setdefault((flat[place], key), []).append((value, None))
                else:
                    state.optimizer_state.setdefault(flat[place], {})[key] = value
        for place, key, tensor, how in _on_device(tree, shard.tensors, f"optimizer.{number}.state."):
            held.setdefault((flat[place], key), []).append((tensor, how))
        _add_groups(groups, names, shard.progress["groups"][number])
    for (name, key), pieces in held.items():
        state.optimizer_state.setdefault(name, {})[key] = _joined(f"{key} of {name} in the optimizer", pieces)
    _put_together(state, shards[0], number)
    state.groups += groups


def _put_together(state: TrainingState, shard: _Shard, number: int) -> None:
    """Put tensors that are made of others in the place of these."""
    tree, prefix = shard.document["optimizers"][number], f"optimizer.{number}.state."
    flat = [public(name.removeprefix(_MODEL)) for group in tree["names"] for name in group]
    for name, description in tree.get("wrapped", {}).items():
        place, key = name.removeprefix(prefix).split(".", 1)
        own, on_host = state.optimizer_state[flat[int(place)]], set()
        parts: dict[str, Parted] = {}
        for called in inner_tensors.names_in(description, key):
            parts[called.removeprefix(key)] = own.pop(called)
            if f"{prefix}{place}.{called}" not in shard.tensors.keys() | tree["same"].keys():
                on_host.add(called.removeprefix(key))
        own[key] = MadeOfOthers(description, parts, frozenset(on_host))


def _refuse_made_of_others(shards: Sequence[_Shard], number: int, *, knows_whole: bool) -> None:
    for shard in shards:
        tree = shard.document["optimizers"][number]
        wrapped = tree.get("wrapped", {})
        is_shared = not {*tree["same"], *tree["same"].values()}.isdisjoint(wrapped)
        for name, description in wrapped.items():
            if knows_whole and not (name in tree["placements"] or is_shared):
                continue
            raise SaveError(
                f"{name} is a {description['class'][1]}, which is made of other tensors: nobody can tell "
                "which part of these belongs to which part of a parameter, and torch's state dicts have no "
                "name for them. Export the model alone (--model-only), or go on with as many ranks as before."
            )


def _on_device(
    tree: Json, tensors: Mapping[str, Tensor], prefix: str
) -> Iterable[tuple[int, str, Tensor, Json]]:
    first = {name: name for name in tensors if name.startswith(prefix)} | tree["same"]
    for name, same_as in first.items():
        place, key = name.removeprefix(prefix).split(".", 1)
        yield int(place), key, tensors[same_as], tree["placements"].get(same_as)


def _refuse_others(tree: Json, number: int, shard: _Shard) -> None:
    """Refuse what has no name in a state dict of torch's: of optimizers that keep more than it foresees."""
    beside, decoded = tree["beside"] or {}, {}
    for key in ("own", "loose"):
        if key in beside:
            decoded[key] = tree_codec.decode(beside[key], shard.tensors)
    own = [name for group in tree["names"] for name in group if not name.startswith(_MODEL)]
    if decoded.get("own") or decoded.get("loose") or own:
        what = "parameters of its own, which are not the model's" if own else "state under no parameter"
        raise SaveError(
            f"Optimizer number {number} (from 0) keeps {what}, for which torch's state dicts have no name. "
            "Export the model alone: --model-only."
        )


def _add_groups(
    groups: list[dict[str, Any]], names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Add one shard's groups: a shard may hold the state of some of the parameters only."""
    for place, (called, own) in enumerate(zip(names, saved, strict=True)):
        if place == len(groups):
            groups.append({"params": [], **{key: value for key, value in own.items() if key != "parameters"}})
        known = groups[place]["params"]
        known += [name for name in called if name not in known]
