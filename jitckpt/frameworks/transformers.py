"""Hugging Face transformers' Trainer: goes on by its own resume, after the step at which the job failed.

After a restart the Trainer builds all as at a first start. As its model, optimizer and scheduler are ready,
they are restored; then the Trainer's own functions write a checkpoint of that step, its state is read from
there, and the epoch in which it failed is begun as one that is resumed. Batches are left out by jitckpt's
pass over the loader, which draws what the undisturbed training does; and what the Trainer did after an
optimizer step, or at an epoch's end (logs, evaluations, checkpoints), is done again unless all ranks had done
all of it. So what a rank keeps is how it was as the optimizer step ended, and once more when all that follows
it was done: where one rank has not come so far, all do it again, from the former.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from jitckpt.data import data_pass, generators
from jitckpt.frameworks import protection, read_ahead, transformers_others
from jitckpt.frameworks.attributes import numbered, owners_among, say_problems
from jitckpt.frameworks.protection import FrameworkProtection, Managed
from jitckpt.state import parallel
from jitckpt.state.module_attributes import names_set_by
from jitckpt.state.plain_attributes import Owner, PlainAttributes
from jitckpt.system import installed

NEEDED = (
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_load_best_model",
)
_TRAINING = "_jitckpt_training"
ON_DEVICE = ("tr_loss", "grad_norm")  # they are the same before and behind what follows a step
_NUMBERS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
)
_installed: ModuleType | None = None
_own_names: frozenset[str] = frozenset()  # attributes that the Trainer's own functions set


def Callback() -> Any:  # it stands in a list of callbacks
    """Return one for `Trainer(callbacks=[...])`, of a program that `jitckpt run` does not start itself."""
    import transformers
    from transformers import trainer

    install(trainer)
    return transformers.TrainerCallback()


@protection.once
def install(trainer: ModuleType) -> None:
    """Have every Trainer protect its training."""
    global _installed, _own_names
    kind = trainer.Trainer
    if lacking := [name for name in NEEDED if not hasattr(kind, name)]:
        protection.refuse(f"{_version()}: recognised, but its Trainer has no {lacking[0]}: version 5 has.")
        return
    _installed, _own_names = trainer, names_set_by("transformers", kind)  # before they are wrapped
    if (read_ahead.is_read_ahead, read_ahead.begin) not in data_pass.OTHER_KINDS:
        data_pass.OTHER_KINDS.append((read_ahead.is_read_ahead, read_ahead.begin))
    _wrap_beginning(kind)
    _wrap_epoch(kind)
    _wrap_step(kind)
    _wrap_skipping(trainer)


def _wrap_beginning(kind: Any) -> None:
    """Restore once a Trainer has all it trains with; what it resumes from is asked for after that."""
    init_state, prepare, load_random = (
        kind._init_training_state,
        kind._prepare_for_training,
        kind._load_rng_state,
    )

    def _init_training_state(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        def _original_state(resume: Any) -> Any:
            # The path to resume from is the one argument that is given another value.
            if "resume_from_checkpoint" in kwargs:
                return init_state(self, *args, **kwargs | {"resume_from_checkpoint": resume})
            return init_state(self, *args[:3], resume, *args[4:], **kwargs)

        training = vars(self)[_TRAINING] = TransformersTraining(self, _original_state)
        epochs, steps = init_state(self, *args, **kwargs)
        training.first_epoch = epochs
        return _FirstEpoch(training), steps

    def _prepare_for_training(
        self: Any, max_steps: int, train_dataloader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        model, loader = prepare(self, max_steps, train_dataloader, *args, **kwargs)
        return model, vars(self)[_TRAINING].begin(model, loader)

    def _load_rng_state(self: Any, checkpoint: Any) -> None:
        training = vars(self).get(_TRAINING)
        if training is None or checkpoint is None or checkpoint != training.folder:
            load_random(self, checkpoint)

    kind._init_training_state = _init_training_state
    kind._prepare_for_training = _prepare_for_training
    kind._load_rng_state = _load_rng_state


def _wrap_epoch(kind: Any) -> None:
    """Begin each epoch where the job is."""
    run_epoch = kind._run_epoch

    def _run_epoch(self: Any, **kwargs: Any) -> Any:
        return run_epoch(self, **vars(self)[_TRAINING].epoch_begins(**kwargs))

    kind._run_epoch = _run_epoch


def _wrap_step(kind: Any) -> None:
    """Hear what a step is made of, and when all that belongs to it is done."""
    train_step, grad_norm, end_of_step, load_best = (
        kind.training_step,
        kind._get_grad_norm,
        kind._maybe_log_save_evaluate,
        kind._load_best_model,
    )

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if _TRAINING in vars(self):
            vars(self)[_TRAINING].inputs = inputs
        return train_step(self, model, inputs, *args, **kwargs)

    def _get_grad_norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = grad_norm(self, *args, **kwargs)
        if parallel.is_distributed(found):
            found = found.full_tensor()  # a part of FSDP2's sum says nothing alone; to log it takes the same
        if _TRAINING in vars(self):
            vars(self)[_TRAINING].grad_norm = found
        return found

    def _maybe_log_save_evaluate(
        self: Any, tr_loss: Any, norm: Any, *args: Any, learning_rate: Any = None, **kwargs: Any
    ) -> None:
        training: TransformersTraining = vars(self)[_TRAINING]
        norm, learning_rate = training.at_epochs_end(norm, learning_rate)
        end_of_step(self, tr_loss, norm, *args, learning_rate=learning_rate, **kwargs)
        training.step_ended(learning_rate)

    def _load_best_model(self: Any) -> None:
        vars(self)[_TRAINING].will_change()
        load_best(self)

    kind._load_best_model = _load_best_model
    kind.training_step = training_step
    kind._get_grad_norm = _get_grad_norm
    kind._maybe_log_save_evaluate = _maybe_log_save_evaluate


def _wrap_skipping(trainer: Any) -> None:
    """A protected loader skips by itself the batches that a checkpoint was behind."""
    skip = trainer.skip_first_batches

    def skip_first_batches(loader: Any, number: int = 0) -> Any:
        return loader.skip(number, skip) if isinstance(loader, _Loader) else skip(loader, number)

    trainer.skip_first_batches = skip_first_batches


class _FirstEpoch:
    """The number of the first epoch, which is asked for once the state is restored."""

    def __init__(self, training: "TransformersTraining") -> None:
        self._training = training

    def __index__(self) -> int:
        return self._training.first_epoch

    def __str__(self) -> str:
        return str(self._training.first_epoch)


class _Loader(Managed):
    """The loader of training batches. `skipped`: those that a checkpoint of the user's was behind."""

    skipped = 0
    goes_on = False  # its own pass leaves out what is done

    def skip(self, number: int, skip: Any) -> Any:
        if not self.goes_on:
            self.skipped, self.loader = number, skip(self.loader, number)
        return self


class TransformersTraining:
    """One call of Trainer.train."""

    def __init__(self, trainer: Any, initial_state: Any) -> None:
        """initial_state: the Trainer's own function, called with a checkpoint to resume from."""
        self.trainer, self._initial_state = trainer, initial_state
        self.first_epoch = 0
        self.folder: str | None = None  # the checkpoint that was written to resume from
        self.grad_norm: Any = None
        self.inputs: Any = None  # of the newest micro-batch
        self.learning_rate: float | None = None
        self._protection: FrameworkProtection | None = None
        self._loader: _Loader | None = None
        self._coming: torch.Tensor | None = (
            None  # a loss whose backward pass is made, not yet among the others
        )
        self._losses_before: torch.Tensor | None = None  # as the newest step was made
        self._is_zero = False  # the sum of losses, as it was logged and nothing was added since
        self._in_step = False  # the optimizer step is about to be made, or is, and its end not yet
        self._pending = False  # what belongs to the restored step is not done
        self._resumes = self._evaluates_first = False
        self._at_end = False  # of an epoch of which no step is made in this process
        self._epochs_before = 0  # that a checkpoint of the user's was behind
        self._steps_before = 0
        # What was said as the optimizer step ended, till all that follows it is done; and from then on.
        self._step_made: dict[str, Any] | None = None
        self._before_end: dict[str, Any] | None = None
        self._log: tuple[int, torch.Tensor] = (-1, torch.zeros(0, dtype=torch.uint8, device="cpu"))
        self._loaded: dict[str, Any] | None = None
        self._attributes = PlainAttributes({})

    # As `extra` of the job.

    def state_dict(self) -> dict[str, Any]:
        if self._step_made is not None:
            return self._step_made
        told = self._told()
        return told if self._before_end is None else told | {"before_end": self._before_end}

    def _told(self) -> dict[str, Any]:
        trainer = self.trainer
        rate = trainer._get_learning_rate() if self._in_step else self.learning_rate
        return {
            "state": json.dumps(self._trainer_state()),
            "log": self._log_bytes(),
            "tr_loss": self._losses(),
            "is_zero": self._is_zero,
            "in_step": self._in_step,
            "grad_norm": self.grad_norm,
            "learning_rate": rate,
            "attributes": self._attributes.changed(),
            "numbers": {name: getattr(trainer, name, 0) for name in _NUMBERS}
            | {"current_flos": self._operations()},
            "before": [
                self._epochs_before,
                self._steps_before,
                0 if self._loader is None else self._loader.skipped,
            ],
        }

    def _losses(self) -> torch.Tensor | None:
        """Return the Trainer's sum of losses as it is once the loss is added whose backward pass is made.

        That a log has set it to zero is said beside it: a rank that dies then has the sum on the device as it
        was before, which serves where the log is made again.
        """
        trainer, coming = self.trainer, self._coming
        losses: torch.Tensor | None = getattr(trainer, "_tr_loss", None)
        if self._is_zero and self._losses_before is not None:
            return self._losses_before
        if losses is None or coming is None:
            return losses
        if trainer.args.logging_nan_inf_filter:
            steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            coming = torch.where(torch.isfinite(coming), coming, losses / steps)
        return losses + coming

    def _operations(self) -> float:
        """Return what the Trainer counts of floating point operations, with those of such a loss."""
        known = float(getattr(self.trainer, "current_flos", 0))
        if self._coming is None or self.inputs is None:
            return known
        return known + float(self.trainer.floating_point_ops(self.inputs))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._loaded is None:  # what is put back later is not the Trainer's
            self._loaded = state

    def _trainer_state(self) -> dict[str, Any]:
        """Return the TrainerState as its own checkpoint has it, but for its log."""
        state = self.trainer.state
        told = {one.name: getattr(state, one.name) for one in dataclasses.fields(state)}
        del told["log_history"]
        told["stateful_callbacks"] = {}
        for callback in self._stateful_callbacks():
            told["stateful_callbacks"].setdefault(type(callback).__name__, []).append(callback.state())
        return told

    def _stateful_callbacks(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        trainer = self.trainer
        return [
            one
            for one in [*trainer.callback_handler.callbacks, trainer.control]
            if isinstance(one, ExportableState)
        ]

    def _log_bytes(self) -> torch.Tensor:
        history = self.trainer.state.log_history
        if len(history) != self._log[0]:
            text = bytearray(json.dumps(history).encode())
            self._log = len(history), torch.frombuffer(text, dtype=torch.uint8)
        return self._log[1]

    # What the Trainer's functions tell.

    def begin(self, model: Any, loader: Any) -> Any:
        """All is built; return the loader to iterate."""
        trainer = self.trainer
        if trainer.is_deepspeed_enabled:
            protection.refuse(f"{_version()}: recognised, but not protected: it trains with DeepSpeed.")
            return loader
        if trainer.args.enable_jit_checkpoint:
            protection.tell(
                "enable_jit_checkpoint of transformers saves when SIGTERM comes, with all ranks alive; "
                "jitckpt saves after a failure, from the ranks that are left. Both are on."
            )
        self._epochs_before, self._steps_before = self.first_epoch, trainer.state.global_step
        owners = owners_among(numbered(trainer.callback_handler.callbacks))
        self._attributes = PlainAttributes(owners | {"Trainer": Owner(trainer, _is_not_the_trainers)})
        others = transformers_others.found_in(trainer, model)
        self._protection = protection.begin(
            _version(),
            model=nn.ModuleList([model, *others.modules]) if others.modules else model,
            optimizers=[protection.inner(trainer.optimizer), *others.optimizers],
            schedulers=[trainer.lr_scheduler, *others.schedulers],
            scaler=getattr(trainer.accelerator, "scaler", None),
            progress=self,
            left_out=_left_out(trainer),
            keep="keep them in attributes of a callback, or of a Trainer of your own",
            made_up=True,
        )
        if self._protection is None:
            return loader
        trainer.callback_handler.callbacks.insert(0, _callback(self))
        backward = trainer.accelerator.backward

        def watched_backward(loss: torch.Tensor, **kwargs: Any) -> None:
            self.backward_begins(loss)
            backward(loss, **kwargs)

        trainer.accelerator.backward = watched_backward
        self._loader = _Loader(self._protection.job, loader)
        if self._protection.restored:
            self._resume()
        return self._loader

    def _resume(self) -> None:
        """Write the Trainer's own checkpoint from what is restored, and read the Trainer's state from it."""
        trainer, loaded = self.trainer, self._loaded
        assert self._protection is not None
        assert self._loader is not None
        assert loaded is not None
        restored = self._protection.restored
        self._epochs_before, self._steps_before, skipped = loaded["before"]
        log = json.loads(bytes(loaded["log"].tolist()) or b"[]")
        state = json.loads(loaded["state"])
        self._pending = any(protection.agree(state["global_step"] - self._steps_before < restored))
        if self._pending and "before_end" in loaded:
            shared = {name: loaded[name] for name in ON_DEVICE}
            loaded = self._loaded = shared | loaded["before_end"]
            state, log = json.loads(loaded["state"]), log[: loaded["logged"]]
        norm = loaded["grad_norm"]
        own = {
            "in_step": loaded["in_step"],
            "norm": norm.item() if isinstance(norm, torch.Tensor) else norm,
            "rate": loaded["learning_rate"],
        }
        # One that did not come to its optimizer step has not heard of these.
        of_step = max(protection.agree(own), key=lambda said: bool(said["in_step"])) if self._pending else own
        step = self._steps_before + restored
        folder = self._protection.native_folder("transformers", f"checkpoint-{step}")
        self.folder = str(folder)
        self._write_state(state | {"global_step": step, "log_history": log})
        protection.agree(None)
        arguments = trainer.args
        makes_callbacks = arguments.restore_callback_states_from_checkpoint
        arguments.restore_callback_states_from_checkpoint = False  # the script's own objects stay
        self._initial_state(self.folder)  # the Trainer's own resume
        arguments.restore_callback_states_from_checkpoint = makes_callbacks
        _put_back_callbacks(self._stateful_callbacks(), state["stateful_callbacks"])
        self._evaluates_first, arguments.eval_on_start = arguments.eval_on_start, False  # it has by now
        trainer.state.stateful_callbacks = state["stateful_callbacks"]
        trainer.state.log_history = log  # the checkpoint has the first rank's
        if not self._pending:
            self._write_rest()
        trainer.state.global_step = state["global_step"]
        self.grad_norm, self.learning_rate = of_step["norm"], of_step["rate"]
        self.first_epoch = self._epochs_before + self._protection.epoch
        if skipped and self._protection.epoch == 0:
            assert _installed is not None
            _installed.skip_first_batches(self._loader, skipped)
        self._loader.goes_on = self._resumes = True

    def _write_state(self, state: Mapping[str, Any]) -> None:
        """Write the Trainer's state into its own checkpoint."""
        assert self.folder is not None
        if self.trainer.args.local_process_index == 0:
            Path(self.folder, "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")

    def _write_rest(self) -> None:
        """Write all else of it, as the Trainer does."""
        self.trainer.save_model(self.folder, _internal_call=True)
        self.trainer._save_optimizer_and_scheduler(self.folder)
        self.trainer._save_scaler(self.folder)
        self.trainer._save_rng_state(self.folder)

    def train_begins(self) -> None:
        """The Trainer has set its sums to zero."""
        if self._resumes and self._loaded is not None:
            for name, value in self._loaded["numbers"].items():
                setattr(self.trainer, name, value)
            if self._loaded.get("is_zero", False):
                self.trainer._tr_loss.zero_()
            else:
                self.trainer._tr_loss.copy_(self._loaded["tr_loss"])

    def epoch_begins(self, **kwargs: Any) -> Mapping[str, Any]:
        """Return what the Trainer's epoch is to be called with."""
        if self._protection is None:
            return kwargs
        self._protection.begin_epoch()
        self._at_end = False
        if not self._resumes:
            if self.folder is not None:  # the epochs after it are no resumed ones
                kwargs["resume_from_checkpoint"] = None
            return kwargs
        self._resumes = False
        self.trainer.args.eval_on_start = self._evaluates_first
        self._protection.go_on_now()
        assert self._loader is not None
        self._put_attributes_back()
        done = self._protection.batches_done + (self._loader.skipped if self._protection.epoch == 0 else 0)
        if self._pending:
            self._end_restored_step(done, kwargs)
        control = self.trainer.control
        if (
            self._protection.is_at_epochs_end
            or control.should_epoch_stop
            or control.should_training_stop
            or done >= kwargs["steps_in_epoch"]
        ):
            done, self._at_end = kwargs["steps_in_epoch"], True
        return kwargs | {
            "resume_from_checkpoint": self.folder,
            "epochs_trained": kwargs["epoch"],
            "steps_trained_in_current_epoch": done,
        }

    def _put_attributes_back(self) -> None:
        """Put back what the Trainer and callbacks keep."""
        assert self._loaded is not None
        self._attributes.restore(self._loaded["attributes"])
        say_problems(self._attributes)

    def _end_restored_step(self, done: int, epoch: Mapping[str, Any]) -> None:
        """Do what the Trainer does after the optimizer step of the restored step, as it does it."""
        trainer = self.trainer
        if self._loaded is not None and "random" in self._loaded:
            generators.put_all(bytes(self._loaded["random"].cpu().numpy().tobytes()))
        handler, args = trainer.callback_handler, trainer.args
        trainer.control = handler.on_optimizer_step(args, trainer.state, trainer.control)
        trainer.state.global_step += 1
        trainer.state.epoch = epoch["epoch"] + done / epoch["steps_in_epoch"]
        trainer.control = handler.on_step_end(args, trainer.state, trainer.control)
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self.grad_norm,
            epoch["model"],
            epoch["trial"],
            epoch["epoch"],
            epoch["ignore_keys_for_eval"],
            epoch["start_time"],
            learning_rate=self.learning_rate,
        )
        # Only now it is what the Trainer's own is behind this step.
        self._write_state(self._trainer_state() | {"log_history": trainer.state.log_history})
        self._write_rest()

    def backward_begins(self, loss: torch.Tensor) -> None:
        """This loss is the rank's own, and from now on the others may step without it."""
        if self._protection is not None:
            self._coming, self._before_end, self._is_zero = loss.detach(), None, False
            self._protection.changed()

    def backward_ended(self) -> None:
        """The loss is among the others."""
        self._coming = self.inputs = None

    def optimizer_begins(self) -> None:
        self.backward_ended()
        self._in_step = True

    def optimizer_ended(self) -> None:
        """What follows may come to its end on some ranks and not on others."""
        if not self._in_step:
            return  # what follows the restored step is done again
        self._is_zero = False
        told = self._told()
        random = torch.frombuffer(bytearray(generators.all_packed()), dtype=torch.uint8)
        losses = None if told["tr_loss"] is None else told["tr_loss"].clone()  # the Trainer sets it to zero
        logged = len(self.trainer.state.log_history)
        self._step_made = told | {"tr_loss": losses, "random": random, "logged": logged}

    def step_ended(self, learning_rate: float | None) -> None:
        """The Trainer has counted, logged, evaluated and saved what it does after a step."""
        self._is_zero = self.trainer._globalstep_last_logged == self.trainer.state.global_step
        if self._in_step:
            self._in_step, self.learning_rate = False, learning_rate
            if self._step_made is not None:
                told = self._step_made.items()
                kept = {name: value for name, value in told if name not in ("log", *ON_DEVICE)}
                self._losses_before = self._step_made["tr_loss"]
                self._before_end, self._step_made = kept, None
            if self._protection is not None:
                say_problems(self._attributes)
                self._protection.step_is_over()

    def will_change(self) -> None:
        """The training is over, and the best parameters take the place of the last: a save needs these."""
        if self._protection is not None:
            self._protection.will_change(of_model_alone=True)

    def at_epochs_end(self, norm: Any, learning_rate: float | None) -> tuple[Any, float | None]:
        """Return these as the last step left them, in an epoch of which this process made none."""
        if self._at_end and not self._in_step and norm is None and learning_rate is None:
            return self.grad_norm, self.learning_rate
        return norm, learning_rate

    def epoch_ends(self) -> None:
        if self._loader is not None:
            self._loader.leave()


def _callback(training: TransformersTraining) -> Any:
    from transformers import TrainerCallback

    class JitckptCallback(TrainerCallback):  # type: ignore[misc]  # of Any, where it is not installed
        """Tells a TransformersTraining where the Trainer is."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            training.train_begins()

        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            training.optimizer_begins()

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            training.optimizer_ended()

        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            training.backward_ended()

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            training.epoch_ends()

    return JitckptCallback()


def _is_not_the_trainers(name: str, value: object) -> bool:
    """Whether an attribute is a subclass's, as trl's Trainers have; the Trainer's own are kept otherwise."""
    return not (name in _own_names or name.startswith("_jitckpt"))


def _left_out(trainer: Any) -> str:
    """Name callbacks of other packages, which may keep anything in themselves."""
    from transformers.trainer_callback import ExportableState

    names = [
        type(one).__qualname__
        for one in trainer.callback_handler.callbacks
        if not isinstance(one, ExportableState)
        and not installed.is_scripts_class(type(one))
        and type(one).__module__.partition(".")[0] not in ("transformers", "jitckpt")
    ]
    return f"what {', '.join(dict.fromkeys(names))} keeps in attributes" if names else ""


def _put_back_callbacks(callbacks: list[Any], states: Mapping[str, list[dict[str, Any]]]) -> None:
    for name, of_name in states.items():
        fitting = [one for one in callbacks if type(one).__name__ == name]
        for one, state in zip(fitting, of_name, strict=False):
            for attribute, value in state.get("attributes", {}).items():
                setattr(one, attribute, value)


def _version() -> str:
    import transformers

    return f"transformers {transformers.__version__}"
