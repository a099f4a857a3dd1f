"""`fs.inference`, and `generate` of Hugging Face models, which runs inside it.

transformers keeps ranks in step by itself if asked to (`synced_gpus`): a rank that has finished goes on with
passes that nobody needs, in step with all ranks of the world. Here it is not asked: such passes may run
beyond the positions that a model has, and the world may be larger than the ranks that share the model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.engine.hooks import Attached
from fullshard.engine.inference import Kept
from fullshard.engine.runtime import Runtime, engine_of
from fullshard.environment import free_bytes
from fullshard.errors import OptionError

_MARK = "_is_fsdp_managed_module"  # what transformers looks at to decide whether to keep ranks in step


@contextmanager
def inferring(runtime: Runtime, module: nn.Module, memory: int | str | None = None) -> Iterator[Kept]:
    """No gradients, units kept full, ranks independent of each other."""
    runtime.gathering.forget_interrupted()
    inside = {id(p) for p in module.parameters()}
    among = {u.index for u in runtime.units if any(id(p) in inside for x in u.lanes for p in x.parameters)}
    marked = [m for m in module.modules() if m.__dict__.get(_MARK)]
    runtime.forget_failed_backward()
    with torch.no_grad(), runtime.gathering.stay_full(_budget(runtime, memory), among) as kept:
        for each in marked:
            each.__dict__[_MARK] = False
        try:
            yield kept
        finally:
            for each in marked:
                each.__dict__[_MARK] = True


def _budget(runtime: Runtime, memory: int | str | None) -> int:
    """Half of what is free unless told otherwise: activations and key-value caches need the rest."""
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


class Generate(Attached):
    """`generate` of a Hugging Face model: ranks may have prompts, lengths and ends of their own."""

    def __init__(self, runtime: Runtime, method: Any) -> None:
        super().__init__(runtime, runtime.root)
        self.method = method
        functools.update_wrapper(self, method, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("synced_gpus"):
            kwargs["synced_gpus"] = False  # what it is for is given
        models = [self.method.__self__, *(value for value in kwargs.values() if isinstance(value, nn.Module))]
        with ExitStack() as opened:
            for model in models:  # an assistant is called as often as this rank needs it
                if (runtime := engine_of(model)) is not None:
                    opened.enter_context(inferring(runtime, model))
            return self.method(*args, **kwargs)


def attach(runtime: Runtime, model: nn.Module) -> None:
    """Every part of the model that generates, so that the model around it may be anybody's."""
    for module in model.modules():
        if _generates(type(module)) and "generate" not in module.__dict__:
            module.__dict__["generate"] = Generate(runtime, module.generate)


def _generates(cls: type) -> bool:
    """Of transformers, told by its name: a `generate` of others may be anything, and may need gradients."""
    return any(
        base.__name__ == "GenerationMixin" and base.__module__.partition(".")[0] == "transformers"
        for base in cls.__mro__
    )
