"""Optimizer state in 8-bit blocks on a GPU: the kernels' bits, and training in every home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard as fs
from fullshard.engine.step import low_bit
from fullshard.precision import BLOCK, STATE_ROW_BYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def wide(kind: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values, scales = (torch.randn(1003 * BLOCK, generator=generator) for _ in range(2))
    values = values * scales.mul(3).exp()
    values = values.square() if kind == "second moments" else values
    values[:BLOCK], values[2 * BLOCK + 3], values[3 * BLOCK] = 1e-30, torch.nan, torch.inf
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["signed", "second moments"])
def test_kernels_have_the_bits_of_the_processor(kind: str, dtype: torch.dtype) -> None:
    values = wide(kind, dtype)
    rows = torch.zeros(len(values) // BLOCK, STATE_ROW_BYTES, dtype=torch.uint8)
    on_gpu = rows.cuda()
    low_bit.encode(values, rows)
    low_bit.encode(values.cuda(), on_gpu)
    finite = [0, 1, *range(4, len(rows))]
    assert torch.equal(rows[finite], on_gpu.cpu()[finite])
    back, there = torch.empty_like(values), torch.empty_like(values, device="cuda")
    low_bit.decode(rows, back)
    low_bit.decode(on_gpu, there)
    assert torch.equal(back.view(-1, BLOCK)[finite], there.cpu().view(-1, BLOCK)[finite])
    assert not there.view(-1, BLOCK)[2:4].isfinite().any()


def _trained(**options: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 300), nn.GELU(), nn.Linear(300, 256)) for _ in range(3)]
    model = fs.shard(nn.Sequential(*layers).cuda(), units=nn.Sequential, merge_units=0, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(4):
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).cuda()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    values = {f"{i}.{k}": torch.as_tensor(v.full_tensor() if hasattr(v, "full_tensor") else v).cpu()
              for i, state in optimizer.state_dict()["state"].items() for k, v in state.items()}  # fmt: skip
    with fs.full(model):
        values |= {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return losses, values


def test_homes_do_not_change_the_bits() -> None:
    losses, values = _trained(state="8bit")
    exact, _ = _trained()
    assert losses[0] == exact[0]
    assert losses[-1] == pytest.approx(exact[-1], rel=0.05)
    for offload in ("host", "optimizer", fs.Offload(chunk=20_000), fs.Offload(chunk=20_000, overlap=True)):
        other, there = _trained(state="8bit", offload=offload)
        assert other == losses, offload
        assert all(torch.equal(there[name], value) for name, value in values.items()), offload


def test_state_takes_the_memory_that_the_plan_counts() -> None:
    model = fs.shard(nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda(), state="8bit")
    plan = fs.plan(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(4, 2048, device="cuda")
    model(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    more = torch.cuda.memory_allocated() - before
    assert more < 1.05 * (plan.state_bytes + plan.slab_bytes) + 2**20
