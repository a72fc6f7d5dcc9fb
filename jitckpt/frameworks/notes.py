"""Small notes of a framework's training in the checkpoint directory, which a restart reads."""

import json
import os
from pathlib import Path
from typing import Any

from jitckpt.errors import CheckpointError


def read(path: Path) -> Any:
    """Return what is noted there, None if nothing is. Raises CheckpointError if it is damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} can't be read ({error}), and a restart goes by it. If the script is as it was when the "
            "job began, remove it; else choose another checkpoint directory."
        ) from error


def write(path: Path, content: Any) -> None:
    """Note this in the place of what is noted there; hosts that share the directory may do so at once."""
    new = path.with_suffix(f".{os.environ.get('RANK', '0')}.new")
    new.write_text(json.dumps(content))
    new.replace(path)
