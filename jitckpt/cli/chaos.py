"""`jitckpt chaos`: order a fault from a running process whose device is softgpu."""

import os
from pathlib import Path

from jitckpt.bindings.softgpu import ChaosError, order
from jitckpt.cli.parser import Parser


def main(arguments: list[str]) -> int:
    """Order the fault, and print the process's answer. Raises ChaosError."""
    parser = Parser(
        prog="jitckpt chaos",
        description="Order a fault from a running process whose device is softgpu, and which was started "
        "with SOFTGPU_CONTROL=DIR in its environment.",
        epilog="Such as: jitckpt chaos DIR 'rank=1 kind=network-cut'. All faults: docs/reference/faults.md.",
    )
    target_help = "the process, or the folder that SOFTGPU_CONTROL names"
    parser.add_argument("target", metavar="PID|DIR", help=target_help)
    parser.add_argument("fault", help="key=value pairs with spaces between, such as 'kind=sticky call=3'")
    parsed = parser.parse_args(arguments)
    if "\n" in parsed.fault:
        parser.error("a fault is one line")
    target = parsed.target
    sockets = [_socket_of(int(target))] if target.isdecimal() else _sockets_in(Path(target))
    named = any(part.startswith("rank=") for part in parsed.fault.split())
    if len(sockets) > 1 and not named:
        pids = ", ".join(path.name for path in sockets)
        raise ChaosError(
            f"{target} is the folder of several processes ({pids}). Say which is meant with rank=, or give "
            "its number in place of the folder."
        )
    answers = [order(path, parsed.fault) for path in sockets]
    for path, (status, sentence) in zip(sockets, answers, strict=True):
        if status == "error":
            raise ChaosError(f"Process {path.name} refuses the fault: {sentence}")
        if status == "ok":
            print(f"process {path.name}: {sentence}")
    if all(status != "ok" for status, _ in answers):
        raise ChaosError(f"Nobody takes the fault: {answers[0][1]}")
    return 0


def _socket_of(pid: int) -> Path:
    """Return where the process listens."""
    process = Path("/proc") / str(pid)
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
    except FileNotFoundError:
        raise ChaosError(f"There is no process {pid}.") from None
    except OSError as error:
        raise ChaosError(f"Process {pid} is not yours to disturb: {error.strerror}.") from None
    name = b"SOFTGPU_CONTROL="
    folder = next((os.fsdecode(v.removeprefix(name)) for v in variables if v.startswith(name)), "")
    if not folder:
        raise ChaosError(
            f"Process {pid} takes no faults: start it with SOFTGPU_CONTROL=DIR in its environment, a folder "
            "for its socket."
        )
    path = process / "cwd" / folder / str(pid)
    if not path.is_socket():
        raise ChaosError(
            f"Process {pid} does not listen in {folder}: it has not used its device yet, or has no softgpu."
        )
    return path


def _sockets_in(folder: Path) -> list[Path]:
    """Return the sockets of the processes that are alive; remove those of the others."""
    if not folder.is_dir():
        raise ChaosError(f"{folder} is neither the number of a process nor a folder.")
    sockets = sorted(path for path in folder.iterdir() if path.name.isdecimal() and path.is_socket())
    alive = []
    for path in sockets:
        if (Path("/proc") / path.name).exists():
            alive.append(path)
        else:
            path.unlink(missing_ok=True)  # it was killed
    if not alive:
        raise ChaosError(
            f"No process listens in {folder}. Start one with SOFTGPU_CONTROL={folder} in its environment; it "
            "listens from its first use of the device on."
        )
    return alive
