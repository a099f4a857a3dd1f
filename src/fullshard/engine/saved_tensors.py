"""Tensors that autograd saves in a node of their own, apart from what computes with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


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

    def take(self) -> tuple[torch.Tensor, ...]:
        """In the backward of the node that has them. Unless the graph is kept they go, as those of a node do
        that has run: torch's checkpoint holds a block's inputs as long as anything its hooks have packed.
        """
        if self._result is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time, and what it had saved was freed. "
                "Give the first backward retain_graph=True."
            )
        tensors = self.tensors
        if not _graph_is_kept():
            self._result = None
        return tensors
