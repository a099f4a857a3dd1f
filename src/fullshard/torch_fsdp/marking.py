"""`fully_shard`: marks modules; and the class that a marked module has until it is used."""

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

from fullshard.engine.data_parallel_guard import keep_from_replicate
from fullshard.engine.runtime import engine_of, is_sharded
from fullshard.errors import NotSupported, OptionError, StateError
from fullshard.plan.units import has_forward
from fullshard.torch_fsdp.fsdp_module import FSDPModule
from fullshard.torch_fsdp.marks import MARKED, Asked, Mark, mark_of, outermost, own_parameters
from fullshard.torch_fsdp.policies import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    as_mixed_precision,
    refuse_offload,
)
from fullshard.torch_fsdp.sharding import build_empty, ready, ready_unless_meta, unit_of

M = TypeVar("M", nn.Module, list[nn.Module])
_SAME, _NO_OFFLOAD = MixedPrecisionPolicy(), OffloadPolicy()


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
    reshard_after_forward: True lets full values go after forward; False keeps them until backward; a number
        keeps each unit together on so many ranks; None is True for blocks and False for the outermost module.
    mp_policy: a MixedPrecisionPolicy, for each module its own.
    ignored_params: stay whole on every rank and are not synchronised.

    The call marks the module, and the outermost marked one is sharded when it is first used: by a forward,
    its parameters(), a state dict, unshard() or reshard(). All ranks must come to that. The first rank's
    values count. NotSupported: shard_placement_fn (a cut by elements has no rows), CPU offload, dp_mesh_dims.
    """
    modules = module if isinstance(module, list | tuple) else [module]
    refuse_offload(offload_policy)
    if shard_placement_fn is not None:
        raise NotSupported(
            "fully_shard(shard_placement_fn=...): parameters are cut by elements here, not along a dimension",
            "Leave it out; every parameter is divided evenly whatever its shape.",
        )
    if dp_mesh_dims is not None:
        raise NotSupported("fully_shard(dp_mesh_dims=...)", "Pass the data parallel axis alone: mesh['dp'].")
    _check_mesh(mesh)
    _check_reshard(reshard_after_forward, mesh)
    for each in modules:
        _check_module(each)
    policy = as_mixed_precision(mp_policy)
    if not _untraced:  # not at import: this brings in torch's compiler, which costs a second
        _untraced.append(torch.compiler.disable(ready))  # type: ignore[no-untyped-call]
    asked = Asked(mesh, reshard_after_forward, policy, frozenset(ignored_params or ()))
    for each in modules:
        mark = Mark(each, asked, _classes(type(each)))
        mark.become(MARKED)
        # Hugging Face keeps ranks in step while generating where it sees this.
        each.__dict__["_is_fsdp_managed_module"] = each.__dict__["_fsdp_use_orig_params"] = True
        each.__dict__["_fullshard_begin"] = ready  # fs.full, fs.save and their kin
        keep_from_replicate(each)
    return module


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise OptionError(f"fully_shard got a {type(module).__name__}, not a torch module", "Pass a module.")
    if not has_forward(module):
        raise OptionError(
            f"fully_shard does not support containers that do not implement forward: {type(module).__name__}",
            "Call it on each module inside.",
        )
    if mark_of(module) is not None:
        raise StateError(f"fully_shard was applied to this {type(module).__name__} already", "Call it once.")
    if is_sharded(module):
        raise StateError(
            f"this {type(module).__name__} is part of a model that is sharded already",
            "Call fully_shard on all modules before the first of them is used.",
        )


def _check_mesh(mesh: DeviceMesh | None) -> None:
    if mesh is None:
        return
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise OptionError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}", "Pass a part of it.")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise OptionError(
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


class _Waiting:
    """What a marked module does until it is sharded: be sharded, then do what was asked."""

    _plain_class: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ready(self)(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _ready(self).forward(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if _meta(self):
            return self._plain_class.state_dict(self, *args, **kwargs)  # type: ignore[call-overload]
        return _ready(self).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of a meta-device module: it gets memory first."""
        if _meta(self):
            _fill(self, None)
        return _ready(self).load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return _ready(self)._load_from_state_dict(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        module: Any = self
        ready_unless_meta(module)
        mark = mark_of(module)
        if mark is not None and mark.window is not None:
            mark.window.take_over()  # an optimizer must not get what will not stay
        return self._plain_class.named_parameters(module, *args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        for parameter in own_parameters(self):  # type: ignore[arg-type]
            parameter.requires_grad_(requires_grad)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """A compiled call must not have the engine's hooks in it: it is compiled when they are there."""
        mark = mark_of(self)  # type: ignore[arg-type]
        assert mark is not None
        mark.compilations.append((args, kwargs))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """to(), half(), ... change the module that is not sharded yet; to_empty() of meta shards it."""
        module: Any = self
        if _meta(self) and not (made := fn(torch.empty(1, device="meta"))).is_meta:
            _fill(self, made.device)
            return self
        return self._plain_class._apply(module, fn, recurse)  # type: ignore[no-untyped-call]


def _ready(module: Any) -> Any:
    if torch.compiler.is_dynamo_compiling():  # `torch.compile(model)`, called before anything else was asked
        _untraced[0](module)
    else:
        ready(module)
    return module


_untraced: list[Callable[[nn.Module], None]] = []  # `ready`, into which torch.compile must not look


def _meta(module: Any) -> bool:
    mark = mark_of(module)
    return mark is not None and mark.state == MARKED and any(p.is_meta for p in own_parameters(module))


def _fill(module: Any, device: torch.device | None) -> None:
    build_empty(outermost(module), device)


_made: dict[type, tuple[type, type, type]] = {}


def _classes(plain: type) -> tuple[type, type, type]:
    """The class itself, and the two that it has under fully_shard. As torch's, they are named FSDP<class>."""
    if plain not in _made:
        body = {"_plain_class": plain, "__module__": plain.__module__, "__doc__": plain.__doc__}
        name = f"FSDP{plain.__name__}"
        waiting = type(name, (_Waiting, FSDPModule, plain), dict(body))
        _made[plain] = plain, waiting, type(name, (FSDPModule, plain), dict(body))
    return _made[plain]


# ---- beside it


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Full parameters while this method runs, as while forward does. Nothing for a module without mark."""
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
        ready(module)
        runtime, unit = engine_of(module), unit_of(module)
        if runtime is None or unit is None or unit.pass_state.depth or unit.is_unsharded:
            return method(*args, **kwargs)
        if not _reads_parameters(module, method):
            return method(*args, **kwargs)
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
    help, and one long pass around many forwards would be a hindrance."""
    code = getattr(inspect.unwrap(getattr(method, "__func__", method)), "__code__", None)
    attributes = {name for inside in module.modules() for name in inside._parameters}
    return code is None or bool(attributes & set(code.co_names))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Checked only: engines have no streams of their own that could be shared."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise OptionError(f"expects FSDPModules but got {type(module)}", "Call fully_shard first.")
