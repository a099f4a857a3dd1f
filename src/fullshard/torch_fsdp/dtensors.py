"""DTensor's questions, answered by the parameters, gradients and state dict values of `fully_shard`.

Scripts for torch's `fully_shard` take its parameters for DTensors: they call `full_tensor()` and `to_local()`
and hand `device_mesh` and `placements` to `distribute_tensor`. Behind this signature, and no other, the same
works here. No DTensor is involved: optimizers, clipping and saving see the plain shards of the engine, so
nothing is slower, and torch's operators on DTensors, which know rows only, are never reached. To isinstance a
sharded parameter is a DTensor, by way of its `__class__`; its type is not, and inside the package only
`plan.tensor_parallel.is_cut` decides.

`placements` names an ElementShard. It is a Shard(0), and equal to one: elements lie in the order of the first
dimension. But it is cut between elements, not between rows, wherever the flat buffer of the unit is cut.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _foreach_utils

from fullshard.comm.groups import rank_count
from fullshard.engine.gradients import GradShard, plainly
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import in_memory_order
from fullshard.engine.piecewise import ELEMENT_WISE
from fullshard.errors import NotSupported, StateError
from fullshard.plan.tensor_parallel import Spec
from fullshard.state.state_dict import StateShard, shard_of

_CLASS = object.__dict__["__class__"]  # what `__class__` is everywhere else
_PLACE = "_fully_shard_place"


class ElementShard(Shard):
    """A Shard(0) that is cut between elements: this rank holds [start, stop) of the flat tensor."""

    _lane: Lane
    _index: int

    @staticmethod
    def of(lane: Lane, index: int) -> ElementShard:
        placement = ElementShard(0)
        object.__setattr__(placement, "_lane", lane)
        object.__setattr__(placement, "_index", index)
        return placement

    @property
    def interval(self) -> tuple[int, int]:
        """This rank's elements, as [start, stop) of the tensor in memory order."""
        lane = self._lane
        return lane.layout.kept(lane.layout.pieces[self._index], lane.comm.rank)

    def distributed(self, full: torch.Tensor) -> StateShard:
        """This rank's elements of an unsharded tensor that every rank has."""
        lane, index = self._lane, self._index
        piece, (start, stop) = lane.layout.pieces[index], self.interval
        if tuple(full.shape) != piece.shape:
            raise StateError(
                f"distribute_tensor of a value of shape {tuple(full.shape)} with the placements of "
                f"{piece.name!r}, which has {piece.shape}",
                "Take the placements of the parameter that the value is for.",
            )
        local = in_memory_order(full.detach(), piece)[start:stop].clone()
        return shard_of(lane, index, local, piece.name)

    def __repr__(self) -> str:
        return f"ElementShard(dim=0, elements={self.interval})"

    __str__ = __repr__

    def __deepcopy__(self, memo: dict[int, Any]) -> ElementShard:
        return self


class Mesh:
    """The mesh of one `fully_shard`ed model as torch would show it: the one given, or that of all ranks."""

    def __init__(self, given: DeviceMesh | None, device_type: str) -> None:
        self._mesh, self._device_type = given, device_type

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    @property
    def ndim(self) -> int:
        return 1 if self._mesh is None else self._mesh.ndim

    def get(self) -> DeviceMesh:
        if self._mesh is None:
            self._mesh = init_device_mesh(self._device_type, (rank_count(),))
        return self._mesh

    def placements(self, shard: Shard) -> tuple[Any, ...]:
        """Replicated over all axes but the last."""
        return (*(Replicate() for _ in range(self.ndim - 1)), shard)


class Answers:
    """Answers DTensor's questions. Mixed into the class of a tensor that the engine has made."""

    __slots__ = ()
    to_isinstance = True  # whether these are DTensors to it

    @property
    def __class__(self) -> Any:
        return DTensor if self.to_isinstance and self._is_distributed() else type(self)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        _CLASS.__set__(self, kind)

    def _is_distributed(self) -> bool:
        raise NotImplementedError

    @property
    def device_mesh(self) -> DeviceMesh:
        raise NotImplementedError

    @property
    def placements(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        raise NotImplementedError

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        raise NotImplementedError

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.to_local()

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **_: Any
    ) -> Any:
        """A DTensor of torch's, from the unsharded value: a collective."""
        mesh = device_mesh or self.device_mesh
        replicated = [Replicate() for _ in range(mesh.ndim)]
        full: Any = DTensor.from_local(self.full_tensor(), mesh, replicated, run_check=False)
        return full.redistribute(placements=placements or replicated)


class ShardAnswers(Answers):
    """Of a tensor with this rank's elements of a sharded parameter: it, its gradient, or a state of it."""

    __slots__ = ()

    def _place(self) -> tuple[Mesh, Lane, int]:
        mesh, lane, index = self.__dict__.get(_PLACE, (None, _nowhere, 0))
        alive = lane()
        if mesh is None or alive is None:
            raise AttributeError("this tensor is no longer part of a sharded model")
        return mesh, alive, index

    def _is_distributed(self) -> bool:
        lane = self.__dict__.get(_PLACE, (None, _nowhere))[1]()
        return lane is not None and lane.unsharded is None

    @property
    def device_mesh(self) -> DeviceMesh:
        mesh, lane, index = self._place()
        spec = _spec_of(lane, index)
        return mesh.get() if spec is None else _joint_mesh(mesh.get(), spec)

    @property
    def placements(self) -> tuple[Any, ...]:
        mesh, lane, index = self._place()
        spec, shard = _spec_of(lane, index), ElementShard.of(lane, index)
        return (*mesh.placements(shard), *(() if spec is None else spec.placements))

    @property
    def _spec(self) -> Any:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # a private module

        _, lane, index = self._place()
        like = torch.empty(lane.layout.pieces[index].global_shape, device="meta")
        meta = TensorMeta(like.shape, like.stride(), self.dtype)  # type: ignore[attr-defined]
        return DTensorSpec(self.device_mesh, self.placements, tensor_meta=meta)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's elements, in the engine's shape and memory."""
        local = self.detach()  # type: ignore[attr-defined]
        with plainly():
            plain: torch.Tensor = local.as_subclass(torch.Tensor)
            return plain

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """The unsharded value, on every rank. All ranks must call it, value by value in the same order."""
        _, lane, index = self._place()
        local = self.to_local()
        if lane.unsharded is not None:
            return local.clone()
        return shard_of(lane, index, local, lane.layout.pieces[index].name).full_tensor()


class TotalNorm(torch.Tensor):
    """What `clip_grad_norm_` returns: the norm over all ranks, which scripts call `full_tensor()` of."""

    placements = ()  # over no axis of a mesh: it is complete on every rank

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plainly():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(cls) if func is torch.linalg.vector_norm else out

    def full_tensor(self) -> torch.Tensor:
        with plainly():
            return self.as_subclass(torch.Tensor)

    to_local = full_tensor


class GradientDTensor(ShardAnswers, GradShard):
    """A gradient shard."""

    total = TotalNorm


class _InAFunction(threading.local):
    """Whether this thread runs a function of torch on a state dict value.

    torch 2.11 asks for the class there, and hands what says that it is a DTensor to operators of its own.
    """

    here = False


_in_a_function = _InAFunction()


class StateDTensor(ShardAnswers, StateShard):
    """A value of a state dict. Element-wise functions apply to this rank's part."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, _in_a_function.here = _in_a_function.here, True
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            _in_a_function.here = before

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        values = [a for a in args if isinstance(a, StateShard)]
        if name in _HELD or name.rstrip("_") not in ELEMENT_WISE or not _cut_alike(args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        local = [a.local if isinstance(a, StateShard) else a for a in args]
        out = func(*local, **(kwargs or {}))
        return values[0] if name.endswith("_") else values[0]._holding(out)

    def _is_distributed(self) -> bool:
        return not _in_a_function.here

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        return self.local

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        return StateShard.full_tensor(self)

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.local


_HELD = {"detach", "clone"}  # what every StateShard knows


def _cut_alike(args: Sequence[Any]) -> bool:
    """Whether tensors among the arguments are parts of one cut, or numbers."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim() > 0]
    cuts = {(t.piece, t.start, t.stop) if isinstance(t, StateShard) else None for t in tensors}
    return len(cuts) == 1 and None not in cuts


class Present:
    """Makes what the engine of one model shows answer DTensor's questions; see `Lane.present`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> Present:
        return self

    def __call__(self, tensor: torch.Tensor, lane: Lane, index: int) -> None:
        _CLASS.__set__(tensor, _answering(type(tensor)))
        tensor.__dict__[_PLACE] = self._mesh, weakref.ref(lane), index


_nowhere: Any = lambda: None  # noqa: E731  a dead reference
_answering_kinds: dict[type, type] = {GradShard: GradientDTensor, StateShard: StateDTensor}


def _answering(kind: type) -> type:
    """The class that answers, for a class of tensors."""
    if issubclass(kind, ShardAnswers):
        return kind
    if kind not in _answering_kinds:
        slots = {name: getattr(kind, name) for name in getattr(kind, "__slots__", ())}
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__slots__": (), **slots}
        if issubclass(kind, GradShard):
            body["total"] = TotalNorm
        answering = type(kind.__name__, (ShardAnswers, kind), body)
        _answering_kinds[kind] = answering
        _on_fast_paths(answering)
    return _answering_kinds[kind]


def _on_fast_paths(kind: type) -> None:
    """Optimizers, and clipping, then treat many tensors in one call, as for any other parameter."""
    supported = getattr(_foreach_utils, "_foreach_supported_types", None)
    if isinstance(supported, list) and kind not in supported:
        supported.append(kind)


_on_fast_paths(GradientDTensor)


def _spec_of(lane: Lane, index: int) -> Spec | None:
    return lane.specs[index] if lane.specs else None


def _joint_mesh(mesh: DeviceMesh, spec: Spec) -> DeviceMesh:
    """The mesh of which both axes are part: data parallel and tensor parallel."""
    names = (mesh.mesh_dim_names or ()) + (spec.mesh.mesh_dim_names or ())
    root = getattr(mesh, "_get_root_mesh", lambda: None)()
    if root is None or root.mesh_dim_names is None or not set(names) <= set(root.mesh_dim_names):
        raise AttributeError("the meshes of data parallelism and tensor parallelism have no common mesh")
    joint: DeviceMesh = root if root.mesh_dim_names == names else root[names]
    return joint


# ---- before a meta-device model has memory


class DeferredAnswers(Answers):
    """Of a tensor that will be sharded, on meta. Where its elements will lie is not known yet: by rows."""

    def _is_distributed(self) -> bool:
        return self.is_meta and _PLACE in self.__dict__  # type: ignore[attr-defined]

    @property
    def device_mesh(self) -> DeviceMesh:
        mesh: Mesh = self.__dict__[_PLACE]
        return mesh.get()

    @property
    def placements(self) -> tuple[Any, ...]:
        mesh: Mesh = self.__dict__[_PLACE]
        return mesh.placements(Shard(0))

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's rows, on meta."""
        tensor: Any = self.detach().as_subclass(torch.Tensor)  # type: ignore[attr-defined]
        ranks, rank = self.device_mesh.size(-1), self.device_mesh.get_local_rank(self.device_mesh.ndim - 1)
        rows = torch.chunk(tensor, ranks) if tensor.dim() else (tensor,)
        return rows[rank] if rank < len(rows) else tensor[:0]

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        raise NotSupported(
            "full_tensor() of a parameter on meta: it has no values yet",
            "Call model.to_empty(device=...) and initialise it, or load a state dict, first.",
        )


class DeferredParameter(DeferredAnswers, nn.Parameter):
    """A parameter of a meta-device model before `to_empty`."""


class DeferredValue(DeferredAnswers, torch.Tensor):
    """A value of its state dict."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def present_parameter_on_meta(parameter: nn.Parameter, mesh: Mesh) -> None:
    if type(parameter) is nn.Parameter and parameter.is_meta:
        _CLASS.__set__(parameter, DeferredParameter)
        parameter.__dict__[_PLACE] = mesh


def withdraw(parameters: Iterable[nn.Parameter]) -> None:
    """Undo `present_parameter_on_meta`: the engine is about to give them memory."""
    for parameter in parameters:
        if issubclass(type(parameter), DeferredParameter):
            _CLASS.__set__(parameter, nn.Parameter)
            del parameter.__dict__[_PLACE]


def value_on_meta(value: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    answering: torch.Tensor = value.as_subclass(DeferredValue)
    answering.__dict__[_PLACE] = mesh
    return answering
