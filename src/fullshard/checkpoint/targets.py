"""Where a checkpoint's values go: for each tensor of the model, this rank's elements of it.

First everything is looked up, and what will be read is announced; nothing changes until the reads run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import nn
from torch.autograd.graph import increment_version

from fullshard.checkpoint import contents
from fullshard.checkpoint.contents import Site
from fullshard.checkpoint.reading import Foreign, Source, Stored
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensor_parallel import put
from fullshard.errors import CheckpointError

_OTHER = "Load a checkpoint of this very model; strict=False loads what fits and says what does not."
Get = Callable[[], torch.Tensor]


@dataclass
class Work:
    """What a load will do on this rank once everything has been checked."""

    reads: list[Callable[[], None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_model(
    work: Work, source: Source, runtime: Runtime, model: nn.Module, tied: Mapping[str, str], strict: bool
) -> None:
    """Find every tensor of the model in the checkpoint; shapes and names are checked here."""
    aliases: dict[str, list[str]] = {}
    for other, name in contents.tied_names(model).items():
        aliases.setdefault(name, []).append(other)
    used: set[str] = set()
    missing: list[str] = []
    targets: list[tuple[str, tuple[int, ...], Callable[[Stored], None]]] = []
    for site in contents.sites(runtime, model):
        shape = tuple(site.parameter.shape) if site.lane is None else site.piece.global_shape
        get = partial(_itself, site.parameter)
        targets.append((site.name, shape, reader(work, source, site, site.parameter.dtype, get)))
    for name, buffer in contents.buffers(model).items():
        get = partial(_itself, buffer)
        targets.append((name, tuple(buffer.shape), whole_reader(work, source, buffer.dtype, get)))
    for name, shape, want in targets:
        names = [name, *aliases.get(name, ())]
        stored_as = next((s for n in names for s in (n, tied.get(n, n)) if s in source.model), None)
        if stored_as is None:
            missing.append(name)
            continue
        found = [stored_as, *(n for n in names if n in source.model and n != stored_as)]
        used |= set(found)
        if len(found) > 1 and not isinstance(source, Foreign):
            _check_tied(work, source, found, strict)
        stored = source.model[stored_as]
        check_shape(source, stored, shape, name)
        want(stored)
    _check_names(work, source, missing, sorted(set(source.model) - used), strict)


def _check_tied(work: Work, source: Source, found: list[str], strict: bool) -> None:
    """The checkpoint has tensors of their own where the model has one under several names."""
    what = f"{listed(found)} are not one tensor in {str(source.folder)!r}, and are one in the model"
    if strict:
        raise CheckpointError(what, "Untie them in the model; strict=False takes the first one for all.")
    work.notes.append(f"{what}: {found[0]!r} taken")


def _check_names(work: Work, source: Source, missing: list[str], unused: list[str], strict: bool) -> None:
    folder = str(source.folder)
    needed = [name for name in missing if name not in source.may_lack]
    if strict and needed:
        raise CheckpointError(f"{folder!r} has no {listed(needed)}, which the model has", _OTHER)
    if strict and unused:
        raise CheckpointError(f"{folder!r} has {listed(unused)}, which the model has not", _OTHER)
    if missing:
        work.notes.append(f"not in the checkpoint, left as they were: {listed(missing)}")
    if unused:
        work.notes.append(f"in the checkpoint, but not in the model: {listed(unused)}")


def listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


def check_shape(source: Source, stored: Stored, shape: tuple[int, ...], name: str) -> None:
    if stored.tensor.shape != shape:
        raise CheckpointError(
            f"{name!r} has shape {stored.tensor.shape} in {str(source.folder)!r} and {shape} in the model",
            "Load a checkpoint of this very model.",
        )


def _check_cast(work: Work, stored: Stored, dtype: torch.dtype) -> None:
    kept = stored.tensor.dtype
    if kept == dtype:
        return
    if not (kept.is_floating_point and dtype.is_floating_point):
        raise CheckpointError(
            f"{stored.tensor.name!r} is stored as {kept} and would have to become {dtype}",
            "Load a checkpoint of this very model.",
        )
    if not _holds(dtype, kept):
        note = f"values stored as {kept} were rounded to {dtype}"
        if note not in work.notes:
            work.notes.append(note)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of the one dtype is a value of the other: not so for fp16 and bf16, either way."""
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.eps <= b.eps and a.max >= b.max and a.smallest_normal <= b.smallest_normal


def reader(work: Work, source: Source, site: Site, dtype: torch.dtype, get: Get) -> Callable[[Stored], None]:
    """Plans to read this rank's elements of a parameter, or of a state of the same shape."""
    if site.lane is None:
        return whole_reader(work, source, dtype, get)
    lane, piece = site.lane, site.piece
    start, stop = (0, piece.num_elements) if lane.replicated else lane.layout.kept(piece, lane.comm.rank)

    def want(stored: Stored) -> None:
        _check_cast(work, stored, dtype)
        in_rows = piece.region is None or piece.region.in_rows
        if piece.order != tuple(range(len(piece.shape))) or not in_rows:
            _want_reordered(work, source, site, get, stored)
            return
        begin = 0 if piece.region is None else piece.region.begin
        source.want(stored, begin + start, begin + stop)

        def read() -> None:
            into = get()
            source.read(stored, begin + start, begin + stop, into.detach().view(-1))
            increment_version(into)

        work.reads.append(read)

    return want


def _want_reordered(work: Work, source: Source, site: Site, get: Get, stored: Stored) -> None:
    """Elements that lie in memory in another order than in the file, or are columns of it that tensor
    parallelism has cut: read rows, take what is ours."""
    assert site.lane is not None
    lane, piece = site.lane, site.piece
    start, stop = (0, piece.num_elements) if lane.replicated else lane.layout.kept(piece, lane.comm.rank)
    row = prod(piece.shape[1:])
    first, last = 0, piece.shape[0]
    if piece.order[0] == 0 and row:
        first, last = start // row, -(-stop // row)
    whole, region = piece.global_shape, piece.region
    above, long = (0 if region is None else region.offsets[0]), prod(whole[1:])
    begin, end = (above + first) * long, (above + last) * long
    source.want(stored, begin, end)

    def read() -> None:
        rows = torch.empty(end - begin, dtype=stored.tensor.dtype)
        source.read(stored, begin, end, rows)
        shaped = rows.view(last - first, *whole[1:])
        for dim in range(1, len(whole)):
            if region is not None:
                shaped = shaped.narrow(dim, region.offsets[dim], region.sizes[dim])
        flat = shaped.permute(piece.order).reshape(-1)[start - first * row : stop - first * row]
        if lane.replicated:
            get().detach().copy_(shaped)
        else:
            get().detach().view(-1).copy_(flat)

    work.reads.append(read)


def whole_reader(work: Work, source: Source, dtype: torch.dtype, get: Get) -> Callable[[Stored], None]:
    def want(stored: Stored) -> None:
        _check_cast(work, stored, dtype)
        source.want(stored, 0, stored.tensor.num_elements)
        work.reads.append(lambda: copy(get(), source.read_whole(stored)))

    return want


def copy(into: torch.Tensor, value: torch.Tensor) -> None:
    put(into, value)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
