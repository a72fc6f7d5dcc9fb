"""What a LightningModule and callbacks have logged, by Lightning's names for it, and how it comes back."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

REDUCTIONS = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}
PLAIN = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)


def state_of(one: Any) -> dict[str, Any]:
    """Return the state of what was logged under one key, and what it was logged with, None if unknown."""
    if not one.is_tensor:
        states = {name: getattr(one.value, name) for name in getattr(one.value, "_defaults", {})}
        return {
            "states": states,
            "count": getattr(one.value, "_update_count", 0),
            "cache": one._forward_cache,
            "with": _logged_with(one),
        }
    found = {"value": one.value, "cache": one._forward_cache, "with": _logged_with(one)}
    if one.meta.is_mean_reduction:
        found["size"] = one.cumulated_batch_size
    return found | {"has_reset": one.has_reset, "count": getattr(one, "_update_count", 0)}


def put(one: Any, state: Mapping[str, Any]) -> None:
    one._forward_cache, one._computed = state["cache"], None
    if not one.is_tensor:
        for name, value in state["states"].items():
            setattr(one.value, name, value)
        one.value._update_count = state["count"]
        return
    one.value, one.has_reset, one._update_count = state["value"], state["has_reset"], state["count"]
    if "size" in state:
        one.cumulated_batch_size = state["size"]


def can_be_made(states: Mapping[str, Any]) -> bool:
    """Whether all of it can be logged again without the code that did."""
    return all(one.get("with") is not None for one in states.values())


def make(state: Mapping[str, Any], trainer: Any, result: Any) -> Any:
    """Return what Lightning keeps of one key, as `state_of` told. result: Lightning's module for these."""
    told = dict(state["with"])
    should, rank_zero_only = told.pop("sync_dist"), told.pop("rank_zero_only")
    meta = result._Metadata(**told | {"reduce_fx": REDUCTIONS[told["reduce_fx"]]})
    meta.sync = result._Sync(_should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only)
    one = result._ResultMetric(meta, "value" in state)
    if not one.is_tensor:
        one.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    put(one, state)
    return one


def results_module(collection: Any) -> Any:
    return importlib.import_module(type(collection).__module__)


def _logged_with(one: Any) -> dict[str, Any] | None:
    meta = one.meta
    reduction = next((name for name, known in REDUCTIONS.items() if known is meta.reduce_fx), None)
    is_found = one.is_tensor or meta.metric_attribute is not None
    if reduction is None or meta.sync.group is not None or not is_found:
        return None
    told = {name: getattr(meta, name) for name in PLAIN}
    of_sync = {"sync_dist": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
    return told | of_sync | {"reduce_fx": reduction}
