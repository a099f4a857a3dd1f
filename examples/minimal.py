"""The shortest sharded training loop.

python examples/minimal.py
torchrun --standalone --nproc-per-node 2 examples/minimal.py
"""

import torch
import torch.distributed as dist
from torch import nn

import fullshard as fs

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
model = fs.shard(model)  # the only new line
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(dist.get_rank())  # each rank draws its own data
for step in range(201):
    inputs = torch.randn(64, 64)
    loss = nn.functional.mse_loss(model(inputs), inputs.flip(1))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step:3}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}")

dist.destroy_process_group()
