"""All figures of docs/measurements.md: runs each benchmark, prints a table, each figure beside its command.

    scripts/bench/all [--runs 5] [--only NAME ...] [--write docs/measurements.md]

--write puts the table in place of the one in that page. The machine should do nothing else meanwhile; its
load before and after stands under the table.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jitckpt.agent.processes.spares import available_memory
from jitckpt.console import say

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- figures of scripts/bench/all -->", "<!-- end of figures -->"
EXEC = ["jitckpt", "exec", "--device", "softgpu", "--"]
Row = tuple[str, str, str]  # what, figure, and what it should be


@dataclass(frozen=True)
class Benchmark:
    """A command that prints JSON, as it stands in the table, and the rows that are made of it."""

    name: str
    command: list[str]
    rows: Callable[[Any], list[Row]]


def interposed_call(found: Any) -> list[Row]:
    launch, collective = found["launch"], found["collective"]
    return [
        ("a kernel launch that passes through", f"{launch['preloaded']:+.1f} ns", "at most 50 ns"),
        ("the same with a registered job", f"{launch['job']:+.1f} ns", "at most 50 ns"),
        ("a collective with its watch", f"{collective['job']:+.0f} ns", "at most 250 ns"),
    ]


def watchdog(found: Any) -> list[Row]:
    return [
        (f"the watchdog's threads, {watches} watches a second", f"{100 * share:.2f} % of a core", target)
        for (watches, share), target in zip(found.items(), ("", "at most 0.5 %"), strict=True)
    ]


def step_time(found: Any) -> list[Row]:
    rows = []
    for key, what in {"time": "a step", "processor": "processor time of both ranks for a step"}.items():
        without = found[key]["without"]
        ratio, low, high = (1 + one / without for one in found[key]["difference"])
        figure = f"{ratio:.4f} ({low:.4f} to {high:.4f}, {found['pairs']} pairs)"
        name = f"{what} of {without * 1e3:.1f} ms with jitckpt's hooks, over without"
        rows.append((name, figure, "at most 1.005"))
    inside, low, high = (1e6 * one for one in found["inside"]["difference"])
    share = 1e-4 * inside / (found["processor"]["without"] / 2)
    figure = f"{inside:.0f} us ({low:.0f} to {high:.0f}), {share:.2f} % of a rank's processor time"
    return [*rows, ("processor time inside of the hooks in such a step", figure, "at most 0.5 %")]


def save(where: str) -> Callable[[Any], list[Row]]:
    def rows(found: Any) -> list[Row]:
        ours, others = found["jitckpt"], found["torch.save"]
        figure = f"{ours['of_write']:.2f} of write(), {ours['bytes_per_second'] / 1e9:.2f} GB/s"
        ratio = ours["bytes_per_second"] / others["bytes_per_second"]
        return [
            (f"the built-in save {where}", figure, "at least 0.8"),
            ("the same over torch.save", f"{ratio:.2f}", "at least 2"),
        ]

    return rows


def recovery(found: Any) -> list[Row]:
    rows = []
    for kind, target in (("warm", "at most 1 s"), ("cold", "")):
        phases = dict(found[kind])
        whole = phases.pop("all")
        parts = ", ".join(f"{phase} {1e3 * seconds:.0f}" for phase, seconds in phases.items())
        spares = "with warm spares" if kind == "warm" else "without spares"
        rows.append((f"SIGKILL to the first new step, {spares}", f"{whole:.2f} s ({parts} ms)", target))
    begun = 1e3 * (found["warm"]["detect"] + found["warm"]["rest"])
    return [("SIGKILL to the other rank's save begun", f"{begun:.0f} ms", "at most 100 ms"), *rows]


def death(found: Any) -> list[Row]:
    what = "SIGKILL of a process with 1 GiB of memory, to the launcher knowing of it"
    figure = f"{found['lifeline_ms']:.1f} ms; its process has ended after {found['pidfd_ms']:.0f}"
    return [(what, figure, "")]


def recovery_beside(found: Any) -> list[Row]:
    rows = []
    for way, figures in found.items():
        count = f"{figures['recovered']} of {figures['runs']} came back"
        if "first step" in figures:
            step, level = (f"{figures[key]:.2f} s" for key in ("first step", "level"))
            count = f"first step {step}, level {level}, {figures['redone']:.0f} steps redone; {count}"
        rows.append((f"the same work with {way}", count, ""))
    return rows


def host_copies(found: Any) -> list[Row]:
    def figure(difference: str) -> str:
        (low, middle, high), used = found["time"][difference], found["processor"][difference]
        spread = f"(middle half of the rounds {low:+.1f} to {high:+.1f})"
        return f"{middle:+.1f} ms {spread}, processor time of a rank {used[1]:+.1f} ms"

    step = found["time"]["without waiting"]
    waits = "that waits for the copy of what devices keep, over one that does not"
    early = "waiting after the forward pass instead, for what lies in host memory alone"
    return [
        (f"a step of {step:.0f} ms on two hosts {waits}", figure("as ever, over without waiting"), ""),
        ("the step barrier that it needs", figure("without waiting, over without the barrier"), ""),
        (early, figure("waiting early, over without the barrier"), ""),
    ]


def benchmarks(runs: int, build: str) -> list[Benchmark]:
    each = ["--runs", str(runs)]
    mib = ["scripts/bench/save.py", "--mib", "256", "--runs", str(runs + 2)]
    return [
        Benchmark("interposed_call", ["python", "scripts/bench/interposed_call.py", build], interposed_call),
        Benchmark("watchdog", ["python", "scripts/bench/watchdog.py", build], watchdog),
        Benchmark("step_time", ["python", "scripts/bench/step_time.py"], step_time),
        Benchmark("save", [*EXEC, "python", *mib], save("to a disk, 256 MiB with fsync")),
        Benchmark("save_shm", [*EXEC, "python", *mib, "--folder", "/dev/shm"], save("to memory (tmpfs)")),
        Benchmark("death", ["python", "scripts/bench/death.py"], death),
        Benchmark("recovery", ["python", "scripts/bench/recovery.py", *each], recovery),
        Benchmark("beside", ["python", "scripts/bench/recovery_beside.py", *each], recovery_beside),
        Benchmark("host_copies", ["python", "scripts/bench/host_copies.py"], host_copies),
    ]


def run(benchmark: Benchmark) -> list[Row]:
    """Run it in the repository's root; return its rows, or one that says that it failed."""
    python = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]
    command: list[str] = []
    for word in benchmark.command:
        command += {"python": [sys.executable], "jitckpt": python}.get(word, [word])
    ended = subprocess.run([*command, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode != 0:
        return [(benchmark.name, f"failed with status {ended.returncode}", "")]
    return benchmark.rows(json.loads(ended.stdout))


def machine() -> str:
    memory = f"{available_memory() / 2**30:.0f} GiB of free memory"
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{os.cpu_count()} processor cores, {memory}, softgpu, {versions}, {platform.system()}"


def table(chosen: list[Benchmark]) -> str:
    """Run the benchmarks; return the table in Markdown."""
    load = os.getloadavg()[0]
    lines = ["| what | figure | should be | command |", "| --- | --- | --- | --- |"]
    for benchmark in chosen:
        say(f"{' '.join(benchmark.command)} ...")
        command = f"`{' '.join(benchmark.command)}`"
        for what, figure, target in run(benchmark):
            lines.append(f"| {what} | {figure} | {target} | {command} |")
            command = "the same"
    after = os.getloadavg()[0]
    lines += ["", f"On {machine()}; load of the last minute before {load:.1f}, after {after:.1f}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="of what takes long (default 5)")
    parser.add_argument("--build", default="build/release", help="the folder of a build (%(default)s)")
    parser.add_argument("--only", nargs="+", help="the names of some benchmarks")
    parser.add_argument("--write", type=Path, help="the page whose table is replaced")
    args = parser.parse_args()
    chosen = [one for one in benchmarks(args.runs, args.build) if not args.only or one.name in args.only]
    made = table(chosen)
    print(made)
    if args.write is not None:
        page = args.write.read_text()
        before, _, rest = page.partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            sys.exit(f"{args.write} has no line {BEGIN} with {END} after it.")
        args.write.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
