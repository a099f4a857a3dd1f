"""The optimizer and its learning rate: AdamW that decays matrices only, a rate from the step alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from fullshard.training.settings import Training


def make_adamw(model: nn.Module, said: Training, device: torch.device) -> torch.optim.AdamW:
    """Norms and biases do not decay: pulling them to zero regularises nothing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": said.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=said.learning_rate,
        betas=(said.betas[0], said.betas[1]),
        eps=said.eps,
        fused=device.type == "cuda",
    )


def learning_rate(step: int, said: Training) -> float:
    """Of a step, counted from 0: up in a line, then by the schedule down to the final part.

    A function of the step, where a scheduler object would be one more thing to save and put back.
    """
    if step < said.warmup_steps:
        return said.learning_rate * (step + 1) / said.warmup_steps
    if said.schedule == "constant":
        return said.learning_rate
    progress = min(1.0, (step - said.warmup_steps) / max(1, said.steps - said.warmup_steps))
    left = 1 - progress if said.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return said.learning_rate * (said.final_learning_rate + (1 - said.final_learning_rate) * left)
