"""trl's second models (reference models, teachers), which trl would shard by itself."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from fullshard.hugging_face.patching import PATCHES
from fullshard.hugging_face.preparing import shard_model


def apply(module: ModuleType) -> None:
    """Patch trl.models.utils, once it has been imported."""
    PATCHES.replace(module, "prepare_fsdp", _prepare_fsdp)


def _prepare_fsdp(_: Any) -> Any:
    def prepare_fsdp(model: Any, accelerator: Any) -> Any:
        shard_model(accelerator, model)
        model.eval()
        return model

    return prepare_fsdp
