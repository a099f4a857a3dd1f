"""A model that accelerate prepares: sharded in place, with the methods that the libraries expect of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any

from torch import nn

from fullshard import api
from fullshard.comm.control import end_groups_at_exit
from fullshard.engine.runtime import is_sharded, runtime_of
from fullshard.errors import NotSupported, StateError
from fullshard.hugging_face import request
from fullshard.hugging_face.unsharded_state import is_adapter, saved_state
from fullshard.model_libraries.transformers import IN_STEP
from fullshard.policy import NO_INTEGRATION
from fullshard.state.sizes import UnshardedSizes
from fullshard.state.state_dict import StateShard


def uses_fsdp(accelerator: Any) -> bool:
    """FSDP was requested, so the models of this accelerator are sharded by us."""
    state = accelerator.state
    return state.distributed_type == "FSDP" and getattr(state, "fsdp_plugin", None) is not None


def shard_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """The same object, sharded. Its class keeps its name: Hugging Face writes it into `architectures`."""
    if is_sharded(model):
        return model
    arguments = request.shard_arguments(accelerator, model)
    request.cast_buffers(accelerator.state.fsdp_plugin, model)
    end_groups_at_exit()  # accelerate starts them and leaves them open
    api.shard_with(NO_INTEGRATION, model, **arguments)
    for module in model.modules():
        if hasattr(type(module), "generate"):
            module.__dict__[IN_STEP] = True  # ranks continue generating until all are done
        if hasattr(type(module), "num_parameters"):
            module.__dict__["num_parameters"] = functools.partial(_num_parameters, module)
        if hasattr(type(module), "save_pretrained") and (module is model or not is_adapter(module)):
            module.__dict__["save_pretrained"] = functools.partial(_save_pretrained, module)
    if is_adapter(model):
        model.__dict__["get_nb_trainable_parameters"] = functools.partial(_peft_counts, model)
        for name in ("merge_and_unload", "merge_adapter"):
            if hasattr(model, name):
                model.__dict__[name] = functools.partial(_merge, model, name)
        model.__dict__["add_adapter"] = _refuse_adapter
    _compile(accelerator, model)
    return model


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    """With `is_main_process` every rank calls it, and the one that writes gets the unsharded state.

    Without it one rank may have called alone, and would wait for the others.
    """
    save = type(model).save_pretrained
    kwargs |= zip(list(inspect.signature(save).parameters)[1:], args, strict=False)
    if kwargs.get("state_dict") is not None or not _is_at_rest(model):
        save(model, **kwargs)
        return
    if "is_main_process" not in kwargs:
        raise StateError(
            "save_pretrained of a sharded model got neither state_dict= nor is_main_process=, so it is not "
            "known whether all ranks call it",
            "Call it on every rank, with is_main_process=accelerator.is_main_process; or give it "
            "state_dict=accelerator.get_state_dict(model), which every rank calls.",
        )
    with saved_state(model, keep=kwargs["is_main_process"]) as state:
        if kwargs["is_main_process"]:
            save(model, **(kwargs | {"state_dict": state}))


def _is_at_rest(model: nn.Module) -> bool:
    """Whether parameters hold this rank's elements now; inside `with full(model)` they are unsharded."""
    return any(isinstance(value, StateShard) for value in model.state_dict().values())


def count(model: nn.Module, only_trainable: bool = False, exclude: Collection[str] = ()) -> int:
    """Elements of a sharded model's parameters, over all ranks."""
    return UnshardedSizes(model).total(
        p
        for name, p in model.named_parameters()
        if name not in exclude and (p.requires_grad or not only_trainable)
    )


def _peft_counts(model: nn.Module) -> tuple[int, int]:
    """For peft's print_trainable_parameters: trainable elements, and all."""
    return count(model, only_trainable=True), count(model)


def _merge(model: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if _is_at_rest(model):
        raise NotSupported(
            f"{name} of a sharded model: each rank holds other elements of the adapter than of its base",
            "Save the adapter, and merge it where the base model is not sharded: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload().",
        )
    return getattr(model.base_model, name)(*args, **kwargs)


def _refuse_adapter(*_: Any, **__: Any) -> None:
    raise NotSupported(
        "add_adapter on a sharded model: each rank would train the new parameters for itself",
        "Add all adapters before the model is prepared.",
    )


def _num_parameters(module: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """transformers' own counts this rank's elements, and Trainer's count of operations depends on it."""
    embeddings = {f"{name}.weight" for name, m in module.named_modules() if isinstance(m, nn.Embedding)}
    return count(module, only_trainable, embeddings if exclude_embeddings else ())


def _compile(accelerator: Any, model: nn.Module) -> None:
    """Block by block: a graph of the entire model would contain our gathers."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend.value == "NO":
        return
    runtime = runtime_of(model)
    blocks = [module for module in model.modules() if runtime.unit_of(module) not in (None, runtime.root)]
    for module in blocks or [model]:
        module.compile(**plugin.to_kwargs())


def torch_optimizer(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def trains(optimizer: Any, model: nn.Module) -> bool:
    parameters = {id(p) for p in model.parameters()}
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])
