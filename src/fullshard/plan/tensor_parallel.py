"""Parameters that torch's tensor parallelism has cut already: everything that knows of DTensor.

`parallelize_module` leaves DTensors: each rank of one mesh axis holds a part of the tensor. The engine cuts
that part once more, element by element, over the ranks of the other axis:

    whole tensor    [a a a a|b b b b]        cut by torch over 'tp'
    tp rank 0       [a a|a a]                its part, cut here over 'dp'

While a unit is full its modules show DTensors over the full part, so torch's hooks and operators work. At
rest, and in optimizers, the user's parameter is a plain tensor of this rank's elements. It stays the same
object: its contents and its class are exchanged. Replacing the objects instead, as others do, would leave an
optimizer that was built before sharding with parameters that nobody trains.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _foreach_utils

from fullshard.errors import ModelError, NotSupported, OptionError, StateError
from fullshard.plan.layout import Region

_SPEC = "_tensor_parallel_spec"


@dataclass(frozen=True)
class Spec:
    """How torch has cut one parameter: the mesh axis, what lies where, the whole shape and strides."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self  # a mesh is not copied: it stands for the ranks

    def cuts_like(self, other: torch.Tensor) -> bool:
        """Whether a DTensor's parts are those of this one."""
        found = spec_of(other)
        return found is not None and (found.mesh, found.placements) == (self.mesh, self.placements)

    def wrap(self, part: torch.Tensor) -> DTensor:
        """This rank's part as the DTensor it belongs to; the same memory."""
        with torch.no_grad():
            return DTensor.from_local(
                part,
                self.mesh,
                self.placements,
                run_check=False,
                shape=torch.Size(self.shape),
                stride=self.stride,
            )


class ShardedParameter(torch.Tensor):
    """A tensor-parallel parameter at rest: plain, this rank's elements. An nn.Parameter to isinstance.

    Its slots are those of DTensor, unused, because Python lets an object change its class only to one that
    is laid out alike.
    """

    __slots__ = tuple(getattr(DTensor, "__slots__", ()))
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        copied: ShardedParameter = resting(self.data.clone(), self.requires_grad, self.__dict__[_SPEC])
        copied.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.data.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{self.data!r}"


# Optimizers then take their fast paths by default, as for any other parameter.
_supported = getattr(_foreach_utils, "_foreach_supported_types", None)
if isinstance(_supported, list) and ShardedParameter not in _supported:
    _supported.append(ShardedParameter)


def resting(values: torch.Tensor, requires_grad: bool, spec: Spec) -> Any:
    """A parameter of its own that looks like one of the user's at rest."""
    parameter = torch.Tensor._make_subclass(ShardedParameter, values, requires_grad)
    parameter.__dict__["_is_param"] = True  # how torch knows a Parameter that is of another class
    parameter.__dict__[_SPEC] = spec
    return parameter


def is_cut(tensor: torch.Tensor) -> bool:
    """Torch's tensor parallelism holds it as a DTensor now."""
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec_of(parameter: torch.Tensor) -> Spec | None:
    """How it is cut, also while the user's object is plain; None for a parameter that never was a DTensor."""
    if isinstance(parameter, DTensor):
        shape, stride = tuple(parameter.shape), tuple(parameter.stride())
        return Spec(parameter.device_mesh, tuple(parameter.placements), shape, stride)
    return parameter.__dict__.get(_SPEC) if isinstance(parameter, ShardedParameter) else None


# ---- which ranks


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """The mesh of the model's DTensors, None if it has none. What cannot be sharded is refused by name."""
    found: dict[tuple[int, ...], tuple[str, DeviceMesh]] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
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
    return next((n for n, p in model.named_parameters() if isinstance(p, DTensor)), "")


def axes_to_shard(mesh: DeviceMesh, parallel: DeviceMesh) -> DeviceMesh:
    """Of a mesh that has the tensor-parallel axes as well, the others; by their names."""
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
    """Where this rank's part lies in the whole. A plain tensor is the same whole on every rank of `mesh`."""
    shape = tuple(tensor.shape)
    placements = tensor.placements if isinstance(tensor, DTensor) else [Replicate()] * mesh.ndim
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    offsets, sizes, first = [0] * len(shape), list(shape), True
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            chunk = -(-sizes[dim] // mesh.size(axis))  # torch cuts like torch.chunk: the last may be short
            begin = min(coordinate[axis] * chunk, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = min(chunk, sizes[dim] - begin)
        else:
            first &= coordinate[axis] == 0
    return Region(shape, tuple(offsets), tuple(sizes), first)


def largest_part(tensor: torch.Tensor) -> int:
    """Elements of the largest part on any rank: the same answer on all, so that all find the same units."""
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    sizes = list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            dim = placement.dim % len(sizes)
            sizes[dim] = -(-sizes[dim] // tensor.device_mesh.size(axis))
    return int(torch.Size(sizes).numel())


# ---- the user's own objects


def come_to_rest(parameter: nn.Parameter) -> torch.Tensor:
    """The user's DTensor becomes plain. Returns what it was, to be given to `undo_rest`."""
    spec = spec_of(parameter)
    assert spec is not None
    twin: torch.Tensor = resting(local_of(parameter).detach(), parameter.requires_grad, spec)
    exchange(parameter, twin)
    return twin


def undo_rest(parameter: torch.Tensor, twin: torch.Tensor) -> None:
    exchange(parameter, twin)
    parameter.__dict__.pop(_SPEC, None)


def exchange(parameter: torch.Tensor, twin: torch.Tensor) -> None:
    """The two objects change contents and class; attributes and hooks stay with `parameter`.

    torch.utils.swap_tensors does the same, but not while a graph holds the contents, such as that of a
    forward inside fs.full whose result is kept. Here such a graph goes on with the twin, and an error stands
    where it would give that a gradient.
    """
    if isinstance(parameter, DTensor) and parameter.requires_grad:
        get_gradient_edge(parameter).node.register_prehook(_refuse_late_backward)
    kind, held, others = type(parameter), _slots(parameter), {**twin.__dict__, **parameter.__dict__}
    parameter.__class__ = type(twin)
    _fill_slots(parameter, _slots(twin))
    twin.__class__ = kind
    _fill_slots(twin, held)
    parameter.__dict__.update(others)
    twin.__dict__.update(others)
    torch._C._swap_tensor_impl(parameter, twin)
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None:  # the object has them still, but autograd was told for the other contents
        parameter._post_accumulate_grad_hooks = hooks


def _slots(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: getattr(tensor, name) for name in ShardedParameter.__slots__ if hasattr(tensor, name)}


def _fill_slots(tensor: torch.Tensor, values: dict[str, Any]) -> None:
    for name in ShardedParameter.__slots__:
        if name in values:
            setattr(tensor, name, values[name])
        elif hasattr(tensor, name):
            delattr(tensor, name)


def _refuse_late_backward(_: Any) -> None:
    raise StateError(
        "backward through a forward that ran inside fs.full, or before fs.shard",
        "Run training forwards on the sharded model, outside fs.full.",
    )


def show_dtensor(parameter: torch.Tensor, spec: Spec, part: torch.Tensor) -> torch.Tensor:
    """Inside fs.full: the user's object is the DTensor it was. Returns what it was at rest."""
    twin = nn.Parameter(spec.wrap(part), requires_grad=parameter.requires_grad)
    exchange(parameter, twin)
    return twin


# ---- gradients


def local_gradients(
    gradients: Sequence[torch.Tensor | None], specs: Sequence[Spec | None]
) -> list[torch.Tensor | None]:
    """This rank's part of each gradient, cut as its parameter is.

    Autograd leaves some as sums that are not finished (the weight of a norm whose input is cut by tokens):
    those are finished here, among the tensor-parallel ranks.
    """
    found: list[torch.Tensor | None] = []
    for gradient, spec in zip(gradients, specs, strict=True):
        if isinstance(gradient, DTensor) and spec is not None:
            if tuple(gradient.placements) != spec.placements:
                gradient = gradient.redistribute(placements=spec.placements)
            gradient = gradient._local_tensor
            wait = getattr(gradient, "wait", None)  # one that is still on its way
            gradient = gradient if wait is None else wait()
        found.append(gradient)
    return found


# ---- values


def uncut(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor, on every rank of its mesh: a collective. Any other tensor as it is."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def put(into: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a whole value into a tensor; of a DTensor, each rank its own part."""
    if isinstance(into, DTensor):
        value = part_of(value, region_of(into, into.device_mesh))
    local_of(into).detach().copy_(value)


def part_of(value: torch.Tensor, region: Region | None) -> torch.Tensor:
    """This rank's part of a parameter's value: of a DTensor, or cut from a whole one."""
    value = local_of(value)
    if region is None or tuple(value.shape) == region.sizes:
        return value
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        value = value.narrow(dim, offset, size)
    return value
