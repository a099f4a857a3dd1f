"""Models of transformers: their initializers on the meta device, and `generate` on sharded models.

Recognized by their methods and by the names of their classes, so that transformers is never imported here.

`generate` runs inside `fs.inference`. transformers can keep ranks in step by itself (`synced_gpus`): a rank
that has finished continues with passes whose results nobody needs, in step with all ranks of the world. It is
switched off here: such passes may exceed the positions that a model has, and the world may be larger than the
group of ranks that share the model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from fullshard.engine.hooks import Attached
from fullshard.engine.inference_scope import inferring
from fullshard.engine.runtime import Runtime, engine_of
from fullshard.integrations import Initializer, ModelLibrary, Parents

IN_STEP = "_is_fsdp_managed_module"  # where it is set, transformers keeps ranks in step


class Generate(Attached):
    """`generate` of a sharded model: prompts, lengths and stopping points may differ between ranks."""

    def __init__(self, runtime: Runtime, method: Any) -> None:
        super().__init__(runtime, runtime.root)
        self.method = method
        functools.update_wrapper(self, method, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("synced_gpus"):
            kwargs["synced_gpus"] = False  # fs.inference already allows ranks to finish independently
        models = [self.method.__self__, *(value for value in kwargs.values() if isinstance(value, nn.Module))]
        with ExitStack() as entered:
            for model in models:  # an assistant model, too, is called as often as this rank needs it
                if (runtime := engine_of(model)) is not None:
                    entered.enter_context(inferring(runtime, model))
            return self.method(*args, **kwargs)


def _attach(runtime: Runtime, model: nn.Module) -> None:
    """To every submodule that generates: the model around it may be of any class."""
    for module in model.modules():
        if _generates(type(module)) and "generate" not in module.__dict__:
            module.__dict__["generate"] = Generate(runtime, module.generate)


def _generates(cls: type) -> bool:
    """By the base class: `generate` of another library may do anything, and may need gradients."""
    return any(
        base.__name__ == "GenerationMixin" and base.__module__.partition(".")[0] == "transformers"
        for base in cls.__mro__
    )


@contextmanager
def _out_of_step(model: nn.Module) -> Iterator[None]:
    marked = [module for module in model.modules() if module.__dict__.get(IN_STEP)]
    for module in marked:
        module.__dict__[IN_STEP] = False
    try:
        yield
    finally:
        for module in marked:
            module.__dict__[IN_STEP] = True


def _initializer(root: nn.Module, module: nn.Module, parents: Parents) -> Initializer | None:
    """`_init_weights` of the innermost model around `module`."""
    around: nn.Module | None = module
    while around is not None:
        initialize: Any = getattr(around, "_init_weights", None)
        if callable(initialize) and (around is root or hasattr(around, "_initialize_weights")):
            return functools.partial(initialize, module)
        around = next(iter(parents.get(around, ())), None)
    return None


LIBRARY = ModelLibrary("transformers", _initializer, _attach, _out_of_step)
