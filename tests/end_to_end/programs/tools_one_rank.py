import torch

import jitckpt

model = torch.nn.Linear(8, 8).to("cuda")
model.register_buffer("cache", torch.zeros(1 << 20, device="cuda"))
optimizer = torch.optim.AdamW(model.parameters())
job = jitckpt.init(model=model, optimizer=optimizer, local_state_limit=4 << 20)
for _ in range(job.restore(), 1_000_000_000):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
