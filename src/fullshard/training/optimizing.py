"""The optimizer and its learning rate: AdamW that decays matrices only, a rate from the step alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from fullshard.training.settings import Training


def make_adamw(model: nn.Module, training: Training, device: torch.device) -> torch.optim.AdamW:
    """Norms and biases do not decay: pulling them to zero regularises nothing."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(training.betas[0], training.betas[1]),
        eps=training.eps,
        fused=device.type == "cuda",
    )


def learning_rate(step: int, training: Training) -> float:
    """For a step, counted from 0: linear warm-up, then by the schedule down to the final fraction.

    A function of the step: a scheduler object would be one more thing to save and restore.
    """
    if step < training.warmup:
        return training.learning_rate * (step + 1) / training.warmup
    if training.schedule == "constant":
        return training.learning_rate
    progress = min(1.0, (step - training.warmup) / max(1, training.steps - training.warmup))
    left = 1 - progress if training.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return training.learning_rate * (training.final_learning_rate + (1 - training.final_learning_rate) * left)
