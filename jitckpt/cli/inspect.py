"""`jitckpt inspect`: what is saved in a checkpoint directory, and what a restart would take."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from time import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from jitckpt.cli.parser import Parser
from jitckpt.cli.progress import shown_progress
from jitckpt.console import show_size
from jitckpt.events import Event, read_events
from jitckpt.objects.bucket import is_url, parse
from jitckpt.reports import memory_inspection, memory_states, memory_survival, objects_inspection
from jitckpt.reports.following import Follower
from jitckpt.reports.inspection import Inspection, bytes_to_read, inspect
from jitckpt.reports.memory_inspection import KeptShard
from jitckpt.reports.present import RankNow
from jitckpt.reports.timeline import jobs, recoveries
from jitckpt.reports.whole_events import is_whole

SHOWN_RANKS = 8


def main(arguments: list[str]) -> int:
    """Print what was found; return Inspection.status. Raises CheckpointError."""
    parser = Parser(
        prog="jitckpt inspect",
        description="Show what is saved in a checkpoint directory, and what a restart would take.",
    )
    parser.add_argument(
        "directory", nargs="?", help="the job's checkpoint directory, or s3://BUCKET/PREFIX of --objects"
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="show what the memory tiers of your jobs have on this host; with a job's directory also how "
        "likely that is to survive the loss of hosts, by how often the job has lost one, and in which state "
        "its ranks are",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare the checksums")
    parsed = parser.parse_args(arguments)
    if parsed.memory:
        return _show_memory(parser, parsed.directory, in_json=parsed.json, verify=parsed.verify)
    if parsed.directory is None:
        parser.error("give the job's checkpoint directory, or --memory")
    look, size_of = _ways(parser, parsed.directory)
    if parsed.verify:
        columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with shown_progress(*columns) as progress:
            task = progress.add_task("", total=size_of())
            found = look(True, lambda size: progress.advance(task, size))
    else:
        with Console(stderr=True).status("looking"):
            found = look()
    if parsed.json:
        print(json.dumps(asdict(found) | {"status": found.status}, indent=1))
        return found.status
    console = Console(soft_wrap=not sys.stdout.isatty())
    if found.saves:
        console.print(table(found))
    for sentence in in_words(found):
        console.print(sentence, markup=False, highlight=False)
    return found.status


def _ways(parser: Parser, place: str) -> tuple[Callable[..., Inspection], Callable[[], int]]:
    """Return how to inspect a place, and how to learn the bytes that this reads with checksums."""
    if is_url(place):
        try:
            parse(place)
        except ValueError as error:
            parser.error(str(error))
        return partial(objects_inspection.inspect, place), partial(objects_inspection.bytes_to_read, place)
    directory = Path(place)
    if not directory.is_dir():
        parser.error(f"there is no directory {directory}")
    return partial(inspect, directory), partial(bytes_to_read, directory)


def _show_memory(parser: Parser, directory: str | None, *, in_json: bool, verify: bool) -> int:
    """Print what is in this host's memory; return 0 if something is whole, 1 if nothing is there.

    directory: of a job whose events tell how likely that is to survive, and how far its snapshots are.
    """
    told = None if directory is None else _jobs_of(parser, Path(directory))
    ranks = () if directory is None else _ranks_now(Path(directory))
    with Console(stderr=True).status("reading" if verify else "looking"):
        found = memory_inspection.inspect(verify=verify)
    if in_json:
        kept = [asdict(one) for one in found]
        survival = None if told is None else memory_survival.survival_in_memory(told)
        document = {
            "kept": kept,
            "survival": None if survival is None else asdict(survival),
            "states": memory_states.ranks_by_state(ranks),
            "gone_on_from": _gone_on_from(told or []),
            "method": _method(told or []),
        }
        print(json.dumps(kept if told is None else document, indent=1))
    elif found:
        Console(soft_wrap=not sys.stdout.isatty()).print(memory_table(found))
        for sentence in [*memory_inspection.in_words(found), *memory_inspection.copies_in_words(found)]:
            print(sentence)
    else:
        print("No memory tier of yours has anything on this host.")
    if told is not None and not in_json:
        if reason := _gone_on_from(told):
            print(f"After the last failure {reason}.")
        if method := _method(told):
            print(f"What other hosts keep is chosen by --memory-tier auto: {method}.")
        print(memory_survival.in_words(told))
        if states := memory_states.in_words(ranks):
            print(f"Its ranks, by their snapshots in memory: {states}.")
    return 0 if any(not one.problem for one in found) else 1


def _gone_on_from(of_jobs: Sequence[Sequence[Event]]) -> str:
    """Return where each rank's state came from after the last failure, and why; "" if not from memory."""
    went_on = [one for events in of_jobs for one in recoveries(events) if one.went_on]
    return went_on[-1].from_memory if went_on else ""


def _method(of_jobs: Sequence[Sequence[Event]]) -> str:
    """Return what `--memory-tier auto` has chosen last, and why; "" if it has chosen nothing."""
    chosen = [event for event in of_jobs[-1] if event["event"] == "memory_method"] if of_jobs else []
    return str(chosen[-1]["text"]) if chosen else ""


def _ranks_now(directory: Path) -> Sequence[RankNow]:
    """Return the ranks of the job that runs in a directory; none where nobody tells how they are now."""
    follower = Follower(directory)
    follower.look()
    present = follower.present()
    return () if present is None or follower.silent() is not None else present.ranks


def _jobs_of(parser: Parser, directory: Path) -> list[list[Event]]:
    try:
        events, damages = read_events(directory)
    except OSError as error:
        parser.error(f"{error.filename} can't be read: {error.strerror}")
    for damage in damages:
        print(f"jitckpt inspect: {damage}", file=sys.stderr)
    return jobs(event for event in events if is_whole(event))


def memory_table(found: Sequence[KeptShard]) -> Table:
    """Return what is kept as a table."""
    result = Table("job", "rank", "step", "size", "age", "kept for", "state", pad_edge=False)
    result.columns[3].justify = result.columns[4].justify = "right"
    for one in found:
        age = f"{max(0.0, time() - one.time):.1f} s" if one.time else ""
        state = one.problem or ("whole everywhere" if one.safe else "whole here")
        whom = "this host" if one.own else "another host" if not one.parity_of else "its group"
        rank = f"{one.rank} of {one.world_size}" if one.world_size else ""
        if one.cut_among:
            rank += f", 1/{len(one.cut_among)} of it"
        if one.part is not None:
            first, last, count = one.part
            rank += f", chunks {first} to {last} of {count}{', in a file' if one.in_file else ''}"
        if one.parity_of:
            rank = f"parity of {', '.join(map(str, one.parity_of))}"
        result.add_row(one.job[:8], rank, str(one.step), show_size(one.bytes), age, whom, state)
    return result


def table(found: Inspection) -> Table:
    """Return the saves as a table, newest step first."""
    result = Table("step", "folder", "shard", "size", "finished", "state", pad_edge=False)
    result.columns[3].justify = "right"
    previous = None
    for save in sorted(found.saves, key=lambda save: -save.step):
        when = "" if save.time is None else datetime.fromtimestamp(save.time).strftime("%Y-%m-%d %H:%M:%S")
        shard = "" if save.shard is None else str(save.shard)
        if previous not in (None, save.step):
            result.add_section()
        step = "" if previous == save.step else str(save.step)
        result.add_row(step, Path(save.path).name, shard, show_size(save.bytes), when, save.state)
        previous = save.step
    return result


def in_words(found: Inspection) -> list[str]:
    """Return the sentences about what can't be used and what a restart would do."""
    sentences = [save.reason for save in found.saves if save.reason]
    sentences += [f"Step {step.step} is not whole: {step.reason}." for step in found.steps if not step.whole]
    if found.refusal:
        return [*sentences, f"A restart would stop with this error: {found.refusal}"]
    if found.restart is None:
        return [*sentences, "Nothing is saved whole: a restart would begin at step 0."]
    lost = [str(load.rank) for load in found.loads if load.local is None]
    of = f"{found.world_size} rank{'s' if found.world_size > 1 else ''}"
    sentences.append(f"A restart of this job of {of} would go on from step {found.restart}.")
    if lost:
        shown = ", ".join(lost[:SHOWN_RANKS]) + (", ..." if len(lost) > SHOWN_RANKS else "")
        sentences.append(
            f"Rank {shown}: the rank's own state of that step (random numbers, buffers, extra) is not saved; "
            "that of a replica would be taken."
        )
    unknown = found.world_size - len(found.loads)
    if unknown:
        sentences.append(f"Of {unknown} of its ranks no save says which shard they hold.")
    if not found.verified:
        sentences.append("Only the sizes of the files were compared; --verify reads their checksums.")
    return sentences
