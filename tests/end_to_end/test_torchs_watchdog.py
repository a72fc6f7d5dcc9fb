"""What of torch watches over collectives does not end a process while its job recovers."""

from launcher import JITCKPT_RUN, Launcher
from programs_of_tests import text_of

from jitckpt.events import read_events

# Rank 1's next server is stopped as soon as it is there: the recovery lasts until it goes on.
SCRIPT = text_of("torchs_watchdog")


def test_the_watchdog_hears_of_no_failure_and_waits_for_none(launcher: Launcher) -> None:
    directory = launcher.directory / "checkpoints"
    command = [*JITCKPT_RUN, "--nproc-per-node", "2", "--device", "softgpu", "--mode", "transparent"]
    command += ["--warm-spares", "0", "--checkpoint-dir", str(directory)]
    # With the collective under way, which the watchdog asks for again and again.
    command += ["--fault", "rank=1 step=6 phase=allreduce kind=sticky"]
    variables = ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=2", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=100"]
    out = launcher.succeed("env", "JITCKPT_PROXY_SPARE=0", *variables, *command, launcher.script(SCRIPT))
    for rank in (0, 1):
        line = f"rank {rank}: a step took longer than the watchdog may be silent: True"
        assert line in out.splitlines(), out
    named = [event["event"] for event in read_events(directory)[0]]
    assert "recovered" in named
    assert not {"restart", "recovery_given_up"} & set(named)
