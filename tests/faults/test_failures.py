"""Jobs with one failure after the other: the end is that of an undisturbed one."""

import os
import random
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from conftest import Undisturbed, assert_as_if_nothing_had_been, train

from jitckpt.rehearsal.runs import CHECKPOINTS, LAUNCHER, OUTPUT, Strike
from jitckpt.rehearsal.trials import differences
from jitckpt.saves import folders, selection
from jitckpt.saves.layout import METADATA_FILE

# Steps are far enough apart: the host runs up to 8 ahead of the device.
STEPS = ("--steps", "60")
# Root writes where it may not, unless it gives that up.
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()


@dataclass(frozen=True)
class Story:
    """failures: what happens, and how the launcher names the cause."""

    failures: dict[str, str]
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()  # of the training
    says: list[str] = field(default_factory=list)  # what its output has, in this order


# Of rank 1, and then of rank 0 as well, two failures are the device's.
A_RANK_ENDS = Story(
    {
        "rank=1 step=4 phase=backward kind=kill": "rank 1 was killed by SIGKILL",
        "rank=0 step=16 phase=optimizer kind=exit": "rank 0 ended with exit status 1",
        "rank=1 step=28 phase=allreduce kind=kill": "rank 1 was killed by SIGKILL",
        "rank=0 step=40 phase=forward kind=exception": "rank 0 ended with exit status 1",
    },
    options=("--exclude-suspect",),
    says=[
        "rank 1 has failed twice on device 1 of",
        "the ranks of this host get devices 0, 2.",
        "rank 0 has failed twice on device 0 of",
        "the ranks of this host get devices 3, 2.",
    ],
)
A_DEVICE_OR_THE_NETWORK_FAILS = Story(
    {
        "rank=1 step=4 phase=between kind=sticky": "rank 1 ",
        "rank=0 step=16 phase=optimizer kind=device-lost": "rank 0 ",
        "rank=1 step=28 phase=allreduce kind=collective-hang": "where all have arrived",
        "rank=0 step=40 phase=between kind=network-cut": "where all have arrived",
        "rank=1 step=50 phase=allreduce kind=stop": "rank 1 is stopped",
    }
)
# With collections at every turn, and with neither guardian nor template from some step on.
A_PROCESS_BREAKS = Story(
    {
        "rank=1 step=6 phase=backward kind=segfault": "rank 1 was killed by SIGSEGV",
        "rank=0 step=20 phase=optimizer kind=abort": "rank 0 was killed by SIGABRT",
        "rank=1 step=34 phase=forward kind=close-fds": "rank 1 ",
        "rank=0 step=56 phase=between kind=gil-hold": "rank 0 ",
    },
    # Closed descriptors are found by what needs one next; the other rank must not be at its fault by then.
    arguments=("--pause", "0.02"),
    options=(
        *("--stall-timeout", "5"),
        *("--fault", "rank=0 step=3 phase=between kind=gc"),
        *("--fault", "rank=0 step=4 phase=between kind=guardian"),
        *("--fault", "rank=1 step=26 phase=between kind=template"),
    ),
)


@pytest.mark.parametrize("story", [A_RANK_ENDS, A_DEVICE_OR_THE_NETWORK_FAILS, A_PROCESS_BREAKS])
def test_failures_of_two_ranks(
    story: Story, tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTGPU_DEVICES", "4")
    folder = tmp_path / "job"
    run = train(
        folder,
        2,
        *(*STEPS, *story.arguments),
        options=story.options,
        faults=list(story.failures),
        hang_timeout=2,
    )
    assert_as_if_nothing_had_been(run, undisturbed(2, *STEPS), folder)
    said = (folder / OUTPUT).read_text()
    assert [recovery.fault for recovery in run.recoveries] == list(story.failures), said
    for recovery, cause in zip(run.recoveries, story.failures.values(), strict=True):
        assert cause in recovery.cause, said
        assert recovery.step is not None, "nothing was lost"
    found = [said.find(text) for text in story.says]
    assert -1 not in found, said
    assert found == sorted(found)


def test_two_of_four_at_once_then_one_in_a_save_then_one_in_a_restore(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The first time one of the two that are left has a full disk."""
    folder = tmp_path / "job"
    faults = [
        "rank=1 step=4 phase=backward kind=kill",
        "rank=0 step=20 phase=optimizer kind=kill",
    ]
    strikes = [
        Strike(2, "fault", 0.0),  # a fault of its own might not come: it is held as soon as rank 1 is dead
        Strike(3, "save_begun", 0.0, restart=1),
        Strike(2, "registered", 0.0, restart=2),
    ]
    run = train(folder, 4, *STEPS, *("--full-disk", "0", "--pause", "0.1"), faults=faults, strikes=strikes)
    assert_as_if_nothing_had_been(run, undisturbed(4, *STEPS), folder)
    # Where that save is over sooner than its event is read, the next start is hit, before anybody registers.
    assert {"fault", "save_begun"} <= {strike.event for strike in run.struck}
    failed = [event for event in run.events if event["event"] == "save_failed" and event["restart"] == 0]
    assert all(event["rank"] == 0 and "File too large" in event["reason"] for event in failed)
    first, second, *_ = run.recoveries
    # Rank 2 may have saved before it is struck, where its event is read late.
    assert first.saved_by
    assert set(first.saved_by) <= {2, 3}
    assert None not in (first.step, second.step), "nothing was lost"


def test_without_a_replica_the_job_falls_back_to_a_periodic_save(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """The directory can't be written any more when the rank dies: what is saved is older."""
    folder = tmp_path / "job"
    run = train(
        folder,
        2,
        *STEPS,
        *("--save-every", "4", "--unwritable", "14"),
        launcher=WITHOUT_PRIVILEGES,
        faults=["rank=1 step=26 phase=forward kind=kill"],
    )
    said = (folder / OUTPUT).read_text()
    assert run.status == 0, said
    assert differences(run, undisturbed(2, *STEPS)) == [], said
    assert run.left_behind == ()
    (recovery,) = run.recoveries
    assert recovery.not_saved is not None
    assert "Permission denied" in said
    assert recovery.step in (4, 8, 12), said


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint directory of a job whose launcher was killed: all ranks have saved and ended.

    Its steps are so far apart that it is not over before, and that the ranks are in the same one.
    """
    folder = tmp_path_factory.mktemp("stopped") / "job"
    run = train(folder, 2, *STEPS, "--pause", "1", strikes=[Strike(LAUNCHER, "first_step", 0.1)])
    assert run.status == -signal.SIGKILL, (folder / OUTPUT).read_text()
    assert run.left_behind == ()
    return folder / CHECKPOINTS


def test_a_killed_launcher_takes_the_store_with_it_and_the_same_command_goes_on(
    tmp_path: Path, undisturbed: Undisturbed, stopped: Path
) -> None:
    """The one store of a job on one host is the launcher's."""
    folder = tmp_path / "job"
    shutil.copytree(stopped, folder / CHECKPOINTS)
    run = train(folder, 2, *STEPS)
    said = (folder / OUTPUT).read_text()
    assert run.status == 0, said
    assert differences(run, undisturbed(2, *STEPS)) == [], said
    (saved,) = {record.step for record in folders.find(stopped) if record.kind == "rank"}
    assert {event["step"] for event in run.events if event["event"] == "restored"} == {saved}
    assert run.left_behind == ()


def test_a_save_that_was_cut_off_anywhere_is_passed_over(tmp_path: Path, stopped: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(stopped, folder)
    cut, other = (record for record in folders.find(folder) if record.kind == "rank")
    assert cut.metadata is not None
    expected = replace(cut.metadata.identity, rank=cut.rank)
    whole = selection.choose(folders.find(folder), expected, folders.verify)
    assert whole is not None
    assert (whole.save.rank, whole.reasons) == (cut.rank, ())
    chance = random.Random(1)
    for path in sorted(cut.path.iterdir()):
        content = path.read_bytes()
        some = {0, len(content) - 1, *chance.sample(range(len(content)), 100)}
        for length in range(len(content)) if path.name == METADATA_FILE else sorted(some):
            path.write_bytes(content[:length])
            choice = selection.choose(folders.find(folder), expected, folders.verify)
            assert choice is not None
            assert (choice.step, choice.save.rank) == (cut.step, other.rank), (path.name, length)
            assert any(str(cut.path) in reason for reason in choice.reasons)
        path.write_bytes(content)
