"""On a real GPU: reduce='fixed' has the same bits on one rank and on several that share the card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES: list[dict[str, Any]] = [
    {"strategy": "zero3"},
    {"strategy": "zero2", "precision": "bf16"},
    {"strategy": "zero3", "precision": "bf16", "offload": "host"},
]


def _train(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    import fullshard as fs

    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
    ]
    model = fs.shard(nn.Sequential(*blocks), device="cuda", merge_units=0, reduce="fixed", **case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    batches = fs.Batches(len(data), 10, micro_batch_size=2)
    for step, micro_batches in batches.steps(DataLoader(data, batch_sampler=batches)):
        for batch in micro_batches:
            model(batch.cuda()).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            break
    with fs.full(model):
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def _train_all() -> list[dict[str, torch.Tensor]]:
    return [_train(case) for case in CASES]


def test_a_fixed_order_of_sums_has_the_same_bits_on_any_number_of_ranks() -> None:
    alone = ranks.run(_train_all, 1, init=True, timeout_s=120)[0]
    for num_ranks in (2, 3):
        found = ranks.run(_train_all, num_ranks, init=True, timeout_s=120)[0]
        for case, values, right in zip(CASES, found, alone, strict=True):
            for name, value in values.items():
                assert torch.equal(value, right[name]), (num_ranks, case, name)
