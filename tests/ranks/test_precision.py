"""Mixed precision where a cast would be wrong."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)
        )
        self.head = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _train(precision: str) -> tuple[list[float], set[torch.dtype], set[torch.dtype], float]:
    import fullshard as fs

    torch.manual_seed(0)
    model = fs.shard(Convolutions(), precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    x, y = torch.randn(8, 3, 6, 6, generator=generator), torch.arange(8) % 4
    losses = []
    for _ in range(10):
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    lanes = model._fullshard.lanes
    norms = {lane.dtypes.compute for lane in lanes for p in lane.layout.pieces if p.name.endswith("1.weight")}
    others = {lane.dtypes.compute for lane in lanes for p in lane.layout.pieces if p.name == "head.weight"}
    return losses, norms, others, float(model.blocks[0][1].running_mean.abs().sum())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_batch_norm_trains_under_mixed_precision_on_parameters_of_its_own_dtype(precision: str) -> None:
    expected = ranks.run(_train, 2, "fp32")
    found = ranks.run(_train, 2, precision)
    for (losses, norms, others, mean), (plain, *_) in zip(found, expected, strict=True):
        assert norms == {torch.float32}
        assert others == {torch.bfloat16 if precision == "bf16" else torch.float16}
        assert losses == pytest.approx(plain, rel=0.05)
        assert losses[-1] < losses[0]
        assert mean > 0
