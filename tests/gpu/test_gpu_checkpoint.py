"""Checkpoints of models on a real GPU: exact resume, to the CPU and back, background copies, memory.

Skipped where there is no GPU. Several ranks share the one card over gloo.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fullshard as fs
import ranks
from fullshard.elastic.keeper import Keeper
from reference import bitwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def _model(seed: int, device: str = "cuda") -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 8)).to(device)


def _sharded(seed: int, device: str = "cuda", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fs.shard(_model(seed, device), units=Block, **options)
    fused = device == "cuda"
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    device = next(model.parameters()).device
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(8, 16, generator=generator).to(device)
    loss = F.mse_loss(model(x).float(), x[:, :8])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole parameters, and this rank's optimizer state."""
    with fs.full(model, writeback=False):
        found = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = value.detach().cpu().clone()
    return found


def _resume(folder: str, options: dict[str, Any]) -> None:
    model, optimizer = _sharded(0, **options)
    torch.manual_seed(5 + torch.distributed.get_rank())
    for number in range(3):
        _step(model, optimizer, number)
    fs.save(
        Path(folder) / "three",
        model,
        optimizer,
        extra={"step": 3},
        background=options.get("strategy") == "zero2",
    )
    losses = [_step(model, optimizer, number) for number in range(3, 6)]
    end = _held(model, optimizer)
    again, again_optimizer = _sharded(1, **options)
    step = fs.load(Path(folder) / "three", again, again_optimizer)["step"]
    resumed = [_step(again, again_optimizer, number) for number in range(step, 6)]
    assert resumed == losses
    for name, value in _held(again, again_optimizer).items():
        assert bitwise(value, end[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "zero3"},
        {"strategy": "zero2"},
        {"strategy": "zero3", "precision": "bf16"},
        {"strategy": "replicate"},
    ],
    ids=["zero3", "zero2, in the background", "bf16", "replicate"],
)
def test_run_on_the_gpu_resumes_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    ranks.run(_resume, 2, str(tmp_path), options, init=True, timeout_s=120)


def _save(folder: str, device: str) -> dict[str, torch.Tensor]:
    model, optimizer = _sharded(0, device)
    _step(model, optimizer, 0)
    fs.save(folder, model, optimizer)
    with fs.full(model, writeback=False):
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def _load(folder: str, device: str) -> dict[str, torch.Tensor]:
    model, optimizer = _sharded(1, device)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random numbers of another count of ranks
        fs.load(folder, model, optimizer)
    step = next(iter(optimizer.state.values()))["step"]
    assert step.device.type == device  # where a fused optimizer wants it, and where others do
    _step(model, optimizer, 1)
    with fs.full(model, writeback=False):
        found = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    fresh, _ = _sharded(2, device)
    fs.load(folder, fresh)
    with fs.full(fresh, writeback=False):
        return found | {f"loaded {n}": p.detach().cpu().clone() for n, p in fresh.named_parameters()}


@pytest.mark.parametrize(("there", "here"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_checkpoint_moves_between_gpu_and_cpu(tmp_path: Path, there: str, here: str) -> None:
    saved = ranks.run(_save, 2, str(tmp_path / "c"), there, init=True, timeout_s=120)[0]
    loaded = ranks.run(_load, 3, str(tmp_path / "c"), here, init=True, timeout_s=120)[0]
    for name, value in saved.items():
        assert bitwise(loaded[f"loaded {name}"], value), name


def _background(folder: str) -> None:
    model, optimizer = _sharded(0)
    for number in range(3):
        before = _held(model, optimizer)
        saving = fs.save(Path(folder) / str(number), model, optimizer, background=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        saving.wait()
        fs.load(Path(folder) / str(number), model, optimizer)
        after = _held(model, optimizer)
        assert all(bitwise(after[name], value) for name, value in before.items())
        _step(model, optimizer, number)


def test_background_save_holds_the_values_of_the_moment_it_was_called(tmp_path: Path) -> None:
    ranks.run(_background, 2, str(tmp_path), init=True, timeout_s=120)


def _memory(folder: str) -> int:
    torch.manual_seed(0)
    blocks = (nn.Linear(2048, 2048) for _ in range(16))  # 256 MiB
    model = fs.shard(nn.Sequential(*blocks).cuda())
    fs.save(folder, model)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fs.load(folder, model)
    fs.save(folder, model, background=True).wait()
    return torch.cuda.max_memory_allocated() - before


def test_saving_and_loading_take_next_to_no_memory_on_the_gpu(tmp_path: Path) -> None:
    assert ranks.run(_memory, 1, str(tmp_path / "c"), init=True, timeout_s=120)[0] <= 64 * 2**20


def _from_memory(root: Path, variables: list[dict[str, str]]) -> bool:
    rank = torch.distributed.get_rank()
    os.environ.update(variables[rank], FULLSHARD_HOST=f"host {rank}")
    model, optimizer = _sharded(0)
    for number in range(2):
        _step(model, optimizer, number)
    fs.save(root / "step-2", model, optimizer, peers=1)
    after = [_step(model, optimizer, number) for number in (2, 3)]
    newest = fs.latest(root)
    assert newest == root / "step-2"
    fs.load(newest, model, optimizer)
    return after == [_step(model, optimizer, number) for number in (2, 3)]


def test_run_on_a_gpu_goes_on_from_copies_in_memory_with_the_same_losses(tmp_path: Path) -> None:
    with Keeper("one") as first, Keeper("two") as second:
        variables = [first.variables(), second.variables()]
        assert ranks.run(_from_memory, 2, tmp_path, variables, init=True) == [True, True]
