"""Norms of single tensors: of gradients through torch's own functions, of parameters inside fs.full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import utils

import engines
import ranks
import reference
from engines import batch, build, loss_of, my_rank


def _unit_norms(model: nn.Module) -> None:
    """Clip each tensor's gradient by itself."""
    for p in model.parameters():
        utils.clip_grad_norm_([p], 0.05)


def _total_norm(model: nn.Module) -> None:
    """By torch's two functions, over two lists."""
    named = list(model.named_parameters())
    for part in (named[::2], named[1::2]):
        norm = utils.get_total_norm([p.grad for _, p in part if p.grad is not None])
        utils.clip_grads_with_norm_([p for _, p in part], 0.05, norm)


def _one_by_one(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.div_(1 + p.grad.norm() + p.grad.abs().max() + p.grad.square().mean().sqrt())


def _adaptive(model: nn.Module) -> None:
    """AGC, by tensor: the norm of a parameter is that inside fs.full."""
    import fullshard as fs

    sharded = any(p.grad is not None and type(p.grad) is not torch.Tensor for p in model.parameters())
    if sharded:
        with fs.full(model):
            norms = [float(p.detach().norm()) for p in model.parameters()]
    else:
        norms = [float(p.detach().norm()) for p in model.parameters()]
    for p, norm in zip(model.parameters(), norms, strict=True):
        assert p.grad is not None
        largest = 0.02 * max(norm, 1e-3)
        own = p.grad.norm()
        p.grad.mul_(torch.where(own > largest, largest / own, torch.ones_like(own)))


def _norms_without_gathering() -> dict[str, tuple[float, float]]:
    """A parameter's norm over ranks, from each rank's elements."""
    import fullshard as fs

    model, found = engines.shard_blocks(build()), {}
    with torch.no_grad():
        fs.penalty(model, lambda name, p: found.setdefault(name, p.norm()))
    expected = {name: p.detach().norm() for name, p in build().named_parameters()}
    return {name: (float(found[name]), float(norm)) for name, norm in expected.items()}


def test_norm_of_a_parameter_is_known_without_gathering_it() -> None:
    for found in ranks.run(_norms_without_gathering, 3):
        for name, (norm, expected) in found.items():
            assert abs(norm - expected) <= 1e-6 * expected, name


def _by_infinity(model: nn.Module) -> None:
    for p in model.parameters():
        utils.clip_grad_norm_(p, 0.01, norm_type=float("inf"))


WAYS: list[Callable[[nn.Module], None]] = [_unit_norms, _total_norm, _one_by_one, _adaptive, _by_infinity]


def _trained(model: nn.Module, way: Callable[[nn.Module], None], pieces: list[int]) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    for step in range(3):
        for rank in pieces:
            (loss_of(model, batch(step, rank)) / len(pieces)).backward()
        way(model)
        optimizer.step()
        optimizer.zero_grad()
    return reference.whole_parameters(model) if len(pieces) > 1 else engines.whole("fullshard", model)


def _all_ways() -> list[dict[str, Any]]:
    return [_trained(engines.shard_blocks(build()), way, [my_rank()]) for way in WAYS]


def test_norms_of_single_tensors_are_those_of_one_process() -> None:
    results = ranks.run(_all_ways, 3)
    for index, way in enumerate(WAYS):
        expected = _trained(build(), way, [0, 1, 2])
        for result in results:
            for name, value in expected.items():
                reference.assert_close(result[index][name], value, f"{way.__name__} {name}", 2e-5, 2e-6)
