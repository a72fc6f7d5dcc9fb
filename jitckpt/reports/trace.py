"""A job in the trace format that Perfetto (ui.perfetto.dev) and chrome://tracing show: a lane a process."""

from collections.abc import Iterator, Sequence
from typing import Any

from jitckpt.events import Event
from jitckpt.reports.job_model import model_of
from jitckpt.reports.present import CAUSES
from jitckpt.reports.timeline_pauses import pauses
from jitckpt.reports.timeline_picture import MEANINGS, recoveries

MICROSECONDS = 1e6
JOB, AGENT, FIRST_RANK = 0, 1, 2  # lanes, in this order
MOST_RANKS = 1 << 20
# What is shown as a mark at its moment.
MARKS = (
    "fault",
    "detected",
    "device_alarm",
    "straggler",
    "hang_report",
    "saved",
    "restart",
    "recovered",
    "warning",
)


def trace(jobs: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """Return the document; each job is a process of the trace, times are since the first one's start."""
    begun = jobs[0][0]["time"] if jobs and jobs[0] else 0.0
    found: list[dict[str, Any]] = []
    for number, events in enumerate(jobs):
        if events:
            found += _job(number, events, events[0]["time"] - begun)
    return {"displayTimeUnit": "ms", "traceEvents": found}


def _job(process: int, events: Sequence[Event], offset: float) -> Iterator[dict[str, Any]]:
    present = model_of(events).present(events[-1]["time"])
    assert present is not None
    start = events[0]["clock"]
    names = {JOB: "job", AGENT: "agent"}
    names |= {FIRST_RANK + rank.rank: f"rank {rank.rank}" for rank in present.ranks}
    lanes = {name: lane for lane, name in names.items()}
    yield _name("process_name", process, JOB, f"jitckpt job {process + 1}: {present.state}")
    for lane, name in names.items():
        yield _name("thread_name", process, lane, name)
        order = {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": lane}
        yield order | {"args": {"sort_index": lane}}
    for cause, begin, end in present.segments:
        yield _span(process, JOB, CAUSES[cause], (offset + begin, offset + end), {"cause": cause})
    for recovery in recoveries(events, most_ranks=MOST_RANKS):
        at = offset + recovery.found - start
        for one in recovery.lanes:
            lane = lanes.get(one.name, JOB)
            for phase in one.phases:
                reach = (at + phase.begin, at + phase.end)
                yield _span(process, lane, MEANINGS[phase.name], reach, {"recovery": recovery.title})
    for pause in pauses(events):
        at = offset + pause.clock - start
        for name, begin, end in pause.reaches:
            details = {"snapshot": f"after step {pause.step}"}
            yield _span(process, AGENT, MEANINGS[name], (at + begin, at + end), details)
    for event in events:
        if event["event"] in MARKS:
            rank = event.get("rank")
            lane = lanes.get(f"rank {rank}", AGENT) if rank is not None else AGENT
            details = {key: value for key, value in event.items() if key not in ("time", "clock", "event")}
            at = (offset + event["clock"] - start) * MICROSECONDS
            mark = {"ph": "i", "s": "t", "name": event["event"], "pid": process, "tid": lane}
            yield mark | {"ts": max(0.0, at), "args": details}


def _span(
    process: int, lane: int, name: str, reach: tuple[float, float], details: dict[str, Any]
) -> dict[str, Any]:
    begin, end = reach
    place = {"ph": "X", "name": name, "pid": process, "tid": lane, "args": details}
    return place | {"ts": begin * MICROSECONDS, "dur": (end - begin) * MICROSECONDS}


def _name(what: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "args": {"name": name}}
