"""Lightning's table of layers, with unsharded sizes: at rest a rank holds a part of each parameter."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from fullshard.engine.runtime import is_sharded
from fullshard.state.sizes import UnshardedSizes


def count_unsharded(trainer: Any) -> None:
    """Have the Trainer's summary callbacks count the module's elements, not this rank's."""
    for callback in trainer.callbacks:
        if any(kind.__name__ == "ModelSummary" for kind in type(callback).__mro__):
            vars(callback)["_summary"] = partial(_summary, type(callback)._summary, callback)


def _summary(make: Any, callback: Any, trainer: Any, module: nn.Module) -> Any:
    summary = make(callback, trainer, module)
    if not is_sharded(module):
        return summary
    count = UnshardedSizes(module).total
    # The counts are properties, read later: so these objects get a class with other properties.
    totals = {
        "total_parameters": property(lambda self: count(self._model.parameters())),
        "trainable_parameters": property(
            lambda self: count(p for p in self._model.parameters() if p.requires_grad)
        ),
    }
    summary.__class__ = type(type(summary).__name__, (type(summary),), totals)
    for layer in summary._layer_summary.values():
        own = property(lambda self: count(self._module.parameters()))
        layer.__class__ = type(type(layer).__name__, (type(layer),), {"num_parameters": own})
    return summary
