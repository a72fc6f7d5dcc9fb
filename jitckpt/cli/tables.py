"""Tables that are never cut off: where the screen is too narrow, each row becomes a paragraph."""

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH_OF_FILES = 200  # nothing is folded where no screen is too narrow
_UNLIMITED = Console(width=100_000)


def show(console: Console, table: Table) -> None:
    """Print the table, or, where it is wider than the screen, its rows as paragraphs."""
    if Measurement.get(_UNLIMITED, _UNLIMITED.options, table).maximum <= console.width:
        console.print(table)
        return
    if table.title is not None:
        console.print(Text(str(table.title), style="italic"))
    headings = [_in_a_line(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        first, *others = map(_in_a_line, row)
        console.print(Text(first, style="bold"))
        said = (f"{name} {cell}".strip() for name, cell in zip(headings[1:], others, strict=True) if cell)
        console.print(Padding(Text(", ".join(said)), (0, 0, 0, 4)))


def _in_a_line(cell: object) -> str:
    return " ".join(str(cell).split())
