"""Copies a training's state off the device as the memory tier does; prints what that took of the device."""

import json
import os

import torch
from torch import nn

from jitckpt.tiers import host_memory
from jitckpt.worker.saving.host_copies import HostCopies
from jitckpt.worker.saving.snapshots import _Room


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3)).cuda()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.register_parameter("turned", nn.Parameter(torch.randn(128, 256, device="cuda").t()))
    model.register_parameter("small", nn.Parameter(torch.randn(999, device="cuda", dtype=torch.bfloat16)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    buffers = {name: one for name, one in model.named_buffers()}
    others = {name: one for name, one in model.named_parameters()}
    for number, state in enumerate(optimizer.state.values()):
        others |= {f"{number}.{key}": one for key, one in state.items() if one.is_cuda}
    memory = host_memory.create()
    room = _Room(memory)
    copies = HostCopies(torch.device("cuda"), lambda *_: None, lambda size: room.of(0, size), measures=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _, found = copies.begin(buffers, others)
    copies.step_begins()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    same = [name for name, one in (buffers | others).items() if torch.equal(found[name], one.cpu())]
    print(json.dumps({"before": before, "peak": peak, "after": after, "missing": len(found) - len(same)}))
    os.close(memory)


if __name__ == "__main__":
    main()
