"""What copies in the memory of peers cost: the time of a step with `fs.save(..., peers=1)` and without.

    python bench/peer_copies.py --ranks 4 --million 10 --every 1 10 100

Ranks on the CPU, joined by gloo, on two hosts of half of them each, with an agent's memory each. The ways of
saving take turns, so that all see the same machine; what watching the ranks costs is printed as well. On CPU
ranks everything that a save does beside training (checksums, messages) takes time of the same cores; a GPU
leaves the host's cores free for it.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import fullshard as fs
from fullshard.elastic.keeper import Keeper


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    torch.distributed.barrier()


def watch_s() -> float:
    """Processor time of the threads that watch this rank and the other host."""
    names = ("fullshard monitor", "fullshard store")
    idents = [t.ident for t in threading.enumerate() if t.name in names and t.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


def rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    width, device = arguments.width, torch.device(arguments.device)
    if device.type == "cuda":  # NCCL takes one rank per card
        torch.distributed.init_process_group("gloo")
    blocks = max(1, round(arguments.million * 1e6 / (2 * width * width)))
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks)
    ]
    model = fs.shard(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(arguments.batch, width, device=device)
    root = Path(arguments.folder)

    def steps(count: int, every: int) -> tuple[float, float, float]:
        """Seconds per step, of them in fs.save, and seconds of a core, the thread that saves included."""
        wait(device)
        begun, used, saving = time.perf_counter(), time.process_time(), 0.0
        for step in range(count):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if every and step % every == every - 1:
                at = time.perf_counter()
                fs.save(root / f"step-{step}", model, optimizer, peers=1)
                saving += time.perf_counter() - at
        if every:
            at = time.perf_counter()
            fs.latest(root)  # the last one, too, has to end
            saving += time.perf_counter() - at
        wait(device)
        return (time.perf_counter() - begun) / count, saving / count, (time.process_time() - used) / count

    ways = [0, *arguments.every]
    for every in ways:
        steps(2 if not every else 2 * every, every)  # memory and groups are there
    found: dict[int, list[tuple[float, float, float]]] = {every: [] for every in ways}
    begun, watching = time.perf_counter(), watch_s()
    for _ in range(arguments.rounds):
        for every in ways:
            found[every].append(steps(max(arguments.steps, every), every))
    if torch.distributed.get_rank() == 0:
        size = fs.plan(model, peers=1)
        print(
            f"{size.num_elements / 1e6:.1f} M parameters, {arguments.ranks} ranks on 2 hosts; per rank",
            end=" ",
        )
        print(f"{size.saved_bytes / 1e6:.0f} MB saved, {size.peer_copy_bytes / 1e6:.0f} MB of host memory\n")
        medians = {
            every: [statistics.median(column) * 1e3 for column in zip(*times, strict=True)]
            for every, times in found.items()
        }
        print("| copies | ms per step | of it in fs.save | ratio | CPU ms per step | ratio |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for every, (wall, saving, used) in medians.items():
            name = f"every {every} steps" if every else "none"
            print(f"| {name} | {wall:.1f} | {saving:.2f} | {wall / medians[0][0]:.3f} |", end="")
            print(f" {used:.1f} | {used / medians[0][2]:.3f} |")
        share = (watch_s() - watching) / (time.perf_counter() - begun)
        print(f"\nWatching the ranks of both hosts took {share:.2%} of a core of this rank.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--million", type=float, default=10.0, help="parameters")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cpu", help="cuda: all ranks share one card, over gloo")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="")
    arguments = parser.parse_args()
    if arguments.folder:
        rank(arguments)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, __file__, *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder, Keeper("a") as first, Keeper("b") as second:
        processes = []
        for number in range(arguments.ranks):
            is_first = number < arguments.ranks / 2
            variables = dict(os.environ, RANK=str(number), WORLD_SIZE=str(arguments.ranks))
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            variables |= (first if is_first else second).variables()
            variables |= {"FULLSHARD_HOST": "one" if is_first else "two"}
            if arguments.device == "cpu":
                variables["CUDA_VISIBLE_DEVICES"] = ""
            processes.append(subprocess.Popen([*words, "--folder", folder], env=variables))
        sys.exit(max(abs(process.wait()) for process in processes))


if __name__ == "__main__":
    main()
