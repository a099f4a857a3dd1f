"""Optimizers that look at entire tensors: each tensor steps on its owner, with the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import optimizer_kinds as kinds
import owned_cases
import ranks
import tables
from owned_cases import Make, Pair


def _muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2


OPTIMIZERS: dict[str, tuple[Make, Any]] = {
    "Muon": (_muon, _is_matrix),
    "Adafactor": (lambda ps: torch.optim.Adafactor(ps, lr=0.05), owned_cases.everything),
    "Adafactor foreach": (
        lambda ps: torch.optim.Adafactor(ps, lr=0.05, foreach=True),
        owned_cases.everything,
    ),
    "LAMB": (kinds.Lamb, owned_cases.everything),
    "Shampoo": (lambda ps: kinds.Shampoo(ps, lr=0.01), owned_cases.everything),
    "Muon and Adam in one class": (kinds.MixedMuon, owned_cases.everything),
    "AdamW": (lambda ps: torch.optim.AdamW(ps, lr=0.01), owned_cases.everything),
}


def _train_and_resume(folder: str, strategy: str, **options: Any) -> dict[str, list[str]]:
    """Three steps, a checkpoint into a new model and optimizer, two more steps."""
    import fullshard as fs

    found = {}
    for name, (make, only) in OPTIMIZERS.items():
        request = {"strategy": strategy, "optimizer_step": "owned"} | options
        pair = Pair(make, only, **request)
        for step in range(3):
            pair.step(step)
        target = Path(folder) / name
        fs.save(target, pair.model, pair.optimizers[1]).wait()
        fresh = Pair(make, only, **request)
        fs.load(target, fresh.model, fresh.optimizers[1])
        pair.model, pair.optimizers[1] = fresh.model, fresh.optimizers[1]
        for step in range(3, 5):
            pair.step(step)
        found[name] = pair.differing()
        ranks.end_groups_of_models()
    return found


RUNS = [(1, "zero3"), (3, "zero3"), (4, "zero1"), (2, "zero2"), (4, "hybrid"), (4, "zero2"), (2, "replicate")]


@tables.some("run", RUNS, *RUNS[:3])
def test_whole_tensors_step_with_the_bits_of_one_process_and_resume(
    run: tuple[int, str], tmp_path: Path
) -> None:
    num_ranks, strategy = run
    for found in ranks.run(_train_and_resume, num_ranks, str(tmp_path), strategy):
        assert found == {name: [] for name in OPTIMIZERS}
