"""Plans a load: for each tensor of the model, the elements of the checkpoint that this rank reads.

First every tensor is looked up, and what will be read is announced; nothing changes until the reads run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import nn
from torch.autograd.graph import increment_version

from fullshard.checkpoint.loading.reading import Foreign, Source, Stored
from fullshard.checkpoint.parameters import Site, buffers, sites, tied_names
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensor_parallel import put
from fullshard.errors import CheckpointError

_OTHER = "Load a checkpoint of this model; strict=False loads what fits and lists what does not."
Get = Callable[[], torch.Tensor]


@dataclass
class LoadPlan:
    """What a load will do on this rank once everything has been checked."""

    reads: list[Callable[[], None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_model(
    work: LoadPlan, source: Source, runtime: Runtime, model: nn.Module, tied: Mapping[str, str], strict: bool
) -> None:
    """Find every tensor of the model in the checkpoint, and check names and shapes."""
    aliases: dict[str, list[str]] = {}
    for other, name in tied_names(model).items():
        aliases.setdefault(name, []).append(other)
    used: set[str] = set()
    missing: list[str] = []
    targets: list[tuple[str, tuple[int, ...], Callable[[Stored], None]]] = []
    for site in sites(runtime, model):
        get = partial(_itself, site.parameter)
        targets.append(
            (site.name, site.global_shape, shard_reader(work, source, site, site.parameter.dtype, get))
        )
    for name, buffer in buffers(model).items():
        get = partial(_itself, buffer)
        targets.append((name, tuple(buffer.shape), tensor_reader(work, source, buffer.dtype, get)))
    for name, shape, add_read in targets:
        names = [name, *aliases.get(name, ())]
        stored_as = next((s for n in names for s in (n, tied.get(n, n)) if s in source.model), None)
        if stored_as is None:
            missing.append(name)
            continue
        all_stored = [stored_as, *(n for n in names if n in source.model and n != stored_as)]
        used |= set(all_stored)
        if len(all_stored) > 1 and not isinstance(source, Foreign):
            _check_tied(work, source, all_stored, strict)
        stored = source.model[stored_as]
        check_shape(source, stored, shape, name)
        add_read(stored)
    _check_names(work, source, missing, sorted(set(source.model) - used), strict)


def _check_tied(work: LoadPlan, source: Source, names: list[str], strict: bool) -> None:
    """The checkpoint has separate tensors where the model has one under several names."""
    what = f"{listed(names)} are one tensor in the model, and separate tensors in {str(source.folder)!r}"
    if strict:
        raise CheckpointError(what, "Untie them in the model; strict=False loads the first one.")
    work.notes.append(f"{what}: {names[0]!r} was loaded")


def _check_names(work: LoadPlan, source: Source, missing: list[str], unused: list[str], strict: bool) -> None:
    folder = str(source.folder)
    needed = [name for name in missing if name not in source.may_lack]
    if strict and needed:
        raise CheckpointError(f"{folder!r} has no {listed(needed)}, which the model has", _OTHER)
    if strict and unused:
        raise CheckpointError(f"{folder!r} has {listed(unused)}, which the model does not have", _OTHER)
    if missing:
        work.notes.append(f"not in the checkpoint, left as they were: {listed(missing)}")
    if unused:
        work.notes.append(f"in the checkpoint, but not in the model: {listed(unused)}")


def listed(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def check_shape(source: Source, stored: Stored, shape: tuple[int, ...], name: str) -> None:
    if stored.tensor.shape != shape:
        raise CheckpointError(
            f"{name!r} has shape {stored.tensor.shape} in {str(source.folder)!r} and {shape} in the model",
            "Load a checkpoint of this model.",
        )


def _check_cast(work: LoadPlan, stored: Stored, dtype: torch.dtype) -> None:
    kept = stored.tensor.dtype
    if kept == dtype:
        return
    if not (kept.is_floating_point and dtype.is_floating_point):
        raise CheckpointError(
            f"{stored.tensor.name!r} is stored as {kept} and would have to be converted to {dtype}",
            "Load a checkpoint of this model.",
        )
    if not _holds(dtype, kept):
        note = f"values stored as {kept} were rounded to {dtype}"
        if note not in work.notes:
            work.notes.append(note)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether `wide` represents every value of `narrow`: not so between fp16 and bf16, either way."""
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.eps <= b.eps and a.max >= b.max and a.smallest_normal <= b.smallest_normal


def shard_reader(
    work: LoadPlan, source: Source, site: Site, dtype: torch.dtype, get: Get
) -> Callable[[Stored], None]:
    """Adds to `work` the read of this rank's elements of a parameter, or of a state of the same shape."""
    if site.lane is None:
        return tensor_reader(work, source, dtype, get)
    lane, piece = site.lane, site.piece
    start, stop = (0, piece.num_elements) if lane.replicated else lane.layout.kept(piece, lane.comm.rank)

    def add_read(stored: Stored) -> None:
        _check_cast(work, stored, dtype)
        in_rows = piece.region is None or piece.region.in_rows
        if piece.order != tuple(range(len(piece.shape))) or not in_rows:
            _add_reordered(work, source, site, get, stored)
            return
        begin = 0 if piece.region is None else piece.region.begin
        source.want(stored, begin + start, begin + stop)

        def read() -> None:
            into = get()
            source.read(stored, begin + start, begin + stop, into.detach().view(-1))
            increment_version(into)

        work.reads.append(read)

    return add_read


def _add_reordered(work: LoadPlan, source: Source, site: Site, get: Get, stored: Stored) -> None:
    """Add the read of elements that are not contiguous in the file: another memory format, or columns of a
    tensor-parallel parameter. Complete rows are read, and this rank's elements copied from them."""
    assert site.lane is not None
    lane, piece = site.lane, site.piece
    start, stop = (0, piece.num_elements) if lane.replicated else lane.layout.kept(piece, lane.comm.rank)
    row = prod(piece.shape[1:])
    first, last = 0, piece.shape[0]
    if piece.order[0] == 0 and row:
        first, last = start // row, -(-stop // row)
    shape, region = piece.global_shape, piece.region
    row_offset, global_row = (0 if region is None else region.offsets[0]), prod(shape[1:])
    begin, end = (row_offset + first) * global_row, (row_offset + last) * global_row
    source.want(stored, begin, end)

    def read() -> None:
        rows = torch.empty(end - begin, dtype=stored.tensor.dtype)
        source.read(stored, begin, end, rows)
        shaped = rows.view(last - first, *shape[1:])
        for dim in range(1, len(shape)):
            if region is not None:
                shaped = shaped.narrow(dim, region.offsets[dim], region.sizes[dim])
        flat = shaped.permute(piece.order).reshape(-1)[start - first * row : stop - first * row]
        if lane.replicated:
            get().detach().copy_(shaped)
        else:
            get().detach().view(-1).copy_(flat)

    work.reads.append(read)


def tensor_reader(work: LoadPlan, source: Source, dtype: torch.dtype, get: Get) -> Callable[[Stored], None]:
    """Adds to `work` the read of all elements of a tensor."""

    def add_read(stored: Stored) -> None:
        _check_cast(work, stored, dtype)
        source.want(stored, 0, stored.tensor.num_elements)
        work.reads.append(lambda: put(get(), source.read_tensor(stored)))

    return add_read


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
