"""One GPU as one rank of a simulated cluster: fullshard, FSDP2 and the limit, side by side in one run.

    make bench-gpu        (or: python bench/gpu.py --rows 124m --engines limit fullshard FSDP2)
    python bench/gpu.py --rows nodes8 --rounds 2         (or: --rows n8-6 n8-6-zero2 flat-50)

Every engine trains the same model on the same tokens over the same described network; see
`fullshard.tools.simulation`. There are two kinds of rows.

Models: several models on a flat network. The limit is the plain bf16 model with no communication at all and
AdamW on 1/ranks of its parameters: nobody can be faster without computing less. Memory, messages and host
time are measured with one engine alone on the device; then all are built again and take turns, a few steps
each, in rounds: a step's time is the median of these. "without wire" is the same with messages that take no
time, and "exposed" the difference.

Grid: one model (8 layers of an 8B) on flat networks and on nodes of 4 and 8, from fast to slow, on 16 to
1,024 ranks. Turns only. "bound" is the larger of "without wire" and the busiest link, of each engine itself.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard as fs
import report
from fullshard.planning.network import ACROSS_HOP_S, INSIDE_HOP_S, Link, Network, bandwidth
from fullshard.tools.simulation import rivals
from fullshard.tools.simulation.group import Cluster, joined
from fullshard.tools.simulation.measure import Figures, measure, timed, traffic_of
from fullshard.tools.simulation.models import Subject, Training, blocks_of, subject
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
    node_ranks: int | None = None
    strategy: str = "zero3"
    grid: bool = False

    @property
    def title(self) -> str:
        layers = f"{self.layers} layers of " if self.layers else ""
        where = f", {self.link}"
        if self.node_ranks is not None:
            where = f" in nodes of {self.node_ranks}, {INSIDE} inside, {self.link} across"
        strategy = "" if self.strategy == "zero3" else f", {self.strategy}"
        return f"{layers}{self.model}, {self.ranks} ranks{where}, {self.tokens:,} tokens{strategy}"

    def network(self) -> Network:
        """A flat link that is as fast as NVLink has its latency, too."""
        rate = bandwidth(self.link)
        link = Link(rate, INSIDE_HOP_S if rate >= 200e9 else ACROSS_HOP_S)
        if self.node_ranks is None:
            return Network(self.ranks, link)
        return Network(self.ranks, link, self.node_ranks, Link(bandwidth(INSIDE), INSIDE_HOP_S))


INSIDE = "400GB/s"
MODELS = (
    Row("124m", "gpt-124m", None, 8, "300GB/s", 8192),
    Row("1b", "llama-1b", None, 64, "300GB/s", 4096),
    Row("8b", "llama-8b", 8, 64, "300GB/s", 4096),
    Row("8b-slow", "llama-8b", 8, 64, "50GB/s", 4096),
    Row("70b-slow", "llama-70b", 4, 256, "50GB/s", 4096),
)


def _grid(name: str, link: int, node_ranks: int | None = None, ranks: int = 64) -> list[Row]:
    row = Row(name, "llama-8b", 8, ranks, f"{link}GB/s", 4096, node_ranks, grid=True)
    return [row, replace(row, name=f"{name}-zero2", strategy="zero2")]


GROUPS: dict[str, list[Row]] = {
    "models": list(MODELS),
    "flat": [row for link in (300, 50, 6) for row in _grid(f"flat-{link}", link)],
    "nodes8": [row for link in (50, 12, 6, 1) for row in _grid(f"n8-{link}", link, 8)],
    "nodes4": [row for link in (50, 12, 6, 1) for row in _grid(f"n4-{link}", link, 4)],
    "ranks": [row for n in (16, 256, 1024) for row in _grid(f"n8-12-{n}ranks", 12, 8, n)],
}
ROWS = {row.name: row for rows in GROUPS.values() for row in rows}

Step = Callable[[], object]
Build = Callable[[nn.Module, Subject, Any, Cluster], Step]
BF16 = torch.bfloat16
INT8 = {"compute": BF16, "gather": torch.int8, "wire": torch.int8}
INT8_ACROSS = {"compute": BF16, "across": torch.int8}
BF16_ACROSS = {"compute": BF16, "across": BF16}


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


def fullshard(compiled: bool = False, precision: dict[str, Any] | str = "bf16", **options: Any) -> Build:
    def build(model: nn.Module, what: Subject, batch: Any, cluster: Cluster) -> Step:
        blocks = blocks_of(model)
        chosen = fs.Precision(**precision) if isinstance(precision, dict) else precision
        mesh = nodes_mesh(cluster) if options.get("strategy") == "hybrid" else None
        fs.shard(model, precision=chosen, mesh=mesh, **options)
        if compiled:
            for block in blocks:
                block.compile()
        return Training(model, blocks, what, batch)

    return build


def fsdp2(reduce: torch.dtype, best: bool = False, hybrid: bool = False, **options: Any) -> Build:
    """See `fullshard.tools.simulation.rivals`. hybrid: sharded inside a node, replicated across."""

    def build(model: nn.Module, what: Subject, batch: Any, cluster: Cluster) -> Step:
        ranks = cluster.network.ranks
        mesh = nodes_mesh(cluster) if hybrid else init_device_mesh(cluster.device.type, (ranks,))
        blocks = rivals.fsdp2(model, mesh, reduce=reduce, best=best, **options)
        return Training(model, blocks, what, batch)

    return build


def nodes_mesh(cluster: Cluster) -> DeviceMesh:
    """One row per node, as torchrun numbers ranks."""
    inner = cluster.network.node_ranks or cluster.network.ranks
    names = ("replicate", "shard")
    return init_device_mesh(
        cluster.device.type, (cluster.network.ranks // inner, inner), mesh_dim_names=names
    )


ENGINES: dict[str, Build] = {
    "limit": limit,
    "limit compiled": compiled_limit,
    "fullshard": fullshard(),
    "fullshard keep_full": fullshard(keep_full="all"),
    "fullshard int8 wire": fullshard(precision=INT8),
    "fullshard compiled": fullshard(compiled=True),
    "FSDP2": fsdp2(torch.float32),
    "FSDP2 bf16 reduce": fsdp2(BF16),
    "FSDP2 best": fsdp2(BF16, best=True),
    "FSDP2 kept full": fsdp2(BF16, strategy="zero2"),
    "FSDP2 compiled": fsdp2(BF16, compiled=True),
}


def grid_engines(row: Row) -> dict[str, Build]:
    """All with bf16 compute; HSDP holds as many times the optimizer's state as there are nodes."""
    engines = {
        "fullshard": fullshard(strategy=row.strategy),
        "FSDP2 best": fsdp2(BF16, best=True, strategy=row.strategy),
    }
    if row.node_ranks is None:
        return engines
    engines |= {
        "fullshard 8 bits across": fullshard(strategy=row.strategy, precision=INT8_ACROSS),
        "HSDP best": fsdp2(BF16, best=True, strategy=row.strategy, hybrid=True),
    }
    if row.strategy == "zero3":
        engines |= {
            "fullshard hybrid": fullshard(strategy="hybrid", precision=BF16_ACROSS),
            "fullshard hybrid 8 bits across": fullshard(strategy="hybrid", precision=INT8_ACROSS),
        }
    return engines


def build(row: Row, engine: Build, cluster: Cluster) -> Step:
    what = subject(row.model, row.layers, row.tokens)
    torch.manual_seed(0)
    with torch.device(cluster.device):
        model = what.build()
    return engine(model, what, what.batch(cluster.device), cluster)


def alone(row: Row, engine: str, cluster: Cluster) -> Figures:
    """Memory, messages and host time of one engine with nothing else on the device."""
    if cluster.device.type == "cuda":
        # fullshard sees to it itself; for FSDP2 it is one of the settings that its users are told of.
        grow = "True" if "best" in engine else "False"
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{grow}")
    return measure(
        build(row, ENGINES[engine], cluster), cluster, warmup=8 if "compiled" in engine else 3, steps=4
    )


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
    steps = {engine: build(row, ENGINES[engine], cluster) for engine in figures}
    for step in steps.values():
        for _ in range(3):
            step()
    return with_times(figures, steps, cluster, rounds, count, count)


def with_times(
    figures: dict[str, Figures],
    steps: dict[str, Step],
    cluster: Cluster,
    rounds: int,
    with_wire: int,
    without_wire: int,
) -> dict[str, Figures]:
    """With seconds per step, of so many steps per round with the wire and without it."""
    step_s = side_by_side(steps, cluster, rounds, with_wire)
    network, cluster.network = cluster.network, cluster.network.at_once()
    without_s = side_by_side(steps, cluster, max(1, rounds // 2), without_wire)
    cluster.network = network
    return {
        engine: replace(f, step_s=step_s[engine], without_wire_s=without_s[engine])
        for engine, f in figures.items()
    }


def grid_contest(row: Row, cluster: Cluster, rounds: int, count: int) -> dict[str, Figures]:
    """Seconds per row: engines are built once and take turns at once."""
    steps: dict[str, Step] = {}
    figures: dict[str, Figures] = {}
    for engine, make in grid_engines(row).items():
        try:
            step = build(row, make, cluster)
            for _ in range(2):
                step()
            sent = traffic_of(step, cluster)
            figures[engine] = Figures(0.0, 0.0, 0.0, **sent)
            steps[engine] = step
        except Exception as error:  # noqa: BLE001  the others still count
            print(f"{row.title}: {engine}: {type(error).__name__}: {error}", flush=True)
        gc.collect()
    slowest_s = max(figure.wire_s for figure in figures.values())
    fewer = max(1, min(count, round(1.0 / max(slowest_s, 0.1))))
    return with_times(figures, steps, cluster, rounds, fewer, count)


def grid_table(row: Row, found: dict[str, Figures]) -> str:
    def ratio(rival: str, f: Figures) -> str:
        return f"{found[rival].step_s / f.step_s:.2f}" if rival in found else "-"

    rows = [
        [
            engine,
            f"{f.step_s * 1e3:.1f}",
            ratio("FSDP2 best", f),
            ratio("HSDP best", f),
            f"{f.without_wire_s * 1e3:.1f}",
            f"{f.inside_s * 1e3:.1f}",
            f"{f.across_s * 1e3:.1f}",
            f"{f.latency_s * 1e3:.1f}",
            f"{f.bound_s * 1e3:.1f}",
            f"{f.step_s / f.bound_s:.2f}",
        ]
        for engine, f in found.items()
    ]
    heads = ["engine", "ms/step", "FSDP2 best / this", "HSDP best / this", "without wire", "link inside"]
    heads += ["link across" if row.node_ranks else "link", "latencies", "bound", "of bound"]
    return f"### {row.name}: {row.title}\n\n{markdown(heads, rows)}\n"


def summary(found: dict[str, dict[str, Figures]]) -> str:
    """The grid in one table: a line per row."""
    ours = ("fullshard", "fullshard 8 bits across")

    def ms(figures: dict[str, Figures], engine: str) -> str:
        return f"{figures[engine].step_s * 1e3:.1f}" if engine in figures else "-"

    def ratio(figures: dict[str, Figures], engine: str, rival: str) -> str:
        known = engine in figures and rival in figures
        return f"{figures[rival].step_s / figures[engine].step_s:.2f}" if known else "-"

    heads = ["row", "fullshard ms", "8 bits across ms", "FSDP2 ms", "HSDP ms", "FSDP2 / fullshard"]
    heads += ["FSDP2 / 8 bits", "HSDP / fullshard", "HSDP / 8 bits", "of bound", "8 bits of bound"]
    rows = []
    for name, figures in found.items():
        row = [name, *(ms(figures, engine) for engine in (*ours, "FSDP2 best", "HSDP best"))]
        row += [ratio(figures, engine, rival) for rival in ("FSDP2 best", "HSDP best") for engine in ours]
        of_bound = [figures[e].step_s / figures[e].bound_s if e in figures else None for e in ours]
        rows.append([*row, *("-" if value is None else f"{value:.2f}" for value in of_bound)])
    return markdown(heads, rows)


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


def chosen_rows(names: list[str]) -> list[Row]:
    rows = [row for name in names for row in GROUPS.get(name) or [ROWS[name]]]
    return list(dict.fromkeys(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", nargs="+", default=list(GROUPS), choices=[*GROUPS, *ROWS], help="groups of rows, or rows"
    )
    parser.add_argument(
        "--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), help="of the models"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, default=report.OUTPUT)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a queue for every group of ranks
    torch.set_float32_matmul_precision("high")
    args.output.mkdir(exist_ok=True, parents=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{machine()}\n", flush=True)
    text, everything, grid = [], {}, {}
    for row in chosen_rows(args.rows):
        with joined(Cluster(row.network(), device)) as cluster:
            if row.grid:
                grid[row.name] = found = grid_contest(row, cluster, args.rounds, args.steps)
            else:
                found = contest(row, args.engines, cluster, args.rounds, args.steps)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        text.append(grid_table(row, found) if row.grid else table(row, found))
        print(text[-1], flush=True)
        everything[row.title] = {engine: asdict(f) for engine, f in found.items()}
    if grid:
        text.append(f"### All rows of the grid\n\n{summary(grid)}\n")
        print(text[-1], flush=True)
    (args.output / "gpu.md").write_text(f"{machine()}\n\n" + "\n".join(text))
    (args.output / "gpu.json").write_text(json.dumps(everything, indent=1))
    plot = {
        row.title: {engine: f["step_s"] * 1e3 for engine, f in everything[row.title].items()}
        for row in MODELS
        if row.title in everything
    }
    if plot:
        bar_plot(args.output / "gpu.png", plot, title=machine(), unit="ms/step", baseline="FSDP2")


if __name__ == "__main__":
    main()
