"""torch's functions for state dicts and `distribute_tensor`, for values that isinstance takes for DTensors.

`get_model_state_dict(..., full_state_dict=True)` gathers them as it does all our values
(`state.full_state_dicts`); `set_model_state_dict(..., full_state_dict=True)` would cut full ones by rows. The
one function in which it does so is wrapped, so that full values are passed on, which `load_state_dict` cuts.
`distribute_tensor` cuts as our placement says.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from fullshard.patches import Patches
from fullshard.plan.tensor_parallel import is_cut
from fullshard.state import full_state_dicts
from fullshard.state.state_dict import StateShard
from fullshard.torch_fsdp import dtensors

_patches = Patches("*")  # a script may have imported them before it imported us


def turn_on() -> None:
    """Does nothing the second time. To a torch without these functions our values are no DTensors."""
    points = {
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
    importlib.import_module(full_state_dicts.MODULE)
    if not full_state_dicts.follow_torch(StateShard):
        dtensors.Answers.to_isinstance = False


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
