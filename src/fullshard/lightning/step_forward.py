"""A step of a LightningModule, run from inside the forward of the root unit.

Lightning calls `training_step`, not `forward`. Inside the root's forward the step sees every parameter of the
root, units are gathered ahead, and ranks may take different paths. The batch is not an argument of that
forward: with a narrow compute dtype arguments are cast, and a regression target must not be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

_NONE: Mapping[str, Any] = MappingProxyType({})


def run_in_forward(
    module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = _NONE
) -> Any:
    """`call(*args, **kwargs)` in place of `module`'s forward, with its hooks; the result is returned as the
    forward's is. The arguments are kept on that forward, for who examines calls."""
    before = module.__dict__.get("forward")

    def restore() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    def forward() -> Any:
        restore()  # at once: the step may call the real forward
        return call(*args, **kwargs)

    forward.arguments = args, kwargs  # type: ignore[attr-defined]
    module.__dict__["forward"] = forward
    try:
        return module()
    finally:
        restore()


def join_forward(module: nn.Module) -> None:
    """A forward in which this rank computes nothing: ranks that still have batches need its shards."""
    run_in_forward(module, lambda: None)
