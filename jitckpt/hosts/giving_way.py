"""Torch's rendezvous for a host that gives way to others: it takes part once others do.

Torch takes whoever comes first. Hosts that stand by may be as many as a job needs, and would then meet
without the hosts that have the job's state.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    _Action,
    _DistributedRendezvousOpExecutor,
    _should_keep_alive,
)

# Asked with the store and the agents that take part by now: whether this host waits for others.
GivesWay = Callable[[Any, Collection[str]], bool]


def give_way(handler: Any, gives_way: GivesWay) -> None:
    """Have the host of a handler of torch's take part only where it does not give way."""
    ask = partial(gives_way, handler._store)
    handler._op_executor = _Executor(handler._this_node, handler._state_holder, handler._settings, ask)


class _Executor(_DistributedRendezvousOpExecutor):
    def __init__(
        self, node: Any, holder: Any, settings: Any, gives_way: Callable[[Collection[str]], bool]
    ) -> None:
        super().__init__(node, holder, settings)
        self._gives_way = gives_way

    def run(self, state_handler: Callable[..., _Action], *arguments: Any, **named: Any) -> None:
        """Do what torch's does, with other actions where this host waits."""

        def next_action(context: Any, deadline: float) -> _Action:
            return self._instead(state_handler(context, deadline), context)

        super().run(next_action, *arguments, **named)

    def _instead(self, action: _Action, context: Any) -> _Action:
        state, waits = context.state, context.node in context.state.wait_list
        if action is _Action.SYNC and waits and state.complete:
            # Others have met: this host is one of those that stand by, and no longer waited for.
            is_full = len(state.participants) >= context.settings.max_nodes
            return _Action.REMOVE_FROM_WAIT_LIST if is_full else action
        if action is not _Action.ADD_TO_PARTICIPANTS:
            return action
        if not self._gives_way([f"{there.local_id:016x}" for there in state.participants]):
            return action
        if not waits:
            return _Action.ADD_TO_WAIT_LIST
        return _Action.KEEP_ALIVE if _should_keep_alive(context) else _Action.SYNC
