"""Hooks that a script registers on an optimizer see a step as one process has it, however it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engines
import optimizer_kinds as kinds
import ranks
import reference
from engines import my_rank
from fullshard.muon import Muon

STEPS = 3
Hook = Callable[[nn.Module, torch.optim.Optimizer], Callable[[], Any]]


def sets_the_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    count = 0

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal count
        count += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / count

    optimizer.register_step_pre_hook(hook)
    return lambda: count


def clips_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)  # type: ignore[func-returns-value]
    )
    return lambda: None


def drops_a_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    first = next(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: setattr(first, "grad", None))
    return lambda: None


def clears_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    return lambda: [p.grad is None for p in model.parameters()]


def clamps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    def hook(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(hook)
    return lambda: None


def averages(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    average = copy.deepcopy(model)

    def hook(*_: Any) -> None:
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)

    optimizer.register_step_post_hook(hook)
    return lambda: engines.values(average)


HOOKS: list[Hook] = [sets_the_rate, clips_values, drops_a_gradient, clears_gradients, clamps, averages]


def _matrices(model: nn.Module) -> torch.optim.Optimizer:
    return Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)


MAKE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "on shards": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "on owners": lambda model: kinds.ByParameterNorm(model.parameters()),
    "of matrices": _matrices,
    "in chunks": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "8-bit": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),  # keeps no state
}
OPTIONS: dict[str, dict[str, Any]] = {"in chunks": {"offload": "optimizer"}, "8-bit": {"state": "8bit"}}


def _trained(
    model: nn.Module, how: str, hook: Hook, pieces: list[list[Any]]
) -> tuple[Any, dict[str, Tensor]]:
    optimizer = MAKE[how](model)
    shown = hook(model, optimizer)
    for batch in pieces:
        for piece in batch:
            (engines.loss_of(model, piece) / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return shown(), engines.values(model)


def _all(how: str) -> list[Any]:
    mine = [[engines.batch(step, my_rank())] for step in range(STEPS)]
    found = []
    for hook in HOOKS:
        model = engines.shard_blocks(engines.build(), **OPTIONS.get(how, {}))
        found.append(_trained(model, how, hook, mine))
        del model
        ranks.end_groups_of_models()
    return found


@pytest.mark.parametrize("how", MAKE)
def test_hooks_of_an_optimizer_see_and_change_what_they_do_in_one_process(how: str) -> None:
    pieces = engines.batches(2, STEPS)
    for found in ranks.run(_all, 2, how):
        for hook, (shown, values) in zip(HOOKS, found, strict=True):
            expected_shown, expected = _trained(engines.build(), how, hook, pieces)
            for name, value in expected.items():
                reference.assert_close(values[name], value, f"{hook.__name__}: {name}", 2e-5, 2e-6)
            if isinstance(shown, dict):
                for name, value in expected_shown.items():
                    reference.assert_close(shown[name], value, f"{hook.__name__}: {name}", 2e-5, 2e-6)
            else:
                assert shown == expected_shown, hook.__name__
