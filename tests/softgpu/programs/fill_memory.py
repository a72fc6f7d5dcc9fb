"""Device memory runs out with torch's own error, and comes back."""

import torch

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
