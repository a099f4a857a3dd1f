"""torch's functions for state dicts and `distribute_tensor`, for values that are cut between elements.

`get_model_state_dict(..., full_state_dict=True)` and its relatives gather tensors of the classes that torch
knows to be sharded, and `set_model_state_dict(..., full_state_dict=True)` cuts full ones by rows. The one
function in which each does so is wrapped: the first gets our values unsharded, one at a time; the second
passes full values on, which `load_state_dict` cuts. `distribute_tensor` cuts as our placement says.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from fullshard.comm.groups import own_rank
from fullshard.patches import Patches
from fullshard.plan.tensor_parallel import is_cut
from fullshard.state.state_dict import StateShard
from fullshard.torch_fsdp import dtensors

_patches = Patches("*")  # a script may have imported them before it imported us


def turn_on() -> None:
    """Does nothing the second time. To a torch without these functions our values are no DTensors."""
    points = {
        "torch.distributed.checkpoint.state_dict._gather_state_dict": _gather_ours_too,
        "torch.distributed._state_dict_utils._distribute_tensors": _pass_on_full_values,
        "torch.distributed.tensor._api.distribute_tensor": _distribute_by_elements,
    }
    for path, make in points.items():
        module, _, name = path.rpartition(".")
        try:
            owner = importlib.import_module(module)
            _patches.replace(owner, name, make)
        except (ImportError, KeyError):
            dtensors.Answers.to_isinstance = False


def _gather_ours_too(gather: Any) -> Any:
    def gathered(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        ranks_only = kwargs.get("ranks_only", ())
        keep = not ranks_only or own_rank() in ranks_only
        to_host = bool(kwargs.get("cpu_offload", False))
        return gather(_gathered(state_dict, keep, to_host), *args, **kwargs)

    return gathered


def _pass_on_full_values(distribute: Any) -> Any:
    def distributed(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            pair = local_state_dict.get(key)
            if isinstance(pair, tuple) and isinstance(pair[0], dtensors.Answers):
                local_state_dict[key] = pair[1]
        distribute(local_state_dict, keys, *args, **kwargs)

    return distributed


def _distribute_by_elements(distribute: Any) -> Any:
    def distributed(
        tensor: torch.Tensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any
    ) -> Any:
        shard = next((p for p in placements or () if isinstance(p, dtensors.ElementShard)), None)
        if shard is None or is_cut(tensor):
            return distribute(tensor, device_mesh, placements, **kwargs)
        if isinstance(tensor, dtensors.Answers):
            return tensor  # as torch does with a DTensor
        full = distribute(tensor, device_mesh, [Replicate()] * device_mesh.ndim, **kwargs)
        return shard.distributed(full.to_local()).requires_grad_(tensor.requires_grad)

    return distributed


def _gathered(value: Any, keep: bool, to_host: bool) -> Any:
    """Every rank takes part in every gather; without `keep` this rank drops the values."""
    if isinstance(value, StateShard):
        full = value.full_tensor()
        if not keep:
            return full.new_empty(0)
        return full.cpu() if to_host else full
    if isinstance(value, dict):
        return {key: _gathered(item, keep, to_host) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_gathered(item, keep, to_host) for item in value)
    return value
