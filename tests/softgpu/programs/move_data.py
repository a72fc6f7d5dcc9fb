"""Copies of all kinds, in order over streams and devices, equal what they started from."""

import torch
from torch.utils.data import DataLoader, TensorDataset

values = torch.arange(100_000, dtype=torch.float32)
there = values.to("cuda")
assert torch.equal(there.cpu(), values)

pinned = values.pin_memory()
assert pinned.is_pinned()
assert not values.is_pinned()

stream = torch.cuda.Stream()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
back = torch.empty_like(pinned).pin_memory()
with torch.cuda.stream(stream):
    start.record()
    copy = pinned.to("cuda", non_blocking=True)
    neighbour = copy.to("cuda:1", non_blocking=True)
    back.copy_(neighbour, non_blocking=True)
    end.record()
end.synchronize()
assert end.query()
assert start.elapsed_time(end) > 0
torch.cuda.synchronize("cuda:1")  # whose own stream has made the copy to `back`
assert torch.equal(back, values)

torch.cuda.current_stream().wait_stream(stream)
columns = copy.reshape(100, 1000)[:, 10:20].contiguous()
assert torch.equal(columns.cpu(), values.reshape(100, 1000)[:, 10:20])

dataset = TensorDataset(values.reshape(-1, 10))
rows = [
    batch.to("cuda", non_blocking=True)
    for (batch,) in DataLoader(dataset, 1000, num_workers=2, pin_memory=True)
]
assert torch.equal(torch.cat(rows).cpu().flatten(), values)

torch.cuda.synchronize()
print("all equal")
