"""Tensors that are made of others as plain values: told by these, and by what belongs to them beside."""

import json
from collections.abc import Callable
from typing import Any

from torch import Tensor

from jitckpt.encoding import tree_codec
from jitckpt.errors import CheckpointError, TreeError
from jitckpt.state import inner_tensors, parallel

WRAPPED = "*wrapped"  # the one key of what stands for such a tensor


def can_be_told(tensor: Tensor) -> bool:
    """Whether a tensor is made of others, and can be made of them again."""
    is_wrapper = inner_tensors.is_wrapper(tensor) and not parallel.is_distributed(tensor)
    return is_wrapper and description(tensor) is not None


def told(tensor: Tensor, of_plain: Callable[[Tensor], Any]) -> Any:
    """Return what stands for a tensor, with what this returns of the plain ones that it is made of."""
    if not inner_tensors.is_wrapper(tensor):
        return of_plain(tensor)
    parts = {name: of_plain(leaf) for name, leaf in inner_tensors.leaves(tensor, "").items()}
    return {WRAPPED: [description(tensor), parts]}


def description(tensor: Tensor) -> str | None:
    """Return what a tensor is beside those that it is made of; None if that can't be told."""
    try:
        return tree_codec.to_json(inner_tensors.described(tensor, ""))
    except TreeError:
        return None


def put(here: Any, stands: list[Any], in_place: bool) -> Any:
    """Return the tensor: what is here, with these values, or one that is made of them.

    Raises LookupError if its class is not there.
    """
    text, parts = stands
    if any(one.is_meta for one in parts.values()):  # it is described alone
        return here
    described = json.loads(text)
    if in_place and isinstance(here, Tensor) and inner_tensors.put(here, described, "", parts):
        return here
    try:
        return inner_tensors.made(described, "", parts)
    except CheckpointError as error:
        raise LookupError(str(error)) from error
