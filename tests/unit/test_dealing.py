"""A pass goes on with another number of ranks: no sample is lost, and none comes twice."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from jitckpt.data.loop import Loop
from jitckpt.decisions import elastic
from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded

SEED = 3
pytestmark = pytest.mark.usefixtures("nothing_is_watched")


class Rank:
    """Stands for a process of one rank: its loader, its loop, and where it was after its last step."""

    def __init__(self, rank: int, ranks: int, length: int, batch: int, *, distributed: bool = True) -> None:
        data: Any = torch.arange(length)
        sampler: Any = RandomSampler(data)
        if distributed:
            sampler = DistributedSampler(data, ranks, rank, seed=SEED)
        self.loader: DataLoader[Any] = DataLoader(data, batch_size=batch, sampler=sampler)
        self.told: list[str] = []
        self.loop = Loop(
            begins=lambda: None,
            boundary=lambda frame: True,
            write_again=lambda: None,
            put_back=lambda: None,
            warn=self.told.append,
        )

    def restore(self, state: Encoded, ranks_before: int, ranks: int) -> None:
        own = tree_codec.decode(state.tree, state.tensors)
        self.loop.restore(own, None, 0, of_others=ranks_before != ranks)


def epoch(world: Sequence[Rank]) -> Iterator[list[list[int]]]:
    """Yield what each rank gets, batch by batch, of the rest of the epoch that they are in."""
    iterators = [iter(rank.loop.batches(rank.loader)) for rank in world]
    while True:
        try:
            yield [next(one).tolist() for one in iterators]
        except StopIteration:
            return


def order(length: int) -> list[int]:
    generator = torch.Generator()
    generator.manual_seed(SEED)
    return torch.randperm(length, generator=generator).tolist()


@settings(deadline=None, max_examples=20)
@given(
    length=st.integers(12, 40),
    batch=st.integers(1, 4),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=2, max_size=4),
)
def test_what_all_have_had_is_the_beginning_of_the_order(
    length: int, batch: int, worlds: list[tuple[int, int]]
) -> None:
    """Each world makes so many batches; the last one the rest of the epoch, in which some come twice at most
    so that all ranks get equally many."""
    had: list[int] = []
    states: list[Encoded] = []
    for number, (ranks, batches) in enumerate(worlds):
        world = [Rank(rank, ranks, length, batch) for rank in range(ranks)]
        if states:
            for number_of, rank in enumerate(world):
                rank.restore(states[number_of % len(states)], len(states), ranks)
        is_last = number == len(worlds) - 1
        for count, shares in enumerate(epoch(world), start=1):
            # Dealt in turn: of each batch first the first samples of all ranks.
            had += [share[at] for at in range(batch) for share in shares if at < len(share)]
            if count == batches and not is_last:
                assert had[:length] == order(length)[: len(had)]
                states = [rank.loop.capture() for rank in world]
                break
        assert not any(rank.told for rank in world)
        if len(had) >= length:
            break
    if len(had) >= length or is_last:
        assert had[:length] == order(length)
        assert len(had) - length < ranks, "the sampler's own padding"


@pytest.mark.parametrize(("ranks", "micro_batches"), [(4, 3), (3, 4), (2, 6), (1, 12), (6, 2)])
def test_the_global_batch_is_the_same_samples_with_any_number_of_ranks(
    ranks: int, micro_batches: int
) -> None:
    assert elastic.micro_batches(3, 4, ranks) == micro_batches
    world = [Rank(rank, ranks, 96, 2) for rank in range(ranks)]
    steps: list[set[int]] = [set()]
    for shares in epoch(world):
        steps[-1].update(sample for share in shares for sample in share)
        if world[0].loop.ends_step(micro_batches):
            steps.append(set())
    assert steps.pop() == set()
    assert steps == [set(order(96)[at : at + 24]) for at in range(0, 96, 24)]


def test_the_batches_that_are_left_out_are_counted_as_this_job_counts_them() -> None:
    before = Rank(0, 4, 96, 2)
    iterator = iter(before.loop.batches(before.loader))
    for _ in range(6):
        next(iterator)
    now = Rank(0, 3, 96, 2)
    now.restore(before.loop.capture(), 4, 3)
    batches = now.loop.batches(now.loader)
    assert batches.first == 8, "6 batches of 4 ranks are 8 of 3"
    assert len([*batches]) == 8


@pytest.mark.parametrize("of_others", [True, False])
def test_an_order_of_the_rank_s_own_is_said_not_to_be_kept(of_others: bool) -> None:
    def begun(ranks: int) -> Rank:
        return Rank(0, ranks, 40, 2, distributed=False)

    before = begun(4)
    iterator = iter(before.loop.batches(before.loader))
    next(iterator)
    state = before.loop.capture()
    now = begun(3)
    now.restore(state, 4, 3 if of_others else 4)
    next(iter(now.loop.batches(now.loader)))
    said = [told for told in now.told if "some samples are left out or come twice" in told]
    assert len(said) == of_others
