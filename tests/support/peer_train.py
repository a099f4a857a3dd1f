"""The training of elastic_train.py, which saves to disk once, and then in memory.

python peer_train.py ROOT STEPS ACCIDENTS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import fullshard as fs
from elastic_train import happen, resumed, set_rate


def main(root: Path, steps: int, accidents: list[list[object]]) -> None:
    model, optimizer, batches, loader = resumed(root)
    for step, (inputs, targets) in batches.steps(loader):
        if step >= steps:
            break
        happen(root, accidents, step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        set_rate(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        if int(os.environ["RANK"]) == 0:
            print(f"trained {step} on {os.environ['WORLD_SIZE']}", flush=True)
        state = {"batches": batches.state()}
        fs.save(root / f"step-{step}", model, optimizer, extra=state, peers=int(step > 0)).wait()
        if int(os.environ["RANK"]) == 0:
            print(f"saved {step}", flush=True)
    with fs.full(model):
        if int(os.environ["RANK"]) == 0:
            torch.save([parameter.detach().clone() for parameter in model.parameters()], root / "final.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
