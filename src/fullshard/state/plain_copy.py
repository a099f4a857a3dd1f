"""A plain module with the unsharded values of a sharded one, for tools that look inside modules.

It shares memory with the values that fs.full shows, so it is made, used and dropped inside that.
"""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import nn

from fullshard.engine.hooks import Attached
from fullshard.engine.runtime import runtime_of
from fullshard.errors import NotSupported, StateError
from fullshard.state.state_dict import Places

_GONE = object()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def unsharded(model: nn.Module) -> nn.Module:
    """A copy of `model` without anything of ours, on the host, in the dtypes at rest."""
    runtime = runtime_of(model)
    if runtime.comm.world is not runtime.comm:
        raise NotSupported(
            "a plain copy of a model that is tensor-parallel as well: its parameters are parts here",
            "Save it with fs.save, and load it into a model without tensor parallelism.",
        )
    if not all(unit.is_unsharded for unit in runtime.units):
        raise StateError("a plain copy of a model at rest", "Make it inside `with fs.full(model):`.")
    memo: dict[int, Any] = {id(runtime): _GONE}
    for parameter in runtime.parameters:
        memo[id(parameter)] = nn.Parameter(parameter.detach().cpu(), requires_grad=False)
    modules = list(model.modules())
    for module in modules:
        memo.update((id(value), _GONE) for value in module.__dict__.values() if isinstance(value, Attached))
        for hooks in (module.__dict__[name] for name in _HOOKS):
            memo.update((id(hook), _GONE) for hook in hooks.values() if _is_ours(hook))
    plain = copy.deepcopy(model, memo)
    for module in modules:
        _tidy(module, memo[id(module)], memo)
    return plain.cpu()


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), Attached | Places)


def _tidy(module: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> None:
    ours = [n for n, value in twin.__dict__.items() if value is _GONE or n.startswith("_fullshard")]
    for name in ours:
        del twin.__dict__[name]
    for hooks in (twin.__dict__[name] for name in _HOOKS):
        for key in [key for key, hook in hooks.items() if hook is _GONE]:
            del hooks[key]
    for extras in (
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ):
        known = twin.__dict__[extras]
        for key in [key for key in known if key not in twin._forward_pre_hooks | twin._forward_hooks]:
            del known[key]
    forward = module.__dict__.get("forward")
    while isinstance(forward, Attached):  # the user's own may be below ours
        forward = getattr(forward, "original", getattr(forward, "replaced", None))
    if forward is not None and not _is_method(forward, module):
        twin.__dict__["forward"] = copy.deepcopy(forward, memo)


def _is_method(forward: Any, module: nn.Module) -> bool:
    return isinstance(forward, types.MethodType) and forward.__func__ is type(module).forward
