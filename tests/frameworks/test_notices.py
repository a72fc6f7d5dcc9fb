"""What a framework does itself as a job is to end is named, with who does what."""

import os
from pathlib import Path

import pytest
from cases import PROGRAMS, PROGRAMS_FOLDER, Program
from jobs import run, skip_unless_installed

# As Lightning starts with one task of SLURM's for each rank.
REQUEUES = """
import os
import runpy
import sys

for name, value in {{"PROCID": os.environ["RANK"], "LOCALID": os.environ["LOCAL_RANK"], "NTASKS": "2",
                    "NTASKS_PER_NODE": "2", "JOB_ID": "7", "NODEID": "0", "NODELIST": "localhost"}}.items():
    os.environ[f"SLURM_{{name}}"] = value
import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import SLURMEnvironment

trainer = pl.Trainer.__init__
plugins = [SLURMEnvironment(auto_requeue={requeues})]
pl.Trainer.__init__ = lambda self, **given: trainer(self, plugins=plugins, **given)
sys.path.insert(0, {folder!r})
runpy.run_path({path!r}, run_name="__main__")
"""

AVERAGES = """
import runpy
import sys
import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging

begin = pl.Trainer.__init__

def trainer(self, callbacks=(), **given):
    begin(self, callbacks=[*callbacks, StochasticWeightAveraging(1e-2, swa_epoch_start=1)], **given)

pl.Trainer.__init__ = trainer
sys.path.insert(0, {folder!r})
runpy.run_path({path!r}, run_name="__main__")
"""

SAVES_AT_SIGTERM = """
import runpy
import sys

import transformers

arguments = transformers.TrainingArguments
begin = arguments.__init__
arguments.__init__ = lambda self, **given: begin(self, **given, enable_jit_checkpoint={is_on})
sys.path.insert(0, {folder!r})
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.parametrize("is_on", [True, False])
def test_transformers_own_saves_at_sigterm_are_named(is_on: bool, tmp_path: Path) -> None:
    program = PROGRAMS["transformers"]
    skip_unless_installed(program)
    script = tmp_path / "script.py"
    script.write_text(
        SAVES_AT_SIGTERM.format(is_on=is_on, folder=str(PROGRAMS_FOLDER), path=str(program.path))
    )
    ends, said = run(Program(program.needs, str(script)), 2, tmp_path / "job")
    assert ends, said[-6000:]
    assert said.count("enable_jit_checkpoint of transformers saves when SIGTERM comes") == is_on, said[-6000:]


@pytest.mark.parametrize("requeues", [True, False])
def test_lightnings_requeueing_is_named(requeues: bool, tmp_path: Path) -> None:
    program = PROGRAMS["lightning"]
    skip_unless_installed(program)
    assert os.environ.get("SLURM_JOB_ID") is None, "this is no job of SLURM's"
    script = tmp_path / "script.py"
    script.write_text(REQUEUES.format(requeues=requeues, folder=str(PROGRAMS_FOLDER), path=str(program.path)))
    ends, said = run(Program(program.needs, str(script)), 2, tmp_path / "job")
    assert ends, said[-6000:]
    assert said.count("Lightning's handler of SIGUSR1 saves a checkpoint of its own") == requeues, said[
        -6000:
    ]


def test_a_callback_that_changes_schedulers_and_loops_as_it_goes_is_refused(tmp_path: Path) -> None:
    """A restart has other schedulers than a save of when it was at work."""
    program = PROGRAMS["lightning"]
    skip_unless_installed(program)
    script = tmp_path / "script.py"
    script.write_text(AVERAGES.format(folder=str(PROGRAMS_FOLDER), path=str(program.path)))
    ends, said = run(Program(program.needs, str(script)), 2, tmp_path / "job")
    assert ends, said[-6000:]
    assert said.count("recognised, but not protected: StochasticWeightAveraging") == 1, said[-6000:]
    assert "recognised. Protected" not in said
