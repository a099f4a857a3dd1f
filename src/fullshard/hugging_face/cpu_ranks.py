"""Scripts written for GPUs, on ranks that have none: Trainer's arguments say so for them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from fullshard.hugging_face.accelerators import tried
from fullshard.hugging_face.seams import replace_method
from fullshard.world import launch


def apply(module: ModuleType) -> None:
    """To transformers.training_args, when it has been imported."""
    if tried("transformers"):
        replace_method(module.TrainingArguments, "__post_init__", _post_init)


def _post_init(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        # Without `use_cpu` each rank would take itself for the only one, and Trainer refuse FSDP for that.
        if self.fsdp and launch().ranks > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        original(self)

    return __post_init__
