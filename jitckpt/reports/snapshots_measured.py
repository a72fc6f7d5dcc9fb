"""What snapshots have cost the jobs of a directory, and how often something failed that goes back to one."""

from collections.abc import Sequence
from dataclasses import dataclass

from jitckpt.events import Event
from jitckpt.reports.timeline import incidents

ON_PURPOSE = ("signal", "hosts")  # causes that are no failures


@dataclass(frozen=True)
class MeasuredSnapshots:
    """Of all jobs of a directory, in seconds.

    pauses: of each snapshot. written: of each, until it was on the disk. come_back: of each failure after
    which the ranks went back, until they went on. failures: how many there were in so many `seconds`,
    rehearsed ones left out.
    """

    pauses: tuple[float, ...]
    written: tuple[float, ...]
    come_back: tuple[float, ...]
    failures: int
    seconds: float


def measured(jobs: Sequence[Sequence[Event]]) -> MeasuredSnapshots:
    """Return what the events of these jobs tell, each in order."""
    pauses: list[float] = []
    written: list[float] = []
    come_back: list[float] = []
    failures, seconds = 0, 0.0
    for number, events in enumerate(jobs):
        seconds += max(0.0, events[-1]["time"] - events[0]["time"])
        pauses += [event["seconds"] for event in events if event["event"] == "snapshot_pause"]
        written += [event["seconds"] for event in events if event["event"] == "snapshot"]
        for before, after in incidents(events):
            detected = after[0]
            back = [event["clock"] for event in after if event["event"] == "gone_back"]
            come_back += [one - detected["clock"] for one in back[:1]]
            rehearsed = any(
                event["event"] == "fault" and event["restart"] == detected["restart"] for event in before
            )
            failures += detected["cause"] not in ON_PURPOSE and not rehearsed
        is_last = number == len(jobs) - 1  # it may still run
        failures += not is_last and all(event["event"] != "job_ended" for event in events)  # lost launcher
    return MeasuredSnapshots(tuple(pauses), tuple(written), tuple(come_back), failures, seconds)
