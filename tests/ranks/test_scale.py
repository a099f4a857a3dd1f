"""What a rank does per step does not grow with the number of ranks."""

from __future__ import annotations

import cProfile
import gc
import pstats

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard as fs
import ranks


def _python_calls_per_step(count: int) -> int:
    """Of the middle one of many ranks whose collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=count // 2, world_size=count)
    try:
        model = fs.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), merge_units=0, keep_full=0)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        gc.collect()
        gc.disable()  # a collection in the step would count what it finalizes
        profile = cProfile.Profile()
        profile.runcall(step)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    finally:
        gc.enable()
        dist.destroy_process_group()


def _calls() -> list[int]:
    return [_python_calls_per_step(count) for count in (2, 64, 1024)]


def test_the_python_of_a_step_is_the_same_for_any_number_of_ranks() -> None:
    [calls] = ranks.run(_calls, 1, timeout_s=60)
    assert len(set(calls)) == 1, calls
