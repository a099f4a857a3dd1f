"""Block inputs in host memory on a real GPU: the same bits, less device memory, no new pinned memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from test_gpu import Block
from torch import nn

import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKS, WIDTH, SHAPE = 12, 256, (16, 1024, 256)  # an input takes 16 MiB


class Net(nn.Module):
    """Every block also gets the memory, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(WithMemory(WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        memory = x.tanh()
        for block in self.blocks:
            x = block(x, memory=memory)
        return x


class WithMemory(Block):
    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        assert memory is not None
        return super().forward(nn.functional.dropout(x, 0.1) + memory)


def _steps(mode: Any, precision: str) -> tuple[list[torch.Tensor], int, list[tuple[int, int]]]:
    """Values after some steps; peak device memory of the last; pinned memory after each."""
    import fullshard as fs

    torch.manual_seed(0)
    model = fs.shard(
        Net().cuda(), checkpoint_activations=mode, precision=precision, units=WithMemory, merge_units=0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pinned = []
    torch.manual_seed(1)
    for _ in range(4):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(torch.randn(SHAPE, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        peak = torch.cuda.max_memory_allocated() - before
        if mode == "offload":
            keeper = model.blocks[0].forward.keeper
            stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
            pinned.append((keeper.link.buffers.allocations, stats.get("num_host_alloc", 0)))
    with fs.full(model, writeback=False):
        return [p.detach().cpu() for p in model.parameters()], peak, pinned


def _compared(precision: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    kept, kept_peak, _ = _steps(True, precision)
    moved, moved_peak, pinned = _steps("offload", precision)
    return {
        "same": all(map(torch.equal, kept, moved)),
        "saved": kept_peak - moved_peak,
        "pinned": pinned,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inputs_in_host_memory_change_no_bit_and_leave_two_of_them_on_the_device(precision: str) -> None:
    (found,) = ranks.run(_compared, 1, precision, timeout_s=200)
    size = 16 * 1024 * 256 * (4 if precision == "fp32" else 2)
    assert found["same"]
    assert (BLOCKS - 3) * size <= found["saved"] <= BLOCKS * size, found
    assert found["pinned"][0][0] > 0
    assert len({ours for ours, _ in found["pinned"]}) == 1, found  # nothing after the first step
    assert found["pinned"][-1] == found["pinned"][-2], found
