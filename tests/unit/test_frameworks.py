"""What the adapters of training frameworks stand on, without any of these."""

import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler

from jitckpt import frameworks
from jitckpt.data import data_pass, made_in_loop
from jitckpt.data.data_pass import Loader, Pass, PassState
from jitckpt.data.generators import Generators
from jitckpt.doctor import checks
from jitckpt.encoding import tree_codec
from jitckpt.errors import LeftToScriptError
from jitckpt.frameworks import (
    accelerate,
    held_back,
    idle,
    lightning,
    lightning_logs,
    local_sgd,
    own_checkpoints,
    protection,
    read_ahead,
)
from jitckpt.frameworks.attributes import numbered, owners_among
from jitckpt.frameworks.held_back import HeldBack
from jitckpt.state.module_attributes import is_kept, names_of_others
from jitckpt.state.plain_attributes import PlainAttributes
from jitckpt.system.imports import when_imported
from jitckpt.worker import advice


def test_a_call_comes_with_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "framework_of_a_test.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    told: list[int] = []
    when_imported({"framework_of_a_test": lambda module: told.append(module.value)})
    assert told == []
    import framework_of_a_test  # type: ignore[import-not-found]

    assert told == [3]
    assert framework_of_a_test.__spec__.loader is framework_of_a_test.__loader__
    del sys.modules["framework_of_a_test"]


def test_a_call_comes_at_once_where_it_is_imported() -> None:
    told: list[types.ModuleType] = []
    when_imported({"random": told.append})
    assert told == [random]


class SeededLate(Sampler[int]):
    """As Accelerate's: its generator is made with its first draw."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
            self.generator.manual_seed(4)
        yield from torch.randperm(6, generator=self.generator).tolist()

    def __len__(self) -> int:
        return 6


def test_a_framework_that_is_built_otherwise_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its training must not end because a newer version has other names."""
    monkeypatch.setattr(protection, "_taken", "")
    trainer = SimpleNamespace()
    assert protection.unless_unknown("titan 9", lambda: trainer.job_config) is None
    assert "titan 9: recognised, but not protected: it is built otherwise" in capsys.readouterr().err
    assert protection.is_taken()
    assert protection.unless_unknown("titan 9", lambda: trainer) is trainer


def test_a_training_that_is_brought_back_does_not_go_on_unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it would begin anew."""
    brought_back: Any = SimpleNamespace(restored=5)
    monkeypatch.setattr(protection, "_current", brought_back)
    trainer = SimpleNamespace()
    with pytest.raises(AttributeError, match="checkpointer"):
        protection.unless_unknown("titan 9", lambda: trainer.checkpointer)


def test_a_generator_that_is_made_late_comes_back() -> None:
    first = SeededLate()
    list(first)
    saved = Generators(DataLoader(range(6), sampler=first)).capture()  # type: ignore[arg-type]
    expected = list(first)
    again = SeededLate()
    generators = Generators(DataLoader(range(6), sampler=again))  # type: ignore[arg-type]
    generators.restore(tree_codec.decode(saved.tree, saved.tensors))
    assert list(again) == expected


class Told(Sampler[int]):
    """As one that somebody has told an epoch, which so has a number that it is not built with."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(6).tolist()

    def __len__(self) -> int:
        return 6


def test_a_number_that_a_sampler_is_not_built_with_comes_back() -> None:
    first = Told()
    vars(first)["told"] = 1
    saved = Generators(DataLoader(range(6), sampler=first)).capture()  # type: ignore[arg-type]
    again = Told()
    Generators(DataLoader(range(6), sampler=again)).restore(  # type: ignore[arg-type]
        tree_codec.decode(saved.tree, saved.tensors)
    )
    assert vars(again)["told"] == 1


class Counting:
    """As a callback of the script's own, derived from a library's."""

    def __init__(self) -> None:
        self.seen: list[float] = []


def test_the_script_s_own_objects_are_kept_and_a_library_s_are_not() -> None:
    own, theirs = Counting(), SimpleNamespace(seen=[])
    owners = owners_among(numbered([own, theirs]))
    assert [*owners] == ["callback 0"]
    kept = PlainAttributes(owners)
    own.seen.append(1.0)
    assert kept.changed() == {"callback 0": {"seen": [1.0]}}


def test_what_bases_of_a_library_set_is_theirs() -> None:
    class Lines(DataLoader[int]):
        position = 0

    names = names_of_others(Lines)
    assert {"num_workers", "sampler", "_iterator"} <= names
    assert not is_kept(names, "sampler", "x")
    assert is_kept(names, "position", "x")
    assert not is_kept(names, "num_workers", 2)


def test_what_a_layer_of_torch_s_sets_is_a_setting() -> None:
    class Fading(nn.Dropout):
        pass

    names = names_of_others(Fading)
    assert is_kept(names, "p", 0.1)
    assert is_kept(names, "training", True)
    assert not is_kept(names, "_buffers", {})


class Noisy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(()) + index


class DataLoaderShard:
    """As Accelerate's: a batch ahead of what it hands out."""

    def __init__(self, base: DataLoader[Any]) -> None:
        self.base_dataloader, self.rng_types, self.iteration = base, None, 0

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.base_dataloader)
        try:
            current = next(iterator)
        except StopIteration:
            return
        for following in iterator:
            yield current
            current = following
        yield current
        self.iteration += 1


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [(read_ahead.is_read_ahead, read_ahead.begin), (held_back.is_held_back, held_back.HeldBackPass)]
    monkeypatch.setattr(data_pass, "OTHER_KINDS", known)


def base() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=2, sampler=RandomSampler(Noisy()))


def epoch(one: Pass, number: int) -> list[torch.Tensor]:
    """Draw batches, with random numbers of the training between them."""
    found = []
    for _ in range(number):
        batch = one.next()
        found.append(torch.cat([batch, torch.rand(1)]))
    return found


def goes_on(make: Callable[[], Any], left_out: int) -> None:
    """Kill a training at each batch; the next one's batches and random numbers are as undisturbed."""
    torch.manual_seed(1)
    undisturbed = epoch(Loader(make(), pytest.fail).begin(), 6)
    for done in range(1, 6):
        torch.manual_seed(1)
        before = Loader(make(), pytest.fail).begin()
        epoch(before, done)
        state, host = before.state, Generators().capture()
        torch.manual_seed(99)  # another process
        one = Loader(make(), pytest.fail).begin(PassState(**vars(state)))
        Generators().restore(tree_codec.decode(host.tree, host.tensors))
        if left_out:
            assert torch.equal(one.next(), undisturbed[done - 1][:-1])
        rest = epoch(one, 6 - done)
        assert all(map(torch.equal, rest, undisturbed[done:])), done


def test_a_pass_that_reads_ahead_goes_on() -> None:
    goes_on(lambda: DataLoaderShard(base()), left_out=0)


@pytest.mark.parametrize("watching", [False, True])
def test_a_pass_that_holds_its_last_batch_back_goes_on(
    watching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a loop has begun: what it makes is chosen, by the pass inside."""
    if watching:
        monkeypatch.setattr(made_in_loop, "_known", made_in_loop._Known())
    goes_on(lambda: HeldBack(base(), lambda: 1), left_out=1)


def test_one_whose_loader_has_a_generator_does() -> None:
    """Its first batch came with another order: the loader draws a seed before its sampler draws."""

    def with_generator() -> HeldBack:
        generator = torch.Generator().manual_seed(7)
        inner = DataLoader(Noisy(), batch_size=2, shuffle=True, generator=generator)
        return HeldBack(inner, lambda: 1)

    goes_on(with_generator, left_out=1)


def one_ahead(one: Pass, number: int) -> list[torch.Tensor]:
    """Train with batches, the next of which is drawn before each, as Lightning does with a stream."""
    found, ahead = [], one.next()
    for _ in range(number):
        batch = ahead
        try:
            ahead = one.next()
        except StopIteration:
            ahead = None
        found.append(torch.cat([batch, torch.rand(1)]))
    return found


@pytest.mark.parametrize("done", range(1, 7))
def test_a_batch_that_is_drawn_ahead_is_held_back_with_the_last_one(done: int) -> None:
    def loader() -> Loader:
        return Loader(HeldBack(base(), lambda: 2), pytest.fail)

    torch.manual_seed(1)
    undisturbed = one_ahead(loader().begin(), 6)
    torch.manual_seed(1)
    before = loader().begin()
    one_ahead(before, done)
    state, host = before.state, Generators().capture()
    torch.manual_seed(99)  # another process
    again = loader().begin(PassState(**vars(state)))
    Generators().restore(tree_codec.decode(host.tree, host.tensors))
    restored, ahead = again.next(), None
    assert torch.equal(restored, undisturbed[done - 1][:-1])
    if done < 6:
        ahead = again.next()
    for number in range(done, 6):
        batch, ahead = ahead, None if number == 5 else again.next()
        assert batch is not None
        assert torch.equal(torch.cat([batch, torch.rand(1)]), undisturbed[number])


def test_the_doctor_names_frameworks() -> None:
    assert checks.check_frameworks({}) == []
    (row,) = checks.check_frameworks({"lightning": "2.6.6"})
    assert row.state == "ok"
    assert "lightning 2.6.6" in row.found


class Stateful(DataLoader[Any]):
    """As torchdata's: its state tells how many batches it gave, and not what its sampler drew them by."""

    given = skipped = 0

    def __iter__(self) -> Any:
        skipped, self.skipped, self.given = self.skipped, 0, 0
        for number, batch in enumerate(super().__iter__()):
            self.given = number + 1
            if number >= skipped:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["given"]


@pytest.mark.parametrize("done", [1, 2])
def test_a_loader_with_a_state_goes_on_in_its_second_epoch_where_a_batch_is_held_back(
    done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_pass, "OTHER_KINDS", [(held_back.is_held_back, held_back.HeldBackPass)])

    def loader() -> Loader:
        inner = Stateful(range(6), sampler=SeededLate(), batch_size=2)  # type: ignore[arg-type]
        return Loader(HeldBack(inner, lambda: 1), pytest.fail)

    one = loader()
    assert len([*drawn(one.begin())]) == 3
    second = one.begin()
    batches = [second.next().tolist() for _ in range(done)]
    saved, host = second.state, torch.get_rng_state()
    again = loader().begin(saved)
    torch.set_rng_state(host)
    assert [again.next().tolist(), *drawn(again)] == [batches[-1], *drawn(second)]


def drawn(one: Pass) -> Iterator[Any]:
    while True:
        try:
            batch = one.next()
        except StopIteration:
            return
        yield batch.tolist()


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have a framework be imported; yield what is said."""
    said: list[str] = []
    monkeypatch.setattr(protection, "tell", said.append)
    monkeypatch.setattr(protection, "_taken", "")
    monkeypatch.setattr(idle, "_imported", [])
    monkeypatch.setattr(idle, "_handle", None)
    monkeypatch.setattr(idle, "_steps", 0)
    package = types.ModuleType("lightning")
    package.__version__ = "2.6.6"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", package)
    idle.watch(types.ModuleType("lightning.pytorch.trainer.trainer"))
    later = register_optimizer_step_post_hook(lambda *_: None)
    yield said
    later.remove()
    if idle._handle is not None:
        idle._handle.remove()


def make_steps(number: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for _ in range(number):
        parameter.grad = torch.ones(1)
        optimizer.step()


def test_a_framework_that_has_no_training_in_hand_is_named_once(imported: list[str]) -> None:
    make_steps(idle.SAID_AT - 1)
    assert imported == []
    make_steps(5)
    (line,) = imported
    assert line.startswith("lightning 2.6.6: recognised, but not protected: ")
    assert "Trainer.fit was not called" in line


def test_nothing_is_said_where_a_framework_has_taken_the_training(
    imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protection, "_taken", "lightning")
    make_steps(5)
    assert imported == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *((name, "protect") for name in ("accelerate", "deepspeed", "megatron", "torchtitan")),
        *((name, "Callback") for name in ("lightning", "transformers")),
    ],
)
def test_each_adapter_has_its_line_for_other_launchers(name: str, line: str) -> None:
    """Megatron's was in the guide alone: there was no such attribute where nobody had imported it before."""
    assert name in frameworks.ADAPTERS
    assert callable(getattr(getattr(frameworks, name), line))


def test_steps_that_a_framework_tries_are_no_training(imported: list[str]) -> None:
    """Lightning's search for a rate was said to be a loop without Trainer.fit."""
    with idle.not_counting():
        make_steps(idle.SAID_AT + 1)
    make_steps(idle.SAID_AT - 1)
    assert imported == []
    make_steps(1)
    assert len(imported) == 1


def test_what_a_tuner_of_lightnings_puts_back_begins_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was taken for the training's beginning, and the training for another one, without protection."""
    begun: list[Any] = []

    class Training:
        protection = None

        def __init__(self, trainer: Any, version: str) -> None:
            begun.append(trainer)

    monkeypatch.setattr(lightning, "LightningTraining", Training)
    monkeypatch.setattr(lightning_logs, "training_begins", lambda *_: None)
    trainer = SimpleNamespace(state=SimpleNamespace(fn=SimpleNamespace(value="fit")))
    connector = SimpleNamespace(trainer=trainer)

    def restore_training_state() -> None:
        lightning._begin(lambda: None, connector, "lightning 2.6.6")

    lightning._puts_back_what_was_tried(restore_training_state, connector)
    assert begun == []
    vars(trainer)[lightning._TRAINING] = "of a fit before"
    restore_training_state()
    assert begun == [trainer]
    assert [*vars(trainer)] == ["state"]


def test_doctor_repeats_what_was_said_of_a_framework() -> None:
    said = (
        "epoch 1\njitckpt: a 1: recognised. Protected: model.\n"
        "jitckpt: b 2: recognised, but not protected: no.\n"
    )
    assert checks.check_recognised(said) == [
        checks.Row("framework", "ok", "a 1: recognised. Protected: model."),
        checks.Row("framework", "problem", "b 2: recognised, but not protected: no."),
    ]


def test_callbacks_that_add_to_checkpoints_are_named() -> None:
    base = type("Callback", (), {"on_save_checkpoint": lambda self, *_: None})
    averaging = type("WeightAveraging", (base,), {"on_save_checkpoint": lambda self, *_: None})
    silent = type("Silent", (base,), {})
    trainer = types.SimpleNamespace(callbacks=[averaging(), silent()])
    assert "on_save_checkpoint of WeightAveraging adds" in lightning._adding_to_checkpoints(trainer)
    trainer.callbacks = [silent()]
    assert lightning._adding_to_checkpoints(trainer) == ""


def test_sentences_name_what_helps_where_a_framework_has_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "save_every" in advice.current().save_every
    monkeypatch.setattr(advice, "_current", advice.BY_INIT)
    advice.of_framework("keep them in a callback")
    helps = advice.current()
    assert helps.save_every == "start it with `jitckpt run --save-every N`"
    assert "jitckpt.init" not in helps.keep + helps.counter + helps.exact_at_epochs_end


class SkipBatchSampler(BatchSampler):
    """As Accelerate's, in name."""


def test_a_pass_of_accelerate_is_over_a_prepared_loader_or_what_skips_its_first_batches() -> None:
    data = Noisy()
    prepared = DataLoader(data, batch_size=2)
    skipping = DataLoader(data, batch_sampler=SkipBatchSampler(RandomSampler(data), 2, drop_last=False))
    assert accelerate._is_or_skips(prepared, prepared)
    assert accelerate._is_or_skips(skipping, prepared)
    assert not accelerate._is_or_skips(DataLoader(data, batch_size=2), prepared)  # an evaluation's
    of_others = DataLoader(Noisy(), batch_sampler=SkipBatchSampler(RandomSampler(data), 2, drop_last=False))
    assert not accelerate._is_or_skips(of_others, prepared)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(protection, "_say_first", found.append)
    monkeypatch.setattr(protection, "_taken", "")
    return found


def test_a_training_that_parts_its_ranks_is_not_protected(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class LocalSGD:
        def __init__(self, enabled: bool) -> None:
            self.enabled = enabled

    theirs = types.ModuleType("accelerate.local_sgd of this test")
    theirs.LocalSGD = LocalSGD  # type: ignore[attr-defined]
    local_sgd.install(theirs)
    LocalSGD(enabled=False)
    assert told == []
    closed: list[None] = []
    job = SimpleNamespace(close=lambda: closed.append(None))
    monkeypatch.setattr(protection, "_current", SimpleNamespace(job=job))
    for _ in range(2):  # as a script makes one in each epoch
        LocalSGD(enabled=True)
    assert told == [local_sgd.NOT_PROTECTED]
    assert protection.is_taken()
    assert closed == [None]


def test_a_start_is_the_scripts_that_has_loaded_other_checkpoints_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_checkpoints, "_loaded", [])
    root, first, second = tmp_path / "saves", tmp_path / "first", tmp_path / "second"
    for folder in (root, first, second):
        folder.mkdir()
    (first / "model").write_text("weights")
    (second / "model").write_text("more weights")
    assert not own_checkpoints.are_others(root)
    own_checkpoints.loaded(first)
    assert own_checkpoints.are_others(root)
    own_checkpoints.keep(root, 1)
    assert own_checkpoints.are_others(root)
    own_checkpoints.keep(root, 0)
    assert not own_checkpoints.are_others(root)
    own_checkpoints.loaded(second)
    assert own_checkpoints.are_others(root)


def test_files_that_another_rank_removes_while_they_are_looked_at_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_checkpoints, "_loaded", [])
    (tmp_path / "model").write_text("weights")
    (tmp_path / "removed").symlink_to("nothing")
    passing = tmp_path / "passing"
    passing.touch()
    look = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        found = look(path, **options)
        if os.fspath(path) == str(passing):
            passing.unlink()
        return found

    monkeypatch.setattr(os, "stat", stat)
    own_checkpoints.loaded(tmp_path)
    (seen,) = own_checkpoints._loaded
    assert "'model', 7, " in seen
    assert "removed" not in seen


def test_a_job_whose_script_has_brought_itself_back_is_not_restored_over_that(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Restored:
        root, identity = Path("saves"), SimpleNamespace(rank=0)
        is_closed = False
        is_left_to_script: Callable[[], bool]

        def restore(self) -> int:
            if self.is_left_to_script():
                raise LeftToScriptError("")
            return 3

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(own_checkpoints, "are_others", lambda root: True)
    job: Any = Restored()
    assert protection._restored("a framework", job, "load_state") is None
    assert job.is_closed
    assert "the script has gone on from its own checkpoint (load_state)" in told[0]
    monkeypatch.setattr(own_checkpoints, "are_others", lambda root: False)
    again = protection._restored("a framework", job, "load_state")
    assert again is not None
    assert again.restored == 3


def test_that_the_script_may_load_its_own_checkpoints_is_in_what_is_not_protected() -> None:
    frame = sys._getframe()

    def load(accelerator: Any) -> None:
        accelerator.load_state("newest")

    assert "(load_state)" in own_checkpoints.left_out(frame, "load_state")
    assert own_checkpoints.left_out(frame, "load_checkpoint") == ""


def test_numbered_checkpoints_that_are_made_again_are_removed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for number in range(4):
        (checkpoints / f"checkpoint_{number}").mkdir(parents=True)
    (checkpoints / "checkpoint_best").mkdir()
    theirs = SimpleNamespace(
        project_dir=str(tmp_path),
        save_iteration=2,
        is_local_main_process=True,
        wait_for_everyone=lambda: None,
    )
    monkeypatch.setattr(accelerate, "_has_removed", False)
    for restored, left in ((0, {"0", "1", "2", "3", "best"}), (5, {"0", "1", "best"})):
        monkeypatch.setattr(protection, "_current", SimpleNamespace(restored=restored))
        accelerate._remove_later_ones(theirs)
        assert {folder.name.partition("_")[2] for folder in checkpoints.iterdir()} == left
    (checkpoints / "checkpoint_2").mkdir()
    accelerate._remove_later_ones(theirs)
    assert (checkpoints / "checkpoint_2").exists()
