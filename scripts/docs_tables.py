"""Makes tables of docs/: campaigns.md, proofs.md, workloads.md, guides/frameworks.md,
guides/without-replicas.md and start/install.md (of docs/data), and reference/environment.md.

    python scripts/docs_tables.py            # writes what has changed
    python scripts/docs_tables.py --check    # only says whether something would change (status 1)

A campaign adds a line to docs/data/campaigns.jsonl; `newest` stands with the newest of each mode. A claim and
the command that shows it are a line of docs/data/proofs.jsonl; scripts/bench/paper_tables.py writes
docs/data/workloads.jsonl, `scripts/test --frameworks` docs/data/frameworks.jsonl, `scripts/test --record`
docs/data/versions.jsonl, and what
scripts/bench/memory_losses.py and scripts/bench/shared_directory.py print with --json is
docs/data/losses.jsonl and docs/data/loads.jsonl. The variables are those of
jitckpt/wire/environment.py.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.workload_tables import tables as tables_of_workloads

from jitckpt.wire.environment import Variable, all_variables

DOCS = Path(__file__).parents[1] / "docs"
MODES = {
    "user": "user-level",
    "transparent": "transparent",
    "hosts": "three hosts",
    "etcd": "three hosts at etcd",
    "memory": "without replicas",
    "hostile": "hostile",
    "moves": "moves by CRIU",
}
Row = dict[str, Any]


def records(name: str) -> list[Row]:
    """Return the records of a file, in order."""
    return [json.loads(line) for line in (DOCS / "data" / name).read_text().splitlines()]


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def campaigns() -> str:
    """Return the newest campaign of each mode, and what all of them come to."""
    rows = records("campaigns.jsonl")
    newest = [
        [MODES[row["mode"]], f"{row['passed']} of {row['trials']}", *map(seconds, times(row)), row["seed"]]
        for row in rows
        if row["newest"]
    ]
    every = []
    for mode, name in MODES.items():
        own = [row for row in rows if row["mode"] == mode]
        passed, trials = (sum(row[key] for row in own) for key in ("passed", "trials"))
        every.append([name, len(own), f"{passed} of {trials}"])
    return (
        "The newest of each mode; times from a failure's detection to the slowest rank's first new step:\n\n"
        + table(["mode", "passed", "median", "90 % within", "at most", "seed"], newest)
        + "\nAll that were recorded, of earlier versions too:\n\n"
        + table(["mode", "campaigns", "passed"], every)
    )


def times(row: Row) -> tuple[float | None, float | None, float | None]:
    """Return median, 90th percentile and largest."""
    return row["median_s"], row["p90_s"], row["max_s"]


def seconds(value: float | None) -> str:
    """Return what stands in the table."""
    return "" if value is None else f"{value:g} s"


def proofs() -> str:
    """Return for each part of a page how many claims are shown, and by what."""
    rows = []
    for (page, topic), group in groupby(records("proofs.jsonl"), key=lambda row: (row["page"], row["topic"])):
        own = list(group)
        found = sorted(
            {name for row in own for name in re.findall(r"tests/\w+/test_\w+\.py", row["command"])}
        )
        found += ["`proxy_tests`"] if any("proxy_tests" in row["command"] for row in own) else []
        first = found[0].strip("`") if found else "see the file"
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        rows.append([f"[{topic}]({page}#{anchor(topic)})", len(own), f"`{first}`{more}"])
    return table(["about", "claims", "shown by"], rows)


def anchor(heading: str) -> str:
    """Return the heading's name in a link."""
    return re.sub(r"[^\w-]+", "-", heading.lower().replace(".", "")).strip("-")


def workloads() -> str:
    """Return what each workload is, and the paper's tables 4 to 7 with what was measured of it."""
    rows = records("workloads.jsonl")
    headings = ["workload", "framework", "parallelism", "ranks", "load", "measured", "took"]
    made = [
        [
            row["workload"],
            row["framework"],
            row["parallelism"],
            row["ranks"],
            " to ".join(f"{one:g}" for one in row["load"]),
            row["date"],
            f"{row['seconds'] / 60:.0f} min",
        ]
        for row in rows
    ]
    parts = [table(headings, made)]
    parts += [f"**{one.title}**\n\n{table(one.headings, one.rows)}" for one in tables_of_workloads(rows)]
    return "\n".join(parts)


def variables() -> str:
    """Return the variables, those that a user may set first."""

    def shown(variable: Variable[object]) -> str:
        if variable.default in (None, "", "{}", {}):
            return ""
        if isinstance(variable.default, bool):
            return str(int(variable.default))
        return f"{variable.default}"

    rows = [
        (
            "you" in variable.writer,
            [
                f"`{variable.name}`",
                variable.meaning,
                variable.allowed,
                shown(variable),
                variable.writer,
                variable.reader,
            ],
        )
        for variable in all_variables()
    ]
    headings = ["variable", "meaning", "value", "default", "written by", "read by"]
    return (
        "You may set:\n\n"
        + table(headings, [row for users, row in rows if users])
        + "\nJitckpt's own; don't set them:\n\n"
        + table(headings, [row for users, row in rows if not users])
    )


def frameworks() -> str:
    """Return for each program of a framework what it ended with, by mode and number of ranks.

    Torch is named where it is not the one that most ran with.
    """
    usual = Counter(row["torch"] for row in records("frameworks.jsonl")).most_common(1)[0][0]
    shown = {"user": "user-level", "transparent": "transparent"}
    text = ""
    for mode, name in shown.items():
        rows = [row for row in records("frameworks.jsonl") if row["mode"] == mode]
        columns = [*dict.fromkeys(row["disturbance"] for row in rows)]
        found = {(row["program"], row["ranks"], row["torch"], row["disturbance"]): row for row in rows}
        lines = []
        for which in sorted(dict.fromkeys(key[:3] for key in found), key=lambda which: which[2] != usual):
            program, ranks, torch = which
            own = [found.get((*which, column)) for column in columns]
            version = next(row["version"] for row in own if row is not None)
            results = ["" if row is None else row["result"] for row in own]
            beside = "" if torch == usual else f" (torch {torch})"
            lines.append([with_version(program, version) + beside, ranks, *results])
        text += ("\n" if text else "") + table([f"{name} mode", "ranks", *columns], lines)
    return text


def with_version(program: str, version: str) -> str:
    """Return a program's name with the version of its framework behind that of the framework."""
    framework, *kind = program.split(", ")
    return ", ".join([f"{framework} {version}", *kind])


def losses() -> str:
    """Return how often a state in memory came back after so many hosts were lost at once."""
    headings = ["hosts", "copies", "lost at once", "all came back", "95 % interval", "Corollary 1"]
    rows = []
    for row in records("losses.jsonl"):
        low, high = row["interval"]
        came_back = f"{row['came_back']} of {row['trials']}"
        wide = f"{100 * low:.0f} to {100 * high:.0f} %"
        corollary = f"{100 * row['corollary_1']:.1f} %"
        rows.append([row["hosts"], row["copies"], row["lost"], came_back, wide, corollary])
    return table(headings, rows)


def loads() -> str:
    """Return in how many seconds all hosts have a state again, from memory and from a shared directory."""
    headings = ["hosts", "lose all", "tier", "from memory", "from the shared directory", "times as long"]
    rows = []
    for row in records("loads.jsonl"):
        times = f"{row['files'] / row['memory']:.1f}"
        seconds = [f"{row[which]:.2f} s" for which in ("memory", "files")]
        rows.append([row["hosts"], row["lost"], f"`{row['tier']}`", *seconds, times])
    return table(headings, rows)


def versions() -> str:
    """Return with which versions the tests ran: the newest run of each."""
    newest = {(row["python"], row["torch"], row["system"]): row for row in records("versions.jsonl")}
    headings = ["Python", "torch", "system", "passed", "failed", "skipped", "command", "at"]
    rows = sorted(newest.items(), key=lambda item: [*map(int, item[0][0].split("."))])
    keys = ["python", "torch", "system", "passed", "failed", "skipped"]
    return table(
        headings, [[*(row[key] for key in keys), f"`{row['command']}`", row["commit"]] for _, row in rows]
    )


ANOTHER = "#"  # behind it: what tells a page's second table from its first
TABLES: dict[str, Callable[[], str]] = {
    "campaigns": campaigns,
    "proofs": proofs,
    "workloads": workloads,
    "guides/frameworks": frameworks,
    "guides/without-replicas": losses,
    f"guides/without-replicas{ANOTHER}loads": loads,
    "start/install": versions,
    "reference/environment": variables,
}
SOURCES = {
    "reference/environment": "jitckpt/wire/environment.py",
    "guides/frameworks": "data/frameworks.jsonl",
    "guides/without-replicas": "data/losses.jsonl",
    f"guides/without-replicas{ANOTHER}loads": "data/loads.jsonl",
    "start/install": "data/versions.jsonl",
}


def page(name: str) -> tuple[Path, str]:
    """Return a page's file, and what has to stand there."""
    path = DOCS / f"{name.partition(ANOTHER)[0]}.md"
    source = SOURCES.get(name, f"data/{name}.jsonl")
    begin, end = f"<!-- made by scripts/docs_tables.py from {source} -->\n", "<!-- end -->"
    before, _, rest = path.read_text().partition(begin)
    after = rest.partition(end)[2]
    return path, f"{before}{begin}{TABLES[name]()}{end}{after}"


def main() -> int:
    """Write the pages, or check them; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    changed = False
    for path, text in map(page, TABLES):  # one after the other: a page may have two tables
        if path.read_text() == text:
            continue
        changed = True
        print(f"{path.name} {'is not' if check else 'was not'} what the records say")
        if not check:
            path.write_text(text)
    return int(check and changed)


if __name__ == "__main__":
    sys.exit(main())
