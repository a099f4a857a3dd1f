"""fs.shard and the first step do work in proportion to the model: calls are counted, time is not measured."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fullshard as fs
import ranks

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Tensors(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0]


class TwoLists(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.ModuleList(Block() for _ in range(count))
        self.second = nn.ModuleList(Block() for _ in range(count))
        self.idle = nn.ModuleList(nn.Identity() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = second(first(x))
        return x


class Stage(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return x


def _units(count: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(*(Block() for _ in range(count))), {"units": Block}


def _units_on_meta(count: int) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        return _units(count)


def _merged_blocks(count: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(*(Block() for _ in range(count))), {}


def _lists_side_by_side(count: int) -> tuple[nn.Module, dict[str, Any]]:
    return TwoLists(count), {"checkpoint_activations": True}  # so that it is not one unit


def _lists_in_a_block(count: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(Stage(count), Stage(count)), {"checkpoint_activations": True}


def _units_in_units(count: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(*(Stage(2) for _ in range(count // 4))), {"units": (Stage, Block)}


def _tensors(count: int) -> tuple[nn.Module, dict[str, Any]]:
    return nn.Sequential(Tensors(4 * count), Tensors(4 * count)), {"units": Tensors}


def _ignored(count: int) -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(*(Block() for _ in range(count)))
    return model, {"ignore": [f"{i}.norm" for i in range(count)]}


def _calls(work: Callable[[], Any]) -> int:
    """Function calls, of Python's and of C's, that `work` makes in this thread."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # a collection would count what it finalizes, of the models before
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def _work(build: Callable[[int], tuple[nn.Module, dict[str, Any]]]) -> list[list[int]]:
    """Calls of fs.shard, and of a forward and backward, for models of three sizes."""
    found = []
    for count in (4, 12, 24, 48):
        model, options = build(count)
        sharding = _calls(lambda model=model, options=options: fs.shard(model, **options))
        step = _calls(lambda model=model: model(torch.ones(2, WIDTH)).sum().backward())
        found.append([sharding, step])
    return found[1:]  # the first one imports


BUILDS = [
    _units,
    _units_on_meta,
    _merged_blocks,
    _lists_side_by_side,
    _lists_in_a_block,
    _units_in_units,
    _tensors,
    _ignored,
]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__.strip("_"))
def test_a_model_of_twice_the_size_takes_twice_the_calls(build: Any) -> None:
    (found,) = ranks.run(_work, 1, build, timeout_s=60)
    for what, counts in zip(("fs.shard", "a step"), zip(*found, strict=True), strict=True):
        small, medium, large = counts
        # Linear work doubles from one difference to the next, quadratic work takes four times as much.
        assert large - medium < 2.4 * (medium - small), (what, counts)
