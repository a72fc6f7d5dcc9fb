"""What parallel trainings say of themselves: which part of the state a rank holds, and who has the same.

Known are DTensors (FSDP2, tensor parallelism), FullyShardedDataParallel, DistributedDataParallel,
ZeroRedundancyOptimizer and the stages of torch.distributed.pipelining. Nothing here calls a collective.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import xxhash
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import CheckpointError, JitckptError
from jitckpt.state import inner_tensors
from jitckpt.state.shards import REPLICATE, Holding, Mesh, Part
from jitckpt.system import living

LARGEST_NAMED_GROUP = 8192  # ranks: what a message to the agent holds
SAMPLED_ELEMENTS = 64  # of each parameter, where nothing but its values can tell replicas


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, detached, without a collective; it shares the memory."""
    return memory_of(tensor).detach()


def memory_of(tensor: Tensor) -> Tensor:
    """Return the very tensor whose memory this rank holds, and that counts what is written there."""
    shard = getattr(tensor, "_local_shard", None)  # of FSDP1: its parameter is whole during a forward pass
    if isinstance(shard, Tensor):
        tensor = shard
    if is_distributed(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether what this rank holds is made of other tensors, whose values are not what it shows."""
    return inner_tensors.is_wrapper(memory_of(tensor))


def held(tensor: Tensor, name: str) -> dict[str, Tensor]:
    """Return the plain tensors, detached, that what this rank holds is made of: as a rule one, as `name`."""
    memory = memory_of(tensor)
    if not inner_tensors.is_wrapper(memory):
        return {name: memory.detach()}
    return {called: leaf.detach() for called, leaf in inner_tensors.leaves(memory, name).items()}


def held_bytes(tensor: Tensor) -> int:
    """Return how many bytes this rank holds of a tensor."""
    return sum(one.nbytes for one in held(tensor, "").values())


def storages(tensor: Tensor) -> set[int]:
    """Return where the storages begin that what this rank holds of a tensor lies in, as far as it says."""
    found: set[int] = set()
    for one in held(tensor, "").values():
        with suppress(RuntimeError, NotImplementedError):
            found.add(one.untyped_storage().data_ptr())
    return found - {0}


def is_plain(parameter: Tensor) -> bool:
    """Return whether a parameter is a module's own, whole and in no other's memory."""
    return type(parameter) is nn.Parameter and not getattr(parameter, "_is_flat_param", False)


def is_flattened(model: nn.Module) -> bool:
    """Return whether FSDP1 has flat parameters in this model."""
    return any(True for _ in _flat_handles(model))


def is_distributed(tensor: Tensor) -> bool:
    """Return whether it is a DTensor."""
    return _is(tensor, "torch.distributed.tensor", "DTensor")


def own_state(optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    """Return the state that an optimizer keeps on this rank, by parameter."""
    keeper, name = way_to_state(optimizer)[-1]
    found: dict[Any, dict[str, Any]] = getattr(keeper, name)
    return found


def way_to_state(optimizer: Optimizer) -> list[tuple[Optimizer, str]]:
    """Return the attributes that lead to this state: while they are the same objects, it is, too."""
    if not _is_zero(optimizer):
        return [(optimizer, "state")]
    # A ZeroRedundancyOptimizer has another optimizer inside.
    return [(optimizer, "optim"), (optimizer.optim, "state")]  # type: ignore[attr-defined]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return what holds the parameters' values, by name; a shared parameter is there once.

    The objects are for keeps: in a forward pass FSDP puts whole ones in their place. FSDP1's flat parameters
    stand for those that they are made of.
    """
    flat = {id(handle.flat_param): name for name, handle in _flat_handles(model)}
    inside = {
        id(one)
        for _, handle in _flat_handles(model)
        for one in [*(handle.flat_param._params or []), *(handle.flat_param._shared_params or [])]
    }
    found: dict[str, Tensor] = {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in inside and id(parameter) not in flat
    }
    return found | {name: handle.flat_param for name, handle in _flat_handles(model)}


def placement(tensor: Tensor) -> Json:
    """Return how a DTensor lies on its mesh, and where this rank's part begins; None for a plain tensor."""
    if not is_distributed(tensor):
        return None
    placements = [_encoded(one, tensor) for one in tensor.placements]  # type: ignore[attr-defined]
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "placements": placements,
        "offsets": _offsets(tensor),
    }


def cuts(model: nn.Module) -> dict[str, Json]:
    """Return, by name, which part of a parameter this rank holds, of those that are not whole everywhere.

    That is its whole shape, and where the part begins; offsets of None where that can't be said.
    """
    flat = dict(_flat_handles(model))
    found: dict[str, Json] = {}
    for name, tensor in parameters(model).items():
        described: Any = tensor if is_distributed(tensor) else getattr(tensor, "_st_info", None)
        if name in flat or described is not None:
            offsets = _offsets(tensor) if is_distributed(tensor) else None
            found[name] = {"shape": list(getattr(described, "shape", tensor.shape)), "offsets": offsets}
    return found


def _offsets(tensor: Any) -> list[int] | None:
    """Return where this rank's part of a DTensor begins; None of one whose values are still to be summed."""
    if any(one.is_partial() for one in tensor.placements):
        return None
    (chunk,) = tensor.__create_chunk_list__()  # torch's protocol for checkpoints
    return list(chunk.offsets)


def placed(part: Tensor, parameter: Tensor, how: Json) -> Tensor:
    """Return a tensor that lies as `how` says, on the mesh of `parameter`; `part` is this rank's."""
    if how is None:
        return part
    if not is_distributed(parameter):
        raise CheckpointError("The save holds a DTensor's state for a parameter that is none.")
    from torch.distributed.tensor import DTensor

    made = DTensor.from_local(
        part,
        parameter.device_mesh,  # type: ignore[attr-defined]
        [_decoded(one) for one in how["placements"]],
        run_check=False,
        shape=torch.Size(how["shape"]),
        stride=tuple(how["stride"]),
    )
    if inner_tensors.is_wrapper(part):
        made._local_tensor = part  # and no view of it, which need not be all that it is
    return made


def named_groups() -> list[tuple[str, tuple[int, ...]]]:
    """Return the process groups of this rank that have a name, with their ranks: of meshes above all."""
    if not _initialised():
        return []
    found: dict[tuple[str, tuple[int, ...]], None] = {}
    meshes = sys.modules.get("torch.distributed.device_mesh")
    for mesh in all_of(meshes.DeviceMesh) if meshes else []:
        if mesh.mesh_dim_names and mesh.get_coordinate() is not None:
            for name in mesh.mesh_dim_names:
                found[name, tuple(distributed.get_process_group_ranks(mesh.get_group(name)))] = None
    for group, ranks in distributed.distributed_c10d._world.pg_group_ranks.items():
        if isinstance(group, distributed.ProcessGroup) and _rank() in ranks and _is_name(group.group_desc):
            found[group.group_desc, tuple(ranks)] = None
    return [(name, ranks) for name, ranks in found if 1 < len(ranks) <= LARGEST_NAMED_GROUP]


def _is_name(description: str) -> bool:
    """Return whether a user gave it: torch itself calls groups so, those of a mesh by its dimension."""
    return description not in ("", "undefined", "default_pg") and not description.startswith("mesh_")


def pieces(model: nn.Module | None, optimizers: Sequence[Optimizer]) -> Json:
    """Return what tells the state that this rank holds from any other: names, shapes, types, which part."""
    rank = _rank()
    kept = {} if model is None else parameters(model)
    shapes = [
        [*part.piece(rank), list(local(tensor).shape)]
        for part, tensor in zip(_parts(model), kept.values(), strict=True)
    ]
    names = {} if model is None else {id(one): name for name, one in model.named_parameters()}
    names |= {id(one): name for name, one in kept.items()}
    kinds = [
        [
            type(one).__name__,
            sorted(_spelled(group["params"], names) for group in one.param_groups),
            _zero_part(one),
        ]
        for one in optimizers
    ]
    return [shapes, kinds, [list(stage) for stage in _stages(model)]]


def _spelled(parameters: Sequence[Tensor], names: Mapping[int, str]) -> list[str]:
    """Return a group's parameters by name, whatever their order; those that are not the model's by place."""
    own = [one for one in parameters if id(one) not in names]
    return sorted(names[id(one)] for one in parameters if id(one) in names) + [
        f"{number} {one.dtype} {list(local(one).shape)}" for number, one in enumerate(own)
    ]


def own_values(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Return a digest of the optimizers' parameters that are not the model's; "" for none.

    Replicas agree on them; parts of one flat tensor look alike but for their values. Waits for the device.
    """
    known = {id(one) for one in [*model.parameters(), *parameters(model).values()]}
    content = xxhash.xxh3_128()
    own = [
        one
        for optimizer in optimizers
        for group in optimizer.param_groups
        for one in group["params"]
        if id(one) not in known
    ]
    for one in own:
        for part in held(one, "").values():
            content.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest() if own else ""


def holding(model: nn.Module, optimizers: Sequence[Optimizer]) -> Holding:
    """Return what this rank has to say about what it holds; torch.distributed is initialised."""
    replicas = list(_declared(model))
    return Holding(
        pieces=digest(pieces(model, optimizers)),
        replicas=tuple(tuple(sorted(group)) for group in replicas),
        values="" if replicas else _values(model),
        text=_text(model, optimizers),
        own=own_values(model, optimizers),
    )


class DeviceBarrier:
    """Parts what comes before an optimizer step on any rank from the step itself on all ranks, on the device.

    An all-reduce of one element over all ranks, in a process group of its own: no collective of the training
    waits behind it, nor it behind one that comes later.
    """

    def __init__(self) -> None:
        """Make the process group; all ranks have to. Raises JitckptError without torch.distributed."""
        if not _initialised():
            raise JitckptError(
                "step_barrier needs torch.distributed: call init_process_group before, or say "
                "step_barrier=False."
            )
        self._group = distributed.new_group(backend="nccl", group_desc="jitckpt step barrier")
        self._element = torch.zeros(1, dtype=torch.float32, device="cuda")
        self.enqueue()  # makes the communicator, for which the host waits, here and not in the first step

    def enqueue(self) -> None:
        """Let the current stream wait until every rank's has come to the same place."""
        distributed.all_reduce(self._element, group=self._group)


def digest(content: Json) -> str:
    return xxhash.xxh3_128(json.dumps(content).encode()).hexdigest()


def _is(value: object, module: str, name: str) -> bool:
    """Return whether `value` is of that class of torch's, which is not imported for it."""
    loaded = sys.modules.get(module)
    found = getattr(loaded, name, None)
    return isinstance(found, type) and isinstance(value, found)


def _is_zero(optimizer: Optimizer) -> bool:
    module = "torch.distributed.optim.zero_redundancy_optimizer"
    return _is(optimizer, module, "ZeroRedundancyOptimizer")


def _rank() -> int:
    return distributed.get_rank() if _initialised() else 0


def _initialised() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _parts(model: nn.Module | None) -> list[Part]:
    if model is None:
        return []
    cuts = {name: _flat_cut(handle) for name, handle in _flat_handles(model)}
    return [_part(name, tensor, cuts.get(name)) for name, tensor in parameters(model).items()]


def _part(name: str, tensor: Tensor, flat_cut: tuple[Mesh, tuple[str, ...]] | None) -> Part:
    dtype, shape = str(tensor.dtype), tuple(tensor.shape)
    if flat_cut is not None:
        return Part(name, tuple(local(tensor).shape), dtype, *flat_cut)
    described: Any = tensor if is_distributed(tensor) else getattr(tensor, "_st_info", None)
    if described is None:
        return Part(name, shape, dtype)
    # A DTensor; or the part of one that torch.distributed.tensor.parallel made a plain tensor for DDP.
    mesh = described.device_mesh
    ranks = tuple(mesh.mesh.flatten().tolist())
    placements = tuple(REPLICATE if one.is_replicate() else repr(one) for one in described.placements)
    return Part(
        name,
        tuple(described.shape),
        dtype,
        Mesh(tuple(mesh.shape), ranks, tuple(mesh.mesh_dim_names or ())),
        placements,
    )


def _flat_handles(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield FSDP1's handles of flat parameters, under the names of these."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, fsdp.FullyShardedDataParallel) and module._handle is not None:
            yield f"{name}._flat_param".lstrip("."), module._handle


def _flat_cut(handle: Any) -> tuple[Mesh, tuple[str, ...]] | None:
    if not handle.uses_sharded_strategy:
        return None
    ranks = tuple(distributed.get_process_group_ranks(handle.process_group))
    return Mesh((len(ranks),), ranks, ("FSDP",)), ("FlatParameter",)


def _declared(model: nn.Module) -> Iterator[Iterable[int]]:
    """Yield the groups of ranks that wrappers say to be replicas."""
    inside = {id(module) for module in model.modules()}
    wrappers = [one for one in all_of(DistributedDataParallel) if id(one.module) in inside]
    wrappers += [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for wrapper in wrappers:
        yield distributed.get_process_group_ranks(wrapper.process_group)
    fsdp1 = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    fsdp2 = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if fsdp1 is not None and isinstance(module, fsdp1.FullyShardedDataParallel):
            between = getattr(module, "_inter_node_pg", None)
            if between is not None:
                yield distributed.get_process_group_ranks(between)
            elif module._handle is not None and not module._handle.uses_sharded_strategy:
                yield distributed.get_process_group_ranks(module.process_group)
            else:
                yield [_rank()]
    flat = dict(_flat_handles(model))
    peers = [part.peers(_rank()) for part in _parts(model) if part.mesh is not None and part.name not in flat]
    common = frozenset.intersection(*peers) if peers else frozenset()
    fully_sharded = getattr(fsdp2, "FSDPModule", None)
    if len(common) > 1 or (
        fully_sharded is not None and any(isinstance(module, fully_sharded) for module in model.modules())
    ):
        yield common or [_rank()]


def has_stages(model: nn.Module) -> bool:
    """Return whether the model is a stage of a pipeline, or has some."""
    return bool(_stages(model))


def _stages(model: nn.Module | None) -> list[tuple[int, int]]:
    """Return which of how many pipeline stages the model is, or its parts are."""
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None or model is None:
        return []
    inside = {id(module) for module in model.modules()}
    found = {
        (stage.stage_index, stage.num_stages)
        for stage in all_of(pipelining._PipelineStageBase)
        if any(id(module) in inside for module in stage.submod.modules())
    }
    return sorted(found)


def all_of(*wanted: type) -> list[Any]:
    """Return all living objects of some classes: a wrapper is not to be found from what it wraps.

    For the training's thread: meanwhile nothing dies, and what another thread lets go dies in that one.
    """
    return living.objects_of(living.with_subclasses(*wanted))


def _zero_part(optimizer: Optimizer) -> Json:
    if not _is_zero(optimizer):
        return None
    group = optimizer.process_group  # type: ignore[attr-defined]
    return [distributed.get_world_size(group), distributed.get_rank(group)]


def _values(model: nn.Module) -> str:
    """Return a digest of some values of each parameter. Waits for the device."""
    content = xxhash.xxh3_128()
    with torch.no_grad():
        for tensor in parameters(model).values():
            for part in held(tensor, "").values():
                sample = part.reshape(-1)[:SAMPLED_ELEMENTS].cpu().contiguous()
                content.update(sample.view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _text(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    cuts = list(dict.fromkeys(text for part in _parts(model) if (text := part.cut_by())))
    cuts += [f"pipeline stage of {count}" for _, count in _stages(model)[:1]]
    for index, optimizer in enumerate(optimizers):
        part = _zero_part(optimizer)
        if part is not None:
            cuts.append(f"the state of optimizer {index} (ZeroRedundancyOptimizer) in {part[0]} parts")
    return "; ".join(cuts)


def _encoded(one: Any, tensor: Tensor) -> Json:
    kind = type(one).__name__
    if kind == "Replicate":
        return ["Replicate"]
    if kind == "Shard":
        return ["Shard", one.dim]
    if kind == "_StridedShard":
        return ["_StridedShard", one.dim, one.split_factor]
    if kind == "Partial":
        return ["Partial", one.reduce_op]
    raise CheckpointError(
        f"A tensor of the optimizer's state, of shape {list(tensor.shape)}, is placed by {one!r:.80}; "
        "jitckpt knows Replicate, Shard and Partial. Give jitckpt.init a save function (save_checkpoint=...)."
    )


def _decoded(encoded: Json) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard, placement_types

    kinds: Mapping[str, Any] = {
        "Replicate": Replicate,
        "Shard": Shard,
        "_StridedShard": lambda dim, factor: placement_types._StridedShard(dim, split_factor=factor),
        "Partial": Partial,
    }
    kind, *arguments = encoded
    if kind not in kinds:
        raise CheckpointError(f"The save places a tensor by {kind!r:.40}, which this jitckpt does not know.")
    return kinds[kind](*arguments)
