"""Muon on parameters that hold several matrices: the bits of one process that steps on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import fullshard as fs
import owned_cases
import ranks
from fullshard.muon import Muon
from owned_cases import Pair


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Experts; projections of four heads; other matrices. Shards have the numbers of dimensions that full
    parameters have, and the order is that of the model."""
    experts, embedding, *blocks = [p for p in parameters if p.dim() in (2, 3)]
    return [
        {"params": [experts], "lr": 0.03},
        {"params": blocks[1::2], "split": 4, "weight_decay": 0.0},
        {"params": [embedding, *blocks[::2]]},
    ]


def _muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Muon(_groups(parameters), lr=0.02, momentum=0.9)


def _batched(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Muon(_groups(parameters), lr=0.02, momentum=0.9, batched=True)


def _trained(folder: str, saves: bool) -> dict[str, Any]:
    """Two steps, then those of a checkpoint, which another number of ranks has made if not this one."""
    found = {}
    for name, options in {"its own step": {}, "entire tensors": {"optimizer_step": "owned"}}.items():
        pair = Pair(_muon, **options)
        for step in range(2):
            pair.step(step)
        target = Path(folder) / name
        if saves:
            fs.save(target, pair.model, pair.optimizers[1])
        fresh = Pair(_muon, **options)
        fs.load(target, fresh.model, fresh.optimizers[1])
        pair.model, pair.optimizers[1] = fresh.model, fresh.optimizers[1]
        for step in range(2, 4):
            pair.step(step)
        found[name] = pair.differing()
        ranks.end_groups_of_models()
    together = Pair(_batched)
    for step in range(2):
        together.step(step)
    with fs.full(together.model):
        values = [p.detach().clone() for p in together.model.parameters()]
    for mine, theirs in zip(values, together.reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=2e-3)  # a rounding of bf16
    return found


def test_every_matrix_of_a_parameter_steps_with_the_bits_of_one_process(tmp_path: Path) -> None:
    for num_ranks in (2, 3, 1, 4):
        for found in ranks.run(_trained, num_ranks, str(tmp_path), num_ranks == 2):
            assert found == {"its own step": [], "entire tensors": []}, num_ranks


def test_it_is_torchs_step_on_one_parameter_per_matrix() -> None:
    torch.manual_seed(0)
    experts, heads = nn.Parameter(torch.randn(3, 5, 4)), nn.Parameter(torch.randn(8, 6))
    parts = [nn.Parameter(m.detach().clone()) for m in (*experts, *heads.view(4, 2, 6))]
    ours = Muon([{"params": [experts]}, {"params": [heads], "split": 4}], lr=0.02)
    theirs = torch.optim.Muon(parts, lr=0.02)
    for _ in range(3):
        experts.grad, heads.grad = torch.randn(3, 5, 4), torch.randn(8, 6)
        for part, gradient in zip(parts, (*experts.grad, *heads.grad.view(4, 2, 6)), strict=True):
            part.grad = gradient.clone()
        ours.step()
        theirs.step()
    for part, value in zip(parts, (*experts, *heads.view(4, 2, 6)), strict=True):
        assert torch.equal(part, value)


def _refused() -> dict[str, str]:
    found = {}
    for name, make in {
        "uneven": lambda ps: Muon([p for p in ps if p.dim() == 2], split=3),
        "vector": lambda ps: Muon([p for p in ps if p.dim() == 1]),
        "kernels": lambda ps: Muon([p for p in ps if p.dim() == 4]),
    }.items():
        pair = Pair(make)
        owned_cases.loss_of(pair.model, 0).backward()
        try:
            pair.optimizers[1].step()
            found[name] = "it was not refused"
        except fs.FullshardError as error:
            found[name] = str(error)
        ranks.end_groups_of_models()
    return found


def test_what_is_no_stack_of_matrices_is_refused_by_its_shape() -> None:
    for found in ranks.run(_refused, 2):
        assert "shape (11, 8), which is not 3 matrices" in found["uneven"], found
        assert "shape (), which is not a matrix" in found["vector"], found  # at rest it has one dimension
        assert "shape (3, 2, 3, 3), which is not a matrix" in found["kernels"], found
