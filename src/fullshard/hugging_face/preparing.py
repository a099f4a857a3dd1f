"""A model on its way through accelerate: sharded in place, and shown to the libraries as they expect it."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from fullshard.engine import runtime_of, shard
from fullshard.hugging_face import asked
from fullshard.hugging_face.whole_state import count, is_sharded


def engaged(accelerator: Any) -> bool:
    """FSDP was asked for, so this accelerator's models are ours."""
    state = accelerator.state
    return state.distributed_type == "FSDP" and getattr(state, "fsdp_plugin", None) is not None


def shard_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """The same object, sharded. Its class keeps its name: Hugging Face writes it into `architectures`."""
    if is_sharded(model):
        return model
    said = asked.shard_arguments(accelerator, model)
    asked.cast_buffers(accelerator.state.fsdp_plugin, model)
    shard(model, device=accelerator.device, **said)
    for module in model.modules():
        if hasattr(type(module), "generate"):
            module.__dict__["_is_fsdp_managed_module"] = True  # ranks go on generating until all are done
        if hasattr(type(module), "num_parameters"):
            module.__dict__["num_parameters"] = functools.partial(_num_parameters, module)
    _compile(accelerator, model)
    return model


def _num_parameters(module: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """transformers counts this rank's elements, and Trainer's count of operations comes from it."""
    embeddings = [f"{name}.weight" for name, m in module.named_modules() if isinstance(m, nn.Embedding)]
    return count(module, only_trainable, frozenset(embeddings if exclude_embeddings else ()))


def _compile(accelerator: Any, model: nn.Module) -> None:
    """Block by block: a graph of the whole model would have our gathers in it."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend.value == "NO":
        return
    units = runtime_of(model).units
    for unit in units[1:] or units:
        for module in unit.modules:
            module.compile(**plugin.to_kwargs())


def torch_optimizer(optimizer: Any) -> Any:
    """What accelerate wrapped."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def trains(optimizer: Any, model: nn.Module) -> bool:
    mine = {id(p) for p in model.parameters()}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
