"""Changes of a sharded module that come too late are refused alike on all ranks; a kept loss trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import ranks
from cases import assert_gradients, backward, refusal, sharded, whole_gradients
from engines import Net, batch, build, my_rank, shard_blocks


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


TOO_LATE: dict[str, Callable[[nn.Module], Any]] = {
    "parametrization": lambda m: parametrize.register_parametrization(m.head, "weight", Double()),
    "weight norm": lambda m: parametrizations.weight_norm(m.head),
    "old weight norm": lambda m: nn.utils.weight_norm(m.blocks[0][0]),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.head),
    "old spectral norm": lambda m: nn.utils.spectral_norm(m.blocks[0][0]),
    "orthogonal": lambda m: parametrizations.orthogonal(m.head),
    "pruning": lambda m: prune.l1_unstructured(m.head, "weight", 0.3),
    "structured pruning": lambda m: prune.ln_structured(m.head, "weight", 0.3, n=2, dim=0),
    "random pruning": lambda m: prune.random_structured(m.head, "weight", 0.3, dim=0),
    "pruning by a mask": lambda m: prune.custom_from_mask(m.head, "weight", torch.ones(5, 8)),
    "pruning by nothing": lambda m: prune.identity(m.head, "bias"),
    "global pruning": lambda m: prune.global_unstructured(
        [(m.head, "weight")], prune.L1Unstructured, amount=2
    ),
    "tying": lambda m: (setattr(m.blocks[1][0], "weight", m.blocks[0][0].weight), _call(m)),
    "removal": lambda m: (m.head._parameters.pop("weight"), _call(m)),
    "script": lambda m: torch.jit.script(m.head),
    "script of the model": lambda m: torch.jit.script(m),
    "trace": lambda m: torch.jit.trace(m, batch(0, 0)[0], check_trace=False),
    "trace of a part": lambda m: torch.jit.trace(m.blocks[0], batch(0, 0)[0], check_trace=False),
    "functional call": lambda m: torch.func.functional_call(
        m, {n: v.detach() for n, v in build().named_parameters()}, (batch(0, 0)[0],)
    ),
}


def _call(model: nn.Module) -> Any:
    return model(batch(0, 0)[0])


def _change_late() -> dict[str, str]:
    found = {name: refusal(lambda change=change: change(sharded()))[0] for name, change in TOO_LATE.items()}
    model = sharded()
    refusal(lambda: prune.l1_unstructured(model.head, "weight", 0.3))
    backward(model)  # it goes on
    other = nn.Linear(4, 4)
    prune.l1_unstructured(parametrizations.weight_norm(other), "bias", 0.5)
    other(torch.ones(1, 4)).sum().backward()
    torch.jit.script(nn.Linear(4, 4))
    return found


@pytest.mark.filterwarnings("ignore")
def test_changes_that_come_too_late_are_refused_alike_on_all_ranks() -> None:
    results = ranks.run(_change_late, 3, timeout_s=120)
    assert all(found == results[0] for found in results)


class Keeping(nn.Module):
    """Returns a detached output, and keeps its loss somewhere."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.net, self.where, self.calls = Net(), where, 0
        self.losses: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.net(x)
        loss = out.square().mean()
        if self.where == "attribute" or (self.where == "later" and self.calls > 1):
            self.loss = loss
        if self.where == "object":
            self.kept = type("Kept", (), {})()
            self.kept.losses = [loss]
        self.losses["all"] = loss
        return out.detach()

    def of_last_call(self) -> Tensor:
        if self.where == "object":
            return self.kept.losses[0]
        return self.loss if self.where in ("attribute", "later") and self.calls > 1 else self.losses["all"]


WHERE = ("attribute", "later", "object", "dictionary")


def _kept_losses(strategy: str) -> dict[str, dict[str, Tensor | None]]:
    found = {}
    for where in WHERE:
        model = shard_blocks(build(lambda where=where: Keeping(where)), strategy=strategy)
        for step in range(2):
            model.zero_grad()
            model(batch(step, my_rank())[0])
            model.of_last_call().backward()
        found[where] = whole_gradients(model)
    return found


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_loss_kept_beside_a_detached_output_trains_as_in_one_process(strategy: str) -> None:
    for found in ranks.run(_kept_losses, 2, strategy):
        for where in WHERE:
            plain = build(lambda where=where: Keeping(where))
            for step in range(2):
                plain.zero_grad()
                for rank in range(2):
                    plain(batch(step, rank)[0])
                    (plain.of_last_call() / 2).backward()
            assert_gradients(found[where], plain)
