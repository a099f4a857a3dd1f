"""trl's second models (references, teachers), which it shards itself: by us as well."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from fullshard.hugging_face.accelerators import tried
from fullshard.hugging_face.preparing import shard_model
from fullshard.hugging_face.seams import replace_function


def apply(module: ModuleType) -> None:
    """To trl.models.utils, when it has been imported."""
    if tried("trl"):
        replace_function(module, "prepare_fsdp", _prepare_fsdp)


def _prepare_fsdp(_: Any) -> Any:
    def prepare_fsdp(model: Any, accelerator: Any) -> Any:
        shard_model(accelerator, model)
        model.eval()
        return model

    return prepare_fsdp
