import ctypes
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.device import LIBRARY_DIR
from jitckpt.faults.injection import (
    DEVICE_KINDS,
    KINDS,
    PHASES,
    FaultError,
    FaultSpec,
    Injector,
    arm_device,
    from_environment,
    parse_fault,
    phases_of,
    to_environment,
)

numbers = st.integers(min_value=0, max_value=10**9)
factors = st.floats(min_value=1, max_value=1e6)


@st.composite
def specs_of(draw: st.DrawFn, kinds: tuple[str, ...]) -> FaultSpec:
    kind = draw(st.sampled_from(kinds))
    keys: dict[str, st.SearchStrategy[object]] = {}
    if kind in (*DEVICE_KINDS, "driver-suspect") and kind != "heal":
        keys["call"] = st.none() | numbers.map(lambda n: n + 1)
    if kind == "network-cut":
        keys["peer"] = st.none() | numbers
    if kind == "collective-error":
        keys["result"] = st.sampled_from([None, "remote", "system"])
    if kind == "slow":
        keys["factor"] = factors
        keys["part"] = st.sampled_from([None, "kernels", "link"])
    values = {key: draw(strategy) for key, strategy in keys.items()}
    if values.get("part") == "link":
        values["peer"] = draw(st.none() | numbers)
    rank = draw(numbers.filter(lambda rank: rank != values.get("peer")))
    phase = draw(st.sampled_from([*phases_of(kind), "any"]))
    return FaultSpec(rank, draw(numbers) + 1, phase, kind, draw(st.none() | numbers), **values)  # type: ignore[arg-type]


specs = specs_of(KINDS)


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
        ("rank=1 step=20 kind=burn", "kind must be kill, stop, abort, exception, exit, segfault, gil-hold, "),
        ("rank=one step=20", "rank must be a whole number of at least 0, not 'one'"),
        ("rank=-1 step=20", "rank must be a whole number of at least 0, not '-1'"),
        ("rank=1 step=0", "step must be a whole number of at least 1, not '0'"),
        ("rank=1 step=" + "9" * 40, "step must be a whole number"),
        ("rank=1", "step is missing"),
        ("", "rank is missing"),
        (
            "rank=1 step=2 node=3",
            "'node' is not known; the keys are rank, step, phase, kind, seed, call, peer,",
        ),
        ("rank=1 step=2 step=3", "step is given twice"),
        (
            "rank=1 step=2 phase=allreduce kind=exit",
            "phase=allreduce goes only with kind kill, stop, abort, sticky, ",
        ),
        (
            "rank=1 step=2 phase=allreduce kind=oom",
            "phase=allreduce goes only with kind kill, stop, abort, sticky, ",
        ),
        ("rank=1 step=2 call=3", "call does not go with kind=kill"),
        ("rank=1 step=2 kind=sticky call=0", "call must be a whole number of at least 1, not '0'"),
        ("rank=1 step=2 kind=sticky peer=0", "peer does not go with kind=sticky"),
        ("rank=1 step=2 kind=network-cut peer=1", "peer is the rank itself"),
        ("rank=1 step=2 kind=heal call=1", "call does not go with kind=heal"),
        ("rank=1 step=2 kind=slow", "factor is missing"),
        ("rank=1 step=2 kind=slow factor=0.5", "factor must be a number of at least 1 and at most 1000000"),
        ("rank=1 step=2 kind=slow factor=nan", "factor must be a number of at least 1"),
        ("rank=1 step=2 kind=slow factor=fast", "factor must be a number of at least 1"),
        ("rank=1 step=2 kind=slow factor=2 peer=0", "peer goes only with part=link"),
        ("rank=1 step=2 kind=slow factor=2 part=all", "part must be kernels or link, not 'all'"),
        ("rank=1 step=2 kind=collective-error result=bad", "result must be remote or system, not 'bad'"),
    ],
)
def test_a_wrong_fault_is_explained(text: str, complaint: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(text)
    assert complaint in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", ["{}", "[1]", "rank=1 step=2"])
def test_a_wrong_environment_is_explained(value: str) -> None:
    with pytest.raises(FaultError, match="JITCKPT_FAULTS must be a JSON list"):
        from_environment(value, 0)


class Recorder:
    def __init__(self, *texts: str) -> None:
        self.reported: list[FaultSpec] = []
        self.armed: list[int] = []
        self.of_the_device: list[str] = []
        self.injector = Injector(
            [parse_fault(t) for t in texts],
            self.reported.append,
            self.armed.append,
            lambda spec: self.of_the_device.append(spec.for_the_device()),
        )


def test_an_all_reduce_fault_is_armed_when_the_backward_begins_and_only_once() -> None:
    recorder = Recorder("rank=0 step=3 phase=allreduce kind=stop")
    for step, phase in [(2, "backward"), (3, "forward"), (3, "backward"), (3, "backward"), (3, "allreduce")]:
        recorder.injector.on_phase(step, phase)
    assert recorder.armed == [signal.SIGSTOP]
    assert [spec.step for spec in recorder.reported] == [3]


@pytest.mark.parametrize(
    ("fault", "order"),
    [
        ("phase=forward kind=sticky", "kind=sticky"),
        ("phase=backward kind=ecc call=5", "kind=ecc call=5"),
        ("phase=allreduce kind=device-lost", "kind=device-lost call=1 at=collective"),
        ("phase=allreduce kind=collective-hang call=2", "kind=collective-hang call=2"),
        ("phase=backward kind=collective-error result=system", "kind=collective-error result=system"),
        ("phase=backward kind=network-cut peer=1", "kind=network-cut peer=1"),
        ("phase=allreduce kind=network-cut", "kind=network-cut call=1"),
        ("phase=between kind=slow factor=2 part=link", "kind=slow part=link factor=2.0"),
        ("phase=optimizer kind=heal", "kind=heal"),
    ],
)
def test_a_fault_of_the_device_is_ordered_when_its_phase_begins(fault: str, order: str) -> None:
    recorder = Recorder(f"rank=0 step=3 {fault}")
    phase = parse_fault(f"rank=0 step=3 {fault}").phase
    begins = "backward" if phase == "allreduce" else phase
    for step in (2, 3, 4):
        for now in ("forward", "backward", "optimizer", "between"):
            recorder.injector.on_phase(step, now)
            assert recorder.of_the_device == (
                [order] if (step, PHASES.index(now)) >= (3, PHASES.index(begins)) else []
            )
    assert [spec.kind for spec in recorder.reported] == [parse_fault(f"rank=0 step=3 {fault}").kind]


@pytest.fixture(scope="module")
def order() -> Iterator[Callable[[str], str]]:
    """softgpu_fault of the library, which needs no device for that; raises what it says of a wrong text."""
    library = ctypes.CDLL(str(LIBRARY_DIR / "libsoftgpu.so"))

    def arm(text: str) -> str:
        answer = ctypes.create_string_buffer(1024)
        if library.softgpu_fault(text.encode(), answer, len(answer)) != 0:
            raise ValueError(answer.value.decode())
        return answer.value.decode()

    yield arm
    arm("kind=heal")


@given(spec=specs_of(DEVICE_KINDS))
def test_softgpu_understands_every_fault_of_the_device(order: Callable[[str], str], spec: FaultSpec) -> None:
    spec = spec.with_phase()
    said = order(spec.for_the_device())
    assert said.startswith("what lasted has ended" if spec.kind == "heal" else f"kind={spec.kind}")
    order("kind=heal")


def test_a_fault_of_the_device_needs_softgpu() -> None:
    with pytest.raises(FaultError, match="the device of this process is not softgpu"):
        arm_device(parse_fault("rank=0 step=1 kind=sticky"))


def in_a_child(text: str) -> "subprocess.Popen[str]":
    code = f"""
from jitckpt.faults.injection import Injector, parse_fault
specs = [parse_fault({text!r})]
injector = Injector(specs, lambda spec: print("reported", spec.kind, flush=True), int, print)
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
    out, err = child.communicate(timeout=300)
    assert died(child.returncode), err
    assert out.split("\n")[:-1] == ["forward", "backward", "optimizer", f"reported {kind}"]
    assert ("rehearsed failure: rank=0 step=1" in err) == (kind == "exception")
