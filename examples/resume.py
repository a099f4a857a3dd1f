"""Training that resumes exactly: stop it at any moment, even with kill -9, and start it again.

python examples/resume.py
torchrun --standalone --nproc-per-node 2 examples/resume.py
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fullshard as fs

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output/resume")

inputs = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(inputs, inputs.flip(1))
batches = fs.Batches(len(dataset), batch_size=48, epochs=5)  # the batch size over all ranks
loader = DataLoader(dataset, batch_sampler=batches)

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)))
model = fs.shard(model.append(nn.Linear(64, 64)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches))
torch.manual_seed(dist.get_rank())  # each rank drops out different values
first = dist.get_rank() == 0

if path := fs.latest(ROOT):
    extra = fs.load(path, model, optimizer)  # restores the random number generators, too
    scheduler.load_state_dict(extra["scheduler"])
    batches.resume(extra["batches"])
if first:
    print(f"resumed from {path}" if path else f"no checkpoint in {ROOT} yet: starting from step 0")

for step, (features, targets) in batches.steps(loader):
    loss = nn.functional.mse_loss(model(features), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if first and step % 10 == 9:
        print(f"step {step:3}  loss {loss.item():.9f}", flush=True)
    if step % 20 == 19:
        extra = {"scheduler": scheduler.state_dict(), "batches": batches.state()}
        fs.save(ROOT / f"step-{step}", model, optimizer, extra=extra, keep_last=2)

dist.destroy_process_group()
