"""The validation of a minibatch's log, on a simulated device whose programs are drawn by chance."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from jitckpt.transparent.validation import Again, Kept, Seen, SwitchOff, Valid, is_due, judge, told

STATE = ("optimizer.0.parameter.0", "optimizer.0.state.0.exp_avg")
OTHERS = ("module.0.running_mean", "scale", "loss", "activation", "gradient")
LIVING = (*STATE, *OTHERS[:4])  # as the minibatch begins; the gradient is made in it
POISON = hash("overwritten")


@dataclass(frozen=True)
class Kernel:
    """Writes to `output` what depends on its inputs alone, or on host memory too that nobody sees."""

    output: str
    inputs: tuple[str, ...]
    reads_host: bool = False


Program = tuple[Kernel, ...]


def run(program: Program, memory: dict[str, int], host: int, what: str = "minibatch") -> None:
    made = {*memory}
    for place, kernel in enumerate(program):
        read = tuple(memory[name] for name in kernel.inputs if name in made)
        memory[kernel.output] = hash((what, place, read, host if kernel.reads_host else None))
        made.add(kernel.output)


def put_back(memory: Mapping[str, int], start: Mapping[str, int], kept: Kept, garbage: int) -> dict[str, int]:
    """Return the memory as the minibatch finds it in a recovery: garbage is in all that is not put back."""
    found = {name: memory[name] if name in STATE else garbage for name in start}
    return found | {name: start[name] for name in {*kept.shadow, *kept.constants}}


def validate(program: Program, in_step: Program = ()) -> Valid | SwitchOff:
    """Validate until there is nothing to learn; each time another minibatch, with other numbers."""
    kept = Kept()
    for minibatch in range(2 * len(LIVING)):
        start = {name: hash((name, minibatch // 100)) for name in LIVING}
        memory = dict(start)
        run(program, memory, host=minibatch)
        before_step = dict(memory)
        unchanged = {
            name: value
            for name, value in start.items()
            if before_step[name] == value and name not in kept.scratch
        }
        again = put_back(memory, start, kept, POISON) | unchanged
        run(program, again, host=-1 - minibatch)
        run(in_step, memory, host=minibatch, what="step")
        seen = Seen(start, before_step, again, memory, frozenset(STATE))
        match judge(seen, kept):
            case Again(learned):
                assert learned != kept
                kept = learned
            case found:
                return found
    raise AssertionError("there is no end to learning")


@st.composite
def programs(draw: st.DrawFn, reads_host: bool = False) -> Program:
    names = st.sampled_from((*STATE, *OTHERS))
    kernels = st.builds(
        Kernel,
        names,
        st.lists(names, max_size=3).map(tuple),
        st.integers(0, 4).map(lambda n: reads_host and n == 0),
    )
    return tuple(draw(st.lists(kernels, max_size=8)))


def check(program: Program, found: Valid, garbage: int) -> None:
    """See that a recovery is exact, whatever the rest of the memory holds."""
    start = {name: hash((name, "another")) for name in LIVING}
    memory = dict(start)
    run(program, memory, host=0)
    again = put_back(memory, start, found.kept, garbage)
    run(program, again, host=0)
    needless = found.kept.scratch - {kernel.output for kernel in program}
    assert all(again[name] == memory[name] for name in memory.keys() - needless)


@given(programs(), st.integers())
def test_what_is_learned_is_enough_whatever_else_is_in_memory(program: Program, garbage: int) -> None:
    found = validate(program)
    assert isinstance(found, Valid)
    assert not found.kept.scratch
    check(program, found, garbage)


@given(programs(reads_host=True))
def test_input_behind_the_calls_is_found_if_it_reaches_the_end(program: Program) -> None:
    ends = []
    for host in (1, 2):
        memory = {name: hash(name) for name in LIVING}
        run(program, memory, host)
        ends.append(memory)
    found = validate(program)
    assert isinstance(found, SwitchOff) == (ends[0] != ends[1])
    if isinstance(found, SwitchOff):
        assert "something reads host memory behind the calls" in found.reason


@given(programs(), programs(), st.integers())
def test_what_the_step_changes_beside_its_state_must_not_be_needed(
    program: Program, in_step: Program, garbage: int
) -> None:
    changed = {kernel.output for kernel in in_step} & {*LIVING} - {*STATE}
    found = validate(program, in_step)
    if isinstance(found, SwitchOff):
        assert changed
        assert "optimizer step" in found.reason
        # It does need something of it: with what the step leaves alone there is nothing to complain of.
        assert isinstance(validate(program), Valid)
    else:
        assert found.kept.scratch == changed
        assert not changed & {*found.kept.shadow, *found.kept.constants}
        check(program, found, garbage)


def test_statistics_are_learned_and_nothing_more() -> None:
    forward = Kernel("module.0.running_mean", ("module.0.running_mean", STATE[0]))
    loss = Kernel("activation", (STATE[0], "scale"))
    gradient = Kernel("gradient", ("activation",))
    found = validate((forward, loss, gradient))
    assert isinstance(found, Valid)
    assert found.kept.shadow == {"module.0.running_mean"}
    assert found.kept.constants.keys() == {"scale", "loss"}


def test_memory_that_the_step_uses_for_a_moment_is_nothing_to_keep() -> None:
    forward, in_step = Kernel("gradient", (STATE[0],)), Kernel("activation", (STATE[0],))
    found = validate((forward,), (in_step,))
    assert isinstance(found, Valid)
    assert found.kept.scratch == {"activation"}
    needs_it = validate((replace(forward, inputs=("activation",)),), (in_step,))
    assert isinstance(needs_it, SwitchOff)


def test_what_is_read_and_then_overwritten_is_learned() -> None:
    found = validate((Kernel("activation", ("scale",)), Kernel("scale", ())))
    assert isinstance(found, Valid)
    assert found.kept.shadow == {"activation", "scale"}


def test_a_parameter_that_changes_outside_the_step_is_copied_too() -> None:
    # Even if it comes out the same when it is run again: a replica's may not be there yet.
    for inputs in ((STATE[0],), ("scale",)):
        found = validate((Kernel(STATE[0], inputs),))
        assert isinstance(found, Valid)
        assert found.kept.shadow == {STATE[0]}


def test_a_constant_that_changes_after_all_joins_the_shadow() -> None:
    seen = Seen({"scale": 2}, {"scale": 2}, {"scale": 2}, {"scale": 2}, frozenset())
    assert judge(seen, Kept(constants={"scale": 2})) == Valid(Kept(constants={"scale": 2}))
    changed = judge(seen, Kept(constants={"scale": 1}))
    assert changed == Again(Kept(frozenset({"scale"}), {}))
    assert judge(seen, changed.kept) == Valid(changed.kept)


def test_a_call_that_cant_be_run_again_is_named() -> None:
    call = "cudaLaunchHostFunc runs a function of the host"
    off = judge(Seen({}, {}, {}, {}, frozenset(), (call,)), Kept())
    assert off == SwitchOff(call)
    assert told(off, registered=True) == (
        f"Transparent mode is switched off: {call}. The training goes on undisturbed, in user-level mode."
    )
    assert "but a failure would now end the job; jitckpt.init" in told(off, registered=False)


def test_the_fifth_minibatch_and_every_so_many() -> None:
    assert [step for step in range(1, 30) if is_due(step, 10)] == [5, 15, 25]
