"""A script that knows nothing of jitckpt lives on when its device's server is killed."""

from launcher import JITCKPT, Launcher

# Trains twice, once undisturbed; `place` says where in which step the server is killed: before the backward
# pass, before the optimizer's step, after it.
SCRIPT = """
import ctypes, os, signal
import torch
from torch import nn

proxy = ctypes.CDLL(None)
servers = set()

def train(kills):
    def place(step, where):
        servers.add(proxy.jitckpt_proxy_server())
        if (step, where) in kills:
            os.kill(proxy.jitckpt_proxy_server(), signal.SIGKILL)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    running = torch.zeros((), device="cuda")
    seen = []
    for step in range(1, 8):
        loss = model(torch.randn(4, 8).cuda()).square().mean()
        place(step, "forward")
        optimizer.zero_grad()
        loss.backward()
        place(step, "backward")
        optimizer.step()
        place(step, "end")
        running += loss.detach()
        seen.append((loss.item(), running.item()))
    return seen, [tensor.cpu() for tensor in (*model.state_dict().values(), *(
        value for state in optimizer.state.values() for value in state.values()))]

seen, state = train(())
torch.cuda.synchronize()
seen_again, state_again = train({(2, "forward"), (3, "backward"), (4, "end"), (6, "forward")})
print("equal:", seen == seen_again and all(map(torch.equal, state, state_again)), len(state))
print("servers:", len(servers))
"""


def test_a_killed_server_is_only_a_pause(launcher: Launcher) -> None:
    command = [*JITCKPT, "run", "--standalone", "--nproc-per-node", "1", "--device", "softgpu"]
    script = launcher.script(SCRIPT)
    result = launcher.run(*command, "--mode", "transparent", "--warm-spares", "0", script)
    assert result.status == 0, result.err
    assert "equal: True 27" in result.out, result.out
    assert "servers: 5" in result.out, result.out
    assert result.err.count("the program goes on") == 4
    assert "switched off" not in result.err
