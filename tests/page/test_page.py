"""The page in a real Chromium: a failure comes and goes, all by keyboard, and nothing serious for axe."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import CHROMIUM, LIMIT, Serve
from simulated_job import SimulatedJob

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

DESKTOP, TELEPHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


class Reader:
    """Somebody who looks at a page, and what the page asked for or complained of meanwhile."""

    def __init__(self, chromium: Any, url: str, size: tuple[int, int], theme: str) -> None:
        self.context = chromium.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=theme, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * LIMIT)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("#ranks button")

    def state(self, wanted: str) -> None:
        self.page.wait_for_function(
            "wanted => document.querySelector('#now dd').textContent === wanted", arg=wanted
        )

    def tab_to(self, selector: str) -> None:
        """Press Tab until that has the focus."""
        for _ in range(60):
            self.page.keyboard.press("Tab")
            if self.page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
        pytest.fail(f"Tab does not come to {selector}")


@pytest.fixture
def job(tmp_path: Path) -> SimulatedJob:
    job = SimulatedJob(tmp_path, ranks=4, shards=2, started=time.time() - 40)
    job.begin()
    job.at = 30
    job.progress(20)
    return job


def test_a_failure_comes_and_goes_without_a_reload(chromium: Any, serve: Serve, job: SimulatedJob) -> None:
    reader = Reader(chromium, serve(job.directory), DESKTOP, "light")
    page = reader.page
    reader.state("training")
    assert page.text_content("#now div:nth-child(2) dd") == "20"
    page.evaluate("window.sameDocument = true")
    job.at = 40
    job.fail(1, 29)
    reader.state("recovering")
    assert page.get_attribute("#ranks button[data-rank='1']", "aria-label").startswith("rank 1: failed")
    assert "rank 1 was killed by SIGKILL" in page.text_content("#said")
    assert "1 of 2 shards have no second living copy" in page.text_content("#protection")
    job.save(1, 29)
    job.begin(29)
    reader.state("training")
    page.wait_for_function("() => document.querySelectorAll('#recoveries tbody tr').length === 1")
    row = page.text_content("#recoveries tbody tr")
    assert "step 29 (just in time, 1 again)" in row
    assert "6.40" in row
    job.at = 70
    job.each("at_end")
    job.write("job_ended", outcome="succeeded")
    reader.state("succeeded")
    over = "The job is over; no rank holds its state any more. Step 29 lies whole on the disk."
    assert page.text_content("#protection") == over
    assert page.locator("#placement span").count() == 0
    assert page.evaluate("window.sameDocument")
    assert reader.complaints == []


def test_all_of_it_by_keyboard_alone(chromium: Any, serve: Serve, job: SimulatedJob) -> None:
    job.at = 40
    job.fail(1, 29, "hang")
    job.report_hang(1)
    job.save(1, 29)
    job.begin(29)
    reader = Reader(chromium, serve(job.directory), DESKTOP, "dark")
    page = reader.page
    page.wait_for_selector("#timeline [data-phase=save]", state="attached")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the job"
    page.keyboard.press("Enter")
    reader.tab_to("#dimension")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("() => document.querySelector('#ranks .row span').textContent === 'data 0'")
    reader.tab_to("#ranks button")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.text_content("#chosen").startswith("Rank 2 is training at step")
    assert "rank 0 would save it" in page.text_content("#chosen")
    reader.tab_to("#timeline")
    whole = page.text_content("#range")
    page.keyboard.press("+")
    page.keyboard.press("+")
    assert page.text_content("#range") != whole
    page.keyboard.press("ArrowRight")
    page.keyboard.press("0")
    assert page.text_content("#range").startswith("0.0 s to")
    reader.tab_to("#recoveries button")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "timeline"
    assert "rank 1 does not answer" in page.text_content("#range")
    assert page.locator("#timeline [data-phase=save]").count() > 0
    reader.tab_to("#hangs button")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.id === 'report'")
    assert "<b>lock</b>.acquire()" in page.text_content("#report")  # as text
    assert page.locator("#report b").count() == 0
    reader.tab_to("#price")
    page.keyboard.type("3600")
    assert page.text_content("#cost th:last-child") == "Cost"
    assert reader.complaints == []


def test_the_memory_tiers_placement_is_a_picture(chromium: Any, serve: Serve, tmp_path: Path) -> None:
    """Which hosts have a rank's state is seen where the rank is chosen."""
    job = SimulatedJob(tmp_path, ranks=16, shards=16, started=time.time() - 40)
    job.begin()
    reader = Reader(chromium, serve(tmp_path), DESKTOP, "light")
    page = reader.page
    assert page.is_hidden("#memory")
    job.keep_in_memory(20, ranks_of_a_host=4)
    page.wait_for_selector("#memory svg")
    titles = page.locator("#memory svg > g > title").all_text_contents()
    assert titles[2] == "host 2 (10.0.0.3) has ranks 8, 9, 10, 11, and keeps the state of hosts 2, 3"
    assert page.locator("#memory .keeps").count() == 0
    page.click("#ranks button[data-rank='5']")
    framed = page.locator("#memory g:has(.keeps) > title").all_text_contents()
    assert [one.split(" (")[0] for one in framed] == ["host 0", "host 1"]
    job.write("warning", text="the memory tier protects this job no more: a host is lost")
    page.wait_for_selector("#memory", state="hidden")
    assert reader.complaints == []


def test_the_memory_tiers_states_are_marks(chromium: Any, serve: Serve, tmp_path: Path) -> None:
    """How far each rank's snapshots are is seen at its host, and counted below."""
    job = SimulatedJob(tmp_path, ranks=8, shards=8, started=time.time() - 40)
    job.begin()
    reader = Reader(chromium, serve(tmp_path), DESKTOP, "dark")
    page = reader.page
    job.keep_in_memory(20, ranks_of_a_host=2, in_parts={3: [0, 1]})
    job.progress(21, memory_states={"0": "completed", "1": "snap", "2": "snap"})
    page.wait_for_selector("#memory .snap")
    assert page.locator("#memory svg g.snap title").first.text_content() == (
        "rank 1: snap; a snapshot is on its way to memory"
    )
    assert page.locator("#memory .marks span").all_text_contents() == [
        "= 1 completed",
        "~ 2 snap",
        "# 5 healthy",
    ]
    assert page.locator("#memory rect.part").count() == 2, "two hosts have a part of the last one's state"
    assert "broken, a part of it" in page.text_content("#memory")
    job.write("memory_state", state="offline", ranks=[6, 7], step=20)
    page.wait_for_selector("#memory svg g.offline")
    assert page.locator("#memory .marks .offline").text_content() == "X 2 offline (ranks 6, 7)"
    assert reader.complaints == []


@pytest.mark.parametrize(
    ("ranks", "look"),
    [
        (2, (DESKTOP, "light")),
        (2, (TELEPHONE, "dark")),
        (1024, (DESKTOP, "dark")),
        (1024, (TELEPHONE, "light")),
    ],
    ids=["2 ranks on a desktop", "2 on a telephone", "1024 on a desktop", "1024 on a telephone"],
)
def test_every_size_is_whole_and_nothing_serious_for_axe(
    chromium: Any, serve: Serve, tmp_path: Path, ranks: int, look: tuple[tuple[int, int], str]
) -> None:
    size, theme = look
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    job = SimulatedJob(tmp_path, ranks=ranks, shards=max(1, ranks // 128), started=time.time() - 100)
    job.begin()
    job.at = 40
    job.fail(1, 30)
    job.save(1, 30)
    job.begin(30)
    if ranks > 2:
        job.keep_in_memory(40)
    job.at = 90
    job.fail(0, 60, "hang")
    job.report_hang(0)
    reader = Reader(chromium, url := serve(tmp_path), size, theme)
    reader.state("recovering")
    page = reader.page
    page.wait_for_selector("#timeline svg rect", state="attached")
    assert page.locator("#ranks button").count() == ranks
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0], "nothing is cut off at the right"
    found = axe.Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]})
    serious = [one for one in found.response["violations"] if one["impact"] in ("serious", "critical")]
    assert serious == []
    assert all(asked.startswith(url) for asked in reader.asked), "nothing is asked for elsewhere"
    assert reader.complaints == []


def test_a_lost_connection_is_said_and_comes_back(
    chromium: Any, serve: Serve, processes: list[Any], job: SimulatedJob
) -> None:
    url = serve(job.directory)
    reader = Reader(chromium, url, DESKTOP, "light")
    lost = "() => document.getElementById('lost').textContent.includes('connection is lost')"
    server = processes.pop()
    server.terminate()
    server.communicate(timeout=LIMIT)
    reader.page.wait_for_function(lost)
    reader.page.evaluate("window.sameDocument = true")
    assert serve(job.directory, url.rstrip("/").rpartition(":")[2]) == url
    reader.page.wait_for_function(f"() => !({lost})()")
    assert reader.page.evaluate("window.sameDocument")
