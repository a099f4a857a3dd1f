"""torch's functions for state dicts (`torch.distributed.checkpoint.state_dict`), for wrapped models.

They leave the wrapper of torch's own `FullyShardedDataParallel` out of the names of parameters, and take the
state of its models as shards, whatever the state dict type is. Other wrappers are modules like any other to
them: they would look for optimizer state under other names than those under which it was saved. So the
function that makes names is wrapped, and the one that chooses the form.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fullshard.patches import Patches
from fullshard.state import full_state_dicts
from fullshard.torch_fsdp.strategies import ShardedStateDictConfig, StateDictType
from fullshard.torch_fsdp.wrapper import FullyShardedDataParallel
from fullshard.torch_fsdp.wrapper_requests import WRAPPED, Wrapper, begin, clean, wrappers_in

_patches = Patches("*")  # a script may have imported them before it imported us


def turn_on() -> None:
    """Does nothing the second time, nor for a torch without these functions."""
    module = importlib.import_module(full_state_dicts.MODULE)
    for name, make in (("_get_fqns", _without_wrappers), ("_verify_options", _as_shards)):
        if hasattr(module, name):
            _patches.replace(module, name, make)


def _without_wrappers(names_of: Callable[..., set[str]]) -> Callable[..., set[str]]:
    def names(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> set[str]:
        return {clean(each) for each in names_of(model, _with_wrappers(model, name), *args, **kwargs)}

    return names


def _with_wrappers(model: nn.Module, name: str) -> str:
    """The name by which attributes are found: a wrapper has some of its own, `module` among them."""
    owner: Any = model
    parts = []
    for part in name.split("."):
        while isinstance(owner, Wrapper) and part != WRAPPED:
            parts.append(WRAPPED)
            owner = owner._fsdp_wrapped_module
        parts.append(part)
        owner = getattr(owner, part, None)
    return ".".join(parts)


def _as_shards(verify: Callable[..., Any]) -> Callable[..., Any]:
    def verified(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wrappers = wrappers_in(model)
        for wrapper in wrappers:
            begin(wrapper)
        info = verify(model, *args, **kwargs)
        if wrappers:  # unsharded values, where they are requested, torch gathers from the shards
            config = ShardedStateDictConfig(offload_to_cpu=info.cpu_offload)
            kind = StateDictType.SHARDED_STATE_DICT
            info.fsdp_context = partial(FullyShardedDataParallel.state_dict_type, model, kind, config)
        return info

    return verified
