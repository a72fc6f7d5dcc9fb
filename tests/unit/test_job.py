"""A job without the preloaded library: arguments, the warning, and restoring what was saved before."""

import copy
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

import jitckpt
from jitckpt.encoding.strides import others_than_rows
from jitckpt.errors import CheckpointError, JitckptError, TreeError
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.state.parallel import local
from jitckpt.worker import job as job_module
from jitckpt.worker.steps_ahead import max_ahead


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No job is left over from another test, and nothing comes from this process's own surroundings."""
    for name in [
        name for name in os.environ if name.startswith("JITCKPT_") or name in ("RANK", "WORLD_SIZE")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield
    if job_module._current is not None:
        job_module._current.close()
    job_module._base_of_next_job = None


def objects(width: int = 3) -> dict[str, Any]:
    model = nn.Linear(2, width)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}


def init(*args: Any, **changes: Any) -> jitckpt.Job:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return jitckpt.init(*args, **changes)


def write_save(root: Path, of: jitckpt.Job, step: int = 4, **identity: Any) -> Path:
    """Write a save as the built-in saver does, of this job's present state."""
    host = of._host
    shared, local, progress = host.shared(), host.local(), host.progress()
    tensors = shared.tensors()
    for encoded in (*(part.on_host() for part in shared.optimizers), progress, *local.values()):
        tensors |= encoded.tensors
    document = {
        "optimizers": [part.on_host().tree for part in shared.optimizers],
        "progress": progress.tree,
        "scheduler_steps_due": [0] * len(host.schedulers),
        "usual_scheduler_steps": [0] * len(host.schedulers),
        "scaler": None,
        "frozen": [*shared.held.frozen],
        "strides": others_than_rows(shared.tensors()),
        "unsettled": False,
        "local": {
            "final": True,
            "trees": {name: encoded.tree for name, encoded in local.items()},
            "missing": [],
            "left_out": [],
        },
    }
    who = Identity(**(vars(of.identity) | identity))
    with SaveFolder(root, who, step, "rank", "builtin") as folder:
        folder.add_tensors(layout.TENSORS_FILE, tensors)
        folder.add_json(layout.STATE_FILE, document)
        return folder.commit()[0]


def test_one_warning_says_what_is_missing_and_that_the_job_is_unprotected() -> None:
    with pytest.warns(RuntimeWarning) as caught:
        jitckpt.init(**objects())
    (warning,) = caught
    assert str(warning.message).startswith("jitckpt: this job runs unprotected. ")
    assert warning.filename == __file__
    assert Path("ckpt/job.json").exists()


def test_an_unprotected_job_has_no_hooks() -> None:
    given = objects()
    init(**given)
    assert not given["model"]._forward_hooks
    assert not given["optimizer"]._optimizer_step_post_hooks


def test_a_fresh_start_restores_nothing() -> None:
    assert init(**objects()).restore() == 0
    assert jitckpt.jit_get_checkpoint_path("ckpt") is None
    assert jitckpt.jit_get_checkpoint_path("never used") is None
    assert not Path("never used").exists()


def test_restore_works_without_the_library(tmp_path: Path) -> None:
    first = objects()
    job = init(checkpoint_dir=tmp_path / "c", **first)
    first["model"](torch.ones(1, 2)).sum().backward()
    first["optimizer"].step()
    path = write_save(tmp_path / "c", job)
    expected = torch.rand(2)
    job.close()
    second = objects()
    job = init(checkpoint_dir=tmp_path / "c", **second)
    assert job.restore() == 4
    assert torch.equal(torch.rand(2), expected)
    assert torch.equal(first["model"].weight, second["model"].weight)
    assert jitckpt.jit_get_checkpoint_path(tmp_path / "c") == path
    state = second["optimizer"].state[second["model"].weight]
    assert float(state["step"]) == 1
    assert torch.equal(state["exp_avg"], first["optimizer"].state[first["model"].weight]["exp_avg"])


def trained(given: dict[str, Any]) -> None:
    given["model"](torch.ones(1, 2)).sum().backward()
    given["optimizer"].step()


@pytest.mark.filterwarnings("error:jitckpt. No state")
def test_steps_of_an_unprotected_job_count_on_from_the_save_without_a_call_of_restore() -> None:
    given = objects()
    job = init(**given)
    for step in job.steps(6):
        trained(given)
        if step == 3:
            write_save(Path("ckpt"), job, step=2)  # two of these iterations made no optimizer step
            break
    job.close()
    assert [*init(**objects()).steps(6)] == [4, 5]


@pytest.mark.filterwarnings("error:jitckpt. No state")
def test_a_save_of_a_loop_over_range_is_gone_on_with_by_steps() -> None:
    given = objects()
    job = init(**given)
    trained(given)
    write_save(Path("ckpt"), job, step=3)
    job.close()
    assert [*init(**objects()).steps(5)] == [3, 4]


@pytest.mark.filterwarnings("error:jitckpt. No state")
def test_batches_of_an_unprotected_job_go_on_and_what_the_head_of_the_epoch_changed_is_put_back() -> None:
    def scheduled(given: dict[str, Any]) -> torch.optim.lr_scheduler.ExponentialLR:
        return torch.optim.lr_scheduler.ExponentialLR(given["optimizer"], 0.5)

    given = objects()
    job = init(**given, scheduler=(scheduler := scheduled(given)))
    batches = []
    for _ in job.epochs(1):
        trained(given)
        scheduler.step()
        for batch in job.batches(DataLoader(range(6), shuffle=True)):  # type: ignore[arg-type]
            batches.append((int(batch), random.random()))
            if len(batches) == 2:
                write_save(Path("ckpt"), job, step=2)
    job.close()
    again = objects()
    job = init(**again, scheduler=(scheduler := scheduled(again)))
    for _ in job.epochs(1):
        random.random()
        scheduler.step()
        rest = [
            (int(batch), random.random(), again["optimizer"].param_groups[0]["lr"])
            for batch in job.batches(DataLoader(range(6), shuffle=True))  # type: ignore[arg-type]
        ]
    assert rest == [(*drawn, 0.05) for drawn in batches[2:]]


def initialised(given: dict[str, Any]) -> None:
    nn.init.normal_(given["model"].weight)


def through_data(given: dict[str, Any]) -> None:
    given["model"].weight.data.mul_(0.5)


def rolled(given: dict[str, Any]) -> None:
    given["model"].weight.data.copy_(given["model"].weight.data.roll(1, 0))


def put_in_place(given: dict[str, Any]) -> None:
    """Another parameter in the place of one, whose state is dropped."""
    model, optimizer = given["model"], given["optimizer"]
    old, model.bias = model.bias, nn.Parameter(model.bias.detach() + 1)
    group = optimizer.param_groups[0]["params"]
    group[[one is old for one in group].index(True)] = model.bias
    optimizer.state.pop(old, None)


def forgotten(given: dict[str, Any]) -> None:
    given["optimizer"].state.clear()


def halved(given: dict[str, Any]) -> None:
    for state in given["optimizer"].state.values():
        state["exp_avg"].mul_(0.5)
        state["step"].fill_(1)


def added(given: dict[str, Any]) -> None:
    given["optimizer"].add_param_group({"params": [given["model"].weight], "lr": 0.01})


def frozen(given: dict[str, Any]) -> None:
    given["model"].bias.requires_grad_(not given["model"].bias.requires_grad)


HEADS = [initialised, through_data, rolled, put_in_place, forgotten, halved, added, frozen]


@pytest.mark.filterwarnings("error:jitckpt. No state")
@pytest.mark.parametrize("head", HEADS)
def test_what_the_head_of_an_epoch_changes_of_parameters_and_optimizer_is_not_changed_twice(
    head: Callable[[dict[str, Any]], None],
) -> None:
    """A restart in the middle of the epoch does it again, to the state that has it already."""

    def built() -> dict[str, Any]:
        torch.manual_seed(1)
        given = objects()
        if head is added:
            given["optimizer"] = torch.optim.Adam([given["model"].bias], lr=0.1)
        return given

    def train(given: dict[str, Any], job: jitckpt.Job, *, saves: bool) -> list[Any]:
        seen = []
        for epoch in job.epochs(2):
            if epoch == 1:
                head(given)
            for batch in job.batches(DataLoader(range(4))):  # type: ignore[arg-type]
                given["model"].zero_grad()
                given["model"](torch.tensor([[1.0, float(batch)]])).pow(2).sum().backward()
                given["optimizer"].step()
                seen.append([one.tolist() for one in given["model"].parameters()])
                if saves and (epoch, int(batch)) == (1, 1) and job._host.model is not None:
                    job._host.model.follow()
                    write_save(Path("ckpt"), job, step=6)
        job.close()
        return seen

    given = built()
    undisturbed = train(given, init(**given), saves=True)
    again = built()
    assert train(again, init(**again), saves=False) == undisturbed[6:]
    assert "add_param_group" not in vars(again["optimizer"])


def penalised(given: dict[str, Any]) -> None:
    (given["model"].weight.square().sum() * 0.5).backward()


def scaled(given: dict[str, Any]) -> None:
    for one in given["model"].parameters():
        one.grad = torch.ones_like(one) if one.grad is None else one.grad * 0.5


def clipped(given: dict[str, Any]) -> None:
    nn.utils.clip_grad_norm_(given["model"].parameters(), 0.5)


def logged(given: dict[str, Any]) -> None:
    [one.grad.norm().item() for one in given["model"].parameters() if one.grad is not None]


def stepped(given: dict[str, Any]) -> None:
    given["optimizer"].zero_grad()
    penalised(given)
    clipped(given)
    given["optimizer"].step()


def copied(given: dict[str, Any]) -> None:
    copy.deepcopy(given["model"]).zero_grad()


def as_it_is(given: dict[str, Any]) -> None:
    """The gradients that the loop leaves are the next epoch's affair alone."""


@pytest.mark.usefixtures("nothing_is_watched")
@pytest.mark.filterwarnings("error:jitckpt. No state")
@pytest.mark.parametrize(("place", "clears"), [("head", "behind"), ("tail", "before")])
@pytest.mark.parametrize("change", [penalised, scaled, clipped, logged, stepped, copied, as_it_is])
def test_gradients_that_an_epoch_changes_outside_of_its_batches_are_the_same_or_named(
    change: Callable[[dict[str, Any]], None], clears: str, place: str
) -> None:
    def train(directory: str) -> tuple[list[Any], list[str]]:
        torch.manual_seed(1)
        given, seen = objects(), []
        job = init(**given, checkpoint_dir=directory)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in job.epochs(3):
                if place == "head":
                    change(given)
                for batch in job.batches(DataLoader(range(3))):  # type: ignore[arg-type]
                    if clears == "before":
                        given["optimizer"].zero_grad()
                    given["model"](torch.tensor([[1.0, float(batch)]])).pow(2).sum().backward()
                    given["optimizer"].step()
                    seen.append([one.tolist() for one in given["model"].parameters()])
                    if clears == "behind":
                        given["optimizer"].zero_grad()
                    if directory == "undisturbed" and len(seen) == 4:
                        write_save(Path("4"), job, step=4)
                if directory == "undisturbed" and len(seen) == 6:
                    write_save(Path("6"), job, step=6)
                if place == "tail":
                    change(given)
        job.close()
        return seen, [str(one.message) for one in said if "reads gradients" in str(one.message)]

    undisturbed, said = train("undisturbed")
    assert len(said) == (clears == "before" and change in (scaled, clipped, logged))
    assert "grad" not in vars(torch.Tensor)
    for step in (4, 6):
        again, _ = train(str(step))
        assert len(again) == 9 - step
        assert again == undisturbed[step:] or said, step


def test_what_the_head_of_an_epoch_changes_twice_beside_a_save_function_is_said() -> None:
    given = objects()
    job = init(**given)
    for _ in job.epochs(1):
        for batch in job.batches(DataLoader(range(4))):  # type: ignore[arg-type]
            trained(given)
            if int(batch) == 1:
                write_save(Path("ckpt"), job, step=2)
    job.close()
    again = objects()
    job = init(**again)
    for _ in job.epochs(1):
        job._restored._put_shared = None  # as where the save is the script's own
        initialised(again)
        with pytest.warns(RuntimeWarning, match="before the batches of an epoch"):
            assert len([*job.batches(DataLoader(range(4)))]) == 2  # type: ignore[arg-type]


def heads(given: dict[str, Any], epoch: int) -> dict[str, Any]:
    """What a script may compute before an epoch's batches; by name."""
    model = given["model"]
    return {
        "teacher": copy.deepcopy(model),
        "norm": model.weight.detach().norm(),
        "scale": float(model.weight.detach().sum()),
        "weights": [float(one) for one in model.weight.flatten()],
        "alias": model.weight.data,
        "momenta": [state["exp_avg"] for state in given["optimizer"].state.values()],
        "rate": 0.1 / (epoch + 1),
        "began": time.time(),
    }


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, "before batches") for name in heads(objects(), 0)),
        *(("scale", place) for place in ("before steps", "between two loops")),
    ],
)
def test_what_an_epoch_computes_otherwise_outside_of_its_loops_is_said_at_the_restart(
    name: str, place: str
) -> None:
    def train(given: dict[str, Any], *, saves: bool) -> list[str]:
        job = init(**given)
        steps = 0
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for epoch in job.epochs(2):
                for _ in job.batches([0]) if place == "between two loops" else ():
                    trained(given)
                    steps += 1
                computed = heads(given, epoch)[name]
                loader: Any = DataLoader(range(4))  # type: ignore[arg-type]
                for number in job.steps(4) if place == "before steps" else job.batches(loader):
                    trained(given)
                    steps += 1
                    if saves and (epoch, int(number)) == (1, 1):
                        write_save(Path("ckpt"), job, step=steps)
                assert computed is not job
        job.close()
        return [str(one.message) for one in said if "computes in an epoch" in str(one.message)]

    given = objects()
    assert train(given, saves=True) == []
    again = train(objects(), saves=False)
    # Others keep it, or it does not follow from the parameters.
    if name in ("alias", "momenta", "rate", "began"):
        assert again == []
    else:
        assert len(again) == 1
        assert "otherwise than before the failure: computed." in again[0]


def test_the_directory_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITCKPT_CHECKPOINT_DIR", "elsewhere")
    init(**objects())
    assert Path("elsewhere/job.json").exists()


@pytest.mark.parametrize(
    ("identity", "sentence"),
    [
        ({"world_size": 2}, "is of a job with 2 ranks; this one has 1"),
        ({"job": "another"}, "is of another job"),
        ({"fingerprint": "x"}, "is of another model or optimizer"),
    ],
)
def test_saves_that_dont_fit_are_an_error(identity: dict[str, Any], sentence: str) -> None:
    job = init(**objects())
    write_save(Path("ckpt"), job, **identity)
    with pytest.raises(CheckpointError, match=sentence):
        job.restore()
    assert len(folders.find(Path("ckpt"))) == 1


def test_a_damaged_save_is_passed_over_with_a_warning() -> None:
    job = init(**objects())
    write_save(Path("ckpt"), job, step=3)
    newer = write_save(Path("ckpt"), job, step=5)
    os.truncate(newer / layout.TENSORS_FILE, 50)
    with pytest.warns(RuntimeWarning) as caught:
        assert job.restore() == 3
    texts = [str(warning.message) for warning in caught]
    assert "A save was passed over" in texts[0]
    assert "step-0000000005/rank-00000/tensors.safetensors has 50 bytes" in texts[0]
    assert texts[1].endswith("Step 5 has no whole save of shard 0.")
    assert (newer.parent / "set-aside-rank-00000").is_dir()


def test_a_save_whose_document_lacks_something_is_an_error() -> None:
    job = init(**objects())
    with SaveFolder(Path("ckpt"), job.identity, 3, "rank", "builtin") as folder:
        folder.add_tensors(layout.TENSORS_FILE, job._host.parameters())
        folder.add_json(layout.STATE_FILE, {})
        folder.commit()
    with pytest.raises(CheckpointError, match="can't be restored: it lacks 'strides'"):
        job.restore()


def test_a_replicas_local_state_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    job = init(**objects())
    write_save(Path("ckpt"), job, rank=0)
    with pytest.warns(RuntimeWarning, match="Rank 1 left no state of its own after step 4: .* from rank 0"):
        assert job.restore() == 4


def test_the_path_is_known_before_init_and_counts_the_next_jobs_steps() -> None:
    job = init(**objects())
    path = write_save(Path("ckpt"), job, step=7)
    job.close()
    found = jitckpt.jit_get_checkpoint_path("ckpt")
    assert found == path.absolute()
    assert found / "model.pt" == path.absolute() / "model.pt"
    assert found + "/model.pt" == str(path.absolute() / "model.pt")
    job = init(lambda context: None, checkpoint_dir="ckpt")
    assert job._base == 7


class Opaque:
    def state_dict(self) -> Any:
        return {"sampler": {"fn": print}}

    def load_state_dict(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"model": None}, TypeError, "needs save_checkpoint=..., or model=... and optimizer=..."),
        ({"optimizer": []}, TypeError, "needs save_checkpoint"),
        ({"model": "m"}, TypeError, "model is a str; it must be a torch.nn.Module"),
        (
            {"optimizer": [3]},
            TypeError,
            "optimizer is a int; it must be a torch.optim.Optimizer, a list of them",
        ),
        ({"scheduler": 3}, TypeError, "scheduler is a int, which has no state_dict"),
        ({"extra": 3}, TypeError, "extra is a int, which has no state_dict"),
        ({"save_checkpoint": "f"}, TypeError, "save_checkpoint is a str; it must be a function"),
        ({"shard": 2, "shards": 2}, ValueError, "shard is 2; with shards=2 it must be from 0 to 1"),
        ({"shard": 0}, ValueError, "both shard and shards, or neither"),
        ({"save_every": 0}, ValueError, "save_every is 0; it must be at least 1"),
        ({"save_every": 5, "save_checkpoint": print}, ValueError, "a save function can't run beside"),
        ({"keep": 0}, ValueError, "keep is 0; at least one save has to stay"),
        ({"extra": Opaque()}, TreeError, "extra.sampler.fn is a builtins.builtin_function_or_method"),
        ({"checkpoint_dir": "/dev/null"}, CheckpointError, "whose path is not a file"),
    ],
)
def test_wrong_arguments_are_said(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        init(**(objects() | changes))
    init(**objects())


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


def sharded(mesh: DeviceMesh, fill: float) -> dict[str, Any]:
    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(distribute_tensor(torch.full((3, 2), fill), mesh, [Shard(0)]))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)}


def test_of_a_dtensor_the_local_part_is_saved_and_restored(tmp_path: Path, mesh: DeviceMesh) -> None:
    first = sharded(mesh, 1.0)
    job = init(**first, checkpoint_dir=tmp_path)
    first["model"].weight.grad = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)])
    first["model"].bias.grad = torch.ones(3)
    first["optimizer"].step()
    write_save(tmp_path, job)
    job.close()
    again = sharded(mesh, 2.0)
    job = init(**again, checkpoint_dir=tmp_path)
    assert job.restore() == 4
    weight, before = again["model"].weight, first["model"].weight
    assert weight.placements == before.placements
    assert torch.equal(weight.to_local(), before.to_local())
    for key, value in first["optimizer"].state[before].items():
        restored = again["optimizer"].state[weight][key]
        assert type(restored) is type(value)
        assert torch.equal(local(restored), local(value))


def test_a_parameter_of_a_kind_that_is_not_known_needs_a_save_function() -> None:
    class Scaled(torch.Tensor):
        pass

    model = nn.Linear(2, 3)
    model.weight = nn.Parameter(torch.ones(3, 2).as_subclass(Scaled))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match=r"The parameter weight is a Scaled, .* give jitckpt\.init a save"):
        init(model=model, optimizer=optimizer)


def test_a_buffer_that_is_made_of_other_tensors_needs_a_save_function() -> None:
    """What it shows is not all that it holds: scales, codes of a few bits."""
    model = nn.Linear(2, 3)
    parts = [torch.ones(2), torch.ones(3)]
    model.register_buffer("parts", torch.nested.nested_tensor(parts, layout=torch.jagged))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(TypeError, match=r"The buffer parts is a NestedTensor, .* give jitckpt\.init a save"):
        init(model=model, optimizer=optimizer)


def test_the_host_may_be_further_ahead_where_the_ring_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 64 << 20
    assert max_ahead(0, limit) == 32
    assert max_ahead(20_000, limit) == 32
    assert max_ahead(200_000, limit) == 8
    assert max_ahead(20_000, 4 << 20) == 8
    assert max_ahead(1 << 30, limit) == 8  # what does not fit is said as it is written
    monkeypatch.setenv("JITCKPT_FAULTS", "rank=0 step=3 phase=forward kind=kill")
    assert max_ahead(0, limit) == 8


def test_a_second_init_is_refused() -> None:
    job = init(**objects())
    with pytest.raises(JitckptError, match="called twice"):
        init(**objects())
    job.close()
    init(**objects())
