"""The checks of scripts/gpu/verify: a table last, results.json and a log of each run in the folder OUT."""

import argparse
import ctypes.util
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jitckpt.console import show_size
from jitckpt.device import LIBRARY_DIR, device_environment
from jitckpt.doctor.checks import check_process
from jitckpt.doctor.facts import ask_process, device
from jitckpt.events import Event
from jitckpt.rehearsal import trials_in_place
from jitckpt.rehearsal.runs import CHECKPOINTS, OUTPUT, Run, run_job
from jitckpt.rehearsal.trials import Trial, differences, judge, steps_of
from jitckpt.system.signals import end_in_order

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
GPT, PLAIN = EXAMPLES / "train_gpt.py", EXAMPLES / "plain_ddp.py"
UNSEEDED = ("random numbers, Python's", "random numbers, numpy's")
TIME_LIMIT = 560.0  # seconds of all checks and the building before them
STEPS = 24
FAILED_STEP = 12
HANG_TIMEOUT = 10.0
JOB_LIMIT = 70.0  # seconds; two ranks take 20 on one H100, most of them for their start
PAIRS = 3
OWN_KERNELS = ("at::", "at_cuda", "cub::", "c10::")  # torch's; NVIDIA's libraries launch theirs by themselves

# What is hoped for (the targets); None where a figure is only reported.
LAUNCH_NANOSECONDS = 50.0
STEP_RATIO = 1.001
SAVE_RATIO = 0.8


@dataclass(frozen=True)
class Result:
    """One row. passed: None where there is no target, or the device is not the one that the target is for."""

    check: str
    figure: str
    passed: bool | None
    seconds: float = 0.0


class Checks:
    """The checks by name; each returns its rows."""

    def __init__(self, kind: str, out: Path) -> None:
        self.kind, self.out = kind, out
        self.size = "large" if kind == "cuda" else "small"
        self.undisturbed: dict[int, Run] = {}
        self.plain: dict[str, Run] = {}

    def device(self) -> list[Result]:
        name, driver, devices = device(self.kind)
        return [Result("device", f"{devices} x {name}, driver {driver}", True)]

    def library(self) -> list[Result]:
        rows = check_process(*ask_process(self.kind))
        return [Result(row.check, row.found, row.state == "ok") for row in rows]

    def launches(self) -> list[Result]:
        """No launch is lost or repeated: counted before the library, after it, and by torch's profiler."""
        found = self._measure("kernels", self.size, environment=self._with_counters())
        before, after, profiled = found["before"], found["after"], found["profiler"]
        rows = [
            Result(
                "launches in a GPT step, before and after the library",
                f"{before}, {after}",
                0 < before == after,
            )
        ]
        if profiled:
            own = sum(
                number for name, number in profiled.items() if any(part in name for part in OWN_KERNELS)
            )
            others = sum(profiled.values()) - own
            figure = f"{own} of torch's own, {others} of NVIDIA's libraries"
            rows.append(Result("kernels that torch's profiler counts", figure, own == before))
        return rows

    def nccl(self) -> list[Result]:
        """NCCL has a CUDA runtime of its own inside: it asks for none of its calls from outside."""
        library = nccl_library()
        wanted = symbols(library, "--undefined-only")
        found = [name for name in wanted if name.startswith(("cuda", "__cuda"))]
        row = "CUDA calls that NCCL takes from other libraries"
        return [
            Result(row, ", ".join(found) or f"none, of {len(wanted)} symbols", bool(wanted) and not found)
        ]

    def allocations(self) -> list[Result]:
        """A save must be possible on a full device: nothing from CUDA, nothing from torch's own pool."""
        with tempfile.TemporaryDirectory() as folder:
            found = self._measure("allocations", self.size, folder, environment=self._with_counters())
        if not found["saved"]:
            raise RuntimeError("no save was made")
        figure = f"{found['in_save']}, in a save of {show_size(found['saved'])}; {found['before']} before it"
        passed = found["in_save"] == 0 < found["before"]
        return [Result("allocations on the device in a save", figure, passed)]

    def recover_killed(self) -> list[Result]:
        return self._recover("killed", f"rank=1 step={FAILED_STEP} phase=backward kind=kill")

    def recover_stopped(self) -> list[Result]:
        return self._recover("stopped", f"rank=1 step={FAILED_STEP} phase=backward kind=stop")

    def recover_exception(self) -> list[Result]:
        fault = f"rank=1 step={FAILED_STEP} phase=optimizer kind=exception"
        return self._recover("fails in the optimizer step", fault)

    def recover_gil(self) -> list[Result]:
        fault = f"rank=1 step={FAILED_STEP} phase=backward kind=kill"
        return self._recover("killed, the other waits with the GIL held", fault, what="gil")

    def recover_sticky(self) -> list[Result]:
        if self.kind == "softgpu":
            return self._recover(
                "has a sticky error", f"rank=1 step={FAILED_STEP} phase=backward kind=sticky"
            )
        return self._recover("has a sticky error", None, what=f"sticky=1:{FAILED_STEP}")

    def recover_three(self) -> list[Result]:
        fault = f"rank=1 step={FAILED_STEP} phase=backward kind=kill"
        return self._recover("killed, three ranks", fault, ranks=3)

    def proxy(self) -> list[Result]:
        """Through the device proxy, without a failure, a training ends as without the proxy."""
        plain, proxied = self._plain("user"), self._plain("transparent")
        wrong = "; ".join([f"status {run.status}" for run in (plain, proxied) if run.status]) or "; ".join(
            differences(proxied, plain)
        )
        found = wrong or f"equal bit for bit, {proxied.seconds:.1f} s, {plain.seconds:.1f} s without"
        return [Result("two ranks through the device proxy", found, not wrong)]

    def transparent_killed(self) -> list[Result]:
        return self._recover_in_place("killed", f"rank=1 step={FAILED_STEP} phase=backward kind=proxy-kill")

    def transparent_again(self) -> list[Result]:
        """The other one's server, too, in an optimizer step."""
        faults = [f"rank=1 step={FAILED_STEP} phase=backward kind=proxy-kill"]
        faults.append(f"rank=0 step={FAILED_STEP + 6} phase=optimizer kind=proxy-kill")
        return self._recover_in_place("killed twice", *faults)

    def _recover_in_place(self, name: str, *faults: str) -> list[Result]:
        """Fail in transparent mode, and compare with the run that has neither proxy nor failure."""
        run = self._plain("transparent", *faults)
        verdict = trials_in_place.judge(Trial(0, name, faults, ()), run, self._plain("user"))
        redone = "-" if verdict.redone is None else verdict.redone
        seconds = "-" if verdict.recovery_seconds is None else f"{verdict.recovery_seconds:.2f} s"
        found = verdict.reason or f"equal bit for bit, {redone} minibatch done again, {seconds}"
        return [Result(f"transparent mode, a server is {name}", found, not verdict.reason)]

    def _plain(self, mode: str, *faults: str) -> Run:
        """examples/plain_ddp.py, which knows nothing of jitckpt; without a failure once for each mode."""
        name = "-".join(["plain", mode, *(fault.rpartition("=")[2] for fault in faults)])
        if name not in self.plain:
            run = self._train(
                name, 2, faults, script=PLAIN, options=("--mode", mode, "--checkpoint-dir", CHECKPOINTS)
            )
            printed = (self.out / f"{name}-{OUTPUT}").read_text()
            self.plain[name] = replace(run, final=trials_in_place.final_as_printed(printed, run.restarts))
        return self.plain[name]

    def launch_cost(self) -> list[Result]:
        """What an intercepted launch costs, seen from torch: paired runs with and without the library."""
        added = []
        for _ in range(PAIRS):
            plain, preloaded = (
                self._measure("launches", self.size, environment=environment)["seconds"]
                for environment in (self._without_library(), self._with_library())
            )
            added.append(1e9 * (preloaded - plain))
        nanoseconds = statistics.median(added)
        passed = nanoseconds <= LAUNCH_NANOSECONDS if self.kind == "cuda" else None
        return [Result("a launch that passes through the library", f"{nanoseconds:+.0f} ns", passed)]

    def step_cost(self) -> list[Result]:
        """A GPT's step with jitckpt over one without it, both preloaded or not, medians of pairs."""
        ratios, plain_times, parameters = [], [], 0
        for _ in range(PAIRS):
            plain = self._measure("step", self.size, environment=self._without_library())
            with tempfile.TemporaryDirectory() as folder:
                protected = self._measure("step", self.size, folder, environment=self._with_library())
            ratios.append(protected["seconds"] / plain["seconds"])
            plain_times.append(plain["seconds"])
            parameters = plain["parameters"]
        ratio = statistics.median(ratios)
        passed = ratio <= STEP_RATIO if self.kind == "cuda" else None
        figure = f"{ratio:.4f} of {1000 * statistics.median(plain_times):.1f} ms"
        return [Result(f"step of a GPT, {parameters / 1e6:.3g} M parameters", figure, passed)]

    def save_speed(self) -> list[Result]:
        """A save to memory (tmpfs), beside a copy to pinned memory and torch.save."""
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            alone = self._measure("copy", self.size, folder, environment=self._with_library())
            args = ["--steps", "1000000"]
            if self.kind == "cuda":
                args += ["--width", "1024", "--layers", "12", "--heads", "16", "--batch", "4"]
            run = run_job(
                ["--warm-spares", "0", str(HERE / "one_gpu.py"), str(GPT), *args],
                Path(folder) / "run",
                ranks=1,
                device=self.kind,
                end_when=lambda events: any(event["event"] == "first_step" for event in events),
            )
            self._keep("save-speed", Path(folder) / "run")
        ended = [event for event in run.events if event["event"] == "save_ended"]
        begun = [event for event in run.events if event["event"] == "save_begun"]
        if not ended:
            raise RuntimeError("no save was made")
        size, seconds = ended[0]["bytes"], ended[0]["clock"] - begun[0]["clock"]
        ratio = size / seconds / alone["copy"]
        figure = (
            f"{show_size(size)} at {show_size(int(size / seconds))}/s; a pinned copy "
            f"{show_size(int(alone['copy']))}/s, torch.save {show_size(int(alone['torch_save']))}/s"
        )
        return [Result("save to tmpfs", figure, ratio >= SAVE_RATIO if self.kind == "cuda" else None)]

    def _recover(self, name: str, fault: str | None, *, ranks: int = 2, what: str = "") -> list[Result]:
        """Fail once, and compare with the undisturbed run; also say how long it took until the save began."""
        if ranks not in self.undisturbed:
            run = self._train(f"undisturbed-{ranks}", ranks, ())
            if run.status != 0 or steps_of(run) != STEPS:
                raise RuntimeError(f"the undisturbed run of {ranks} ranks ended with status {run.status}")
            self.undisturbed[ranks] = run
        faults = () if fault is None else (fault,)
        run = self._train(name.replace(" ", "-").replace(",", ""), ranks, faults, what)
        trial = Trial(0, "", faults or (what,), ())
        verdict = judge(trial, run, self.undisturbed[ranks], UNSEEDED)
        redone = "-" if verdict.redone is None else verdict.redone
        rows = [
            Result(
                f"rank 1 {name}",
                verdict.reason or f"equal bit for bit, {redone} minibatch done again",
                not verdict.reason,
            )
        ]
        if times := phases(run.events):
            text = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in times.items())
            rows.append(Result(f"rank 1 {name}: seconds", text, None))
        return rows

    def _train(
        self,
        name: str,
        ranks: int,
        faults: Sequence[str],
        what: str = "",
        *,
        script: Path = GPT,
        options: Sequence[str] = (),
    ) -> Run:
        if what:
            os.environ["JITCKPT_GPU_TRY"] = what
        try:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary) / "run"
                try:
                    return run_job(
                        [*options, str(HERE / "one_gpu.py"), str(script), "--steps", str(STEPS)],
                        folder,
                        ranks=ranks,
                        device=self.kind,
                        faults=faults,
                        hang_timeout=HANG_TIMEOUT,
                        time_limit=JOB_LIMIT,
                    )
                finally:
                    self._keep(name, folder)
        finally:
            os.environ.pop("JITCKPT_GPU_TRY", None)

    def _keep(self, name: str, folder: Path) -> None:
        """Keep what a run said, its events, and who waited for whom."""
        saves = folder / CHECKPOINTS
        for path in (folder / OUTPUT, saves / "events.jsonl", *saves.glob("hang-*.txt")):
            if path.exists():
                (self.out / f"{name}-{path.name}").write_bytes(path.read_bytes())

    def _with_library(self) -> dict[str, str]:
        return device_environment(self.kind, 1, LIBRARY_DIR, os.environ)

    def _with_counters(self) -> dict[str, str]:
        """A counting library before jitckpt's, and one after it."""
        libraries = [self._compiled(name) for name in ("before", "after")]
        environment = self._with_library()
        ours, *rest = environment["LD_PRELOAD"].split(":")
        preload = ":".join([str(libraries[0]), ours, str(libraries[1]), *rest])
        return environment | {"LD_PRELOAD": preload}

    def _without_library(self) -> dict[str, str]:
        environment = self._with_library()
        libraries = environment["LD_PRELOAD"].split(":")
        return environment | {"LD_PRELOAD": ":".join(one for one in libraries if "libjitckpt" not in one)}

    def _measure(self, what: str, *arguments: str, environment: dict[str, str]) -> Any:
        ended = subprocess.run(
            [sys.executable, str(HERE / "measure.py"), what, *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        with (self.out / f"measure-{what}.log").open("a") as log:
            log.write(ended.stdout + ended.stderr)
        if ended.returncode != 0:
            last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"measure.py {what} ended with status {ended.returncode}: {last}")
        return json.loads(ended.stdout.splitlines()[-1])

    def _compiled(self, name: str) -> Path:
        library = self.out / f"lib{name}.so"
        command = ["cc", "-O1", "-shared", "-fPIC", f"-DNAME={name}", "-o", str(library)]
        subprocess.run([*command, str(HERE / "counter.c"), "-ldl"], check=True)
        return library


def nccl_library() -> Path:
    """Return the NCCL that torch loads: the wheel's, or the system's."""
    wheel = importlib.util.find_spec("nvidia.nccl")
    for folder in wheel.submodule_search_locations or () if wheel is not None else ():
        for path in Path(folder).glob("lib/libnccl.so*"):
            return path
    found = ctypes.util.find_library("nccl")
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        name, _, where = line.strip().partition(" => ")
        if found is not None and name.startswith(found):
            return Path(where)
    raise RuntimeError("libnccl.so was not found, neither in Python's packages nor by ldconfig")


def symbols(library: Path, which: str) -> list[str]:
    command = ["nm", "--dynamic", "--format=just-symbols", which, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def phases(events: Sequence[Event]) -> dict[str, float]:
    """Return the seconds from the failure to its detection, to the first save begun, and to the new step."""
    detected = [event for event in events if event["event"] == "detected"]
    if not detected:
        return {}
    faults = [event["clock"] for event in events if event["event"] == "fault"]
    began = faults[0] if faults else detected[0]["clock"]
    named = {"detected": "detected", "save begun": "save_begun", "saved": "saved"}
    found = {}
    for phase, name in named.items():
        times = [event["clock"] for event in events if event["event"] == name]
        if times:
            found[phase] = times[0] - began
    steps = [e["clock"] for e in events if e["event"] == "first_step" and e["restart"] == 1]
    return found | ({"first new step": max(steps) - began} if steps else {})


# The order in which they are made: what is most telling first, should the time run out.
NAMES = (
    "device",
    "library",
    "nccl",
    "launches",
    "allocations",
    "recover_killed",
    "proxy",
    "transparent_killed",
    "transparent_again",
    "recover_sticky",
    "recover_stopped",
    "recover_exception",
    "recover_gil",
    "save_speed",
    "step_cost",
    "launch_cost",
    "recover_three",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu/verify", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "softgpu"), default="cuda")
    parser.add_argument("--only", type=lambda text: text.split(","), default=NAMES, help=", ".join(NAMES))
    parser.add_argument("--seconds-used", type=float, default=0.0, help="of the time that all may take")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if unknown := set(args.only) - set(NAMES):
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    end_in_order()
    args.out.mkdir(parents=True, exist_ok=True)
    checks = Checks(args.device, args.out.resolve())
    began = time.monotonic() - args.seconds_used
    results: list[Result] = []
    for name in [name for name in NAMES if name in args.only]:
        print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)
        if time.monotonic() - began > TIME_LIMIT - 60:
            results.append(Result(name, "skipped: the time has run out", False))
            continue
        results += made(getattr(checks, name), name, checks.out)
        document = {"device": args.device, "results": [asdict(result) for result in results]}
        (checks.out / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    show(results, args.device)
    return 0 if all(result.passed is not False for result in results) else 1


def made(check: Callable[[], list[Result]], name: str, out: Path) -> list[Result]:
    """Make one check; whatever it raises is a failed row, and in a log."""
    began = time.monotonic()
    try:
        rows = check()
    except Exception as error:
        (out / f"{name}-error.log").write_text(traceback.format_exc())
        rows = [Result(name, str(error) or repr(error), False)]
    seconds = time.monotonic() - began
    return [Result(row.check, row.figure, row.passed, round(seconds, 1)) for row in rows]


def show(results: Sequence[Result], kind: str) -> None:
    table = Table("check", "figure", "verdict", title=f"jitckpt on {kind}", title_justify="left")
    words = {True: "pass", False: "FAIL", None: "-"}
    for result in results:
        table.add_row(result.check, result.figure, words[result.passed])
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())
