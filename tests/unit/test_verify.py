"""What jitckpt verify takes for the script, and when it refuses to judge."""

from dataclasses import replace
from pathlib import Path

import pytest

from jitckpt.cli import main
from jitckpt.cli.script import script_of
from jitckpt.cli.verify import VerifyError, _chance
from jitckpt.rehearsal.runs import Run
from jitckpt.saves.final_state import FinalState


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--steps", "3"],
        ["--", "train.py", "--steps", "3"],
        ["--", "jitckpt", "run", "train.py", "--steps", "3"],
        ["--", "/usr/bin/torchrun", "train.py", "--steps", "3"],
        ["python", "-m", "torch.distributed.run", "train.py", "--steps", "3"],
        ["--", "python3", "train.py", "--steps", "3"],
    ],
    ids=" ".join,
)
def test_a_launcher_s_name_is_passed_over(command: list[str]) -> None:
    assert script_of(command) == ["train.py", "--steps", "3"]


def test_options_of_the_launcher_are_kept() -> None:
    assert script_of(["--", "torchrun", "-m", "package.train"]) == ["-m", "package.train"]


def ended(**digests: str) -> Run:
    return Run(0, 1.0, (), {0: FinalState(5, digests, ())}, (), (), ())


def test_generators_that_nobody_seeds_are_left_out() -> None:
    one, other = ({"parameters": "a", "random numbers, Python's": seed} for seed in "xy")
    assert _chance(ended(**one), ended(**other)) == ("random numbers, Python's",)
    assert _chance(ended(**one), ended(**one)) == ()


def test_a_training_that_does_not_repeat_itself_can_t_be_judged() -> None:
    one = ended(parameters="a", buffers="b")
    other = replace(one, final={0: FinalState(5, {"parameters": "c", "buffers": "b"}, ())})
    with pytest.raises(VerifyError, match="Two undisturbed runs ended with different parameters:"):
        _chance(one, other)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "there is no script to run"),
        (["--trials", "0", "--", "x.py"], "'0' is not a whole number of at least 1"),
        (["--kinds", "kill,melt", "--", "x.py"], "melt is none of signal, kill"),
        (["--keep", str(Path(__file__).parent), "--", "x.py"], "is there already"),
    ],
)
def test_wrong_calls_end_with_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", *arguments])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
