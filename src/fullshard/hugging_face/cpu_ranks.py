"""Trainer's arguments for ranks: those without a GPU say so, and what sharded models cannot do is refused."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from fullshard.errors import NotSupported
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
        full_eval = next((n for n in ("bf16_full_eval", "fp16_full_eval") if getattr(self, n)), None)
        if self.fsdp and launch().ranks > 1 and full_eval is not None:
            # Trainer would cast the model itself, and what it trained with is gone.
            raise NotSupported(
                f"TrainingArguments with {full_eval} casts the parameters, which are sharded in their dtype",
                f"Use {full_eval[:4]}=True: evaluation computes in it, too.",
            )

    return __post_init__
