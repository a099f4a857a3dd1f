"""The rates of this machine's device: measured in seconds, remembered, and read again.

Kernels run with values as training has them: normally distributed, never zeros, on which devices are faster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fullshard import link_speeds
from fullshard.environment import free_bytes
from fullshard.planning.decoder import Decoder
from fullshard.planning.machines import CARDS, Device, Machine, ProductRate, as_values, described, from_values
from fullshard.planning.network import Link
from fullshard.planning.sizes import gpt2
from fullshard.planning.subjects import Batch, decoder
from fullshard.planning.tracing import trace
from fullshard.planning.transfers import Rates

# Shapes of transformers, and cubes of every size.
_GPU_SHAPES = (
    *((s, s, s) for s in (256, 512, 1024, 2048, 4096, 8192)),
    *((4096, 14336, 4096), (4096, 4096, 14336), (4096, 8192, 2048), (4096, 2048, 8192)),
    *((8192, 768, 768), (8192, 3072, 768), (8192, 768, 3072), (4096, 1024, 4096), (8192, 32000, 1024)),
)
_HOST_SHAPES = tuple((s, s, s) for s in (32, 128, 256, 512))
_SMALL = replace(gpt2(4, 64, 2, 256, 32), fused=True)
# Of the rate of a product alone, what it has in a step that keeps the device busy: clocks fall. On an H200
# steps that were bound by computing took 1.07 to 1.11 times as long as the products alone predicted.
_SUSTAINED = 0.92
HOST_LINK = Link(2e9, 50e-6)  # between processes of one host, where nothing was measured


def machine_here(device: torch.device, measures: bool = True) -> Machine | None:
    """The machine that this rank is on: rates and links as remembered; what was never measured, is now.

    measures: False for what is remembered alone; None if there is nothing.
    """
    device_rates = _remembered()
    if device_rates is None:
        if not measures:
            return None
        device_rates = measured(device)
        with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
            link_speeds.remember_rates(as_values(device_rates))
    return _with_links(device_rates)


def remembered_gpu() -> Machine | None:
    """This machine, if it has a GPU whose rates were measured. Loads nothing of CUDA if there are none."""
    if not link_speeds.speeds_file().exists():
        return None
    found = _remembered()
    return None if found is None or not found.device.is_gpu else _with_links(found)


def _remembered() -> Machine | None:
    values = link_speeds.recall_rates()
    if values is None:
        return None
    try:
        return from_values(values)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # of another version: measured again


def _with_links(machine: Machine) -> Machine:
    speeds = link_speeds.recall_speeds()
    if speeds is None:
        return machine
    inside, across = (
        None if level is None else Link(level.bandwidth_bytes_s, level.latency_s)
        for level in (speeds.inside, speeds.across)
    )
    machine = replace(machine, inside=inside or machine.inside, across=across or machine.across)
    return replace(machine, source=f"{machine.source}; links measured {speeds.measured[:10]}")


def measured(device: torch.device) -> Machine:
    """Rates of the kernels and copies of this device. The script's random numbers stay as they are: a run has
    the same ones whether rates are measured in it or remembered."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([torch.cuda.current_device()] if on_gpu else []):
        return _measured(device, on_gpu)


def _measured(device: torch.device, on_gpu: bool) -> Machine:
    shapes = _GPU_SHAPES if on_gpu else _HOST_SHAPES
    part = _SUSTAINED if on_gpu else 1.0
    products = tuple(_product(device, shape, torch.bfloat16, part) for shape in shapes)
    wide = tuple(_product(device, shape, torch.float32, part) for shape in shapes if max(shape) <= 4096)
    forward, backward = (part * rate for rate in _attention(device))
    element_wise, step = _memory(device)
    kernel_s, launch_s = _small_kernel(device)
    name = link_speeds.device_name()
    known = _card(name) if on_gpu else None
    rates = Device(
        name=name,
        memory_bytes=_total_bytes(device),
        products=products,
        wide_products=wide,
        attention_flop_s=forward,
        attention_backward_flop_s=backward,
        memory_bytes_s=element_wise,
        optimizer_bytes_s=step,
        kernel_s=kernel_s,
        launch_s=launch_s,
        is_gpu=on_gpu,
    )
    inside = HOST_LINK if known is None else known.inside
    across = HOST_LINK if known is None else known.across
    return Machine(rates, inside, across, _host_rates(device), f"measured on this {name}")


def _card(name: str) -> Machine | None:
    plain = name.lower().replace(" ", "-")
    found = [key for key in CARDS if key in plain or key in plain.replace("-", "")]
    return described(max(found, key=len)) if found else None


def _total_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return free_bytes(device)


def _timed(device: torch.device, run: Callable[[], Any], enough_s: float) -> float:
    """Seconds of one call: the best of a few rounds that take long enough together."""
    on_gpu = device.type == "cuda"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    run()
    wait()
    begun = time.perf_counter()
    run()
    wait()
    count = max(1, int(enough_s / max(1e-6, time.perf_counter() - begun)))
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        best = min(best, (time.perf_counter() - begun) / count)
    return best


def _enough(device: torch.device) -> float:
    return 0.03 if device.type == "cuda" else 0.004


def _product(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, part: float
) -> ProductRate:
    m, n, k = shape
    left = torch.randn(m, k, device=device, dtype=dtype)
    right = torch.randn(n, k, device=device, dtype=dtype)
    seconds = _timed(device, lambda: left @ right.t(), _enough(device))
    return ProductRate(m, n, k, part * 2 * m * n * k / seconds)


def _attention(device: torch.device) -> tuple[float, float]:
    """Of 16 bits, causal; forward, and backward alone."""
    heads, length, size = (32, 4096, 128) if device.type == "cuda" else (4, 256, 64)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value = (
        torch.randn(1, heads, length, size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn(1, heads, length, size, device=device, dtype=dtype)

    def forward() -> Any:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), gradient)

    flop = 2.0 * heads * length * length * size  # half of it is hidden
    forward_s, both_s = _timed(device, forward, _enough(device)), _timed(device, both, _enough(device))
    return flop / forward_s, 2.5 * flop / max(both_s - forward_s, forward_s)


def _memory(device: torch.device) -> tuple[float, float]:
    """Bytes per second of element-wise kernels, and of a step of AdamW."""
    count = 2**26 if device.type == "cuda" else 2**20
    left, right = (torch.randn(count, device=device) for _ in range(2))
    out = torch.empty_like(left)
    seconds = _timed(device, lambda: torch.add(left, right, out=out), _enough(device))
    parameter = torch.nn.Parameter(left)
    parameter.grad = right
    optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
    step_s = _timed(device, optimizer.step, _enough(device))
    return 12 * count / seconds, 28 * count / step_s


def _small_kernel(device: torch.device) -> tuple[float, float]:
    """Seconds from one kernel to the next on the device, and of the host to launch one in training."""
    small = torch.zeros(16, device=device)
    both = _timed(device, lambda: small.add_(1.0), 0.002)
    if device.type != "cuda":
        return both, 0.0
    return min(both, 2e-6), _launch(device)


def _launch(device: torch.device) -> float:
    """Of a decoder so small that the device waits for the host: forward and backward, per traced kernel."""
    planned = decoder("a small decoder", _SMALL, Batch(1, _SMALL.context))
    traced = trace(planned.build(), [], planned.run, False)
    model = Decoder(_SMALL).to(device, torch.bfloat16)
    tokens = torch.randint(_SMALL.vocabulary, (1, _SMALL.context + 1), device=device)

    def run() -> None:
        model(tokens).backward()

    return _timed(device, run, 0.1) / sum(len(moment.work) for moment in traced.moments)


def _host_rates(device: torch.device) -> Rates:
    rates = Rates()
    if device.type != "cuda":
        return rates
    there, here = (
        torch.empty(2**26, dtype=torch.uint8).pin_memory(),
        torch.empty(2**26, dtype=torch.uint8, device=device),
    )
    seconds = _timed(device, lambda: here.copy_(there, non_blocking=True), 0.01)
    return rates.with_link(2**26 / seconds)
