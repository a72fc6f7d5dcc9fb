"""The framework's own checkpoint, which a restart has written, is what it writes alone at that step."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import PROGRAMS, PROGRAMS_FOLDER, Program
from jobs import run, skip_unless_installed
from safetensors.torch import load_file

WRITES = """
import runpy
import sys

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as Loop

advance = Loop.advance


def and_saves(self, fetcher):
    advance(self, fetcher)
    if self.trainer.global_step == {step}:
        self.trainer.save_checkpoint({folder!r})


Loop.advance = and_saves
sys.path.insert(0, {programs!r})
runpy.run_path({path!r}, run_name="__main__")
"""
SAVES = """
import runpy
import sys

import transformers


class Saves(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save |= state.global_step == {step}


begin = transformers.Trainer.__init__


def and_saves(self, *given, callbacks, **named):
    begin(self, *given, callbacks=[*callbacks, Saves()], **named)


transformers.Trainer.__init__ = and_saves
sys.path.insert(0, {programs!r})
runpy.run_path({path!r}, run_name="__main__")
"""
GOES_ON = """
import runpy
import sys

import transformers

train = transformers.Trainer.train
transformers.Trainer.train = lambda self: train(self, resume_from_checkpoint={folder!r})
sys.path.insert(0, {programs!r})
runpy.run_path({path!r}, run_name="__main__")
"""
# In the middle of an epoch, and at its end.
FAULTS = {5: "rank=1 step=6 phase=backward kind=kill", 4: "rank=0 step=4 phase=between kind=kill"}


def told(part: Any) -> Any:
    """Return what tells a part of a checkpoint, tensors by their bytes."""
    if isinstance(part, torch.Tensor):
        return hashlib.sha256(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(part, np.ndarray):
        return part.tolist()
    if isinstance(part, dict):
        return {str(key): told(value) for key, value in part.items()}
    return [*map(told, part)] if isinstance(part, list | tuple) else part


@pytest.mark.parametrize("step", FAULTS)
def test_it_is_as_lightnings_own(step: int, tmp_path: Path) -> None:
    """It held the counters of the step before, and whoever loaded it made a batch twice."""
    program = PROGRAMS["lightning"]
    skip_unless_installed(program)
    _, said = run(program, 2, tmp_path / "job", "--fault", FAULTS[step])
    materialised = tmp_path / "job" / "ckpt" / "lightning" / f"step={step}" / "lightning.ckpt"
    assert materialised.is_file(), said[-6000:]
    own, script = tmp_path / "own.ckpt", tmp_path / "script.py"
    script.write_text(
        WRITES.format(folder=str(own), step=step, programs=str(PROGRAMS_FOLDER), path=str(program.path))
    )
    run(Program(program.needs, str(script)), 2, tmp_path / "alone", "--no-frameworks")
    found, expected = (
        told(torch.load(one, weights_only=False, map_location="cpu")) for one in (materialised, own)
    )
    for name, part in expected.items():
        assert found[name] == part, name


def script(text: str, place: Path, program: Program, **values: object) -> Program:
    """Return the program with something around it."""
    place.write_text(text.format(programs=str(PROGRAMS_FOLDER), path=str(program.path), **values))
    return Program(program.needs, str(place))


def parts_of(checkpoint: Path) -> dict[str, Any]:
    """Return what tells each file of a checkpoint, but for times, and that it was ordered."""
    found: dict[str, Any] = {}
    for file in sorted(checkpoint.iterdir()):
        if file.suffix == ".json":
            found[file.name] = json.loads(file.read_text())
        elif file.suffix == ".safetensors":
            found[file.name] = told(load_file(file))
        elif file.name != "training_args.bin":  # they have the folder's name in them
            found[file.name] = told(torch.load(file, weights_only=False, map_location="cpu"))
    state = found["trainer_state.json"]
    state["stateful_callbacks"]["TrainerControl"] = None
    timed = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    state["log_history"] = [
        {key: value for key, value in one.items() if key not in timed} for one in state["log_history"]
    ]
    return found


# The step that is restored; the last one is made by the others alone, and what follows it is made behind the
# restart.
TRANSFORMERS_FAULTS = {
    5: (("--fault", FAULTS[5]), {}),
    6: ((), {"LATE": "1:6"}),
}


@pytest.mark.parametrize("step", TRANSFORMERS_FAULTS)
def test_it_is_as_transformers_own(step: int, tmp_path: Path) -> None:
    """So who trains on from it without us comes to where the Trainer's own checkpoint leads."""
    program = PROGRAMS["transformers"]
    skip_unless_installed(program)
    flags, environment = TRANSFORMERS_FAULTS[step]
    _, said = run(program, 2, tmp_path / "job", *flags, **environment)
    name = f"checkpoint-{step}"
    materialised, own = tmp_path / "job" / "ckpt" / "transformers" / name, tmp_path / "alone" / "out" / name
    assert materialised.is_dir(), said[-6000:]
    run(script(SAVES, tmp_path / "saves.py", program, step=step), 2, tmp_path / "alone", "--no-frameworks")
    found, expected = parts_of(materialised), parts_of(own)
    assert found.keys() == expected.keys()
    for file, part in expected.items():
        assert found[file] == part, file


def test_transformers_alone_trains_on_from_it(tmp_path: Path) -> None:
    """As from its own. Its data are random here, which no resume of transformers' draws as they were."""
    program = PROGRAMS["transformers"]
    skip_unless_installed(program)
    run(program, 2, tmp_path / "job", "--fault", FAULTS[5])
    run(script(SAVES, tmp_path / "saves.py", program, step=5), 2, tmp_path / "alone", "--no-frameworks")
    found = []
    for place in ("job/ckpt/transformers", "alone/out"):
        folder = str(tmp_path / place / "checkpoint-5")
        goes_on = script(GOES_ON, tmp_path / "goes_on.py", program, folder=folder)
        ends, _ = run(goes_on, 2, tmp_path / f"from {place.partition('/')[0]}", "--no-frameworks")
        for end in ends.values():  # the runtime of an evaluation before the checkpoint is not compared
            end.pop("logs")
        found.append(ends)
    assert found[0] == found[1]
