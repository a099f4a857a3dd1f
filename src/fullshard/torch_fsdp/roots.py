"""From nested wrappers to one engine.

A wrapper does not know whether another will be put around it: `FSDP(block)` comes before `FSDP(model)`. torch
flattens each block's parameters at once and finds the root when the model first runs. Doing the same here
would make every block an engine with groups of its own. Since our parameters keep their identity, nothing is
lost by waiting: a wrapper only remembers what it was asked for, and the outermost one shards everything, in
one transaction, when the first of them is used (forward, parameters, state dicts, ...). Until then the module
can still be moved, cast and initialised.

Sharding at once where a policy is given was considered: it would free memory a few lines earlier, and break
`FSDP(model, auto_wrap_policy=...).to(device)` and a wrapper around the result.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard import api
from fullshard.comm import control, groups, topology
from fullshard.engine.data_parallel_guard import keep_from_replicate
from fullshard.engine.runtime import Runtime, engine_of, runtime_of
from fullshard.engine.unit import LiveUnit
from fullshard.errors import NotSupported, OptionError, StateError
from fullshard.plan.units import has_forward
from fullshard.policy import Integration, UnitPolicy
from fullshard.precision import Precision
from fullshard.torch_fsdp import strategies
from fullshard.torch_fsdp.parking import Parked, initialise_from_meta
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
class Said:
    """What one wrapper was asked for, in the engine's terms where there are such."""

    strategy: ShardingStrategy
    mixed: MixedPrecision
    mesh: DeviceMesh | None
    prefetch: bool
    initialize: Callable[[nn.Module], Any] | None
    device: torch.device | None
    synchronise: bool
    ignored: frozenset[nn.Parameter]  # a set: the engine looks for parameters in lists, and would find these
    ignored_modules: frozenset[nn.Module]
    by_policy: bool  # its units were chosen, even if none was


class Wrapper(nn.Module):
    """What a wrapper is to the others around and inside it."""

    said: Said
    _is_root: bool | None  # None until the model is used
    _fsdp_wrapped_module: nn.Module

    def _wait(self, said: Said) -> None:
        self.said, self._is_root = said, None
        self.state_dict_settings = strategies.settings(StateDictType.FULL_STATE_DICT)
        self.buffer_dtypes: dict[str, torch.dtype] = {}  # of buffers that were cast, by name
        hook = self._fsdp_wrapped_module.register_forward_pre_hook(_PastTheWrapper(self), prepend=True)
        self._hook_id = hook.id
        keep_from_replicate(self)
        _waiting.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that is sharded as the original is. Copied while both wait, an average of weights would be
        whole when it is updated from shards: nobody calls it before."""
        on_meta = any(p.is_meta for p in _parameters(self))
        if self._is_root is None and outermost(self) is self and not on_meta:
            begin(self)
        for shared in (self.said.mesh, self.__dict__.get("process_group")):
            memo[id(shared)] = shared  # groups cannot be copied
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if twin._is_root is None:
            _waiting.add(twin)
        return twin

    def _stop_waiting(self, is_root: bool) -> None:
        self._is_root = is_root
        _waiting.discard(self)


class _PastTheWrapper:
    """A forward that came past a wrapper which has not sharded yet: its gradients would stay on this rank."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def __call__(self, module: nn.Module, _: Any) -> None:
        if self._wrapper._is_root is None and torch.is_grad_enabled():
            raise StateError(
                f"the {type(module).__name__} inside a wrapper was called before the wrapper itself was used",
                "Call the wrapper, or build the optimizer from its parameters() first.",
            )


_waiting: weakref.WeakSet[Wrapper] = weakref.WeakSet()


def core(wrapper: Wrapper) -> nn.Module:
    """The module that is sharded: what is inside, also where a wrapper was wrapped once more."""
    inside = wrapper._fsdp_wrapped_module
    while isinstance(inside, Wrapper):
        inside = inside._fsdp_wrapped_module
    return inside


def wrappers_in(module: nn.Module) -> list[Wrapper]:
    return [m for m in module.modules() if isinstance(m, Wrapper)]


def outermost(wrapper: Wrapper) -> Wrapper:
    """The waiting wrapper around this one that no other waiting one is around."""
    found, most = wrapper, 0
    for candidate in list(_waiting):
        inside = set(candidate.modules())
        if wrapper in inside and len(inside) > most:
            found, most = candidate, len(inside)
    return found


def begin(wrapper: Wrapper) -> Runtime | None:
    """The engine of this wrapper, made now if it is not there; None if it has nothing to shard."""
    if wrapper._is_root is None:
        root = outermost(wrapper)
        refuse_begun(wrappers_in(root)[1:], root)
        _shard(root)
    return engine_of(wrapper)


def refuse_begun(inner: Sequence[Wrapper], around: nn.Module) -> None:
    for wrapper in inner:
        if wrapper._is_root is not None:
            raise StateError(
                f"a wrapped {type(wrapper._fsdp_wrapped_module).__name__} inside {type(around).__name__} was "
                "used, and so sharded on its own, before the module around it was wrapped",
                "Wrap the outer module before calling the inner one or asking for its parameters.",
            )


def _shard(root: Wrapper) -> None:
    wrappers, module = wrappers_in(root), core(root)
    wanted = _Wanted.of(wrappers)
    parameters = _parameters(module)
    left_out = {p for w in wrappers for p in (_parameters(w) if _alone(w, root) else w.said.ignored)}
    ignore = tuple(p for p in parameters if p in left_out)
    for wrapper in wrappers:
        wrapper._stop_waiting(wrapper is root)
    parked = Parked(module)
    try:
        if len(ignore) < len(parameters):
            control.start()
            parked.place(_grid_to_fill(wrappers, wanted), wanted.initialize)
            api.shard_with(
                Integration(policy_of=_policies(wrappers, wanted.units), exclusive_optimizers=False),
                module,
                units=wanted.units,
                ignore=ignore,
                materialize=parked.materialize,
                **wanted.options,
            )
    except BaseException:
        parked.restore()
        for wrapper in wrappers:
            wrapper._is_root = None
            _waiting.add(wrapper)
        raise
    for wrapper in wrappers:
        wrapper._fsdp_wrapped_module._forward_pre_hooks.pop(wrapper._hook_id, None)
    if len(ignore) < len(parameters):
        _settle(root, wrappers)
    alone = frozenset[nn.Module]().union(*(w.said.ignored_modules for w in wrappers))
    for wrapper in wrappers:
        _cast_buffers(wrapper, alone)


def _grid_to_fill(wrappers: Sequence[Wrapper], wanted: _Wanted) -> torch.Tensor | None:
    """The ranks of the model, if one of the wrappers said `sync_module_states`."""
    if not any(wrapper.said.synchronise for wrapper in wrappers):
        return None
    return topology.rank_grid(wanted.options["mesh"], wanted.options["strategy"] == "hybrid")


def _alone(wrapper: Wrapper, root: Wrapper) -> bool:
    """Wrapped for this rank only, in a model that more ranks share: an expert that lives here, say.

    There is nobody to share it with, so it is left as it is, like an ignored one.
    """
    mesh, ranks = wrapper.said.mesh, root.said.mesh
    shared = groups.rank_count() if ranks is None else ranks.mesh.numel()
    return wrapper is not root and mesh is not None and mesh.mesh.numel() == 1 and shared > 1


def _settle(root: Wrapper, wrappers: Sequence[Wrapper]) -> None:
    runtime = runtime_of(core(root))
    for wrapper in wrappers:
        wrapper.__dict__["_fullshard"] = runtime


def _policies(wrappers: Sequence[Wrapper], units: _Units | None) -> Callable[[nn.Module], UnitPolicy]:
    """What each unit takes from the innermost wrapper around it."""
    innermost = {m: w for w in wrappers for m in w._fsdp_wrapped_module.modules()}  # inner ones come later
    root = core(wrappers[0])

    def policy_of(module: nn.Module) -> UnitPolicy:
        owner, is_root = innermost[module], module is root
        mixed = owner.said.mixed
        casts = mixed.cast_forward_inputs or (is_root and mixed.cast_root_forward_inputs)
        return UnitPolicy(
            precision=None if units is None else units.precision_of(module),
            stays_full=True if not is_root and owner.said.strategy in _KEEPING else None,
            casts=(mixed.param_dtype if casts else None, None),
        )

    return policy_of


def owned_units(wrapper: Wrapper, runtime: Runtime) -> list[LiveUnit]:
    """The units of this wrapper itself: those inside it and in no wrapper inside it."""
    inner = {m for w in wrappers_in(wrapper)[1:] for m in w.modules()}
    own = {m for m in wrapper.modules() if m not in inner}
    return [unit for unit in runtime.units if unit.modules[0] in own]


def _cast_buffers(wrapper: Wrapper, ignored: frozenset[nn.Module]) -> None:
    """`buffer_dtype`: once, now. BatchNorm's statistics stay as they are, like its parameters."""
    dtype = wrapper.said.mixed.buffer_dtype
    left = ignored.union(*(w.modules() for w in wrappers_in(wrapper)[1:]))
    for prefix, module in wrapper._fsdp_wrapped_module.named_modules():
        if dtype is None or module in left or isinstance(module, _BatchNorm):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                wrapper.buffer_dtypes[clean(f"{prefix}.{name}".lstrip("."))] = buffer.dtype
                module._buffers[name] = buffer.to(dtype)


# ---- what wrappers said, put together


class _Units:
    """Which modules are units, and the precision of each; `fs.shard` asks it."""

    def __init__(self, wrappers: Sequence[Wrapper]) -> None:
        # A container without a forward is no unit: what it holds belongs to the unit around it.
        self._root = core(wrappers[0])
        inner = [w for w in wrappers[1:] if has_forward(core(w)) and core(w) is not self._root]
        self._said = {core(w): w for w in (wrappers[0], *inner)}

    def __call__(self, module: nn.Module) -> bool:
        return module in self._said and module is not self._root

    def precision_of(self, module: nn.Module) -> Precision:
        wrapper = self._said[module]
        inner = {id(p) for w in wrappers_in(module) for p in _parameters(w)}
        own = [p for p in _parameters(module) if id(p) not in inner]
        return strategies.precision(wrapper.said.mixed, own)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    """Past a wrapper's own method, which would begin to shard."""
    return [p for _, p in nn.Module.named_parameters(module)]


@dataclass(frozen=True)
class _Wanted:
    units: _Units | None
    initialize: Callable[[nn.Module], Any] | None
    options: dict[str, Any]

    @staticmethod
    def of(wrappers: Sequence[Wrapper]) -> _Wanted:
        root = wrappers[0]
        # Nobody chose units: those that the engine finds need less memory than the one that torch makes.
        units = None if len(wrappers) == 1 and not root.said.by_policy else _Units(wrappers)
        options = _strategy([w.said.strategy for w in wrappers if not _alone(w, root)])
        for wrapper in wrappers[1:]:
            if not _alone(wrapper, root):
                _refuse_other_ranks(root.said.mesh, wrapper)
        precision = strategies.precision(root.said.mixed, _parameters(root))
        if units is not None:
            precision = units.precision_of(core(root))
        options |= {"precision": precision, "mesh": root.said.mesh, "prefetch": root.said.prefetch}
        options["device"] = _device([w.said.device for w in wrappers])
        return _Wanted(units, _initializer(wrappers), options)


def _strategy(said: Sequence[ShardingStrategy]) -> dict[str, Any]:
    """One for all; units that stay full between forward and backward may lie beside others that do not."""
    if len(set(said)) == 1:
        return strategies.strategy_options(said[0])
    kinds = {_KEEPING.get(strategy, strategy) for strategy in said}
    if len(kinds) == 1:
        return strategies.strategy_options(kinds.pop())
    raise NotSupported(
        f"{' and '.join(sorted({s.name for s in said}))} inside one model: it is sharded in one way",
        "Use one sharding_strategy; FULL_SHARD and SHARD_GRAD_OP may be mixed.",
    )


def _device(said: Sequence[torch.device | None]) -> torch.device | None:
    """One for all: a model has one engine, and that one device."""
    found = {device for device in said if device is not None}
    if len(found) > 1:
        raise OptionError(
            f"device_id is {' and '.join(sorted(map(str, found)))} in one model",
            "Give every wrapper the same.",
        )
    return found.pop() if found else None


def _refuse_other_ranks(mesh: DeviceMesh | None, inner: Wrapper) -> None:
    theirs = inner.said.mesh
    same = theirs is mesh or (None not in (theirs, mesh) and torch.equal(theirs.mesh, mesh.mesh))  # type: ignore[union-attr]
    if not same:
        raise NotSupported(
            f"a {type(inner._fsdp_wrapped_module).__name__} is wrapped for other ranks than the model is",
            "Give every wrapper the same process_group or device_mesh.",
        )


def _initializer(wrappers: Sequence[Wrapper]) -> Callable[[nn.Module], Any] | None:
    """param_init_fn of the innermost wrapper around each module."""
    chosen = {m: w.said.initialize for w in wrappers for m in w.modules()}  # inner ones come later, and win
    if not any(chosen.values()):
        return None

    def initialize(module: nn.Module) -> None:
        given = chosen.get(module)
        if given is not None:
            initialise_from_meta(module, given)
        elif callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()  # type: ignore[operator]

    return initialize
