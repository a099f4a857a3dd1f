"""The parameters and buffers of a sharded model, under the names that checkpoints use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.engine.gradients import plainly
from fullshard.engine.homes.split_masters import restored
from fullshard.engine.lane import Lane
from fullshard.engine.runtime import Runtime
from fullshard.engine.step.block_state import decoded
from fullshard.errors import CheckpointError
from fullshard.plan.layout import Piece

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def canonical(name: str) -> str:
    """A parameter's own name, without the prefixes that wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@dataclass(frozen=True)
class Site:
    """A parameter of the model and where its elements are: in a lane, or, if ignored, all on every rank."""

    name: str
    parameter: nn.Parameter
    lane: Lane | None = None
    index: int = 0

    @property
    def piece(self) -> Piece:
        assert self.lane is not None
        return self.lane.layout.pieces[self.index]

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The unsharded shape, before tensor parallelism as well."""
        return tuple(self.parameter.shape) if self.lane is None else self.piece.global_shape

    @property
    def is_unsharded(self) -> bool:
        """Whether this rank has all elements, in their shape."""
        return self.lane is None or (self.lane.replicated and self.piece.region is None)

    @property
    def interval(self) -> list[int]:
        """This rank's elements: [start, stop), then offsets and sizes of a tensor-parallel region, if any."""
        if self.lane is None:
            return [0, self.parameter.numel()]
        part = [0, self.parameter.numel()]
        if not self.lane.replicated:
            part = list(self.lane.layout.kept(self.piece, self.lane.comm.rank))
        region = self.piece.region
        return part if region is None or not region.is_cut else [*part, *region.offsets, *region.sizes]


def sites(runtime: Runtime, model: nn.Module) -> list[Site]:
    """Every parameter, unit by unit. Neighbours in a lane are neighbours in the file."""
    sharded = [
        Site(canonical(piece.name), parameter, lane, index)
        for lane in runtime.lanes
        for index, (piece, parameter) in enumerate(zip(lane.layout.pieces, lane.parameters, strict=True))
    ]
    ignored = {id(p) for p in runtime.ignored}
    return sharded + [Site(canonical(n), p) for n, p in model.named_parameters() if id(p) in ignored]


def sites_by_group(known: list[Site], optimizer: torch.optim.Optimizer) -> list[list[Site]]:
    """The sites of each parameter group. A tensor that is not among `known` raises an error."""
    by_id = {id(site.parameter): site for site in known}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in by_id:
                raise CheckpointError(
                    f"group {index} of {type(optimizer).__name__} holds a tensor of shape "
                    f"{tuple(parameter.shape)} that the model does not own",
                    "Give the optimizer of this model, built from model.parameters().",
                )
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers, each once."""
    by_name: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            by_name[canonical(f"{prefix}.{name}".lstrip("."))] = buffer
    return by_name


def tied_names(model: nn.Module) -> dict[str, str]:
    """For a tensor with several names: each further name, and the one under which it is stored."""
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
    """Modules that override `get_extra_state`."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield canonical(name), module


def plain(value: torch.Tensor) -> torch.Tensor:
    """The value as a plain tensor: SGD's momentum begins as a copy of the gradient and keeps its type, and
    states may rest in 8-bit blocks."""
    value = restored(decoded(value))
    with plainly():
        return value.detach().as_subclass(torch.Tensor)  # type: ignore[no-any-return,unused-ignore]
