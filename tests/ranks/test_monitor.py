"""The thread that watches a process: it reads frames only where one stands still, and keeps nothing alive."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch
from torch import nn

import fullshard as fs
import ranks
from fullshard.comm import monitor


class Activation:
    """Stands for what a training computes with."""


def _stand_still(seconds: float) -> weakref.ref[Activation]:
    activation = Activation()
    time.sleep(seconds)
    return weakref.ref(activation)


def _watched() -> tuple[int, int, bool]:
    """How often a stack was read right after a step, and while the process stood still; and whether what was
    in use then is gone, without a garbage collection."""
    reads: list[float] = []
    steps: list[float] = []
    read = monitor._stack

    def counted(first: int) -> str:
        reads.append(time.monotonic())
        return read(first)

    setattr(monitor, "_stack", counted)  # noqa: B010  this process is the test's own
    gc.disable()
    model: Any = fs.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    for _ in range(40):  # as many on all ranks, for more than three seconds
        model(torch.ones(2, 8)).sum().backward()
        steps.append(time.monotonic())
        model.zero_grad()
        time.sleep(0.1)
    # On a busy machine a rank may wait for seconds for another one, and then it does stand still.
    in_training = sum(0 <= read - step < 1 for read in reads for step in steps)
    before = len(reads)
    activation = _stand_still(4.0)
    gone_by = time.monotonic() + 60
    while activation() is not None and time.monotonic() < gone_by:
        time.sleep(0.1)  # a look at the frame may not be over yet
    return in_training, len(reads) - before, activation() is None


def test_frames_are_read_only_where_a_process_stands_still_and_nothing_in_them_is_kept() -> None:
    for in_training, while_still, is_gone in ranks.run(_watched, 2, fresh=True):
        assert in_training == 0
        assert while_still > 0
        assert is_gone
