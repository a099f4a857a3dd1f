"""A sharded model's state dict as plain whole tensors in host memory, one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.api import full
from fullshard.engine.runtime import runtime_of
from fullshard.state.state_dict import StateShard


def is_adapter(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "active_adapter")


@contextmanager
def saved_state(model: nn.Module, keep: bool) -> Iterator[dict[str, Any]]:
    """What `save_pretrained` takes as the state dict: of a peft model only what it may save.

    Every rank must come here. Inside, encoders of prompts are whole: the one rank that saves has peft run
    them, and the others do not.
    """
    adapter = is_adapter(model)
    state = whole_state(model, keep, _adapter_names(model) if adapter else None)
    encoder = getattr(model, "prompt_encoder", None) if adapter else None
    if not isinstance(encoder, nn.Module) or not any(True for _ in encoder.parameters()):
        yield state
        return
    with full(encoder, writeback=False), torch.no_grad():
        yield state


def _adapter_names(model: nn.Module) -> Any:
    """Names of what peft may save: the adapters' own values, what trains, and embeddings of a new size."""
    inner: Any = model
    adapters = list(inner.peft_config)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    known = {id(m): name for name, m in model.named_modules()}
    ends = [getattr(inner, get, lambda: None)() for get in ("get_input_embeddings", "get_output_embeddings")]
    beginnings = tuple(f"{known[id(m)]}." for m in ends if m is not None and id(m) in known)

    def wanted(name: str) -> bool:
        parts = name.split(".")
        return name in trainable or name.startswith(beginnings) or any(a in parts for a in adapters)

    return wanted


def whole_state(model: nn.Module, keep: bool, wanted: Callable[[str], bool] | None = None) -> dict[str, Any]:
    """Every rank must call it; those that do not `keep` get nothing.

    Only one unit is whole at a time, so that a model larger than a device can be saved. Tied values stay one
    tensor. `wanted` chooses names.
    """
    runtime = runtime_of(model)
    names = [name for name in model.state_dict() if wanted is None or wanted(name)]
    found: dict[str, Any] = {}
    for unit in runtime.units:
        if wanted is not None and not any(wanted(p.name) for x in unit.lanes for p in x.layout.pieces):
            continue
        with runtime.opened([unit], writeback=False):
            if keep:
                _take(model, found, wanted)
    if keep and not runtime.units[0].lanes:
        _take(model, found, wanted)  # buffers alone
    return {name: found[name] for name in names if name in found}


def _take(model: nn.Module, found: dict[str, Any], wanted: Callable[[str], bool] | None) -> None:
    copies: dict[Any, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name in found or isinstance(value, StateShard) or (wanted is not None and not wanted(name)):
            continue
        if not isinstance(value, torch.Tensor):
            found[name] = value  # extra state of a module
            continue
        place = (value.data_ptr(), tuple(value.shape), value.stride())
        if value.numel() == 0 or place not in copies:
            copies[place] = value.detach().to("cpu", copy=True)
        found[name] = copies[place]


def whole_sizes(model: nn.Module) -> dict[int, int]:
    """By id of a parameter: how many elements it has on all ranks together."""
    runtime = runtime_of(model)
    return {
        id(parameter): piece.num_elements
        for lane in runtime.lanes
        for piece, parameter in zip(lane.layout.pieces, lane.parameters, strict=True)
    }


def count(model: nn.Module, only_trainable: bool = False, exclude: frozenset[str] = frozenset()) -> int:
    """Parameters of a sharded model, counted whole."""
    sizes = whole_sizes(model)
    return sum(
        sizes.get(id(p), p.numel())
        for name, p in model.named_parameters()
        if name not in exclude and (p.requires_grad or not only_trainable)
    )
