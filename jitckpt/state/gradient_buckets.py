"""In what pieces DistributedDataParallel averages gradients: kept, as a new process begins with others.

Its first pass averages all of them in one piece; from the second on they are in buckets, in the order in
which that pass had them (Reducer::rebuild_buckets of torch 2.11). Where NCCL adds in rings, a number's place
in its piece decides in which order the ranks' parts are added. So from three ranks on the first step of a
start that goes on from a save would be rounded otherwise than an undisturbed run's.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from jitckpt.encoding import tree_codec
from jitckpt.encoding.tree_codec import Encoded
from jitckpt.state import parallel
from jitckpt.state.first_buckets import FirstBuckets

PART = "gradient_buckets"
LEAST_RANKS = 3  # the sum of two numbers has but one order
_KNOWN_AFTER = 3  # passes: a wrapper tells its buckets in the one behind that which begins with them
_LOOKS = 8  # by which there are wrappers, if there are to be any
_MOST_LOOKS = 40  # at some of which one makes no pass

NOT_KEPT = (
    "DistributedDataParallel averages the gradients of a process's first pass in other pieces than later. "
    "{why}, so the first step from here on may be rounded otherwise than an undisturbed run's."
)
TOO_EARLY = "As early as at this save the later pieces are not known"
NOT_ALIKE = "The ranks have kept different ones"
NOT_TOLD_APART = "Two wrappers have parameters of the same shapes, but other pieces"
OTHERS_LATER = (
    "DistributedDataParallel has made other buckets of gradients than before the restart, so from here on "
    "NCCL may round their sums otherwise than in an undisturbed run."
)


_Key = tuple[str, tuple[int, ...]]  # parameters and ranks of WrapperBuckets


class WrapperBuckets(NamedTuple):
    """Of one wrapper.

    parameters: a digest of their shapes. ranks: that average. members: the places in the wrapper's list of
    parameters of those in each bucket.
    """

    parameters: str
    ranks: Sequence[int]
    members: Sequence[Sequence[int]]

    @property
    def digest(self) -> str:
        """What is the same on all ranks that have the same."""
        return xxhash.xxh3_128_hexdigest(repr(self).encode())


class GradientBuckets:
    """Of all wrappers of this process. warn: says a sentence."""

    def __init__(self, warn: Callable[[str], None] = lambda text: None) -> None:
        self.warn = warn
        is_large = int(os.environ.get("WORLD_SIZE", "1")) >= LEAST_RANKS
        self._looks = 0 if is_large else _MOST_LOOKS
        self._known: list[WrapperBuckets] = []
        self._restored: list[WrapperBuckets] = []
        self._told = Encoded(None, {})
        self._members: Mapping[_Key, Sequence[Sequence[int]]] = {}
        self._first: FirstBuckets | None = None

    @property
    def are_final(self) -> bool:
        """Whether `capture` goes on to return what it does."""
        return self._looks >= _MOST_LOOKS

    def capture(self) -> dict[str, Encoded]:
        """Return them as a named part; no part where there is nothing to keep."""
        if not self.are_final:
            self._look()
        return {PART: self._told} if self._known else {}

    def restore(self, saved: Any, step: int, all_say: Callable[[Any], list[Any]]) -> None:
        """Give the wrappers that there are, and those that come before the first pass, such buckets.

        saved: what `capture` returned, decoded, after this step; None if nothing. all_say: returns what every
        rank says, where all make this call.
        """
        every = [WrapperBuckets(*one) for one in saved or ()]
        said = all_say([one.digest for one in every])
        alike = [one for one in every if all(one.digest in said[rank] for rank in one.ranks)]
        wrappers = _wrappers()
        if len(alike) < len(every):
            self.warn(NOT_KEPT.format(why=NOT_ALIKE))
        elif not every and wrappers and step < _KNOWN_AFTER:
            self.warn(NOT_KEPT.format(why=TOO_EARLY))
        if alike:
            self._know(alike)
            self._restored = alike
            self._members = self._told_apart(alike)
            self._first = FirstBuckets(self._found)
            for why in self._first.give(wrappers):
                self.warn(NOT_KEPT.format(why=why))

    def _told_apart(self, alike: list[WrapperBuckets]) -> dict[_Key, Sequence[Sequence[int]]]:
        """Return the members for each key that has but one such list. All of its ranks have the same."""
        found: dict[_Key, list[Sequence[Sequence[int]]]] = {}
        for one in alike:
            lists = found.setdefault((one.parameters, tuple(one.ranks)), [])
            if one.members not in lists:
                lists.append(one.members)
        if any(len(lists) > 1 for lists in found.values()):
            self.warn(NOT_KEPT.format(why=NOT_TOLD_APART))
        return {key: lists[0] for key, lists in found.items() if len(lists) == 1}

    def _found(
        self, wrapper: DistributedDataParallel, parameters: Sequence[Tensor], static_graph: bool
    ) -> Sequence[Sequence[int]] | None:
        if not _makes_later_ones(wrapper, static_graph):
            return None
        ranks = distributed.get_process_group_ranks(wrapper.process_group)
        return self._members.get((parameters_digest(parameters), tuple(ranks)))

    def _look(self) -> None:
        self._looks += 1
        wrappers = _wrappers()
        own = [told for one in wrappers if (told := _told_by(one)) is not None]
        if own:
            self._know(own)
        if len(own) == len(wrappers) and (own or self._looks >= _LOOKS):
            self._looks = _MOST_LOOKS
            if own and any(one not in own for one in self._restored):
                self.warn(OTHERS_LATER)
        if self._first is not None and self.are_final:
            self._first.end()

    def _know(self, buckets: list[WrapperBuckets]) -> None:
        if buckets != self._known:
            self._known = buckets
            self._told = tree_codec.encode([list(one) for one in buckets], PART)


def parameters_digest(parameters: Sequence[Tensor]) -> str:
    """Return what tells the parameters of a wrapper from those of another."""
    text = repr([(list(one.shape), str(one.dtype)) for one in parameters])
    return xxhash.xxh3_128_hexdigest(text.encode())


def _wrappers() -> list[DistributedDataParallel]:
    """Return those that make buckets behind their first pass, of enough ranks for these to matter."""
    return [
        one
        for one in parallel.all_of(DistributedDataParallel)
        if getattr(one, "reducer", None) is not None and _makes_later_ones(one, one.static_graph)
    ]


def _makes_later_ones(wrapper: DistributedDataParallel, static_graph: bool) -> bool:
    group = wrapper.process_group
    return (
        (static_graph or not wrapper.find_unused_parameters)
        and group in distributed.distributed_c10d._world.pg_group_ranks  # not destroyed
        and distributed.get_world_size(group) >= LEAST_RANKS
    )


def _told_by(wrapper: DistributedDataParallel) -> WrapperBuckets | None:
    """Return what a wrapper tells of its buckets; None until it does."""
    told = wrapper._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    if not told:
        return None
    members = [[int(place) for place in bucket.split()] for bucket in told.split(",")]
    parameters, _ = wrapper._build_params_for_reducer()
    ranks = distributed.get_process_group_ranks(wrapper.process_group)
    return WrapperBuckets(parameters_digest(parameters), ranks, members)
