"""The step of torch.optim.Muon, of which only the orthogonalised matrix needs entire tensors.

Momentum and weight decay are element-wise: they are computed on shards, where the momentum stays.
Newton-Schulz begins by rounding to bf16, so what goes to a matrix's owner is that, and the result, which is
bf16, comes back: 4 bytes per parameter instead of the 12 of a step on entire tensors, and the same bits.

    shards       momentum, update in bf16
    fetch        parts of updates -> owners           one all-to-all per bucket
    owners       torch's own Newton-Schulz
    send back    parts of results -> shards           one all-to-all per bucket
    shards       weight decay, p -= rate * result

The next bucket is in flight while one is computed. Torch's own call of `step` follows with no gradients. Its
arithmetic is written out here, and its functions are called where they are found: a version of torch with
others, or a subclass, steps on entire tensors (`owned`).

Parameters of `fullshard.muon.Muon` hold several matrices each, one after the other in memory. Each has an
owner of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer

from fullshard.engine.step.owned import (
    NOBODY,
    Failure,
    Owned,
    Place,
    Routes,
    bucketed,
    by_kind,
    raise_together,
    with_owners,
)
from fullshard.errors import OptimizerError
from fullshard.muon import Muon, count_of

_module: Any = getattr(optim, "_muon", None)
_orthogonalised: Any = getattr(_module, "_zeropower_via_newtonschulz", None)
_adjusted_rate: Any = getattr(_module, "_adjust_lr", None)
_SETTINGS = {
    "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn",
}  # fmt: skip
_BUFFER = "momentum_buffer"
_MUONS = {kind for kind in (getattr(optim, "Muon", None), Muon) if kind is not None}


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is torch's Muon, as it is written out here, or ours."""
    if type(optimizer) not in _MUONS or _orthogonalised is None or _adjusted_rate is None:
        return False
    known = _SETTINGS | {"params", "param_names", "initial_lr"}
    if type(optimizer) is Muon:
        known |= {"split", "batched"}
    return all(set(group) >= _SETTINGS and set(group) <= known for group in optimizer.param_groups)


def matrices(optimizer: Optimizer, places: Sequence[Place]) -> list[Owned]:
    """Every matrix of its parameters, with its owner, the same on all ranks."""
    splits = {id(p): group.get("split") for group in optimizer.param_groups for p in group["params"]}
    items = [item for place in places for item in _matrices_of(place, splits[id(place[0])])]
    return with_owners(items)


def _matrices_of(place: Place, split: int | None) -> Iterator[Owned]:
    item = Owned(*place, NOBODY)
    piece = item.piece
    count = count_of(piece.shape, split)
    if count == 1 and len(piece.shape) == 2:
        yield item
        return
    if piece.order != tuple(range(len(piece.shape))):
        raise OptimizerError(
            f"{piece.name!r} holds {count} matrices for Muon, and its memory order is {piece.order}",
            "Make it contiguous before the model is sharded: parameter.data = parameter.data.contiguous().",
        )
    columns = piece.shape[-1]
    size = piece.num_elements // count
    for number in range(count):
        start, shape = piece.start + number * size, (size // max(1, columns), columns)
        part = replace(piece, name=f"{piece.name}[{number}]", shape=shape, order=(0, 1), start=start)
        yield replace(item, part=part)


class MuonStep:
    """The steps of one optimizer."""

    def __init__(self, optimizer: Optimizer, items: list[Owned], most_bytes: int | None) -> None:
        self._reference = weakref.ref(optimizer)
        self._items, self._most_bytes = items, most_bytes
        self._lanes = list({id(item.lane): item.lane for item in items}.values())
        self._plans: dict[tuple[bool, ...], list[Routes]] = {}
        self._updates: dict[int, torch.Tensor] = {}  # by identity of items, until they are sent
        self._hidden: dict[nn.Parameter, torch.Tensor] = {}  # gradients, while torch's own call runs
        self._failure: Failure | None = None  # of this rank, in this step

    @torch.no_grad()
    def run(self) -> None:
        """The entire step. Gradients are hidden until `finish`, so that torch's own call finds none."""
        for lane in self._lanes:
            lane.take_assigned()
        used = tuple(item.parameter.grad is not None for item in self._items)
        if not any(used):
            return
        optimizer = self._reference()
        assert optimizer is not None
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        if used not in self._plans:
            if len(self._plans) > 8:
                self._plans.clear()
            self._plans[used] = self._plan(used)
        buckets, self._failure = self._plans[used], None
        self._advance(optimizer, groups, buckets)
        returning: Routes | None = None
        self._fetch(buckets[0])
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            if following is not None:
                self._fetch(following)
            self._orthogonalise(bucket, groups)
            if returning is not None:
                self._update(returning, groups)
            returning = bucket
        assert returning is not None
        self._update(returning, groups)
        failed = any(bucket.failed for bucket in buckets)
        comms = {id(lane.comm): lane.comm for lane in self._lanes}.values()
        raise_together(type(optimizer).__name__, comms, self._failure, failed)
        self._hidden = {i.parameter: i.parameter.grad for i in self._items if i.parameter.grad is not None}
        for parameter in self._hidden:
            parameter.grad = None

    def finish(self) -> None:
        for parameter, gradient in self._hidden.items():
            parameter.grad = gradient
        self._hidden = {}

    def _plan(self, used: tuple[bool, ...]) -> list[Routes]:
        items = [item for item, has in zip(self._items, used, strict=True) if has]
        return [
            Routes(alike, torch.bfloat16)
            for bucket in bucketed(items, self._most_bytes)
            for alike in by_kind(bucket)
        ]

    def _advance(self, optimizer: Optimizer, groups: dict[int, Any], buckets: list[Routes]) -> None:
        """Momentum, and from it the update, in bf16, of all that this rank keeps."""
        self._updates = {}
        for item in self._items:
            if item.parameter.grad is not None and _BUFFER not in optimizer.state[item.parameter]:
                optimizer.state[item.parameter][_BUFFER] = torch.zeros_like(item.parameter)
        by_setting: dict[tuple[float, bool], list[Owned]] = {}
        for bucket in buckets:
            for item in bucket.kept:
                group = groups[id(item.parameter)]
                by_setting.setdefault((group["momentum"], group["nesterov"]), []).append(item)
        for (momentum, nesterov), items in by_setting.items():
            buffers = [item.of(optimizer.state[item.parameter][_BUFFER].view(-1)) for item in items]
            gradients = [item.gradient() for item in items]
            torch._foreach_lerp_(buffers, gradients, 1 - momentum)
            updates = torch._foreach_lerp(gradients, buffers, momentum) if nesterov else buffers
            for item, update in zip(items, updates, strict=True):
                self._updates[id(item)] = update.bfloat16()

    def _fetch(self, routes: Routes) -> None:
        routes.to_owners([self._updates.pop(id(item)) for item in routes.kept], 1)

    def _orthogonalise(self, routes: Routes, groups: dict[int, Any]) -> None:
        received = routes.received()
        alike: dict[Any, list[tuple[Owned, torch.Tensor]]] = {}
        for number, item in enumerate(routes.mine):
            group = groups[id(item.parameter)]
            matrix = item.shaped(routes.joined(received, number, 0, 1))
            together = (id(group), item.piece.shape) if group.get("batched") else number
            alike.setdefault(together, []).append((item, matrix))
        results: dict[int, torch.Tensor] = {}
        for members in alike.values():
            items, entire = zip(*members, strict=True)
            group = groups[id(items[0].parameter)]
            try:
                made = _all_orthogonalised(entire, group["ns_coefficients"], group["ns_steps"], group["eps"])
            except Exception as error:  # noqa: BLE001  raised on all ranks
                self._failure = self._failure or Failure(error, list(items))
                made = [torch.zeros_like(matrix) for matrix in entire]
            results |= {id(item): item.flat(value) for item, value in zip(items, made, strict=True)}
        routes.back([results[id(item)] for item in routes.mine], self._failure is not None)

    def _update(self, routes: Routes, groups: dict[int, Any]) -> None:
        results = routes.split(routes.received())
        by_rates: dict[tuple[float, float], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for item, result in zip(routes.kept, results, strict=True):
            if item.owner in routes.failed:
                continue
            group = groups[id(item.parameter)]
            rate = float(group["lr"])
            adjusted = _adjusted_rate(rate, group["adjust_lr_fn"], torch.Size(item.piece.shape))
            shards, updates = by_rates.setdefault((1 - rate * group["weight_decay"], adjusted), ([], []))
            shards.append(item.shard())
            updates.append(result)
        for (kept, adjusted), (shards, updates) in by_rates.items():
            torch._foreach_mul_(shards, kept)
            exact = [update.to(shard.dtype) for update, shard in zip(updates, shards, strict=True)]
            torch._foreach_add_(shards, exact, alpha=-adjusted)


def _all_orthogonalised(
    entire: Sequence[torch.Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> Sequence[torch.Tensor]:
    """By torch's own function; several matrices of one shape, in bf16, by the same products in a batch."""
    if len(entire) == 1 or steps >= 100 or len(coefficients) != 3:
        return [_orthogonalised(matrix, coefficients, steps, eps) for matrix in entire]
    a, b, c = coefficients
    rows, columns = entire[0].shape
    stack = torch.stack([matrix.T if rows > columns else matrix for matrix in entire])
    stack /= torch.stack([matrix.norm() for matrix in stack]).clamp(min=eps).view(-1, 1, 1)
    for _ in range(steps):
        gram = stack @ stack.mT
        stack = torch.baddbmm(stack, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), stack, beta=a)
    return list(stack.mT if rows > columns else stack)
