"""A training as in docs/elastic.md, with accidents: python elastic_train.py ROOT STEPS ACCIDENTS [GUARD].

ACCIDENTS is JSON, [[step, rank, what], ...]: 'kill', 'raise', 'exit', 'stop' and 'loop' happen once, 'mark'
only says that the step is reached, 'always raise' happens in every round, 'wait FILE' waits until there is
such a file beside ROOT; 'nan' and 'spike' are batches, also where they are tried again, and 'spoil'
parameters after a step. GUARD is JSON too: the policy of an fs.Guard. Step -1 is before the model is
sharded. At the end the first rank writes the parameters to ROOT/final.pt.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fullshard as fs

SAMPLES, BATCH = 96, 12


def data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """It falls: at a constant one, thousands of steps make 0.2 of a difference in the last bit."""
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * 0.999**step


def reference(steps: int, without: frozenset[int] = frozenset()) -> list[Tensor]:
    """The parameters after a run of one process without fullshard's engine, and without some batches."""
    model, samples = new_model(), data()
    optimizer, batches = new_optimizer(model), fs.Batches(SAMPLES, BATCH, rank=0, ranks=1)
    for step in range(steps):
        if step not in without:
            inputs, targets = samples[batches.indices(step)]
            set_rate(optimizer, step)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def happen(root: Path, accidents: list[list[object]], step: int) -> None:
    time.sleep(float(os.environ.get("PACE_S", "0")))
    for at, rank, what in accidents:
        if at != step or rank != int(os.environ["RANK"]):
            continue
        if str(what).startswith("wait "):
            while not (root.parent / str(what).removeprefix("wait ")).exists():
                time.sleep(0.02)
        if what == "always raise":
            raise ValueError(f"no such luck at {id(object()):#x}")
        if what == "always kill":
            os.kill(os.getpid(), signal.SIGKILL)
        mark = root.parent / f"happened-{what}-{at}"
        if what not in ("kill", "raise", "exit", "stop", "loop", "mark") or mark.exists():
            continue
        mark.with_suffix(".new").write_text(json.dumps([time.time(), socket.gethostname()]))
        mark.with_suffix(".new").rename(mark)
        if what == "raise":
            raise ValueError("once")
        if what == "exit":
            sys.exit(3)
        while what == "loop":
            pass
        if what != "mark":
            os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)


def spoilt(accidents: list[list[object]], step: int, loss: Tensor) -> Tensor:
    kinds = [what for at, rank, what in accidents if at == step and rank == int(os.environ.get("RANK", "0"))]
    return loss * (float("nan") if "nan" in kinds else 1e4 if "spike" in kinds else 1.0)


def resumed(root: Path) -> tuple[nn.Module, torch.optim.Optimizer, fs.Batches, DataLoader[Any]]:
    """What is trained, as of the newest checkpoint."""
    model = fs.shard(new_model())
    optimizer, samples = new_optimizer(model), data()
    batches = fs.Batches(SAMPLES, BATCH)
    if path := fs.latest(root):
        batches.resume(fs.load(path, model, optimizer)["batches"])
    return model, optimizer, batches, DataLoader(samples, batch_sampler=batches)


def main(root: Path, steps: int, accidents: list[list[object]], policy: dict[str, object] | None) -> None:
    happen(root, accidents, -1)
    listens = any(what == "listens" for *_, what in accidents)  # to signals, which it does not give up again
    model, optimizer, batches, loader = resumed(root)
    guard = None if policy is None else fs.Guard(root, batches, **policy)  # type: ignore[arg-type]
    for step, (inputs, targets) in batches.steps(loader):
        if step >= steps:
            break
        happen(root, accidents, step)
        loss = spoilt(accidents, step, nn.functional.mse_loss(model(inputs), targets))
        if guard is not None and guard.rejects(loss):
            continue
        loss.backward()
        set_rate(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        if [step, 0, "spoil"] in accidents:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(float("nan"))
        if int(os.environ["RANK"]) == 0:
            print(f"trained {step} on {os.environ['WORLD_SIZE']}", flush=True)
        stop = fs.stop_requested() if listens else 0
        fs.save(root / f"step-{step}", model, optimizer, extra={"batches": batches.state()}, keep_last=3)
        if stop:
            sys.exit(128 + stop)
    with fs.full(model):
        if int(os.environ["RANK"]) == 0:
            torch.save([parameter.detach().clone() for parameter in model.parameters()], root / "final.pt")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        json.loads(sys.argv[3]),
        json.loads((sys.argv[4:] or ["null"])[0]),
    )
