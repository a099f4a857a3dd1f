"""A lane's gradient shard, and the permanent views of it that become `p.grad`."""

from __future__ import annotations

import sys

import torch

from fullshard.comm.groups import Comm
from fullshard.engine.cuts import Cut
from fullshard.engine.gradients import GradShard, Holder
from fullshard.engine.home import Home
from fullshard.engine.pieces import piece_view
from fullshard.plan.layout import Layout, Piece, shard_shape


class LaneGradients:
    """Gradients of one lane at rest, in the dtype of its shard. A replicated lane has every interval."""

    def __init__(self, layout: Layout, dtype: torch.dtype, comm: Comm, home: Home, replicated: bool) -> None:
        self._layout, self._comm, self._replicated, self.home = layout, comm, replicated, home
        self.flat = home.zeros(layout.total if replicated else layout.interval, dtype)
        self.own = self.flat.view(comm.ranks, -1)[comm.rank] if replicated else self.flat
        self.holder = Holder()
        self.views = [self._view(piece) for piece in layout.pieces]
        self.live = False  # holds a sum that the next reduce is added to
        self.was_live = False  # did so when this backward began
        self._storage = self.flat.untyped_storage()
        self._own_uses = self._storage_uses()
        self._own_refs = max(map(sys.getrefcount, self.views), default=0)

    def _view(self, piece: Piece) -> GradShard:
        comm = self._comm
        start, stop = self._layout.in_shard(piece, comm.rank)
        part = self.own[start:stop]
        region = piece.region
        answers = region is None or region.first
        if self._replicated:
            cut = Cut.of(piece, (0, piece.num_elements))
            view = GradShard.make(piece_view(self.flat, piece), comm, part, self.holder, answers, cut)
            view.replicated = region is None or not region.is_cut
            view.answers = answers and comm.rank == 0
            return view
        local = part.view(shard_shape(piece.shape, stop - start))
        cut = Cut.of_rank(self._layout, piece, comm.rank)
        return GradShard.make(local, comm, None, self.holder, answers, cut)

    def staged(self) -> torch.Tensor:
        """This rank's interval on the compute device; its values only if a sum is added to them."""
        if self.home.kind == "device":
            return self.own
        if self.live:
            return self.home.stage(self.own)
        return torch.empty_like(self.own, device=self.home.compute_device)

    def put_back(self, staged: torch.Tensor) -> None:
        if staged is not self.own:
            self.home.put_back(self.own, staged)

    def _storage_uses(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    def shared(self) -> bool:
        """Whether user code still holds these gradients (PCGrad does): they must not be overwritten."""
        refs = max(map(sys.getrefcount, self.views), default=0)
        return self._storage_uses() > self._own_uses or refs > self._own_refs
