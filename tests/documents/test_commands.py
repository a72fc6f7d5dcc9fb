"""Every command in README.md and docs/ runs as it is written: a page is a session in a folder of its own.

A block that is fenced as `bash` is run by bash and has to end with 0; one that is fenced as `python` with a
title is the file of that name. In the folder are `examples/` as in the repository, a small `train.py`, and a
test of CUDA code. What is not run stands in NOT_RUN, with the reason.
"""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from sybil import Document, Region, Sybil
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECONDS = 600  # for a hang; most commands take seconds

# The beginning of a command, and why it is not run here.
NOT_RUN = {
    "scripts/demo": "the whole suite runs it (tests/end_to_end/test_demo.py)",
    "scripts/test": "runs this test",
    "scripts/fault-campaign": "hours",
    "scripts/gpu/": "builds the package for a GPU's machine: minutes (tests/end_to_end/test_gpu_verify.py)",
    "scripts/bench/": "measures: minutes, and needs an idle machine",
    "python scripts/bench/": "measures: minutes, and needs an idle machine",
    "pip install .": "builds the package: minutes; scripts/setup has done it before any test runs",
    ".venv/bin/pip install": "builds the package: minutes",
    "git clone": "needs the network",
    "cmake": "builds the libraries: minutes; scripts/test does it",
    "build/release/native/": "a program of the C++ tests, which scripts/test runs",
    "LD_PRELOAD=": "without a launcher of ours the device has to be a GPU",
    "jitckpt run --standalone --nproc-per-node 2 finetune.py": "stands for a program of a framework "
    "(tests/frameworks)",
    "mkdocs serve": "serves until it is ended; scripts/test builds the site",
    "setpriv --reuid": "needs root (tests/end_to_end/test_moves_without_root.py)",
    "pgrep -fa": "looks for a job that runs meanwhile",
    "grep memfd:": "PID stands for a number",
    "jitckpt chaos": "needs a job that runs meanwhile (tests/softgpu/test_faults.py)",
    "jitckpt run --mode transparent --suspendable": "the job that is suspended",
    "jitckpt run --mode transparent --snapshot-every": "train.py stands for a script",
    "jitckpt plan snapshots job": "looks at such a job's events",
    "jitckpt suspend": "needs a job that runs meanwhile (tests/end_to_end/test_suspend.py)",
    "jitckpt resume": "needs a job that is suspended (tests/end_to_end/test_suspend.py)",
    "grep -h -e": "looks at such a job's events",
    "SOFTGPU_CONTROL=/tmp/control": "the job that jitckpt chaos disturbs",
    "jitckpt run --nnodes": "HOST stands for a host (tests/end_to_end/test_hosts.py)",
    "jitckpt run --mode transparent --nnodes": "HOST stands for a host (test_transparent_hosts.py)",
    "jitckpt verify --seed 7 --kinds kill,exception -- train.py --steps 300": "as long as the one before it",
    "jitckpt verify --device softgpu -- torchrun": "as long as the one before it",
}


def blocks(path: Path) -> list[tuple[str, str, int]]:
    """Return the fenced blocks of a page, in order: language with title, text, line."""
    sybil = Sybil(parsers=[_whole_blocks], path=str(path.parent))
    return [(*example.parsed, example.line) for example in sybil.parse(path).examples()]


def _whole_blocks(document: Document) -> list[Region]:
    lexer = FencedCodeBlockLexer(language=r"\w[^\n]*")
    regions = list(lexer(document))
    for region in regions:
        region.parsed = (region.lexemes["language"].strip(), str(region.lexemes["source"]))
        region.evaluator = lambda _example: None  # what a block does is decided here, not by Sybil
    return regions


def commands(text: str) -> list[str]:
    """Return the commands of a block, each in one piece."""
    return [line for line in re.split(r"(?<!\\)\n", text) if line.strip()]


def reason(command: str) -> str:
    """Return why the command is not run; "" if it is."""
    if "| jq " in command and shutil.which("jq") is None:
        return "there is no jq"
    return next((why for start, why in NOT_RUN.items() if command.strip().startswith(start)), "")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_commands(page: Path) -> bool:
    return any(
        language == "bash" and any(not reason(command) for command in commands(text))
        for language, text, _ in blocks(page)
    )


@pytest.fixture(autouse=True)
def quick_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all Pythons import torch in two thirds of the time."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "scripts" / "campaign_start"), prepend=os.pathsep)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader of the page would be."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(Path(__file__).with_name("train.py"), tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_cuda.py").write_text(
        'import torch\n\n\ndef test_ones() -> None:\n    assert torch.ones(3, device="cuda").sum() == 3\n'
    )
    return tmp_path


def run(command: str, folder: Path) -> tuple[int, str]:
    """Run a command as one does at a terminal; return its status and what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    process = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, said


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", [page for page in PAGES if has_commands(page)], ids=name_of)
def test_the_commands_of_a_page_run_as_written(page: Path, folder: Path) -> None:
    for language, text, line in blocks(page):
        if title := re.fullmatch(r'python title="([\w.]+)"', language):
            (folder / title[1]).write_text(text)
        for command in commands(text) if language == "bash" else []:
            if reason(command):
                continue
            status, said = run(command, folder)
            assert status == 0, f"{name_of(page)}:{line}: {command}\nended with {status}:\n{said}"


@pytest.mark.timeout(3000)
def test_a_fault_in_the_tutorial_leaves_the_losses_as_they_were(folder: Path) -> None:
    """What the tutorial promises: both runs print the same last losses."""
    page = ROOT / "docs" / "start" / "tutorial.md"
    losses = []
    for language, text, _ in blocks(page):
        if language == 'python title="train.py"':
            (folder / "train.py").write_text(text)
        if language == "bash" and "--checkpoint-dir" in text:
            status, said = run(text, folder)
            assert status == 0, said
            losses.append(dict(re.findall(r"epoch (\d): loss ([\d.]+)", said)))
    undisturbed, disturbed = losses
    assert len(undisturbed) == 3
    assert disturbed == undisturbed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_pythons_of_a_page_are_python(page: Path) -> None:
    for language, text, line in blocks(page):
        if language.startswith("python"):
            compile(text, f"{name_of(page)}:{line}", "exec")


def test_every_reason_not_to_run_is_needed() -> None:
    written = [
        command.strip()
        for page in PAGES
        for language, text, _ in blocks(page)
        if language == "bash"
        for command in commands(text)
    ]
    assert [start for start in NOT_RUN if not any(command.startswith(start) for command in written)] == []
