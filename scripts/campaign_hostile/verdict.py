"""What came of a hostile run; pure decisions."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from campaign_hostile.job import Outcome
from campaign_hostile.trials import TRANSPARENT, Trial

EQUAL, SENTENCE, FELL = "equal", "sentence", "fell"
Final = Mapping[int, str]  # by rank


@dataclass(frozen=True)
class Verdict:
    """result: EQUAL, SENTENCE (it ended with the right one, and when started again as it should) or FELL."""

    trial: str
    result: str
    reasons: tuple[str, ...]
    seconds: float
    starts: int


def judge(trial: Trial, starts: Sequence[Outcome], undisturbed: Final) -> Verdict:
    """Return whether the last of a job's starts has ended as the undisturbed one, and each as it should."""
    reasons: list[str] = []
    first, last = starts[0], starts[-1]
    said = ""
    # Nothing is left to be saved, or to go on with, once the training is over on all ranks.
    over = first.final.keys() >= undisturbed.keys()
    if over:
        reasons += differences(first.final, undisturbed)
    if any(first.statuses) and not trial.ends and not over:
        said = _sentence(trial, first.output)
        if not said:
            reasons.append(f"it ended with {_statuses(first)} without the sentence that would be right")
    if any(last.statuses):
        reasons.append(f"start {len(starts)} ended with {_statuses(last)}")
    reasons += differences(last.final, undisturbed) if not any(last.statuses) else []
    saved = trial.saved and not over and trial.mode != TRANSPARENT
    if len(starts) > 1 and saved and last.restored < first.step - 1:
        reasons.append(f"{first.step} steps were done, and it went on from step {last.restored}")
    for number, start in enumerate(starts, 1):
        if start.late:
            reasons.append(f"start {number} did not end within {start.seconds:.0f} s")
        reasons += [f"start {number} left behind {thing}" for thing in start.left]
        reasons += [f"start {number}: {line}" for line in own_exceptions(start.output)]
    result = FELL if reasons else SENTENCE if said else EQUAL
    return Verdict(str(trial), result, tuple(reasons), sum(start.seconds for start in starts), len(starts))


def differences(final: Final, undisturbed: Final) -> list[str]:
    """Return in what the ranks ended differently, a text each."""
    found = []
    for rank, digest in sorted(undisturbed.items()):
        if rank not in final:
            found.append(f"rank {rank} did not come to its end")
        elif final[rank] != digest:
            found.append(f"rank {rank} ended differently")
    return found


FRAME = re.compile(r'^\s*(?:\[rank\d+\]: ?)?\s*File "([^"]+)", line \d+')
ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)?): ")


def own_exceptions(output: str) -> list[str]:
    """Return the last lines of tracebacks from jitckpt's own code that are no error of its.

    Nothing that happens around a job should come out of jitckpt as one.
    """
    found, frame = [], ""
    for line in output.splitlines():
        if match := FRAME.match(line):
            frame = match[1]
        elif frame and (error := ERROR.match(line)):
            if "/jitckpt/" in frame and not error[1].startswith(("jitckpt.", "torch.")):
                found.append(f"an exception from {frame}: {line[:200]}")
            frame = ""
    return found


def _sentence(trial: Trial, output: str) -> str:
    """Return the line that says why the job could not go on: jitckpt's, or Python's before that is loaded."""
    lines = [line for line in output.splitlines() if "jitckpt:" in line]
    if not lines and "<frozen importlib" in output:
        lines = output.splitlines()[-1:]
    pattern = trial.kind.sentence
    return next((line for line in lines if pattern and re.search(pattern, line)), "")


def _statuses(outcome: Outcome) -> str:
    return f"status {', '.join(map(str, outcome.statuses))}"
