"""What of torch watches over collectives does not end a process while its job recovers."""

from launcher import JITCKPT_RUN, Launcher

from jitckpt.events import read_events

# Rank 1's next server is stopped as soon as it is there: the recovery lasts until it goes on.
SCRIPT = """
import contextlib, ctypes, os, signal, sys, time
from pathlib import Path
import torch
from torch import distributed as dist, nn

STOPPED, SILENT = 12, 6  # seconds; torch finds after at most so many that its watchdog is stuck

def stop_next_server(parent, server):
    found = []
    while not found and os.getppid() == parent:
        for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                name, *words = Path(f"/proc/{process}/cmdline").read_text().split("\\0")
                if "proxy-server" in name and words[0] == str(parent) and process != server:
                    os.kill(process, signal.SIGSTOP)
                    found.append(process)
                    Path("stopped").touch()
    time.sleep(STOPPED)
    for child in found:
        os.kill(child, signal.SIGCONT)

rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.AdamW(model.parameters())
longest = 0.0
for step in range(1, 9):
    if step == 6 and rank == 1:
        server = ctypes.CDLL(None).jitckpt_proxy_server()
        if os.fork() == 0:
            try:
                stop_next_server(os.getppid(), server)
            finally:
                os._exit(0)
    while step == 8 and rank == 1 and not Path("stopped").exists():
        time.sleep(0.01)  # where that comes late, it is this step that lasts
    began = time.monotonic()
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    loss.item()
    longest = max(longest, time.monotonic() - began)
said = f"rank {rank}: a step took longer than the watchdog may be silent: {longest > SILENT}"
print(f"{said}\\n", end="", flush=True)
dist.destroy_process_group()
"""


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
