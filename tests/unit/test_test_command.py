"""scripts/test runs all there is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_folder_of_tests_is_run() -> None:
    folders = re.search(r"^for folder in (.*); do$", (ROOT / "scripts" / "test").read_text(), re.MULTILINE)
    assert folders is not None
    assert set(folders[1].split()) == {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
