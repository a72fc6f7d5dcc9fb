"""When a save may begin. The device is played by numbers; the rest is real."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from jitckpt.bindings import behind_proxy
from jitckpt.bindings.behind_proxy import DeviceStanding
from jitckpt.bindings.interpose import Native, StepProgress
from jitckpt.encoding import tree_codec
from jitckpt.encoding.staging import Staging
from jitckpt.errors import SaveError
from jitckpt.ring import local_state
from jitckpt.ring.recorder import Recorder
from jitckpt.ring.ring import Ring
from jitckpt.saves import folders, layout
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.state import counters
from jitckpt.state.host_state import HostState
from jitckpt.state.kept_variables import PART, VariablesNow
from jitckpt.wire import protocol
from jitckpt.worker.around_steps import AroundSteps
from jitckpt.worker.saving import saver
from jitckpt.worker.saving.history import History
from jitckpt.worker.saving.outside_changes import Replacement
from jitckpt.worker.saving.saver import SaveFunction

STEP = 3
IN_BACKWARD = StepProgress(
    host_begun=STEP,
    host_ended=STEP,
    device_begun=STEP,
    device_ended=STEP,
    queued_ahead=0,
    holding=True,
    step_thread_parked=False,
)


class Device:
    """comes: called between two looks at it, with the newest step that it has ended by then."""

    def __init__(self, progress: StepProgress, comes: Callable[[int], object] = lambda step: None) -> None:
        self._progress, self._comes = progress, comes

    def progress(self) -> StepProgress:
        self._comes(self._progress.device_ended)
        return self._progress

    def end_a_step(self) -> None:
        step = self._progress.device_ended + 1
        self._progress = replace(self._progress, device_begun=step, device_ended=step)


def made(host: HostState, history: History, root: Path, **others: Any) -> saver.Saver:
    """Return a saver of rank 0, alone, with nothing in its way but what others say."""
    usual: dict[str, Any] = {
        "identity": Identity("job", "", 1, 0, 0, 1),
        "ring": -1,
        "save_function": None,
        "replacement": lambda step: Replacement({}),
        "has_whole_copies": lambda step: False,
        "refused": lambda: None,
        "staging": Staging(1),
        "report": lambda _: None,
        "keep": 1,
    }
    return saver.Saver(root=root, host=host, history=history, **usual | others)


def step_to_save(
    tmp_path: Path,
    progress: StepProgress,
    *,
    next_minibatch: bool,
    seen: int = 0,
    save_function: SaveFunction | None = None,
    deadline: float = 0.0,
    replacement: Callable[[int], Replacement] = lambda step: Replacement({}),
) -> tuple[int, bool]:
    """Ask once, after STEP; next_minibatch: the host has begun it. seen: minibatches since the start."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    host = HostState(model=model, optimizers=[optimizer], schedulers=[], scaler=None, extra=None, device=None)
    history = History(host)
    for step in range(STEP - seen, STEP):
        history.add(step, host.shared())
        history.settle(step)
    history.add(STEP, host.shared())
    if next_minibatch:
        history.settle(STEP)
    asked = made(
        host,
        history,
        tmp_path,
        native=cast(Native, Device(progress)),
        save_function=save_function,
        replacement=replacement,
    )
    return asked._wait_for_rest(1, deadline)


def test_in_a_backward_pass_nobody_is_waited_for(tmp_path: Path) -> None:
    """The training thread waits for autograd's, which waits at the gate: no call of its own will come."""
    assert step_to_save(tmp_path, IN_BACKWARD, next_minibatch=True) == (STEP, False)


def test_what_is_still_to_come_of_the_step_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="did not come to the end"):
        step_to_save(tmp_path, IN_BACKWARD, next_minibatch=False)
    at_the_gate = replace(IN_BACKWARD, step_thread_parked=True)
    assert step_to_save(tmp_path, at_the_gate, next_minibatch=False) == (STEP, False)


def test_what_changes_outside_of_the_step_is_waited_for(tmp_path: Path) -> None:
    answers = [Replacement({}, "half done"), Replacement({}, "its copies are on their way"), Replacement({})]
    found = step_to_save(
        tmp_path, IN_BACKWARD, next_minibatch=True, deadline=math.inf, replacement=lambda step: answers.pop(0)
    )
    assert found == (STEP, False)
    assert answers == []


def test_a_scheduler_that_may_still_be_stepped_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forward pass, which may be an evaluation's: until the optimizer's next step begins."""
    answers = [True, True, True, False]
    monkeypatch.setattr(saver, "STANDING_SECONDS", math.inf)
    monkeypatch.setattr(saver, "PARK_SECONDS", math.inf)
    monkeypatch.setattr(History, "may_come", lambda history, step: answers.pop(0))
    assert step_to_save(tmp_path, IN_BACKWARD, next_minibatch=True, deadline=math.inf) == (STEP, False)
    assert answers == []


def test_the_end_of_the_iteration_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it changes of variables until then is the step's, also where all schedulers are foreseen."""
    answers = [True, True, False]
    monkeypatch.setattr(saver, "STANDING_SECONDS", math.inf)
    monkeypatch.setattr(saver, "PARK_SECONDS", math.inf)
    monkeypatch.setattr(History, "goes_on", lambda history, step: answers.pop(0))
    assert step_to_save(tmp_path, IN_BACKWARD, next_minibatch=False, seen=2, deadline=math.inf) == (
        STEP,
        True,
    )
    assert answers == []


def test_a_scheduler_is_not_waited_for_where_the_thread_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "STANDING_SECONDS", 0.0)
    monkeypatch.setattr(History, "may_come", lambda history, step: True)
    assert step_to_save(tmp_path, IN_BACKWARD, next_minibatch=True) == (STEP, False)


def test_a_step_that_the_device_is_in_is_waited_for(tmp_path: Path) -> None:
    inside = replace(IN_BACKWARD, device_begun=STEP + 1, step_thread_parked=True)
    with pytest.raises(SaveError, match=f"end of optimizer step {STEP + 1}"):
        step_to_save(tmp_path, inside, next_minibatch=True)


def test_behind_a_proxy_a_recovery_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standings = [DeviceStanding.RECOVERS, DeviceStanding.RECOVERS, DeviceStanding.INTACT]
    monkeypatch.setattr(saver, "STUCK_SECONDS", 60.0)
    monkeypatch.setattr(behind_proxy, "standing", lambda: standings.pop(0))
    assert step_to_save(tmp_path, IN_BACKWARD, next_minibatch=True, deadline=math.inf) == (STEP, False)
    assert standings == []


def test_a_device_that_was_just_brought_back_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standings = [DeviceStanding.RECOVERS, DeviceStanding.LOST]
    monkeypatch.setattr(saver, "STUCK_SECONDS", 60.0)
    monkeypatch.setattr(behind_proxy, "standing", lambda: standings.pop(0))
    with pytest.raises(SaveError, match="brought back from a failure"):
        step_to_save(tmp_path, IN_BACKWARD, next_minibatch=True, deadline=math.inf)


BETWEEN_MINIBATCHES = IN_BACKWARD  # asleep: in no call, and not at the gate either


def test_a_thread_that_sleeps_between_minibatches_is_not_waited_for(tmp_path: Path) -> None:
    assert step_to_save(tmp_path, BETWEEN_MINIBATCHES, next_minibatch=False, seen=2) == (STEP, True)


def test_a_save_function_waits_for_a_thread_that_sleeps(tmp_path: Path) -> None:
    """It may read what that thread changes when it wakes up."""
    with pytest.raises(SaveError, match="did not come to the end"):
        step_to_save(
            tmp_path, BETWEEN_MINIBATCHES, next_minibatch=False, seen=2, save_function=lambda _: None
        )


@dataclass
class Alone:
    """A rank whose agent has died, with the states of steps 1 to 6 in its memory."""

    root: Path
    ring: int
    identity: Identity = field(default_factory=lambda: Identity("job", "", 2, 0, 0, 1))
    said: list[protocol.WorkerMessage] = field(default_factory=list)

    def save(
        self,
        progress: StepProgress,
        *,
        restored: int = 0,
        device: Device | None = None,
        deadline: float = 0.0,
        nothing_before: bool = False,
    ) -> int:
        """Return what the library is told. restored: the step that the job went on from."""
        host = HostState(model=None, optimizers=[], schedulers=[], scaler=None, extra=None, device=None)
        history = History(host)
        history.add(STEP, host.shared())
        history.settle(STEP)
        asked = made(
            host,
            history,
            self.root,
            identity=self.identity,
            native=cast(Native, device or Device(progress)),
            ring=self.ring,
            report=self.said.append,
            nothing_before=lambda: nothing_before,
        )
        asked.restored(restored, self.root)
        order = protocol.Save(saver.BY_THE_LIBRARY, "agent", deadline)
        return asked(protocol.encode(order))

    def own_states(self) -> list[str]:
        return sorted(path.parent.name for path in self.root.glob("*/local-*"))


ALL_STEPS = [layout.step_folder(step) for step in range(1, 7)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    rank = Alone(tmp_path, local_state.create())
    ring = Ring(rank.ring, rank.identity, 8, 2 << 20)
    recorder = Recorder(ring, no_device, pytest.fail)
    for step in range(1, 7):
        recorder.write(step, final=False, parts={"random": tree_codec.encode(step, "random")})
    yield rank
    os.close(rank.ring)


def test_without_an_agent_all_own_states_are_written(alone: Alone) -> None:
    """Other ranks may save several steps later than this one: their devices had that much before them."""
    assert alone.save(IN_BACKWARD, restored=STEP) == 0, alone.said
    assert alone.own_states() == ALL_STEPS


@pytest.mark.parametrize("nothing_before", [False, True])
def test_a_save_says_whether_nothing_was_whole_before_it(alone: Alone, nothing_before: bool) -> None:
    assert alone.save(IN_BACKWARD, nothing_before=nothing_before) == 0, alone.said
    (record,) = (one for one in folders.find(alone.root) if one.kind == "rank")
    assert record.metadata is not None
    assert record.metadata.nothing_before == nothing_before


def test_without_an_agent_own_states_are_written_even_if_the_save_fails(alone: Alone) -> None:
    inside_a_step = replace(IN_BACKWARD, device_begun=STEP + 1)
    assert alone.save(inside_a_step) == 1
    assert isinstance(alone.said[-1], protocol.SaveFailed)
    assert alone.own_states() == ALL_STEPS


def test_without_an_agent_a_slow_device_is_waited_for(alone: Alone) -> None:
    """It was at rest for a moment; with what it gets done afterwards others come to later steps."""
    ring = Ring(alone.ring, alone.identity, 8, 2 << 20)  # empty
    recorder = Recorder(ring, no_device, pytest.fail)

    def works(ended: int) -> None:
        if alone.said and ended < 7:  # the save has begun
            device.end_a_step()
            recorder.write(ended + 1, final=True, parts={"random": tree_codec.encode(ended + 1, "random")})

    ahead = replace(IN_BACKWARD, host_begun=7, host_ended=7, step_thread_parked=True)
    device = Device(ahead, works)
    assert alone.save(ahead, restored=STEP, device=device, deadline=1000.0) == 0, alone.said
    assert alone.own_states() == [layout.step_folder(step) for step in range(STEP + 1, 8)]


def test_without_an_agent_a_device_that_hangs_is_not_waited_for_long(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "STANDS_SECONDS", 0.2)
    ahead = replace(IN_BACKWARD, host_begun=7, host_ended=7, step_thread_parked=True)
    assert alone.save(ahead, restored=STEP, deadline=1000.0) == 0, alone.said
    assert alone.own_states() == ALL_STEPS


def test_without_an_agent_no_rank_removes_what_another_still_writes(alone: Alone) -> None:
    """A third has saved a later step already, so this one's would be old."""
    other = replace(alone.identity, rank=1)
    with SaveFolder(alone.root, other, STEP + 3, "rank", "builtin") as folder:
        folder.commit()
    with SaveFolder(alone.root, other, STEP, "rank", "builtin") as folder:
        assert alone.save(IN_BACKWARD) == 0, alone.said
        folder.commit()


def test_an_iteration_has_ended_once_all_is_written_that_a_save_reads_of_it() -> None:
    """A save that began between the two had the variables and `extra` of the iteration before."""
    model = nn.Linear(2, 1)
    host = HostState(model=model, optimizers=[], schedulers=[], scaler=None, extra=None, device=None)
    history = History(host)
    history.waits_for_boundary = True
    history.add(STEP, host.shared())
    went_on: list[bool] = []

    def reads(*_: object, **__: object) -> bool:
        went_on.append(history.goes_on(STEP))
        return True  # the parameters have changed

    settling: Any = SimpleNamespace(
        _check=SimpleNamespace(is_pending=lambda step: False),
        _outside=SimpleNamespace(minibatch_begun=reads),
        _loop=SimpleNamespace(is_at_end=False),
        _lookouts=SimpleNamespace(extra=SimpleNamespace(goes_on=reads)),
        _goes_on=reads,
        _own=SimpleNamespace(goes_on=reads),
        _host=SimpleNamespace(model=SimpleNamespace(held=lambda: reads() and host.shared().held)),
        _read=SimpleNamespace(settle=reads, has_function=True),
        _history=history,
        _settle=lambda step, changed: AroundSteps._settle(settling, step, changed),
        _savers=SimpleNamespace(save_if_due=lambda step: None, boundary=lambda step: None),
        _settle_check=lambda *_: None,
    )
    AroundSteps._settle_at_boundary.__wrapped__(settling, STEP)  # type: ignore[attr-defined]
    assert went_on == [True] * 6
    assert not history.goes_on(STEP)


class Evaluating:
    """A rank whose iteration does not end: it is behind the optimizer step of STEP."""

    def __init__(self, root: Path, ring: int, told: Callable[["Evaluating"], VariablesNow | None]) -> None:
        model = nn.Linear(2, 1)
        host = HostState(model=model, optimizers=[], schedulers=[], scaler=None, extra=None, device=None)
        self.history = History(host)
        self.history.waits_for_boundary = True
        for step in (STEP - 2, STEP - 1):
            self.history.add(step, host.shared())
            self.history.settle(step)
        self.history.add(STEP, host.shared())
        self.history.thread = 0  # none that could be held
        self.said: list[protocol.WorkerMessage] = []
        self.warned: list[str] = []
        self.asked = 0

        def as_it_stands(frame: FrameType | None) -> VariablesNow | None:
            self.asked += 1
            return told(self)

        self._saver = made(
            host,
            self.history,
            root,
            native=cast(Native, Device(BETWEEN_MINIBATCHES)),
            ring=ring,
            report=self.said.append,
            as_it_stands=as_it_stands,
            warn=self.warned.append,
        )

    def save(self) -> dict[str, Any]:
        """Return what the rank alone knows, of the save that it writes."""
        assert self._saver(protocol.encode(protocol.Save(1, "a failure", 100.0))) == 0, self.said
        ended = self.said[-1]
        assert isinstance(ended, protocol.SaveEnded)
        local: dict[str, Any] = json.loads((Path(ended.path) / layout.STATE_FILE).read_text())["local"]
        return local


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(saver, "STANDING_SECONDS", 0.0)
    descriptor = local_state.create()
    recorder = Recorder(Ring(descriptor, Identity("job", "", 1, 0, 0, 1), 8, 2 << 20), no_device, pytest.fail)
    before = {PART: {"script:main": {"done": 2, "best": 9}}, counters.PART: {"script:main": ["done"]}}
    recorder.write(
        STEP, final=True, parts={name: tree_codec.encode(part, name) for name, part in before.items()}
    )
    yield descriptor
    os.close(descriptor)


NOW = VariablesNow(
    {
        PART: tree_codec.encode({"script:main": {"done": 3, "best": 9}}, PART),
        counters.PART: tree_codec.encode({"script:main": []}, counters.PART),
    },
    ["the variable 'best' of main"],
    "script.py:7, in main",
)


def test_variables_are_saved_as_they_are_where_the_iteration_does_not_end(tmp_path: Path, ring: int) -> None:
    local = Evaluating(tmp_path, ring, lambda rank: NOW).save()
    assert local["trees"] == {name: part.tree for name, part in NOW.parts.items()}
    assert local["stood"] == {"at": NOW.at, "unchanged": NOW.unchanged}


def test_where_they_can_not_be_told_they_are_saved_as_they_were(tmp_path: Path, ring: int) -> None:
    rank = Evaluating(tmp_path, ring, lambda rank: None)
    local = rank.save()
    assert local["trees"][PART] == {"script:main": {"done": 2, "best": 9}}
    assert "stood" not in local
    assert rank.asked == 1


def test_a_failure_to_tell_them_is_said_and_harms_no_save(tmp_path: Path, ring: int) -> None:
    def fails(rank: Evaluating) -> VariablesNow:
        raise ValueError("odd")

    rank = Evaluating(tmp_path, ring, fails)
    assert "stood" not in rank.save()
    assert rank.warned == [saver.NOT_TAKEN.format(error="ValueError: odd")]


def test_a_save_is_made_again_once_the_iteration_has_ended(tmp_path: Path, ring: int) -> None:
    def ends(rank: Evaluating) -> VariablesNow:
        rank.history.settle(STEP)
        return NOW

    rank = Evaluating(tmp_path, ring, ends)
    assert "stood" not in rank.save()
    assert rank.asked == 1
    assert [type(one) for one in rank.said] == [protocol.SaveBegun, protocol.SaveBegun, protocol.SaveEnded]


def test_it_is_said_once_that_an_iteration_is_waited_for(
    tmp_path: Path, ring: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "STANDING_SECONDS", 0.05)
    rank = Evaluating(tmp_path, ring, lambda rank: NOW)
    rank.save()
    assert [type(one) for one in rank.said] == [protocol.SaveWaits, protocol.SaveBegun, protocol.SaveEnded]


def test_a_thread_that_gets_on_meanwhile_is_looked_at_again(
    tmp_path: Path, ring: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter(range(5))
    monkeypatch.setattr(History, "place", lambda history: next(places, 0))
    rank = Evaluating(tmp_path, ring, lambda rank: NOW)
    assert rank.save()["stood"]["at"] == NOW.at
    assert rank.asked > 1


def no_device(*_: object) -> None:
    raise AssertionError("there is no device")
