"""What a model and its optimizer hold, as tensors of whole shape with this rank's elements of each.

Every rank lists the same tensors in the same order; only which elements it holds differs. A value that is
whole on every rank (a buffer, a step counter) is the first rank's to write; ranks whose own differs keep it
in their tree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.format import headers
from fullshard.checkpoint.format.checksums import checksum
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.values import MAX_INLINE_BYTES, Encoder, Tree, dense
from fullshard.comm.groups import as_bytes
from fullshard.engine.gradients import plainly
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import piece_view
from fullshard.engine.runtime import Runtime
from fullshard.errors import CheckpointError
from fullshard.plan.layout import Piece
from fullshard.plan.tensor_parallel import uncut

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass
class Held:
    """A tensor, and the elements [start, stop) of it, row-major, that this rank writes."""

    tensor: Tensor
    start: int
    stop: int
    values: torch.Tensor  # flat, these elements, wherever they live


@dataclass
class Contents:
    """Everything that goes into a checkpoint, as one rank sees it."""

    model: list[Held] = field(default_factory=list)
    optimizer: list[Held] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    modules: dict[str, Tree] = field(default_factory=dict)
    optimizer_state: Tree = None
    whole: dict[str, torch.Tensor] = field(default_factory=dict)  # on every rank; the first one's is written
    own: dict[str, Tree] = field(default_factory=dict)  # optimizer state that has not its parameter's shape
    encoder: Encoder = field(default_factory=Encoder)  # of the optimizer's values


def canonical(name: str) -> str:
    """A parameter's own name, without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class Site:
    """Where a parameter of the model lives: in a lane, or, ignored, whole on every rank."""

    name: str
    parameter: nn.Parameter
    lane: Lane | None = None
    index: int = 0

    @property
    def piece(self) -> Piece:
        assert self.lane is not None
        return self.lane.layout.pieces[self.index]


def sites(runtime: Runtime, model: nn.Module) -> list[Site]:
    """Every parameter, unit by unit; neighbours in a lane are neighbours in the file."""
    found = [
        Site(canonical(piece.name), parameter, lane, index)
        for lane in runtime.lanes
        for index, (piece, parameter) in enumerate(zip(lane.layout.pieces, lane.parameters, strict=True))
    ]
    ignored = {id(p) for p in runtime.ignored}
    found += [Site(canonical(n), p) for n, p in model.named_parameters() if id(p) in ignored]
    return found


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the state, each once."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[canonical(f"{prefix}.{name}".lstrip("."))] = buffer
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of a tensor: the one it is stored under."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for named in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            stored = first.setdefault(id(tensor), canonical(name))
            if stored != canonical(name):
                tied[canonical(name)] = stored
    return tied


def modules_with_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield canonical(name), module


def plain(value: torch.Tensor) -> torch.Tensor:
    """SGD's momentum begins as a copy of the gradient, and is of the gradient's type ever after."""
    with plainly():
        return value.detach().as_subclass(torch.Tensor)  # type: ignore[no-any-return,unused-ignore]


def elements_of(site: Site, local: torch.Tensor, dtype: torch.dtype | None = None) -> Held:
    """`local` has the parameter's shape on this rank: it, or a state of its optimizer."""
    assert site.lane is not None
    lane, piece, comm = site.lane, site.piece, site.lane.comm
    if piece.region is not None and not piece.region.in_rows:
        return _share_of_whole(site, local, dtype)
    start, stop = lane.layout.written(piece, comm.rank, comm.replica, comm.replicas)
    if piece.order != tuple(range(len(piece.shape))):
        values = _row_major(site, local)[start:stop].clone()  # the whole goes at once
    elif lane.replicated:
        values = local.detach().reshape(-1)[start:stop]
    else:
        first, _ = lane.layout.kept(piece, comm.rank)
        values = local.detach().reshape(-1)[start - first : stop - first]
    begin = 0 if piece.region is None else piece.region.begin
    tensor = Tensor(site.name, dtype or local.dtype, piece.global_shape)
    return Held(tensor, begin + start, begin + stop, values)


def _share_of_whole(site: Site, local: torch.Tensor, dtype: torch.dtype | None) -> Held:
    """Of a parameter that tensor parallelism has cut by columns, say: an even share of the whole tensor.

    A rank's elements are no interval of the file, so all ranks bring the tensor together: a collective.
    """
    lane, piece = site.lane, site.piece
    assert lane is not None
    spec = lane.specs[site.index]
    assert spec is not None
    part = local.detach() if lane.replicated else _part_of_group(site, local)
    members = lane.comm.world.members
    index, count = members.index(lane.comm.world_rank), prod(spec.shape)
    start, stop = (count * i // len(members) for i in (index, index + 1))
    whole = spec.wrap(part.contiguous()).full_tensor().reshape(-1)
    values = whole[start:stop].clone()  # the whole goes at once
    return Held(Tensor(site.name, dtype or local.dtype, piece.global_shape), start, stop, values)


def _part_of_group(site: Site, local: torch.Tensor) -> torch.Tensor:
    """What the ranks of this model's Comm hold together: the tensor-parallel part, in its own shape."""
    lane, piece = site.lane, site.piece
    assert lane is not None
    comm = lane.comm
    kept = [lane.layout.kept(piece, rank) for rank in range(comm.ranks)]
    sizes = [stop - start for start, stop in kept]
    rows = torch.zeros(comm.ranks, max(sizes), dtype=local.dtype, device=local.device)
    rows[comm.rank, : sizes[comm.rank]].copy_(local.detach().reshape(-1))
    if rows.numel():
        operation = comm.gather(as_bytes(rows), as_bytes(rows[comm.rank]), comm.tag(lane.unit, "save"))
        if operation is not None:
            operation.wait()
    flat = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
    return piece_view(flat, replace(piece, start=0))


def _row_major(site: Site, local: torch.Tensor) -> torch.Tensor:
    """The whole value, row-major, of a parameter that lies otherwise in memory (channels-last, say).

    Its elements on this rank are no interval of the file, so the ranks bring them together: a collective.
    """
    lane, piece = site.lane, site.piece
    assert lane is not None
    if lane.replicated:
        return local.detach().contiguous().view(-1)
    index = lane.layout.pieces.index(piece)
    flat = lane.gather_pieces({index: local}, local.dtype, lane.comm.tag(lane.unit, "save"))
    return piece_view(flat, piece).contiguous().view(-1)


def take_model(
    contents: Contents, runtime: Runtime, model: nn.Module, dtype: torch.dtype | None, frozen: bool = True
) -> None:
    """Parameters, buffers and extra state of a sharded model. `dtype` is that of floating point values.

    Without `frozen`, parameters that do not train are left out.
    """
    for site in sites(runtime, model):
        if not (frozen or site.parameter.requires_grad):
            continue
        stored = _stored_dtype(site.parameter.dtype, dtype)
        if site.lane is None:
            _add_whole(contents.model, contents, site.name, site.parameter, runtime, stored)
        else:
            contents.model.append(elements_of(site, site.parameter, stored))
    for name, buffer in buffers(model).items():
        _add_whole(contents.model, contents, name, buffer, runtime, buffer.dtype)
    contents.tied = tied_names(model)
    encoder = Encoder(MAX_INLINE_BYTES)
    for name, module in modules_with_state(model):
        contents.modules[name] = encoder.encode(module.get_extra_state(), f"extra state of {name!r}")
    if encoder.tensors:
        raise CheckpointError(
            f"{next(iter(encoder.tensors))} holds a large tensor", "Register it as a buffer of the module."
        )


def _stored_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _add_whole(
    into: list[Held], contents: Contents, name: str, value: torch.Tensor, runtime: Runtime, dtype: torch.dtype
) -> None:
    value = uncut(value)
    plain = dense(value).view(-1)
    mine = plain.numel() if runtime.comm.world_rank == runtime.comm.world.members[0] else 0
    into.append(Held(Tensor(name, dtype, tuple(value.shape)), 0, mine, plain[:mine]))
    contents.whole[("" if into is contents.model else "optimizer/") + name] = value.detach()


def take_optimizer(
    contents: Contents, runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Groups and state of an optimizer, by the names of the parameters."""
    known = {id(site.parameter): site for site in sites(runtime, model)}
    groups: list[Tree] = []
    order: list[Site] = []
    for index, group in enumerate(optimizer.param_groups):
        members = [_site_of(known, p, optimizer, index) for p in group["params"]]
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append(
            {
                "parameters": [site.name for site in members],
                "options": contents.encoder.encode(options, f"group {index} of the optimizer"),
            }
        )
        order += members
    kinds = _kinds(order, optimizer)
    position = {key: i for i, key in enumerate(known)}
    order.sort(key=lambda site: position[id(site.parameter)])
    keys = dict.fromkeys(key for site in order for key in optimizer.state.get(site.parameter, {}))
    state: dict[str, dict[str, Tree]] = {
        site.name: {} for site in order if optimizer.state.get(site.parameter)
    }
    for key in keys:  # key by key, so that neighbours in a lane are neighbours in the file
        for site in order:
            held = optimizer.state.get(site.parameter, {})
            if key in held:
                state[site.name][key] = _take_state(contents, runtime, site, key, held[key], kinds.get(key))
    contents.optimizer_state = {"class": type(optimizer).__name__, "groups": groups, "state": state}


def _site_of(known: dict[int, Site], parameter: Any, optimizer: torch.optim.Optimizer, group: int) -> Site:
    site = known.get(id(parameter))
    if site is None:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} (group {group}) "
            "that the model does not own",
            "Save the optimizer of this model: build it from model.parameters().",
        )
    return site


def _kinds(order: list[Site], optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Keys that are 'scalar', one number for a parameter whatever its shape, or a rank's 'own'.

    By key, not by parameter: a rank with none of a parameter's elements takes anything for its shape.
    """
    found = {"step": "scalar"}
    for site in order:
        for key, value in optimizer.state.get(site.parameter, {}).items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"the optimizer keeps state of {site.name!r} under {key!r}, which is not a text",
                    "Use texts as names of optimizer state.",
                )
            if isinstance(value, torch.Tensor) and value.dim() == 0 and site.parameter.dim() > 0:
                found[key] = "scalar"
            elif isinstance(value, torch.Tensor) and value.shape != site.parameter.shape:
                found.setdefault(key, "own")
    return found


def _take_state(
    contents: Contents, runtime: Runtime, site: Site, key: str, value: Any, kind: str | None
) -> Tree:
    name = f"{site.name}.{key}"
    if not isinstance(value, torch.Tensor):
        return {"kind": "value", "value": contents.encoder.encode(value, f"optimizer state {name!r}")}
    value = plain(value)
    headers.check_dtype(name, value.dtype)
    device = "host" if value.device.type == "cpu" else "device"
    if kind == "scalar" and value.numel() == 1:
        _add_whole(contents.optimizer, contents, name, value, runtime, value.dtype)
        return {"kind": "scalar", "device": device}
    if kind == "own" or value.shape != site.parameter.shape:
        contents.own[name] = {"interval": interval(site), "value": contents.encoder.encode(value, name)}
        return {"kind": "own", "device": device}
    if site.lane is None:
        _add_whole(contents.optimizer, contents, name, value, runtime, value.dtype)
    else:
        held = elements_of(site, value)
        contents.optimizer.append(
            Held(Tensor(name, value.dtype, held.tensor.shape), held.start, held.stop, held.values)
        )
    return {"kind": "elements", "device": device}


def interval(site: Site) -> list[int]:
    """The elements of its parameter that such state belongs to."""
    if site.lane is None:
        return [0, site.parameter.numel()]
    part = [0, site.parameter.numel()]
    if not site.lane.replicated:
        part = list(site.lane.layout.kept(site.piece, site.lane.comm.rank))
    region = site.piece.region
    return part if region is None or not region.is_cut else [*part, *region.offsets, *region.sizes]


def module_digests(contents: Contents) -> dict[str, int]:
    """Of each module's extra state."""
    return {module_key(n): checksum(json.dumps(tree).encode()) for n, tree in contents.modules.items()}


def module_key(name: str) -> str:
    """Among the digests, extra state of a module has a name that no tensor has."""
    return f"module/{name}"


def digest(value: torch.Tensor) -> int:
    return checksum(as_bytes(dense(value).cpu()).numpy().data)
