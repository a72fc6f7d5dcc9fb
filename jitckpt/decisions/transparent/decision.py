"""How a job in transparent mode recovers: a pure function of what all its ranks report.

One state is chosen for all ranks, the newest that every rank can be brought to; from it each runs its log
again. docs/how-it-works/transparent.md says why that is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jitckpt.decisions.transparent import cuts
from jitckpt.decisions.transparent.communicators import CommunicatorError, calls, creation_order, joined
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
from jitckpt.decisions.transparent.report import Report

# How a rank comes to hold the state by itself; the first that is possible is taken.
Way = Literal["image", "finish", "in place", "host copy", "through the host"]


@dataclass(frozen=True)
class RecoveryPlan:
    """A recovery to the state after `state` optimizer steps. ways: for each rank where it has it from."""

    state: int
    orders: dict[int, tuple[Order, ...]]
    ways: dict[int, str]


@dataclass(frozen=True)
class FallBack:
    """No transparent recovery is possible; `reason` says why, and what would have protected the job.

    restart: the script has registered how to save and restore, so the job restarts from the best save.
    """

    restart: bool
    reason: str


def decide(
    reports: Sequence[Report], restorable: bool = False, servers_stay: bool = True
) -> RecoveryPlan | FallBack:
    """Return what brings all ranks on. `reports` has one of each rank of the job.

    restorable: the script has registered how to save and restore. servers_stay: False if all are to be
    replaced, since nobody knows which of them is at fault.
    Raises ValueError if a rank has reported twice.
    """
    if len({report.rank for report in reports}) != len(reports):
        raise ValueError("A rank has reported twice.")
    reports = sorted(reports, key=lambda report: report.rank)
    dead = [report.rank for report in reports if not report.worker_alive]
    if dead:
        return _fall_back(
            reports,
            restorable,
            f"the worker process of {_listed(dead)} has ended; transparent mode brings back devices and "
            "their servers, not worker processes",
        )
    decided = _with_one_number(reports, restorable, servers_stay)
    counted = any(place.counts for report in reports for place in report.communicators)
    if isinstance(decided, RecoveryPlan) or not counted or not all(report.images for report in reports):
        return decided
    # Ranks that make unequally many steps number their states differently.
    places = {report.rank: report.communicators for report in reports}
    chosen = cuts.newest_that_fit(places, {report.rank: report.images for report in reports})
    if isinstance(chosen, cuts.Misfit):
        return _fall_back(reports, restorable, _unfit(chosen.reason))
    by = {rank: max(chosen.values()) - state for rank, state in chosen.items()}
    moved = [report.moved(by[report.rank]) for report in reports]
    plan = _with_one_number(moved, restorable, servers_stay)
    if isinstance(plan, FallBack):
        return decided
    orders = {rank: tuple(_moved(order, -by[rank]) for order in own) for rank, own in plan.orders.items()}
    return replace(plan, orders=orders)


def _moved(order: Order, by: int) -> Order:
    """Return the same order for a rank whose states have other numbers."""
    if isinstance(order, Abort | MakeCommunicators | RestartServer | DeliverError | LetGoOn):
        return order
    return replace(order, state=order.state + by)


def _with_one_number(
    reports: Sequence[Report], restorable: bool, servers_stay: bool
) -> RecoveryPlan | FallBack:
    """Return the same if all ranks mean the same by the number of a state."""
    obstacles: dict[int, str] = {}
    for state in sorted({state for report in reports for state in _own_states(report)}, reverse=True):
        obstacle_here = _obstacle(state, reports) or _misfit(state, reports)
        if not obstacle_here:
            try:
                return _plan(state, reports, servers_stay)
            except CommunicatorError as error:
                return _fall_back(reports, restorable, f"the communicators can't be made anew: {error}")
        obstacles[state] = obstacle_here
    # What not even all programs have come to would not have helped.
    known = [state for state in obstacles if all(report.keeps(state) for report in reports)]
    obstacle = next((obstacles[state] for state in [*known, *obstacles]), "")
    if not obstacle and all(report.kept_from <= report.kept_to for report in reports):
        obstacle = _obstacle(min(report.kept_to for report in reports), reports)  # no device has any state
    obstacle = _outgrown(reports) or obstacle or "no rank has a whole state (any more, or yet)"
    return _fall_back(reports, restorable, obstacle)


def _outgrown(reports: Sequence[Report]) -> str:
    """Return that ranks have made more calls since their last optimizer step than can be kept; or ""."""
    ranks = [report.rank for report in reports if report.outgrown is not None]
    if not ranks:
        return ""
    step = max(report.outgrown for report in reports if report.outgrown is not None)
    since = f"step {step}" if step else "the beginning"
    return (
        f"{_listed(ranks)} made more calls since {since} than the log holds, as a long evaluation does; "
        "raise JITCKPT_PROXY_LOG_BYTES to have them protected"
    )


def way(report: Report, state: int) -> Way | None:
    """Return how the rank comes to hold parameters and optimizer state of `state` without a replica."""
    if not report.keeps(state):
        return None
    if state in report.images:
        return "image"
    readable = report.device in ("healthy", "suspect", "changed") and report.begun == report.ended
    if readable and report.ended == state - 1 and report.ready == state:
        return "finish"
    if report.device == "healthy" and readable and report.ended == state:
        return "in place"
    if state in report.host_copies:
        return "host copy"
    unchanged = readable and report.device != "changed"
    return "through the host" if unchanged and report.ended == state else None


def gives(report: Report, state: int) -> bool:
    """Return whether another rank can have the state from this one. An image does for its own rank alone."""
    return way(report, state) not in ("image", None)


def _own_states(report: Report) -> list[int]:
    near = {report.ended, report.ended + 1, *report.images, *report.host_copies}
    return [state for state in near if way(report, state) is not None]


def _obstacle(state: int, reports: Sequence[Report]) -> str:
    """Return why the job can't be brought to that state; "" if it can."""
    giving = {report.shard for report in reports if gives(report, state)}
    for report in reports:
        if report.failed_again and state > report.ended:
            return f"rank {report.rank} fails again before the end of step {state}"
        if way(report, state) is not None:
            continue
        if report.host_ended < state <= report.kept_to:
            return f"rank {report.rank} has not made all calls of step {state}"
        if not report.keeps(state):
            kept = (
                f"it has those after steps {report.kept_from} to {report.kept_to}"
                if report.kept_from <= report.kept_to
                else "it has none yet, or the log was full"
            )
            return (
                f"the host memory of rank {report.rank} lacks its rank-local state after step {state}, or "
                f"the log since then: {kept}; more memory for the log would have protected the job"
            )
        if report.shard not in giving:
            members = [other.rank for other in reports if other.shard == report.shard]
            alone = "which no other rank holds" if len(members) == 1 else f"held by {_listed(members)}"
            return (
                f"no device has the state after step {state} of shard {report.shard} any more, {alone}; a "
                "further data-parallel replica of it would have protected the job"
            )
    return ""


def _misfit(state: int, reports: Sequence[Report]) -> str:
    """Return why that state of the ranks is not one state of the job; "" if it is."""
    places = {report.rank: report.communicators for report in reports}
    copies = {report.rank: state for report in reports if report.keeps(state)}
    reasons = cuts.ahead(places, copies).values()
    return _unfit(next(iter(reasons))) if reasons else ""


def _unfit(reason: str) -> str:
    return (
        f"the states that the ranks keep do not fit each other: {reason}; all ranks have to make their "
        "optimizer steps between the same calls to each other"
    )


def _plan(state: int, reports: Sequence[Report], servers_stay: bool) -> RecoveryPlan:
    ways = {report.rank: way(report, state) for report in reports}
    sources = _sources(state, reports)
    living = {
        report.rank: [place for place in report.communicators if place.since <= state <= place.until]
        for report in reports
    }
    creations = calls(creation_order(joined(living)))
    orders = {}
    for report in reports:
        rank, own = report.rank, ways[report.rank]
        replaced = not servers_stay or report.device not in ("healthy", "changed")
        loaded = replaced or own in ("image", "host copy", None)
        # Where the state stays, it needs no copy, unless a replica takes it.
        saved = (loaded and own is not None) or rank in sources.values()
        orders[rank] = tuple(
            [
                *([Abort()] if report.device in ("healthy", "suspect", "changed") else []),
                *([FinishStep(state)] if own == "finish" else []),
                *([SaveToHost(state)] if saved else []),
                *([RestartServer(_may_stay(report, servers_stay))] if replaced else []),
                Reset(state),
                *([LoadFromHost(state, sources.get(rank, rank))] if loaded else []),
                MakeCommunicators(creations.get(rank, ())),
                *_run_again(report, state),
                LetGoOn(),
            ]
        )
    told = {rank: own or f"from rank {sources[rank]}" for rank, own in ways.items()}
    return RecoveryPlan(state, orders, told)


def _may_stay(report: Report, servers_stay: bool) -> bool:
    """Return whether the process may live on whose device has lost its state, if it can."""
    return servers_stay and report.device != "suspect"


def _sources(state: int, reports: Sequence[Report]) -> dict[int, int]:
    """Return for each rank that needs a replica's state the rank that gives it; they take turns."""
    sources: dict[int, int] = {}
    shards: dict[int, list[Report]] = {}
    for report in reports:
        shards.setdefault(report.shard, []).append(report)
    for members in shards.values():
        holders = [report.rank for report in members if gives(report, state)]
        needy = [report.rank for report in members if way(report, state) is None]
        sources |= {rank: holders[index % len(holders)] for index, rank in enumerate(needy)}
    return sources


def _run_again(report: Report, state: int) -> list[Order]:
    error = [DeliverError(report.failure)] if report.failure is not None and report.failed_again else []
    end = error[0].failure.call if error else report.log_end
    return [RestoreLocalState(state), RunLog(state, end), *error]


def _fall_back(reports: Sequence[Report], restart: bool, reason: str) -> FallBack:
    failed = [report for report in reports if report.failure is not None]
    told = f" (rank {failed[0].rank}: {failed[0].failure.error})" if failed and failed[0].failure else ""
    after = (
        "The job restarts from the best save."
        if restart
        else "The script has registered no restore function, so the job ends, or begins anew if restarts are "
        "left; jitckpt.init with saves every so many steps (docs/guides/user-level.md) would have let it go "
        "on."
    )
    return FallBack(restart, f"A transparent recovery is impossible{told}: {reason}. {after}")


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
