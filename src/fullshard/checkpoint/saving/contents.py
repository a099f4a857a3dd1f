"""What a model and its optimizer hold: tensors of their unsharded shape, with this rank's elements of each.

Every rank lists the same tensors in the same order; only the elements differ. A value that every rank has
in full (a buffer, a step counter) is written by the first rank; a rank whose own value differs stores it
with its own values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import nn

from fullshard.checkpoint.format.checksums import checksum
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.values import MAX_INLINE_BYTES, Encoder, Tree, dense
from fullshard.checkpoint.parameters import Site, buffers, modules_with_state, plain, sites, tied_names
from fullshard.checkpoint.saving.compared import Compared
from fullshard.comm.groups import as_bytes
from fullshard.engine.pieces import piece_view
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensor_parallel import uncut
from fullshard.errors import CheckpointError


@dataclass
class LocalSlice:
    """A tensor, and the elements [start, stop) of it, in row-major order, that this rank writes."""

    tensor: Tensor
    start: int
    stop: int
    values: torch.Tensor  # these elements, flat, on any device


@dataclass
class Contents:
    """Everything that one rank contributes to a checkpoint."""

    model: list[LocalSlice] = field(default_factory=list)
    optimizer: list[LocalSlice] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    modules: dict[str, Tree] = field(default_factory=dict)
    optimizer_state: Tree = None
    replicated: dict[str, torch.Tensor] = field(default_factory=dict)  # the first rank's are written
    own: dict[str, Tree] = field(default_factory=dict)  # optimizer state not of its parameter's shape
    encoder: Encoder = field(default_factory=Encoder)  # of the optimizer's values
    shared: Encoder = field(default_factory=Encoder)  # of those that are equal on every rank
    compared: Compared = field(default_factory=Compared)


def local_slice(site: Site, local: torch.Tensor, dtype: torch.dtype | None = None) -> LocalSlice:
    """What this rank writes of a parameter or of a state of its optimizer; `local` has the shard's shape."""
    assert site.lane is not None
    lane, piece, comm = site.lane, site.piece, site.lane.comm
    if piece.region is not None and not piece.region.in_rows:
        return _even_slice(site, local, dtype)
    start, stop = lane.layout.written(piece, comm.rank, comm.replica, comm.replicas)
    if piece.order != tuple(range(len(piece.shape))):
        values = _row_major(site, local)[start:stop].clone()  # frees the unsharded value at once
    elif lane.replicated:
        values = local.detach().reshape(-1)[start:stop]
    else:
        first, _ = lane.layout.kept(piece, comm.rank)
        values = local.detach().reshape(-1)[start - first : stop - first]
    begin = 0 if piece.region is None else piece.region.begin
    tensor = Tensor(site.name, dtype or local.dtype, piece.global_shape)
    return LocalSlice(tensor, begin + start, begin + stop, values)


def _even_slice(site: Site, local: torch.Tensor, dtype: torch.dtype | None) -> LocalSlice:
    """For a parameter that tensor parallelism shards by columns: an even share of the unsharded tensor.

    A rank's elements are not contiguous in the file, so all ranks gather the tensor: a collective.
    """
    lane, piece = site.lane, site.piece
    assert lane is not None
    spec = lane.specs[site.index]
    assert spec is not None
    local = plain(local)
    part = local.to(lane.comm.device) if lane.replicated else _tensor_parallel_part(site, local)
    members = lane.comm.world.members
    index, count = members.index(lane.comm.world_rank), prod(spec.shape)
    start, stop = (count * i // len(members) for i in (index, index + 1))
    unsharded = spec.wrap(part.contiguous()).full_tensor().reshape(-1)
    values = unsharded[start:stop].to(local.device, copy=True)  # frees the unsharded value at once
    return LocalSlice(Tensor(site.name, dtype or local.dtype, piece.global_shape), start, stop, values)


def _tensor_parallel_part(site: Site, local: torch.Tensor) -> torch.Tensor:
    """This tensor-parallel rank's part in its own shape, gathered from the ranks that shard it."""
    lane, piece = site.lane, site.piece
    assert lane is not None
    comm = lane.comm
    kept = [lane.layout.kept(piece, rank) for rank in range(comm.ranks)]
    sizes = [stop - start for start, stop in kept]
    rows = torch.zeros(comm.ranks, max(sizes), dtype=local.dtype, device=comm.device)
    rows[comm.rank, : sizes[comm.rank]].copy_(local.detach().reshape(-1))
    if rows.numel():
        operation = comm.gather(as_bytes(rows), as_bytes(rows[comm.rank]), comm.tag(lane.unit, "save"))
        if operation is not None:
            operation.wait()
    flat = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
    return piece_view(flat, replace(piece, start=0))


def _row_major(site: Site, local: torch.Tensor) -> torch.Tensor:
    """The unsharded value in row-major order, of a parameter in another memory format (channels-last, say).

    A rank's elements are not contiguous in the file, so the ranks gather the lane: a collective.
    """
    lane, piece = site.lane, site.piece
    assert lane is not None
    if lane.replicated:
        return local.detach().contiguous().view(-1)
    index = lane.layout.pieces.index(piece)
    flat = lane.gather_pieces({index: local}, local.dtype, lane.comm.tag(lane.unit, "save"))
    return piece_view(flat, piece).contiguous().view(-1)


def add_model(
    contents: Contents, runtime: Runtime, model: nn.Module, dtype: torch.dtype | None, frozen: bool = True
) -> None:
    """Parameters, buffers and extra state of a sharded model; `dtype` applies to floating-point parameters.

    Without `frozen`, parameters that do not train are left out.
    """
    for site in sites(runtime, model):
        if not (frozen or site.parameter.requires_grad):
            continue
        stored = _stored_dtype(site.parameter.dtype, dtype)
        if site.lane is None:
            add_replicated(contents.model, contents, site.name, site.parameter, runtime, stored)
        else:
            contents.model.append(local_slice(site, site.parameter, stored))
    for name, buffer in buffers(model).items():
        add_replicated(contents.model, contents, name, buffer, runtime, buffer.dtype)
    contents.tied = tied_names(model)
    encoder = Encoder(MAX_INLINE_BYTES)
    for name, module in modules_with_state(model):
        contents.modules[name] = encoder.encode(module.get_extra_state(), f"extra state of {name!r}")
    if encoder.tensors:
        raise CheckpointError(
            f"{next(iter(encoder.tensors))} holds a large tensor", "Register it as a buffer of the module."
        )


def _stored_dtype(own: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    return requested if requested is not None and own.is_floating_point else own


def add_replicated(
    into: list[LocalSlice],
    contents: Contents,
    name: str,
    value: torch.Tensor,
    runtime: Runtime,
    dtype: torch.dtype,
) -> None:
    """A value that every rank has in full: the first rank writes all of it, the others none."""
    value = uncut(value)
    flat = dense(value).view(-1)
    mine = flat.numel() if runtime.comm.world_rank == runtime.comm.world.members[0] else 0
    into.append(LocalSlice(Tensor(name, dtype, tuple(value.shape)), 0, mine, flat[:mine]))
    contents.replicated[("" if into is contents.model else "optimizer/") + name] = value.detach()


def module_digests(contents: Contents) -> dict[str, int]:
    """A checksum of each module's extra state."""
    return {module_key(n): checksum(json.dumps(tree).encode()) for n, tree in contents.modules.items()}


def module_key(name: str) -> str:
    """The name of a module's extra state among the digests; no tensor has such a name."""
    return f"module/{name}"


def digest(value: torch.Tensor) -> int:
    return checksum(as_bytes(dense(value).cpu()).numpy().data)
