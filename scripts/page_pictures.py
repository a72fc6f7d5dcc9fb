"""Makes the pictures of docs/guides/watching.md: the page in Chromium, `jitckpt watch` in a terminal.

    .venv/bin/python scripts/page_pictures.py [FOLDER]

The jobs are simulated: their events are those that agents write (tests/simulated_job.py).
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from simulated_job import SimulatedJob  # noqa: E402

from jitckpt.reports.following import Follower  # noqa: E402
from jitckpt.reports.live import view  # noqa: E402

WATCH = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())", "watch"]
DESKTOP, TELEPHONE = (1180, 860), (390, 800)
# Name, ranks, shards, whether in a recovery, size, theme: all but the theme in all combinations.
PICTURES = (
    ("page-2-ranks", 2, 1, False, DESKTOP, "light"),
    ("page-2-ranks-recovering", 2, 1, True, DESKTOP, "dark"),
    ("page-1024-ranks", 1024, 8, False, DESKTOP, "light"),
    ("page-1024-ranks-recovering", 1024, 8, True, DESKTOP, "dark"),
    ("page-telephone", 1024, 8, False, TELEPHONE, "dark"),
    ("page-telephone-recovering", 2, 1, True, TELEPHONE, "light"),
    ("page-telephone-2-ranks", 2, 1, False, TELEPHONE, "dark"),
    ("page-telephone-1024-ranks-recovering", 1024, 8, True, TELEPHONE, "light"),
)


def job(folder: Path, ranks: int, shards: int, recovering: bool) -> None:
    """Write the events of a job with a kill and a hang behind it, and maybe a second kill just now."""
    now = 131.0
    made = SimulatedJob(folder, ranks=ranks, shards=shards, started=time.time() - now)
    made.begin()
    made.at = 44
    made.fail(1, 39)
    made.save(1, 39)
    made.begin(39)
    made.at = 90
    made.fail(0, 80, "hang")
    made.report_hang(0)
    made.save(0, 80)
    made.begin(80)
    made.at = now - 1
    made.progress(110)
    if recovering:
        made.fail(1, 110)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the page; give its address."""
    process = subprocess.Popen([*WATCH, str(folder), "--page", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate()


def take_page(browser: Any, size: tuple[int, int], theme: str, file: Path) -> None:
    """Take a picture of what the browser shows first."""
    with served(Path("ckpt")) as url:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=theme, device_scale_factor=1
        )
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector("#timeline svg rect", state="attached")
        page.wait_for_function("() => document.querySelectorAll('#timeline svg text').length > 3")
        page.screenshot(path=str(file))
        context.close()


def in_memory(folder: Path) -> None:
    """Write the events of a job without replicas, whose state sixteen hosts keep for each other."""
    made = SimulatedJob(folder, ranks=128, shards=128, started=time.time() - 60.0)
    made.begin()
    made.at = 59
    states = {str(rank): "snap" if rank // 8 % 3 == 1 else "completed" for rank in range(128)}
    made.progress(51, memory_states=states)
    made.keep_in_memory(50)
    made.write("memory_state", state="unhealthy", ranks=[19], step=50)
    made.write("memory_state", state="offline", ranks=list(range(56, 64)), step=50)


def take_placement(browser: Any, file: Path) -> None:
    """Take a picture of which host keeps whose state, with a rank chosen."""
    with served(Path("ckpt")) as url:
        page = browser.new_page(viewport={"width": DESKTOP[0], "height": DESKTOP[1]}, color_scheme="light")
        page.goto(url)
        page.click("#ranks button[data-rank='21']")
        page.wait_for_selector("#memory .keeps")
        page.locator("#memory").screenshot(path=str(file))
        page.close()


def take_terminal(file: Path) -> None:
    """Write what `jitckpt watch` shows as a picture."""
    follower = Follower(Path("ckpt"))
    follower.look()
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=100, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(view(follower.present(), None, "", 100))
    file.write_text(console.export_svg(title="jitckpt watch ckpt"))


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    target = parser.parse_args().folder.absolute()
    target.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("page_pictures: there is no chromium; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, ranks, shards, recovering, size, theme in PICTURES:
            folder = Path(temporary) / name
            folder.mkdir()
            os.chdir(folder)
            job(Path("ckpt"), ranks, shards, recovering)
            take_page(browser, size, theme, target / f"{name}.png")
        (folder := Path(temporary) / "memory").mkdir()
        os.chdir(folder)
        in_memory(Path("ckpt"))
        take_placement(browser, target / "page-memory.png")
        browser.close()
        os.chdir(Path(temporary) / "page-2-ranks")
        take_terminal(target / "watch.svg")
        os.chdir(ROOT)


if __name__ == "__main__":
    main()
