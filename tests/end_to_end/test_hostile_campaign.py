"""The hostile campaign: what it decides, and one run as a user makes it, but short."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))  # where the campaign's modules are found, as for the script itself

from campaign_hostile.job import Outcome  # noqa: E402
from campaign_hostile.place import is_half_made, reached_at  # noqa: E402
from campaign_hostile.trials import KINDS, LATER, USER, Attack, Trial, choose  # noqa: E402
from campaign_hostile.verdict import EQUAL, FELL, SENTENCE, judge  # noqa: E402

END = {0: "a", 1: "b"}


def outcome(*, status: int = 0, final: dict[int, str] = END, output: str = "", restored: int = 0) -> Outcome:
    return Outcome((status,), 1.0, output, final, 20, restored, (), late=False)


# Before jitckpt is loaded, it is Python that says what is wrong.
TOO_EARLY = """Traceback (most recent call last):
  File "<frozen importlib._bootstrap_external>", line 1659, in _fill_cache
OSError: [Errno 24] Too many open files: 'site-packages/jitckpt'
"""
FULL = outcome(status=1, final={}, output="jitckpt: No space left")


def test_a_trial_follows_from_seed_and_number_alone() -> None:
    def drawn(seed: int) -> list[Trial]:
        chosen = {"kinds": list(KINDS), "hosts": 3, "start_seconds": 5.0, "seconds": 6.0, "attempt": 1}
        return [choose(seed, number, **chosen) for number in range(300)]  # type: ignore[arg-type]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {trial.name for trial in drawn(1)} == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "starts", "result"),
    [
        ("kill-rank", [outcome()], EQUAL),
        ("kill-rank", [outcome(final={0: "a", 1: "other"})], FELL),
        ("kill-rank", [outcome(final={0: "a"})], FELL),
        ("kill-rank", [FULL, outcome()], FELL),
        ("kill-rank", [outcome(status=1, output="killed once all was over"), outcome()], EQUAL),
        ("kill-rank", [outcome(status=1, final={0: "a", 1: "other"}), outcome()], FELL),
        ("kill-agent", [outcome(status=-9, final={0: "a"}), outcome()], FELL),  # from step 0, and not 20
        ("kill-agent", [outcome(status=-9), outcome()], EQUAL),
        ("full-disk", [FULL, outcome()], SENTENCE),
        ("full-disk", [outcome(status=1, final={}, output="jitckpt: gone"), outcome()], FELL),
        ("full-disk", [FULL, outcome(status=1)], FELL),
        ("agent-without-descriptors", [outcome(status=1, final={}, output=TOO_EARLY), outcome()], SENTENCE),
        ("full-disk", [outcome(status=1, final={}, output=TOO_EARLY), outcome()], FELL),
    ],
)
def test_what_counts_as_held(kind: str, starts: list[Outcome], result: str) -> None:
    attacks = (Attack("kill", "rank", LATER, 1.0),)
    assert judge(Trial(1, kind, USER, 1, attacks), starts, END).result == result


def test_an_exception_of_jitckpts_own_is_no_right_end() -> None:
    output = (
        'Traceback:\n  File "/lib/jitckpt/hosts/link.py", line 3, in f\n    g()\nOSError: no more files\n'
    )
    assert judge(Trial(1, "kill-rank", USER, 1, ()), [outcome(output=output)], END).result == FELL


def test_listeners_are_reached_where_they_listen() -> None:
    assert reached_at("0100007F:1F90") == ("127.0.0.1", 8080)
    assert reached_at("00000000:0050") == ("127.0.0.1", 80)
    assert reached_at("01004F0A:0050") == ("10.79.0.1", 80)
    assert reached_at("00000000000000000000000000000000:0050") == ("::1", 80)
    assert reached_at("0000000000000000FFFF00000100007F:0050") == ("127.0.0.1", 80)


def test_a_hostile_run(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "fault_campaign.py"), "--mode", "hostile", "--json"]
    campaign = subprocess.run(
        [*command, "--trials", "1", "--steps", "24", "--kinds", "kill-guardian"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    if "can't be made" in campaign.stderr and "not permitted" in campaign.stderr:
        pytest.skip(campaign.stderr)
    assert campaign.returncode == 0, campaign.stdout + campaign.stderr
    assert json.loads(campaign.stdout)["results"]["1"]["result"] == EQUAL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "size", "half_made"),
    [
        ("sem.9iGwqi", 32, True),
        ("sem.9iGwqi", 31, False),
        ("sem.mp-4k2x9q", 32, False),
        ("torch_1", 32, False),
    ],
)
def test_a_semaphore_that_was_never_named_is_nobodys(
    tmp_path: Path, name: str, size: int, half_made: bool
) -> None:
    (tmp_path / name).write_bytes(bytes(size))
    assert is_half_made(tmp_path / name) == half_made
