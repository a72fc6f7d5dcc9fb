"""The contract between jitckpt and a training framework, which is three answers.

What is the state: the arguments of `begin`; `progress` says what only the framework knows (its counters,
logs, callbacks), as a rank's own state. When has a step ended: `FrameworkProtection.step_is_over`; where the
framework knows no such moment, when it asks for its next batch. How is the native resume fed: the framework
iterates `batches`, which go on after the last one that is done, and is told the rest by its own means, from
what `progress` got back.

Nothing here harms a training that could not be protected: it goes on as without jitckpt, and a line says so.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from jitckpt.console import say
from jitckpt.data.loop import Iteration
from jitckpt.errors import CheckpointError, JitckptError, LeftToScriptError
from jitckpt.frameworks import own_checkpoints
from jitckpt.state.plain_attributes import PlainAttributes
from jitckpt.state.schedules import Stateful
from jitckpt.wire import environment
from jitckpt.worker import advice, agreements
from jitckpt.worker import job as jobs
from jitckpt.worker.job import Job

_Protected = TypeVar("_Protected")

_current: "FrameworkProtection | None" = None
_taken = ""  # the framework that has taken this process's training in hand, or was refused


class FrameworkProtection:
    """A framework's training under protection. `restored`: how many optimizer steps it goes on from."""

    def __init__(self, job: Job, restored: int) -> None:
        self.job, self.restored = job, restored

    def begin_epoch(self) -> int:
        """Tell that the framework begins an epoch; returns its number, of the restored one to begin with."""
        return self.job.loop.begin_epoch()

    def batches(self, loader: Iterable[Any]) -> "Managed":
        """Return what the framework iterates in the loader's place."""
        return Managed(self.job, loader)

    @property
    def epoch(self) -> int:
        """The epoch in which the training is, as it was restored."""
        return self.job.loop.epoch

    @property
    def batches_done(self) -> int:
        """How many batches of the restored epoch were handed out."""
        return self.job.loop.batches_done

    @property
    def is_at_epochs_end(self) -> bool:
        """Whether the restored epoch has no batches left."""
        return self.job.loop.is_at_epochs_end

    def native_folder(self, framework: str, name: str) -> Path:
        """Return an empty folder for the framework's own checkpoint of the restored step, the only one of its
        kind.

        The first rank of each host makes it.
        """
        above = self.job.root / framework
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            shutil.rmtree(above, ignore_errors=True)
            (above / name).mkdir(parents=True)
        agree(None)
        return above / name

    def step_is_over(self) -> None:
        """All that belongs to the last optimizer step is done: counted, logged, evaluated."""
        self.job.loop.minibatch_is_over()

    def changed(self) -> None:
        """The rank knows more since the forward pass, and from now on the others may step without it."""
        self.job.write_before_step()

    def put_back(self) -> None:
        """Put back what this rank alone knows, however often, as it was after the restored step."""
        self.job.put_back()

    def will_change(self, *, of_model_alone: bool) -> None:
        """The training is over, and the framework puts others in the place of its parameters, or of all."""
        self.job.will_change(of_model_alone=of_model_alone)

    def was_repetition(self) -> None:
        """The forward pass that was just made belongs to the restored step, and to no other."""
        self.job.forget_pass()

    def go_on_now(self) -> None:
        """Put random numbers and the like back: what the framework does now is no repetition any more."""
        self.job.loop.go_on_now()


class Managed:
    """A loader whose position is kept. In all else it is that loader."""

    def __init__(self, job: Job, loader: Iterable[Any]) -> None:
        self._job, self.loader = job, loader
        self.iteration: Iteration | None = None  # the newest

    def __iter__(self) -> Iterator[Any]:
        self.iteration = Iteration(self._job.loop, self.loader)
        return self.iteration

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def leave(self) -> None:
        """The framework asks for no more batches in this epoch."""
        if self.iteration is not None:
            self.iteration.leave()


def begin(
    framework: str,
    *,
    model: nn.Module,
    optimizers: Sequence[Any],
    schedulers: Sequence[Stateful] = (),
    scaler: Any = None,
    progress: Stateful | None,
    left_out: str = "",
    keep: str = "keep them in attributes or buffers of the model",
    shard: tuple[int, int] | None = None,
    made_up: bool = False,
    keeps_attributes: PlainAttributes | None = None,
    keeps_variables: bool = False,
    loads_by: str = "",
) -> FrameworkProtection | None:
    """Protect a training and bring it back; None, with a line, if that can't be.

    framework: its name and version. left_out: a clause that names what a restart does not bring back. keep:
    words that say where what the script carries on itself is kept, as "keep them in ...". shard:
    which part of the state this rank holds alone, and how many there are, where nothing else tells. made_up:
    the adapter has the framework do again whatever follows the restored step. keeps_attributes: in these
    it keeps those of the model's modules itself. keeps_variables: the loop is the script's, so its variables
    are kept. loads_by: what the script loads the framework's own checkpoints by.
    Raises CheckpointError if there are saves but none can be used: nothing ever starts over silently.
    """
    global _current  # noqa: PLW0603
    if not _take(framework):
        return None
    advice.of_framework(keep)
    try:
        job = jobs.init(
            model=model,
            optimizer=list(optimizers),
            scheduler=list(schedulers),
            scaler=scaler,
            extra=progress,
            shard=None if shard is None else shard[0],
            shards=None if shard is None else shard[1],
            save_every=environment.SAVE_EVERY.get(),
            self_check=None if shard is None else False,  # it restores no shards
            keep_found=False,  # the framework's own resume has what this is not given
        )
    except CheckpointError:
        raise
    except (JitckptError, TypeError, ValueError) as error:
        _say_first(f"{framework}: recognised, but not protected: {error}")
        return None
    protected = {
        "model": True,
        f"{len(optimizers)} optimizers" if len(optimizers) > 1 else "optimizer": True,
        "learning rates": bool(schedulers),
        "loss scale": scaler is not None,
        "random numbers, data position": True,
        "the framework's own progress": progress is not None,
        "variables of the script's loop": keeps_variables,
    }
    job.made_up = made_up
    job.trust_extra()
    if keeps_attributes is not None:
        job.leave_attributes(keeps_attributes)
    job.keep_generators()
    if keeps_variables:
        job.keep_variables()
    _current = _restored(framework, job, loads_by)
    if _current is not None and job.is_protected:
        _say_recognised(framework, [part for part, is_so in protected.items() if is_so], left_out)
    return _current


def _restored(framework: str, job: Job, loads_by: str) -> FrameworkProtection | None:
    job.is_left_to_script = lambda: own_checkpoints.are_others(job.root)
    try:
        restored = job.restore()
    except LeftToScriptError:
        job.close()
        why = own_checkpoints.LEFT_TO_IT.format(method=loads_by, root=job.root)
        _say_first(f"{framework}: recognised, but not protected in this start: {why}")
        return None
    except (AttributeError, ImportError) as error:
        raise CheckpointError(f"{framework} can't be brought back: {error!r}") from error
    if restored == 0:
        own_checkpoints.keep(job.root, job.identity.rank)
    return FrameworkProtection(job, restored)


def _take(framework: str) -> bool:
    """Return whether the framework may have this process's training in hand; say so if not."""
    global _taken  # noqa: PLW0603
    if _taken:
        _say_first(
            f"{framework}: only the first training of a process is protected, and this is another one."
        )
        return False
    _taken = framework
    if jobs.is_current():
        _say_first(f"{framework}: the script calls jitckpt.init itself, so this is left to it.")
        return False
    return True


def _say_recognised(framework: str, protected: Sequence[str], left_out: str) -> None:
    without = f"; not: {left_out}" if left_out else ""
    _say_first(f"{framework}: recognised. Protected: {', '.join(protected)}{without}.")


def current() -> FrameworkProtection | None:
    """Return the training of this process that is under protection."""
    return _current


def inner(optimizer: Any) -> Any:
    """Return torch's optimizer inside of Accelerate's, which keeps nothing that a restart would need."""
    while type(optimizer).__name__ == "AcceleratedOptimizer":
        optimizer = optimizer.optimizer
    return optimizer


def refuse(text: str) -> None:
    """Say that a training is not protected, and why; no other framework takes it, either."""
    global _taken  # noqa: PLW0603
    _taken = text
    _say_first(text)


def end(text: str) -> None:
    """Say, once, that the training is not protected from here on, and why."""
    if _taken != text:
        if _current is not None:
            _current.job.close()
        refuse(text)


def tell(text: str) -> None:
    """Say something once, on the first rank."""
    _say_first(text)


def tell_of_parts(where: str) -> None:
    """Say that each rank has another part of the optimizer's state, and what protects that."""
    if (tier := environment.MEMORY_TIER.get()) not in ("", "off"):
        protector = f"It is kept in host memory, from where it comes back (--memory-tier {tier})."
    elif (every := environment.SAVE_EVERY.get()) is not None:
        protector = f"If a rank is lost, the job goes back to its newest save (--save-every {every})."
    else:
        protector = (
            "If a rank is lost, the job ends: start it with `jitckpt run --memory-tier auto`, or with "
            "--save-every N."
        )
    tell(f"{where} each rank's part of the optimizer's state has no replica. {protector}")


def is_taken() -> bool:
    """Whether a framework has this process's training in hand, or was refused."""
    return bool(_taken)


def agree(said: Any) -> list[Any]:
    """Return what all ranks say, by rank; every rank has to call it. For plain values that JSON holds."""
    return agreements.all_say(said)


def unless_unknown(name: str, protected: Callable[[], _Protected | None]) -> _Protected | None:
    """Return what `protected` does; None, with a line, if it asks the framework for what that has not.

    A newer version may be built otherwise, and its trainings go on as without jitckpt. One that is brought
    back by then does not: its parameters are those of the save, and the rest would begin anew.
    """
    try:
        return protected()
    except (AttributeError, ImportError) as error:
        if _current is not None and _current.restored:
            raise
        end(
            f"{name}: recognised, but not protected: it is built otherwise than the versions that jitckpt "
            f"knows ({error})."
        )
        return None


def once(install: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a function change a module's classes a single time."""
    done: set[str] = set()

    def guarded(module: Any) -> None:
        if module.__name__ not in done:
            done.add(module.__name__)
            install(module)

    return guarded


def _say_first(text: str) -> None:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else int(os.environ.get("RANK", "0"))
    if rank == 0:
        say(text)
