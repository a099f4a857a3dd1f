"""The state dict of a sharded model as plain, unsharded tensors in host memory, gathered unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.api import full
from fullshard.engine.homes.split_masters import address
from fullshard.engine.runtime import runtime_of
from fullshard.state.state_dict import StateShard

IsSaved = Callable[[str], bool]  # of a name in the state dict


def is_adapter(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "active_adapter")


@contextmanager
def saved_state(model: nn.Module, keep: bool) -> Iterator[dict[str, Any]]:
    """The state dict for `save_pretrained`: of a peft model only what peft may save.

    Every rank must enter. Inside, prompt encoders are unsharded: peft runs them on the one rank that saves.
    """
    adapter = is_adapter(model)
    state = unsharded_state(model, keep, _saved_by_peft(model) if adapter else None)
    encoder = getattr(model, "prompt_encoder", None) if adapter else None
    if not isinstance(encoder, nn.Module) or not any(True for _ in encoder.parameters()):
        yield state
        return
    with full(encoder, writeback=False), torch.no_grad():
        yield state


def _saved_by_peft(model: nn.Module) -> IsSaved:
    """The adapters' own values, trainable parameters, and embeddings, which may have been resized."""
    inner: Any = model
    adapters = list(inner.peft_config)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    names = {id(m): name for name, m in model.named_modules()}
    getters = ("get_input_embeddings", "get_output_embeddings")
    embeddings = [getattr(inner, getter, lambda: None)() for getter in getters]
    prefixes = tuple(f"{names[id(m)]}." for m in embeddings if m is not None and id(m) in names)

    def is_saved(name: str) -> bool:
        parts = name.split(".")
        return name in trainable or name.startswith(prefixes) or any(a in parts for a in adapters)

    return is_saved


def unsharded_state(model: nn.Module, keep: bool, is_saved: IsSaved | None = None) -> dict[str, Any]:
    """Every rank must call it; ranks that do not `keep` get an empty dict.

    Only one unit is unsharded at a time, so that a model larger than a device can be saved. Tied values stay
    one tensor. `is_saved` selects names.
    """
    runtime = runtime_of(model)
    names = [name for name in model.state_dict() if is_saved is None or is_saved(name)]
    state: dict[str, Any] = {}
    for unit in runtime.units_of(model):
        if is_saved is not None and not any(is_saved(p.name) for x in unit.lanes for p in x.layout.pieces):
            continue
        with runtime.opened([unit], writeback=False):
            if keep:
                _add_copies(model, state, is_saved)
    if keep:
        _add_copies(model, state, is_saved)  # buffers, where no unit was unsharded
    return {name: state[name] for name in names if name in state}


def _add_copies(model: nn.Module, state: dict[str, Any], is_saved: IsSaved | None) -> None:
    """Host copies of the values that are not in `state` yet and are unsharded now."""
    copies: dict[Any, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name in state or isinstance(value, StateShard) or (is_saved is not None and not is_saved(name)):
            continue
        if not isinstance(value, torch.Tensor):
            state[name] = value  # extra state of a module
            continue
        place = (address(value), tuple(value.shape), value.stride())
        if value.numel() == 0 or place not in copies:
            copies[place] = value.detach().to("cpu", copy=True)
        state[name] = copies[place]
