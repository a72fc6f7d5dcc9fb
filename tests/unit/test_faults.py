import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.faults import (
    KINDS,
    PHASES,
    FaultError,
    FaultSpec,
    Injector,
    from_environment,
    parse_fault,
    to_environment,
)

numbers = st.integers(min_value=0, max_value=10**9)
specs = st.builds(
    FaultSpec,
    rank=numbers,
    step=numbers.map(lambda n: n + 1),
    phase=st.sampled_from(["forward", "backward", "optimizer", "between", "any"]),
    kind=st.sampled_from(KINDS),
    seed=st.none() | numbers,
)


@given(specs)
def test_a_faults_text_is_read_back(spec: FaultSpec) -> None:
    assert parse_fault(str(spec)) == spec


@given(specs)
def test_any_phase_is_one_phase_and_always_the_same(spec: FaultSpec) -> None:
    chosen = spec.with_phase()
    assert chosen.phase in PHASES
    assert chosen == spec.with_phase()
    assert parse_fault(str(chosen)) == chosen, "a chosen phase must be one that the kind allows"


def test_any_phase_reaches_every_phase() -> None:
    chosen = {FaultSpec(0, 1, seed=seed).with_phase().phase for seed in range(100)}
    assert chosen == set(PHASES)


@given(st.lists(specs), st.integers(min_value=0, max_value=3))
def test_a_rank_gets_its_own_faults_from_the_environment(faults: list[FaultSpec], rank: int) -> None:
    expected = [spec.with_phase() for spec in faults if spec.rank == rank]
    assert from_environment(to_environment(faults), rank) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "rank=1 step=20 phase=bakward",
            "phase must be forward, backward, allreduce, optimizer,",
        ),
        ("rank=1 step=20 kind=burn", "kind must be kill, stop, exception or exit, not 'burn'"),
        ("rank=one step=20", "rank must be a whole number of at least 0, not 'one'"),
        ("rank=-1 step=20", "rank must be a whole number of at least 0, not '-1'"),
        ("rank=1 step=0", "step must be a whole number of at least 1, not '0'"),
        ("rank=1 step=" + "9" * 40, "step must be a whole number"),
        ("rank=1", "step is missing"),
        ("", "rank is missing"),
        ("rank=1 step=2 node=3", "'node' is not known; the keys are rank, step, phase, kind or seed"),
        ("rank=1 step=2 step=3", "step is given twice"),
        ("rank=1 step=2 phase=allreduce kind=exit", "phase=allreduce goes only with kind kill or stop"),
    ],
)
def test_a_wrong_fault_is_explained(text: str, complaint: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(text)
    assert complaint in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", ["", "{}", "[1]", "rank=1 step=2"])
def test_a_wrong_environment_is_explained(value: str) -> None:
    with pytest.raises(FaultError, match="JITCKPT_FAULTS must be a JSON list"):
        from_environment(value, 0)


class Recorder:
    def __init__(self, *texts: str) -> None:
        self.reported: list[FaultSpec] = []
        self.armed: list[int] = []
        self.injector = Injector([parse_fault(t) for t in texts], self.reported.append, self.armed.append)


def test_an_all_reduce_fault_is_armed_when_the_backward_begins_and_only_once() -> None:
    recorder = Recorder("rank=0 step=3 phase=allreduce kind=stop")
    for step, phase in [(2, "backward"), (3, "forward"), (3, "backward"), (3, "backward"), (3, "allreduce")]:
        recorder.injector.on_phase(step, phase)
    assert recorder.armed == [signal.SIGSTOP]
    assert [spec.step for spec in recorder.reported] == [3]


def in_a_child(text: str) -> "subprocess.Popen[str]":
    code = f"""
from jitckpt.faults import Injector, parse_fault
injector = Injector([parse_fault({text!r})], lambda spec: print("reported", spec.kind, flush=True), int)
for phase in ("forward", "backward", "optimizer", "between"):
    print(phase, flush=True)
    injector.on_phase(1, phase)
"""
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=-1, stderr=-1)


@pytest.mark.parametrize(
    ("kind", "died"),
    [
        ("kill", lambda status: status == -signal.SIGKILL),
        ("exit", lambda status: status == 1),
        ("exception", lambda status: status == 1),
    ],
)
def test_a_fault_is_reported_and_then_fires(kind: str, died: Callable[[int], bool]) -> None:
    child = in_a_child(f"rank=0 step=1 phase=optimizer kind={kind}")
    out, err = child.communicate(timeout=60)
    assert died(child.returncode), err
    assert out.split("\n")[:-1] == ["forward", "backward", "optimizer", f"reported {kind}"]
    assert ("rehearsed failure: rank=0 step=1" in err) == (kind == "exception")
