"""Unsharded values of a sharded model, put together from what each rank holds at rest.

Neither `fs.full` nor the engine's gathers are used: both are part of what is checked, and would refresh
values that the engine keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.comm.plain_group import PlainGroup
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import in_memory_order
from fullshard.engine.runtime import Runtime

Local = Callable[[nn.Parameter], torch.Tensor | None]


def parameter_values(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.detach()


def gradient_values(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's elements of a gradient, wherever they rest."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Any = parameter.grad
        if gradient is None:
            return None
        source = getattr(gradient, "source", None)
        if source is not None:
            source.settle()
        values: torch.Tensor = getattr(gradient, "values_at_rest", gradient)
        return values.detach().as_subclass(torch.Tensor)


class Values:
    """Reads the parameters, or gradients, of one sharded model. Collective: every rank must call it."""

    def __init__(self, runtime: Runtime, group: PlainGroup) -> None:
        self._runtime, self._group = runtime, group
        self.places = [(p, lane, lane.layout.pieces[index]) for p, lane, index in runtime.places()]
        self.names = [piece.name for _, _, piece in self.places]

    def read(self, local: Local) -> dict[str, torch.Tensor | None]:
        """By name, on the host; None where no rank has a value."""
        self._runtime.settle_step()
        sizes = [piece.num_elements for _, _, piece in self.places]
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=self._dtype())
        offset = 0
        for index, ((parameter, lane, piece), size) in enumerate(zip(self.places, sizes, strict=True)):
            values = local(parameter)
            if values is not None:
                flat[sum(sizes) + index] = 1
                self._put(flat[offset : offset + size], values, lane, piece)
            offset += size
        flat = self._group.sum(flat)
        result: dict[str, torch.Tensor | None] = {}
        offset = 0
        for index, ((_, _, piece), size) in enumerate(zip(self.places, sizes, strict=True)):
            there = bool(flat[sum(sizes) + index])
            result[piece.name] = _shaped(flat[offset : offset + size], piece) if there else None
            offset += size
        return result

    def _dtype(self) -> torch.dtype:
        exact = all(p.is_floating_point() and p.dtype.itemsize <= 4 for p, _, _ in self.places)
        return torch.float32 if exact else torch.float64

    def _put(self, place: torch.Tensor, values: torch.Tensor, lane: Lane, piece: Any) -> None:
        comm = lane.comm
        if comm.replica:  # the first replica has put its own there
            return
        start, stop = lane.layout.kept(piece, comm.rank)
        if lane.replicated and values.numel() == piece.num_elements:
            values = in_memory_order(values.reshape(piece.shape), piece)[start:stop]
        place[start:stop] = values.reshape(-1).to("cpu", place.dtype)

    def copies(self) -> dict[str, tuple[int, int, torch.Tensor]]:
        """By name, the range of elements that this rank holds of it, and their values."""
        held = {}
        for parameter, lane, piece in self.places:
            complete = lane.replicated
            start, stop = (0, piece.num_elements) if complete else lane.layout.kept(piece, lane.comm.rank)
            held[piece.name] = (start, stop, parameter.detach())
        return held


def _shaped(flat: torch.Tensor, piece: Any) -> torch.Tensor:
    dense = flat.view(piece.memory_shape)
    return dense.permute([piece.order.index(d) for d in range(len(piece.shape))])
