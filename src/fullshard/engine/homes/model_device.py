"""The `device` of a model whose parameters rest on the host: where it computes.

Many models have a property that answers with the device of their first parameter, and put inputs, masks and
positions there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fullshard.engine.runtime import engine_of


def show_compute_device(model: nn.Module) -> None:
    """From now on, properties of its classes answer so. Of modules that are not offloaded nothing changes."""
    for kind in {type(module) for module in model.modules()}:
        owner = next((base for base in kind.__mro__ if "device" in base.__dict__), None)
        shown = None if owner is None else owner.__dict__["device"]
        if type(shown) is property and shown.fget is not None and not hasattr(shown.fget, _MARK):
            # A subclass of property would do, but torch.compile calls its `fget`.
            answer = _answer(shown.fget)
            setattr(owner, "device", property(answer, shown.fset, shown.fdel, shown.__doc__))  # noqa: B010


_MARK = "_fullshard_compute_device"


def _answer(original: Any) -> Any:
    @functools.wraps(original)
    def device(self: Any) -> Any:
        shown, runtime = original(self), engine_of(self)
        if runtime is None or runtime.options.offload is None or not isinstance(shown, torch.device):
            return shown
        computes = runtime.comm.device
        return shown if shown.type == computes.type else computes

    setattr(device, _MARK, True)
    return device
