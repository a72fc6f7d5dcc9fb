import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitckpt.agent.processes import spare_template, spares
from jitckpt.agent.processes.spare_template import Template
from jitckpt.system import datagrams
from jitckpt.wire.spares import Forked, NotForked
from jitckpt.worker import spare
from jitckpt.worker.spare import can_become, importable_modules

COMMAND = [sys.executable, "-u", "train.py"]


def test_only_python_with_a_script_or_module_can_be_warm() -> None:
    python = sys.executable
    assert can_become([python, "-u", "train.py"])
    assert can_become([python, "-u", "-m", "trainer", "--steps", "7"])
    assert not can_become([python, "-u", "-m"])
    assert not can_become([python, "-u", "-c", "pass"])
    assert not can_become([python, "train.py"])
    assert not can_become(["/usr/bin/python9", "-u", "train.py"])
    assert not can_become(["numactl", python, "-u", "train.py"])


def test_the_scripts_folder_comes_first() -> None:
    assert spare.first_on_path(["python", "-u", "-m", "trainer"]) == os.getcwd()
    assert spare.first_on_path(["python", "-u", "some/where/train.py"]) == os.path.join(
        os.getcwd(), "some/where"
    )


def test_modules_beside_the_script_are_not_imported_early() -> None:
    own = types.ModuleType("helpers")
    own.__file__ = os.path.join(os.getcwd(), "helpers.py")
    loaded = {"json": sys.modules["json"], "sys": sys, "helpers": own, "__main__": sys.modules["json"]}
    assert importable_modules(loaded) == ["json"]


def test_every_module_is_told_once() -> None:
    names = [f"module{number}" for number in range(1203)]
    assert [name for message in spare.imports(names) for name in message.modules] == names
    assert list(spare.imports([])) == []


def test_variables_that_came_too_late_for_the_training_stay_as_they_were() -> None:
    ours = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "libjitckpt.so"}
    theirs = {"OMP_NUM_THREADS": "4", "LD_PRELOAD": "other.so", "PYTHONHASHSEED": "3", "NCCL_DEBUG": "INFO"}
    assert spares.loading_environment(ours, theirs) == {
        "OMP_NUM_THREADS": "4",
        "LD_PRELOAD": "libjitckpt.so",
        "NCCL_DEBUG": "INFO",
    }


def test_hooks_that_depend_on_the_rank_come_with_the_order() -> None:
    assert spares.loading_environment({"JITCKPT_MODE": "transparent", "JITCKPT_STEPS_RECORD": "f"}, {}) == {}


def test_changed_variables_are_those_set_after_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_A_TEST", "1")
    assert spare.changed_environment(os.environ)["SET_BY_A_TEST"] == "1"
    assert "PATH" not in spare.changed_environment(os.environ)


def test_memory_is_known() -> None:
    assert 0 < spares.available_memory() < 1 << 60


def test_variables_are_learned_if_all_ranks_have_set_them_alike() -> None:
    assert spares.in_all([]) == {}
    assert spares.in_all([{"A": "1", "DEVICE": "0"}, {"A": "1", "DEVICE": "1"}]) == {"A": "1"}
    assert spares.in_all([{"A": "1"}, {}]) == {}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a template for which numpy is all there is of torch: it is loaded in no time."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import numpy")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    return {**os.environ, "PYTHONPATH": path}


@pytest.fixture
def template(environment: dict[str, str]) -> Iterator[Template]:
    template = Template(COMMAND, environment)
    yield template
    template.close()


@pytest.mark.parametrize(
    "answer",
    [
        *(b"no JSON", b"[]", b"[" * 90_000, b'{"pid": 7}', b'{"type": "begins"}'),
        *(
            b'{"type": "forked", "pid": %s}' % pid
            for pid in (b"1", b"-1", b"true", b'"7"', b"%d" % (1 << 70))
        ),
        b'{"type": "forked", "pid": %d}' % os.getppid(),
        b'{"type": "not_forked", "why": 7}',
    ],
)
def test_a_template_that_talks_nonsense_has_no_spares(template: Template, answer: bytes) -> None:
    os.kill(template._process.pid, signal.SIGSTOP)
    made = template.new_spare([])
    template._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.send(answer)
        template.wait_for(made)
    assert made._process is None
    assert made._failure.startswith("the process they are forked from says what makes no sense: ")


def test_a_spare_is_a_child_of_the_agents() -> None:
    child = subprocess.Popen(["true"])
    assert spare_template._process((Forked(child.pid), [])) == child.pid
    child.wait()
    assert spare_template._process((NotForked("no room"), [])) == "no room"


def test_what_can_not_be_told_is_imported_later_or_has_another_process_started(template: Template) -> None:
    too_long = "x" * datagrams.MOST_BYTES
    made = template.new_spare([f"torch.{too_long}", too_long])
    with pytest.raises(OSError, match=r"could not be told to become a worker: A message .* can be sent\.$"):
        made.become(COMMAND, {"A": too_long}, {})
    assert template.alive()


def test_nonsense_ends_neither_a_template_nor_a_spare(
    environment: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    nonsense = (b"no JSON", b"[]", b'{"import": ["os"]}', b'{"type": "import", "modules": [7]}')
    template = Template(COMMAND, environment)
    try:
        for message in (*nonsense, b'{"type": "fork"}', b'{"type": "become"}'):
            template._socket.send(message)
        made = template.new_spare([])
        for message in (*nonsense, b'{"type": "fork"}', b'{"type": "become", "environment": {"A": 1}}'):
            made._socket.send(message)
        assert made.become([*COMMAND[:2], str(script)], {}, {}).wait() == 7
    finally:
        template.close()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("jitckpt: ")]
    assert len(said) == 10
    assert {line.partition(" makes no sense: ")[0] for line in said} == {"jitckpt: a warm spare is told what"}


def test_spares_run_the_script_with_random_numbers_of_their_own(template: Template, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, numpy\n"
        "facts = [os.environ['RANK'], sys.argv[1], os.getppid(), os.getpgid(0) == os.getpid()]\n"
        "print(*facts, numpy.random.random(), file=open(sys.argv[1], 'w'))\n"
        "sys.exit(int(sys.argv[1][-1]))"
    )
    made = [template.new_spare(["json"]), template.new_spare([])]
    results = [tmp_path / "result-3", tmp_path / "result-4"]
    processes = [
        one.become([*COMMAND[:2], str(script), str(result)], {"RANK": str(rank)}, {})
        for rank, (one, result) in enumerate(zip(made, results, strict=True))
    ]
    assert [process.wait() for process in processes] == [3, 4]
    facts = [result.read_text().split() for result in results]
    numbers = {line.pop() for line in facts}
    assert facts == [[str(rank), str(results[rank]), str(os.getpid()), "True"] for rank in (0, 1)]
    assert len(numbers) == 2


def test_what_is_imported_sees_the_worker_in_whose_place_a_spare_stands(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """A trainer that is installed may look at its rank and at its arguments as soon as it is imported."""
    (tmp_path / "looks.py").write_text("import os, sys\nseen = [os.environ.get('RANK'), *sys.argv]\n")
    script, result = tmp_path / "train.py", tmp_path / "result"
    script.write_text(
        "import looks, os, sys\n"
        "print(*looks.seen, os.environ['RANK'], *sys.argv, 'GONE' in os.environ, "
        f"file=open({str(result)!r}, 'w'))"
    )
    command = [*COMMAND[:2], str(script), "--steps", "7"]
    template = Template(command, environment | {"RANK": "0"})
    try:
        was = environment | {"RANK": "1", "GONE": "soon"}
        made = template.new_spare(["looks"], command, was)
        process = made.become(command, environment | {"RANK": "0", "PWD": str(tmp_path)}, {})
        assert process.wait() == 0
    finally:
        template.close()
    told = f"{script} --steps 7"
    assert result.read_text().strip() == f"1 {told} 0 {told} False"


def test_files_named_like_modules_are_the_scripts_own_affair(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the working folder, as a checkout of jitckpt's source is, and beside the script."""
    folders = tmp_path / "working folder", tmp_path / "scripts"
    for folder in folders:
        folder.mkdir()
        for name in ("json", "queue", "random", "runpy", "socket", "jitckpt"):
            (folder / f"{name}.py").write_text("raise SystemExit(9)")
    script, result = folders[1] / "train.py", tmp_path / "result"
    script.write_text("import sys\nprint(sys.path[0], sys.argv[0], file=open(sys.argv[1], 'w'))")
    monkeypatch.chdir(folders[0])
    command = [*COMMAND[:2], str(script), str(result)]
    template = Template(command, environment)
    try:
        assert template.new_spare([]).become(command, environment, {}).wait() == 0
        assert result.read_text().strip() == f"{folders[1]} {script}"
    finally:
        template.close()


def test_a_spare_that_fails_before_its_script_begins_is_no_worker(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """What it imports may end the process: then another is started in its place, and no restart is lost."""
    (tmp_path / "ends.py").write_text("import os; os._exit(7)")
    template = Template(COMMAND, environment)
    try:
        with pytest.raises(OSError, match="could not be told to become a worker"):
            template.new_spare(["ends"]).become(COMMAND, {}, {})
    finally:
        template.close()


def test_a_template_with_threads_is_not_forked(environment: dict[str, str], tmp_path: Path) -> None:
    code = "import threading, time; threading.Thread(target=time.sleep, args=[99], daemon=True).start()"
    (tmp_path / "torch" / "__init__.py").write_text(code)
    template = Template(COMMAND, environment)
    try:
        with pytest.raises(OSError, match=r"told to become a worker: \d+ threads run in it"):
            template.new_spare([]).become(COMMAND, {}, {})
    finally:
        template.close()


def test_a_template_that_is_killed_while_it_loads_has_no_spares(template: Template) -> None:
    made = [template.new_spare([]), template.new_spare([])]
    template.close()
    assert not template.alive()
    for one in made:
        with pytest.raises(OSError, match="told to become a worker: the process they are forked from"):
            one.become(COMMAND, {}, {})


def test_a_template_that_does_not_answer_is_ended(
    template: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_template, "LOADING_SECONDS", 1e-6)
    os.kill(template._process.pid, signal.SIGSTOP)
    with pytest.raises(OSError, match="could not be told to become a worker"):
        template.new_spare([]).become(COMMAND, {}, {})
    assert not template.alive()
    with pytest.raises(OSError, match="Broken pipe"):
        template.new_spare([])


def test_what_a_stopped_template_was_forking_is_not_waited_for(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """It has the template's end of the socket, and may be stopped as well."""
    code = """
import os, signal
from pathlib import Path
forked = os.fork()
if forked:
    (Path(__file__).parent / "forked").write_text(str(forked))
os.kill(os.getpid(), signal.SIGSTOP)
"""
    (tmp_path / "torch" / "__init__.py").write_text(code)
    template = Template(COMMAND, environment)
    try:
        with pytest.raises(OSError, match="the process they are forked from is stopped by a signal"):
            template.new_spare([]).become(COMMAND, {}, {})
    finally:
        template.close()
        forked = int((tmp_path / "torch" / "forked").read_text())  # this process's child by now
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


# A torch that can be asked for the number of devices, and can't be used in children of who has asked.
ASKED = """
import os
class _C:
    asked = 0
    @staticmethod
    def _cuda_getDeviceCount():
        _C.asked = os.getpid()
        with open(os.environ["ASKED"], "a") as file: file.write(f"{os.getpid()}\\n")
        return 7
    @staticmethod
    def _cuda_isInBadFork(): return _C.asked not in (0, os.getpid())
"""
ASKS = "import torch\ncount = torch._C._cuda_getDeviceCount()\n"
TELLS = """
import os, sys, torch
from torch import asks
facts = [asks.count, torch._C._cuda_isInBadFork(), os.getpid(), torch._C._cuda_getDeviceCount()]
print(*facts, file=open(sys.argv[1], "w"))
"""


def test_a_module_that_asks_for_devices_leaves_the_device_to_the_spares(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """As torch.utils.cpp_extension and torch.cuda.is_available do."""
    (tmp_path / "torch" / "__init__.py").write_text(ASKED)
    (tmp_path / "torch" / "asks.py").write_text(ASKS)
    script, result, asked = tmp_path / "train.py", tmp_path / "result", tmp_path / "asked"
    script.write_text(TELLS)
    template = Template(COMMAND, environment | {"ASKED": str(asked)})
    try:
        made = template.new_spare(["torch.asks"])
        process = made.become(
            [*COMMAND[:2], str(script), str(result)], environment | {"ASKED": str(asked)}, {}
        )
        pid = process.pid
        assert process.wait() == 0
        assert result.read_text().split() == ["7", "False", str(pid), "7"]
        first, *_, last = map(int, asked.read_text().split())
        assert first not in (template._process.pid, pid)  # a child's
        assert last == pid  # the training itself asks
    finally:
        template.close()


def test_a_template_that_has_used_the_device_is_not_forked(
    environment: dict[str, str], tmp_path: Path
) -> None:
    code = "import os\nclass _C:\n    _cuda_getDeviceCount = _cuda_isInBadFork = staticmethod(lambda: True)\n"
    (tmp_path / "torch" / "__init__.py").write_text(code)
    template = Template(COMMAND, environment)
    try:
        with pytest.raises(OSError, match="told to become a worker: a module that it has imported has used"):
            template.new_spare([]).become(COMMAND, {}, {})
        assert template.alive()
    finally:
        template.close()


def test_a_driver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare, "ASKING_SECONDS", 0.01)
    bindings = types.SimpleNamespace(_cuda_getDeviceCount=lambda: time.sleep(600))
    count = spare._DeviceCount()
    count.in_children(types.SimpleNamespace(_C=bindings))
    with pytest.raises(RuntimeError, match="did not say how many"):
        bindings._cuda_getDeviceCount()
    count.by_itself()
    assert bindings._cuda_getDeviceCount is not count._ask_in_child
