"""Host time: what an engine's Python costs a step, fullshard and FSDP2 side by side.

    make bench-host       (or: python bench/host_time.py --blocks 12 24 --ranks 1 2 --width 64 --profile)

A transformer so narrow that computing it takes almost nothing is trained by three in one process: plain (not
sharded), fullshard, and FSDP2. Their steps take turns, so that all see the same machine; medians count.
An engine's overhead is its step less the plain one, divided by the number of units (blocks and the root).

`host` is the CPU time of the training thread: what Python and the dispatcher take, and what stands between
a GPU and its next kernel. `wall` is the clock, waiting for the other rank included. On real ranks `host`
still has gloo's own work in it; "no wire" is rank 0 of two whose collectives send nothing and return at once
(torch's FakeProcessGroup), which leaves the engine alone.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import os
import pstats
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, LENGTH = 4, 8
ENGINES = ("plain", "fullshard", "FSDP2")
PARTS = ("forward and backward", "optimizer", "whole step")


class Block(nn.Module):
    """Twelve parameters, as in GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Net(nn.Module):
    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def sharded(engine: str, model: Net) -> nn.Module:
    if engine == "fullshard":
        import fullshard as fs

        # One unit per block, as FSDP2 has them, and two gathers each: the cost per unit is what is measured.
        return fs.shard(model, merge_units=0, keep_full=0)
    if engine == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


@dataclass(frozen=True)
class Times:
    """Medians of one engine, seconds: wall and host, by part of the step."""

    wall_s: dict[str, float]
    host_s: dict[str, float]


@dataclass(frozen=True)
class Job:
    num_blocks: int
    width: int
    steps: int
    warmup: int
    profile: bool


class Trainer:
    def __init__(self, engine: str, job: Job) -> None:
        torch.manual_seed(0)
        self.model = sharded(engine, Net(job.num_blocks, job.width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.x, self.y = torch.randn(1, LENGTH, job.width), torch.randn(1, LENGTH, job.width)
        self.wall: list[tuple[float, ...]] = []
        self.host: list[tuple[float, ...]] = []

    def step(self) -> float:
        dist.barrier()
        clocks: tuple[Callable[[], float], ...] = (time.perf_counter, time.thread_time)
        starts = [clock() for clock in clocks]
        loss = F.mse_loss(self.model(self.x), self.y)
        loss.backward()
        middles = [clock() for clock in clocks]
        self.optimizer.step()
        self.optimizer.zero_grad()
        stops = [clock() for clock in clocks]
        for kept, a, b, c in zip((self.wall, self.host), starts, middles, stops, strict=True):
            kept.append((b - a, c - b, c - a))
        return loss.item()

    def times(self) -> Times:
        wall, host = (
            [median(column) for column in zip(*rows, strict=True)] for rows in (self.wall, self.host)
        )
        return Times(dict(zip(PARTS, wall, strict=True)), dict(zip(PARTS, host, strict=True)))


def worker(rank: int, num_ranks: int, store: str, jobs: list[Job], reply: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    # FSDP2 warns about the view our root returns, and DTensor about itself: not what is measured.
    warnings.simplefilter("ignore")
    if store:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    else:
        start_without_wire(num_ranks)
    for job in jobs:
        trainers = {engine: Trainer(engine, job) for engine in ENGINES}
        for trainer in trainers.values():
            for _ in range(job.warmup):
                trainer.step()
            trainer.wall.clear()
            trainer.host.clear()
        for _ in range(job.steps):
            losses = [trainer.step() for trainer in trainers.values()]
        if store and max(losses) - min(losses) > 1e-3 * abs(losses[0]):  # all ranks have the same batch
            raise SystemExit(f"the engines disagree on the loss: {dict(zip(ENGINES, losses, strict=True))}")
        profile = hot_path(trainers["fullshard"], job.steps) if job.profile else ""
        if rank == 0:
            reply.put(({engine: trainer.times() for engine, trainer in trainers.items()}, profile))
        dist.barrier()
        del trainers
    dist.destroy_process_group()


def start_without_wire(num_ranks: int) -> None:
    """Rank 0 of a group that sends nothing. What ranks tell each other is made up: all say the same."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fullshard.comm import groups

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    groups._group = lambda ranks, backend=None: dist.new_group(ranks)  # type: ignore[assignment] # noqa: ARG005
    comm: Any = groups.Comm
    comm.tell_objects = lambda self, value: [value] * self.all_ranks
    comm.tell_many = lambda self, values: torch.tensor([list(values)] * self.all_ranks)
    dist.broadcast_object_list = lambda *_, **__: None


def hot_path(trainer: Trainer, steps: int) -> str:
    """fullshard's own functions, by the time spent in each, a step."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        trainer.step()
    profiler.disable()
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).sort_stats("tottime")
    for function, (_, calls, own, total, _) in sorted(stats.stats.items(), key=lambda e: -e[1][2]):  # type: ignore[attr-defined]
        file, line, name = function
        own_us, total_us, calls_a_step = own / steps * 1e6, total / steps * 1e6, calls / steps
        if own_us > 20:
            where = f"{Path(file).name}:{line}" if line else ""
            text.write(
                f"{own_us:9.0f} own {total_us:9.0f} with callees {calls_a_step:7.1f} calls  {name} {where}\n"
            )
    return text.getvalue()


def measure(num_ranks: int, wire: bool, jobs: list[Job]) -> list[tuple[dict[str, Times], str]]:
    with tempfile.TemporaryDirectory() as folder:
        reply = mp.get_context("spawn").SimpleQueue()
        if not wire:
            mp.spawn(worker, (num_ranks, "", jobs, reply), nprocs=1)  # type: ignore[no-untyped-call]
            return [reply.get() for _ in jobs]
        mp.spawn(worker, (num_ranks, str(Path(folder) / "store"), jobs, reply), nprocs=num_ranks)  # type: ignore[no-untyped-call]
        return [reply.get() for _ in jobs]


def row(num_ranks: str, num_blocks: int, clock: str, part: str, times: dict[str, Times]) -> str:
    seconds = {engine: getattr(t, f"{clock}_s")[part] for engine, t in times.items()}
    units = num_blocks + 1
    ours, theirs = ((seconds[engine] - seconds["plain"]) / units * 1e6 for engine in ENGINES[1:])
    ratio = f"{ours / theirs:.2f}" if theirs > 0 else "-"
    steps = " | ".join(f"{seconds[engine] * 1e3:.2f}" for engine in ENGINES)
    return (
        f"| {num_ranks} | {num_blocks} | {clock} | {part} | {steps} | {ours:.0f} | {theirs:.0f} | {ratio} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[12, 24])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="also print fullshard's hot path by function")
    args = parser.parse_args()
    jobs = [Job(blocks, args.width, args.steps, args.warmup, args.profile) for blocks in args.blocks]
    print(
        f"torch {torch.__version__}, {os.cpu_count()} CPUs, 12 parameters a block of width {args.width}, fp32"
    )
    print("Milliseconds per step (AdamW, foreach); overhead over plain in microseconds per unit and step.\n")
    heads = ["ranks", "blocks", "clock", "part", *(f"{engine} ms" for engine in ENGINES)]
    heads += [*(f"{engine} µs/unit" for engine in ENGINES[1:]), "ratio"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * 4}{'---:|' * 6}", flush=True)
    profiles = []
    for num_ranks, wire in [*((n, True) for n in args.ranks), (2, False)]:
        label = f"{num_ranks}" if wire else f"{num_ranks}, no wire"
        for job, (times, profile) in zip(jobs, measure(num_ranks, wire, jobs), strict=True):
            for clock in ("host", "wall") if wire else ("host",):
                for part in PARTS:
                    print(row(label, job.num_blocks, clock, part, times), flush=True)
            profiles.append(f"\nranks {label}, {job.num_blocks} blocks, µs/step:\n{profile}")
    if args.profile:
        print("\n".join(profiles))


if __name__ == "__main__":
    main()
