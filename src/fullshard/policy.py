"""What an integration hands in with a model: how each unit is treated, beyond the options of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.precision import Precision

Casts = tuple[torch.dtype | None, torch.dtype | None]  # of floating point inputs and outputs; None: no cast


@dataclass(frozen=True)
class UnitPolicy:
    """How one unit is treated. None stands for the options of the run."""

    precision: Precision | None = None
    stays_full: bool | None = None  # from forward to backward; None: the schedule decides
    casts: Casts | None = None
    divisor: float | None = None  # of gradient sums; None: the number of ranks that took part
    zero_unused: bool = False  # parameters that no rank used get zeros, where others of their lane were used
    direct_bytes: int | None = None  # weight gradients from this size on are written where they are sent from


@dataclass(frozen=True)
class Integration:
    """What torch's signatures, Hugging Face or Lightning need beyond the options of `fs.shard`."""

    policy_of: Callable[[nn.Module], UnitPolicy] | None = None  # called with the first module of each unit
    # An optimizer that holds parameters of the model must hold no others: they would train on one rank alone.
    exclusive_optimizers: bool = True


DEFAULT_POLICY = UnitPolicy()
NO_INTEGRATION = Integration()
