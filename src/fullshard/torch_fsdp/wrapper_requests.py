"""The requests of FSDP1's wrappers: what each asked for, and the one call of `fs.shard` they become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard.comm import control, groups, topology
from fullshard.engine.runtime import Runtime, engine_of
from fullshard.errors import NotSupported, OptionError, StateError
from fullshard.plan.units import has_forward
from fullshard.policy import UnitPolicy, ValueSource
from fullshard.state.materialize import on_meta
from fullshard.state.value_sources import FirstRankValues, GivenFunction
from fullshard.torch_fsdp import strategies
from fullshard.torch_fsdp.deferred import (
    Phase,
    Request,
    Sharding,
    begin_on_call,
    copied,
    default_device,
    parameters_in,
    request_of,
    requests_in,
)
from fullshard.torch_fsdp.strategies import MixedPrecision, ShardingStrategy, StateDictType

WRAPPED = "_fsdp_wrapped_module"
_KEEPING = {
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy.FULL_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.HYBRID_SHARD,
}


def clean(name: str) -> str:
    """A name as it is without wrappers."""
    return ".".join(part for part in name.split(".") if part != WRAPPED)


@dataclass(frozen=True)
class WrapperOptions:
    """The arguments of one wrapper, in the engine's terms where there are such."""

    strategy: ShardingStrategy
    mixed: MixedPrecision
    offload: bool
    mesh: DeviceMesh | None
    prefetch: bool
    param_init_fn: Callable[[nn.Module], Any] | None
    device: torch.device | None
    synchronise: bool
    ignored: frozenset[nn.Parameter]  # a set: the engine looks for parameters in lists, and would find these
    ignored_modules: frozenset[nn.Module]
    by_policy: bool  # its units were chosen, even if none was


class Wrapper(nn.Module):
    """What a wrapper is to the others around and inside it."""

    _fsdp_wrapped_module: nn.Module

    def _defer(self, options: WrapperOptions) -> None:
        WrapperRequest(self, options)
        self.state_dict_settings = strategies.settings(StateDictType.FULL_STATE_DICT)
        self.buffer_dtypes: dict[str, torch.dtype] = {}  # of buffers that were cast, by name
        hook = self._fsdp_wrapped_module.register_forward_pre_hook(_WithoutWrapper(self), prepend=True)
        self._hook_id = hook.id

    @property
    def _is_root(self) -> bool | None:
        return wrapper_request(self).is_root

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        group = self.__dict__.get("process_group")
        memo[id(group)] = group  # cannot be copied
        return copied(self, memo)


class WrapperRequest(Request):
    """Of one wrapper."""

    def __init__(self, wrapper: Wrapper, options: WrapperOptions) -> None:
        self.options: WrapperOptions = options
        super().__init__(wrapper)

    @property
    def wrapper(self) -> Wrapper:
        wrapper = self.module
        assert isinstance(wrapper, Wrapper)
        return wrapper

    @property
    def target(self) -> nn.Module:
        """What is inside, also where a wrapper was wrapped once more."""
        inside = self.wrapper._fsdp_wrapped_module
        while isinstance(inside, Wrapper):
            inside = inside._fsdp_wrapped_module
        return inside

    @property
    def label(self) -> str:
        return type(self.wrapper._fsdp_wrapped_module).__name__

    @property
    def precision(self) -> Any:
        return strategies.precision(self.options.mixed, self.own_parameters())

    def combine(self, requests: Sequence[Self]) -> Sharding | None:
        alone = {request for request in requests if _alone(request, self)}
        shared = [request for request in requests if request not in alone]
        _refuse_offload(alone)
        options = _strategy([request.options.strategy for request in shared])
        for request in shared:
            _refuse_other_ranks(self.options.mesh, request)
        options["device"] = _device([request.options.device for request in requests])
        parameters = parameters_in(self.target)
        is_offloaded = any(request.options.offload for request in shared)
        if is_offloaded and options["device"] is None and {p.device.type for p in parameters} == {"cpu"}:
            options["device"] = (
                default_device()
            )  # as torch: a model that stays on the host computes on the GPU
        left_out = frozenset[nn.Parameter]().union(
            *(parameters_in(r.module) if r in alone else r.options.ignored for r in requests)
        )
        ignore = tuple(p for p in parameters if p in left_out)
        if len(ignore) == len(parameters):
            return None
        # Nobody chose units: those that the engine finds need less memory than the one that torch makes.
        by_engine = len(requests) == 1 and not self.options.by_policy
        units = None if by_engine else _units(self, requests)
        options |= {
            "precision": self.precision,
            "mesh": self.options.mesh,
            "prefetch": self.options.prefetch,
            "units": None if units is None else lambda module: module in units,
            "ignore": ignore,
            "offload": "host" if is_offloaded else None,
        }
        return Sharding(options, _policies(requests, units), self._values(requests, options))

    def _values(self, requests: Sequence[WrapperRequest], options: dict[str, Any]) -> ValueSource | None:
        """Of a model that is on meta, on all ranks or, with `sync_module_states`, on some."""
        given = _param_init(requests)
        if any(request.options.synchronise for request in requests):
            grid = topology.rank_grid(options["mesh"], options["strategy"] == "hybrid")
            mine = any(t.is_meta for t in (*self.target.parameters(), *self.target.buffers()))
            flags = control.all_gather_object_first(mine, grid)
            if any(flags) and not all(flags):
                return FirstRankValues(self.target, given, discard=mine and not flags[0])
        return given

    def settle(self, requests: Sequence[Self]) -> None:
        self.wrapper._fsdp_wrapped_module._forward_pre_hooks.pop(self.wrapper._hook_id, None)
        runtime = engine_of(self.target)
        if runtime is not None:
            self.wrapper.__dict__["_fullshard"] = runtime
        ignored = frozenset[nn.Module]().union(*(r.options.ignored_modules for r in requests))
        _cast_buffers(self.wrapper, ignored)


class _WithoutWrapper:
    """A forward that bypasses a wrapper which has not sharded yet: its gradients would stay on this rank."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def __call__(self, module: nn.Module, _: Any) -> None:
        if wrapper_request(self._wrapper).phase is Phase.DEFERRED and torch.is_grad_enabled():
            raise StateError(
                f"the {type(module).__name__} inside a wrapper was called before the wrapper itself was used",
                "Call the wrapper, or build the optimizer from its parameters() first.",
            )


def wrapper_request(wrapper: Wrapper) -> WrapperRequest:
    request = request_of(wrapper)
    assert isinstance(request, WrapperRequest)
    return request


def wrappers_in(module: nn.Module) -> list[Wrapper]:
    return [request.wrapper for request in requests_in(module, WrapperRequest)]


def begin(wrapper: Wrapper) -> Runtime | None:
    """The engine of this wrapper, built now unless it was before; None if there is nothing to shard."""
    begin_on_call(wrapper_request(wrapper))
    return engine_of(wrapper)


def _alone(request: WrapperRequest, root: WrapperRequest) -> bool:
    """Wrapped for this rank only, in a model that more ranks share: an expert that lives here, say.

    No rank shares it, so it is left as it is, like an ignored module.
    """
    mesh, ranks = request.options.mesh, root.options.mesh
    num_shared = groups.rank_count() if ranks is None else ranks.mesh.numel()
    return request is not root and mesh is not None and mesh.mesh.numel() == 1 and num_shared > 1


def _cast_buffers(wrapper: Wrapper, ignored: frozenset[nn.Module]) -> None:
    """`buffer_dtype`: once, now. BatchNorm's statistics stay as they are, like its parameters."""
    dtype = wrapper_request(wrapper).options.mixed.buffer_dtype
    if dtype is None:
        return
    left = ignored.union(*(w.modules() for w in wrappers_in(wrapper)[1:]))
    for prefix, module in wrapper._fsdp_wrapped_module.named_modules():
        if module in left or isinstance(module, _BatchNorm):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                wrapper.buffer_dtypes[clean(f"{prefix}.{name}".lstrip("."))] = buffer.dtype
                module._buffers[name] = buffer.to(dtype)


# ---- one answer to what each wrapper asked for


def _units(root: WrapperRequest, requests: Sequence[WrapperRequest]) -> dict[nn.Module, WrapperRequest]:
    """A container without a forward is no unit: its parameters belong to the unit around it."""
    inner = [r for r in requests[1:] if has_forward(r.target) and r.target is not root.target]
    return {request.target: request for request in (root, *inner)}


def _policies(
    requests: Sequence[WrapperRequest], units: dict[nn.Module, WrapperRequest] | None
) -> Callable[[nn.Module], UnitPolicy]:
    """What each unit takes from the innermost wrapper around it."""
    innermost = {m: r for r in requests for m in r.wrapper._fsdp_wrapped_module.modules()}  # inner ones later
    root = requests[0].target

    def policy_of(module: nn.Module) -> UnitPolicy:
        options, is_root = innermost[module].options, module is root
        casts = options.mixed.cast_forward_inputs or (is_root and options.mixed.cast_root_forward_inputs)
        return UnitPolicy(
            precision=None if units is None else units[module].precision,
            stays_full=True if not is_root and options.strategy in _KEEPING else None,
            casts=(options.mixed.param_dtype if casts else None, None),
            offload=options.offload,
        )

    return policy_of


def _strategy(requested: Sequence[ShardingStrategy]) -> dict[str, Any]:
    """One for all; units that stay full between forward and backward may be beside others that do not."""
    if len(set(requested)) == 1:
        return strategies.strategy_options(requested[0])
    kinds = {_KEEPING.get(strategy, strategy) for strategy in requested}
    if len(kinds) == 1:
        return strategies.strategy_options(kinds.pop())
    raise NotSupported(
        f"{' and '.join(sorted({s.name for s in requested}))} inside one model: it is sharded in one way",
        "Use one sharding_strategy; FULL_SHARD and SHARD_GRAD_OP may be mixed.",
    )


def _device(requested: Sequence[torch.device | None]) -> torch.device | None:
    """One for all: a model has one engine, and that one device."""
    devices = {device for device in requested if device is not None}
    if len(devices) > 1:
        raise OptionError(
            f"device_id is {' and '.join(sorted(map(str, devices)))} in one model",
            "Give every wrapper the same.",
        )
    return devices.pop() if devices else None


def _refuse_offload(alone: Iterable[WrapperRequest]) -> None:
    for request in alone:
        if request.options.offload:
            raise NotSupported(
                f"CPUOffload of a {request.label} that is wrapped for this rank only: it is left as it is",
                "Leave cpu_offload out there, or wrap it for the ranks of the model.",
            )


def _refuse_other_ranks(mesh: DeviceMesh | None, request: WrapperRequest) -> None:
    theirs = request.options.mesh
    same = theirs is mesh or (None not in (theirs, mesh) and torch.equal(theirs.mesh, mesh.mesh))  # type: ignore[union-attr]
    if not same:
        raise NotSupported(
            f"a {request.label} is wrapped for other ranks than the model is",
            "Give every wrapper the same process_group or device_mesh.",
        )


# ---- param_init_fn


def _param_init(requests: Sequence[WrapperRequest]) -> ValueSource | None:
    """Of the innermost wrapper around each module; a module without one has its own initializer."""
    chosen = {m: r.options.param_init_fn for r in requests for m in r.module.modules()}  # inner ones later
    if not any(chosen.values()):
        return None

    def initialize(module: nn.Module) -> None:
        given = chosen.get(module)
        if given is not None:
            _initialize_from_meta(module, given)
        elif callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]

    return GivenFunction(initialize)


def _initialize_from_meta(module: nn.Module, given: Callable[[nn.Module], Any]) -> None:
    """Run a `param_init_fn` on one module, whose own tensors have memory by now.

    torch calls it with a module on meta, and many functions check for that before they call `to_empty`, which
    makes new tensors. So it gets one, and what it made is copied. A function that fills tensors in place
    leaves some of them on meta: it is called once more, with the memory itself.
    """
    own = module._parameters, module._buffers
    held = [(kept, name, t) for kept in own for name, t in kept.items() if t is not None]
    for kept, name, tensor in held:
        kept[name] = on_meta(tensor)
    if not _initialized(module, given, held):
        _initialized(module, given, held)


def _initialized(
    module: nn.Module, given: Callable[[nn.Module], Any], held: list[tuple[dict[str, Any], str, torch.Tensor]]
) -> bool:
    """Whether the function left nothing on meta. The values that it made are copied to `held`."""
    try:
        given(module)
        made = [kept.get(name) for kept, name, _ in held]
    finally:
        for kept, name, tensor in held:
            kept[name] = tensor
    for value, (_, _, tensor) in zip(made, held, strict=True):
        if value is not None and not value.is_meta and value is not tensor:
            tensor.detach().copy_(value.detach())
    return not any(value is None or value.is_meta for value in made)
