"""What a model library registers with the engine is used for every model, without the engine knowing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import ranks


class Scale(nn.Module):
    """On the meta device nothing of torch's initialises it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _events() -> list[str]:
    import fullshard as fs
    from fullshard import integrations

    events = []

    def initializer(root: nn.Module, module: nn.Module, parents: integrations.Parents) -> Any:
        if not isinstance(module, Scale):
            return None
        assert list(parents[module]) == [root]
        return partial(nn.init.constant_, module.weight, 3.0)

    def attach(runtime: Any, model: nn.Module) -> None:
        events.append(f"attached to {type(model).__name__}")

    @contextmanager
    def inference(model: nn.Module) -> Iterator[None]:
        events.append("inference begins")
        try:
            yield
        finally:
            events.append("inference ends")

    integrations.register(integrations.ModelLibrary("of this test", initializer, attach, inference))
    try:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), Scale())
        fs.shard(model)
        with fs.full(model):
            events.append(f"weight {model[1].weight.tolist()}")
        with fs.inference(model):
            events.append("forward")
            model(torch.ones(2, 4))
    finally:
        del integrations._libraries["of this test"]
    return events


def test_a_registered_library_initialises_its_modules_is_attached_and_entered_for_inference() -> None:
    for events in ranks.run(_events, 2):
        assert events == [
            "attached to Sequential",
            "weight [3.0, 3.0, 3.0, 3.0]",
            "inference begins",
            "forward",
            "inference ends",
        ]
