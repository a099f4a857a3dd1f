"""Muon with parameters that hold several matrices: experts in one tensor, or the heads of a projection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn, optim

from fullshard.errors import OptionError


class Muon(optim.Muon):
    """`torch.optim.Muon`, whose parameters may be stacks of matrices.

    A parameter of three dimensions, such as (experts, rows, columns), has one matrix per entry of the first.
    `split` of a group cuts the rows of its parameters into so many matrices of equal size, such as those of
    the heads in a weight of (heads * size, columns). Each matrix is orthogonalised by itself and has the
    learning rate of its own shape: the step is that of `torch.optim.Muon` on one parameter per matrix. On
    sharded parameters each matrix has an owner of its own.

    batched: matrices of one shape are multiplied together, where that saves time. A device may round such
    products differently from single ones.
    """

    def __init__(
        self, params: Any, *, split: int | None = None, batched: bool = False, **settings: Any
    ) -> None:
        checked = optim.Muon([nn.Parameter(torch.zeros(1, 1))], **settings).defaults
        optim.Optimizer.__init__(self, params, checked | {"split": split, "batched": batched})

    def _init_group(
        self, group: Any, params_with_grad: list[Tensor], grads: list[Tensor], bufs: list[Tensor]
    ) -> bool:
        entire: tuple[list[Tensor], ...] = ([], [], [])
        has_complex = super()._init_group(group, *entire)
        for found, tensors in zip((params_with_grad, grads, bufs), entire, strict=True):
            found += [part for tensor in tensors for part in _matrices(tensor, group["split"])]
        return has_complex


def count_of(shape: Sequence[int], split: int | None) -> int:
    """How many matrices a parameter of this shape holds."""
    rows = prod(shape[:-1])
    count = split if split is not None else shape[0] if len(shape) == 3 else 1
    if len(shape) not in (2, 3) or count < 1 or rows % count or (len(shape) == 3 and count % shape[0]):
        raise OptionError(
            f"Muon has a parameter of shape {tuple(shape)}, which is not "
            + ("a matrix" if count == 1 else f"{count} matrices"),
            "Give it matrices, or stacks of them in three dimensions, whose rows `split` divides evenly.",
        )
    return count


def _matrices(tensor: Tensor, split: int | None) -> Iterator[Tensor]:
    count = count_of(tensor.shape, split)
    if count == 1 and tensor.dim() == 2:
        yield tensor
    else:
        yield from tensor.view(count, -1, tensor.shape[-1])
