# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import torch
from torch import nn

import jitckpt

model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(model=model, optimizer=optimizer)
job.restore()


def figures():
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    cumulated = [f"{one}.all.allocated" for one in ("allocation", "segment", "allocated_bytes")]
    free = torch.cuda.mem_get_info()[0]
    return [*(stats[one] for one in cumulated), stats["reserved_bytes.all.current"], free]


snapshots = job._protection._savers.snapshots  # type: ignore[union-attr]
found = {}  # type: ignore[var-annotated]
for step in range(1, 17):
    before, newest = figures(), snapshots._newest  # type: ignore[union-attr]
    model(torch.ones(16, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    change = [after - one for after, one in zip(figures(), before)]
    if step > 8:
        found.setdefault(snapshots._newest > newest, set()).add(tuple(change))  # type: ignore[union-attr]
print("changes", found.pop(True) == found.pop(False) and not found, flush=True)
