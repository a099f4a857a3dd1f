"""Lightning's fine-tuning callbacks, which unfreeze layers during a fit, on shards.

Such a callback skips parameters that the optimizer already has, and compares their values to find out. Empty
shards are always equal, and which shards are empty differs between ranks, so the optimizers of ranks would
differ. Here parameters are the same only if they are one object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


def compare_by_identity(trainer: Any) -> None:
    for callback, kind in _callbacks(trainer):
        vars(callback)["finetune_function"] = partial(
            _finetune, kind, type(callback).finetune_function, callback
        )


def is_used(trainer: Any) -> bool:
    return any(_callbacks(trainer))


def rebuild_groups(trainer: Any, module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Add the groups that an earlier run added to the optimizers, before their state is loaded.

    Lightning does this when a fit starts, before strategies that load into shards read the checkpoint.
    """
    for callback, _ in _callbacks(trainer):
        if callback.state_key in saved:
            callback.load_state_dict(saved[callback.state_key])
            callback.on_fit_start(trainer, module)


def _callbacks(trainer: Any) -> Iterator[tuple[Any, Any]]:
    """Each fine-tuning callback, with Lightning's base class of it."""
    for callback in trainer.callbacks:
        kind = next((k for k in type(callback).__mro__ if k.__name__ == "BaseFinetuning"), None)
        if kind is not None:
            yield callback, kind


def _finetune(kind: Any, call: Any, callback: Any, *args: Any) -> Any:
    before = vars(kind)["filter_on_optimizer"]
    kind.filter_on_optimizer = staticmethod(_not_held)  # it is called by the name of the class
    try:
        return call(callback, *args)
    finally:
        kind.filter_on_optimizer = before


def _not_held(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in parameters if id(p) not in held]
