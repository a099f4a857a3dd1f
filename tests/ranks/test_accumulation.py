"""Micro-batches where a unit's gradients come in several parts: shared blocks in checkpoint segments."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ranks
import reference
from engines import WIDTH, batch, block, build, shard_blocks

STEPS, MICRO_BATCHES = 3, 3


class Recurrent(nn.Module):
    """The same two blocks twice, each time in a reentrant segment: a unit is complete twice a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = x + each(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for _ in range(2):
            x = checkpoint(self.body, x, use_reentrant=True)
        return self.head(x)


def _loss(model: nn.Module, piece: Any) -> torch.Tensor:
    return F.cross_entropy(model(piece[0]), piece[1])


def _train(strategy: str) -> reference.Trace:

    model = shard_blocks(build(Recurrent), strategy=strategy)
    pieces = [batch(step, int(os.environ["RANK"])) for step in range(STEPS * MICRO_BATCHES)]
    return reference.train_rank(model, pieces, _loss, reference.sgd, STEPS, accumulate=MICRO_BATCHES)


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero2", "zero3"])
def test_gradients_that_come_in_two_parts_are_counted_once_under_accumulation(strategy: str) -> None:
    pieces = [[batch(step, rank) for rank in range(2)] for step in range(STEPS * MICRO_BATCHES)]
    model = build(Recurrent)
    expected = reference.train(model, pieces, _loss, reference.sgd, STEPS, accumulate=MICRO_BATCHES)
    found = reference.combine(ranks.run(_train, 2, strategy))
    reference.assert_close_trace(found, expected, rtol=2e-5, atol=2e-6)


def _closure_brings_the_last(strategy: str) -> list[list[float]]:
    import fullshard as fs

    model = build(Recurrent)
    if strategy:
        shard_blocks(model, strategy=strategy)
    rank = int(os.environ["RANK"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(step: int) -> torch.Tensor:
        # Without an engine the whole batch is one process's.
        owners = [rank] if strategy else [0, 1]
        losses = [_loss(model, batch(step, owner)) for owner in owners]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss

    for step in range(2):
        if strategy:
            with fs.accumulate(model):
                backward(2 * step)
        else:
            backward(2 * step)
        optimizer.step(lambda step=step: backward(2 * step + 1))
        optimizer.zero_grad()
    if not strategy:
        return [p.detach().flatten().tolist() for p in model.parameters()]
    with fs.full(model, writeback=False):
        return [p.detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "zero3"])
def test_closure_of_the_optimizer_may_bring_the_last_micro_batch(strategy: str) -> None:
    expected = ranks.run(_closure_brings_the_last, 1, "")[0]
    for found in ranks.run(_closure_brings_the_last, 2, strategy):
        for mine, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(whole), rtol=2e-5, atol=2e-6)


def _frozen_between_micro_batches(strategy: str, entire_unit: bool) -> str:
    import fullshard as fs

    model = shard_blocks(build(Recurrent), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = int(os.environ["RANK"])
    with fs.accumulate(model):
        _loss(model, batch(0, rank)).backward()
    frozen = model.blocks[1] if entire_unit else next(model.blocks[1].parameters())
    frozen.requires_grad_(False)
    with pytest.raises(fs.FullshardError) as refused:
        _loss(model, batch(1, rank)).backward()
    frozen.requires_grad_(True)
    optimizer.zero_grad()
    frozen.requires_grad_(False)  # between steps, it may be
    with fs.accumulate(model):
        _loss(model, batch(0, rank)).backward()
    _loss(model, batch(1, rank)).backward()
    optimizer.step()
    return str(refused.value)


@pytest.mark.parametrize("entire_unit", [False, True])
@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_freezing_a_parameter_whose_gradient_is_postponed_is_refused_by_name(
    strategy: str, entire_unit: bool
) -> None:
    for message in ranks.run(_frozen_between_micro_batches, 2, strategy, entire_unit):
        assert "parameter 'blocks.1." in message
        assert "was frozen between the micro-batches" in message


def _frozen_with_an_old_gradient(strategy: str) -> list[list[float]]:
    import fullshard as fs

    model = build(Recurrent)
    if strategy:
        shard_blocks(model, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = int(os.environ["RANK"])

    def backward(step: int) -> None:
        owners = [rank] if strategy else [0, 1]
        torch.stack([_loss(model, batch(step, owner)) for owner in owners]).mean().backward()

    backward(0)
    next(model.blocks[1].parameters()).requires_grad_(False)
    with fs.accumulate(model) if strategy else contextlib.nullcontext():
        backward(1)
    backward(2)
    optimizer.step()
    with fs.full(model, writeback=False) if strategy else contextlib.nullcontext():
        return [p.detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_gradient_of_a_parameter_frozen_before_the_micro_batches_is_kept(strategy: str) -> None:
    expected = ranks.run(_frozen_with_an_old_gradient, 1, "")[0]
    for found in ranks.run(_frozen_with_an_old_gradient, 2, strategy):
        for mine, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(whole), rtol=2e-5, atol=2e-6)
