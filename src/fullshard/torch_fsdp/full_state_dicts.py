"""torch's `get_model_state_dict(..., full_state_dict=True)` and its relatives gather our values, too.

They gather tensors of the two classes that torch knows to be sharded, and pass everything else on as it is: a
script would get shards where it requested full tensors. The one function in which they gather is wrapped, and
gets our values unsharded, one at a time. Where torch has no such function nothing changes, and saving such a
shard is an error.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.checkpoint import state_dict as torch_state_dict

from fullshard.comm.groups import own_rank
from fullshard.state.state_dict import StateShard

_NAME = "_gather_state_dict"


def turn_on() -> None:
    gather = getattr(torch_state_dict, _NAME, None)
    if gather is None or hasattr(gather, "is_fullshard"):
        return

    @functools.wraps(gather)
    def gather_ours_too(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        ranks_only = kwargs.get("ranks_only", ())
        keep = not ranks_only or own_rank() in ranks_only
        to_host = bool(kwargs.get("cpu_offload", False))
        return gather(_gathered(state_dict, keep, to_host), *args, **kwargs)

    gather_ours_too.is_fullshard = True  # type: ignore[attr-defined]
    setattr(torch_state_dict, _NAME, gather_ours_too)


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
