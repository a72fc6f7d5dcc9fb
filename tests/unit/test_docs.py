"""README.md and docs/ stay short where they are read, agree with their records, and link to what is there."""

import json
import re
from pathlib import Path

import docs_tables
import pytest
from torch.distributed.run import get_args_parser

from jitckpt.cli import COMMANDS
from jitckpt.cli.run_options import run_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LONGEST_CELL = 120  # characters
README_WORDS = 900
LINK = re.compile(r"(?<!`)\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def cells(line: str) -> list[str]:
    """Return the cells of a table's row; a bar behind a backslash is part of one."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_cell_of_a_table_is_a_paragraph(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in cells(row) if len(cell) > LONGEST_CELL] == []


def test_a_long_cell_is_seen() -> None:
    assert [len(cell) for cell in cells(f"| a\\|b | {'x' * 121} |")] == [4, 121]


def test_the_readme_is_read_in_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= README_WORDS
    maturity = text.split("\n\n")[2]
    assert "seen on a GPU" in maturity
    assert text.partition("## Measured")[2].partition("\n## ")[0].count("\n| ") == 2 + 5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_links_to_is_there(page: Path) -> None:
    targets = [target.partition("#")[0] for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_every_page_is_in_the_sites_navigation() -> None:
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_words_are_found_where_one_looks_for_them() -> None:
    words = re.findall("^### (.*)$", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert words == sorted(words, key=str.casefold)


def test_every_command_has_its_line_in_the_reference() -> None:
    index = (DOCS / "reference" / "index.md").read_text()
    assert [command for command in COMMANDS if f"[jitckpt {command}](" not in index] == []


@pytest.mark.parametrize("name", docs_tables.TABLES)
def test_tables_say_what_the_records_say(name: str) -> None:
    path, text = docs_tables.page(name)
    assert path.read_text() == text, "python scripts/docs_tables.py writes it anew"


def test_one_campaign_of_each_mode_is_the_newest() -> None:
    newest = [row["mode"] for row in docs_tables.records("campaigns.jsonl") if row["newest"]]
    assert sorted(newest) == sorted(docs_tables.MODES)


@pytest.mark.parametrize("path", sorted((DOCS / "data").glob("*.jsonl")), ids=lambda path: path.name)
def test_records_are_alike(path: Path) -> None:
    """One JSON object a line, all with the same keys."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows
    assert {tuple(row) for row in rows} == {tuple(rows[0])}


def test_tests_that_proofs_name_are_there() -> None:
    named = {
        name
        for row in docs_tables.records("proofs.jsonl")
        for name in re.findall(r"tests/\w+/test_\w+\.py", row["command"])
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_reference_names_all_of_our_options_and_all_events_of_snapshots() -> None:
    pages = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    torchs = {word for action in get_args_parser()._actions for word in action.option_strings}
    ours = {word for action in run_parser()._actions for word in action.option_strings} - torchs
    assert [word for word in sorted(ours) if word.startswith("--") and word not in pages] == []
    written = {
        name
        for path in (ROOT / "jitckpt").rglob("*.py")
        for name in re.findall(r"log\.write\(\s*\"(\w*snapshot\w*)\"", path.read_text())
    }
    timeline = (DOCS / "reference" / "timeline.md").read_text()
    assert "snapshot_copied" in written
    assert [name for name in sorted(written) if name not in timeline] == []
