"""Progress bars around a loader, which iterate it for the script."""

from types import FrameType

# Their generators count nothing of the script's.
PROGRESS_BARS = ("tqdm", "rich", "progressbar", "alive_progress")


def is_in_one(frame: FrameType) -> bool:
    """Whether it runs a progress bar's code."""
    return str(frame.f_globals.get("__name__", "")).startswith(PROGRESS_BARS)


def makes_one(frame: FrameType) -> bool:
    """Whether a bar asks as it is made: tqdm.auto's does, and then draws from another iterator."""
    return is_in_one(frame) and frame.f_code.co_name == "__init__"
