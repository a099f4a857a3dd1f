"""Micro-batches where a unit's gradients come in several parts: shared blocks in checkpoint segments."""

from __future__ import annotations

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
