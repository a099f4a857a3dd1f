"""One GPU as one rank of a simulated cluster: fullshard, FSDP2 and the limit, side by side in one run.

    make bench-gpu        (or: python bench/gpu.py --rows 124m --engines limit fullshard FSDP2)

Every engine trains the same model on the same tokens over the same described network; see
`fullshard.tools.simulation`. The limit is the plain bf16 model with no communication at all and AdamW on
1/ranks of its parameters: nobody can be faster without computing less.

Memory, messages and host time are measured with one engine alone on the device; then all are built again and
take turns, a few steps each, in rounds: a step's time is the median of these. "without wire" is the same
with messages that take no time, and "exposed" the difference.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard as fs
import report
from fullshard.tools.simulation import rivals
from fullshard.tools.simulation.group import Cluster, joined
from fullshard.tools.simulation.measure import Figures, measure, timed
from fullshard.tools.simulation.models import Subject, Training, blocks_of, subject
from fullshard.tools.simulation.network import Link, Network, bandwidth
from report import bar_plot, machine, markdown


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    model: str
    layers: int | None
    ranks: int
    link: str
    tokens: int

    @property
    def title(self) -> str:
        layers = f"{self.layers} layers of " if self.layers else ""
        return f"{layers}{self.model}, {self.ranks} ranks, {self.link}, {self.tokens:,} tokens"


ROWS = {
    row.name: row
    for row in (
        Row("124m", "gpt-124m", None, 8, "300GB/s", 8192),
        Row("1b", "llama-1b", None, 64, "300GB/s", 4096),
        Row("8b", "llama-8b", 8, 64, "300GB/s", 4096),
        Row("8b-slow", "llama-8b", 8, 64, "50GB/s", 4096),
        Row("70b-slow", "llama-70b", 4, 256, "50GB/s", 4096),
    )
}

Step = Callable[[], object]
Build = Callable[[nn.Module, Subject, Any, Cluster], Step]
INT8 = fs.Precision(compute=torch.bfloat16, gather=torch.int8, wire=torch.int8)


def limit(model: nn.Module, what: Subject, batch: Any, cluster: Cluster) -> Step:
    """No communication: the whole bf16 model computes, and AdamW steps on one rank's share in fp32."""
    model.bfloat16()
    count = sum(p.numel() for p in model.parameters())
    share = nn.Parameter(torch.randn(count // cluster.network.ranks, device=cluster.device))
    optimizer = torch.optim.AdamW([share], lr=1e-5, fused=True)
    gradient = torch.randn_like(share)

    def step() -> None:
        what.loss(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad = None
        share.grad = gradient
        optimizer.step()

    return step


def compiled_limit(model: nn.Module, what: Subject, batch: Any, cluster: Cluster) -> Step:
    for block in blocks_of(model):
        block.compile()
    return limit(model, what, batch, cluster)


def fullshard(compiled: bool = False, **said: Any) -> Build:
    def build(model: nn.Module, what: Subject, batch: Any, _: Cluster) -> Step:
        blocks = blocks_of(model)
        fs.shard(model, **{"precision": "bf16", **said})
        if compiled:
            for block in blocks:
                block.compile()
        return Training(model, blocks, what, batch)

    return build


def fsdp2(reduce: torch.dtype, best: bool = False, **said: Any) -> Build:
    """See `fullshard.tools.simulation.rivals`."""

    def build(model: nn.Module, what: Subject, batch: Any, cluster: Cluster) -> Step:
        mesh = init_device_mesh(cluster.device.type, (cluster.network.ranks,))
        blocks = rivals.fsdp2(model, mesh, reduce=reduce, best=best, **said)
        return Training(model, blocks, what, batch)

    return build


ENGINES: dict[str, Build] = {
    "limit": limit,
    "limit compiled": compiled_limit,
    "fullshard": fullshard(),
    "fullshard keep_full": fullshard(keep_full="all"),
    "fullshard int8 wire": fullshard(precision=INT8),
    "fullshard compiled": fullshard(compiled=True),
    "FSDP2": fsdp2(torch.float32),
    "FSDP2 bf16 reduce": fsdp2(torch.bfloat16),
    "FSDP2 best": fsdp2(torch.bfloat16, best=True),
    "FSDP2 kept full": fsdp2(torch.bfloat16, strategy="zero2"),
    "FSDP2 compiled": fsdp2(torch.bfloat16, compiled=True),
}


def build(row: Row, engine: str, cluster: Cluster) -> Step:
    what = subject(row.model, row.layers, row.tokens)
    torch.manual_seed(0)
    with torch.device(cluster.device):
        model = what.build()
    return ENGINES[engine](model, what, what.batch(cluster.device), cluster)


def alone(row: Row, engine: str, cluster: Cluster) -> Figures:
    """Memory, messages and host time of one engine with nothing else on the device."""
    if cluster.device.type == "cuda":
        # fullshard sees to it itself; for FSDP2 it is one of the settings that its users are told of.
        grow = "True" if "best" in engine else "False"
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{grow}")
    return measure(build(row, engine, cluster), cluster, warmup=8 if "compiled" in engine else 3, steps=4)


def side_by_side(steps: dict[str, Step], cluster: Cluster, rounds: int, count: int) -> dict[str, float]:
    """Seconds a step: engines take turns on a device that is equally warm for all (its clocks fall)."""
    found: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(rounds):
        for engine, step in steps.items():
            step()  # the last one's end is not this one's beginning
            found[engine] += timed(step, count) if cluster.device.type == "cuda" else [by_clock(step)]
    return {engine: median(times) for engine, times in found.items()}


def by_clock(step: Step) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def contest(row: Row, engines: list[str], cluster: Cluster, rounds: int, count: int) -> dict[str, Figures]:
    figures: dict[str, Figures] = {}
    for engine in engines:
        try:
            figures[engine] = alone(row, engine, cluster)
        except Exception as error:  # noqa: BLE001  the others still count
            print(f"{row.title}: {engine}: {type(error).__name__}: {error}", flush=True)
        gc.collect()
        if cluster.device.type == "cuda":
            torch.cuda.empty_cache()
    steps = {engine: build(row, engine, cluster) for engine in figures}
    for step in steps.values():
        for _ in range(3):
            step()
    with_wire = side_by_side(steps, cluster, rounds, count)
    network, cluster.network = cluster.network, cluster.network.at_once()
    without = side_by_side(steps, cluster, max(1, rounds // 2), count)
    cluster.network = network
    return {
        engine: replace(f, step_s=with_wire[engine], without_wire_s=without[engine])
        for engine, f in figures.items()
    }


def table(row: Row, found: dict[str, Figures]) -> str:
    rival = found.get("FSDP2")
    rows = []
    for engine, f in found.items():
        ratio = f"{rival.step_s / f.step_s:.2f}" if rival else "-"
        memory = f"{f.reserved_bytes / rival.reserved_bytes:.2f}" if rival and rival.reserved_bytes else "-"
        rows.append(
            [
                engine,
                f"{f.step_s * 1e3:.1f}",
                ratio,
                f"{f.without_wire_s * 1e3:.1f}",
                f"{f.exposed_s * 1e3:.1f}",
                f"{f.wire_s * 1e3:.1f}",
                f"{f.host_s * 1e3:.1f}",
                f"{f.peak_bytes / 2**30:.2f}",
                f"{f.reserved_bytes / 2**30:.2f}",
                memory,
                str(f.retries),
            ]
        )
    heads = ["engine", "ms/step", "times as fast as FSDP2", "without wire", "exposed", "wire", "host"]
    heads += ["peak GiB", "reserved GiB", "of FSDP2's", "retries"]
    return f"### {row.title}\n\n{markdown(heads, rows)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, default=report.OUTPUT)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for every group of ranks
    torch.set_float32_matmul_precision("high")
    args.output.mkdir(exist_ok=True, parents=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{machine()}\n", flush=True)
    text, everything = [], {}
    for row in (ROWS[name] for name in args.rows):
        network = Network(row.ranks, Link(bandwidth(row.link)))
        with joined(Cluster(network, device)) as cluster:
            found = contest(row, args.engines, cluster, args.rounds, args.steps)
        gc.collect()
        text.append(table(row, found))
        print(text[-1], flush=True)
        everything[row.title] = {engine: asdict(f) for engine, f in found.items()}
    (args.output / "gpu.md").write_text(f"{machine()}\n\n" + "\n".join(text))
    (args.output / "gpu.json").write_text(json.dumps(everything, indent=1))
    plot = {
        title: {engine: figures["step_s"] * 1e3 for engine, figures in row.items()}
        for title, row in everything.items()
    }
    bar_plot(args.output / "gpu.png", plot, title=machine(), unit="ms/step", baseline="FSDP2")


if __name__ == "__main__":
    main()
