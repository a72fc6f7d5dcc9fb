"""Steps that torch makes to have an optimizer's state, and that no training makes.

What torch.distributed.checkpoint asks an optimizer's state of, and finds none, it has make a step without
gradients and at no rate. A training's own checkpoint is begun so, and with an optimizer that never has state
each of them is.
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

MODULE, FUNCTION = "torch.distributed.checkpoint.state_dict", "_init_optim_state"


def is_for_state(named: Mapping[str, Any] | None) -> bool:
    """Return whether this thread is in such a step; named: the arguments that the step is called with."""
    # Hardly any other one is called with closure=None: so others cost no look at who calls.
    if not named or named.get("closure", named) is not None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == FUNCTION and frame.f_globals.get("__name__") == MODULE:
            return True
        frame = frame.f_back
    return False
