"""Lightning's table of layers, with whole parameters counted: at rest a rank holds a part of each."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from fullshard.checkpoint.parameters import sites
from fullshard.engine.runtime import is_sharded, runtime_of


def count_whole(trainer: Any) -> None:
    """Have the Trainer's summary callbacks count what the module has, not what this rank holds of it."""
    for callback in trainer.callbacks:
        if any(kind.__name__ == "ModelSummary" for kind in type(callback).__mro__):
            vars(callback)["_summary"] = partial(_summary, type(callback)._summary, callback)


def _summary(make: Any, callback: Any, trainer: Any, module: nn.Module) -> Any:
    found = make(callback, trainer, module)
    parameters = sites(runtime_of(module), module) if is_sharded(module) else []
    sizes = {id(s.parameter): s.piece.num_elements for s in parameters if s.lane is not None}

    def count(parameters: Any) -> int:
        return sum(sizes.get(id(p), p.numel()) for p in parameters)

    # The counts are properties, read later: so these objects get a class that counts otherwise.
    whole = {
        "total_parameters": property(lambda self: count(self._model.parameters())),
        "trainable_parameters": property(
            lambda self: count(p for p in self._model.parameters() if p.requires_grad)
        ),
    }
    found.__class__ = type(type(found).__name__, (type(found),), whole)
    for layer in found._layer_summary.values():
        own = property(lambda self: count(self._module.parameters()))
        layer.__class__ = type(type(layer).__name__, (type(layer),), {"num_parameters": own})
    return found
