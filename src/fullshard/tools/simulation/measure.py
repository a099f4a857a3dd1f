"""Steps of one rank, measured: time, exposed communication, host time, memory, bytes sent."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from fullshard.tools.simulation.group import Cluster
from fullshard.tools.simulation.wire import event


@dataclass(frozen=True)
class Figures:
    """Medians of one rank's steps. Memory is that of the device, or 0 on a CPU."""

    step_s: float
    without_wire_s: float  # if messages took no time: the same steps again; on a CPU, the step less its waits
    host_s: float  # until the step was issued; on a CPU the same as the step
    inside_s: float  # the link inside the node was in use; 0 on a flat network
    across_s: float  # the link to other nodes was in use; on a flat network the only one
    latency_s: float  # of all messages
    inside_bytes: float
    across_bytes: float
    messages: int
    peak_bytes: int = 0
    reserved_bytes: int = 0
    retries: int = 0

    @property
    def wire_s(self) -> float:
        """The busiest link was in use."""
        return max(self.inside_s, self.across_s)

    @property
    def sent_bytes(self) -> float:
        return self.inside_bytes + self.across_bytes

    @property
    def bound_s(self) -> float:
        """No schedule of these messages and this work takes less."""
        return max(self.without_wire_s, self.wire_s)

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.step_s - self.without_wire_s)


_COUNTED = ("inside_s", "across_s", "latency_s", "inside_bytes", "across_bytes", "messages")


def measure(step: Callable[[], object], cluster: Cluster, warmup: int = 3, steps: int = 8) -> Figures:
    on_device = cluster.device.type == "cuda"
    if on_device:
        gc.collect()
        torch.cuda.empty_cache()  # memory left over from building the model does not count
    for _ in range(warmup):
        step()
    if on_device:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        retries = _retries()
    sent = traffic_of(step, cluster)
    if not on_device:
        step_s, waited_s = _on_host(step, steps, cluster)
        return Figures(step_s, step_s - waited_s, step_s, **sent)
    step_s = median(timed(step, steps))
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    retries = _retries() - retries
    network = cluster.network
    cluster.network = network.at_once()
    try:
        step()
        without = median(timed(step, max(3, steps // 2)))
    finally:
        cluster.network = network
    host = median(issued(step, max(3, steps // 2)))
    return Figures(step_s, without, host, **sent, peak_bytes=peak, reserved_bytes=reserved, retries=retries)


def traffic_of(step: Callable[[], object], cluster: Cluster) -> dict[str, Any]:
    """What one more step asks of the links, as fields of `Figures`."""
    cluster.wire.traffic.clear()
    step()
    return {name: getattr(cluster.wire.traffic, name) for name in _COUNTED}


def _on_host(step: Callable[[], object], steps: int, cluster: Cluster) -> tuple[float, float]:
    """A step, and how long it waited for the wire: on a CPU that is known without a second run."""
    times = []
    for _ in range(steps):
        cluster.wire.traffic.clear()
        begun = time.perf_counter()
        step()
        times.append((time.perf_counter() - begun, cluster.wire.traffic.waited_s))
    return sorted(times)[len(times) // 2]


def timed(step: Callable[[], object], steps: int) -> list[float]:
    """Each step from its beginning to the next one's: nothing waits in between."""
    events = [event(timed=True) for _ in range(steps + 1)]
    events[0].record()
    for after in events[1:]:
        step()
        after.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def issued(step: Callable[[], object], steps: int) -> list[float]:
    """Host time alone: from an idle device until the step's last call returns."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return times


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))
