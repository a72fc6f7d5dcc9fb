# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import ctypes
import os
import signal

import torch
from torch import nn

proxy = ctypes.CDLL(None)
servers = set()  # type: ignore[var-annotated]


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
    return seen, [
        tensor.cpu()
        for tensor in (
            *model.state_dict().values(),
            *(value for state in optimizer.state.values() for value in state.values()),
        )
    ]


seen, state = train(())
torch.cuda.synchronize()
seen_again, state_again = train({(2, "forward"), (3, "backward"), (4, "end"), (6, "forward")})
print("equal:", seen == seen_again and all(map(torch.equal, state, state_again)), len(state))
print("servers:", len(servers))


# Errors of the script's own, the last one of a kernel. No other device would mend them.
def attempt(what):
    try:
        print(what())
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])


attempt(lambda: torch.ones(3, 5, device="cuda") @ torch.ones(4, 1, device="cuda"))
attempt(lambda: torch.empty(1 << 50, device="cuda"))
print(torch.arange(4, device="cuda").tolist())
attempt(lambda: torch.ones(4, device="cuda")[torch.tensor([9]).cuda()].item())
attempt(lambda: torch.ones(4, device="cuda").sum().item())
