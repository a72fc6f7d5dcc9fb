"""What a newcomer types: help that is sorted, mistakes that are named, output that is never cut off."""

import errno
import json
import os
import pty
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table
from simulated_job import SimulatedJob

from jitckpt import cli
from jitckpt.cli import COMMANDS, GROUPS, main, run_options, steps
from jitckpt.cli.plan import TIERS
from jitckpt.cli.tables import show
from jitckpt.planning.cluster import EXAMPLE
from jitckpt.planning.plan import USUAL_POLICIES

CALL = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.toml"
    file.write_text(EXAMPLE)
    return file


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a wrong call says; it is one line, and the status 2."""
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(arguments))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said


def test_help_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    titles = [f"\n{title}:\n" for title in GROUPS]
    assert [shown.count(title) for title in titles] == [1] * len(titles)
    assert sorted(titles, key=shown.index) == titles
    assert all(f"\n  {name:12}" in shown for name in COMMANDS)


def test_runs_own_options_come_before_torchruns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    ours, theirs = capsys.readouterr().out.split("torchrun's options, which mean the same here:")
    assert "--checkpoint-dir DIR" in ours
    assert "--fault SPEC" in ours
    assert "\n  --nnodes" not in ours
    assert "\n  --nnodes" in theirs
    assert "--checkpoint-dir" not in theirs


def test_run_takes_both_kinds_of_options() -> None:
    parsed = run_options.run_parser().parse_args(
        ["--nnodes", "2", "--save-deadline", "7", "train.py", "--steps", "3"]
    )
    assert (parsed.nnodes, parsed.save_deadline, parsed.max_restarts) == ("2", 7.0, 3)
    assert (parsed.training_script, parsed.training_script_args) == ("train.py", ["--steps", "3"])


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["rnu"], "there is no command rnu; did you mean run?"),
        (["--verison"], "did you mean --version?"),
        (["timelime", "ckpt"], "did you mean timeline?"),
        (["run", "--chekpoint-dir", "ckpt", "train.py"], "did you mean --checkpoint-dir?"),
        (["run", "--nproc-pre-node", "2", "train.py"], "did you mean --nproc-per-node?"),
        (["inspect", "--verifi", "."], "did you mean --verify?"),
        (["run", "--mode", "transparant", "train.py"], "did you mean transparent?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_was_probably_meant_is_named(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meant in told(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments", [["xyzzy"], ["timeline", "--picture", "x"], ["timeline", "--html", "x"]]
)
def test_what_is_like_nothing_gets_no_guess(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The dashes, which all options have, make none of them alike."""
    assert "did you mean" not in told(capsys, *arguments)


def test_who_names_no_command_is_shown_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"\n  {name:12}" in shown for name in COMMANDS)


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_misspelt_policy_is_named(command: str, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, command, str(cluster), "--policy", "periodic=6h+user-jitt")
    assert "there is no tier 'user-jitt'; did you mean user-jit?" in said


def test_every_usual_policy_is_made_of_the_tiers() -> None:
    assert {part.partition("=")[0] for text in USUAL_POLICIES for part in text.split("+")} == set(TIERS)


def test_a_policy_that_does_not_fit_the_cluster_says_why(
    cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(capsys, "plan", str(cluster), "--policy", "gemini=2")
    assert "gemini=2 cannot run here: " in said
    assert "the number of replicas must be from 1 to the number of machines, 1" in said


def test_a_log_that_is_not_there_is_named(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = told(capsys, "simulate", str(cluster), "--policy", "periodic", "--failures", "no-such.csv")
    assert "--failures no-such.csv can't be read: No such file or directory" in said


@pytest.mark.parametrize("command", ["plan", "lib"])
def test_a_reader_that_has_enough_is_no_error(command: str, cluster: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*CALL, command, *([str(cluster)] if command == "plan" else [])],
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
            timeout=300,
        )
    finally:
        os.close(writing)
    assert done.stderr == b""


def test_what_prints_a_table_prints_json_too() -> None:
    printing = re.compile(r"import .*\b(Table|table|rows|view)$", re.MULTILINE)
    folder = Path(cli.__path__[0])
    files = {name: [folder / f"{name}.py", *folder.glob(f"{name}_table.py")] for name in COMMANDS}
    sources = {name: "".join(file.read_text() for file in of) for name, of in files.items()}
    tables = {name for name, source in sources.items() if printing.search(source)}
    assert {"timeline", "inspect", "doctor", "plan", "simulate", "verify", "watch"} <= tables
    assert [name for name in tables if '"--json"' not in sources[name]] == []


def test_progress_is_for_terminals(cluster: Path, tmp_path: Path) -> None:
    """What takes long says so while it lasts, and where nobody looks nothing is said at all."""
    job = SimulatedJob(tmp_path, ranks=2, shards=1, started=0.0)
    job.begin()
    ways = {
        "comparing": ["plan", str(cluster)],
        "simulating": ["simulate", str(cluster), "--policy", "periodic=1h", "--days", "3"],
        "looking": ["inspect", str(tmp_path)],
        "reading": ["inspect", "--verify", str(tmp_path)],
        "reading the events": ["timeline", str(tmp_path)],
    }
    for said, arguments in ways.items():
        quiet = subprocess.run([*CALL, *arguments], capture_output=True, check=False, timeout=300)
        assert quiet.stderr == b"", arguments
        ours, theirs = pty.openpty()
        terminal = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
        subprocess.run(
            [*CALL, *arguments], stdout=subprocess.PIPE, stderr=theirs, env=terminal, check=False, timeout=300
        )
        shown = os.read(ours, 1 << 16).decode()
        os.close(theirs)
        os.close(ours)
        assert said in shown, arguments
        assert shown.endswith("\x1b[2K"), "and takes it away again"


def test_doctor_shows_progress_on_a_terminal_alone(tmp_path: Path) -> None:
    """And its document stays alone on stdout."""
    call = [*CALL, "doctor", "--device", "softgpu", "--json"]
    ours, theirs = pty.openpty()
    terminal = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
    shown = subprocess.run(
        call, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, env=terminal, check=False, timeout=300
    )
    assert b"looking at this machine" in os.read(ours, 1 << 16)
    os.close(theirs)
    os.close(ours)
    quiet = subprocess.run(call, cwd=tmp_path, capture_output=True, check=False, timeout=300)
    assert quiet.stderr == b""
    assert [json.loads(one.stdout).keys() for one in (shown, quiet)] == [{"rows", "host", "status"}] * 2


@pytest.mark.parametrize("name", ["jit-table8", "gemini-fig9"])
def test_a_papers_table_is_not_wider_than_a_page(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "reproduce", name]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert rows
    assert max(map(len, rows)) <= 120


def test_where_a_table_is_too_wide_nothing_is_cut_off() -> None:
    table = Table("policy", "wasted share", "recovery\na failure", title="Policies")
    table.add_row("user-jit+gemini+periodic", "0.075%", "4.9 min")
    narrow, wide = (Console(width=width, record=True, file=StringIO()) for width in (30, 80))
    for console in (narrow, wide):
        show(console, table)
    said = " ".join(narrow.export_text().split())
    assert said == "Policies user-jit+gemini+periodic wasted share 0.075%, recovery a failure 4.9 min"
    assert "┃" in wide.export_text()


def test_steps_leaves_the_real_checkpoint_directory_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments = []

    def started(_command: list[str], env: dict[str, str], **_other: object) -> SimpleNamespace:
        environments.append(env)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr("subprocess.run", started)
    with pytest.raises(steps.StepsError):
        steps._run(["train.py"], 1, "softgpu", tmp_path, None)
    assert Path(environments[0]["JITCKPT_REHEARSAL_DIR"]).is_relative_to(tmp_path)


def test_a_command_that_cant_be_loaded_says_so_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own modules and torch's are thousands of files, and a machine may have no descriptor left."""

    def fail(name: str) -> ModuleType:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), f"{name}.py")

    monkeypatch.setattr("jitckpt.cli.import_module", fail)
    assert main(["run", "train.py"]) == 1
    said = capsys.readouterr().err
    assert "jitckpt: `jitckpt run` can't be loaded, so nothing was started" in said
    assert "Too many open files" in said
