"""`fs.inference` on a runtime: the context, and how much memory it may use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fullshard import integrations
from fullshard.engine.inference import Kept
from fullshard.engine.runtime import Runtime
from fullshard.environment import free_bytes
from fullshard.errors import OptionError


@contextmanager
def inferring(runtime: Runtime, module: nn.Module, memory: int | str | None = None) -> Iterator[Kept]:
    """No gradients, units kept full, ranks independent of each other."""
    runtime.gathering.forget_interrupted()
    among = {unit.index for unit in runtime.units_of(module)}
    runtime.forget_failed_backward()
    with (
        torch.no_grad(),
        runtime.gathering.stay_full(_budget(runtime, memory), among) as kept,
        integrations.inference(module),
    ):
        yield kept


def _budget(runtime: Runtime, memory: int | str | None) -> int:
    """By default half of the free memory: activations and key-value caches need the rest."""
    if memory is None:
        return max(0, free_bytes(runtime.comm.device) // 2)
    if memory == "all":
        return sys.maxsize
    if isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        return memory
    raise OptionError(
        f"memory is {memory!r}",
        "Give a number of bytes, 'all', 0 for nothing, or None for half of what is free.",
    )
