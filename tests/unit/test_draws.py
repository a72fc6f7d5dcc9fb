"""Trainings that draw where a restart could not make it again."""

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from jitckpt.data import data_pass
from jitckpt.state.host_state import HostState
from jitckpt.worker.lookouts.draws import LOST, ONE_AHEAD, Draws


class Watched:
    def __init__(self, has_boundaries: bool = False, has_barrier: bool = False) -> None:
        self.model = nn.Linear(1, 1)
        self.warnings: list[str] = []
        self.own = torch.Generator()
        host = HostState(
            model=self.model,
            optimizers=[],
            schedulers=[],
            scaler=None,
            extra=None,
            device=None,
            finds_generators=True,
        )
        assert host.generators is not None
        host.generators.follow([("own", self.own)])
        self.draws = Draws(
            self.model,
            lambda: has_boundaries,
            self.warnings.append,
            host.numbers_drawn,
            has_barrier=has_barrier,
        )

    def minibatch(self, between: Callable[[], object] = lambda: None) -> None:
        self.draws.forward_ended()
        between()
        self.draws.step_begins()


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()
    yield one
    one.draws.end()


def loader(generator: torch.Generator | None = None) -> "DataLoader[tuple[torch.Tensor, ...]]":
    return DataLoader(TensorDataset(torch.arange(4.0)), generator=generator)


@pytest.mark.parametrize("draw", [lambda: torch.randn(2), random.random])
def test_random_numbers_behind_the_forward_pass_are_named_once(
    watched: Watched, draw: Callable[[], object]
) -> None:
    for _ in range(3):
        watched.minibatch(draw)
    (warning,) = watched.warnings
    assert "draws random numbers between forward pass and optimizer step" in warning


@pytest.mark.parametrize("draws_own", [False, True])
def test_in_a_loop_with_boundaries_it_is_what_a_failure_there_loses(draws_own: bool) -> None:
    for has_barrier in (False, True):
        watched = Watched(has_boundaries=True, has_barrier=has_barrier)
        watched.minibatch(partial(torch.randn, 2, generator=watched.own if draws_own else None))
        watched.draws.end()
        assert [LOST in watched.warnings] == [not has_barrier]


def test_those_before_it_and_after_the_step_are_the_loops_own(watched: Watched) -> None:
    for _ in range(4):
        torch.randn(2)
        watched.minibatch()
        random.random()
    assert watched.warnings == []


@pytest.mark.parametrize(
    ("drawn", "is_ahead"),
    [
        (["aa", "a", "a", "a"], True),
        (["aab", "ab", "ab", "ab"], True),
        (["a", "a", "a", "a"], False),
        (["aa", "aa", "aa", "aa"], False),  # two make one
        (["aab", "b", "b", "b"], False),  # a look at some of an evaluation's first
        (["aa", "a", "aa", "a"], False),  # now and then one is left out
    ],
)
def test_a_loop_that_keeps_a_batch_ahead_is_named_at_the_third_step(
    watched: Watched, drawn: list[str], is_ahead: bool
) -> None:
    for passes in drawn:
        for number in map(ord, passes):
            watched.draws.batch_drawn(number)
        watched.minibatch()
    assert watched.warnings == ([ONE_AHEAD] if is_ahead else [])


def test_a_loader_of_training_data_is_named_at_the_first_step(watched: Watched) -> None:
    for _ in loader():
        watched.minibatch()
    (warning,) = watched.warnings
    assert "draws from a DataLoader over TensorDataset that is iterated outside of job.batches" in warning
    assert "`for epoch in job.epochs(n):` and in it `for batch in job.batches(loader):`" in warning


def test_a_loader_inside_of_one_that_the_loop_draws_from_is_not_named(watched: Watched) -> None:
    """As that of a prefetcher to which the loop was given."""

    class Prefetcher:
        def __init__(self) -> None:
            self.inside = loader()

        def __iter__(self) -> Iterator[object]:
            yield from self.inside

    drawn = data_pass.Loader(Prefetcher(), watched.warnings.append).begin()
    for _ in range(3):
        drawn.next()
        watched.minibatch()
    assert watched.warnings == []


def test_a_loader_that_is_read_before_the_training_disturbs_nothing(watched: Watched) -> None:
    assert len([*loader()]) == 4
    watched.minibatch()
    assert watched.warnings == []


def evaluate(model: nn.Module, data: "DataLoader[tuple[torch.Tensor, ...]]") -> None:
    model.eval()
    assert len([*data]) == 4
    model.train()


def test_an_evaluation_between_steps_of_a_plain_loop_is_named(watched: Watched) -> None:
    watched.minibatch()
    evaluate(watched.model, loader())
    assert watched.warnings == [], "the training may be over"
    watched.minibatch()
    (warning,) = watched.warnings
    assert "draws its workers' seed from torch's generator" in warning


def test_an_evaluation_disturbs_nothing_with_a_generator_of_its_own_or_where_the_loop_has_boundaries(
    watched: Watched,
) -> None:
    watched.minibatch()
    evaluate(watched.model, loader(generator=torch.Generator()))
    watched.minibatch()
    assert watched.warnings == []
    exact = Watched(has_boundaries=True)
    exact.minibatch()
    evaluate(exact.model, loader())
    exact.minibatch()
    exact.draws.end()
    assert exact.warnings == []


def test_what_is_watched_is_as_before_when_it_ends() -> None:
    before = DataLoader.__iter__
    one = Watched()
    assert DataLoader.__iter__ is not before
    one.draws.end()
    assert DataLoader.__iter__ is before
