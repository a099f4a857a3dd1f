"""Optimizers of libraries that keep states in blocks of few bits, unmodified, on sharded parameters."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard as fs
import optimizer_kinds
import ranks


def _library(name: str, **settings: Any) -> Any:
    """'torchao.optim:AdamW8bit', say."""
    module, _, kind = name.partition(":")
    return lambda p: getattr(importlib.import_module(module), kind)(p, **settings)


OPTIMIZERS: dict[str, Any] = {
    "imitation": optimizer_kinds.InTensorsOfItsOwn,
    "by blocks": optimizer_kinds.ByBlocks,
    **{
        name: _library(name, lr=1e-2)
        for name in (
            *("torchao.optim:AdamW8bit", "torchao.optim:AdamW4bit", "torchao.optim:AdamWFp8"),
            *("bitsandbytes.optim:AdamW8bit", "bitsandbytes.optim:Lion8bit"),
        )
    },
}
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            ":" in name and importlib.util.find_spec(name.split(".")[0]) is None, reason="not installed"
        ),
    )
    for name in OPTIMIZERS
]
SAVED_AT, STEPS = 2, 4


def build() -> nn.Sequential:
    """Tensors of many blocks, cut anywhere; small ones; and one that is not a multiple of a block."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 33))


SHAPES = [tuple(p.shape) for p in build().parameters()]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def reference(name: str) -> list[Tensor]:
    """In one process, without sharding."""
    with _uncompiled():
        model = build()
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(STEPS):
            for p, gradient in zip(model.parameters(), gradients(step), strict=True):
                p.grad = gradient
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def _uncompiled() -> Any:
    """torchao compiles the update of a parameter; compiling takes a minute here."""
    return torch.compiler.set_stance("force_eager")


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        model(torch.ones(2, 64)).sum().backward()
        for p, gradient in zip(model.parameters(), gradients(step), strict=True):
            assert p.grad is not None
            p.grad.copy_(gradient)
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module) -> list[Tensor]:
    with fs.full(model):
        return [p.detach().clone() for p in model.parameters()]


def _trained(name: str, folder: Path) -> list[list[Tensor]]:
    """In one go, and by way of a state dict. In between, a checkpoint."""
    found = []
    with _uncompiled():
        for reloads in (False, True):
            model = fs.shard(build(), units=nn.Linear)
            optimizer = OPTIMIZERS[name](model.parameters())
            stepped(model, optimizer, range(SAVED_AT))
            if reloads:
                optimizer.load_state_dict(optimizer.state_dict())
            else:
                fs.save(folder, model, optimizer)
            stepped(model, optimizer, range(SAVED_AT, STEPS))
            found.append(values_of(model))
    ranks.end_groups_of_models()
    return found


def _resumed(name: str, folder: Path) -> list[Tensor]:
    with _uncompiled():
        model = fs.shard(build(), units=nn.Linear)
        optimizer = OPTIMIZERS[name](model.parameters())
        fs.load(folder, model, optimizer)
        stepped(model, optimizer, range(SAVED_AT, STEPS))
        return values_of(model)


def same(one: list[Tensor], other: list[Tensor], what: Any) -> None:
    assert all(map(torch.equal, one, other)), what


@pytest.mark.parametrize("name", NAMES)
def test_states_in_blocks_have_the_bits_of_one_process_and_load_on_any_number_of_ranks(
    name: str, tmp_path: Path
) -> None:
    expected = reference(name)
    for found in ranks.run(_trained, 2, name, tmp_path / "saved")[0]:
        same(expected, found, "two ranks")
    for num_ranks in (1, 3):
        same(expected, ranks.run(_resumed, num_ranks, name, tmp_path / "saved")[0], num_ranks)


def _offloaded() -> None:
    for options in ({"offload": "host"}, {"state": "8bit"}):
        model = fs.shard(nn.Linear(256, 256), **options)  # type: ignore[arg-type]
        optimizer = optimizer_kinds.InTensorsOfItsOwn(model.parameters())
        optimizer.fullshard_step = "element-wise"  # type: ignore[attr-defined]
        model(torch.ones(2, 256)).sum().backward()
        with pytest.raises(fs.FullshardError, match="is a Coded, which a step in chunks"):
            optimizer.step()


def test_tensors_of_a_librarys_own_class_are_refused_where_steps_run_in_chunks() -> None:
    ranks.run(_offloaded, 2)


def test_a_class_that_is_not_here_is_named() -> None:
    from fullshard.state.tensor_subclasses import put_together, taken_apart

    state = optimizer_kinds.Coded.of(torch.randn(2, 256))
    apart = taken_apart({"kept": [state]})
    assert torch.equal(put_together(apart)["kept"][0].decoded(), state.decoded())
    part = apart["kept"][0]
    part["fullshard tensor of os:system"] = part.pop("fullshard tensor of optimizer_kinds:Coded")
    with pytest.raises(fs.FullshardError, match="'os:system', which is not here"):
        put_together(apart)
