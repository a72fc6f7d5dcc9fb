"""One pass over a loader that a restart can go on with in the middle, the same batch by batch.

Of a plain DataLoader over a map dataset only indices are drawn again: the sampler begins with the random
numbers that it began with, and what was handed out is left out. Its workers get the seed and the states that
the former ones had. Over an iterable dataset, or where the loader is no plain one, the data are read again.
A loader with state_dict and load_state_dict goes on by its own state.
"""

import copy
import math
import sys
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import isgenerator
from itertools import islice
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from jitckpt.data import changed_as_read, chosen_samples, dealing, made_in_loop
from jitckpt.data.dataset_generators import DatasetGenerators, have_gone_on, lost_places
from jitckpt.data.generators import Generators
from jitckpt.data.loader_workers import Beginning, CarriedBatch, WithStates, Workers, last_of
from jitckpt.data.reading_again import ReadingAgain, ReadTime
from jitckpt.encoding import packed, tree_codec
from jitckpt.errors import CheckpointError

OWN_REFERENCES = 3  # to a loader: this module's, that of its generators, and of who counts them
_DIGEST_BITS = 63  # a number that int64 holds
_is_drawing = ContextVar("jitckpt_is_drawing", default=False)

PLACES = (
    "An iterable dataset goes on in each pass from where it was in the one before ({names}), and {why}: "
    "after a failure in a later pass it would begin anew, and give other data. Let its place be a number in "
    "an attribute of its own, and read it in the training's process (num_workers=0); or begin each pass by "
    "the epoch."
)
IN_WORKERS = "in workers that stay (persistent_workers=True) nobody sees where"
ITERATOR = "an iterator, or what another object than the dataset has, can't be put back"


@dataclass
class PassState:
    """How far a pass has come.

    batches: handed out. ended: it has come to its end, or was left with break. digest: of their indices.
    begun: the generators' states as the sampler began, packed. seed: the workers'. at_start, now: packed
    states of workers by number, as the pass began and behind the batches that were handed out. own: what the
    loader's state_dict said, packed. ahead: the process's generators, packed, before the one batch was drawn
    that is not handed out yet, where the loader reads ahead. dealt: what dealing.dealt_by says. before: how
    many samples all ranks together had had when it became that; `batches` and `digest` count from there.
    of_others: a save of another layout has told of it. chosen: which samples, packed, as chosen_samples says.
    number: what the loader counts its passes by, of this one. is_of_before: of the epoch before, whose number
    the sampler may know no more. exit: the exception by which the script has left it, as exits tells of it.
    """

    batches: int = 0
    ended: bool = False
    left: bool = False
    digest: int = 0
    begun: bytes = b""
    seed: int | None = None
    at_start: dict[int, bytes] = field(default_factory=dict)
    now: dict[int, bytes] = field(default_factory=dict)
    own: bytes = b""
    ahead: bytes = b""
    dealt: tuple[int, int] = dealing.NOBODY
    before: int = 0
    of_others: bool = False
    chosen: bytes = b""
    number: int = 0
    is_of_before: bool = False
    exit: bytes = b""

    def position_in(self, loader: Iterable[Any]) -> int:
        """Return how many batches each rank would have had, had there always been as many as now."""
        each = math.prod(dealing.dealt_by(loader))
        if not each or self.dealt == dealing.NOBODY:
            return self.batches
        return (self.before + self.batches * math.prod(self.dealt)) // each

    def deal_anew(self, dealt: tuple[int, int]) -> bool:
        """Go on with what is left, dealt to other ranks; return whether the place in the data is kept."""
        if dealt != self.dealt and dealing.NOBODY not in (dealt, self.dealt):
            self.before += self.batches * math.prod(self.dealt)
            self.dealt, self.batches, self.digest, self.of_others = dealt, 0, 0, False
        is_kept = not self.of_others or dealt == self.dealt != dealing.NOBODY
        self.of_others = False
        return is_kept

    def forget(self) -> None:
        """Nothing but that it has ended is still to be known."""
        self.begun, self.own, self.ahead, self.chosen, self.at_start, self.now = b"", b"", b"", b"", {}, {}


class Loader:
    """What is kept of one loader for all passes over it: persistent workers, and their states."""

    def __init__(self, loader: Iterable[Any], warn: Callable[[str], None]) -> None:
        self.loader, self.warn = loader, warn
        self.workers: Workers | None = None  # persistent ones
        self.states: dict[int, bytes] = {}  # theirs
        self.seed: int | None = None
        self.generators = Generators(loader if isinstance(loader, DataLoader) else None)
        self._places: dict[str, object] | None = None  # lost_places as the last pass began
        self._has_named_places = False
        self.is_new = True  # no pass over it has begun in this process
        self.named: set[str] = set()  # what its dataset changes and no save holds
        known = any(fits(loader) for fits, _ in OTHER_KINDS)
        if (
            not known
            and not is_plain(loader)
            and has_own_state(loader)
            and getattr(loader, "num_workers", None)
        ):
            warn(
                f"A {type(loader).__name__} goes on by its own state, which as a rule does not hold its "
                "workers' random numbers: what these draw for each sample would differ after a failure. With "
                "torch's own DataLoader it would not."
            )

    @property
    def is_let_go(self) -> bool:
        """Whether the script has its loader no more, as one that makes a new one for each epoch."""
        return isinstance(self.loader, DataLoader) and sys.getrefcount(self.loader) <= OWN_REFERENCES

    @property
    def may_have_made(self) -> bool:
        """Whether it may be a loader that made passes before the failure, and goes on from these."""
        is_spent = isinstance(self.loader, Iterator)
        return self.is_new and not (is_spent or made_in_loop.is_loader_made_in_loop(self.loader))

    def begin(self, saved: PassState | None = None) -> "Pass":
        """Begin a pass, or go on with a saved one: then the caller puts the process's generators back."""
        self.is_new = False
        if saved is not None and not saved.ended and not saved.deal_anew(dealing.dealt_by(self.loader)):
            self.warn(
                f"The place in a {type(self.loader).__name__} is on each rank that of the saved rank of its "
                "number, though there were other ranks: of this epoch some samples are left out or come "
                "twice. torch's DataLoader with its DistributedSampler keeps the place exactly."
            )
        for fits, begin in OTHER_KINDS:
            if fits(self.loader):
                return begin(self, saved)
        if not is_plain(self.loader):
            return OtherPass(self, saved)
        if isinstance(self.loader.dataset, IterableDataset):  # type: ignore[attr-defined]
            self._look_at_places()
            return _IterablePass(self, saved)
        return _MapPass(self, saved)

    def _look_at_places(self) -> None:
        """Name what a stream carries on from pass to pass and no save holds. One pass is read again whole."""
        loader: Any = self.loader
        before, in_workers = self._places, loader.num_workers > 0
        if in_workers and not loader.persistent_workers:
            return  # each pass begins with new copies of it
        self._places = lost_places(loader.dataset, in_workers=in_workers)
        if before is not None and not self._has_named_places:
            lost = [*self._places] if in_workers else have_gone_on(before, self._places)
            self._has_named_places = bool(lost)
            if lost:
                self.warn(PLACES.format(names=", ".join(lost), why=IN_WORKERS if in_workers else ITERATOR))


def is_drawing() -> bool:
    """Return whether a pass draws from its loader in this thread, which may have another one inside."""
    return _is_drawing.get()


@contextmanager
def _drawing() -> Iterator[None]:
    before = _is_drawing.set(True)
    try:
        yield
    finally:
        _is_drawing.reset(before)


class Pass(ABC):
    """One pass; `state` says how far it is. To be dropped when it has ended, as torch's iterators are."""

    chooses = True  # else a pass inside of it looks after the samples that the loop has chosen

    def __init__(self, of: Loader, saved: PassState | None) -> None:
        self._of = of
        self._goes_on = saved is not None
        self.state = PassState() if saved is None else copy.deepcopy(saved)
        self._iterator: Iterator[Any] | None = None
        self._read_time: ReadTime | None = None  # where a restart has to read what was handed out
        if not (self.state.ended and self.state.begun == b""):
            if saved is None and self.chooses:
                self.state.chosen = chosen_samples.chosen(of.loader, of.warn)
            elif saved is not None and self.chooses:
                chosen_samples.choose_again(of.loader, saved.chosen, of.warn)
            with _drawing():
                self._begin()

    def next(self) -> Any:
        """Return the next batch. Raises StopIteration at the end."""
        if self._iterator is None:
            raise StopIteration
        before, began = _is_drawing.set(True), time.monotonic()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.end()
            raise
        finally:
            _is_drawing.reset(before)
        self.state.batches += 1
        if self._read_time is not None:
            self._read_time.took(time.monotonic() - began, self.state.batches)
        return self._handed_out(batch)

    def end(self, left: bool = False) -> None:
        """The pass has come to its end, or was left: its workers end as well, unless they are persistent."""
        self.state.ended, self.state.left = True, left
        self.drop()
        made_in_loop.pass_ended(self._of.loader)

    def drop(self) -> None:
        """Nothing is drawn any more."""
        self._iterator = None

    @abstractmethod
    def _begin(self) -> None:
        """Make the iterator as the script's own would be made, or go on with it after a restart."""

    @property
    def is_at_last(self) -> bool:
        """Whether the batch that was handed out is known to be the last one."""
        return False

    @property
    def may_be_at_last(self) -> bool:
        """Whether a batch was handed out, and it is the last one, as far as is known."""
        return self.state.batches > 0

    def _handed_out(self, batch: Any) -> Any:
        return batch

    def _begin_to_read(self) -> None:
        """Read again what was handed out before; generators have to be as they were as the pass began."""
        assert self._iterator is not None
        kind = type(self._of.loader).__name__
        if self._goes_on:
            self._read_again(kind)
        self._read_time = ReadTime(kind, self._of.warn)

    def _read_again(self, kind: str) -> None:
        count, self.state.batches = self.state.batches, 0
        if count:
            self._of.warn(
                f"The {count} batches that a {kind} gave before the failure are read again, as nothing tells "
                "how to leave them out; one with state_dict and load_state_dict would be asked."
            )
        again, began = ReadingAgain(kind, count, self._of.warn), time.monotonic()
        for number in range(count):
            try:
                self.next()
            except StopIteration:
                raise CheckpointError(
                    f"A {kind} gave {count} batches before the failure, and now ends after {number}: its "
                    "data are not what they were."
                ) from None
            again.has_come_to(number + 1, time.monotonic() - began)


class OtherPass(Pass):
    """Over what is no plain DataLoader: by its own state, or read again."""

    def _begin(self) -> None:
        loader, state = self._of.loader, self.state
        self._has_state = has_own_state(loader)
        generators = self._of.generators  # a sampler's as well, which the loader's state need not hold
        if not self._goes_on:
            state.begun = packed.pack(generators.capture())
        elif state.begun:
            generators.restore(packed.unpack(state.begun))
        if self._goes_on and state.own:
            loader.load_state_dict(packed.unpack(state.own))  # type: ignore[attr-defined]
        was_ended, was_left = state.ended, state.left
        self._iterator = self._iterate()
        if not self._has_state:
            self._begin_to_read()
        if was_ended:
            if not was_left:  # so that the next pass is a new one for the loader, too
                for _ in self._iterator:
                    pass
            self.end(was_left)

    def _iterate(self) -> Iterator[Any]:
        return iter(self._of.loader)

    def _handed_out(self, batch: Any) -> Any:
        if self._has_state:
            own = self._of.loader.state_dict()  # type: ignore[attr-defined]
            self.state.own = packed.pack(tree_codec.encode(own, "loader"))
        return batch


class _PlainPass(Pass):
    """Over a plain DataLoader, of which a copy is iterated."""

    _index: Any = None  # of the last sample that is read, if it is known

    def _begin(self) -> None:
        loader = self._of.loader
        assert isinstance(loader, DataLoader)
        self._plain = copy.copy(loader)
        self._persistent = loader.persistent_workers and loader.num_workers > 0
        self._generators = self._of.generators
        # Of a dataset that is read in this process; its state goes by number 0, as that of a worker.
        dataset = loader.dataset if loader.num_workers == 0 else None
        collate = loader.collate_fn if loader.num_workers == 0 else None
        self._of_dataset = DatasetGenerators(dataset, collate, with_places=True)
        self._begin_plain()

    @abstractmethod
    def _begin_plain(self) -> None:
        """Begin, once the loader is copied and its generators are known."""

    def _iterate(self, states: str, first: int) -> None:
        """Make the iterator; new workers get those of the pass's states, and `first` the first batch."""
        plain, state, of = self._plain, self.state, self._of
        if self._persistent and not self._goes_on and of.seed is not None:
            state.seed, state.at_start, state.now = of.seed, dict(of.states), dict(of.states)
        if state.seed is not None:
            plain.generator = torch.Generator()  # the seed is known, and drawn for nothing
        if plain.num_workers == 0:
            if self._goes_on:
                plain.generator = torch.Generator()
            self._restore_dataset(states)
            self._iterator = plain._get_iterator()
        elif of.workers is not None:
            of.workers._index_sampler = plain._index_sampler
            of.workers.begin_again(plain)
            state.at_start = state.at_start | of.workers.drained
            state.now = dict(state.at_start)
            self._iterator = of.workers
        else:
            begins = Beginning(plain.worker_init_fn, getattr(state, states), plain.collate_fn)
            plain.collate_fn, plain.worker_init_fn = WithStates(plain.collate_fn), begins
            workers = Workers(plain, state.seed, first)
            state.seed = workers.seed
            if self._persistent:
                of.workers = workers
            self._iterator = workers

    def _restore_dataset(self, states: str) -> None:
        """Put the dataset's own generators back in a pass that goes on; else keep their states for it."""
        own: dict[int, bytes] = getattr(self.state, states)
        if self._goes_on and self._plain.num_workers == 0 and own:
            self._of_dataset.restore(packed.unpack(own[0]))
        elif self._of_dataset and not self._goes_on:
            self.state.at_start = self.state.now = {0: packed.pack(self._of_dataset.capture())}

    def _handed_out(self, batch: Any) -> Any:
        if not isinstance(batch, CarriedBatch):
            self._of_dataset.changed.ended(self._index)
            self._name_lost(self._of_dataset.changed.lost())
            if self._of_dataset:
                self.state.now = {0: packed.pack(self._of_dataset.capture())}
            return batch
        self._name_lost(batch.lost)
        if batch.states is not None:
            self.state.now[batch.worker] = batch.states
        return batch.batch

    def _name_lost(self, names: Sequence[str]) -> None:
        """Name what the dataset has changed of itself and no save holds: all of one pass is told at once."""
        if new := [name for name in names if name not in self._of.named]:
            self._of.named.update(new)
            self._of.warn(changed_as_read.TOO_MUCH.format(names=", ".join(new)))

    def end(self, left: bool = False) -> None:
        super().end(left)
        if self._persistent:
            self._of.states, self._of.seed = dict(self.state.now), self.state.seed


class _IterablePass(_PlainPass):
    def end(self, left: bool = False) -> None:
        super().end(left)
        if self._of_dataset:  # it may have gone on behind its last batch
            self.state.now = {0: packed.pack(self._of_dataset.capture())}

    def _begin_plain(self) -> None:
        state = self.state
        was_ended, was_left = state.ended, state.left
        if self._goes_on:
            self._generators.restore(packed.unpack(state.begun))
            if was_ended and not (was_left and self._persistent):
                self._restore_dataset("now")
                self.end(was_left)
                return
            state.now = dict(state.at_start)
        else:
            state.begun = packed.pack(self._generators.capture())
        self._iterate("at_start", 0)
        self._begin_to_read()
        if was_ended:
            self.end(was_left)


class _MapPass(_PlainPass):
    def _begin_plain(self) -> None:
        plain, state = self._plain, self.state
        self._digests: dict[int, int] = {}  # of the indices up to each batch, of those that are drawn
        self._ahead = plain.num_workers * (plain.prefetch_factor or 0)
        key = "sampler" if plain.batch_sampler is None else "batch_sampler"
        if not self._goes_on:
            state.dealt = dealing.dealt_by(plain)
        sampler = plain.__dict__[key]
        if state.before:
            sampler = dealing.rest(sampler, state.before)
        plain.__dict__[key] = _Indices(sampler, self._indices)
        was_ended, was_left = state.ended, state.left
        if was_ended and not (was_left and self._persistent):
            # So that generators of the sampler's own are where they were.
            for _ in islice(iter(plain._index_sampler), self._ahead if state.left else None):
                pass
            self._restore_dataset("now")
            self.end(state.left)
            return
        self._iterate("now", state.batches % max(1, plain.num_workers))
        if was_ended:  # the workers that stay have made some more batches
            self.end(was_left)

    def _handed_out(self, batch: Any) -> Any:
        self.state.digest = self._digests.pop(self.state.batches)
        return super()._handed_out(batch)

    @property
    def is_at_last(self) -> bool:
        if self.state.ended:
            return True
        length = self._length()
        return length is not None and self.state.batches >= length

    @property
    def may_be_at_last(self) -> bool:
        return self.is_at_last or (super().may_be_at_last and self._length() is None)

    def _length(self) -> int | None:
        try:
            return len(self._plain._index_sampler)
        except TypeError:  # a sampler without a length
            return None

    def _indices(self, sampler: Iterable[Any]) -> Iterator[Any]:
        """Iterate the sampler; in a pass that goes on, from where it was."""
        state = self.state
        if not self._goes_on or not state.begun:
            state.begun = packed.pack(self._generators.capture())
            indices = iter(sampler)
            return self._drawn(indices, 0, 0, isgenerator(indices))
        self._generators.restore(packed.unpack(state.begun))
        indices = iter(sampler)
        digest = number = 0
        for number, one in enumerate(islice(indices, state.batches), start=1):  # noqa: B007
            digest = _digest(one, digest)
        if digest != state.digest and not state.is_of_before:
            self._of.warn(
                f"The {type(sampler).__name__} gives another order than before the failure, so from here the "
                "training differs from an undisturbed one: its order must follow from torch's, Python's or "
                "numpy's generators as the epoch begins, from generators in its attributes, or from what its "
                "state_dict says."
            )
        return self._drawn(indices, number, digest, False)

    def _drawn(self, indices: Iterator[Any], number: int, digest: int, begins_late: bool) -> Iterator[Any]:
        """Yield the indices, and count them; begins_late: only with the first of them is anything drawn."""
        if begins_late:
            self.state.begun = packed.pack(self._generators.capture())
        for one in indices:
            number += 1
            self._digests[number] = digest = _digest(one, digest)
            if self._plain.num_workers == 0:
                self._of_dataset.changed.begins()
                self._index = last_of(one)
            yield one


class _Indices:
    """In a sampler's place."""

    def __init__(self, sampler: Any, iterate: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        self._sampler, self._iterate = sampler, iterate

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


# Loaders of frameworks: whether one is of the kind, and what begins a pass over it.
OTHER_KINDS: list[tuple[Callable[[Any], bool], Callable[[Loader, PassState | None], Pass]]] = []


def is_plain(loader: Iterable[Any]) -> bool:
    """Return whether it is iterated as torch's own DataLoader is."""
    kind = type(loader)
    return isinstance(loader, DataLoader) and all(
        getattr(kind, name) is getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")
    )


def has_own_state(loader: Iterable[Any]) -> bool:
    # Accelerate's have these methods whatever loader they are around.
    of = getattr(loader, "base_dataloader", loader)
    return hasattr(of, "state_dict") and hasattr(of, "load_state_dict")


def _digest(indices: Any, before: int) -> int:
    """Return a number that tells these indices and those before them from others."""
    try:
        data = array("q", indices).tobytes()
    except (TypeError, OverflowError):
        data = repr(indices).encode()
    return xxhash.xxh3_64_intdigest(data, before) >> (64 - _DIGEST_BITS)
