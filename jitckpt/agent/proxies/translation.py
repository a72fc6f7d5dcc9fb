"""Between the words of a decision and those of a device proxy: reports, and orders as messages.

A proxy gets the orders of a recovery in two messages. The first, Restart, has all that it does for itself up
to Reset; the second, Replay, comes once all ranks have done that, with what they have told.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from jitckpt.decisions.transparent.communicators import Creation
from jitckpt.decisions.transparent.decision import RecoveryPlan
from jitckpt.decisions.transparent.orders import (
    Abort,
    DeliverError,
    FinishStep,
    LetGoOn,
    LoadFromHost,
    MakeCommunicators,
    Order,
    Reset,
    RestartServer,
    RestoreLocalState,
    RunLog,
    SaveToHost,
)
from jitckpt.decisions.transparent.report import Device, FailedCall, Report
from jitckpt.wire import proxy_messages
from jitckpt.wire.communicators import RecoveryNumber
from jitckpt.wire.proxy_messages import HostCopy, Id, Making, MessageError

DEVICES: dict[int, Device] = {
    proxy_messages.LOST: "lost",
    proxy_messages.HEALTHY: "healthy",
    proxy_messages.SUSPECT: "suspect",
    proxy_messages.EMPTY: "empty",
    proxy_messages.CHANGED: "changed",
}
MOST_COPIES = 64  # bits of Stopped.images and copies


def report_of(rank: int, shard: int, stopped: proxy_messages.Stopped, before: FailedCall | None) -> Report:
    """Return a rank's report; `before`: the failure for which the last recovery was made.

    Raises MessageError if what the proxy says can't be.
    """
    kept = range(stopped.kept_from, stopped.kept_to + 1)[:MOST_COPIES]
    if stopped.device not in DEVICES:
        raise MessageError(f"Rank {rank} says that its device is {stopped.device}.")
    try:
        return Report(
            rank,
            shard,
            DEVICES[stopped.device],
            begun=stopped.begun,
            ended=stopped.ended,
            ready=stopped.ready,
            kept_from=stopped.kept_from,
            kept_to=stopped.kept_to,
            images=frozenset(state for bit, state in enumerate(kept) if stopped.images >> bit & 1),
            host_copies=frozenset(state for bit, state in enumerate(kept) if stopped.copies >> bit & 1),
            host_ended=stopped.kept_to,  # it tells of a state once all calls of its step are in the log
            log_end=stopped.log_end,
            failure=FailedCall(stopped.failed_call, stopped.error) if stopped.failed_call else None,
            failure_before=before,
            communicators=stopped.communicators,
            outgrown=stopped.outgrown - 1 if stopped.outgrown else None,
        )
    except ValueError as error:
        raise MessageError(str(error)) from error


def parted(orders: Sequence[Order]) -> tuple[tuple[Order, ...], tuple[Order, ...]]:
    """Return the orders of a rank up to its Reset, and those after it."""
    place = next(place for place, order in enumerate(orders, 1) if isinstance(order, Reset))
    return tuple(orders[:place]), tuple(orders[place:])


def restart(recovery: RecoveryNumber, orders: Iterable[Order]) -> proxy_messages.Restart:
    """Return the message that has a proxy carry out the orders up to Reset.

    Raises ValueError for an order that does not belong there.
    """
    may_stay, finish, copy = True, 0, 0
    for order in orders:
        match order:
            case FinishStep(state):
                finish = state
            case SaveToHost(state):
                copy = state
            case RestartServer():
                may_stay = order.may_stay
            case Abort() | Reset():
                pass
            case _:
                raise ValueError(f"The device proxy can't carry out {order} before its server is new.")
    return proxy_messages.Restart(recovery, int(may_stay), finish, copy)


def is_void(rest: Iterable[Order], ids: proxy_messages.Ids) -> bool:
    """Return whether the orders after Reset rely on a device that has not stayed."""
    return not ids.stays and not any(isinstance(order, LoadFromHost) for order in rest)


def replay(
    rank: int,
    recovery: RecoveryNumber,
    orders: Iterable[Order],
    ids: Sequence[Id],
    *,
    renewed: Container[str],
    copy_of: Callable[[int], tuple[HostCopy, ...]],
    overwrite: bool = False,
) -> proxy_messages.Replay:
    """Return the message that has a proxy carry out the orders after Reset.

    ids: of all ranks. renewed: the communicators that some ranks make of them now; a message has no room for
    those of a large job, so a rank gets what it makes, and what it may make in its log. copy_of: what a
    rank has told of its state in host memory; none where that is in a whole image. overwrite: before the
    calls are made again, as a validation wants it. Raises ValueError for an order that does not belong there.
    """
    state, deliver_error, in_place = 0, False, True
    source: tuple[HostCopy, ...] = ()
    making: list[Making] = []
    for order in orders:
        match order:
            case LoadFromHost(_, of):
                in_place, source = False, copy_of(of)
            case RestoreLocalState(wanted) | RunLog(wanted):
                state = wanted
            case MakeCommunicators(creations):
                making = [_making(rank, creation) for creation in creations]
            case DeliverError():
                deliver_error = True
            case LetGoOn():
                pass
            case _:
                raise ValueError(f"The device proxy can't carry out {order} once its server is new.")
    own = {one.key for one in making}
    return proxy_messages.Replay(
        recovery,
        state,
        int(deliver_error),
        int(overwrite),
        int(in_place),
        source,
        tuple(one for one in ids if one.key in own or one.key not in renewed),
        tuple(making),
    )


def creations_of(plan: RecoveryPlan) -> list[Creation]:
    """Return all creations of a plan, each once."""
    found: Mapping[Creation, None] = {
        creation: None
        for orders in plan.orders.values()
        for order in orders
        if isinstance(order, MakeCommunicators)
        for creation in order.creations
    }
    return list(found)


def _making(rank: int, creation: Creation) -> Making:
    own = next((one.key for one in creation.made if rank in one.members), "")
    return Making(creation.parent, creation.made[0].split, own)
