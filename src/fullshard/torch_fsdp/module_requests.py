"""The requests of `fully_shard`: what each call asked for, and the one call of `fs.shard` they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm.groups import rank_count
from fullshard.engine.runtime import Runtime, engine_of
from fullshard.engine.tensors import cast_floats, map_tensors
from fullshard.engine.unit import LiveUnit
from fullshard.errors import ModelError, NotSupported
from fullshard.policy import UnitPolicy
from fullshard.state.value_sources import BlankValues
from fullshard.torch_fsdp.deferred import (
    Phase,
    Request,
    Sharding,
    build,
    default_device,
    is_on_meta,
    outermost,
    outside_of_passes,
    parameters_in,
    request_of,
    requests_in,
)
from fullshard.torch_fsdp.dtensors import Mesh, Present, withdraw
from fullshard.torch_fsdp.initialization import BlankBuffers, Window
from fullshard.torch_fsdp.policies import MixedPrecisionPolicy, casts_of, precision_of


@dataclass(frozen=True)
class FullyShardOptions:
    """The arguments of one `fully_shard` call."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    policy: MixedPrecisionPolicy
    offload: bool
    ignored: frozenset[nn.Parameter]  # a set: the engine looks for parameters in lists, and would find these


@dataclass(frozen=True)
class ModuleClasses:
    """The class of a module without us, and the two that it has under `fully_shard`."""

    plain: type[nn.Module]
    deferred: type[nn.Module]
    sharded: type[nn.Module]

    def in_phase(self, phase: Phase) -> type[nn.Module]:
        if phase is Phase.BUILDING:
            return self.plain  # the engine looks at classes, and would see ours
        return self.sharded if phase is Phase.SHARDED else self.deferred


class ModuleRequest(Request):
    """Of one module: its options, the values that its setters were called with, and its window."""

    def __init__(self, module: nn.Module, options: FullyShardOptions, classes: ModuleClasses) -> None:
        self.options: FullyShardOptions = options
        self.classes = classes
        self.window: Window | None = None  # while its values are being initialised
        self.reshards = options.reshard_after_forward  # set_reshard_after_forward
        self.syncs = True  # set_requires_gradient_sync
        self.sums_replicas = True  # set_requires_all_reduce
        self.divisor: float | None = None  # set_gradient_divide_factor
        self.zero_unused = False  # set_reduce_scatter_unused_params
        self.compilations: list[tuple[Any, Any]] = []  # calls of compile() that wait for the engine
        self._engines_compile: Any = None  # while they wait although there is one
        super().__init__(module)
        self.set_phase(Phase.DEFERRED)

    @property
    def label(self) -> str:
        return self.classes.plain.__name__

    @property
    def runtime(self) -> Runtime | None:
        return engine_of(self.module)

    @property
    def unit(self) -> LiveUnit | None:
        return None if self.runtime is None else self.runtime.unit_of(self.module)

    def set_phase(self, phase: Phase) -> None:
        super().set_phase(phase)
        self.module.__class__ = self.classes.in_phase(phase)

    # ---- sharding

    def begin(self, used: bool = True) -> nn.Module:
        if self.phase is Phase.DEFERRED:
            _refuse_meta(outermost(self).module)
            super().begin()
        if used and self.window is not None:
            with outside_of_passes():
                self.window.end()
            assert self.runtime is not None
            for request in requests_in(self.runtime.model, ModuleRequest):
                request.window = None
                request.set_phase(Phase.SHARDED)
                request.compile_now()
        return self.module

    def compile_now(self) -> None:
        """Calls of compile() that came before the engine's own could take them."""
        if self._engines_compile is not None:
            self.module.__dict__["compile"], self._engines_compile = self._engines_compile, None
        for args, kwargs in self.compilations:
            self.module.compile(*args, **kwargs)
        self.compilations.clear()

    def begin_blank(self, device: torch.device | None) -> None:
        """`to_empty` of a meta-device model: shards with memory, and without values where there were none."""
        root = outermost(self)
        buffers = BlankBuffers(root.module)
        build(root, BlankValues())
        runtime = root.runtime
        if runtime is None:
            return
        places = {runtime.comm.device.type}
        if runtime.options.offload is not None:
            places.add("cpu")  # which torch requires of a model that is offloaded
        if device is not None and device.type not in places:
            raise NotSupported(
                f"to_empty(device={str(device)!r}) of a model that is sharded on {runtime.comm.device}",
                "Give to_empty the device of the mesh.",
            )
        window = Window(runtime, buffers)
        for request in requests_in(root.module, ModuleRequest):
            request.window = window
            request.set_phase(Phase.BLANK)
            # Until its first use the module has a forward that ends this phase, which must not be compiled.
            request._engines_compile = request.module.__dict__.pop("compile", None)

    def combine(self, requests: Sequence[Self]) -> Sharding | None:
        parameters = parameters_in(self.module)
        withdraw(parameters)
        left_out = frozenset[nn.Parameter]().union(*(r.options.ignored for r in requests))
        ignore = tuple(p for p in parameters if p in left_out)
        if len(ignore) == len(parameters):
            return None
        chosen = {request.module: request for request in requests}
        options = _placement(requests) | {
            "precision": precision_of(self.options.policy, self.own_parameters()),
            "units": chosen.__contains__,
            "ignore": ignore,
            "offload": "host" if any(request.options.offload for request in requests) else None,
        }
        options["device"] = _device(self.module, options["mesh"])
        return Sharding(options, lambda module: chosen[module].policy(), present=Present(self.mesh))

    @property
    def mesh(self) -> Mesh:
        """Of the model, in torch's terms."""
        given = self.options.mesh
        return Mesh(given, default_device().type)

    def policy(self) -> UnitPolicy:
        """Of the unit of this module; the same on all ranks, so that they gather alike."""
        mixed = self.options.policy
        return UnitPolicy(
            precision=precision_of(mixed, self.own_parameters()),
            stays_full=self._stays_full(),
            casts=casts_of(mixed),
            divisor=self.divisor,
            zero_unused=self.zero_unused,
            offload=self.options.offload,
        )

    def _stays_full(self) -> bool | None:
        if self.is_root:
            return False if self.reshards is True else None  # None, torch's default, keeps the root full
        on_one_rank = self.reshards is False or (self.reshards == 1 and self.reshards is not True)
        return True if on_one_rank else None

    def settle(self, requests: Sequence[Self]) -> None:
        if self.is_root:
            self.update_reduction()
            if self.runtime is not None and self.runtime.comm.device.type != "cpu":
                move = partial(_move_inputs, self.runtime.comm.device)
                self.module.register_forward_pre_hook(move, prepend=True, with_kwargs=True)
        if self.unit is None:
            _cast_around(self.module, *casts_of(self.options.policy))  # there is nothing to shard here
        self.compile_now()

    # ---- names of torch's state object that other libraries read

    @property
    def _is_root(self) -> bool | None:
        return self.is_root

    @property
    def _state_ctx(self) -> SimpleNamespace:
        root = self.module if self.runtime is None else self.runtime.model
        return SimpleNamespace(all_states=requests_in(root, ModuleRequest))

    @property
    def _modules_to_run_forward(self) -> set[nn.Module]:
        return set()  # units of several modules wait for none of them

    def _lazy_init(self) -> None:
        self.begin()

    # ---- setters

    def update_policy(self) -> None:
        """A setter was called, perhaps after the model was sharded."""
        unit, runtime = self.unit, self.runtime
        if unit is not None and runtime is not None:
            stays_full, divisor, zero_unused = self._stays_full(), self.divisor, self.zero_unused
            policy = replace(unit.policy, stays_full=stays_full, divisor=divisor, zero_unused=zero_unused)
            runtime.set_policy(unit, policy)

    def update_reduction(self) -> None:
        """The sum over replicas is postponed only if all units allow it: there is one buffer for all."""
        runtime = self.runtime
        if runtime is not None:
            requests = requests_in(runtime.model, ModuleRequest)
            runtime.postpone_reduction(not any(r.syncs and r.sums_replicas for r in requests))


def is_any_meta(parameters: Sequence[nn.Parameter]) -> bool:
    return any(p.is_meta for p in parameters)


def module_request(module: Any) -> ModuleRequest:
    """Of a module to which `fully_shard` was applied."""
    request = request_of(module)
    assert isinstance(request, ModuleRequest)  # only such a module has one of our classes
    return request


def _refuse_meta(root: nn.Module) -> None:
    if is_on_meta(root):
        of_first = next(o for r in requests_in(root, ModuleRequest) if is_any_meta(o := r.own_parameters()))
        first = set(map(id, of_first))  # a large model has hundreds
        meta = [name for name, p in nn.Module.named_parameters(root) if p.is_meta and id(p) in first]
        raise ModelError(
            "FSDP parameters should be materialized from meta device before training, but the following were "
            f"still on meta device: {meta}",
            "Call model.to_empty(device=...) and then initialise them, or load a state dict.",
        )


def on_device(device: torch.device, args: Any, kwargs: Any) -> Any:
    """Inputs, as torch moves those of the root. Where parameters are offloaded, a script may well have moved
    them to the device of a parameter."""
    return map_tensors((args, kwargs), lambda tensor: tensor.to(device), objects=False)


def _move_inputs(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return on_device(device, args, kwargs)


def _cast_around(module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    if inputs is not None:
        module.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True)
    if outputs is not None:
        module.register_forward_hook(partial(_cast_output, outputs))


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    return cast_floats(output, dtype)


# ---- one answer to what each call asked for


def _placement(requests: Sequence[ModuleRequest]) -> dict[str, Any]:
    """Strategy and ranks."""
    mesh, group = _common_mesh(requests), _common_group(requests)
    if mesh is not None and mesh.ndim == 2:
        if group is not None:
            raise NotSupported(
                f"fully_shard(reshard_after_forward={group}) on a mesh of two axes",
                "Use True or False there, or a mesh of one axis.",
            )
        return {"strategy": "hybrid", "mesh": _named(mesh.device_type, mesh.mesh)}
    if group is None:
        return {"strategy": "zero3", "mesh": mesh}
    ranks = torch.arange(rank_count()) if mesh is None else mesh.mesh
    kind = default_device().type if mesh is None else mesh.device_type
    nodes = _named(kind, ranks.view(-1, group), ("node", "shard"))
    return {"strategy": "zero3", "keep_node": "all", "mesh": nodes}


def _common_mesh(requests: Sequence[ModuleRequest]) -> DeviceMesh | None:
    first = requests[0].options.mesh
    for request in requests[1:]:
        if _ranks(request.options.mesh) != _ranks(first):
            raise NotSupported(
                f"fully_shard with different meshes in one model: {requests[0].label} has {first}, "
                f"{request.label} has {request.options.mesh}",
                "Give all modules of a model one mesh.",
            )
    return first


def _ranks(mesh: DeviceMesh | None) -> list[Any]:
    return list(range(rank_count())) if mesh is None else mesh.mesh.tolist()


def _common_group(requests: Sequence[ModuleRequest]) -> int | None:
    """The number of ranks that hold a unit after forward, where that is neither one nor all."""
    root, *blocks = requests
    size = root.options.mesh.size(-1) if root.options.mesh is not None else rank_count()
    groups: dict[int, ModuleRequest] = {}
    others: list[ModuleRequest] = []
    for request in requests:
        value = request.options.reshard_after_forward
        if isinstance(value, int) and not isinstance(value, bool) and 1 < value < size:
            groups[value] = request
        elif request is not root or value is True:
            others.append(request)
    if not groups:
        return None
    if len(groups) > 1 or (others and blocks):
        mixed = {f"{r.label}: {r.options.reshard_after_forward}" for r in (*groups.values(), *others)}
        raise NotSupported(
            f"fully_shard with another reshard_after_forward beside a group size: {', '.join(sorted(mixed))}",
            "Give all modules but the root the same number, or use True and False.",
        )
    return next(iter(groups))


def _named(
    device_type: str, ranks: torch.Tensor, names: tuple[str, str] = ("replicate", "shard")
) -> DeviceMesh:
    """Ranks and names: all that the engine reads. No groups: with tensor parallelism on a third axis ranks
    would create different ones at once, and wait for each other forever."""
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def _device(root: nn.Module, mesh: DeviceMesh | None) -> torch.device | None:
    """As torch does, a model is moved to the mesh's device; None for one that is there."""
    device = default_device()
    if mesh is not None and mesh.device_type != device.type:
        device = torch.device(mesh.device_type)
    tensors = (*parameters_in(root), *root.buffers())
    return device if any(t.device.type not in (device.type, "meta") for t in tensors) else None
