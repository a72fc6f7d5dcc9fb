"""What the commands say when they are called wrongly, and what they need to start."""

import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import pytest

from jitckpt.cli import COMMANDS, main
from jitckpt.cli.run_options import _secret
from jitckpt.device import LIBRARY_DIR

FOLDER = Path(__file__).parent
MOVES = ["--mode", "transparent", "--broken-device", "move"]
MEET = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=job"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the last line on stderr of a call that must end with status 2."""
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(arguments))
    assert caught.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


MEETS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fly"], "jitckpt: error: there is no command fly"),
        (["lib", "--x"], "unrecognized arguments: --x"),
        (["exec"], "there is no command to run"),
        (["exec", "--device", "tpu", "true"], "argument --device: invalid choice: 'tpu'"),
        (["exec", "--devices", "0", "true"], "argument --devices: '0' is not a whole number of at least 1"),
        (["exec", "--devices", "two", "true"], "'two' is not a whole number of at least 1"),
        (["exec", "--device", "softgpu", "no-such-program"], "no-such-program can't be run: No such file"),
        (["run"], "the following arguments are required: training_script"),
        (["run", "--no-such-flag", "x.py"], "unrecognized arguments: --no-such-flag"),
        (["run", "no-such.py"], "there is no script no-such.py"),
        (
            ["run", "--standby", "x.py"],
            "--standby: a job on one host has no other (--nnodes)",
        ),
        (["run", "--slurm", "--standby", "x.py"], "--standby: with --slurm the nodes beyond --nnodes"),
        (
            ["run", *MOVES, "--standby", "x.py"],
            "--standby: a job on one host has no other (--nnodes)",
        ),
        (
            ["run", *MOVES, "--move-wait", "9", "x.py"],
            "--move-wait goes with --broken-device move, on several",
        ),
        (
            ["run", *MEET, "--move-wait", "9", "x.py"],
            "--move-wait goes with --broken-device move, on several",
        ),
        (
            ["run", *MOVES, *MEET, "--standby", "x.py"],
            "it needs --secret-file FILE, the same on all hosts",
        ),
        (
            ["run", "--memory-tier", "parity", __file__],
            "parity needs groups of 3 hosts or more, and here are 1",
        ),
        (
            ["run", "--nnodes", "4", *MEETS, "--memory-tier", "parity=2", __file__],
            "parity needs groups of 3 hosts or more, and here a group has 2: with 2, the "
            "parity is as long as a copy; take --memory-tier peer",
        ),
        (
            ["run", "--memory-tier", "peer+optimizer", "--memory-every", "2", __file__],
            "--memory-every: with --memory-tier peer+optimizer it is 1, since other hosts need the gradients",
        ),
        (
            ["run", "--memory-tier", "parity=many", __file__],
            "'parity=many' is none of auto, off, peer, parity",
        ),
        (["run", "--run-path", "/no/such.py"], "there is no script /no/such.py"),
        (["run", "-m", "no_such_module.sub"], "there is no module no_such_module.sub"),
        (["run", "--no-python", "no-such-program"], "there is no program no-such-program"),
        (["run", "--nproc-per-node", "many", __file__], "Unsupported nproc_per_node value: many"),
        (["run", "--nproc-per-node", "0", __file__], "--nproc-per-node must be at least 1, not 0"),
        (["run", "--nnodes", "2", __file__], "--nnodes 2 needs --rdzv-backend c10d and --rdzv-endpoint"),
        (
            ["run", "--nnodes", "2", "--master-addr", "h", "--node-rank", "2", __file__],
            "--node-rank 2: with --nnodes 2 it is from 0 to 1",
        ),
        (["run", "--nnodes", "1:2", __file__], "--nnodes 1:2: the saves of a job are for its number"),
        (["run", "--nnodes", "2:4", *MEETS, __file__], "to go on with fewer: --nnodes 4 --min-hosts 2"),
        (["run", "--wait", "5", __file__], "--wait goes with --min-hosts"),
        (["run", "--min-hosts", "2", __file__], "--min-hosts: a job on one host has none to go on without"),
        (
            ["run", "--nnodes", "4", *MEETS, "--min-hosts", "1", __file__],
            "--min-hosts 1: with --nnodes 4 it is from 2 to 3. One host alone never goes on",
        ),
        (
            ["run", "--nnodes", "4", *MEETS, "--min-hosts", "3", "--mode", "transparent", __file__],
            "--min-hosts: in transparent mode a job keeps its number of ranks",
        ),
        (
            ["run", "--nnodes=4", "--rdzv-id=a", "--coordination=etcd://h:1", "--min-hosts=3", __file__],
            "--min-hosts: not with --coordination",
        ),
        (
            ["run", "--nnodes=2", "--rdzv-id=a/b", "--coordination=etcd://h:1", "--local-addr=h", __file__],
            "--rdzv-id 'a/b': the name of a job has no /",
        ),
        (["run", "--rdzv-id", "n" * 201, __file__], "is up to 200 bytes long"),
        (["run", "--nnodes", "x", __file__], "--nnodes x: it is the number of hosts, from 1 on"),
        (["run", "--nnodes", "0", __file__], "--nnodes 0: it is the number of hosts, from 1 on"),
        (["run", "--max-standby", "-1", __file__], "'-1' is no whole number from 0 on"),
        (["run", "--secret-file", "/dev/null", __file__], "/dev/null can't be read: it is no file"),
        (["run", "--secret-file", "nowhere", __file__], "nowhere can't be read: No such file"),
        (["run", "--max-restarts", "-1", __file__], "max_restarts must be >= 0"),
        (["run", "--max-restarts", "few", __file__], "argument --max-restarts"),
        (["run", "--monitor-interval", "0", __file__], "--monitor-interval must be more than 0 seconds"),
        (["run", "--save-deadline", "0", __file__], "'0' is not a number of seconds above 0"),
        (["run", "--save-deadline", "soon", __file__], "'soon' is not a number of seconds above 0"),
        (
            ["run", "--page", "9400", "--metrics", "9400", __file__],
            "--page and --metrics have one port, 9400",
        ),
        (["run", "--hang-timeout", "inf", __file__], "'inf' is not a number of seconds above 0"),
        (
            ["run", "--save-deadline", "1e300", __file__],
            "'1e300' is not a number of seconds above 0, up to 1000000",
        ),
        (["run", "--checkpoint-dir", __file__, __file__], "test_cli.py is a file, not a directory"),
        (["run", "--device", "tpu", __file__], "argument --device: invalid choice: 'tpu'"),
        (["run", "--fault", "rank=0", __file__], "argument --fault: Fault 'rank=0': step is missing."),
        (["run", "--fault", "rank=1 step=1", __file__], "the ranks are 0 to 0"),
        (
            ["run", "--device", "softgpu", "--fault", "rank=0 step=1 kind=proxy-kill", __file__],
            "only --mode transparent has a server that it could befall",
        ),
        (
            ["run", "--fault", "rank=0 step=1 phase=allreduce kind=proxy-kill", __file__],
            "goes only with kind",
        ),
        (["run", "--fault", "rank=0 step=1 kind=network-cut peer=1", __file__], "the ranks are 0 to 0"),
        (["chaos", "0", "kind=sticky"], "There is no process 0."),
        (["chaos", "/no/such", "kind=sticky"], "/no/such is neither the number of a process nor a folder."),
        (["chaos", str(FOLDER), "kind=sticky"], "No process listens in"),
        (["chaos", str(os.getpid()), "kind=sticky"], "takes no faults: start it with SOFTGPU_CONTROL=DIR"),
        (["chaos", "1", "kind=sticky\nkind=ecc"], "a fault is one line"),
        (["run", "--redirects", "9", __file__], "9 does not match"),
        (["run", "--local-ranks-filter", "a", __file__], "must be a comma-separated list of integers"),
        (["run", "--log-dir", __file__, __file__], "is a file"),
        (["run", "--signals-to-handle", "SIGFOO", __file__], "there is no signal 'SIGFOO'"),
        (
            ["run", "-m", "--no-python", "true"],
            "Don't use both the '--no-python' flag and the '--module' flag",
        ),
    ],
    ids=lambda value: " ".join(value).replace(str(os.getpid()), "PID") if isinstance(value, list) else "",
)
def test_a_wrong_call_is_explained(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    assert complaint in refused(capsys, *arguments)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o666])
def test_a_secret_that_others_can_read_is_none(
    mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(65, 97)))
    secret.chmod(mode)
    told = refused(capsys, "run", "--secret-file", str(secret), __file__)
    assert f"others can read or change {secret}: `chmod 600 {secret}`" in told
    secret.chmod(0o600)
    assert _secret(str(secret)) == bytes(range(65, 97))


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give files to others")
@pytest.mark.parametrize(
    ("mode", "group", "taken"),
    [
        (0o440, 54321, True),
        (0o640, 54321, True),
        (0o440, 1, False),
        (0o660, 54321, False),
        (0o444, 54321, False),
    ],
)
def test_a_secret_that_root_lets_a_group_read_is_one(mode: int, group: int, taken: bool) -> None:
    """A pod gets its Secret so: a file of root's, of the pod's own group."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        secret = Path(folder) / "secret"
        secret.write_bytes(bytes(range(65, 97)))
        os.chown(secret, 0, group)
        secret.chmod(mode)
        child = get_context("fork").Process(target=_read_as, args=(12345, 54321, secret))
        child.start()
        child.join()
        assert (child.exitcode == 0) == taken


def _read_as(user: int, group: int, secret: Path) -> None:
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
    assert len(_secret(str(secret))) == 32


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: jitckpt {command}" in capsys.readouterr().out


def test_all_of_torchruns_options_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.run import get_args_parser

    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    options = [option for action in get_args_parser()._actions for option in action.option_strings]
    assert len(options) > 30
    assert [option for option in options if option not in shown] == []


def test_nothing_is_left_by_a_wrong_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    refused(capsys, "run", "--nproc-per-node", "0", __file__)
    assert list(tmp_path.iterdir()) == []


def output_of(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())", *arguments]
    return subprocess.check_output(command, env=os.environ | environment, text=True, timeout=300)


def test_lib_prints_what_to_preload() -> None:
    assert output_of("lib") == f"{LIBRARY_DIR / 'libjitckpt.so'}\n"


def test_closed_standard_streams_are_no_failure() -> None:
    """As of what a daemon starts; and no file that is opened later gets their numbers."""
    program = (
        "import os, sys; from jitckpt.cli import main; status = main(['lib']); print(7, file=sys.stderr); "
        "sys.exit(status or os.open('/', os.O_RDONLY) < 3)"
    )
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-P", "-c", program]
    assert subprocess.run(command, check=False).returncode == 0


def test_exec_becomes_the_command_with_the_device() -> None:
    shown = output_of("exec", "--device", "softgpu", "--devices", "3", "--", "env")
    variables = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    assert variables["SOFTGPU_DEVICES"] == "3"
    assert variables["LD_PRELOAD"] == f"{LIBRARY_DIR / 'libjitckpt.so'}:{LIBRARY_DIR / 'libsoftgpu.so'}"
    assert variables["LD_LIBRARY_PATH"].split(":")[0] == str(LIBRARY_DIR / "driver")


def test_exec_passes_the_commands_own_options_on_and_its_status_back() -> None:
    command = [sys.executable, "-c", "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())", "exec"]
    done = subprocess.run([*command, "--device", "softgpu", "sh", "-c", "exit 7"], check=False, timeout=300)
    assert done.returncode == 7


@pytest.mark.parametrize(
    "arguments", [["lib"], ["exec", "true"], ["chaos", "--help"], ["timeline", "--help"]]
)
def test_the_small_commands_start_without_torch(arguments: list[str]) -> None:
    code = f"""
import os, sys
os.execvpe = lambda *_: None
from jitckpt.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
print(sorted(name for name in sys.modules if name in ("torch", "numpy", "cffi")))
"""
    shown = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=300)
    assert shown.splitlines()[-1] == "[]"


def test_the_package_can_be_run_as_a_module() -> None:
    called = [sys.executable, "-m", "jitckpt", "fly"]
    said = subprocess.run(called, capture_output=True, text=True, check=False)
    assert said.returncode == 2
    assert "jitckpt: error: there is no command fly" in said.stderr
