"""Notices a training that draws data or random numbers where a restart could not make that again."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from jitckpt.data import data_pass
from jitckpt.hooks import torch_loaders

LOOKED_AT = 3  # minibatches in which random numbers are looked at; a loop does in each what it does in these
TWO_LINES = "`for epoch in job.epochs(n):` and in it `for batch in job.batches(loader):`"

IN_BETWEEN = (
    "The script draws random numbers between forward pass and optimizer step: if they make the next batch, "
    f"it is left out after a failure. Draw each batch at the top of the loop: write {TWO_LINES}, or next() "
    "as the first thing in an iteration."
)
LOST = (
    "The script draws random numbers between forward pass and optimizer step. A rank that fails there has "
    "lost what it drew, and the others may have made the step: then this run would differ from an "
    "undisturbed one. Draw them before the forward pass ends, or give jitckpt.init step_barrier=True: then "
    "no rank makes a step without the others."
)
ONE_AHEAD = (
    "The loop draws two batches before its first forward pass, and then one before each: if it keeps one "
    "ahead of the one it trains with, as a prefetcher does, a restart leaves that one out. Have job.batches "
    "draw from the prefetcher (an object with __iter__), and not the prefetcher from job.batches."
)


class Draws:
    """Of one job; `warn` gets a sentence, each one once."""

    def __init__(
        self,
        model: nn.Module | None,
        has_boundaries: Callable[[], bool],
        warn: Callable[[str], None],
        drawn: Callable[[], object],
        *,
        has_barrier: bool,
    ) -> None:
        """has_boundaries: whether the loop is one that tells its boundaries.

        drawn: returns another value once random numbers were drawn. has_barrier: no rank makes an optimizer
        step without the others.
        """
        self._model, self._has_boundaries, self._warn = model, has_boundaries, warn
        self._drawn, self._has_barrier = drawn, has_barrier
        self._behind_forward: object = None
        self._steps = 0  # while it is looking
        self._since_forward: Counter[int] = Counter()  # batches drawn since then, by passes of the epoch
        self._at_once: list[Counter[int]] = [Counter()]  # the most of each, by steps
        self.is_looking = True  # at what is drawn: forward_ended need not be called any more once it does not
        self._trains: list[tuple[weakref.ref[Iterator[Any]], str]] = []  # iterators of training data
        self._evaluates = ""  # a loader that was iterated besides since the last step
        self._said: set[str] = set()
        self.end = torch_loaders.watch(self._iterated)

    def batch_drawn(self, number: int) -> None:
        """The script was given a batch of that pass of the epoch."""
        if self.is_looking:
            self._since_forward[number] += 1

    def forward_ended(self) -> None:
        if self.is_looking:
            self._at_once[-1] |= self._since_forward
            self._since_forward.clear()
            self._behind_forward = self._drawn()

    def forget_pass(self) -> None:
        """No step belongs to the forward pass that has ended."""
        self._behind_forward = None
        self._since_forward.clear()

    def step_begins(self) -> None:
        """The optimizer is about to make a step."""
        if self.is_looking:
            self._look_at_draws()
        if self._trains:
            self._look_at_loaders()
        if self._evaluates:
            self._say(
                f"A DataLoader over {self._evaluates} is iterated between two steps, and draws its workers' "
                "seed from torch's generator; a failure shortly after it would change the random numbers "
                f"from there on. Write {TWO_LINES}; or give it a generator of its own (generator=...)."
            )
            self._evaluates = ""

    def _look_at_draws(self) -> None:
        self._steps += 1
        self.is_looking = self._steps < LOOKED_AT
        if self._steps == LOOKED_AT and any(
            [of_step[number] for of_step in self._at_once] == [2, 1, 1] for number in self._at_once[0]
        ):
            self._say(ONE_AHEAD)
        self._at_once.append(Counter())
        if self._behind_forward is not None:
            if self._behind_forward != self._drawn():
                self._say_drawn()
            self._behind_forward = None

    def _look_at_loaders(self) -> None:
        alive = [(of, name) for of, name in self._trains if of() is not None]
        for of, name in alive:
            if getattr(of(), "_num_yielded", 0):
                self._say(
                    f"The training draws from a DataLoader over {name} that is iterated outside of "
                    "job.batches, so a restart would give it other batches and random numbers than an "
                    f"undisturbed run. Write {TWO_LINES}."
                )
                alive = []
        self._trains = alive

    def _iterated(self, loader: DataLoader[Any], iterator: Iterator[Any]) -> None:
        if data_pass.is_drawing():  # by a loader that was given to the job's loop, and has this one inside
            return
        name = type(loader.dataset).__name__
        if torch.is_grad_enabled() and (self._model is None or self._model.training):
            self._trains.append((weakref.ref(iterator), name))
        elif self._steps and loader.generator is None and not self._has_boundaries():
            self._evaluates = name

    def _say_drawn(self) -> None:
        if not self._has_boundaries():  # nothing else tells of a batch that is drawn ahead
            self._say(IN_BETWEEN)
        elif not self._has_barrier:
            self._say(LOST)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._warn(text)
