"""DistributedDataParallel begins with the buckets that it had, and no wrapper with those of another."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from jitckpt.encoding import tree_codec
from jitckpt.state import gradient_buckets
from jitckpt.state.gradient_buckets import PART, GradientBuckets

RANKS = 4
SMALL, LARGE = 0.02, 0.04  # MB


@pytest.fixture(autouse=True)
def three_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is rank 0 of four; what they send is lost."""
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    distributed.destroy_process_group()


def wrapped(cap: float, **how: Any) -> DistributedDataParallel:
    layers = [nn.Linear(64, 64) for _ in range(4)]
    made = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=cap, **how)
    made.register_comm_hook(None, own_part)  # the fake group's answers have no tensors
    return made


def own_part(
    _: object,
    bucket: distributed.GradBucket,  # type: ignore[name-defined]  # torch looks at it
) -> torch.futures.Future[torch.Tensor]:
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer())
    return done


def trained(*wrappers: DistributedDataParallel, steps: int = 4) -> list[Any]:
    """Return what is kept behind some steps, decoded."""
    kept = GradientBuckets()
    for _ in range(steps):
        for one in wrappers:
            one(torch.ones(2, 64)).sum().backward()
        parts = kept.capture()
    part = parts[PART]
    return list(tree_codec.decode(part.tree, part.tensors))


def restored(saved: list[Any], said: list[str] | None = None) -> GradientBuckets:
    made = GradientBuckets((list[str]() if said is None else said).append)
    made.restore(saved, 4, lambda own: [own] * RANKS)
    return made


def first_sizes(wrapper: DistributedDataParallel) -> str:
    wrapper(torch.ones(2, 64)).sum().backward()
    return str(wrapper._get_ddp_logging_data()["bucket_sizes"])


def later_sizes(wrapper: DistributedDataParallel) -> str:
    return str(wrapper._get_ddp_logging_data()["rebuilt_bucket_sizes"])


def ended(kept: GradientBuckets) -> None:
    for _ in range(gradient_buckets._MOST_LOOKS):
        kept.capture()


def test_a_wrapper_begins_with_the_buckets_that_it_had() -> None:
    one = wrapped(SMALL)
    saved, sizes = trained(one), later_sizes(one)
    before, usual = wrapped(SMALL), first_sizes(wrapped(SMALL))
    kept = restored(saved)
    assert first_sizes(before) == first_sizes(wrapped(SMALL)) == sizes != usual
    ended(kept)
    assert first_sizes(wrapped(SMALL)) == usual


def test_of_two_that_cannot_be_told_apart_each_keeps_its_own() -> None:
    pair = wrapped(SMALL), wrapped(LARGE)
    saved = trained(*pair)
    del pair
    before, said = [wrapped(SMALL), wrapped(LARGE)], list[str]()
    usual = [first_sizes(wrapped(SMALL)), first_sizes(wrapped(LARGE))]
    kept = restored(saved, said)
    assert [first_sizes(one) for one in before] == usual
    assert gradient_buckets.NOT_TOLD_APART in said[0]
    ended(kept)


def test_one_that_makes_no_later_buckets_keeps_its_own() -> None:
    saved = trained(wrapped(SMALL))
    usual = first_sizes(wrapped(LARGE, find_unused_parameters=True))
    kept = restored(saved)
    assert first_sizes(wrapped(LARGE, find_unused_parameters=True)) == usual
    ended(kept)


def test_one_of_other_ranks_keeps_its_own() -> None:
    """Its other ranks may have kept nothing."""
    saved = trained(wrapped(SMALL))
    group = distributed.new_group([0, 1, 2])
    before = wrapped(LARGE, process_group=group)
    usual = first_sizes(wrapped(LARGE, process_group=group))
    kept = restored(saved)
    assert first_sizes(before) == first_sizes(wrapped(LARGE, process_group=group)) == usual
    ended(kept)


def test_one_whose_group_is_gone_is_left_alone() -> None:
    group = distributed.new_group([0, 1, 2])
    gone = wrapped(SMALL, process_group=group)
    for _ in range(4):
        gone(torch.ones(2, 64)).sum().backward()
    distributed.destroy_process_group(group)
    assert len(trained(wrapped(SMALL))) == 1
