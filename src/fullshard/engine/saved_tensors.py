"""Tensors that autograd saves in a node of their own, apart from the computation whose backward needs them."""

from __future__ import annotations

from typing import Any

import torch


class _Save(torch.autograd.Function):
    """A node that saves tensors, and never runs: what it saved comes back with its place in the graph."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class Saved:
    """Packed by the hooks of saved tensors when it is made, and unpacked when it is asked."""

    __slots__ = ("_result",)

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._result: Any = _Save.apply(*tensors)  # type: ignore[no-untyped-call]

    def __bool__(self) -> bool:
        """Whether anything was saved: for tensors of which none requires a gradient, nothing is."""
        return self._result.grad_fn is not None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._result.grad_fn.saved_tensors  # type: ignore[no-any-return]
