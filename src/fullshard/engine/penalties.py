"""Penalties on parameters at rest: L1, L2, EWC and others that are sums over elements.

A parameter at rest holds this rank's elements, and the gradient of such a sum with respect to them needs no
other rank's. It is computed together with the value. What backward then brings is a factor, averaged over
ranks as gradients are, and the product is added to the mean that is `p.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from fullshard.engine.cuts import Cut
from fullshard.engine.gradients import GradShard, plainly
from fullshard.engine.homes.split_masters import restored
from fullshard.engine.lane import Lane
from fullshard.engine.norms import sum_over_ranks
from fullshard.engine.reduce_buffers import Penalised
from fullshard.engine.runtime import Runtime
from fullshard.errors import AtRestError, NotSupported, StateError

Term = Callable[[str, Any], Any]


class _Factor(torch.autograd.Function):
    """A value whose gradient is given: backward only multiplies it."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, value: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
        ctx.note = note
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *factors: Any) -> Any:
        ctx.note(factors[0])
        return None, None, None


def penalty(runtime: Runtime, module: nn.Module, term: Term) -> torch.Tensor:
    """The sum over the module's parameters, the same on all ranks: a collective."""
    _require_at_rest(runtime)
    places = {id(p): (lane, index) for p, lane, index in runtime.places()}
    leaves: list[tuple[Lane, int, torch.Tensor]] = []
    totals = _Totals()
    with torch.enable_grad():
        for name, parameter in module.named_parameters():
            if id(parameter) not in places:  # one that each rank trains alone
                totals.add_plain(name, term(name, parameter))
                continue
            lane, index = places[id(parameter)]
            leaf = restored(parameter.detach()).requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                leaves.append((lane, index, leaf))
            totals.add(name, term(name, leaf if lane.replicated else _shard(lane, index, leaf)))
        value = totals.over_ranks(runtime)
    total = value.detach()
    if leaves and torch.is_grad_enabled() and value.requires_grad:
        with plainly():  # a dispatch mode, such as FlopCounterMode, calls its operators from Python
            found = torch.autograd.grad(value, [leaf for _, _, leaf in leaves], allow_unused=True)
        terms = [
            Penalised(lane, i, g) for (lane, i, _), g in zip(leaves, found, strict=True) if g is not None
        ]
        note = partial(runtime.penalised, terms)
        total = _Factor.apply(runtime.anchor, total, note)  # type: ignore[no-untyped-call]
    return total if totals.plain is None else total + totals.plain


def _require_at_rest(runtime: Runtime) -> None:
    if runtime.in_pass or any(unit.is_unsharded for unit in runtime.units):
        raise StateError(
            "fs.penalty inside a forward, a backward or fs.full",
            "Call it where the loss is computed, after the model's forward.",
        )
    if runtime.comm.world is not runtime.comm:
        raise NotSupported(
            "fs.penalty of a model that is tensor-parallel as well", "Use the optimizer's weight_decay."
        )


def _shard(lane: Lane, index: int, leaf: torch.Tensor) -> GradShard:
    cut = Cut.of_rank(lane.layout, lane.layout.pieces[index], lane.comm.rank)
    return GradShard.make(leaf, lane.comm, cut=cut)


class _Totals:
    """Sums of terms, by what is left to do: those of shards are added over ranks, all together."""

    def __init__(self) -> None:
        self._shards: list[torch.Tensor] = []
        self._complete: list[torch.Tensor] = []
        self.plain: torch.Tensor | None = None

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, GradShard) and not value.replicated:
            self._shards.append(value.part.sum())
        else:
            self._complete.append(_scalar(name, value))

    def add_plain(self, name: str, value: Any) -> None:
        value = _scalar(name, value)
        self.plain = value if self.plain is None else self.plain + value

    def over_ranks(self, runtime: Runtime) -> torch.Tensor:
        total = sum_over_ranks(_sum(self._shards, runtime), runtime.comm)
        return total + _sum(self._complete, runtime)


def _scalar(name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.sum()
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    raise AtRestError(
        f"fs.penalty: the function returned a {type(value).__name__} for parameter {name!r}",
        "Return a tensor: the penalty of each element, or its sum.",
    )


def _sum(values: list[torch.Tensor], runtime: Runtime) -> torch.Tensor:
    """In fp32 at least."""
    wide = [v.to(torch.promote_types(v.dtype, torch.float32)) for v in _on_device(values, runtime)]
    start = torch.zeros((), dtype=torch.float32, device=runtime.comm.device)
    return sum(wide, start)


def _on_device(values: list[torch.Tensor], runtime: Runtime) -> Iterator[torch.Tensor]:
    return (value.to(runtime.comm.device) for value in values)
