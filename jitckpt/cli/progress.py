"""What shows on a terminal that something goes on, and is gone at its end."""

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def shown_progress(*columns: ProgressColumn) -> Progress:
    """Return a display of progress on stderr; where that is no terminal it writes not even an empty line."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
