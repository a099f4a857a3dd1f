"""A loss on what a hook took from inside a block."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import reference
from engines import BLOCKS, batch, block, build, shard_blocks

STEPS = 3


class Watched(nn.Module):
    """A hook on a layer inside a block keeps what it gave, beside the block's output."""

    watched = 1

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.taken: list[torch.Tensor] = []
        self.blocks[self.watched][0].register_forward_hook(
            lambda _module, _args, output: self.taken.append(output)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.taken.clear()
        for each in self.blocks:
            x = each(x)
        return x


class FirstWatched(Watched):
    """Nothing that leaves a unit takes part in a backward of what is taken here."""

    watched = 0


def _with_output(model: nn.Module, piece: Any) -> torch.Tensor:
    return model(piece[0]).square().mean() + model.taken[0].square().mean()


def _train(strategy: str) -> reference.Trace:

    model = shard_blocks(build(Watched), strategy=strategy)
    pieces = [batch(step, int(os.environ["RANK"])) for step in range(STEPS)]
    return reference.train_rank(model, pieces, _with_output, reference.sgd, STEPS)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "replicate"])
def test_loss_on_a_hooked_layer_beside_the_output_trains_as_in_one_process(strategy: str) -> None:
    pieces = [[batch(step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = reference.train(build(Watched), pieces, _with_output, reference.sgd, STEPS)
    found = reference.combine(ranks.run(_train, 2, strategy))
    reference.assert_close_trace(found, expected, rtol=2e-5, atol=2e-6)


def _alone() -> str:
    import fullshard as fs

    model = shard_blocks(build(FirstWatched), strategy="replicate")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(0, 0)[0])
    model.taken[0].square().mean().backward()
    try:
        optimizer.step()
    except fs.FullshardError as error:
        return str(error)
    return "no error"


def test_loss_on_a_hooked_layer_alone_is_an_error_and_not_a_step_that_does_nothing() -> None:
    for said in ranks.run(_alone, 2):
        assert "blocks.0" in said
        assert "not reduced" in said


class Routed(nn.Module):
    """Its blocks and the model itself leave losses in attributes; the output takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaving() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = each(x)
        self.loss = (x.detach() * self.scale).square().mean()
        return x.detach()


class Leaving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        self.loss = y.square().mean()
        return y.detach()


def _left_alone(model: nn.Module, piece: Any) -> torch.Tensor:
    model(piece[0])
    return sum(each.loss for each in model.blocks) + model.loss


def _train_on_what_was_left(options: dict[str, Any]) -> reference.Trace:
    import fullshard as fs

    model = fs.shard(build(Routed), **options)
    pieces = [batch(step, int(os.environ["RANK"])) for step in range(STEPS)]
    return reference.train_rank(model, pieces, _left_alone, reference.sgd, STEPS)


@pytest.mark.parametrize("options", [{}, BLOCKS], ids=["one_unit", "blocks"])
def test_losses_in_attributes_of_blocks_and_of_the_model_train_as_in_one_process(
    options: dict[str, Any],
) -> None:
    pieces = [[batch(step, rank) for rank in range(2)] for step in range(STEPS)]
    expected = reference.train(build(Routed), pieces, _left_alone, reference.sgd, STEPS)
    found = reference.combine(ranks.run(_train_on_what_was_left, 2, options))
    reference.assert_close_trace(found, expected, rtol=2e-5, atol=2e-6)
