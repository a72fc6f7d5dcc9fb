"""DeepSpeed: its engine's module and optimizer are the state, and the loop is the script's own.

From ZeRO stage 1 on each rank holds another part of the optimizer's state, which nobody else has: then each
rank is a shard of its own, and what is saved of it is never taken for another's.
"""

import os
import sys
import weakref
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

import torch

from jitckpt.frameworks import own_checkpoints, protection, script_epochs, script_loops
from jitckpt.frameworks.protection import FrameworkProtection
from jitckpt.frameworks.script_pass import ScriptPass
from jitckpt.state import attributes
from jitckpt.worker.agreements import all_say

LOADS_BY = "load_checkpoint"
# Where an optimizer of DeepSpeed's keeps it: with ZeRO; with fp16 alone.
SCALERS = ("loss_scaler", "loss_scale_config")
COUNTERS = ("global_steps", "micro_steps", "global_samples", "skipped_steps")

_engines: "weakref.WeakSet[Any]" = weakref.WeakSet()
_training: "DeepSpeedTraining | None" = None


def protect() -> None:
    """For programs that `jitckpt run` does not start itself: call it before deepspeed.initialize."""
    from deepspeed.runtime import engine

    install(engine)


@protection.once
def install(engine: ModuleType) -> None:
    """Have every engine protect the training that it makes."""
    kind = engine.DeepSpeedEngine
    initialise, load = kind.__init__, kind.load_checkpoint

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        _engines.add(self)
        script_epochs.watch(sys._getframe(1), _goes_on)

    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        path, client_state = load(self, *args, **kwargs)
        if path is not None and _training is None:
            own_checkpoints.loaded(os.path.dirname(path))
        return path, client_state

    script_loops.unless_repeated(kind, ("save_checkpoint", "save_16bit_model"))
    kind.__init__, kind.load_checkpoint = __init__, load_checkpoint
    script_loops.when_iterated(_begin_pass)


def _begin_pass(loader: Any, frame: FrameType) -> Iterator[Any] | None:
    global _training  # noqa: PLW0603
    engine = next((one for one in _engines if one.module.training and one.optimizer is not None), None)
    if engine is None:
        return None
    if _training is None and not protection.is_taken():
        _training = DeepSpeedTraining(engine, frame, in_epochs=script_epochs.may_be_found())
        script_epochs.training_begins(_training.protection, frame)
    if _training is None or _training.protection is None or _training.engine is not engine:
        return None
    return ScriptPass(_training.protection.job, loader, frame)


def _goes_on(frame: FrameType) -> FrameworkProtection | None:
    """Protect the training, where a restart comes to its loop over epochs."""
    global _training  # noqa: PLW0603
    script_epochs.end()
    engine = next((one for one in _engines if one.optimizer is not None), None)
    if engine is None or _training is not None or protection.is_taken():
        return None
    _training = DeepSpeedTraining(engine, frame, in_epochs=True)
    return _training.protection


class DeepSpeedTraining:
    """The training of one engine; as `extra` of the job, what the engine itself counts."""

    def __init__(self, engine: Any, frame: FrameType, *, in_epochs: bool) -> None:
        """frame: it iterates the loader, or has the loop over epochs. in_epochs: there is such a loop."""
        import deepspeed

        refusal = script_loops.why_not(frame)
        self.engine = engine
        self.protection: FrameworkProtection | None = None
        self._agreed: dict[str, Any] | None = None
        name = f"deepspeed {deepspeed.__version__}"
        if refusal is not None:
            protection.refuse(f"{name}: recognised, but not protected: {refusal}")
            return
        stage = engine.zero_optimization_stage()
        if stage > 2 or engine.zero_offload_optimizer() is not None:
            protection.refuse(
                f"{name}: recognised, but not protected: with ZeRO stage 3 or an optimizer on the host the "
                "parameters are not where a save could take them. `jitckpt run --mode transparent` takes it; "
                "else use DeepSpeed's own checkpoints."
            )
            return
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        is_sharded = stage > 0 and ranks > 1
        if is_sharded:
            protection.tell_of_parts(f"with ZeRO stage {stage}")
        checker = getattr(engine.optimizer, "overflow_checker", None)  # it looks anew in each step
        for one in (checker, *(scaler for _, scaler in self._scalers())):
            if one is not None and type(one) not in attributes.KEPT_OTHERWISE:
                attributes.KEPT_OTHERWISE.append(type(one))
        is_monitored = engine.monitor.enabled
        scheduler = engine.lr_scheduler
        self.protection = protection.begin(
            name,
            model=engine.module,
            optimizers=[engine.optimizer],
            schedulers=[scheduler] if hasattr(scheduler, "state_dict") and hasattr(scheduler, "step") else [],
            progress=self,
            left_out=script_loops.left_out(
                frame,
                LOADS_BY,
                *(["rows of its monitor, which come again with their steps"] if is_monitored else []),
                in_epochs=in_epochs,
            ),
            keeps_variables=True,
            loads_by=LOADS_BY,
            shard=(rank, ranks) if is_sharded else None,
        )
        if self.protection is not None:
            # After torch's own step the engine counts, steps its scheduler and, with ZeRO, copies and gathers
            # its master weights.
            self.protection.job.end_steps_at_boundary()
            if self.protection.restored:
                self._agree()

    def _agree(self) -> None:
        """Take the counters of whoever has counted most; they are alike on all ranks.

        A rank that died in a step which the others have ended had not counted it.
        """
        said = all_say(self.state_dict())
        self._agreed = max(said, key=lambda state: int(state["counters"]["micro_steps"]))
        self.load_state_dict(self._agreed)

    def state_dict(self) -> dict[str, Any]:
        engine = self.engine
        scales = {
            at: {name: value for name, value in vars(scaler).items() if isinstance(value, int | float)}
            for at, scaler in self._scalers()
        }
        return {"counters": {name: int(getattr(engine, name)) for name in COUNTERS}, "scales": scales}

    def _scalers(self) -> list[tuple[str, Any]]:
        """Return what has the scale of losses, by the names that the optimizer has for it."""
        found = [(name, getattr(self.engine.optimizer, name, None)) for name in SCALERS]
        return [(name, one) for name, one in found if hasattr(one, "__dict__")]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a rank's own state, which may be put back more than once; the one agreed on is newer."""
        state = self._agreed or state
        for name, value in state["counters"].items():
            setattr(self.engine, name, value)
        scales = state["scales"] if "scales" in state else {SCALERS[0]: state["scale"]}
        for at, scaler in self._scalers():
            for name, value in scales.get(at, {}).items():
                setattr(scaler, name, value)
