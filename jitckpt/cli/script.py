"""The script in a command that may name a launcher before it."""

from pathlib import Path

LAUNCHERS = ("jitckpt run", "torchrun", "python -m torch.distributed.run")


def script_of(command: list[str]) -> list[str]:
    """Return the script with its arguments, without a launcher's name before it."""
    command = command[1:] if command[:1] == ["--"] else command
    for launcher in LAUNCHERS:
        words = launcher.split()
        if [Path(word).name for word in command[: len(words)]] == words:
            return command[len(words) :]
    return command[1:] if command[:1] and Path(command[0]).name in ("python", "python3") else command
