"""The device memory of a step with offload, counted on simulated streams."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

import fullshard as fs
import ranks
import streams
import tables
from device_memory import Meter
from fullshard.engine.homes.transfers import HELD
from fullshard.engine.runtime import runtime_of
from fullshard.options import parse
from fullshard.plan.homes import Budget
from fullshard.planning.answers import Question, step_of
from fullshard.planning.decoder import Decoder
from fullshard.planning.needs import need
from fullshard.planning.offloading import Request
from fullshard.planning.sizes import Shape
from fullshard.planning.subjects import Batch, decoder

# Larger than what the engine takes for a small model, whose buffers keep their memory.
SHAPE, LENGTH = Shape(7, 448, 7, 7, 1216, 4096, 64), 64
CHUNK = 2**18
CASES: dict[str, tuple[str, fs.Offload]] = {
    "overlap": ("zero3", fs.Offload(chunk=CHUNK, overlap=True)),
    "replicate": ("replicate", fs.Offload(chunk=CHUNK, kinds=("master", "state"))),
    "host": ("zero3", fs.Offload(chunk=CHUNK)),
    "state": ("zero2", fs.Offload(chunk=CHUNK, kinds=("state",))),
    "budget": ("zero3", fs.Offload(chunk=CHUNK, device="100MiB", one_backward=True, overlap=True)),
    "slabs": (
        "zero3",
        fs.Offload(chunk=CHUNK, overlap=True, slabs="40MiB", one_backward=True, split_masters=True),
    ),
}


def planned(strategy: str, offload: fs.Offload) -> int:
    request = Request("host", one_backward=offload.one_backward, split_masters=offload.split_masters)
    asked = Question(1, 2**50, (strategy,), on_gpu=False, optimizer="fused-adamw", offload=request)
    step, _ = step_of(decoder("", SHAPE, Batch(1, LENGTH)), asked)
    options = parse(strategy=strategy, precision="bf16", offload=offload, on_gpu=False)
    return need(step, 1, options, Budget(int(offload.device), None, False, offload.kinds, 1)).peak


def _measured(strategy: str, offload: fs.Offload) -> int:
    with streams.watched(Meter()) as meter:
        model = fs.shard(
            Decoder(replace(SHAPE, context=LENGTH)), strategy=strategy, precision="bf16", offload=offload
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        tokens = torch.randint(0, SHAPE.vocabulary, (1, LENGTH + 1))
        for step in range(3):
            if step == 2:
                meter.restart()
            out = model(tokens)
            out[0].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        del out
    return meter.peak_bytes


@tables.some("name", CASES, "overlap", "replicate")
def test_a_step_takes_no_more_memory_of_the_device_than_planned_and_not_much_less(name: str) -> None:
    strategy, offload = CASES[name]
    [measured] = ranks.run(_measured, 1, strategy, offload)
    assert 0.85 < measured / planned(strategy, offload) < 1.003


def _held_at_the_end_of_forwards(strategy: str, offload: fs.Offload, steps: bool) -> list[int]:
    with streams.watched(Meter()):
        blocks = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(8)]
        options: dict[str, Any] = {
            "strategy": strategy,
            "precision": "bf16",
            "offload": offload,
            "merge_units": 0,
        }
        model = fs.shard(torch.nn.Sequential(*blocks), **options)
        optimizer = torch.optim.AdamW(model.parameters())
        transfers, held = runtime_of(model).lanes[0].homes.transfers, []
        for _ in range(3):
            with nullcontext() if steps else fs.accumulate(model):  # with which zero2 gathers nothing
                loss = model(torch.randn(2, 16)).float().square().mean()
                held.append(len(transfers.held))
                loss.backward()
            assert len(transfers.held) == HELD
            if steps:
                optimizer.step()
                optimizer.zero_grad()
    return held


def test_gradients_that_have_left_for_the_host_have_no_memory_at_the_next_loss() -> None:
    """Without a step in between, and with one that waits for nothing."""
    for strategy in ("zero3", "zero2"):
        for offload, steps in ((fs.Offload(overlap=True), True), (fs.Offload(), False)):
            assert ranks.run(_held_at_the_end_of_forwards, 1, strategy, offload, steps) == [[0, 0, 0]]
