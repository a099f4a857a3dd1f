"""Steps on entire tensors, compared with one process bit by bit.

Every rank also trains an unsharded model, and its gradients are copied into the sharded one's (which takes
this rank's elements of them): both optimizers see the same gradients, bit by bit, whatever the order in which
ranks sum. What an optimizer makes of them is compared, not the sums, which other tests compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engines

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Mixed(nn.Module):
    """Matrices, a convolution in channels-last order, experts in three dimensions, tied embeddings, a scalar,
    vectors with fewer elements than ranks, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        conv = nn.Conv2d(2, 3, 3, padding=1)
        self.conv = conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.blocks = nn.ModuleList(engines.block() for _ in range(2))
        self.experts = nn.Parameter(torch.randn(3, 8, 8) * 0.3)
        self.scale, self.short = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(2))
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        image = x.view(len(x), 2, -1, 4)
        x = x + self.conv(image).mean((1, 2, 3)).view(-1, 1, 1) * self.scale
        for index, block in enumerate(self.blocks):
            x = x + block(x) * self.short[index]
        x = x + torch.einsum("bsd,edf->bsf", x, self.experts) + self.frozen(x)
        out: Tensor = self.head(x)
        return out


def build() -> nn.Module:
    return engines.build(Mixed)


def trainable(model: nn.Module, only: Callable[[nn.Parameter], bool]) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and only(p)]


def everything(_: nn.Parameter) -> bool:
    return True


def tokens(step: int) -> Tensor:
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    batch = tokens(step)
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten().flip(0))


class Pair:
    """A model in one process and the same one sharded, with an optimizer each."""

    def __init__(self, make: Make, only: Callable[[nn.Parameter], bool] = everything, **options: Any) -> None:
        self.reference, self.model = build(), engines.shard_blocks(build(), **options)
        self.make, self.only = make, only
        self.optimizers = [make(trainable(m, only)) for m in (self.reference, self.model)]

    def step(self, number: int, **options: Any) -> None:
        for model in (self.reference, self.model):
            loss_of(model, number).backward()
        with torch.no_grad():
            for ours, theirs in zip(self.model.parameters(), self.reference.parameters(), strict=True):
                if theirs.grad is not None:
                    assert ours.grad is not None
                    ours.grad.copy_(theirs.grad)
        for optimizer in reversed(self.optimizers):
            optimizer.step(**options)
        for model in (self.reference, self.model):
            model.zero_grad()

    def differing(self) -> list[str]:
        """Names of parameters that are not bitwise those of one process."""
        import fullshard as fs

        names = [name for name, _ in self.reference.named_parameters()]
        with fs.full(self.model):
            pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
            return [
                n for n, (a, b) in zip(names, pairs, strict=True) if not same_bits(a.detach(), b.detach())
            ]


def copy_gradients(pair: Pair) -> None:
    """Those of one process into the sharded model."""
    with torch.no_grad():
        for ours, theirs in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            if theirs.grad is not None and ours.grad is not None:
                ours.grad.copy_(theirs.grad)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
