"""torch's functions for full state dicts, over values that are cut between elements.

`get_model_state_dict(..., full_state_dict=True)` and its relatives gather tensors of the classes that torch
knows to be sharded, and pass on all others. The one function in which they do so is wrapped, so that it
receives our values unsharded, one at a time. So what `set_model_state_dict(..., broadcast_from_rank0=True)`
sends are full values, which `load_state_dict` cuts. It sends memory as it lies, to ranks that take it for
contiguous: the function that sends is wrapped, too, so that values in channels-last order arrive as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fullshard.comm.groups import own_rank
from fullshard.patches import Patches

MODULE, _FUNCTION = "torch.distributed.checkpoint.state_dict", "_gather_state_dict"
_SENDING_MODULE, _SENDING = "torch.distributed._state_dict_utils", "_broadcast_tensors"  # of MODULE's
_patches = Patches("*")  # a script may have imported it before it imported us


def follow_torch(shard: type[Any]) -> bool:
    """Once a script has imported torch's functions, which takes a second, they gather `shard`s too.

    These have a method `full_tensor`, which all ranks call in the same order. A torch without the function
    passes them on, and they refuse to be saved: False.
    """
    module = sys.modules.get(MODULE)
    if module is None or not hasattr(module, _FUNCTION):
        return False
    _patches.replace(module, _FUNCTION, partial(_gather_too, shard))
    sending = sys.modules.get(_SENDING_MODULE)
    if sending is not None and hasattr(sending, _SENDING):
        _patches.replace(sending, _SENDING, _send_contiguous)
    return True


def _gather_too(shard: type[Any], gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        ranks_only = kwargs.get("ranks_only", ())
        keep = not ranks_only or own_rank() in ranks_only
        to_host = bool(kwargs.get("cpu_offload", False))
        return gather(_gathered(state_dict, shard, keep, to_host), *args, **kwargs)

    return gathered


def _send_contiguous(send: Callable[..., None]) -> Callable[..., None]:
    def sent(full_state_dict: dict[str, Any], local: Any, keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            if isinstance(full_state_dict[key], torch.Tensor):  # on the first rank; others know the shape
                full_state_dict[key] = full_state_dict[key].contiguous()
        send(full_state_dict, local, keys, *args, **kwargs)

    return sent


def _gathered(value: Any, shard: type[Any], keep: bool, to_host: bool) -> Any:
    """Every rank takes part in every gather; without `keep` this rank drops the values."""
    if isinstance(value, shard):
        full = value.full_tensor()
        if not keep:
            return full.new_empty(0)
        return full.cpu() if to_host else full
    if isinstance(value, dict):
        return {key: _gathered(item, shard, keep, to_host) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_gathered(item, shard, keep, to_host) for item in value)
    return value
