"""A program behind the device proxy: the same bits as without it, and no device in its process."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
SOFTGPU_PROGRAMS = Path(__file__).parents[1] / "softgpu" / "programs"
PLAIN_DDP = Path(__file__).parents[2] / "examples" / "plain_ddp.py"

Run = Callable[..., subprocess.CompletedProcess[str]]


def results(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if re.match(r"step \d+: loss|rank \d+: final", line))


def test_plain_ddp_is_the_same_bit_for_bit_and_holds_no_device(run_script: Run) -> None:
    direct = run_script(PLAIN_DDP, "--steps", "8", ranks=2, proxy=False)
    proxied = run_script(PROGRAMS / "run_and_look.py", str(PLAIN_DDP), "--steps", "8", ranks=2, proxy=True)
    assert len(results(direct.stdout)) == 10
    assert results(proxied.stdout) == results(direct.stdout)

    held = re.findall(r"^held by rank (\d): server (\d+) ?(.*)$", proxied.stdout, re.MULTILINE)
    assert sorted((rank, devices) for rank, _, devices in held) == [("0", ""), ("1", "")]
    servers = {int(server) for _, server, _ in held}
    assert len(servers) == 2
    assert 0 not in servers
    # The job has ended, and its servers with it.
    assert not [server for server in servers if Path(f"/proc/{server}").exists()]


def test_looking_finds_the_device_of_a_process_that_has_one(run_script: Run, tmp_path: Path) -> None:
    script = tmp_path / "uses_the_device.py"
    script.write_text("import torch\ntorch.ones(1, device='cuda')\n")
    direct = run_script(PROGRAMS / "run_and_look.py", str(script), ranks=0, proxy=False)
    assert "held by rank 0: server 0 libsoftgpu.so memfd:softgpu" in direct.stdout


def test_what_torch_does_beyond_a_training_step(run_script: Run) -> None:
    run_script(PROGRAMS / "calls.py", ranks=0, proxy=True)


def test_a_server_that_is_killed_in_a_minibatch_is_replaced(run_script: Run) -> None:
    script = PROGRAMS / "replaced_servers.py"
    undisturbed = run_script(script, "", ranks=0, proxy=True)
    killed = run_script(script, "1,2,4,7", ranks=0, proxy=True)
    assert len(undisturbed.stdout.splitlines()) == 9
    assert killed.stdout == undisturbed.stdout
    assert killed.stderr.count("takes over and makes its calls again") == 4


@pytest.mark.parametrize("way", ["whole", "gradients"])
def test_a_graph_is_there_in_a_server_that_replaces_another(run_script: Run, way: str) -> None:
    script = PROGRAMS / "replaced_servers_of_graphs.py"
    undisturbed = run_script(script, way, "", ranks=0, proxy=True)
    killed = run_script(script, way, "1,2,4,7", ranks=0, proxy=True)
    assert len(undisturbed.stdout.splitlines()) == 9
    assert killed.stdout == undisturbed.stdout
    assert killed.stderr.count("takes over and makes its calls again") == 4


def test_graphs_give_the_bits_of_the_eager_run(run_script: Run) -> None:
    ways = ("whole_step", "two_graphs_of_one_pool", "graphed_callables", "side_streams")
    told = run_script(SOFTGPU_PROGRAMS / "graphs.py", *ways, ranks=0, proxy=True)
    assert told.stdout.splitlines()[-1] == json.dumps({way: [] for way in ways})


def test_ranks_with_their_collectives_in_a_graph_equal_eager_ones(run_script: Run) -> None:
    run_script(SOFTGPU_PROGRAMS / "graphed_ranks.py", ranks=2, proxy=True)


def test_buckets_of_gradients_hold_nothing_between_minibatches(run_script: Run) -> None:
    told = run_script(PROGRAMS / "buckets.py", ranks=2, proxy=True)
    assert sorted(told.stdout.splitlines()) == [f"rank {rank}: as it should be" for rank in (0, 1)]
