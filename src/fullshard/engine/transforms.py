"""Forwards inside transforms of torch.func: jvp, jacfwd, vmap.

A transform hands the model wrapped tensors, and takes over every operation while it runs. The engine works on
its own buffers below it: `left` puts the transforms aside for that long, and `plain_tensors` are those that
the autograd graph of a backward to come is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C import _functorch
from torch._functorch import pyfunctorch
from torch.autograd import forward_ad

from fullshard.errors import NotSupported, unit_label

running = _functorch.peek_interpreter_stack  # None outside of all transforms


def left() -> AbstractContextManager[Any]:
    """No transform is in effect inside this context."""
    clear: Any = getattr(pyfunctorch, "temporarily_clear_interpreter_stack", nullcontext)  # a private name
    context: AbstractContextManager[Any] = clear()
    return context


def refuse_reverse(unit: str) -> None:
    """grad, vjp, jacrev, hessian: their backward runs where no backward of the model is seen."""
    stack = _functorch.get_interpreter_stack() or ()
    if any(interpreter.key() == _functorch.TransformType.Grad for interpreter in stack):
        raise NotSupported(
            f"{unit_label(unit)}: a forward inside torch.func.grad, vjp or jacrev, whose backward would find "
            "released parameters",
            "Differentiate outputs with torch.autograd.grad(outputs, inputs), or run the transform inside "
            "`with fs.full(model):`; torch.func.jvp, jacfwd and vmap work as they are.",
        )


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Below the wrappers of all transforms: the value, and the tangent that it carries."""
    while _is_wrapped(tensor):
        tangent = _tangent(tensor)
        if tangent is not None:
            yield from plain_tensors(tangent)
        tensor = _functorch.get_unwrapped(tensor)
    yield tensor


def _tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    if forward_ad._current_level < 0:
        return None
    tangent: torch.Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return _functorch.is_functorch_wrapped_tensor(tensor)
