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
