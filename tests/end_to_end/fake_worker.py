"""What a worker says to its agent, for small scripts that only play a training rank."""

import ctypes
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from jitckpt.system import descriptors, lifeline
from jitckpt.system.stacks import stack_writer
from jitckpt.wire import protocol
from jitckpt.wire.protocol import Save, WorkerMessage

SYS_EXIT = 60  # exit(2): of the calling thread alone
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
RESTART = int(os.environ["JITCKPT_RESTART"])
AGENT = socket.socket(fileno=int(os.environ["JITCKPT_AGENT_FD"]))


def say(message: WorkerMessage) -> None:
    AGENT.send(protocol.encode(message))


def register(shard: int = 0, shards: int = 1) -> None:
    directory = os.environ["JITCKPT_CHECKPOINT_DIR"]
    stacks = stack_writer()
    lifeline.hold(int(os.environ[descriptors.LIFELINE]))
    say(
        protocol.Registered(
            RANK,
            os.getpid(),
            WORLD_SIZE,
            shard,
            shards,
            "",
            "builtin",
            directory,
            stacks.signal_number,
            stacks.descriptor,
        )
    )


def await_order() -> Save:
    while isinstance(order := protocol.decode(AGENT.recv(protocol.MAX_BYTES)), protocol.AskProgress):
        answer(order)
    assert isinstance(order, Save)
    return order


def save(step: int, shard: int = 0, after: str | None = None) -> None:
    """Wait for the order, play a save of `step`, and then hang as a rank in a collective does.

    after: it takes until this file is there.
    """
    order = await_order()
    if after is not None:
        wait_for(after)
    say(protocol.SaveBegun(order.save_id, RANK, step))
    say(protocol.SaveEnded(order.save_id, RANK, shard, step, f"step-{step}", 1000, 0.1))
    hang()


def fail_to_save(reason: str) -> None:
    say(protocol.SaveFailed(await_order().save_id, RANK, reason, "Traceback ..."))
    hang()


# Where this rank is: its newest collective on the world's communicator, and since when it waits there.
place: dict[str, Any] = {"sequence": 6, "seconds": None}


def report_hang(seconds: float = 2.0) -> None:
    place.update(sequence=7, seconds=seconds)
    say(protocol.Hang("world", 7, "ncclAllReduce", 4096, seconds))


def answer(question: protocol.AskProgress) -> None:
    world: Any = {"communicator": "world", "sequence": place["sequence"], "sends": [], "receives": []}
    collective: Any = {
        "communicator": "world",
        "sequence": place["sequence"],
        "operation": "ncclAllReduce",
        "bytes": 4096,
        "seconds": place["seconds"],
        "exchanges": [],
    }
    collectives = [] if place["seconds"] is None else [collective]
    say(protocol.Progress(question.question, [world | {"rank": RANK, "ranks": WORLD_SIZE}], collectives))


def answer_one() -> None:
    """Wait for a question, and answer it."""
    order = protocol.decode(AGENT.recv(protocol.MAX_BYTES))
    assert isinstance(order, protocol.AskProgress)
    answer(order)


def restore(step: int) -> None:
    say(protocol.Restored(RANK, step, f"step-{step}", 0, 0.1))
    say(protocol.FirstStep(RANK, step + 1))


def write_line(text: str) -> None:
    """Print a line in one write, so that those of several ranks don't mix."""
    os.write(1, f"{text}\n".encode())


def hang() -> None:
    time.sleep(1000)


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die(signum: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), signum)


def die_slowly(status: int) -> None:
    """Die as a process does whose memory takes for ever to be taken apart: one of its threads lives on."""
    threading.Thread(target=hang).start()
    ctypes.CDLL(None).syscall(SYS_EXIT, status)


def wait_for(path: str) -> Any:
    """Wait until another rank has made this file."""
    while not os.path.exists(path):
        time.sleep(0.005)


def wait_until_logged(event: str, times: int) -> None:
    """Wait until the agent has heard of so many: what several ranks say it may hear in any order."""
    log = Path(os.environ["JITCKPT_CHECKPOINT_DIR"], "events.jsonl")
    wait_for(str(log))
    while log.read_text().count(f'"{event}"') < times:
        time.sleep(0.005)
