"""Torch's rendezvous without its pickle: its state lies in the store as signed JSON.

Torch keeps the state of a rendezvous pickled, in a store in which everybody who reaches its port can write,
and unpickles whatever it finds there. Here what no agent of the job has signed is put away: what this agent
knew last takes its place, and so the job goes on. That is said once, and not done for ever: where another
host has another secret each puts the other's away.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousState,
)

from jitckpt.console import say
from jitckpt.hosts.signed import ForeignError, Signature
from jitckpt.hosts.store_server import store_at

PLACE = "torch's rendezvous"
MOST_FOREIGN = 20  # entries that are put away; looked at once a second while hosts come together
_PARTS = {
    "round",
    "complete",
    "deadline",
    "closed",
    "participants",
    "wait_list",
    "redundancy_list",
    "last_heartbeats",
}


def with_signature(
    handler: RendezvousHandler, signature: Signature, agent: str | None = None
) -> RendezvousHandler:
    """Return a handler that does what torch's does, but reads nothing that no agent has signed.

    To be called before it is used. One of another kind than torch's dynamic one, which alone pickles, is
    returned as it is. agent: a number in hexadecimal, by which the others know this host in all stores.
    """
    if not isinstance(handler, DynamicRendezvousHandler):
        return handler
    torchs: Any = handler
    backend = torchs._state_holder._backend
    if isinstance(backend, C10dRendezvousBackend):
        backend = _Backend(torchs._store, handler.settings.run_id)
    node = torchs._this_node if agent is None else replace(torchs._this_node, local_id=int(agent, 16))
    holder = SignedStateHolder(backend, handler.settings, signature, node)
    return _Handler(node, handler.settings, backend.name, torchs._store, holder)


class _Handler(DynamicRendezvousHandler):
    _own_last_call: timedelta | None = None

    def wait_for_missing(self, seconds: float | None) -> None:
        """Wait no longer for more hosts than so, where fewer are enough; None: as the user wants."""
        timeout: Any = self._settings.timeout
        if self._own_last_call is None:
            self._own_last_call = timeout.last_call
        own = self._own_last_call
        timeout._set_timeouts(last_call=own if seconds is None else min(own, timedelta(seconds=seconds)))

    def step_out(self) -> None:
        """Have no part in the newest meeting any more, in whose start another host has this one's place."""
        self._stop_heartbeats()
        self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self._settings.timeout.join))

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return store_at(master_addr, master_port)  # torch's would listen at every address


class _Backend(C10dRendezvousBackend):
    """In whose store may lie anything: what torch could not replace, because it is no text, goes at once."""

    def _decode_state(self, base64_state: bytes) -> tuple[bytes, Any] | None:
        try:
            if not base64_state.decode():  # torch would take it for no token
                raise RendezvousStateError("An entry is empty.")
            return super()._decode_state(base64_state)
        except (UnicodeDecodeError, RendezvousStateError):
            self._call_store("set", self._key, self._NULL_SENTINEL)
            return None


class SignedStateHolder(_BackendRendezvousStateHolder):
    """Torch's, but for how the state is written and read."""

    def __init__(
        self, backend: RendezvousBackend, settings: RendezvousSettings, signature: Signature, node: _NodeDesc
    ) -> None:
        """node: this host's."""
        super().__init__(backend, settings)
        self._signature, self._node = signature, node
        # The newest heartbeat of each node, and when this host heard of it, by its monotonic clock.
        self._heard: dict[_NodeDesc, tuple[datetime, float]] = {}
        # What was read, or written, last. What was changed since must not be taken for done.
        self._known: Any = to_json(self._state)
        self._foreign = 0

    def sync(self) -> bool | None:
        """Read the state, or write it if it was changed; return whether that could be done."""
        if not self._dirty and time.monotonic() - self._last_sync_time < self._cache_duration:
            return None
        has_set: bool | None = None
        if self._dirty:
            text = self._signature.write(PLACE, to_json(self._state))
            answer = self._backend.set_state(text.encode(), self._token)
            has_set = answer is not None and answer[2]
            found = None if answer is None else answer[:2]
        else:
            found = self._backend.get_state()
        self._dirty, self._last_sync_time = False, time.monotonic()
        self._token = None if found is None else found[1]
        if found is None:
            self._put_back()  # somebody may have taken it away
        else:
            self._take(found[0])
        self._sanitize()
        return has_set

    def _take(self, entry: bytes) -> None:
        """Take what was found for the state, or else see that the state that is known is written again."""
        try:
            known = self._signature.read(PLACE, entry)
            state = from_json(known)
            if state.round < self._known["round"]:
                raise ForeignError("an entry is of an earlier time")
        except ForeignError as foreign:
            self._foreign += 1
            text = (
                f"in the rendezvous' store {foreign}: somebody else has written there, or a host has another "
                "--secret-file, or none, or another version of jitckpt"
            )
            if self._foreign > MOST_FOREIGN:
                raise RendezvousStateError(f"Again and again, {text}.") from foreign
            if self._foreign == 1:
                say(f"{text}. It is put away.")
            self._put_back()
        else:
            self._state, self._known = state, known

    def _sanitize(self) -> None:
        """Have torch remove the nodes of which this host has heard nothing for a while.

        Torch goes by the time of day that another host's clock has shown, which may be any: clocks differ,
        and are set.
        """
        beats, now, today = self._state.last_heartbeats, time.monotonic(), datetime.now(UTC)
        for node, beat in beats.items():
            if node not in self._heard or self._heard[node][0] != beat:
                self._heard[node] = beat, now
        ages = {node: timedelta(seconds=now - self._heard[node][1]) for node in beats}
        self._state.last_heartbeats = {node: today - age for node, age in ages.items()}
        super()._sanitize()
        # The others' stay as they are told, so that who reads them sees which are new. Of its own this host
        # asks whether it is time for another.
        left = self._state.last_heartbeats
        self._state.last_heartbeats = {
            node: left[node] if node == self._node else beats[node] for node in left
        }
        self._heard = {node: self._heard[node] for node in left}

    def _put_back(self) -> None:
        self._state = from_json(self._known)
        self._dirty = self._known["last_heartbeats"] != []


def to_json(state: Any) -> dict[str, Any]:
    """Return what a state of a rendezvous holds. Raises RendezvousStateError if this is not known."""
    if vars(state).keys() != _PARTS:
        raise RendezvousStateError("This version of torch has rendezvous that jitckpt does not know.")
    return {
        "round": state.round,
        "complete": state.complete,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "closed": state.closed,
        "participants": [(_node_to_json(node), rank) for node, rank in state.participants.items()],
        "wait_list": [_node_to_json(node) for node in sorted(state.wait_list)],
        "redundancy_list": [_node_to_json(node) for node in sorted(state.redundancy_list)],
        "last_heartbeats": [
            (_node_to_json(node), time.isoformat()) for node, time in state.last_heartbeats.items()
        ],
    }


def from_json(told: Any) -> _RendezvousState:
    """Return the state again. Raises ForeignError if it is none."""
    state = _RendezvousState()
    try:
        if not isinstance(told, Mapping) or told.keys() != _PARTS:
            raise TypeError("it has other parts")
        state.round = _of(int, told["round"])
        state.complete, state.closed = _of(bool, told["complete"]), _of(bool, told["closed"])
        state.deadline = None if told["deadline"] is None else _time(told["deadline"])
        state.participants = {_node(node): _of(int, rank) for node, rank in told["participants"]}
        state.wait_list = set(map(_node, told["wait_list"]))
        state.redundancy_list = set(map(_node, told["redundancy_list"]))
        state.last_heartbeats = {_node(node): _time(time) for node, time in told["last_heartbeats"]}
    except (TypeError, ValueError, KeyError) as error:
        raise ForeignError(f"an entry is no state of a rendezvous ({error})") from error
    return state


def _node_to_json(node: _NodeDesc) -> tuple[str, int, int]:
    return node.addr, node.pid, node.local_id


def _node(told: Any) -> _NodeDesc:
    address, process, number = told
    return _NodeDesc(_of(str, address), _of(int, process), _of(int, number))


def _time(told: Any) -> datetime:
    time = datetime.fromisoformat(_of(str, told))
    if time.tzinfo is None:
        raise ValueError(f"{told} has no time zone")
    return time


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.40} is no {kind.__name__}")
    return value
