"""What the tests of torch.distributed.checkpoint folders share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import engines
import reference

KEYS = ("exp_avg", "exp_avg_sq")
Whole = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]  # model; optimizer state by parameter and key


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1, "lr": 3e-3}, {"params": others}], lr=1e-2, amsgrad=False
    )


def our_whole(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Whole:
    """Everything of ours, whole: state goes by way of the parameters, p <- state, then fs.full."""
    import fullshard as fs

    values = engines.whole("fullshard", model)
    values |= {n: b.clone() for n, b in model.named_buffers()}
    states: dict[str, dict[str, Tensor]] = {n: {} for n, _ in model.named_parameters()}
    if optimizer is None:
        return values, {}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for key in KEYS:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(optimizer.state[p][key])
        with fs.full(model, writeback=False):
            for n, value in reference.whole_parameters(model).items():
                states[n][key] = value
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(before[n])
            states[n]["step"] = optimizer.state[p]["step"].clone()
    return values, states


def quietly(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is no process group
        return call(*args, **options)
