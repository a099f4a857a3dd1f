"""A model on its way through accelerate: sharded in place, and shown to the libraries as they expect it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from fullshard.api import shard
from fullshard.comm.control import end_groups_at_exit
from fullshard.engine.runtime import is_sharded, runtime_of
from fullshard.errors import NotSupported, StateError
from fullshard.hugging_face import asked
from fullshard.hugging_face.whole_state import count, is_adapter, saved_state
from fullshard.model_libraries.transformers import IN_STEP
from fullshard.state.state_dict import StateShard


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
    end_groups_at_exit()  # accelerate starts them, and leaves them open
    shard(model, **said)
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


def _save_pretrained(model: Any, *args: Any, **said: Any) -> None:
    """With `is_main_process` every rank is here, and the one that writes gets the whole state.

    Without it one rank may have come alone, and would wait for the others.
    """
    save = type(model).save_pretrained
    said |= zip(list(inspect.signature(save).parameters)[1:], args, strict=False)
    if said.get("state_dict") is not None or not _rests(model):
        save(model, **said)
        return
    if "is_main_process" not in said:
        raise StateError(
            "save_pretrained got neither the state dict of the sharded model nor word that all ranks call it",
            "Call it on every rank, with is_main_process=accelerator.is_main_process; or give it "
            "state_dict=accelerator.get_state_dict(model), which every rank calls.",
        )
    with saved_state(model, keep=said["is_main_process"]) as state:
        if said["is_main_process"]:
            save(model, **(said | {"state_dict": state}))


def _rests(model: nn.Module) -> bool:
    """Whether parameters hold this rank's elements now; inside `with full(model)` they are whole."""
    return any(isinstance(value, StateShard) for value in model.state_dict().values())


def _peft_counts(model: nn.Module) -> tuple[int, int]:
    """What peft's print_trainable_parameters shows: what trains, and all."""
    return count(model, only_trainable=True), count(model)


def _merge(model: Any, name: str, *args: Any, **said: Any) -> Any:
    if _rests(model):
        raise NotSupported(
            f"{name} of a sharded model: each rank holds other elements of the adapter than of its base",
            "Save the adapter, and merge it where the base model is whole: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload().",
        )
    return getattr(model.base_model, name)(*args, **said)


def _refuse_adapter(*_: Any, **__: Any) -> None:
    raise NotSupported(
        "add_adapter on a sharded model: each rank would train the new parameters for itself",
        "Add all adapters before the model is prepared.",
    )


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
