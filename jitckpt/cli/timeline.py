"""`jitckpt timeline`: show what happened to the jobs of a checkpoint directory, and what it cost."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from jitckpt.cli.parser import Parser
from jitckpt.cli.tables import WIDTH_OF_FILES, show
from jitckpt.events import FILE_NAME, Event, read_events
from jitckpt.reports.timeline import in_words, jobs, recoveries, rows
from jitckpt.reports.timeline_pauses import pauses, pauses_table
from jitckpt.reports.timeline_transparent import steps_table, transparent_recoveries
from jitckpt.reports.whole_events import is_whole


def main(arguments: list[str]) -> int:
    """Print the timeline; return 2 if there are no events to read. Raises InvalidInput for a bad picture."""
    parser = Parser(prog="jitckpt timeline", description="Show what happened to a job and what it cost.")
    parser.add_argument("directory", type=Path, help="the job's checkpoint directory")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw recoveries and pauses (.png, .svg, .pdf)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace that ui.perfetto.dev and chrome://tracing show",
    )
    parsed = parser.parse_args(arguments)
    # The table of a long job takes its time. All is printed at the end, as the spinner would spoil it.
    shown = Console() if sys.stdout.isatty() else Console(width=WIDTH_OF_FILES, soft_wrap=True)
    text: list[str] = []
    with Console(stderr=True).status("reading the events"):
        try:
            events, damages = read_events(parsed.directory)
        except OSError as error:
            parser.error(f"{error.filename} can't be read: {error.strerror}")
        if not events:
            parser.error(f"there is no event in {parsed.directory / FILE_NAME} yet")
        odd = sorted({str(event["event"]) for event in events if not is_whole(event)})
        damages += [f"Events {name} lack what they should have; nothing is made of them." for name in odd]
        whole = [event for event in events if is_whole(event)]
        if parsed.plot:
            from jitckpt.reports.timeline_picture import draw

            draw(jobs(whole)[-1] if whole else [], parsed.plot)
        if parsed.trace:
            from jitckpt.reports.trace import trace

            try:
                parsed.trace.write_text(json.dumps(trace(jobs(whole))))
            except OSError as error:
                parser.error(f"{parsed.trace} can't be written: {error.strerror}")
        if parsed.json:
            text.append(json.dumps(_document(events), indent=1) + "\n")
        else:
            for job in jobs(events):
                text += _shown(shown, job, parsed.directory)
    for damage in damages:
        print(f"jitckpt timeline: {damage}", file=sys.stderr)
    print("".join(text), end="")
    return 0


def _shown(console: Console, job: Sequence[Event], directory: Path) -> Iterator[str]:
    for row in rows(job, console.width if console.is_terminal else None):
        yield row + "\n"
    whole = [event for event in job if is_whole(event)]
    with console.capture() as captured:
        for recovery in transparent_recoveries(whole):
            show(console, steps_table(recovery))
        if held := pauses(whole):
            show(console, pauses_table(held))
        for sentence in in_words(whole, str(directory)):
            console.print(sentence, markup=False, highlight=False)
    yield captured.get()


def _document(events: Sequence[Event]) -> dict[str, Any]:
    document = []
    for job in jobs(events):
        whole = [event for event in job if is_whole(event)]
        told: dict[str, Sequence[Any]] = {
            "recoveries": recoveries(whole),
            "transparent_recoveries": transparent_recoveries(whole),
            "snapshot_pauses": pauses(whole),
        }
        document.append(
            {"events": job} | {name: [asdict(one) for one in found] for name, found in told.items()}
        )
    return {"jobs": document}
