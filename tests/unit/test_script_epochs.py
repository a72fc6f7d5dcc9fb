"""A script's own loop over epochs goes on where the job is, as the job's own does."""

import contextlib
import dis
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from jitckpt.data.loop import Loop
from jitckpt.encoding import tree_codec
from jitckpt.errors import CheckpointError
from jitckpt.frameworks import notes, protection, script_epochs
from jitckpt.frameworks.script_pass import ScriptPass
from jitckpt.worker import agreements, directory

EPOCHS, BATCHES = 3, 4


class Killed(Exception):
    """The process ends here."""


class Process:
    """One start of a script, whose loader is this. saved: what the start before has left."""

    def __init__(self, root: Path, saved: Any = None, *, dies_at: int = 10**6) -> None:
        self.loop = Loop(
            begins=lambda: None,
            boundary=lambda frame: True,
            write_again=lambda: None,
            put_back=self._put_back,
            warn=pytest.fail,
        )
        self.saved: Any = None
        self.saved_before = saved
        if saved is not None:
            self.loop.restore(saved[0], None, 1)
        job: Any = SimpleNamespace(
            loop=self.loop,
            root=root,
            identity=SimpleNamespace(rank=0),
            look_at_epochs=self._look_at_epochs,
        )
        self.looked_at: list[str] = []
        self.protection = protection.FrameworkProtection(job, 0 if saved is None else 1)
        self.told: list[Any] = []
        self.has_begun = False
        self.dies_with: tuple[object, ...] = ("nothing",)
        self._dies_at = dies_at
        self._loader: Any = DataLoader([*range(BATCHES)], batch_size=None)  # type: ignore[arg-type]

    def _look_at_epochs(self, frame: FrameType, at: int) -> None:
        operations = [one.opname for one in dis.get_instructions(frame.f_code) if one.offset == at]
        self.looked_at += [frame.f_code.co_name, *operations]

    def _put_back(self) -> None:
        if self.saved_before is not None:
            torch.set_rng_state(self.saved_before[1])

    def prepare(self) -> None:
        script_epochs.watch(sys._getframe(1), self._goes_on)

    def _goes_on(self, frame: FrameType) -> protection.FrameworkProtection:
        script_epochs.end()
        self.has_begun = True
        return self.protection

    def __iter__(self) -> Iterator[Any]:
        if not self.has_begun:
            self.has_begun = True
            script_epochs.training_begins(self.protection, sys._getframe(1))
        return ScriptPass(self.protection.job, self._loader, sys._getframe(1))

    def draw(self, *what: object) -> None:
        self.note(*what, torch.rand)

    def note(self, *what: Any) -> None:
        if len(self.told) == self._dies_at:
            self.dies_with = what
            encoded = self.loop.capture()  # a kill leaves no loop, as an exception does
            self.saved = tree_codec.decode(encoded.tree, encoded.tensors), torch.get_rng_state()
            raise Killed
        self.told.append(tuple(one(()).item() if one is torch.rand else one for one in what))


def usual(process: Process) -> None:
    for _ in range(2):
        process.note("warm-up")
    process.prepare()
    for name in [str(number) for number in range(2)]:
        process.note("prepared", name)
    for number in range(3):
        process.note("checked", number)
    for epoch in range(EPOCHS):
        process.draw("head", epoch)
        for number, batch in enumerate(process):
            process.note(epoch, number, batch)
        process.note("behind", epoch)


def in_functions(process: Process) -> None:
    def one(epoch: int) -> int:
        last = -1
        for batch in process:
            process.note(epoch, batch)
            last = batch
        return last

    process.prepare()
    for epoch in range(10, 10 + EPOCHS):
        process.draw("head", epoch)
        process.note("behind", epoch, one(epoch) >= -1)
        if epoch == 11:
            break


@pytest.fixture(autouse=True)
def nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(directory, "root_of", lambda given: tmp_path)
    monkeypatch.setattr(script_epochs, "_running", [])
    yield
    script_epochs.end()
    script_epochs._found = None


def run(script: Callable[[Process], None], process: Process) -> list[Any]:
    script_epochs._found = None
    script_epochs._known_place.clear()
    torch.manual_seed(4)
    with contextlib.suppress(Killed):
        script(process)
    if not process.has_begun:
        script_epochs.end()
    assert "range" not in globals()
    return process.told


def of_epoch(told: list[Any], epoch: int) -> list[Any]:
    """Return what was told from this epoch on."""
    return told[next(at for at, one in enumerate(told) if one[:2] == ("head", epoch)) :]


@pytest.mark.parametrize("script", [usual, in_functions])
def test_a_restart_begins_with_the_epoch_in_which_the_job_is(
    script: Callable[[Process], None], tmp_path: Path
) -> None:
    undisturbed = run(script, Process(tmp_path))
    for dies_at in range(len(undisturbed) - 1):
        for file in tmp_path.iterdir():
            file.unlink()
        first = Process(tmp_path, dies_at=dies_at)
        run(script, first)
        if not first.has_begun:
            continue
        again = Process(tmp_path, first.saved)
        told = run(script, again)
        epoch = next(one[1] for one in told if one[0] == "head")
        # A batch that was given counts as done here, as each boundary is one behind an optimizer step.
        done = [one for one in (*first.told, first.dies_with) if one[0] == epoch]
        expected = [one for one in of_epoch(undisturbed, epoch) if one not in done]
        assert [one for one in told if one in of_epoch(undisturbed, epoch)] == expected, dies_at


def test_what_is_behind_epochs_that_are_done_is_not_done_again(tmp_path: Path) -> None:
    process = Process(tmp_path)
    undisturbed = run(usual, process)
    assert process.looked_at == ["usual", "FOR_ITER"]
    first = Process(tmp_path, dies_at=undisturbed.index((2, 1, 1)))
    run(usual, first)
    told = run(usual, Process(tmp_path, first.saved))
    assert ("behind", 0) in first.told
    assert ("behind", 0) not in told
    assert [one for one in told if one[0] == "head"] == [one for one in undisturbed if one[:2] == ("head", 2)]


def test_a_host_that_has_come_in_anothers_place_hears_where_the_loop_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(usual, Process(tmp_path))
    first = Process(tmp_path, dies_at=undisturbed.index((2, 1, 1)))
    run(usual, first)
    note = tmp_path / script_epochs.FILE
    noted = notes.read(note)
    note.unlink()
    monkeypatch.setattr(agreements, "all_say", lambda said: [said, noted])
    told = run(usual, Process(tmp_path, first.saved))
    assert [one for one in told if one[0] == "head"] == [one for one in undisturbed if one[:2] == ("head", 2)]
    assert notes.read(note) == noted, "the next restart may be without the other host"


def in_a_while_loop(process: Process) -> None:
    process.prepare()
    epoch = 0
    while epoch < EPOCHS:
        for batch in process:
            process.note(batch)
        epoch += 1


def test_a_start_that_does_not_come_to_the_loop_is_refused(tmp_path: Path) -> None:
    first = Process(tmp_path, dies_at=15)
    run(usual, first)

    with pytest.raises(CheckpointError, match="has not come to that loop"):
        run(in_a_while_loop, Process(tmp_path, first.saved))


def test_an_outer_loop_that_can_not_go_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(protection, "tell", told.append)

    def once(process: Process) -> None:
        process.prepare()
        for batch in process:
            process.note(batch)

    run(once, Process(tmp_path))
    run(usual, Process(tmp_path))
    assert told == []
    run(in_a_while_loop, Process(tmp_path))
    assert told == [script_epochs.GONE_THROUGH]


def test_only_what_a_for_statement_iterates_in_place_may_be_the_epochs() -> None:
    def found(text: str) -> bool:
        results: list[bool] = []

        def range(*given: int) -> list[int]:
            frame = sys._getframe(1)
            results.append(script_epochs.loop_over(frame.f_code, frame.f_lasti) is not None)
            return [*given]

        exec(text, {"range": range, "tqdm": lambda one, **options: one})
        return results[0]

    assert found("for one in range(3):\n    pass\n")
    assert found("for one in range(3):\n" + "    one = one + 1\n" * 200)
    assert found("for one in tqdm(range(3), desc='epochs'):\n    pass\n")
    assert not found("for one in enumerate(range(3)):\n    pass\n")
    assert not found("for one in [other for other in range(3)]:\n    pass\n")
    assert not found("numbers = range(3)\nfor one in numbers:\n    pass\n")
    assert not found("print(range(3), end='')\nfor one in [1]:\n    pass\n")


def test_what_asks_whether_it_is_a_range_hears_the_truth() -> None:
    assert isinstance(range(3), script_epochs.Range)
    assert not isinstance([3], script_epochs.Range)
    assert script_epochs.Range(3) == range(3)


def test_range_is_pythons_again_once_a_model_trains_or_a_training_is_another_frameworks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1, 1)
    Process(tmp_path).prepare()
    with torch.no_grad():
        model(torch.ones(1))
    assert "range" in globals()
    model(torch.ones(1))
    assert "range" not in globals()
    Process(tmp_path).prepare()
    monkeypatch.setattr(protection, "_taken", "another framework")
    for _ in range(1):
        assert script_epochs._running == []
    assert "range" not in globals()
    Process(tmp_path).prepare()
    assert "range" not in globals()


def test_a_loop_that_is_begun_often_is_no_loop_over_epochs(tmp_path: Path) -> None:
    def one() -> int:
        for _ in range(1):
            return len(script_epochs._running)
        return 0

    Process(tmp_path).prepare()
    most = script_epochs.MOST_BEGUN
    assert [one() for _ in range(2 * most)] == [1] * most + [0] * most


def test_a_damaged_note_is_named_with_what_to_do(tmp_path: Path) -> None:
    note = tmp_path / script_epochs.FILE
    assert notes.read(note) is None
    notes.write(note, ["__main__", "<module>", 8])
    assert notes.read(note) == ["__main__", "<module>", 8]
    note.write_bytes(note.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"{note} can't be read .*remove it"):
        notes.read(note)
