"""`fully_shard`, and the class that a module has from this call until its first use."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.engine.runtime import is_sharded
from fullshard.errors import NotSupported, OptionError, StateError
from fullshard.keywords import checked_keywords
from fullshard.plan.tensor_parallel import local_of
from fullshard.plan.units import has_forward
from fullshard.torch_fsdp.deferred import (
    Phase,
    begin_on_call,
    begin_unless_on_meta,
    is_on_meta,
    parameters_in,
    request_of,
    requests_in,
)
from fullshard.torch_fsdp.dtensors import present_parameter_on_meta, value_on_meta
from fullshard.torch_fsdp.fsdp_module import FSDPModule
from fullshard.torch_fsdp.module_requests import (
    FullyShardOptions,
    ModuleClasses,
    ModuleRequest,
    module_request,
    on_device,
)
from fullshard.torch_fsdp.policies import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    as_mixed_precision,
    is_offloaded,
)


class AppliedTwice(StateError, AssertionError):
    """fully_shard of a module that has it. Of torch's class, too: scripts may expect that."""


class WrongLayout(OptionError, AssertionError):
    """A mesh or a placement that cannot be. Of torch's class, too."""


M = TypeVar("M", nn.Module, list[nn.Module])
_SAME, _NO_OFFLOAD = MixedPrecisionPolicy(), OffloadPolicy()


@checked_keywords(of="fully_shard")
def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = _SAME,
    offload_policy: Any = _NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """torch's `fully_shard` on this engine: call it on blocks, then on the model, and train as with torch's.

    module: a module, or a list of modules; each of a list is a unit of its own.
    mesh: one axis shards over it; two axes replicate over the first and shard over the second.
    reshard_after_forward: True releases full values after forward; False keeps them until backward; a number
        keeps each unit sharded over so many ranks; None is True for blocks, False for the outermost module.
    shard_placement_fn: checked, then without effect: parameters are cut between elements, evenly.
    mp_policy: a MixedPrecisionPolicy, for each module its own.
    offload_policy: with a CPUOffloadPolicy, parameters, gradients and optimizer state of this module rest in
        host memory; for each module its own.
    ignored_params: stay unsharded on every rank and are not synchronised.

    The call only registers a request. The outermost module with one is sharded when it is first used: by a
    forward, its parameters(), a state dict, unshard() or reshard(), on all ranks. All ranks get the first
    rank's values. Parameters, gradients and state dict values then answer DTensor's questions, see
    `torch_fsdp.dtensors`. NotSupported: dp_mesh_dims, parameters with fsdp_pre_all_gather.
    """
    modules = module if isinstance(module, list | tuple) else [module]
    if dp_mesh_dims is not None:
        raise NotSupported("fully_shard(dp_mesh_dims=...)", "Pass the data parallel axis alone: mesh['dp'].")
    _check_mesh(mesh)
    _check_reshard(reshard_after_forward, mesh)
    for each in modules:
        _check_module(each)
        _check_parameters(each, shard_placement_fn)
    policy = as_mixed_precision(mp_policy)
    ignored = frozenset(ignored_params or ())
    options = FullyShardOptions(mesh, reshard_after_forward, policy, is_offloaded(offload_policy), ignored)
    for each in modules:
        ModuleRequest(each, options, _classes(type(each)))
        # Hugging Face keeps ranks in step while generating where it sees this.
        each.__dict__["_is_fsdp_managed_module"] = each.__dict__["_fsdp_use_orig_params"] = True
    return module


def _state(module: nn.Module) -> ModuleRequest | None:
    """`fully_shard.state(module)`: None for a module to which it was not applied."""
    request = request_of(module)
    return request if isinstance(request, ModuleRequest) else None


fully_shard.state = _state  # type: ignore[attr-defined]


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise OptionError(f"fully_shard got a {type(module).__name__}, not a torch module", "Pass a module.")
    if not has_forward(module):
        raise OptionError(
            f"fully_shard does not support containers that do not implement forward: {type(module).__name__}",
            "Call it on each module inside.",
        )
    if request_of(module) is not None:
        raise AppliedTwice(
            "Each distinct composable distributed API can only be applied to a module once. Sharding of this "
            f"{type(module).__name__} was requested before",
            "Call fully_shard once per module, and not on a FullyShardedDataParallel.",
        )
    if is_sharded(module):
        raise StateError(
            f"this {type(module).__name__} is part of a model that is sharded already",
            "Call fully_shard on all modules before the first of them is used.",
        )


def _check_parameters(module: nn.Module, placement_of: Callable[[nn.Parameter], Any] | None) -> None:
    """Of this module and of no module inside it to which fully_shard was applied."""
    inner = {id(p) for request in requests_in(module, ModuleRequest) for p in parameters_in(request.module)}
    for name, parameter in nn.Module.named_parameters(module):
        if id(parameter) in inner:
            continue
        own = local_of(parameter)
        if hasattr(own, "fsdp_pre_all_gather"):
            raise NotSupported(
                f"parameter {name!r} is a {type(own).__name__} with fsdp_pre_all_gather: this engine has its "
                "own communication",
                "Use a plain parameter; an mp_policy with bf16 sends fewer bytes.",
            )
        placement = None if placement_of is None else placement_of(parameter)
        if placement is None:
            continue
        if not isinstance(placement, Shard):
            raise NotSupported(
                f"shard_placement_fn gives {placement!r} for parameter {name!r}", "Give a Shard, or None."
            )
        if not -parameter.ndim <= placement.dim < parameter.ndim:
            raise WrongLayout(
                f"Shard dim {placement.dim} is invalid for {parameter.ndim}D tensor: parameter {name!r}",
                "Give one of its dimensions; it is divided evenly whichever it is.",
            )


def _check_mesh(mesh: DeviceMesh | None) -> None:
    if mesh is None:
        return
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise OptionError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}", "Pass a part of it.")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise WrongLayout(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified",
            "The first axis replicates, the second shards.",
        )


def _check_reshard(value: Any, mesh: DeviceMesh | None) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int):
        raise OptionError(f"reshard_after_forward is {value!r}", "Give True, False, None or a group size.")
    size = mesh.size(-1) if mesh is not None else None
    if value < 1 or (size is not None and (value > size or size % value)):
        raise OptionError(
            f"If passing reshard_after_forward as an int, it should be a factor of {size}, not {value}",
            "Give True, False, or a number of ranks that divides the mesh.",
        )


# ---- classes


class _DeferredModule:
    """A module with a request: it is sharded before it does what it is called for."""

    _plain_class: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _begun(self)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _begun(self).forward(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if _is_deferred_on_meta(self):
            state = self._plain_class.state_dict(self, *args, **kwargs)  # type: ignore[call-overload]
            return _answering_state(module_request(self), state, kwargs.get("prefix", ""))
        return _begun(self).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """A meta-device module gets memory first."""
        if _is_deferred_on_meta(self):
            module_request(self).begin_blank(None)
        return _begun(self).load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return _begun(self)._load_from_state_dict(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        request = module_request(self)
        begin_unless_on_meta(request)
        if request.window is not None:
            request.window.take_over()  # an optimizer must not get parameters that will be replaced
        elif request.phase is Phase.DEFERRED:
            for parameter in parameters_in(request.module):
                present_parameter_on_meta(parameter, request.mesh)
        return self._plain_class.named_parameters(request.module, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        for parameter in parameters_in(module_request(self).module):
            parameter.requires_grad_(requires_grad)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """A compiled call must not have the engine's hooks in it: it is compiled when they are there."""
        module_request(self).compilations.append((args, kwargs))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """to(), half(), ... change the module that is not sharded yet; to_empty() of meta shards it."""
        module: Any = self
        if _is_deferred_on_meta(self) and not (made := fn(torch.empty(1, device="meta"))).is_meta:
            module_request(self).begin_blank(made.device)
            return self
        return self._plain_class._apply(module, fn, recurse)  # type: ignore[no-untyped-call]


def _begun(module: Any) -> Any:
    begin_on_call(module_request(module))
    return module


def _answering_state(request: ModuleRequest, state: Any, prefix: str) -> Any:
    for name, _ in nn.Module.named_parameters(request.module, remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, nn.Parameter):
            state[prefix + name] = value_on_meta(value, request.mesh)
    return state


def _is_deferred_on_meta(module: Any) -> bool:
    return module_request(module).phase is Phase.DEFERRED and is_on_meta(module)


_classes_of: dict[type, ModuleClasses] = {}


def _classes(plain: type) -> ModuleClasses:
    """As torch's, they are named FSDP<class>."""
    if plain not in _classes_of:
        body = {"_plain_class": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
        name = f"FSDP{plain.__name__}"
        deferred = type(name, (_DeferredModule, FSDPModule, plain), dict(body))
        _classes_of[plain] = ModuleClasses(plain, deferred, type(name, (FSDPModule, plain), dict(body)))
    return _classes_of[plain]


# ---- functions around it


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Parameters are full while this method runs, as in forward. Does nothing without fully_shard."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise OptionError(f"{type(module)} does not have a method {method_name}", "Name one of its methods.")
    module.__dict__[method_name] = _ForwardMethod(module, getattr(module, method_name))


class _ForwardMethod:
    """A method that runs between the engine's hooks, as forward does."""

    def __init__(self, module: nn.Module, method: Any) -> None:
        self._module, self._method = module, method
        functools.update_wrapper(self, method, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, method = self._module, self._method
        request = module_request(module)
        request.begin()
        runtime, unit = request.runtime, request.unit
        if runtime is None or unit is None or unit.pass_state.depth or unit.is_unsharded:
            return method(*args, **kwargs)
        if not _reads_parameters(module, method):
            return method(*args, **kwargs)
        args, kwargs = on_device(runtime.comm.device, args, kwargs)
        args, kwargs = runtime.before_forward(unit, module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = runtime.after_forward(unit, module, output)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = copy.deepcopy(self._module, memo)
        return type(self)(twin, types.MethodType(self._method.__func__, twin))


def _reads_parameters(module: nn.Module, method: Any) -> bool:
    """Whether a method's code names a parameter. One that only calls modules, as `generate` does, needs no
    gather, and one long pass around many forwards would be in the way."""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    attributes = {name for inside in module.modules() for name in inside._parameters}
    return code is None or bool(attributes & set(code.co_names))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Only checks its argument: engines have no streams of their own that could be shared."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise OptionError(f"expects FSDPModules but got {type(module)}", "Call fully_shard first.")
