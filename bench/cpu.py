"""A step on CPU ranks: fullshard beside DDP, FSDP1, FSDP2 and DeepSpeed, all in one run.

    make bench-cpu        (or: python bench/cpu.py --ranks 2 --steps 20 --models tiny --engines DDP fullshard)

Real processes on this machine, joined by gloo on loopback, train GPTs of several sizes; see
bench/contenders.py for how they take turns. Ratios are to DDP and to the faster of FSDP2's settings in the
same run and precision: machines are noisy, and only a ratio of one run means anything. "CPU ms" is one rank's
processor time in a step, all its threads together: what a busy machine disturbs least. "MB sent" is what the
kernel counted on one rank's connections in a step.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import contenders
import report
from contenders import MODELS, Result

ENGINES = ("DDP", "FSDP1", "FSDP2", "DeepSpeed", "fullshard")
STEPS = {"tiny": 60, "small": 30, "medium": 7}
WARMUP = 2


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    threads = max(1, (os.cpu_count() or 1) // args.ranks)
    contenders.join(f"file://{store}", rank=rank, ranks=args.ranks, threads=threads)
    chosen = contenders.chosen(args.engines, args.precisions)
    for name in args.models:
        results = contenders.race(chosen, MODELS[name], args.steps or STEPS[name], WARMUP)
        if rank == 0:
            torch.save(results, f"{store}-{name}")
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> dict[str, list[Result]]:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(worker, (args, store), nprocs=args.ranks)  # type: ignore[no-untyped-call]
        return {name: torch.load(f"{store}-{name}", weights_only=False) for name in args.models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="counted steps of each engine; by default fewer the larger")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    default = ["fp32", "bf16 gradients"]
    parser.add_argument("--precisions", nargs="+", choices=contenders.TOLERANCE, default=default)
    args = parser.parse_args()
    print(f"{report.machine()}; {args.ranks} ranks, gloo, AdamW (foreach)\n", flush=True)
    if "DeepSpeed" in args.engines and not importlib.util.find_spec("deepspeed"):
        print("DeepSpeed is not installed here, and left out.\n", flush=True)
    groups = {}
    for name, results in measure(args).items():
        print(f"{name}: {contenders.describe(name)}\n")
        print(contenders.table(results), end="\n\n")
        groups[name] = {r.contender.name: r.step_s * 1e3 for r in results}
    plot = report.bar_plot(
        report.OUTPUT / "cpu.png", groups,
        title=f"Training step, {args.ranks} CPU ranks, gloo", unit="ms/step", baseline="DDP",
    )  # fmt: skip
    print(f"Plot: {plot.relative_to(report.OUTPUT.parent)}")


if __name__ == "__main__":
    main()
