"""The validation of a minibatch's log, on a simulated device whose programs are drawn by chance."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jitckpt.decisions.transparent.validation import RELIED, is_due, told
from jitckpt.worker.in_place.blocks import Again, Seen, SwitchOff, Valid, judge
from jitckpt.worker.in_place.naming import BLOCK_BYTES, Places, described

LIVING = 6  # blocks as the minibatch begins
POISON = hash("overwritten")
Memory = list[int]


@dataclass(frozen=True)
class Kernel:
    """Writes to block `output` what depends on its inputs alone, or on host memory too that nobody sees."""

    output: int
    inputs: tuple[int, ...]
    reads_host: bool = False


Program = tuple[Kernel, ...]


def run(program: Program, memory: Memory, host: int) -> Memory:
    memory = [*memory]
    for place, kernel in enumerate(program):
        read = tuple(memory[block] for block in kernel.inputs)
        memory[kernel.output] = hash((place, read, host if kernel.reads_host else None))
    return memory


def put_back(start: Memory, changed: Tensor, shadow: Tensor, garbage: int) -> Memory:
    """Return the memory with garbage in all that has changed and is not put back."""
    lost = (changed & ~shadow).tolist()
    return [garbage if is_lost else value for value, is_lost in zip(start, lost, strict=True)]


def differing(one: Memory, other: Memory) -> Tensor:
    return torch.tensor([a != b for a, b in zip(one, other, strict=True)])


def validate(program: Program) -> tuple[Valid | SwitchOff, int]:
    """Validate one minibatch until there is nothing to learn; return also how often it was run again."""
    start = [hash(("start", block)) for block in range(LIVING)]
    end = run(program, start, host=0)
    changed = differing(start, end)
    shadow = torch.zeros(LIVING, dtype=torch.bool)
    for rounds in range(1, 2 * LIVING):
        again = run(program, put_back(start, changed, shadow, POISON), host=-rounds)
        match judge(Seen(changed, differing(again, end)), shadow, rounds):
            case Again(learned):
                assert (learned | shadow == learned).all()
                assert (learned != shadow).any()
                shadow = learned
            case found:
                return found, rounds
    raise AssertionError("there is no end to learning")


blocks = st.integers(0, LIVING - 1)


@st.composite
def programs(draw: st.DrawFn, reads_host: bool = False) -> Program:
    kernels = st.builds(
        Kernel,
        blocks,
        st.lists(blocks, max_size=3).map(tuple),
        st.integers(0, 4).map(lambda n: reads_host and n == 0),
    )
    return tuple(draw(st.lists(kernels, max_size=8)))


@given(programs(), st.integers())
def test_what_is_learned_is_enough_whatever_else_is_in_memory(program: Program, garbage: int) -> None:
    found, rounds = validate(program)
    assert isinstance(found, Valid)
    assert rounds <= 4
    start = [hash(("another", block)) for block in range(LIVING)]
    end = run(program, start, host=0)
    assert run(program, put_back(start, differing(start, end), found.shadow, garbage), host=0) == end


@given(programs(reads_host=True))
def test_input_behind_the_calls_is_found_exactly_if_it_reaches_the_end(program: Program) -> None:
    start = [*range(LIVING)]
    reaches = run(program, start, host=1) != run(program, start, host=2)
    found, _ = validate(program)
    assert isinstance(found, SwitchOff) == reaches


@given(st.lists(programs(), min_size=2, max_size=3), st.data())
def test_ranks_that_exchange_results_learn_together(ranks: list[Program], data: st.DataObject) -> None:
    """What one lacks makes others differ; so only when none has anything to learn may it be called wrong."""
    start = [[hash((rank, block)) for block in range(LIVING)] for rank in range(len(ranks))]

    def run_all(memories: list[Memory]) -> list[Memory]:
        ends = [run(program, memory, 0) for program, memory in zip(ranks, memories, strict=True)]
        exchanged = hash(tuple(end[0] for end in ends))
        return [[*end[:-1], exchanged] for end in ends]

    ends = run_all(start)
    changed = [differing(one, end) for one, end in zip(start, ends, strict=True)]
    shadows = [torch.zeros(LIVING, dtype=torch.bool) for _ in ranks]
    for rounds in range(1, 6):
        found = run_all([put_back(*one, POISON) for one in zip(start, changed, shadows, strict=True)])
        judged = [
            judge(Seen(changed[rank], differing(found[rank], ends[rank])), shadows[rank], rounds)
            for rank in range(len(ranks))
        ]
        for rank, one in enumerate(judged):
            if isinstance(one, Again):
                shadows[rank] = one.shadow
        if not any(isinstance(one, Again) for one in judged):
            break
    assert all(isinstance(one, Valid) for one in judged)


def only(*found: int) -> Tensor:
    return torch.tensor([block in found for block in range(LIVING)])


def test_statistics_are_learned_and_nothing_more() -> None:
    statistics, parameter, activation = 0, 1, 2
    found, _ = validate((Kernel(statistics, (statistics, parameter)), Kernel(activation, (parameter,))))
    assert isinstance(found, Valid)
    assert found.shadow.equal(only(statistics))


def test_what_is_read_and_then_overwritten_is_learned() -> None:
    found, rounds = validate((Kernel(2, (0,)), Kernel(0, ())))
    assert isinstance(found, Valid)
    assert found.shadow.equal(only(0, 2))
    assert rounds == 3


def test_what_the_user_is_told() -> None:
    assert told("x is not the same") == (
        "Transparent mode is switched off: x is not the same. The training goes on undisturbed, but a "
        "failure would now end the job; jitckpt.init (docs/guides/user-level.md) would protect it."
    )
    relied = told("x is not the same", relied=True)
    assert RELIED in relied
    assert "the result may differ" in relied
    assert "undisturbed, but" not in relied


def test_where_no_minibatch_has_been_valid_yet_it_is_tried_again_more_and_more_seldom() -> None:
    due = [step for step in range(1, 2000) if is_due(step, 1000, valid=False)]
    assert due == [5, 25, 125, 625, 1005]
    assert [step for step in range(1, 2000) if is_due(step, 1000)] == [5, 1005]


@pytest.mark.parametrize(("every", "due"), [(10, [5, 15, 25]), (0, [5]), (1, [*range(5, 30)])])
def test_the_fifth_minibatch_and_every_so_many(every: int, due: list[int]) -> None:
    assert [step for step in range(1, 30) if is_due(step, every)] == due


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 2000)), min_size=1, max_size=5))
def test_every_byte_of_a_piece_is_in_its_block(sizes: list[tuple[int, int]]) -> None:
    pieces, address = [], 4096
    for size, gap in sizes:
        pieces.append((address, size))
        address += -(-size // BLOCK_BYTES) * BLOCK_BYTES + gap
    places = Places(pieces)
    expected = 0
    for address, size in pieces:
        for begin in range(0, size, BLOCK_BYTES):
            assert places.blocks(address + begin, min(BLOCK_BYTES, size - begin)) == range(
                expected, expected + 1
            )
            expected += 1
        assert len(places.blocks(address, size)) == -(-size // BLOCK_BYTES)
        across = -(-size // BLOCK_BYTES) + 1 if any(begin == address + size for begin, _ in pieces) else 0
        assert len(places.blocks(address, size + 1)) == across
    assert not places.blocks(0, 1)
    assert not places.blocks(pieces[0][0], 0)


def test_blocks_without_a_name_are_told_by_their_addresses() -> None:
    places = Places([(0x1000, 1024), (0x9000, 2048)])
    blocks = torch.tensor([True, False, True, True, False, True])
    assert described(blocks, places, {}) == "0x1000 (512 bytes), 0x9000 (1024 bytes), 0x9600 (512 bytes)"
    assert described(blocks, places, {}, most=1) == "0x1000 (512 bytes) and more"
    assert described(torch.zeros(6, dtype=torch.bool), places, {}) == "nothing"
