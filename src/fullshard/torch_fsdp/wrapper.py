"""`FullyShardedDataParallel`: torch's FSDP1 signature, this engine underneath.

The wrapper is a thin module around the user's. The engine is attached to the wrapped module, so a call that
bypasses the wrapper (`model.generate()`, `model.module(x)`) works as well. `named_parameters`,
`named_buffers` and state dicts show the names of the plain module, whatever `use_orig_params` is;
parameters are always the user's own objects, never flat ones. `named_modules` shows the wrappers, as torch's.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import _IncompatibleKeys

from fullshard import api
from fullshard.comm import groups
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensors import map_tensors
from fullshard.errors import NotSupported, OptionError, StateError
from fullshard.keywords import checked_keywords
from fullshard.torch_fsdp import state_dicts, strategies
from fullshard.torch_fsdp.deferred import refuse_sharded, requests_in
from fullshard.torch_fsdp.optimizer_calls import OptimizerCalls
from fullshard.torch_fsdp.strategies import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fullshard.torch_fsdp.summoning import summoned
from fullshard.torch_fsdp.wrap import auto_wrap
from fullshard.torch_fsdp.wrapper_requests import (
    WRAPPED,
    Wrapper,
    WrapperOptions,
    WrapperRequest,
    begin,
    clean,
    wrappers_in,
)

_CHECKPOINTED = "_checkpoint_wrapped_module"


@checked_keywords(of="FullyShardedDataParallel")
class FullyShardedDataParallel(OptimizerCalls, Wrapper):
    """Wraps `module`; the outermost wrapper shards the model when it is first used.

    module: what to wrap; wrappers inside it become units of the same engine.
    process_group, device_mesh: over which ranks; None is all. Hybrid strategies take a mesh of two axes.
    sharding_strategy: FULL_SHARD (default), SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, _HYBRID_SHARD_ZERO2.
    cpu_offload: with CPUOffload(offload_params=True), parameters, gradients and optimizer state rest in host
        memory, and a module that is on the host computes on this rank's GPU.
    auto_wrap_policy: which submodules are units; without one, and without wrappers inside, the engine finds
        them.
    backward_prefetch: BACKWARD_PRE prefetches; BACKWARD_POST and None do not.
    mixed_precision: a MixedPrecision.
    ignored_modules, ignored_states: stay as they are on every rank, unsynchronised.
    param_init_fn: gives a meta-device module's own tensors their values.
    device_id: where a module that is on the host, or on meta, is sharded.
    sync_module_states: all ranks get the first rank's values in any case; with True the other ranks may be
        on the meta device.
    forward_prefetch, limit_all_gathers: accepted, without effect: the engine prefetches, and limits itself.
    use_orig_params: accepted, without effect: parameters are always the original ones.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        refuse_sharded(requests_in(module, WrapperRequest), module)
        strategy = strategies.by_name(
            ShardingStrategy, sharding_strategy or ShardingStrategy.FULL_SHARD, "sharding_strategy"
        )
        self.cpu_offload = strategies.cpu_offload(cpu_offload)
        self.backward_prefetch, looks_ahead = strategies.prefetches(backward_prefetch)
        self.mixed_precision = strategies.mixed_precision(mixed_precision)
        self.sharding_strategy = strategy
        self.forward_prefetch, self.limit_all_gathers = forward_prefetch, limit_all_gathers
        self.process_group, self._use_orig_params = process_group, use_orig_params
        self.rank, self.world_size = groups.own_rank(), groups.rank_count()
        modules, parameters = _ignored(module, ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            strategies.refuse_ignored_classes(self.mixed_precision, module)
            kwargs = {k: arguments[k] for k in _INHERITED} | {"ignored_states": parameters or None}
            auto_wrap(module, auto_wrap_policy, (modules, set(parameters)), kwargs, type(self))
        self._fsdp_wrapped_module = module
        self._defer(
            WrapperOptions(
                strategy=strategy,
                mixed=self.mixed_precision,
                offload=self.cpu_offload.offload_params,
                mesh=strategies.mesh_of(process_group, device_mesh, strategy),
                prefetch=looks_ahead,
                param_init_fn=param_init_fn,
                device=_device(device_id),
                synchronise=bool(sync_module_states),
                ignored=frozenset(parameters),
                ignored_modules=frozenset(modules),
                by_policy=auto_wrap_policy is not None,
            )
        )

    # ---- a module like the one inside

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a wrapper that recomputes activations."""
        inside = self._fsdp_wrapped_module
        return getattr(inside, _CHECKPOINTED, inside)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED:
                raise
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runtime = begin(self)
        if self._is_root and runtime is not None and runtime.comm.device.type != "cpu":
            device = runtime.comm.device  # torch moves the root's inputs; others are there already
            args, kwargs = map_tensors((args, kwargs), lambda t: t.to(device), objects=False)
        return self._fsdp_wrapped_module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        begin(self)
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield clean(name), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in super().named_buffers(prefix, recurse, remove_duplicate):
            yield clean(name), buffer

    def requires_grad_(self, requires_grad: bool = True) -> FullyShardedDataParallel:
        """Does not shard the model: an inner wrapper may be frozen, then the outer module wrapped."""
        for _, parameter in super().named_parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def apply(self, fn: Callable[[nn.Module], Any]) -> FullyShardedDataParallel:
        """`fn` sees unsharded values of each module's own parameters, and its edits are kept."""
        self._fsdp_wrapped_module.apply(fn)
        fn(self)
        return self

    # ---- roots

    def check_is_root(self) -> bool:
        begin(self)
        return bool(self._is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        wrappers = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if not root_only:
            return wrappers
        for wrapper in wrappers:
            begin(wrapper)
        return [wrapper for wrapper in wrappers if wrapper._is_root]

    def _root_only(self, method: str) -> Runtime | None:
        runtime = begin(self)
        if not self._is_root:
            raise StateError(f"{method}() on an inner wrapper", "Call it on the outermost one.")
        return runtime

    # ---- training

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all micro-batches but the last. Strategies that shard gradients reduce them all the same."""
        runtime = self._root_only("no_sync")
        if runtime is None:
            yield
        else:
            with api.accumulate(self):
                yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch's own clipping: norms of gradients are global here."""
        self._root_only("clip_grad_norm_")
        parameters = list(self.parameters())
        if all(p.grad is None for p in parameters):
            warnings.warn("clip_grad_norm_() was called while no parameter has a gradient", stacklevel=3)
        return nn.utils.clip_grad_norm_(parameters, float(max_norm), float(norm_type))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        raise NotSupported(
            "register_comm_hook: gradients are packed, sent and summed by the engine",
            "For narrow gradients on the wire use MixedPrecision(reduce_dtype=torch.bfloat16).",
        )

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Parameters hold unsharded values. All ranks enter together."""
        if writeback and rank0_only:
            raise NotSupported(
                "summon_full_params(writeback=True, rank0_only=True): the other ranks have nothing to write",
                "Give writeback=False, or leave rank0_only out.",
            )
        if with_grads and offload_to_cpu:
            raise NotSupported(
                "summon_full_params(with_grads=True, offload_to_cpu=True)",
                "Give one of them; gradients stay.",
            )
        with summoned(module, recurse, (writeback, rank0_only, offload_to_cpu, with_grads)):
            yield

    # ---- state dicts

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """In the form of the state dict type: by default unsharded, which is a collective."""
        given = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        destination = given.get("destination", destination)
        prefix, keep_vars = given.get("prefix", prefix), given.get("keep_vars", keep_vars)
        begin(self)
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()
        for hook in self._state_dict_pre_hooks.values():
            hook(self, prefix, keep_vars)
        state_dicts.take(self, destination, prefix, keep_vars)
        for hook in self._state_dict_hooks.values():
            hook(self, destination, prefix, {"version": self._version})
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Takes unsharded values, shards, or this rank's elements; if one does not fit, nothing changes."""
        begin(self)
        state = OrderedDict(state_dict)
        if hasattr(state_dict, "_metadata"):
            state._metadata = state_dict._metadata  # type: ignore[attr-defined]
        state_dicts.prepare(self, state, "")
        if not assign:
            state_dicts.check_all(self, state)
        try:
            keys = super().load_state_dict(state, strict, assign)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            raise RuntimeError(str(error).replace(WRAPPED + ".", "")) from None
        return _IncompatibleKeys(*([clean(key) for key in names] for names in keys))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        begin(self)
        state_dicts.prepare(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Of all wrappers in `module`; returns the previous settings."""
        new = strategies.settings(state_dict_type, state_dict_config, optim_state_dict_config)
        before = FullyShardedDataParallel.get_state_dict_type(module)
        for wrapper in wrappers_in(module):
            wrapper.state_dict_settings = new
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        return state_dicts.settings_of(module)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` for the duration of a `with` block."""
        cls = FullyShardedDataParallel
        before = cls.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper in wrappers_in(module):
                wrapper.state_dict_settings = before


# What a policy passes on to the wrappers that it makes.
_INHERITED = (
    "process_group", "sharding_strategy", "cpu_offload", "backward_prefetch", "mixed_precision",
    "param_init_fn", "device_id", "sync_module_states", "forward_prefetch", "limit_all_gathers",
    "use_orig_params", "device_mesh",
)  # fmt: skip


def _ignored(
    module: nn.Module, modules: Iterable[nn.Module] | None, states: Iterable[Any] | None
) -> tuple[set[nn.Module], list[nn.Parameter]]:
    """Modules and parameters to leave alone, with everything inside them."""
    if modules is not None and states is not None:
        raise OptionError("ignored_modules and ignored_states were both given", "Give ignored_states alone.")
    option = "ignored_modules" if modules is not None else "ignored_states"
    listed: list[Any] = list(modules or states or ())
    kinds = (nn.Module,) if modules is not None else (nn.Module, nn.Parameter)
    for entry in listed:
        if not isinstance(entry, kinds) or isinstance(entry, Wrapper):
            raise OptionError(f"{option} contains {type(entry).__name__}", "Give modules, or parameters.")
    inside = {m for entry in listed if isinstance(entry, nn.Module) for m in entry.modules()}
    parameters = [entry for entry in listed if isinstance(entry, nn.Parameter)]
    parameters += [p for m in inside for p in m._parameters.values() if p is not None]
    chosen = {id(p) for p in parameters}
    return inside, [p for _, p in nn.Module.named_parameters(module) if id(p) in chosen]


def _device(device_id: int | torch.device | str | None) -> torch.device | None:
    if device_id is None:
        return None
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device  # there is one, whatever its number
