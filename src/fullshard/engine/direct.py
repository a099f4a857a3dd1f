"""Weight gradients of large Linears, written by their matrix product into the buffer that is sent.

Autograd would make each gradient a tensor of its own, to be copied into the buffer when the unit is done: a
read and a write of every gradient, and both in memory at once. It pays for large weights only: a Python
backward costs the host about 30 µs, a copy of 64 MiB costs an H200 as much. Where the buffer is not there
(gradients that accumulate, a second backward of the unit in progress) the product makes a tensor as usual.

Autograd packs what a Function saves behind its forward, and what torch's own Linear saves before its product.
That decides whether a block which is computed again in backward needs its last product: torch's checkpoint
stops once all is packed that was before. So where saved tensors are packed by hooks, a node in front of the
product saves them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.engine.saved_tensors import Saved

_hooks_of_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
MIN_BYTES = 64 * 2**20  # of one weight's gradient on the wire


class Place:
    """Where one weight's gradient belongs while its unit's buffer is open."""

    __slots__ = ("view",)

    def __init__(self) -> None:
        self.view: torch.Tensor | None = None

    def product(self, gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        view, self.view = self.view, None  # a weight used twice: the second product is a tensor of its own
        if view is None or view.dtype != gradient.dtype or torch.is_grad_enabled():
            return torch.mm(gradient.t(), x)
        torch.mm(gradient.t(), x, out=view)
        return view.view(view.shape)  # an object nobody else holds: autograd takes it as it is


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, place: Place, saved: Saved | None
    ) -> torch.Tensor:
        ctx.place, ctx.saved = place, saved or None
        if not saved:
            ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors if ctx.saved is None else ctx.saved.take()
        flat = gradient.reshape(-1, gradient.shape[-1])
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_x = torch.mm(flat, weight).view(x.shape) if wants_x else None
        of_weight = ctx.place.product(flat, x.reshape(-1, x.shape[-1])) if wants_weight else None
        return of_x, of_weight, flat.sum(0) if wants_bias else None, None, None


def linear(module: nn.Linear, x: torch.Tensor, place: Place) -> torch.Tensor:
    """`module(x)`, its weight's gradient in `place` if that is open."""
    if _is_special(x):
        return F.linear(x, module.weight, module.bias)
    saved = None if _hooks_of_saved_tensors(False) is None else Saved(x, module.weight)
    out: torch.Tensor = _Linear.apply(x, module.weight, module.bias, place, saved)  # type: ignore[no-untyped-call]
    return out


def _is_special(x: torch.Tensor) -> bool:
    """Compilers, autocast, torch.func and tensor subclasses get what torch itself does."""
    return (
        torch.compiler.is_compiling()
        or type(x) is not torch.Tensor
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )
