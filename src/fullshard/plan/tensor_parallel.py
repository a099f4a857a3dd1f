"""How torch's tensor parallelism has cut a model's parameters: meshes, ranks and regions. Changes nothing.

`parallelize_module` makes parameters DTensors: each rank of one mesh axis holds a part of the tensor. The
engine cuts that part once more, element by element, over the ranks of the other axis:

    tensor          [a a a a|b b b b]        cut by torch over 'tp'
    tp rank 0       [a a|a a]                its part, cut here over 'dp'

`fullshard.engine.tensor_parallel` changes the user's objects accordingly.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.errors import ModelError, NotSupported, OptionError
from fullshard.plan.layout import Region

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SPEC_ATTRIBUTE = "_tensor_parallel_spec"  # of a parameter that is a plain tensor for now


@dataclass(frozen=True)
class Spec:
    """How torch has cut one parameter: mesh axis, placements, and the global shape and strides."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self  # a mesh cannot be copied

    def cuts_like(self, other: torch.Tensor) -> bool:
        """Whether `other` is a DTensor that is cut in the same way."""
        spec = spec_of(other)
        return spec is not None and (spec.mesh, spec.placements) == (self.mesh, self.placements)

    def wrap(self, part: torch.Tensor) -> DTensor:
        """The DTensor of which `part` is this rank's part, in the same memory."""
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            return DTensor.from_local(
                part,
                self.mesh,
                self.placements,
                run_check=False,
                shape=torch.Size(self.shape),
                stride=self.stride,
            )


def is_cut(tensor: Any) -> TypeGuard[DTensor]:
    """Whether it is a DTensor at the moment.

    A program that has none should not pay for importing their class, which takes a second: until somebody
    else has imported it, there is none.
    """
    # Not isinstance, to which the parameters of `torch_fsdp` are DTensors, too.
    return issubclass(type(tensor), getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if is_cut(tensor) else tensor


def spec_of(parameter: torch.Tensor) -> Spec | None:
    """How it is cut, also while it is a plain tensor; None for a parameter that never was a DTensor."""
    if is_cut(parameter):
        shape, stride = tuple(parameter.shape), tuple(parameter.stride())
        return Spec(parameter.device_mesh, tuple(parameter.placements), shape, stride)
    return vars(parameter).get(SPEC_ATTRIBUTE)


# ---- which ranks


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh of the model's DTensors, or None. DTensors that cannot be sharded raise an error."""
    found: dict[tuple[int, ...], tuple[str, DeviceMesh]] = {}
    for name, parameter in model.named_parameters():
        if not is_cut(parameter):
            continue
        _check_placements(name, parameter)
        ranks = tuple(int(r) for r in parameter.device_mesh.mesh.flatten())
        found.setdefault(ranks, (name, parameter.device_mesh))
    if len(found) > 1:
        (one, first), (other, second) = list(found.values())[:2]
        raise NotSupported(
            f"parameter {one!r} is a DTensor over ranks {_ranks(first)}, and {other!r} over {_ranks(second)}",
            "Apply tensor parallelism over one mesh axis.",
        )
    return next((mesh for _, mesh in found.values()), None)


def _check_placements(name: str, parameter: DTensor) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for placement in parameter.placements:
        if type(placement) not in (Shard, Replicate):
            raise NotSupported(
                f"parameter {name!r} is a DTensor with placement {placement}",
                "fs.shard takes parameters that are Shard or Replicate on their mesh axis.",
            )
    region = region_of(parameter, parameter.device_mesh)
    if tuple(local_of(parameter).shape) != region.sizes:
        raise ModelError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} has a part of shape "
            f"{tuple(local_of(parameter).shape)} here, where {parameter.placements} gives {region.sizes}",
            "Distribute it with torch's distribute_tensor or parallelize_module.",
        )


def _ranks(mesh: DeviceMesh) -> list[int]:
    return [int(r) for r in mesh.mesh.flatten()]


def tp_ranks_of(mesh: DeviceMesh, grid: torch.Tensor, name: str) -> list[int]:
    """The ranks that hold the other parts of this rank's tensors; none of them may be one of `grid`."""
    ranks = _ranks(mesh)
    both = sorted(set(ranks) & {int(r) for r in grid.flatten()})
    if len(both) > 1:
        raise NotSupported(
            f"parameter {name!r} is a DTensor over ranks {ranks} already, and fs.shard would shard it over "
            f"ranks {sorted(int(r) for r in grid.flatten())} once more",
            "Shard a plain model, or one that is tensor-parallel on another axis: mesh=mesh['dp'].",
        )
    return ranks


def first_cut_name(model: nn.Module) -> str:
    return next((n for n, p in model.named_parameters() if is_cut(p)), "")


def axes_to_shard(mesh: DeviceMesh, parallel: DeviceMesh) -> DeviceMesh:
    """The axes of a mesh over which the model is not tensor-parallel yet, by their names."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim == 1:
        return mesh
    names, theirs = tuple(mesh.mesh_dim_names or ()), set(parallel.mesh_dim_names or ())
    if not theirs & set(names):
        return mesh
    rest = tuple(name for name in names if name not in theirs)
    if not rest:
        raise OptionError(
            f"the mesh has no axis but {names}, over which the model is tensor-parallel already",
            'Use init_device_mesh(device, (D, T), mesh_dim_names=("dp", "tp")).',
        )
    return mesh[rest]


def region_of(tensor: torch.Tensor, mesh: DeviceMesh) -> Region:
    """Which part of a tensor this rank holds. A plain tensor is the same on every rank of `mesh`."""
    shape = tuple(tensor.shape)
    placements = tensor.placements if is_cut(tensor) else [None] * mesh.ndim
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    offsets, sizes, first = [0] * len(shape), list(shape), True
    for axis, placement in enumerate(placements):
        if placement is not None and placement.is_shard():
            dim = placement.dim % len(shape)  # type: ignore[attr-defined]
            chunk = -(-sizes[dim] // mesh.size(axis))  # torch cuts like torch.chunk: the last may be short
            begin = min(coordinate[axis] * chunk, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = min(chunk, sizes[dim] - begin)
        else:
            first &= coordinate[axis] == 0
    return Region(shape, tuple(offsets), tuple(sizes), first)


def largest_part(tensor: torch.Tensor) -> int:
    """Elements of the largest part on any rank: equal on all ranks, so that all find the same units."""
    if not is_cut(tensor):
        return tensor.numel()
    sizes = list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard():
            dim = placement.dim % len(sizes)  # type: ignore[attr-defined]
            sizes[dim] = -(-sizes[dim] // tensor.device_mesh.size(axis))
    return int(torch.Size(sizes).numel())


def part_of(value: torch.Tensor, region: Region | None) -> torch.Tensor:
    """This rank's part of a parameter's value, which is a DTensor, the part itself, or every element."""
    value = local_of(value)
    if region is None or tuple(value.shape) == region.sizes:
        return value
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        value = value.narrow(dim, offset, size)
    return value
