"""A small model, trained by fullshard, by torch's FSDP2 and unsharded on the ranks of a job, to compare.

What one GPU cannot show: several ranks over this cluster's own links.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard as fs
from fullshard.comm.groups import own_rank, rank_count
from fullshard.comm.plain_group import PlainGroup
from fullshard.doctor.tolerances import rounding, tolerance
from fullshard.training.gpt import GPT, GPTConfig, initialise

_STEPS = 4
_BATCH = 2
_SMALL = GPTConfig(num_layers=2, num_heads=4, width=64, context=32, vocabulary=128)
_LARGE = GPTConfig(num_layers=12, num_heads=12, width=768, context=512, vocabulary=8192)


def beside_fsdp2(device: torch.device, group: PlainGroup) -> dict[str, Any]:
    """Losses of the global batch, and milliseconds per step, of each engine. All ranks must call it."""
    config = _LARGE if device.type == "cuda" else _SMALL
    model = GPT(config)
    initialise(model, seed=0)
    model = model.to(device)
    steps = _STEPS if device.type == "cpu" else 3 * _STEPS
    run = partial(_trained, config, device, steps, group)
    found: dict[str, Any] = {"model": f"GPT, {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M, fp32"}
    expected, _ = run(copy.deepcopy(model), _averaged(group))
    for name, engine in (("fullshard", fs.shard), ("FSDP2", _fsdp2)):
        twin = copy.deepcopy(model)
        try:
            losses, step_s = run(engine(twin), lambda _: None)
        except (RuntimeError, ImportError) as error:
            found[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            continue
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        found[name] = {"losses": losses, "apart": apart, "step_ms": step_s * 1e3}
    found["allowed"] = tolerance(rounding(torch.float32), 100 * steps)
    found["unsharded losses"] = expected
    return found


def _fsdp2(model: nn.Module) -> nn.Module:
    from fullshard.tools.simulation.rivals import fsdp2

    kind = next(model.parameters()).device.type
    fsdp2(model, init_device_mesh(kind, (rank_count(),)), compute=None, reduce=None)
    return model


def _averaged(group: PlainGroup) -> Callable[[nn.Module], None]:
    """The mean of gradients over ranks, by plain sums on the host."""

    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(group.sum(parameter.grad) / group.ranks)

    return average


def _trained(
    config: GPTConfig,
    device: torch.device,
    steps: int,
    group: PlainGroup,
    model: nn.Module,
    average: Callable[[nn.Module], None],
) -> tuple[list[float], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses, times = [], []
    for step in range(steps):
        dice = torch.Generator().manual_seed(1000 * step + own_rank())
        shape = (_BATCH, config.context + 1)
        tokens = torch.randint(0, config.vocabulary, shape, generator=dice).to(device)
        begun = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(group.sum(loss.detach().double().cpu()) / group.ranks))
        times.append(time.perf_counter() - begun)
    return losses, median(times[1:])
