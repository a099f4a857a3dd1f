"""A lane: the flat buffers behind the parameters of one dtype and one trainability of a unit.

Buffers, for R ranks, a layout of total = R * interval elements, and this rank r:

    buffer               elements  dtype    memory                      equation
    -------------------  --------  -------  --------------------------  --------------------------------------
    rest                 interval  rest     always, in its home         the shard, viewed by user's parameters
      with `replicate`   total                                          every rank's interval
      if it is split     as rest   17 bits  always, on the host         what restores rest from compute_shard;
                                                                        rest itself has no memory
    compute_shard        as rest   compute  always, in its home         cast(rest), if that rests elsewhere
    full                 total     compute  while the unit is full      interval r is cast(rest), the others
                                                                        come by all-gather
    own                  interval  compute  view of full                interval r of full
    compute_parameters   -         compute  views of full               what modules see while they compute
    ReceiveBuffer rows   R rows    wire     while a gather is in        decode(rows) = full; with a plain wire
                                            flight                      there are none: rows are full itself
      encoded            1 row     wire     from the first gather on    encode(rest) of this pass, so that
                                                                        backward sends the same bytes
    NodeShare values     total /   compute  a gather over two levels,   this rank's part of the values which
                         node ranks         or from forward to          its node holds together: what comes
                                            backward                    between nodes, and then goes inside
      rows               1 row     wire     while it comes between      decode(rows) = values, if these are
                         per node           nodes                       sent there in 8-bit blocks
    unsharded            total     rest     inside fs.full              every rank's rest, end to end
    gradients.flat       as rest   rest or  from the first backward     mean over ranks of their gradients, or
                                   packed                               those of one rank as computed
    send_buffer          total     packed   pack to end of exchange     this rank's full gradients
    accumulation         total     sum      inside fs.accumulate        sum of micro-batches, replicate, zero1

The last two belong to `reduce_buffers.LaneReduction`.

`full` has memory only while the unit is full. The compute parameters are permanent views of it, so a gather
or a release resizes one storage, whatever the number of parameters. Reading a view of a storage of size 0
crashes; therefore modules show the user's own parameters outside forward and backward.

Streams. Every buffer is allocated and freed on the compute stream. A collective runs on its group's stream,
which waits for the compute stream when it is issued; `Operation.wait` makes the compute stream wait for the
collective's event. So a buffer may be resized after `wait` without `record_stream`, whose deferred frees
would hold memory for an unknown time. `wait` precedes every reuse of a buffer that a collective reads or
writes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from fullshard.comm.groups import Comm, CrossingGather, ShardGroup, as_bytes
from fullshard.comm.tags import OpTag
from fullshard.comm.watchdog import Operation
from fullshard.engine.direct import Place
from fullshard.engine.gradient_shard import LaneGradients
from fullshard.engine.gradients import Step
from fullshard.engine.graph_tasks import NO_TASK, current_task
from fullshard.engine.homes.disk_home import DiskHome
from fullshard.engine.homes.home import Home, Homes, HostHome
from fullshard.engine.homes.remainders import bitmap_bytes
from fullshard.engine.homes.split_masters import Halves, SplitValues, address
from fullshard.engine.homes.transfers import Mark
from fullshard.engine.pieces import piece_view
from fullshard.engine.wire import PlainWire, Wire, parameter_wire, parameter_wire_across
from fullshard.engine.writes import Shown, Writes, set_data
from fullshard.errors import OffloadError, StateError, unit_label
from fullshard.plan.homes import splits
from fullshard.plan.layout import Layout, Piece, shard_shape
from fullshard.plan.tensor_parallel import Spec, local_of, spec_of
from fullshard.precision import LaneDtypes

_requires_grad, _address = attrgetter("requires_grad"), torch.Tensor.data_ptr


class Lane:
    """Parameters of one dtype and one trainability of a unit. The module's docstring lists its buffers."""

    def __init__(
        self,
        unit: str,
        layout: Layout,
        dtypes: LaneDtypes,
        parameters: Sequence[nn.Parameter],
        comm: Comm,
        replicated: bool,
        homes: Homes | None = None,
    ) -> None:
        self.unit, self.layout, self.dtypes, self.comm = unit, layout, dtypes, comm
        self.parameters = list(parameters)
        self.replicated = replicated
        self.homes = Homes.on_device(comm.device) if homes is None else homes
        self.home: Home = self.homes.master
        self.is_split = self.home.kind == "host" and splits(layout, dtypes)
        self._address = address if self.is_split else _address
        self.rest = self._zeros(layout.total if replicated else layout.interval)
        self.complete = replicated and self.home.kind == "device"  # every element is on this device at rest
        # Complete and not cast: the full value is the shard, nothing to gather or release.
        self.permanent = self.complete and dtypes.rest == dtypes.compute
        self.full = self.rest if self.permanent else self._empty(layout.total, dtypes.compute)
        self.shard_views: list[torch.Tensor] = []
        self._divide()
        self.full_bytes = self._storage.nbytes()
        specs = [spec_of(p) for p in parameters]
        # How tensor parallelism has cut each parameter; empty for a lane that it has left alone.
        self.specs: list[Spec | None] = specs if any(spec is not None for spec in specs) else []
        self._dtensors: list[tuple[nn.Parameter, torch.Tensor]] = []  # inside fs.full, with what they were
        views = [piece_view(self.full.data, piece) for piece in layout.pieces]
        self.compute_parameters = [
            nn.Parameter(view if spec is None else spec.wrap(view), requires_grad=p.requires_grad)
            for p, spec, view in zip(parameters, specs, views, strict=True)
        ]
        self.writes = Writes(self.compute_parameters)
        wire = parameter_wire(dtypes)
        self._receive = None if wire.in_place or comm.ranks == 1 else ReceiveBuffer(self, wire)
        self._node_share = NodeShare(self, self._receive) if comm.two_level and not replicated else None
        away = self.home.kind != "device"
        # By user code, of the sharded parameters. What is split waits itself.
        self._edits = Writes(self.parameters, None if self.is_split else self._before_edit) if away else None
        beside = away and dtypes.rest != dtypes.compute and self._receive is None
        self.compute_shard = ComputeShard(self) if beside else None
        if not self.permanent:
            self._storage.resize_(0)
        self.operation: Operation | CrossingGather | Mark | None = None  # the gather in flight
        self.updated: Mark | None = None  # where a step beside computing has written what a gather sends
        self.stored: Mark | None = None  # where all is in its home that steps have written so far
        # By parameter: how often a step, or user code as far as it was seen, has written the master.
        self.num_writes = [0] * len(self.parameters)
        self.keeps_memory = False  # of a small model: allocating it for each gather costs more than it holds
        self.places: dict[int, Place] = {}  # parameters whose gradient may be written into the send buffer
        self.unsharded: torch.Tensor | None = None  # inside fs.full: every element, in the dtype of rest
        self._shown: Shown | None = None  # there, if these are what rests, and are not to be written
        self.gradients: LaneGradients | None = None
        self.recover: Callable[[], None] | None = None  # while a step shows entire tensors, see `step.owned`
        self.present: Callable[[torch.Tensor, Lane, int], None] | None = None  # of an integration

    def _zeros(self, num_elements: int) -> torch.Tensor:
        """A shard of zeros, in its home."""
        if not self.is_split:
            return self.home.zeros(num_elements, self.dtypes.rest)
        compute = self.homes.compute.zeros(num_elements, self.dtypes.compute)
        low = self.home.zeros(num_elements, torch.int16)
        ties = self.home.zeros(bitmap_bytes(num_elements), torch.uint8)
        return SplitValues.all_of(Halves(compute, low, ties, self.homes.transfers))

    def _empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self.home.compute_device)

    def _divide(self) -> None:
        """Parts of the flat buffers, except the compute parameters."""
        if self.permanent or not self.shard_views:
            self.own = self.own_interval(self.full)
            self._full_as_bytes, self._own_as_bytes = as_bytes(self.full), as_bytes(self.own)
            self._storage = self.full.untyped_storage()
        self.shard_views = [self._shard_view(piece) for piece in self.layout.pieces]
        self._addresses = list(map(self._address, self.shard_views))

    def _shard_view(self, piece: Piece) -> torch.Tensor:
        if self.replicated:
            return piece_view(self.rest.data, piece)
        start, stop = self.layout.in_shard(piece, self.comm.rank)
        return self.rest.data[start:stop].view(shard_shape(piece.shape, stop - start))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.duplicate(memo)[id(self)]

    duplicate: Callable[[dict[int, Any]], dict[int, Any]]  # set by the runtime: copies the entire engine

    def make_gradients(self) -> LaneGradients:
        """A new gradient shard, of zeros."""
        away = {self.home.kind, self.homes.gradients.kind} != {"device"} or self.dtypes.as_computed
        self.gradients = LaneGradients(
            self.unit,
            self.layout,
            self.dtypes,
            self.comm,
            self.homes.gradients,
            self.replicated,
            self.rest.device if away else None,
        )
        self._show(self.gradients.views)
        return self.gradients

    def show_to(self, present: Callable[[torch.Tensor, Lane, int], None] | None) -> None:
        """Call it with every parameter now, and with every gradient and state dict value when it is made."""
        self.present = present
        self._show(self.parameters)

    def _show(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.present is not None:
            for index, tensor in enumerate(tensors):
                self.present(tensor, self, index)

    # ---- hot path

    def gather(self, tag: OpTag, again: bool, keep: bool = False) -> None:
        """Start filling `full`. `again`: in backward, with the values that this pass's forward gathered.

        `keep`: on several nodes, what came from the others stays until then.
        """
        self._take_changes()
        self._let_gradients_go()
        if self.permanent:
            return
        self.wait()  # for what an interrupted call left in flight: its memory is about to be used again
        if self.unsharded is not None:
            self._allocate()
            self.full.copy_(self.unsharded)
        elif self._node_share is not None:
            self.operation = self._node_share.gather(tag, again, keep)
        elif self._receive is not None and not self.replicated:
            self.operation = self._receive.gather(tag, again)
        else:
            self._allocate()
            place = self.full if self.replicated else self.own
            self.operation = self.bring(place, partial(self._gather_own, tag))

    def cross_ahead(self, tag: OpTag, again: bool) -> None:
        """On several nodes: start the part of the next gather that goes between them."""
        if self._node_share is not None and self.unsharded is None:
            self._take_changes()
            self._node_share.cross_ahead(tag, again)

    @property
    def streams_steps(self) -> bool:
        """Whether an optimizer steps on it in chunks: some values are elsewhere, or in another form."""
        return self.homes.streams_steps or self.dtypes.eight_bit_state or self.dtypes.as_computed

    @property
    def share_bytes(self) -> int:
        """Of this rank's part of what its node holds together; 0 where there is one level."""
        return 0 if self._node_share is None else self._node_share.size_bytes

    @property
    def training_bytes(self) -> int:
        """At rest, sharded, with gradients and Adam's state."""
        return self.dtypes.training_bytes(self.layout.interval, any(self.trainable))

    def forget_share(self) -> None:
        """What came from other nodes is not needed any more. A gather in flight frees it when it is over."""
        if self._node_share is not None:
            self._node_share.forget(frees=self.operation is None)

    def _let_gradients_go(self) -> None:
        """Those of the last step, when a forward begins and no parameter has its own any more."""
        gradients = self.gradients
        if gradients is None or not gradients.comes_and_goes or current_task() != NO_TASK:
            return
        if all(parameter.grad is None for parameter in self.parameters):
            gradients.let_go()

    def _take_changes(self) -> None:
        """By an optimizer's step, and by user code."""
        if self.updated is not None:
            self.updated.wait()
            self.updated = None
        self.take_assigned()
        self.follow_edits()

    def bring(self, place: torch.Tensor, send: Callable[[], Any]) -> Any:
        """What rests goes into `place`, and from there to the other ranks. From the host it comes beside
        computing, and the collective follows it on the same stream."""
        home, values = self._on_host()
        if values is None:
            place.copy_(self._sent())
            return send()
        assert isinstance(home, HostHome)
        transfers = home.transfers
        with transfers.gathers(transfers.now()):
            place.copy_(values, non_blocking=True)
            return send() or transfers.mark_gathers()

    def _gather_own(self, tag: OpTag) -> Operation | CrossingGather | None:
        if self.replicated:
            return None
        return self.comm.gather(self._full_as_bytes, self._own_as_bytes, tag)

    def _on_host(self) -> tuple[Home, torch.Tensor | None]:
        """What a gather sends, if it rests on the host in the dtype of compute."""
        shard = self.compute_shard
        if shard is not None:
            return shard.home, shard.values if shard.is_current and shard.home.kind == "host" else None
        usable = self.home.kind == "host" and self.dtypes.rest == self.dtypes.compute
        return self.home, self.rest if usable else None

    @property
    def sends_from_device(self) -> bool:
        """Whether what a gather sends rests on the compute device."""
        shard = self.compute_shard
        if shard is not None and shard.is_current:
            return shard.home.kind == "device"
        return self.home.kind == "device"

    @property
    def disk_homes(self) -> list[DiskHome]:
        """Where masters and states rest, as far as that is a disk."""
        return [home for home in (self.home, self.homes.state) if isinstance(home, DiskHome)]

    def follow_edits(self) -> None:
        """What is derived from a master that rests elsewhere is derived anew if user code wrote it."""
        if self._edits is not None and self._edits.seen():
            self._edits.forget()
            self.num_writes = [number + 1 for number in self.num_writes]
            if isinstance(self.home, DiskHome):
                self.home.edited(self.rest)
            if self.compute_shard is not None:
                self.compute_shard.master_edited()

    def loaded(self) -> None:
        """The engine has put values here as user code does, on all ranks: a fault of one rank's disk is seen
        by all in the next gather."""
        self.follow_edits()
        if self.compute_shard is not None:
            self.compute_shard.master_written()

    def _before_edit(self) -> None:
        """The host is about to write where copies to the device may still read: it is ahead of them."""
        if self.home.kind == "host" and self.unsharded is None and not Step.on_chunks:
            self.homes.transfers.drain()

    def settle_step(self) -> None:
        """The host waits for a step that goes on beside computing: it is about to read what that writes."""
        if self.streams_steps:
            self.homes.transfers.settle()

    def stepped(self, indices: Iterable[int]) -> None:
        """An optimizer's step wrote these sharded parameters, and the compute shard with them."""
        for index in indices:
            self.num_writes[index] += 1
        if self._edits is not None:
            self._edits.forget()

    def _sent(self) -> torch.Tensor:
        """What a gather sends, on the compute device, in the dtype of rest or of compute."""
        shard = self.compute_shard
        if shard is None:
            return self.read(self.home, partial(self.home.stage, self.rest))
        if shard.is_current or shard.edited_here:
            return self.read(shard.home, shard.staged)
        try:
            return self.read(self.home, shard.staged)
        except OffloadError:
            shard.master_written()  # on ranks that could read it, too
            raise

    def read(self, home: Home, stage: Callable[[], torch.Tensor]) -> torch.Tensor:
        """For a collective. A disk that fails on one rank is an error on all: they would wait for it."""
        if home.kind != "disk":
            return stage()
        problem: OffloadError | None = None
        try:
            values = stage()
        except OffloadError as error:
            problem = OffloadError(f"{unit_label(self.unit)}: {error.what}", error.remedy)
        self.comm.raise_together(problem)
        return values

    def _allocate(self) -> None:
        if not self._storage.nbytes():
            self._storage.resize_(self.full_bytes)

    def allocated(self) -> torch.Tensor:
        """The full buffer as bytes, with memory."""
        self._allocate()
        return self._full_as_bytes

    def wait(self) -> None:
        """The gather in flight, if there is one, is over when this returns (on a GPU: for the stream)."""
        if self.operation is None:
            return
        self.operation.wait()
        self.operation = None
        if self._receive is not None and self._receive.in_flight:
            self._allocate()
            self._receive.decode(self.full)
            self._receive.free()
        if self._node_share is not None:
            self._node_share.gathered()

    def release(self) -> None:
        if not (self.permanent or self.keeps_memory):
            self._storage.resize_(0)

    # ---- values assigned by the user

    @property
    def assigned(self) -> bool:
        """Whether user code ran `p.data = value` since the last gather, outside fs.full."""
        at_rest = self.unsharded is None and not self._dtensors
        return at_rest and list(map(self._address, self.parameters)) != self._addresses

    def take_assigned(self) -> None:
        """`p.data = value` between passes counts like an edit in place: some optimizers step back so.

        Into new memory: `kept = p.data; p.data = average`, and later `p.data = kept`, is how averages are
        tried out, and what was kept is the memory that was ours.
        """
        if not self.assigned:
            return
        if self.recover is not None:
            self.recover()
            return
        if self.streams_steps:
            self.homes.transfers.drain()  # the memory that goes may still be read
        values = [local_of(p).detach() for p in self.parameters]
        for value, view, piece in zip(values, self.shard_views, self.layout.pieces, strict=True):
            if value.shape != view.shape:
                has = f"this rank holds {tuple(view.shape)} of"
                self._refuse_shape(piece, value, has, "Assign unsharded values inside fs.full.")
        if self._shown is not None:
            self._shown.keep()
        with torch.inference_mode(False), torch.no_grad():
            rest = self._zeros(len(self.rest))
            if self.permanent:  # the full value is the shard
                self.rest.data = rest
            else:
                self.rest = rest
            if isinstance(rest, SplitValues) and self.compute_shard is not None:
                self.compute_shard.values = rest.split_values.compute
            self._divide()
            for view, value in zip(self.shard_views, values, strict=True):
                view.copy_(value)
            if isinstance(self.home, DiskHome):
                self.home.edited(self.rest)
            self.show_sharded()
            if self._edits is not None:  # by torch's own descriptor, say, which is not noted when it happens
                self._edits.assigned = True
            if self.permanent:
                for parameter, view in zip(self.compute_parameters, self.shard_views, strict=True):
                    set_data(local_of(parameter), view)

    # ---- values written while the unit computes

    @property
    def is_exact(self) -> bool:
        """Whether the full value is the shards' own, neither cast nor sent in 8 bits."""
        return self.dtypes.compute == self.dtypes.rest and not self._is_rounded

    @property
    def _is_rounded(self) -> bool:
        """Whether gathered values came in 8-bit blocks."""
        return not (self.dtypes.exact_gather or self.replicated or self.comm.ranks == 1)

    def take_replaced_compute(self) -> None:
        """`p.data = value` on a compute parameter counts like a write in place; it views `full` again."""
        if not self.writes.assigned:
            return
        unfit: list[tuple[Piece, torch.Tensor]] = []
        for parameter, piece in zip(self.compute_parameters, self.layout.pieces, strict=True):
            place, value = piece_view(self.full.data, piece), local_of(parameter).detach()
            if value.data_ptr() == place.data_ptr() and value.shape == place.shape:
                continue
            set_data(local_of(parameter), place)
            if value.shape == place.shape:
                place.copy_(value)
            else:
                unfit.append((piece, value))
        for piece, value in unfit:
            self.writes.forget()
            self._refuse_shape(piece, value, "it has", "A sharded parameter keeps its shape.")

    def changed_pieces(self, before: torch.Tensor | None = None) -> list[bool]:
        """By parameter, whether this rank's elements of the full value are other than at rest, or `before`.

        What came in 8-bit blocks cannot be compared, and counts as changed.
        """
        if before is None and self._is_rounded:
            return [True] * len(self.parameters)
        own = self.full if before is not None or self.replicated else self.own
        known = before if before is not None else self.home.stage(self.rest).to(own.dtype)
        ranges = (
            (piece.start, piece.stop) if own is self.full else self.layout.in_shard(piece, self.comm.rank)
            for piece in self.layout.pieces
        )
        return [not torch.equal(as_bytes(own[a:b]), as_bytes(known[a:b])) for a, b in ranges]

    def differing_pieces(self, is_full: bool, tag: OpTag) -> list[bool]:
        """By parameter, whether this rank wrote other values than the rank that keeps them: a collective.

        A rank whose unit is not full takes part with its shard.
        """
        flat = self._empty(self.layout.total, self.dtypes.compute)
        source = self.own_interval(self.rest) if self.replicated else self.home.stage(self.rest)
        self.own_interval(flat).copy_(self.own if is_full else source)
        self._gather_flat(flat, tag)
        pieces = self.layout.pieces
        if not is_full:
            return [False] * len(pieces)
        return [
            not torch.equal(as_bytes(flat[p.start : p.stop]), as_bytes(self.full[p.start : p.stop]))
            for p in pieces
        ]

    def keep_written(self) -> None:
        """The shard takes this rank's elements of the full value."""
        if not self.permanent:
            self.home.put_back(self.rest, self.full if self.replicated else self.own)
        if self.compute_shard is not None:
            self.compute_shard.master_written()
        if self._node_share is not None:
            self._node_share.invalidate()

    def _refuse_shape(self, piece: Piece, value: torch.Tensor, has: str, remedy: str) -> None:
        given = f"parameter {piece.name!r} was given a value of shape {tuple(value.shape)}"
        raise StateError(f"{unit_label(self.unit)}: {given}; {has} {piece.shape}", remedy)

    # ---- full precision: every element, in the dtype of rest

    def gather_full_precision(self, tag: OpTag, shard: torch.Tensor | None = None) -> torch.Tensor:
        """Every rank's interval of the shard, or of another tensor that is cut like it: a collective.

        The flat result lies on the compute device, in the layout of the lane, in the dtype of the shard.
        """
        self.settle_step()
        shard = self.rest if shard is None else shard
        if self.replicated:
            return shard if shard is not self.rest else self.home.stage(shard)
        if isinstance(shard, SplitValues) and shard is self.rest:
            shard = self.home.stage(shard)
        flat = self._empty(self.layout.total, shard.dtype)
        if shard is self.rest and self.home.kind == "disk":
            # Not through its mapping: a fault of the disk would end the process there.
            self.follow_edits()
            shard = self.read(self.home, partial(self.home.stage, shard))
        self.own_interval(flat).copy_(shard)
        return self._gather_flat(flat, tag)

    def gather_pieces(self, pieces: dict[int, torch.Tensor], dtype: torch.dtype, tag: OpTag) -> torch.Tensor:
        """The same for single parameters, by index, or states of them: the other elements are zero."""
        flat = torch.zeros(self.layout.total, dtype=dtype, device=self.home.compute_device)
        own = self.own_interval(flat)
        for index, local in pieces.items():
            start, stop = self.layout.in_shard(self.layout.pieces[index], self.comm.rank)
            own[start:stop].copy_(local.detach().reshape(-1))
        return self._gather_flat(flat, tag)

    def _gather_flat(self, flat: torch.Tensor, tag: OpTag) -> torch.Tensor:
        operation = self.comm.gather(as_bytes(flat), as_bytes(self.own_interval(flat)), tag)
        if operation is not None:
            operation.wait()
        return flat

    def own_interval(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a flat buffer: the inverse of `gather_full_precision`."""
        return flat.view(self.comm.ranks, -1)[self.comm.rank]

    def unshard(self, writeback: bool) -> None:
        """Show every element, in the dtype of rest, in the user's parameters (fs.full): a collective."""
        self.take_assigned()
        if self.complete:
            if not writeback:
                self._shown = Shown(self.parameters, self.rest)
                if self.specs:  # writes into DTensors are not noted
                    self._shown.keep()
            self._show_dtensors(self.rest.data)
            return
        self.unsharded = flat = self.gather_full_precision(self.comm.tag(self.unit, "full"))
        for parameter, piece in zip(self.parameters, self.layout.pieces, strict=True):
            set_data(parameter, piece_view(flat, piece))
        self._show_dtensors(flat)

    def reshard(self, writeback: bool) -> None:
        """Show the shard again; with `writeback` it takes this rank's elements of the unsharded values."""
        if self._dtensors:
            from fullshard.engine.dtensors import exchange

            for parameter, twin in self._dtensors:
                exchange(parameter, twin)
            self._dtensors.clear()
        if self._shown is not None:
            self._undo_writes()
        if self.unsharded is None:
            return
        if writeback:
            own = self.unsharded if self.replicated else self.own_interval(self.unsharded)
            self.home.put_back(self.rest, own)
            if self.compute_shard is not None:
                self.compute_shard.master_written()
            if self._node_share is not None:
                self._node_share.invalidate()
        self.unsharded = None
        self.show_sharded()

    def _undo_writes(self) -> None:
        """fs.full(writeback=False) of values that are not copies ends."""
        shown, self._shown = self._shown, None
        self.show_sharded()
        if shown is not None and not shown.undo(self.rest):
            warnings.warn(
                f"parameters of {unit_label(self.unit)} were written inside fs.full(writeback=False). The "
                "writes stay, because every rank has all elements and shows them as they rest. What methods "
                "of the parameter and p.data write is undone; to keep writes, leave out writeback=False.",
                stacklevel=5,
            )

    def _show_dtensors(self, flat: torch.Tensor) -> None:
        """Tensor-parallel parameters are DTensors again, over this rank's part."""
        if not self.specs:
            return
        from fullshard.engine.dtensors import show_dtensor

        for parameter, piece, spec in zip(self.parameters, self.layout.pieces, self.specs, strict=False):
            if spec is not None:
                self._dtensors.append((parameter, show_dtensor(parameter, spec, piece_view(flat, piece))))

    def uncut_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What tensor parallelism has not cut: the same on all its ranks."""
        pieces = self.layout.pieces
        return [piece_view(flat, p) for p in pieces if p.region is not None and not p.region.is_cut]

    def take_replaced(self) -> None:
        """`p.data = value` inside fs.full counts like an edit in place."""
        if self.unsharded is None:
            self.take_assigned()
            return
        for parameter, piece in zip(self.parameters, self.layout.pieces, strict=True):
            place, value = piece_view(self.unsharded, piece), local_of(parameter).detach()
            if value.data_ptr() == place.data_ptr() and value.stride() == place.stride():
                continue
            if value.shape != place.shape:
                self._refuse_shape(piece, value, "it has", "A sharded parameter keeps its shape.")
            place.copy_(value)

    def show_sharded(self) -> None:
        for parameter, view in zip(self.parameters, self.shard_views, strict=True):
            set_data(parameter, view)

    @property
    def trainable(self) -> list[bool]:
        return list(map(_requires_grad, self.parameters))


class ComputeShard:
    """The shard in the compute dtype, beside a master that does not rest on the compute device.

    An optimizer's step writes both. It is cast anew when the engine or user code has written the master. Of a
    split master it is a part, and always current.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane, self.home = lane, lane.homes.compute
        if isinstance(lane.rest, SplitValues):
            self.values = lane.rest.split_values.compute
        else:
            self.values = self.home.zeros(len(lane.rest), lane.dtypes.compute)
        self.is_current = lane.is_split
        self.edited_here = False  # it is not current by user code, perhaps on this rank alone

    def master_written(self) -> None:
        """By the engine, on all ranks."""
        self.is_current, self.edited_here = self._lane.is_split, False

    def master_edited(self) -> None:
        """By user code."""
        if not self._lane.is_split:
            self.edited_here |= self.is_current
            self.is_current = False

    def staged(self) -> torch.Tensor:
        if self.is_current:
            return self.home.stage(self.values)
        lane = self._lane
        cast = lane.home.stage(lane.rest).to(lane.dtypes.compute)
        self.home.put_back(self.values, cast)
        self.is_current, self.edited_here = True, False
        return cast


class NodeShare:
    """This rank's part of the values that its node holds together: what a gather between nodes brings, and a
    gather inside the node sends.

    It may come before the full buffer has memory, and may stay from forward to backward, and for the next
    micro-batch: these then gather inside the node only. Its memory is that of the full value divided by
    the ranks of a node.
    """

    def __init__(self, lane: Lane, receive: ReceiveBuffer | None) -> None:
        self._lane, self._receive = lane, receive
        group, device = lane.comm.cross_node_group, lane.home.compute_device
        assert group is not None
        self._group, interval = group, lane.layout.interval
        wire = PlainWire(lane.dtypes.compute) if receive is None else receive.wire
        self._values = wire.rows(group.ranks, interval, device)
        self._own = self._values[group.rank]
        self._as_bytes, self._own_as_bytes = as_bytes(self._values), as_bytes(self._own)
        self._storage = self._values.untyped_storage()
        self.size_bytes = self._storage.nbytes()
        self._storage.resize_(0)
        across = parameter_wire_across(lane.dtypes)
        self._rows = None if across is None else ReceiveBuffer(lane, across, group)
        self._operation: Operation | None = None  # between nodes, not waited for
        self._is_ahead = False  # it was issued for a gather that is to come
        self._is_kept = False  # values are here: of this pass's forward, or of the last micro-batch's
        self._keep = False  # what to do when the gather in flight is over

    def gather(self, tag: OpTag, again: bool, keep: bool) -> CrossingGather:
        lane, between = self._lane, None
        if not (self._is_ahead or self._is_kept):
            self._cross(tag, again)
        if self._rows is not None and self._rows.in_flight:
            between = partial(self._rows.decode, self._values)
        self._is_ahead, self._keep = False, keep
        full = lane.allocated() if self._receive is None else self._receive.allocated()
        operation, self._operation = self._operation, None
        return lane.comm.enter(CrossingGather(lane.comm, operation, full, self._as_bytes, tag, between))

    def cross_ahead(self, tag: OpTag, again: bool) -> None:
        if not (self._is_ahead or self._is_kept):
            self._lane.wait()  # an interrupted call may have left something in flight that reads this
            self._cross(tag, again)
            self._is_ahead = True

    def _cross(self, tag: OpTag, again: bool) -> None:
        self._is_kept = False
        if not self._storage.nbytes():
            self._storage.resize_(self.size_bytes)
        if self._rows is not None:
            self._operation = self._rows.start(tag, again)
        elif self._receive is not None:
            self._own.copy_(self._receive.encoded(again))
            self._operation = self._send(tag)
        else:
            self._operation = self._lane.bring(self._own, partial(self._send, tag))

    def _send(self, tag: OpTag) -> Operation | None:
        return self._group.gather(self._as_bytes, self._own_as_bytes, tag)

    def gathered(self) -> None:
        """The full value is here."""
        if self._rows is not None:
            self._rows.free()
        self._is_kept, self._keep = self._keep, False
        if not self._is_kept:
            self._storage.resize_(0)

    def invalidate(self) -> None:
        self._is_kept = False

    def forget(self, frees: bool) -> None:
        """A pass is over or was given up."""
        if self._operation is not None:
            self._operation.wait()
            self._operation = None
        self._is_ahead = self._is_kept = self._keep = False
        if frees:
            if self._rows is not None:
                self._rows.free()
            self._storage.resize_(0)


class ReceiveBuffer:
    """Rows in which encoded shards arrive, where they are not the buffer of values itself: one row of each
    rank, or of one rank per node.

    This rank's row is encoded once per pass, and kept: backward sends the same bytes again.
    """

    def __init__(self, lane: Lane, wire: Wire, group: ShardGroup | None = None) -> None:
        self._lane, self.wire, self._group = lane, wire, group
        ranks, rank = (lane.comm.ranks, lane.comm.rank) if group is None else (group.ranks, group.rank)
        self._rows = wire.rows(ranks, lane.layout.interval, lane.home.compute_device)
        self._flat, self._mine = self._rows.view(-1), self._rows[rank]
        self._storage = self._rows.untyped_storage()
        self._size_bytes = self._storage.nbytes()
        self._encoded: torch.Tensor | None = None
        self._storage.resize_(0)

    @property
    def in_flight(self) -> bool:
        return self._storage.nbytes() > 0

    def gather(self, tag: OpTag, again: bool) -> Operation | CrossingGather | None:
        """All ranks' rows."""
        self._fill(again)
        return self._lane.comm.gather(self._flat, self._mine, tag)

    def start(self, tag: OpTag, again: bool) -> Operation | None:
        """The rows of its group."""
        assert self._group is not None
        self._fill(again)
        return self._group.gather(self._flat, self._mine, tag)

    def _fill(self, again: bool) -> None:
        encoded = self.encoded(again)
        self.allocated()
        self._mine.copy_(encoded)

    def encoded(self, again: bool) -> torch.Tensor:
        """This rank's row."""
        lane = self._lane
        if self._encoded is None or not again:
            if self._encoded is None:
                self._encoded = self._mine.new_empty(self._mine.shape)
            rest = lane.read(lane.home, partial(lane.home.stage, lane.rest))
            self.wire.encode(rest[None], self._encoded[None])
        return self._encoded

    def allocated(self) -> torch.Tensor:
        """The rows as bytes, with memory."""
        if not self.in_flight:
            self._storage.resize_(self._size_bytes)
        return self._flat

    def decode(self, values: torch.Tensor) -> None:
        self.wire.decode(self._rows, values.view(len(self._rows), -1))

    def free(self) -> None:
        self._storage.resize_(0)


def disk_homes_of(lanes: Iterable[Lane]) -> list[DiskHome]:
    """Each once."""
    return list({id(home): home for lane in lanes for home in lane.disk_homes}.values())
