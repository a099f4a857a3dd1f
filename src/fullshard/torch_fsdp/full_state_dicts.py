"""torch's `get_model_state_dict(..., full_state_dict=True)` and its kin give whole tensors of our values too.

They gather what torch knows to be sharded, which is a list of two classes, and pass everything else on as it
is: a script would get parts where it asked for whole values. The one function in which they gather is
wrapped; it sees our values whole, one at a time. Where torch has no such function nothing changes, and saving
such a part is an error.
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
        wanted = not ranks_only or own_rank() in ranks_only
        to_host = bool(kwargs.get("cpu_offload", False))
        return gather(_whole(state_dict, wanted, to_host), *args, **kwargs)

    gather_ours_too.is_fullshard = True  # type: ignore[attr-defined]
    setattr(torch_state_dict, _NAME, gather_ours_too)


def _whole(value: Any, wanted: bool, to_host: bool) -> Any:
    """Every rank takes part in every gather; what nobody here wants, or the device should not hold, goes."""
    if isinstance(value, StateShard):
        full = value.full_tensor()
        if not wanted:
            return full.new_empty(0)
        return full.cpu() if to_host else full
    if isinstance(value, dict):
        return {key: _whole(item, wanted, to_host) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_whole(item, wanted, to_host) for item in value)
    return value
