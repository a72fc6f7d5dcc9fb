"""The commands around a job, on one that has really failed: verify makes it, the others look at it."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher import JITCKPT, Launcher
from programs_of_tests import text_of

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_convnet.py")


def test_a_training_is_verified_inspected_and_drawn(launcher: Launcher, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    verify = [*JITCKPT, "verify", "--device", "softgpu", "--trials", "1", "--seed", "1", "--kinds", "kill"]
    script = [
        "--warm-spares",
        "0",
        "--warm-start",
        EXAMPLE,
        "--steps",
        "6",
        "--batch",
        "4",
        "--channels",
        "4",
    ]
    verified = launcher.run(*verify, "--keep", str(kept), "--", *script)
    assert verified.status == 0, verified.out + verified.err
    assert verified.out.endswith("\n1 of 1\n")
    assert not (tmp_path / "ckpt").exists(), "the script's own directory is not touched"

    checkpoints = str(kept / "trial-1" / "ckpt")
    inspected = launcher.succeed(*JITCKPT, "inspect", "--verify", "--json", checkpoints)
    found = json.loads(inspected)
    timeline = launcher.run(*JITCKPT, "timeline", "--json", checkpoints)
    (recovery,) = json.loads(timeline.out)["jobs"][0]["recoveries"]
    assert found["restart"] == recovery["step"] in range(1, 6)
    assert [load["rank"] for load in found["loads"]] == [0, 1]
    assert all(load["local"] for load in found["loads"])


def test_a_script_that_jitckpt_does_not_protect_is_told_so(launcher: Launcher) -> None:
    script = launcher.script("print('step 1 of 1')")
    refused = launcher.run(*JITCKPT, "verify", "--device", "softgpu", "--nproc-per-node", "1", "--", script)
    assert refused.status == 2
    assert "was not under jitckpt's protection on every rank" in refused.err
    assert "step 1 of 1" in refused.err


ONE_RANK = text_of("tools_one_rank")


def test_the_doctor_finds_what_has_no_second_copy(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script(ONE_RANK)
    examined = launcher.run(
        *JITCKPT, "doctor", "--json", "--device", "softgpu", "--nproc-per-node", "1", "--", script
    )
    assert examined.status == 1, examined.err
    rows = json.loads(examined.out)["rows"]
    assert {row["check"]: row["state"] for row in rows}["library"] == "ok"
    problems = {row["check"]: row["found"] for row in rows if row["state"] == "problem"}
    assert sorted(problems) == ["rank-local state", "replicas"]
    assert problems["replicas"].startswith("rank 0's shard 0 (")
    assert problems["rank-local state"] == "rank 0 keeps no copy of buffers.cache"
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"], "nothing is left"


# Of both ranks, and of no other process of the job.
CONNECTED = text_of("tools_connected")


def test_the_doctor_names_what_keeps_processes_from_being_moved(launcher: Launcher, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "plain_ddp.py"
    command = [*JITCKPT, "doctor", "--json", "--device", "softgpu", "--mode", "transparent", "--"]
    kept: list[socket.socket] = []
    with (
        socket.socket(socket.AF_UNIX) as daemon,
        socket.create_server(("127.0.0.1", 0)) as outside,
        ThreadPoolExecutor(1) as pool,
    ):
        daemon.bind(str(tmp_path / "daemon"))
        daemon.listen()
        pool.submit(lambda: kept.extend(daemon.accept()[0] for _ in range(2)))
        port = str(outside.getsockname()[1])
        script = launcher.script(CONNECTED)
        examined = launcher.run(*command, script, port, str(example), "--steps", "1000000")
    for one in kept:
        one.close()
    rows = [row for row in json.loads(examined.out)["rows"] if row["check"] in ("script", "moves")]
    assert rows[0]["found"] == "2 ranks ran a minibatch again, bit for bit", examined.err
    here = [row["found"] for row in rows[1:] if "anew" in row["advice"]]
    where = tmp_path / "daemon"
    assert here == [f"rank 0, 1: python has a socket at {where} whose other end is a process's of its own"]
    there = [row["found"] for row in rows[1:] if "another host" in row["advice"]]
    assert there == [
        f"rank 0, 1: python has a TCP connection to 127.0.0.1:{port}",
        f"rank 0, 1: python has {tmp_path}/large open to write, 100.0 MB on a disk of this host",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "daemon", "log", "large"}
    plain = launcher.run(*command, str(example), "--steps", "1000000")
    (row,) = [row for row in json.loads(plain.out)["rows"] if row["check"] == "moves"]
    assert row["state"] == "ok", row
