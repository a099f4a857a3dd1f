"""Which submodules become units: torch's wrapping policies, and wrapping by hand."""

# ruff: noqa: ARG001  policies have torch's signatures, whether they look at an argument or not

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fullshard.errors import OptionError, StateError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

Wrapper = Callable[..., nn.Module]
Kwargs = dict[str, Any]


# ---- policies that are functions: called twice per module, on the way down and on the way up


def always_wrap_policy(*_args: Any, **_kwargs: Any) -> bool:
    """Every module is a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Modules for which `lambda_fn` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Modules of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    return any(p(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for p in policies)


class _SizeBased:
    """A function with two attributes that scripts change."""

    EXCLUDE_WRAP_MODULES: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}  # noqa: RUF012
    FORCE_LEAF_MODULES: set[type[nn.Module]] = {nn.MultiheadAttention}  # noqa: RUF012
    __name__ = "size_based_auto_wrap_policy"

    def __call__(
        self,
        module: nn.Module,
        recurse: bool,
        nonwrapped_numel: int,
        min_num_params: int = 10**8,
        force_leaf_modules: set[type[nn.Module]] | None = None,
        exclude_wrap_modules: set[type[nn.Module]] | None = None,
    ) -> bool:
        """Modules with at least so many parameters that are in no unit yet."""
        leaves = self.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        excluded = self.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
        left_out = leaves if recurse else excluded
        return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(left_out))


size_based_auto_wrap_policy = _SizeBased()


# ---- policies that are objects: they name modules, and may give each options of its own


class _Policy(ABC):
    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        """The modules to wrap, each with the options to wrap it with."""


class ModuleWrapPolicy(_Policy):
    """Modules of these classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        classes = tuple(self._module_classes)
        return {
            module: copy.copy(root_kwargs)
            for module in root_module.modules()
            if isinstance(module, classes) and module not in ignored_modules
        }

    def __call__(self, module: nn.Module, recurse: bool, *_args: Any, **_kwargs: Any) -> bool:
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({sorted(c.__name__ for c in self._module_classes)})"


class CustomPolicy(_Policy):
    """Modules for which `lambda_fn` returns True, or a dict of options for that module."""

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> dict[nn.Module, Kwargs]:
        chosen: dict[nn.Module, Kwargs] = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise OptionError(
                    f"CustomPolicy's function returned {answer!r} for a {type(module).__name__}",
                    "Return True, False, or a dict of options.",
                )
            if answer:
                chosen[module] = root_kwargs | (answer if isinstance(answer, dict) else {})
        return chosen


# ---- wrapping


def auto_wrap(
    root: nn.Module,
    policy: Any,
    ignored: tuple[set[nn.Module], set[nn.Parameter]],
    kwargs: Kwargs,
    wrapper: type,
) -> None:
    """Wrap what `policy` picks below `root`, in place; `root` itself is the caller's to wrap."""
    for name, module in root.named_modules():
        if isinstance(module, wrapper):
            raise OptionError(
                f"auto_wrap_policy was given, and module {name!r} is wrapped already",
                "Wrap by hand or by a policy, not both in one model.",
            )
    if callable(getattr(policy, "_run_policy", None)):  # torch's own objects too: they only name modules
        picked = policy._run_policy(root, ignored[0], dict(kwargs))
        picked.pop(root, None)
        made = {module: _wrapped(module, wrapper, options) for module, options in reversed(picked.items())}
    elif callable(policy):
        walk = _Walk(policy, ignored, kwargs, wrapper)
        walk.down(root)
        made = walk.made
    else:
        raise OptionError(f"auto_wrap_policy is {policy!r}", "Give a policy of fullshard.torch_fsdp.wrap.")
    for parent in list(root.modules()):
        for name, child in list(parent._modules.items()):  # every name: one module may have several
            if child is not None and child in made:
                setattr(parent, name, made[child])


class _Walk:
    """A policy that is a function: whether to descend, from the top, and to wrap, from the bottom."""

    def __init__(
        self, policy: Any, ignored: tuple[set[nn.Module], set[nn.Parameter]], kwargs: Kwargs, wrapper: type
    ) -> None:
        self._policy, self._ignored, self._kwargs, self._wrapper = policy, ignored, kwargs, wrapper
        self.made: dict[nn.Module, nn.Module] = {}
        self._taken: dict[nn.Module, int] = {}  # a module that two parents share is decided on once

    def num_elements(self, module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if p not in self._ignored[1])

    def down(self, module: nn.Module, may_wrap: bool = False) -> int:
        """Elements of `module` that ended up in a unit: it, or units inside it."""
        size = self.num_elements(module)
        if not self._policy(module=module, recurse=True, nonwrapped_numel=size):
            return 0
        inside = sum(self._visit(m) for m in module.children() if m not in self._ignored[0])
        if may_wrap and self._policy(module=module, recurse=False, nonwrapped_numel=size - inside):
            self.made[module] = _wrapped(module, self._wrapper, self._kwargs)
            return size
        return inside

    def _visit(self, module: nn.Module) -> int:
        if module not in self._taken:
            self._taken[module] = self.down(module, may_wrap=True)
        return self._taken[module]


def _wrapped(module: nn.Module, wrapper: Wrapper, kwargs: Kwargs) -> nn.Module:
    return wrapper(module, **(kwargs | getattr(module, "_wrap_overrides", {})))


class _Context:
    """What `wrap` does at the moment."""

    wrapper: Wrapper | None = None
    kwargs: Kwargs = {}  # noqa: RUF012  replaced, never changed


@contextmanager
def enable_wrap(*, wrapper_cls: Wrapper, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside it `wrap(module)` wraps with this class and these options."""
    if _Context.wrapper is not None:
        raise StateError("enable_wrap inside enable_wrap", "Leave the first one before.")
    _Context.wrapper, _Context.kwargs = wrapper_cls, wrapper_kwargs
    try:
        yield
    finally:
        _Context.wrapper, _Context.kwargs = None, {}


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """`module` wrapped with the options of the enclosing enable_wrap; outside of one, `module` itself."""
    if _Context.wrapper is None:
        return module
    return _wrapped(module, _Context.wrapper, _Context.kwargs | wrap_overrides)
