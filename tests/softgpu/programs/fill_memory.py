"""Device memory runs out with torch's own error, and comes back."""

import torch

# torch's own retry: what it caches is freed when the device has no more.
first = torch.empty(10 << 30, dtype=torch.uint8, device="cuda")
del first
large = torch.empty(12 << 30, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_stats()["num_alloc_retries"] == 1
del large
torch.cuda.empty_cache()

blocks = []
try:
    while True:
        blocks.append(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    print(error)
free, total = torch.cuda.mem_get_info()
assert total - free >= len(blocks) << 30
blocks.clear()
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info() == (total, total)
print("freed")
