"""What the doctor says of a script in transparent mode: is it recovered, and could its processes be moved?"""

import re
from collections.abc import Mapping, Sequence

from jitckpt.doctor.checks import Row
from jitckpt.events import Event

GUIDE = "docs/guides/broken-device.md"
ALL_AT_ONCE = "where all hosts that have a state may be left at once: --no-state-on-device"
_SENTENCE = re.compile(r"Process \d+ \((.*?)\) has (.*)\.$")


def check_transparent(events: Sequence[Event], ranks: int, status: str) -> list[Row]:
    """Judge the first minibatches. status: how the job ended, empty if it came through them."""
    off = dict.fromkeys(event["text"] for event in events if event["event"] == "switched_off")
    if off:
        advice = "a failure can't be recovered from in transparent mode; user mode can (jitckpt.init)"
        return [Row("script", "problem", text, advice) for text in off]
    left_out = dict.fromkeys(event["text"] for event in events if event["event"] == "validation_left_out")
    rows = [Row("script", "warning", f"a minibatch was not run again: {text}") for text in left_out]
    if not rows and status:
        return [Row("script", "problem", status, "see its output; it must train with DDP, FSDP or alike")]
    return rows or [Row("script", "ok", f"{ranks} ranks ran a minibatch again, bit for bit")]


def check_moves(
    here: Mapping[int, Sequence[str]], elsewhere: Mapping[int, Sequence[str]], *, calls_init: bool = False
) -> list[Row]:
    """Judge what keeps ranks from being moved: sentences, by rank. here: on their host.

    calls_init: the script calls jitckpt.init.
    """
    if not here:
        return []
    rows = [Row("moves", "warning", text, f"CRIU can't make it anew: {GUIDE}") for text in _of_ranks(here)]
    there = {rank: [text for text in all_ if text not in here[rank]] for rank, all_ in elsewhere.items()}
    rows += [
        Row("moves", "warning", text, f"it can't go on on another host: {GUIDE}") for text in _of_ranks(there)
    ]
    if calls_init:
        found = "the script calls jitckpt.init"
        rows.append(Row("moves", "warning", found, f"it does not go on on another host: {GUIDE}"))
    found = "CRIU can make the ranks' processes anew, here and on another host"
    return rows or [Row("moves", "ok", found, ALL_AT_ONCE)]


def _of_ranks(obstacles: Mapping[int, Sequence[str]]) -> list[str]:
    """Return sentences in which ranks with the same obstacle stand together."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, sentences in sorted(obstacles.items()):
        for sentence in sentences:
            match = _SENTENCE.match(sentence)
            what = (match[1], match[2]) if match else ("", sentence)
            if rank not in (has := found.setdefault(what, [])):
                has.append(rank)
    return [
        f"rank {', '.join(map(str, ranks))}: {f'{name} has {what}' if name else what}"
        for (name, what), ranks in found.items()
    ]
