"""Sees an optimizer that the job was not given make steps.

With parameters of one that it was, as where a script builds a new one in the middle of its training: nothing
of it is in a save, and where it has taken the other's place, no step is counted any more. Or with others, as
where something more is trained from a later epoch on.
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from jitckpt.hooks import captured_graphs
from jitckpt.hooks.torch_training import all_inside, is_in_step
from jitckpt.hooks.untraced import untraced
from jitckpt.state import parallel
from jitckpt.state.optimizer_state import parameters_of


class OtherStepsListener(Protocol):
    """What is told of it."""

    def other_step_begins(self) -> None:
        """The parameters of a given optimizer may be changed by another one's step."""

    def other_stepped(self, optimizer: Optimizer, *, has_begun: bool) -> None:
        """Such an optimizer has made a step. has_begun: one of the given has made a step before."""

    def stepped_elsewhere(self, optimizer: Optimizer) -> bool:
        """One with parameters of no given one has made a step, as one of those has.

        Returns whether there is nothing more to be said of it.
        """


class OtherOptimizers:
    """Looks until `end`. It costs a step of a known optimizer less than two microseconds."""

    def __init__(self, given: Sequence[Optimizer], listener: OtherStepsListener) -> None:
        self._given = [*given, *(inner for one in given for inner in all_inside(one))]
        self._ids = {*map(id, self._given)}
        self._listener = listener
        self._steps = 0  # of these
        self._innocent: WeakSet[Optimizer] = WeakSet()  # others of which it is known that they may go on
        self._begun: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # `_steps` as their step began
        self._ended: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # and as it ended
        self._handles = [
            register_optimizer_step_pre_hook(untraced(self._begins)),
            register_optimizer_step_post_hook(untraced(self._ends)),
        ]

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begins(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if captured_graphs.capturing and captured_graphs.is_now():
            return
        if id(optimizer) not in self._ids and optimizer not in self._innocent:
            self._begun[optimizer] = self._steps
            self._listener.other_step_begins()

    def _ends(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if captured_graphs.capturing and captured_graphs.is_now():
            return
        if id(optimizer) in self._ids:
            self._steps += 1
        elif optimizer not in self._innocent:
            before, self._ended[optimizer] = self._ended.get(optimizer), self._steps
            if self._is_part(optimizer):
                self._innocent.add(optimizer)
            elif self._is_elsewhere(optimizer):
                if self._steps and self._listener.stepped_elsewhere(optimizer):
                    self._innocent.add(optimizer)
            # What keeps nothing may take turns with another: the weights are saved with its changes.
            elif before == self._steps or (self._steps and any(parallel.own_state(optimizer).values())):
                self._listener.other_stepped(optimizer, has_begun=self._steps > 0)

    def _is_part(self, optimizer: Optimizer) -> bool:
        """Whether it is around one of the given, or inside of it, so that a step is one of both."""
        around = self._begun.get(optimizer, self._steps) != self._steps
        return around or any(is_in_step(one, besides=optimizer) for one in self._given)

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        known = {id(parameter) for one in self._given for parameter in parameters_of(one)}
        return known.isdisjoint(map(id, parameters_of(optimizer)))
