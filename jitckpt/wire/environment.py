"""Every JITCKPT_* variable, once: its name, type, default, who writes it and who reads it.

Nothing else of jitckpt names one. The C++ libraries have names, defaults and limits from here as well
(native/ground/generate_environment.py), and docs/reference/environment.md is made from this table.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from jitckpt.errors import JitckptError

T = TypeVar("T")

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30


class EnvironmentVariableError(JitckptError):
    """A variable has a value that can't be meant; the text names it and says what it may be."""


@dataclass(frozen=True)
class Bounds:
    """What a number may be, both included."""

    least: float
    most: float


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable.

    default: its value where it is not set, or is empty. kind: what its text is, in words. writer, reader:
    who, in words; "you" is whoever starts the job. limits: of a number.
    """

    name: str
    kind: str
    default: T
    writer: str
    reader: str
    meaning: str
    parse: Callable[[str], T]
    unparse: Callable[[T], str] = str
    limits: Bounds | None = None

    def get(self, environment: Mapping[str, str] | None = None) -> T:
        """Return its value here, or in `environment`. Raises EnvironmentVariableError."""
        text = (os.environ if environment is None else environment).get(self.name, "")
        if not text:
            return self.default
        try:
            value = self.parse(text)
        except (ValueError, TypeError) as error:
            raise EnvironmentVariableError(f"{self.name} is {text!r}: set it to {self.allowed}.") from error
        if (
            self.limits is not None
            and isinstance(value, int | float)
            and not (self.limits.least <= value <= self.limits.most)
        ):
            raise EnvironmentVariableError(f"{self.name} is {text!r}: set it to {self.allowed}.")
        return value

    def is_set(self, environment: Mapping[str, str] | None = None) -> bool:
        return self.name in (os.environ if environment is None else environment)

    def to(self, value: T) -> dict[str, str]:
        """Return what sets it to this value, as a part of an environment."""
        return {self.name: self.unparse(value)}

    @property
    def allowed(self) -> str:
        if self.limits is None:
            return self.kind
        least, most = (
            int(number) if number == int(number) else number
            for number in (self.limits.least, self.limits.most)
        )
        return f"{self.kind} from {least} to {most}"


def _text(
    name: str, writer: str, reader: str, meaning: str, *, default: str = "", kind: str = "a text"
) -> Variable[str]:
    return Variable(name, kind, default, writer, reader, meaning, str)


def _folder(name: str, writer: str, reader: str, meaning: str) -> Variable[Path | None]:
    return Variable(name, "a folder", None, writer, reader, meaning, Path)


def _whole(
    name: str, writer: str, reader: str, meaning: str, *, default: int, least: int, most: int
) -> Variable[int]:
    limits = Bounds(least, most)
    return Variable(name, "a whole number", default, writer, reader, meaning, int, limits=limits)


def _descriptor(name: str, meaning: str) -> Variable[int | None]:
    limits = Bounds(0, 1 << 30)
    return Variable(name, "a file descriptor", None, "agent", "worker", meaning, int, limits=limits)


def _seconds(
    name: str, writer: str, reader: str, meaning: str, *, default: float, least: float
) -> Variable[float]:
    limits = Bounds(least, 1e9)
    return Variable(name, "a number of seconds", default, writer, reader, meaning, _number, limits=limits)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _yes(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _switch(name: str, writer: str, reader: str, meaning: str) -> Variable[bool]:
    return Variable(name, "0 or 1", False, writer, reader, meaning, _yes, lambda value: "01"[value])


def _one_of(name: str, writer: str, reader: str, meaning: str, *, choices: Sequence[str]) -> Variable[str]:
    """The first choice is the default."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return Variable(name, " or ".join(filter(None, choices)), choices[0], writer, reader, meaning, parse)


def _texts_by_name(text: str) -> dict[str, str]:
    value = json.loads(text)
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ValueError(text)
    return value


# What users may set.

CHECKPOINT_DIR = _text(
    "JITCKPT_CHECKPOINT_DIR",
    "agent or you",
    "worker",
    "where saves go, where jitckpt.init does not say it",
    default="ckpt",
    kind="a folder",
)
SELF_CHECK = _one_of(
    "JITCKPT_SELF_CHECK",
    "agent or you",
    "worker",
    "what a save would hold is compared with the training: 1: samples of large tensors, full: all",
    choices=("1", "0", "full"),
)
CALLS_AHEAD = _whole(
    "JITCKPT_CALLS_AHEAD",
    "you",
    "worker",
    "about so many device calls may wait on one stream; 0: any number, and then a hang may not be saved",
    default=256,
    least=0,
    most=1 << 20,
)
SNAPSHOT_SPANS = _one_of(
    "JITCKPT_SNAPSHOT_SPANS",
    "you",
    "worker",
    "whether the memory tier copies off the device where that is idle first; auto: from 50 ms on",
    choices=("auto", "1", "0"),
)
HANG_TIMEOUT = _seconds(
    "JITCKPT_HANG_TIMEOUT",
    "agent or you",
    "worker, proxy",
    "a collective, or an answer of the device, that takes longer is a hang",
    default=540,
    least=0.001,
)
PROXY_LOG_BYTES = _whole(
    "JITCKPT_PROXY_LOG_BYTES",
    "you",
    "proxy",
    "the most that the log of a minibatch's calls may take",
    default=GIBIBYTE,
    least=512 << 10,
    most=1024 * GIBIBYTE,
)
PROXY_SEGMENT_BYTES = _whole(
    "JITCKPT_PROXY_SEGMENT_BYTES",
    "you",
    "proxy",
    "one piece of that log; a single call must fit into it",
    default=4 * MEBIBYTE,
    least=256 << 10,
    most=GIBIBYTE,
)
PROXY_PINNED_BYTES = _whole(
    "JITCKPT_PROXY_PINNED_BYTES",
    "you",
    "proxy",
    "addresses for pinned memory and for copies of the device's; only what is used takes memory",
    default=64 * GIBIBYTE,
    least=MEBIBYTE,
    most=1024 * GIBIBYTE,
)
PROXY_SPIN_US = Variable[int | None](
    "JITCKPT_PROXY_SPIN_US",
    "a whole number of microseconds",
    None,
    "you",
    "proxy",
    "how long client and server look for the other's next word before they sleep; by default by the cores",
    int,
    limits=Bounds(0, 1_000_000),
)
PROXY_SPARE = _switch(
    "JITCKPT_PROXY_SPARE", "agent or you", "proxy", "a server waits, started, for the first to fail"
)
PROXY_ONE_CORE = _switch(
    "JITCKPT_PROXY_ONE_CORE",
    "agent or you",
    "proxy",
    "on softgpu: server and worker of a rank share a core where there is one for each rank",
)
PROXY_SERVER = _text(
    "JITCKPT_PROXY_SERVER",
    "you",
    "proxy",
    "the server's program, where it is not beside the client's library",
    default="",
    kind="a file",
)
CRIU = _text(
    "JITCKPT_CRIU",
    "you",
    "agent, `jitckpt doctor`",
    "CRIU's program, if it is in none of the usual places",
    default="",
    kind="a file",
)

# What the agent tells its workers.

MODE = _one_of(
    "JITCKPT_MODE", "agent", "worker", "how the job is protected", choices=("", "user", "transparent")
)
RESTART = _whole(
    "JITCKPT_RESTART",
    "agent",
    "worker",
    "how often the workers have been started again",
    default=0,
    least=0,
    most=1 << 31,
)
START = _text(
    "JITCKPT_START",
    "agent",
    "worker",
    "where hosts meet at a coordination service: number and revision of this start",
)
RUN = Variable[str | None](
    "JITCKPT_RUN", "a text", None, "agent", "worker", "the job's run, the same on all hosts", str
)
AGENT_PID = Variable[int | None](
    "JITCKPT_AGENT_PID",
    "a process id",
    None,
    "agent",
    "all of the job",
    "the agent, to which signals to all of the job are left",
    int,
    limits=Bounds(1, 1 << 30),
)
JOB_PROCESSES = _text(
    "JITCKPT_JOB_PROCESSES", "agent", "guardian", "a mark by which all processes of the job are found"
)
AGENT_FD = _descriptor("JITCKPT_AGENT_FD", "the socket to the agent")
STATE_FD = _descriptor("JITCKPT_STATE_FD", "the memory of what this rank alone knows")
LIFELINE_FD = _descriptor("JITCKPT_LIFELINE_FD", "the file whose lock goes with the worker")
COPIES_FD = _descriptor("JITCKPT_COPIES_FD", "with several hosts: for when another host has this rank's copy")
COPY_PATIENCE = _seconds(
    "JITCKPT_COPY_PATIENCE",
    "agent",
    "worker",
    "with several hosts: how long a rank waits for that copy, longer than a host may be silent",
    default=5.0,
    least=0.0,
)
MEMORY_FD = _descriptor("JITCKPT_MEMORY_FD", "the memory tier's memory of this rank")
WHOLE_FD = _descriptor("JITCKPT_WHOLE_FD", "what this rank's replicas had of a cut state, put together")
DESCRIPTORS = _text(
    "JITCKPT_DESCRIPTORS",
    "agent",
    "worker",
    "which files those were, so that no other is taken for one",
    default="{}",
    kind="JSON",
)
HANG_FLOOR = _seconds(
    "JITCKPT_HANG_FLOOR",
    "agent",
    "worker",
    "the least that the hang timeout is learned down to, from the job's own collectives; 0: it is not",
    default=0,
    least=0,
)
STAGING = _whole(
    "JITCKPT_STAGING",
    "agent",
    "worker",
    "bytes of page-locked memory that saves go through",
    default=64 * MEBIBYTE,
    least=MEBIBYTE,
    most=1024 * GIBIBYTE,
)
FIRST_DIRECTORIES = Variable[dict[str, str]](
    "JITCKPT_FIRST_DIRECTORIES",
    "JSON",
    {},
    "agent",
    "worker",
    "the checkpoint directories of the first start, which a relative path keeps meaning",
    _texts_by_name,
    json.dumps,
)
FRAMEWORKS = _switch(
    "JITCKPT_FRAMEWORKS",
    "agent",
    "worker",
    "trainings of the frameworks that jitckpt knows protect themselves",
)
RESHARD = _switch(
    "JITCKPT_RESHARD",
    "agent",
    "worker",
    "go on from a save of another number of ranks or layout, if that is the newest",
)
FULL_WORLD = _whole(
    "JITCKPT_FULL_WORLD",
    "agent",
    "worker",
    "the ranks of the job when no host is missing, if it goes on with fewer (--min-hosts); 0: it does not",
    default=0,
    least=0,
    most=1 << 31,
)
SAVE_EVERY = Variable[int | None](
    "JITCKPT_SAVE_EVERY",
    "a whole number",
    None,
    "agent",
    "worker",
    "steps between two saves of a training that a framework makes",
    int,
    limits=Bounds(1, 1 << 31),
)
VALIDATE_EVERY = _whole(
    "JITCKPT_VALIDATE_EVERY",
    "agent",
    "worker",
    "in transparent mode: steps between two validations; 0: only the first",
    default=0,
    least=0,
    most=1 << 31,
)
VALIDATE_DETERMINISTIC = _switch(
    "JITCKPT_VALIDATE_DETERMINISTIC",
    "agent",
    "worker",
    "in transparent mode: minibatches that are validated are made by deterministic algorithms",
)
STATE_ON_DEVICE = _one_of(
    "JITCKPT_STATE_ON_DEVICE",
    "agent",
    "worker",
    "in transparent mode: whether the state stays there between steps",
    choices=("0", "1", "without-init"),
)
MEMORY_TIER = _one_of(
    "JITCKPT_MEMORY_TIER",
    "agent",
    "worker",
    "whose state is kept in host memory: of ranks without replicas, of all, cut among replicas, of none",
    choices=("", "auto", "peer", "sharded", "off"),
)
MEMORY_EVERY = _whole(
    "JITCKPT_MEMORY_EVERY",
    "agent",
    "worker",
    "steps from one state in host memory to the next; 0: as many as the agent finds that are needed",
    default=1,
    least=0,
    most=1 << 31,
)
MEMORY_LIMIT = Variable[float](
    "JITCKPT_MEMORY_LIMIT",
    "a number of bytes",
    math.inf,
    "agent",
    "worker",
    "the most that a rank's states may take of host memory",
    float,
)
PAGE_TOKEN = Variable[str | None](
    "JITCKPT_PAGE_TOKEN",
    "a text",
    None,
    "agent or you",
    "the page's server",
    "who shows it may see the job's page; by default drawn, where others could reach the page",
    str,
)
FAULTS = _text(
    "JITCKPT_FAULTS", "agent", "worker", "rehearsed failures that are still to come", default="", kind="JSON"
)
PROXY_CONTROL = _text("JITCKPT_PROXY_CONTROL", "agent", "proxy", "the agent's socket for recoveries")
PROXY_SERVERS = _text("JITCKPT_PROXY_SERVERS", "agent", "proxy", "the agent's socket that starts servers")
PROXY_TOGETHER = _text(
    "JITCKPT_PROXY_TOGETHER", "agent", "proxy", "the step barrier's memory and, behind #, whose place is ours"
)
REST = _text(
    "JITCKPT_REST",
    "agent",
    "worker",
    "the memory in which the agent says behind which step all ranks wait and, after #, whose place is ours",
)
STORE_RELAY = _text(
    "JITCKPT_STORE_RELAY",
    "agent",
    "libjitckpt_store.so",
    "where workers may be moved: the abstract name of the agent's socket by which they reach the job's store",
)
STORE_ADDRESSES = _text(
    "JITCKPT_STORE_ADDRESSES",
    "agent",
    "libjitckpt_store.so",
    "and the store's own addresses, each ADDRESS:PORT",
)
PROXY_PRELOAD = _text(
    "JITCKPT_PROXY_PRELOAD", "agent or `jitckpt exec`", "proxy", "LD_PRELOAD of the device's server"
)
PROXY_LIBRARY_PATH = _text(
    "JITCKPT_PROXY_LIBRARY_PATH", "agent or `jitckpt exec`", "proxy", "LD_LIBRARY_PATH of the device's server"
)

# Between jitckpt's own tools and the jobs that they start.

STEPS_RECORD = _folder(
    "JITCKPT_STEPS_RECORD", "`jitckpt steps`", "worker", "where each process writes which steps it has seen"
)
REHEARSAL_DIR = _folder(
    "JITCKPT_REHEARSAL_DIR",
    "`jitckpt verify`, campaigns",
    "worker",
    "this is a rehearsal: saves and the digests of the end go there",
)
REHEARSAL = _text(
    "JITCKPT_REHEARSAL",
    "`jitckpt verify`, campaigns",
    "`jitckpt verify`, campaigns",
    "a mark by which what a rehearsal leaves behind is found",
)


def all_variables() -> list[Variable[object]]:
    """Return the table, in its order."""
    return [value for value in globals().values() if isinstance(value, Variable)]
