"""Changes of a module that come too late: its parameters are sharded already.

Parametrizations, weight norms and pruning compute with a parameter before they move it to another attribute.
On a shard that is wrong, or fails with an error of torch that depends on the rank: they are refused before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from fullshard.engine.step.optimizers import owner
from fullshard.errors import AtRestError


def _refuse(module: Any, name: Any, parameter: Any) -> None:
    if isinstance(parameter, nn.Parameter) and owner(parameter) is not None:
        where = f"{name!r} of a {type(module).__name__}" if isinstance(module, nn.Module) else "of a module"
        raise AtRestError(
            f"parameter {where} is sharded, and would be parametrized or pruned now",
            "Parametrize, prune and normalise weights before fs.shard.",
        )


def _guarded(change: Callable[..., Any]) -> Callable[..., Any]:
    """Of a function of a module and the name of a parameter."""

    @functools.wraps(change)
    def call(module: Any, name: Any = "weight", *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, nn.Module):
            _refuse(module, name, module._parameters.get(name))
        return change(module, name, *args, **kwargs)

    return call


def watch_changes() -> None:
    """From now on these changes of sharded modules are refused; of any other module nothing changes."""
    if hasattr(parametrize.ParametrizationList.__init__, "__wrapped__"):
        return
    for name in ("spectral_norm", "orthogonal", "weight_norm"):
        setattr(parametrizations, name, _guarded(getattr(parametrizations, name)))
    for function, kind in ((nn.utils.weight_norm, "WeightNorm"), (nn.utils.spectral_norm, "SpectralNorm")):
        owner_class = getattr(function, "__globals__", {}).get(kind)
        if owner_class is not None:
            owner_class.apply = staticmethod(_guarded(owner_class.apply))
    _guard_lists()
    _guard_pruning()


def _guard_lists() -> None:
    original = parametrize.ParametrizationList.__init__

    @functools.wraps(original)
    def init(self: Any, modules: Any, original_value: Any, *args: Any, **kwargs: Any) -> None:
        _refuse(None, None, original_value)
        original(self, modules, original_value, *args, **kwargs)

    setattr(parametrize.ParametrizationList, "__init__", init)  # noqa: B010


def _guard_pruning() -> None:
    original = prune.BasePruningMethod.__dict__["apply"].__func__

    @functools.wraps(original)
    def apply(cls: Any, module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        _refuse(module, name, module._parameters.get(name))
        return original(cls, module, name, *args, **kwargs)

    setattr(prune.BasePruningMethod, "apply", classmethod(apply))  # noqa: B010
