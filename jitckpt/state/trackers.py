"""Random numbers that Megatron-core keeps beside torch's: states of a device's generator, by name.

Its layers take from them where ranks have to differ, or not to (dropout in tensor-parallel regions). They are
each rank's own, as torch's are.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.errors import CheckpointError

PART = "trackers"
_MODULE, _TRACKER = "megatron.core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER"


def _tracker() -> Any:
    """Return the tracker that has states; None where there is none. To ask Megatron would make one."""
    tracker = getattr(sys.modules.get(_MODULE), _TRACKER, None)
    return tracker if tracker is not None and tracker.get_states() else None


def are_there() -> bool:
    """Whether the training has such numbers."""
    return _tracker() is not None


def capture() -> dict[str, Encoded]:
    """Return the states as a named part, or no part."""
    tracker = _tracker()
    if tracker is None:
        return {}
    return {
        PART: tree_codec.encode({name: _told(state) for name, state in tracker.get_states().items()}, PART)
    }


def restore(saved: Mapping[str, Tensor] | None) -> None:
    """Put back what `capture` returned, decoded; None: a save that has none. Raises CheckpointError."""
    if saved is None:
        return
    tracker = _tracker()
    states = {} if tracker is None else tracker.get_states()
    if states.keys() != saved.keys():
        raise CheckpointError(
            f"The save has random numbers of Megatron-core under the names {', '.join(sorted(saved))}; here "
            f"they are {', '.join(sorted(states)) or 'none'}. Call model_parallel_cuda_manual_seed before "
            "jitckpt.init, as the start that was saved from has done."
        )
    for name, state in saved.items():
        if isinstance(states[name], torch.Generator):  # of trackers that CUDA graphs can use
            states[name].set_state(state)
        else:
            states[name] = state.clone()
    tracker.set_states(states)


def _told(state: Tensor | torch.Generator) -> Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state
