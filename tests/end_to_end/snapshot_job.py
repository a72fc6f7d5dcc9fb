"""The training that goes back to snapshots: two ranks that go as far as they are let."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from final_lines import finals
from launcher import JITCKPT_RUN, Launcher, Result

from jitckpt.events import FILE_NAME, Event, read_events
from jitckpt.wire import environment

# Plain DDP with a process that loads the data, pinned memory, a log, and a thread that counts in the job's
# store. It makes as many steps as the file `upto` says, and waits there for more.
SCRIPT = """
import hashlib, os, threading, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 30

class Data(Dataset):
    def __init__(self, rank): self.rank = rank
    def __len__(self): return 8 * STEPS
    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(1000 * self.rank + i))
        return x, int(x[:4].argmax())

def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, over, added = dist.get_rank(), False, 0
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          wait_for_workers=False, timeout=timedelta(seconds=600))

    def count():
        nonlocal added
        while not over:
            added += 1
            assert store.add(f"count-{rank}", 1) == added
            time.sleep(0.01)

    thread = threading.Thread(target=count)
    thread.start()
    log = open(f"log-{rank}", "a")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    total = 0.0
    loader = DataLoader(Data(rank), batch_size=8, num_workers=LOADERS, pin_memory=True)
    for step, (x, y) in enumerate(loader, 1):
        while int(Path("upto").read_text() or 0) < step:
            time.sleep(0.01)
        loss = F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        print(step, loss.item(), file=log, flush=True)
        Path(f"step-{rank}").write_text(str(step))
    over = True
    thread.join()
    sha = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *(
            value for state in optimizer.state.values() for value in state.values())):
        sha.update(tensor.cpu().numpy().tobytes())
    sha.update(torch.get_rng_state().numpy().tobytes())
    print(f"rank {rank}: {sha.hexdigest()} {total!r}\\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()

main()
"""
STEPS = 30
EVERY = 0.01  # minutes
KILL = "rank=1 step=11 phase=backward kind=kill"


class Job:
    """Two ranks that go as far as they are let."""

    _ranks = range(2)

    def __init__(
        self,
        launcher: Launcher,
        *words: str,
        program: str = "",
        loaders: int = 0,
        script: str = SCRIPT,
        ranks: int = 2,
    ) -> None:
        self._ranks = range(ranks)
        self.launcher, self.folder = launcher, launcher.directory / "checkpoints"
        self._path = launcher.script(script.replace("LOADERS", str(loaders)))
        self.go_to(0)
        command = [
            *JITCKPT_RUN,
            "--nproc-per-node",
            str(ranks),
            "--device",
            "softgpu",
            "--mode",
            "transparent",
        ]
        command += ["--checkpoint-dir", str(self.folder)]
        command += ["--snapshot-every", str(EVERY)] if program else []
        variables = [f"SOFTGPU_DEVICES={ranks}", *([f"{environment.CRIU.name}={program}"] if program else [])]
        self.process = launcher.start("env", *variables, *command, *words, self._path)
        self.result = Result(-1, "", "")

    def go_to(self, step: int) -> None:
        new = self.launcher.directory / "upto.new"
        new.write_text(str(step))
        new.replace(self.launcher.directory / "upto")

    def wait_for(self, event: str, count: int = 1) -> Event:
        """Return the count-th event of that name, once it is there."""

        def is_there() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return len(self.events(event)) >= count

        self.launcher.wait_until(is_there)
        return self.events(event)[count - 1]

    def snapshot(self) -> Event:
        """Let the ranks come to the first snapshot, and return it once it is whole."""
        self.go_to(5)  # which is validated
        assert self.wait_for("snapshot_wanted")["step"] == 8
        self.go_to(9)  # the next one is wanted behind the twelfth
        return self.wait_for("snapshot")

    def lose(self) -> None:
        """Have all of its processes killed at one time, as with their container."""
        for pid in self.launcher.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        self.launcher.wait_until(lambda: not self.launcher.survivors())

    def finish(self) -> Result:
        self.go_to(STEPS)
        self.result = self.launcher.finish(self.process)
        assert self.launcher.survivors() == [], self.result.err
        return self.result

    @property
    def finals(self) -> list[str]:
        return finals(self.result.out)

    @property
    def logs(self) -> list[str]:
        return [(self.launcher.directory / f"log-{rank}").read_text() for rank in self._ranks]

    def events(self, name: str) -> list[Event]:
        if not (self.folder / FILE_NAME).exists():
            return []
        return [event for event in read_events(self.folder)[0] if event["event"] == name]


def undisturbed_training(folder: Path, ranks: int = 2) -> list[str]:
    """Return what the training ends with of which nobody makes a snapshot."""
    job = Job(Launcher(folder), ranks=ranks)
    job.go_to(STEPS)
    assert job.finish().status == 0
    return [*job.finals, *job.logs]


@contextlib.contextmanager
def in_memory(folder: Path, size: str = "3g") -> Iterator[Path]:
    """Make a folder in memory, for a job's directory: a busy disk would take minutes."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
