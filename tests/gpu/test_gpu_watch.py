"""A stalled stream is noticed by a thread that never waits for the device."""

from __future__ import annotations

import re
import subprocess
import sys
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


_SPINNING = """
import logging, time
import torch
from torch import nn
import fullshard as fs
from fullshard.planning.network import Link, Network
from fullshard.tools.simulation.group import Cluster, joined

class Noted(logging.Handler):
    def emit(self, record):
        print(f"after {time.monotonic() - spins_since:.1f} s: {record.getMessage()}", flush=True)

def spin(*_):
    global spins_since
    if spins:
        spins_since = time.monotonic()
        torch.cuda._sleep(8 * clock)

spins, spins_since = False, time.monotonic()
clock = getattr(torch.cuda.get_device_properties(0), "clock_rate", 2_000_000) * 1000
logging.getLogger("fullshard").addHandler(Noted())
with joined(Cluster(Network(8, Link(300e9)), torch.device("cuda"))):
    blocks = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6)))
    model = fs.shard(blocks, merge_units=0, device="cuda")
    model[3].register_forward_pre_hook(spin)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(64, 2048, device="cuda")
    for step in range(5):
        spins = step == 3
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"the host is done after {time.monotonic() - spins_since:.1f} s", flush=True)
    torch.cuda.synchronize()
"""


def test_a_stalled_stream_is_named_with_its_unit_while_the_host_goes_on() -> None:
    """As one rank of a simulated cluster: on one card NCCL has one rank, which sends nothing."""
    done = subprocess.run([sys.executable, "-c", _SPINNING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    host, named = (
        re.search(pattern, done.stdout)
        for pattern in (
            r"the host is done after ([\d.]+) s",
            r"after ([\d.]+) s: rank 0 on \S+: the device has not come to .*'?\b[34]\b",
        )
    )
    assert host, done.stdout + done.stderr
    assert named, done.stdout + done.stderr
    assert float(host[1]) < 2.0  # nothing has waited for the device
    assert float(named[1]) < 6.0, done.stdout
