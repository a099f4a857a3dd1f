"""A step of the module as one pass of the engine: the root's forward with something else inside.

Lightning calls `training_step`, not `forward`. Run from inside the root's forward it finds every parameter of
the root in place, units are gathered ahead, and ranks may take different paths. The batch does not go through
the root's arguments: with a narrow compute dtype those are cast, and a regression target must not be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def in_one_pass(module: nn.Module, call: Callable[[], Any]) -> Any:
    """`call()` from inside `module`'s forward, hooks around it; its result leaves as the forward's does."""
    before = module.__dict__.get("forward")

    def put_back() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = before

    def forward() -> Any:
        put_back()  # at once: the step may call the real forward
        return call()

    module.__dict__["forward"] = forward
    try:
        return module()
    finally:
        put_back()


def take_part(module: nn.Module, passes: int) -> None:
    """Passes in which this rank computes nothing: it lends its shards to those that still have batches."""
    for _ in range(passes):
        in_one_pass(module, lambda: None)
