"""Ends while the device has work queued for longer than the program lives."""

import torch

matrix = torch.ones(512, 512, device="cuda")
for _ in range(300):
    matrix = (matrix @ matrix) / 512
