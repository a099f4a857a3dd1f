"""On a real GPU: steps on entire tensors, and Muon's, beside the same optimizer in one process.

Ranks share the one card over gloo, which stages through the host. Both optimizers get the same gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=0.02),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(96, 160), nn.Tanh(), nn.Linear(160, 96)) for _ in range(3))
    )


def _step_beside_one_process() -> dict[str, bool]:
    import fullshard as fs

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    found = {}
    for name, make in MAKERS.items():
        for option in ("auto", "owned"):
            plain, model = _net().cuda(), fs.shard(_net().cuda(), merge_units=0, optimizer_step=option)
            optimizers = [make(plain.parameters()), make(model.parameters())]
            for step in range(4):
                torch.manual_seed(step)
                x = torch.randn(8, 96).cuda()
                for net in (plain, model):
                    net(x).square().mean().backward()
                with torch.no_grad():
                    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                        assert ours.grad is not None
                        assert theirs.grad is not None
                        ours.grad.copy_(theirs.grad)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            with fs.full(model):
                pairs = zip(model.parameters(), plain.parameters(), strict=True)
                found[f"{name}, {option}"] = all(torch.equal(a, b) for a, b in pairs)
    return found


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_entire_tensors_step_on_a_gpu_with_the_bits_of_one_process(num_ranks: int) -> None:
    for found in ranks.run(_step_beside_one_process, num_ranks, init=num_ranks > 1, timeout_s=120):
        assert all(found.values()), found
