"""Of which job a snapshot is, and where its processes get their numbers."""

from typing import Any

import pytest

from jitckpt.decisions.transparent.whose import FIRST_NUMBER, begin_of_largest_gap, why_not

JOB: dict[str, Any] = {
    "command": ["python", "-u", "train.py", "--steps", "9"],
    "folder": "/home/me",
    "files": {"train.py": "1f"},
    "ranks": 2,
    "place": [0, 2],
    "devices": ["0", "1"],
    "user": 0,
    "versions": {"torch": "2.11"},
    "kernel": "6.18 x86_64",
    "processor": ["avx", "avx2"],
}


def test_the_same_command_is_the_same_job_on_a_processor_that_can_more() -> None:
    assert why_not(JOB, {**JOB, "processor": ["avx", "avx2", "avx512f"]}) == ""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"command": ["python", "-u", "train.py"]}, "of another command (python -u train.py --steps 9, and"),
        ({"folder": "/tmp"}, "of a job in another working folder (/home/me, and here it is /tmp)"),
        ({"files": {"train.py": "20"}}, "of a job whose train.py was another"),
        ({"files": {}}, "of a job whose train.py was another"),
        ({"place": [1, 2]}, "of another host's place in a job of so many hosts (0 2, and here it is 1 2)"),
        ({"ranks": 4}, "of a job of another number of ranks (2, and here it is 4)"),
        ({"devices": ["0", "2"]}, "of a job with other devices (0 1, and here it is 0 2)"),
        ({"user": 1}, "another user's (0, and here it is 1)"),
        ({"versions": {"torch": "2.12"}}, "of other versions of jitckpt, torch or Python"),
        ({"kernel": "6.19 x86_64"}, "of another kernel (6.18 x86_64, and here it is 6.19 x86_64)"),
        ({"processor": ["avx"]}, "of a processor that has avx2, which this one has not"),
    ],
)
def test_what_differs_is_said(other: dict[str, Any], words: str) -> None:
    assert why_not(JOB, {**JOB, **other}).startswith(words)


@pytest.mark.parametrize(
    ("numbers", "begin"),
    [([], FIRST_NUMBER), ([5, 700, 710], 710), ([9000, 9100], FIRST_NUMBER), ([5200, 9990], FIRST_NUMBER)],
)
def test_most_room_is_left(numbers: list[int], begin: int) -> None:
    assert begin_of_largest_gap(numbers, 10000) == begin
