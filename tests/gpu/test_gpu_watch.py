"""A stalled stream is noticed by a thread that never waits for the device."""

from __future__ import annotations

import time

import pytest
import torch

from fullshard.comm.completions import on_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_kernel_that_spins_is_named_by_the_operation_behind_it_and_goes_when_it_ends() -> None:
    watched = on_cuda()
    watched.note("gather", 1)
    torch.cuda.synchronize()
    assert watched.oldest() is None
    clock = getattr(torch.cuda.get_device_properties(0), "clock_rate", 2_000_000) * 1000
    torch.cuda._sleep(int(3 * clock))
    for number in range(2, 40):
        time.sleep(0.0015)
        watched.note("gather", number)
    begun = time.monotonic()
    first = watched.oldest()
    assert time.monotonic() - begun < 1.0  # the question does not wait
    assert first is not None
    assert first[:2] == ("gather", 2)
    time.sleep(0.5)
    second = watched.oldest()
    assert second is not None
    assert second[:2] == ("gather", 2)
    assert second.seconds >= 0.4
    torch.cuda.synchronize()
    assert watched.oldest() is None


def test_a_captured_graph_gets_no_events() -> None:
    watched, graph = on_cuda(), torch.cuda.CUDAGraph()
    values = torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        values.add_(1)
        watched.note("gather", 1)
    graph.replay()
    torch.cuda.synchronize()
    assert watched.oldest() is None
