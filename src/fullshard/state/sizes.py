"""How many elements the parameters of a sharded model have, of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fullshard.engine.runtime import runtime_of


class UnshardedSizes:
    """Counts elements of all ranks together for sharded parameters, and `numel()` for others."""

    def __init__(self, model: nn.Module) -> None:
        self._sizes = {
            id(parameter): piece.num_elements
            for lane in runtime_of(model).lanes
            for piece, parameter in zip(lane.layout.pieces, lane.parameters, strict=True)
        }

    def total(self, parameters: Iterable[nn.Parameter]) -> int:
        return sum(self._sizes.get(id(p), p.numel()) for p in parameters)
