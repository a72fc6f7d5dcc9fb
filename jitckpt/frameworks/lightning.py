"""Lightning: goes on in the middle of the minibatch at which the job failed, by its own loops' restart.

Lightning's loops can begin again with a batch, but not behind its optimizer step. So what is kept is how
loops and callbacks were before the batch, what its training step returned and logged, and the random numbers
behind it. A restart does that batch once more, as Lightning restarts one: but its training step, backward
pass and optimizer step are left out, as model and optimizer have them already, and what it returned and
logged is put in the place of that. What comes after the step (schedulers, callbacks, logs, validation) is so
Lightning's own business.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from jitckpt.data import data_pass
from jitckpt.data.data_pass import Pass
from jitckpt.data.generators import Generators
from jitckpt.data.random_state import RandomState
from jitckpt.encoding import packed
from jitckpt.frameworks import idle, lightning_checkpoints, lightning_logs, lightning_metrics, protection
from jitckpt.frameworks.attributes import numbered, owners_among, say_problems
from jitckpt.frameworks.held_back import HeldBack, HeldBackPass, is_held_back
from jitckpt.frameworks.lightning_hooks import TRAINER, LoaderHooks
from jitckpt.frameworks.protection import FrameworkProtection, Managed
from jitckpt.state.module_attributes import owners_of
from jitckpt.state.plain_attributes import Owner, PlainAttributes
from jitckpt.system import installed
from jitckpt.worker.self_check import comparison

_TRAINING = "_jitckpt_training"
_LOGGED = "_jitckpt_logged"
_TRIED = "_jitckpt_tried"  # while a tuner puts back what it has tried
_DRAWN_FROM = "_jitckpt_drawn_from"  # generators, as loaders were iterated before a training began
STATEFUL = (
    "a loader of this training has a state of its own (StatefulDataLoader), which Lightning's sampler has no "
    "part in: after a restart the order of the samples may be another one. torch's DataLoader comes back "
    "exactly."
)
LEFT_OUT = "what on_save_checkpoint of the module adds beside its attributes"
REQUEUES = (
    "Lightning's handler of {name} saves a checkpoint of its own, by all ranks, and has SLURM start the job "
    "again (SLURMEnvironment's auto_requeue). jitckpt saves after a failure, from the ranks that are left, "
    "and goes on from its newest save at each start. Both are on; auto_requeue=False leaves Lightning's out."
)
TAKEN = ("loops", "callbacks", "datamodule", "checkpoints")  # before each batch
METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")  # what was logged last, by names
# It puts another scheduler and averages in the place of what the script gave, and more epochs and passes.
AVERAGES = "StochasticWeightAveraging"
NOT_PROTECTED = (
    "{version}: recognised, but not protected: {callback} changes schedulers, loops and parameters as it "
    "goes along, which a restart does not do again. `jitckpt run --mode transparent` takes it; else use "
    "Lightning's own checkpoints."
)
BY_HAND = (
    "; what training_step returned and logged at the restored step, which manual optimization makes anew"
)
# Hooks before a training step's own result; they were called when the restored batch was made.
BEFORE_STEP = ("on_train_batch_start", "on_before_zero_grad")
TUNERS = ("lr_finder", "batch_size_scaling")
# Of a Trainer, as GradientAccumulationScheduler and EarlyStopping do; no state_dict has them.
SET_BY_CALLBACKS = (
    "accumulate_grad_batches",
    "should_stop",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "check_val_every_n_epoch",
)
SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "weight_decay")


def Callback() -> Any:  # it stands in a list of callbacks
    """Return one for `Trainer(callbacks=[...])`, of a program that `jitckpt run` does not start itself."""
    from lightning.pytorch.trainer import trainer

    install(trainer)
    return importlib.import_module("lightning.pytorch").Callback()


@protection.once
def install(trainer: ModuleType) -> None:
    """Have every Trainer protect its fit."""
    package = trainer.__name__.removesuffix(".trainer.trainer")

    def module(name: str) -> Any:
        return importlib.import_module(f"{package}.{name}")

    if (is_held_back, HeldBackPass) not in data_pass.OTHER_KINDS:
        data_pass.OTHER_KINDS.append((is_held_back, HeldBackPass))
    connector = module("trainer.connectors.checkpoint_connector")._CheckpointConnector
    result = module("trainer.connectors.logger_connector.result")
    results = result._ResultCollection
    if result._ResultMetric not in comparison.KEPT_OTHERWISE:
        comparison.KEPT_OTHERWISE.append(result._ResultMetric)
    fit, epoch = module("loops.fit_loop")._FitLoop, module("loops.training_epoch_loop")._TrainingEpochLoop
    automatic = module("loops.optimization.automatic")._AutomaticOptimization
    manual = module("loops.optimization.manual")._ManualOptimization
    version = f"{package.partition('.')[0]} {importlib.import_module(package).__version__}"

    changes = [
        _around(connector, "restore_training_state", lambda call, self: _begin(call, self, version)),
        _around(trainer.Trainer, "_teardown", _ends),
        _around(connector, "restore", _puts_back_what_was_tried),
        *(_around(module(f"tuner.{name}"), "_try_loop_run", _tries) for name in TUNERS),
        _around(fit, "setup_data", _set_up),
        _around(module("loops.evaluation_loop")._EvaluationLoop, "setup_data", _set_up_validation),
        _around(fit, "on_advance_end", _epoch_ends),
        _around(epoch, "advance", _batch_begins),
        _around(automatic, "run", _optimizes),
        _around(manual, "run", _optimizes),
        _around(automatic, "_training_step", _has_stepped),
        _around(results, "update_metrics", _logs),
        _around(module("trainer.call"), "_call_callback_hooks", _calls_callbacks),
        _around(module("trainer.call"), "_call_lightning_module_hook", _calls_module),
    ]
    for kind, name, method in changes:
        setattr(kind, name, method)
    lightning_logs.install(module("loggers"), module("loggers.csv_logs"))
    lightning_checkpoints.install(module("callbacks.model_checkpoint"))


def _around(kind: Any, name: str, function: Callable[..., Any]) -> tuple[Any, str, Callable[..., Any]]:
    """Return what to put in a method's or function's place: the function, which gets what calls that, and the
    arguments.
    """
    original = getattr(kind, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(lambda: original(self, *args, **kwargs), self, *args)

    method.__name__ = name
    return kind, name, method


def _of(loop: Any) -> "LightningTraining | None":
    found: LightningTraining | None = vars(loop.trainer).get(_TRAINING)
    return found


def _begin(call: Callable[[], Any], connector: Any, version: str) -> None:
    call()
    trainer = connector.trainer
    if _TRIED in vars(trainer):
        return
    vars(trainer).pop(_TRAINING, None)  # of a fit before
    if str(trainer.state.fn) == "fit" or getattr(trainer.state.fn, "value", "") == "fit":
        training = protection.unless_unknown(version, lambda: LightningTraining(trainer, version))
        if training is None:
            return
        lightning_logs.training_begins(trainer, training.protection)
        if training.protection is not None:
            vars(trainer)[_TRAINING] = training
            training.resume()
            lightning_checkpoints.training_begins(training.protection, training.batches_done)
            if (drawn_from := vars(trainer).pop(_DRAWN_FROM, None)) is not None:
                training.take_loaders_over(trainer.fit_loop, drawn_from)


def _ends(call: Callable[[], Any], trainer: Any, *_: Any) -> None:
    """All goes to the host, from where a validation or a test behind the training takes it."""
    training: LightningTraining | None = vars(trainer).get(_TRAINING)
    if training is not None and training.protection is not None:
        training.protection.will_change(of_model_alone=False)
    call()


def _puts_back_what_was_tried(call: Callable[[], Any], connector: Any, *_: Any) -> None:
    vars(connector.trainer)[_TRIED] = True
    try:
        call()
    finally:
        del vars(connector.trainer)[_TRIED]


def _tries(call: Callable[[], Any], *_: Any) -> None:
    """A tuner tries a rate or a batch size, which a restart does again: the training begins later."""
    with idle.not_counting():
        call()


def _set_up(call: Callable[[], Any], loop: Any) -> None:
    training = _of(loop)
    if training is not None:
        with _before_fetching(loop, lambda: training.manage_loaders(loop)):
            training.hooks.set_up(call, loop)
        return
    # So early where the module asks for the number of steps, as for a scheduler.
    with _before_fetching(loop, lambda: _note_random(loop.trainer)):
        call()


def _set_up_validation(call: Callable[[], Any], loop: Any) -> None:
    if (training := _of(loop)) is None:
        call()
    else:
        training.hooks.set_up(call, loop)


def _note_random(trainer: Any) -> None:
    loaders = trainer.fit_loop._combined_loader.flattened
    drawn_from = [Generators(one if isinstance(one, DataLoader) else None) for one in loaders]
    vars(trainer)[_DRAWN_FROM] = [(one, packed.pack(one.capture())) for one in drawn_from]


@contextmanager
def _before_fetching(loop: Any, do: Callable[[], None]) -> Iterator[None]:
    """Do something once the loaders are there that are set up meanwhile, and before they are iterated."""
    module: Any = importlib.import_module(type(loop).__module__)
    select = module._select_data_fetcher

    def selected(*args: Any, **kwargs: Any) -> Any:
        do()
        return select(*args, **kwargs)

    module._select_data_fetcher = selected
    try:
        yield
    finally:
        module._select_data_fetcher = select


def _epoch_ends(call: Callable[[], Any], loop: Any) -> None:
    if (training := _of(loop)) is not None:
        training.epoch_ends()
    call()


def _batch_begins(call: Callable[[], Any], loop: Any, fetcher: Any) -> None:
    if (training := _of(loop)) is not None:
        training.batch_begins()
    call()
    if training is not None:
        training.batch_ended()


def _optimizes(call: Callable[[], Any], loop: Any, *_: Any) -> Any:
    training = _of(loop)
    return call() if training is None else training.optimize(call)


def _has_stepped(call: Callable[[], Any], loop: Any, *_: Any) -> Any:
    result, training = call(), _of(loop)
    return result if training is None else training.has_stepped(result)


def _logs(call: Callable[[], Any], collection: Any, key: str, *_: Any) -> None:
    one, logged = collection[key], vars(collection).get(_LOGGED, {})
    if key in logged and one.is_tensor:
        lightning_metrics.put(one, logged.pop(key))
    call()
    if key in logged:  # a metric is known from now on
        lightning_metrics.put(one, logged.pop(key))


def _calls_callbacks(call: Callable[[], Any], trainer: Any, hook: str, *args: Any) -> Any:
    training: LightningTraining | None = vars(trainer).get(_TRAINING)
    if training is None or not training.leaves_out(hook):
        return call()
    for one in trainer.callbacks:
        if not (installed.is_scripts_class(type(one)) or _is_lightnings(one)):  # nobody keeps what it has
            getattr(one, hook)(trainer, trainer.lightning_module, *args)
    return None


def _calls_module(call: Callable[[], Any], trainer: Any, hook: str, *_: Any) -> Any:
    training: LightningTraining | None = vars(trainer).get(_TRAINING)
    return None if training is not None and training.leaves_out(hook) else call()


def _is_lightnings(callback: Any) -> bool:
    return type(callback).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def _owners(trainer: Any) -> dict[str, Owner]:
    """Return what keeps attributes of the script's: the module with all in it, callbacks, the datamodule.

    And the trainer, where callbacks change how it trains.
    """
    others = numbered(trainer.callbacks)
    others |= {} if trainer.datamodule is None else {"datamodule": trainer.datamodule}
    modules = owners_of(trainer.lightning_module)
    owners = {f"module {name}": one for name, one in modules.items()} | owners_among(others)
    return owners | {TRAINER: Owner(trainer, lambda name, value: name in SET_BY_CALLBACKS)}


def _adding_to_checkpoints(trainer: Any) -> str:
    """Return a clause on callbacks whose state is in what they add to a checkpoint, as averages are."""
    names = []
    for one in trainer.callbacks:
        kinds = [kind for kind in type(one).__mro__ if "on_save_checkpoint" in vars(kind)]
        names += [type(one).__qualname__] if len(kinds) > 1 else []  # the last one is Lightning's own, empty
    return f"; what on_save_checkpoint of {', '.join(names)} adds, such as averaged weights" if names else ""


class LightningTraining:
    """One fit; as `extra` of the job, what Lightning alone knows."""

    def __init__(self, trainer: Any, version: str) -> None:
        self.trainer = trainer
        self.protection: FrameworkProtection | None = None
        self._before: dict[str, Any] = {}  # loops and callbacks as the newest batch began
        self._returned: dict[str, Any] = {}  # by its training step
        self._newest: dict[str, Any] = {}
        self._problem: Exception | None = None
        self._kept: dict[str, Any] | None = (
            None  # what was said as the optimizer step ended, till the next batch
        )
        self._managed: list[Managed] = []
        self._loaded: dict[str, Any] | None = None
        self._again = False  # the restored batch is made once more
        self._is_to_write = False  # Lightning's own checkpoint of the restored step
        self._is_known = False  # what its training step returned and logged
        strategy = type(trainer.strategy).__name__
        if strategy == "DeepSpeedStrategy" or not trainer.optimizers:
            protection.refuse(f"{version}: recognised, but not protected: it trains with {strategy}.")
            return
        if any(AVERAGES in (kind.__name__ for kind in type(one).__mro__) for one in trainer.callbacks):
            protection.refuse(NOT_PROTECTED.format(version=version, callback=AVERAGES))
            return
        parameter = next(trainer.model.parameters())
        self._random = RandomState(parameter.device if parameter.device.type == "cuda" else None)
        self._attributes = PlainAttributes(_owners(trainer))
        self.hooks = LoaderHooks(trainer, self._attributes)
        try:
            self._before = self._take()
        except Exception as error:
            protection.refuse(f"{version}: recognised, but not protected: a state_dict raised {error!r}.")
            return
        environment = trainer.strategy.cluster_environment
        if getattr(environment, "auto_requeue", False):
            protection.tell(REQUEUES.format(name=environment.requeue_signal.name))
        is_automatic = trainer.lightning_module.automatic_optimization
        self.protection = protection.begin(
            version,
            model=trainer.model,
            optimizers=trainer.optimizers,
            schedulers=[config.scheduler for config in trainer.lr_scheduler_configs],
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            progress=self,
            left_out=LEFT_OUT + _adding_to_checkpoints(trainer) + ("" if is_automatic else BY_HAND),
            keep="keep them in attributes of the LightningModule or of a callback",
            made_up=is_automatic,
            keeps_attributes=self._attributes,
        )

    # As `extra` of the job.

    def state_dict(self) -> dict[str, Any]:
        if self._problem is not None:
            raise self._problem  # the job says so, saves nothing from here on, and trains on
        if self._kept is not None:
            return self._kept
        trainer = self.trainer
        self._newest = self._before | {
            "returned": self._returned,
            "logs": lightning_logs.state_of(trainer),
            "attributes": self._attributes.changed(),
            "loaders": self.hooks.state(),
            "logged": {
                key: lightning_metrics.state_of(one)
                for key, one in trainer.fit_loop.epoch_loop._results.items()
            },
            "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in METRICS},
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "rates": [
                [{key: group[key] for key in SCHEDULED if key in group} for group in one.param_groups]
                for one in trainer.optimizers
            ],
            "random": torch.frombuffer(bytearray(packed.pack(self._random.capture())), dtype=torch.uint8),
        }
        return self._newest

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._loaded is None:
            self._loaded = state

    def _take(self) -> dict[str, Any]:
        trainer = self.trainer
        loops = {"fit_loop": trainer.fit_loop.state_dict()}
        loops["fit_loop"].get("state_dict", {}).pop("combined_loader", None)  # its passes know better
        callbacks = {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())}
        datamodule = {} if trainer.datamodule is None else trainer.datamodule.state_dict()
        checkpoints = lightning_checkpoints.state_of(trainer)
        return {"loops": loops, "callbacks": callbacks, "datamodule": datamodule, "checkpoints": checkpoints}

    def batches_done(self) -> int:
        """Return how many batches were before the newest."""
        progress = self._before["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        return int(progress["total"]["ready"])

    @property
    def goes_on(self) -> bool:
        """Whether the restored batch is still to be made once more."""
        return self._again

    def leaves_out(self, hook: str) -> bool:
        """Whether a hook is not called, as the restored batch's training step is known and not made again."""
        return self._again and self._is_known and hook in BEFORE_STEP

    # What Lightning's loops tell.

    def resume(self) -> None:
        """Let the loops begin again with the batch of the restored step."""
        assert self.protection is not None
        if not self.protection.restored:
            return
        loaded, trainer = self._loaded, self.trainer
        assert loaded is not None
        trainer.fit_loop.load_state_dict(loaded["loops"]["fit_loop"])
        self._again = self._is_to_write = True
        self.hooks.call_again(loaded.get("loaders", {}))
        for one in trainer.callbacks:
            if one.state_key in loaded["callbacks"]:
                one.load_state_dict(loaded["callbacks"][one.state_key])
        if trainer.datamodule is not None and loaded["datamodule"]:
            trainer.datamodule.load_state_dict(loaded["datamodule"])
        lightning_checkpoints.put_back(trainer, loaded.get("checkpoints", {}))
        self._before = {name: loaded.get(name, {}) for name in TAKEN}
        self._put_back()
        self._is_known = trainer.lightning_module.automatic_optimization and lightning_metrics.can_be_made(
            loaded["logged"]
        )

    def manage_loaders(self, loop: Any) -> None:
        """Have the loaders iterated by passes that go on."""
        combined = loop._combined_loader
        if any(data_pass.has_own_state(one) for one in combined.flattened):
            protection.tell(STATEFUL)
        module: Any = importlib.import_module(type(combined).__module__)

        def held_back() -> int:
            # Where the number of batches is not known Lightning draws one ahead, to know the last one.
            return 2 if module.sized_len(combined) is None else 1

        self._managed = [_Loader(self, one, at == 0, held_back) for at, one in enumerate(combined.flattened)]
        combined.flattened = self._managed

    def take_loaders_over(self, loop: Any, drawn_from: list[tuple[Generators, bytes]]) -> None:
        """Iterate loaders anew that were iterated before this was there, with the random numbers of then.

        drawn_from: the process's generators and those of each loader, as they were before.
        """
        if loop._combined_loader is None or self._managed:
            return
        self.manage_loaders(loop)
        module: Any = importlib.import_module(type(loop).__module__)
        random = RandomState(None)
        now = packed.pack(random.capture())
        for of_loader, state in drawn_from:
            of_loader.restore(packed.unpack(state))
        loop._data_fetcher.teardown()
        loop._data_fetcher = module._select_data_fetcher(self.trainer, module.RunningStage.TRAINING)
        loop._data_fetcher.setup(loop._combined_loader)
        iter(loop._data_fetcher)
        random.restore(packed.unpack(now))

    def batch_begins(self) -> None:
        assert self.protection is not None
        self.protection.step_is_over()
        say_problems(self._attributes)
        self._kept = None
        if not self._again:
            try:
                self._before, self._returned = self._take(), {}
            except (
                Exception
            ) as error:  # of a callback's or datamodule's state_dict, which nobody else may call
                self._problem = error
        else:  # Lightning counts a restart as a batch that has stepped, by which loggers go
            epoch_loop = self.trainer.fit_loop.epoch_loop
            epoch_loop.on_load_checkpoint(self._before["loops"]["fit_loop"]["epoch_loop.state_dict"])

    def batch_ended(self) -> None:
        """All that Lightning does with a batch is done: loops, schedulers and callbacks have counted it."""
        # Right behind a restart its loop may come here without a batch.
        if self._is_to_write and not self._again:
            self._is_to_write = False
            assert self.protection is not None
            folder = self.protection.native_folder("lightning", f"step={self.protection.restored}")
            self.trainer.save_checkpoint(folder / "lightning.ckpt")

    def optimize(self, call: Callable[[], Any]) -> Any:
        """Make the training step, and the optimizer's; of the restored batch without the latter."""
        if not self._again:
            result = call()
            self._kept = self._newest
            return result
        assert self.protection is not None
        strategy = self.trainer.strategy
        model = strategy.model
        without_sync = model.no_sync() if hasattr(model, "no_sync") else None
        strategy.backward = lambda *_, **__: None
        strategy.optimizer_step = lambda optimizer, closure, *_, **__: closure()
        if self._is_known:
            strategy.training_step = lambda *_, **__: self._any_loss()
        try:
            if without_sync is None:
                result = call()
            else:
                with without_sync:
                    result = call()
        finally:
            del strategy.backward, strategy.optimizer_step
            vars(strategy).pop("training_step", None)
            if hasattr(model, "require_forward_param_sync"):
                # As behind the pass that was synchronised: then DDP's next one sends the buffers around.
                model.require_forward_param_sync = True
        self._again = False
        self.protection.was_repetition()
        self._put_back()
        return result

    def has_stepped(self, result: Any) -> Any:
        """The training step has returned; from now on the others may step without this rank."""
        assert self.protection is not None
        if self._again:
            returned = self._restored_result()
            result.loss = returned.get("loss", result.loss)
            result.extra = {name: value for name, value in returned.items() if name != "loss"}
            self._returned = returned
        else:
            self._returned = {} if result.loss is None else dict(result.asdict())
            self.protection.changed()
        return result

    def _restored_result(self) -> dict[str, Any]:
        assert self._loaded is not None
        returned: dict[str, Any] = self._loaded["returned"]
        return returned

    def _any_loss(self) -> torch.Tensor | None:
        """Return what a training step may return; has_stepped puts the restored one in its place."""
        loss: torch.Tensor | None = self._restored_result().get("loss")
        return None if loss is None else torch.zeros_like(loss)

    def _put_back(self) -> None:
        """Put back what the restored step's end begins with."""
        assert self.protection is not None
        assert self._loaded is not None
        trainer, loaded = self.trainer, self._loaded
        self.protection.put_back()
        lightning_logs.put_back(trainer, loaded["logs"])
        # As a training begins, callbacks look at what they have changed of the trainer.
        put = {path: of for path, of in loaded["attributes"].items() if not (self._again and path == TRAINER)}
        self._attributes.restore(put)
        say_problems(self._attributes)
        for config, state in zip(trainer.lr_scheduler_configs, loaded["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        for optimizer, groups in zip(trainer.optimizers, loaded["rates"], strict=True):
            for group, rates in zip(optimizer.param_groups, groups, strict=True):
                group.update(rates)
        for name, metrics in loaded["metrics"].items():
            setattr(trainer._logger_connector, name, metrics)
        collection = trainer.fit_loop.epoch_loop._results
        logged = dict(loaded["logged"])
        results = lightning_metrics.results_module(collection)
        for key in [*logged]:
            if key in collection:
                lightning_metrics.put(collection[key], logged.pop(key))
            elif self._is_known and not self._again:  # what its training step has logged
                collection[key] = lightning_metrics.make(logged.pop(key), trainer, results)
        vars(collection)[_LOGGED] = logged  # what comes later, at an epoch's end
        self._random.restore(packed.unpack(bytes(loaded["random"].cpu().numpy().tobytes())))

    def epoch_ends(self) -> None:
        for one in self._managed:
            one.leave()


class _Loader(Managed):
    """One of the training's loaders; with the first of them an epoch begins."""

    def __init__(
        self, training: LightningTraining, loader: Any, is_first: bool, held_back: Callable[[], int]
    ) -> None:
        """held_back: returns how many batches to hold back, as one is drawn."""
        assert training.protection is not None
        super().__init__(training.protection.job, HeldBack(loader, held_back))
        self._training, self._protection, self._is_first = training, training.protection, is_first
        self._newest: Pass | None = None

    def __iter__(self) -> Iterator[Any]:
        # Samplers are told the epoch after this; a pass that goes on draws from them as it begins.
        return self._late() if self._training.goes_on else self._begun()

    def _begun(self) -> Iterator[Any]:
        if self._is_first:
            self._training.epoch_ends()
            self._protection.begin_epoch()
        iteration = super().__iter__()
        self._newest = None if self.iteration is None else self.iteration.begun
        return iteration

    def leave(self) -> None:
        """End its pass, also one that gave all its batches: the last of them was held back."""
        if self.iteration is not None and self.iteration.let_go():
            return  # where loaders are made anew they are iterated twice
        super().leave()
        if self._newest is not None and not self._newest.state.ended:
            self._protection.job.loop.leave(self._newest)

    def _late(self) -> Iterator[Any]:
        yield from self._begun()
