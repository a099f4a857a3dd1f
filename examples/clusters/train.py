"""A training that a scheduler may stop at any step, and that goes on where it stopped, on any ranks.

fullshard launch examples/clusters/train.py --folder runs/cluster
"""

import argparse
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fullshard as fs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="checkpoints; all hosts must reach it")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.0, help="at least, to try things out")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = fs.shard(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    batches = fs.Batches(len(data), batch_size=32)
    loader = DataLoader(data, batch_sampler=batches, num_workers=arguments.workers)

    if path := fs.latest(arguments.folder):
        batches.resume(fs.load(path, model, optimizer)["batches"])
    for step, (inputs, targets) in batches.steps(loader):
        if step >= arguments.steps:
            break
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(arguments.step_s)
        if os.environ.get("RANK", "0") == "0":
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        stop = fs.stop_requested()
        if stop or (step + 1) % arguments.save_every == 0:
            extra = {"batches": batches.state()}
            fs.save(f"{arguments.folder}/step-{step:06}", model, optimizer, extra=extra, keep_last=2)
        if stop:
            sys.exit(128 + stop)


if __name__ == "__main__":
    main()
