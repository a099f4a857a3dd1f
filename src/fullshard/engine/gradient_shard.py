"""A lane's gradient shard, and the permanent views of it that become `p.grad`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from fullshard.comm.groups import Comm
from fullshard.engine.cuts import Cut
from fullshard.engine.gradients import GradShard, Holder
from fullshard.engine.homes.away_gradients import AwayGradient, Factor, multiply
from fullshard.engine.homes.home import Home, HostHome
from fullshard.engine.homes.transfers import Mark
from fullshard.engine.pieces import piece_view
from fullshard.errors import GradientError, StateError, unit_label
from fullshard.plan.layout import Layout, Piece, shard_shape
from fullshard.precision import LaneDtypes


class LaneGradients:
    """Gradients of one lane at rest, in the dtype of its shard or as they were computed. A replicated lane
    has every interval.

    `away_from`: the device of the parameters, where these gradients rest elsewhere, or in another dtype; see
    `away_gradients`.

    On the device, those that rest as they were computed have memory from their backward to their unit's next
    forward, which needs as much for activations: nobody adds to them, and what reads them asks for a copy.
    """

    def __init__(
        self,
        unit: str,
        layout: Layout,
        dtypes: LaneDtypes,
        comm: Comm,
        home: Home,
        replicated: bool,
        away_from: torch.device | None,
    ) -> None:
        self._unit, self._layout, self._comm, self._replicated = unit, layout, comm, replicated
        self.home, self._away_from = home, away_from
        self.on_host = home.kind == "host"
        self._dtype = dtypes.rest  # of p.grad, and of what an optimizer's step has
        self.as_computed = dtypes.as_computed
        self.flat = home.zeros(layout.total if replicated else layout.interval, dtypes.gradients)
        self.own = self.flat.view(comm.ranks, -1)[comm.rank] if replicated else self.flat
        self.holder = Holder()
        self._norms: list[torch.Tensor] | None = None  # of views, where these have left the device
        self._factors: dict[int, list[Factor]] = {}  # to be multiplied in, by index, the oldest first
        self._lent = False  # user code was given plain tensors over these values
        self.landed: Mark | None = None  # values are at rest
        self.views = [self._view(index, piece) for index, piece in enumerate(layout.pieces)]
        self.live = False  # holds a sum that the next reduce is added to
        self.was_live = False  # did so when this backward began
        self._storage = self.flat.untyped_storage()
        self.comes_and_goes = self.as_computed and home.kind == "device"
        self._own_uses = self._storage_uses()
        self._own_refs = max(map(sys.getrefcount, self.views), default=0)
        self.let_go()

    def _view(self, index: int, piece: Piece) -> GradShard:
        comm = self._comm
        start, stop = self._layout.in_shard(piece, comm.rank)
        part = self.own[start:stop]
        region = piece.region
        answers = region is None or region.first
        if self._replicated:
            view = self._made(index, piece_view(self.flat, piece), part, answers, (0, piece.num_elements))
            view.replicated = region is None or not region.is_cut
            view.answers = answers and comm.rank == 0
            return view
        return self._made(index, part.view(shard_shape(piece.shape, stop - start)), None, answers, None)

    def _made(
        self, index: int, values: torch.Tensor, part: torch.Tensor | None, answers: bool, held: Any
    ) -> GradShard:
        layout, comm = self._layout, self._comm
        piece = layout.pieces[index]
        cut = Cut.of_rank(layout, piece, comm.rank) if held is None else Cut.of(piece, held)
        if self._away_from is not None:
            like = torch.empty(0, dtype=self._dtype, device=self._away_from)
            return AwayGradient.of(self, index, values, like, comm, part, self.holder, answers, cut)
        return GradShard.make(values, comm, part, self.holder, answers, cut)

    # ---- memory

    def take_memory(self) -> None:
        """What is in it is undefined, if there was none."""
        if self.comes_and_goes and not self._storage.nbytes():
            self._storage.resize_(self.flat.nbytes)

    def let_go(self) -> None:
        """These gradients are on no parameter, and what has read them was given to the compute stream."""
        if self.comes_and_goes and self._storage.nbytes() and not self.shared():
            self._storage.resize_(0)

    # ---- a sum that lands here

    def require_no_sum(self, divisor: float) -> None:
        """Before gradients arrive: those that rest as they were computed are neither added up nor divided."""
        if self.as_computed and (self.was_live or divisor != 1):
            found = f"are to be divided by {divisor}" if divisor != 1 else "of this step are there already"
            raise StateError(
                f"gradients of {unit_label(self._unit)} {found}, and fs.Offload(one_backward=True) keeps "
                "those of one backward per step, as they were computed",
                "Call optimizer.zero_grad() after each step, with set_to_none=True; or leave out "
                "one_backward to accumulate gradients.",
            )

    def add(self, own: torch.Tensor, total: torch.Tensor) -> None:
        """To what is staged. Parts of one backward often bring gradients of different parameters, and zeros
        for the others: their sum is as it was computed.
        """
        if not self.as_computed:
            own.add_(total)
            return
        added = own.to(total.dtype).add_(total)
        within = [self._layout.in_shard(piece, self._comm.rank) for piece in self._layout.pieces]
        if not all(_holds(own.dtype, added[start:stop]) for start, stop in within):
            raise StateError(
                f"one backward brings gradients of {unit_label(self._unit)} in several parts, such as those "
                f"of reentrant checkpoints inside one another. {own.dtype} cannot hold their sum, and "
                "fs.Offload(one_backward=True) keeps gradients as they were computed",
                "Call torch.utils.checkpoint with use_reentrant=False, or use "
                "fs.shard(checkpoint_activations=True); or leave out one_backward.",
            )
        own.copy_(added)

    def staged(self) -> torch.Tensor:
        """This rank's interval on the compute device; its values only if a sum is added to them."""
        self.take_memory()
        if self.home.kind == "device":
            return self.own
        if self.live:
            self._apply_factors()
            return self.home.stage(self.own, self.landed)
        return torch.empty_like(self.own, device=self.home.compute_device)

    def put_back(self, staged: torch.Tensor) -> None:
        self._factors.clear()
        self._norms = None if self._is_lent() else self._norms_of(staged)
        if staged is not self.own:
            self._land(self.own, staged)

    def staged_flat(self) -> torch.Tensor:
        """Every interval of a replicated lane, on the compute device."""
        self.take_memory()
        return self.home.stage(self.flat, self.landed)

    def put_back_flat(self, staged: torch.Tensor) -> None:
        if staged is not self.flat:
            self._land(self.flat, staged)

    def _land(self, values: torch.Tensor, staged: torch.Tensor) -> None:
        assert isinstance(self.home, HostHome)  # gradients never rest on disk
        self.landed = self.home.land(values, staged)

    def _norms_of(self, staged: torch.Tensor) -> list[torch.Tensor] | None:
        """While the values are here: they are about to leave, or take more memory in the dtype of a norm."""
        if self._away_from is None or (self.home.kind == "device" and not self.as_computed):
            return None
        ranges = [self._layout.in_shard(piece, self._comm.rank) for piece in self._layout.pieces]
        parts = [
            staged[start:stop] if piece.region is None or piece.region.first else staged[:0]
            for piece, (start, stop) in zip(self._layout.pieces, ranges, strict=True)
        ]
        filled = [part for part in parts if part.numel()]
        dtype = self._dtype if self.as_computed else None
        norms = iter(torch._foreach_norm(filled, dtype=dtype) if filled else [])
        real = self._dtype.to_real()  # a norm is, of complex gradients too
        return [next(norms) if part.numel() else part.new_zeros((), dtype=real) for part in parts]

    # ---- what AwayGradients ask

    def settle(self) -> None:
        self.take_memory()
        if isinstance(self.home, HostHome):
            self.home.transfers.settle()
        if self.landed is not None:
            self.landed.synchronize()
            self.landed = None
        self._apply_factors()

    def postpone_factor(self, index: int, factor: Factor) -> bool:
        if (self.home.kind == "device" and not self.as_computed) or self._is_lent():
            return False
        self._norms = None
        self._factors.setdefault(index, []).append(factor)
        return True

    def in_dtype(self, index: int, values: torch.Tensor) -> torch.Tensor:
        if not self.as_computed:
            return values
        values = values.to(self._dtype)
        for factor in self.factors(index):
            multiply(values, factor, self._comm.device)
        return values

    def require_room(self, index: int, place: torch.Tensor, values: torch.Tensor) -> None:
        if not _holds(place.dtype, values):
            name = self._layout.pieces[index].name
            raise GradientError(
                f"the gradient of {name!r} in {unit_label(self._unit)} rests in {place.dtype}, as it was "
                "computed, and was given values that this cannot hold",
                "Leave out fs.Offload(one_backward=True) to write into gradients; clipping, and scaling by a "
                "number, work with it.",
            )

    def write(self, index: int, place: torch.Tensor, values: torch.Tensor) -> None:
        self._norms = None
        if values is not place:
            place.copy_(values)
            self._factors.pop(index, None)

    def lend(self) -> None:
        if not self.as_computed:  # those are read from copies
            self._norms, self._lent = None, True

    def _is_lent(self) -> bool:
        """Whether user code still holds plain tensors over these values."""
        self._lent = self._lent and self._storage_uses() > self._own_uses
        return self._lent

    def _apply_factors(self) -> None:
        if not self._factors or self.as_computed:
            return
        if isinstance(self.home, HostHome):  # a step that goes on may read what is multiplied here
            self.home.transfers.settle()
        if self.landed is not None:
            self.landed.synchronize()
        factors, self._factors = self._factors, {}
        for index, values in factors.items():
            view = self.views[index]
            assert isinstance(view, AwayGradient)
            for factor in values:
                multiply(view.values_at_rest, factor, self._comm.device)

    def factors(self, index: int) -> list[Factor]:
        """By which values that are fetched from here have to be multiplied."""
        return self._factors.get(index, [])

    def known_norm(self, index: int) -> torch.Tensor | None:
        return None if self._norms is None else self._norms[index]

    def _storage_uses(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    def shared(self) -> bool:
        """Whether user code still holds these gradients (PCGrad does): they must not be overwritten."""
        refs = max(map(sys.getrefcount, self.views), default=0)
        return self._storage_uses() > self._own_uses or refs > self._own_refs


def _holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """Whether these are the same in it."""
    if values.dtype == dtype:
        return True
    return torch.allclose(values.to(dtype).to(values.dtype), values, rtol=0, atol=0, equal_nan=True)
