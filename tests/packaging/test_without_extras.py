"""Where only what jitckpt depends on is installed, each option that needs more says what to install.

The environment is real: a folder with all that is installed here but for the packages of the extras, and a
Python that knows no other (-S: no site-packages).
"""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from simulated_job import SimulatedJob

ROOT = Path(__file__).parents[2]
MAIN = "import sys, jitckpt.cli; sys.exit(jitckpt.cli.main())"
LIMIT = 240  # seconds, for a hang
OF_EXTRAS = ("prometheus_client", "starlette", "uvicorn", "opentelemetry", "matplotlib", "boto3", "botocore",
             "urllib3", "yaml")  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What PYTHONPATH is there."""
    folder = tmp_path_factory.mktemp("installed")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for found in Path(place).iterdir():
            if found.name not in OF_EXTRAS and found.suffix != ".pth":
                (folder / found.name).symlink_to(found)
    ours = [
        one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if (Path(one) / "jitckpt").is_dir()
    ]
    return os.pathsep.join([*ours, str(folder)])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    job = SimulatedJob(tmp_path / "ckpt", ranks=2, shards=1, started=0.0)
    job.begin()
    job.fail(1, 10)
    job.save(1, 10)
    (tmp_path / "train.py").write_text("print('trained')\n")
    return tmp_path


def call(directory: Path, path: str, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    variables = {
        name: text for name, text in os.environ.items() if not name.startswith(("JITCKPT_", "OTEL_"))
    }
    return subprocess.run(
        [sys.executable, "-S", "-c", MAIN, *arguments],
        cwd=directory,
        env=variables | {"PYTHONPATH": path} | more,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )


KUBERNETES = ("kubernetes", "--image", "x", "--nodes", "2", "--gpus", "8", "--memory", "64",
              "--claim", "saves", "--", "train.py")  # fmt: skip
RUN = ("run", "--standalone", "--device", "softgpu")


@pytest.mark.parametrize(
    ("arguments", "said", "extra"),
    [
        ((*RUN, "--metrics", "0", "train.py"), "--metrics needs prometheus_client", "metrics"),
        ((*RUN, "--page", "0", "train.py"), "--page needs starlette and uvicorn", "page"),
        (("watch", "ckpt", "--page", "0"), "--page needs starlette and uvicorn", "page"),
        (("timeline", "ckpt", "--plot", "picture.png"), "pictures need matplotlib", "plot"),
        (KUBERNETES, "manifests need a library", "kubernetes"),
        (("inspect", "s3://bucket/job"), "needs the package boto3", "s3"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_the_option_says_what_to_install(
    directory: Path, path: str, arguments: tuple[str, ...], said: str, extra: str
) -> None:
    done = call(directory, path, *arguments)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert said in last
    [named] = re.findall(r"pip install '?jitckpt\[([a-z0-9]+)\]", last)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert named == extra in extras
    assert "Traceback" not in done.stderr
    assert "trained" not in done.stdout, "nothing has begun"


def test_what_needs_no_extra_works(directory: Path, path: str) -> None:
    for command in (["watch", "ckpt"], ["watch", "--json", "ckpt"], ["timeline", "ckpt"],
                    ["timeline", "--json", "--trace", "trace.json", "ckpt"]):  # fmt: skip
        done = call(directory, path, *command)
        assert (done.returncode, done.stderr) == (0, ""), command


def test_a_collector_that_can_not_be_told_stops_no_training(directory: Path, path: str) -> None:
    """OpenTelemetry's variables may be there for the training's own sake."""
    done = call(
        directory,
        path,
        *RUN,
        "--nproc-per-node",
        "1",
        "train.py",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
    )
    assert (done.returncode, "trained" in done.stdout) == (0, True), done.stderr
    [said] = [line for line in done.stderr.splitlines() if "pip install" in line]
    assert said.endswith("pip install 'jitckpt[spans]'.")
