"""Saving and loading: fullshard beside torch.distributed.checkpoint and torch.save, all in one run.

    make bench-checkpoint     (or: python bench/checkpoint.py --ranks 2 --million 200 --folder /data)

Real processes hold the same model and AdamW state, sharded by fullshard and by FSDP2, and take turns.
Everybody flushes to disk. fullshard computes checksums when it saves and checks them when it loads; the
others have none. "Blocked" is how long the training loop stands still; "memory" is how far a rank's resident
memory grew above what it was, at the most, in the first round, when nobody has kept a buffer yet. torch.save
writes one file a rank, of its own shards, which only as many ranks can load.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fullshard as fs
import report

WIDTH = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model(million: int, device: torch.device) -> nn.Module:
    blocks = max(2, round(million * 1e6 / (8 * WIDTH * WIDTH)))
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).to(device)


def trained(sharded: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    sharded(torch.randn(2, WIDTH, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class Contenders:
    """What each of them does, on this rank. A save returns what to call to have it on disk for certain."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.ours = fs.shard(model(args.million, device), units=Block)
        self.our_optimizer = trained(self.ours, device)
        self.theirs = model(args.million, device)
        for block in self.theirs:
            fully_shard(block)
        fully_shard(self.theirs)
        self.their_optimizer = trained(self.theirs, device)
        count = sum(p.numel() for p in self.theirs.parameters())
        self.size_bytes = 3 * 4 * count

    def saves(self) -> dict[str, Callable[[Path], Callable[[], Any]]]:
        return {
            "fullshard": lambda path: fs.save(path, self.ours, self.our_optimizer).wait,
            "DCP": self._dcp,
            "torch.save": self._torch_save,
            "fullshard, background": lambda path: (
                fs.save(path, self.ours, self.our_optimizer, background=True).wait
            ),
            "DCP, async_save": self._dcp_async,
        }

    def loads(self) -> dict[str, Callable[[Path], None]]:
        return {
            "fullshard": lambda path: fs.load(path, self.ours, self.our_optimizer) and None,
            "DCP": self._dcp_load,
            "torch.save": self._torch_load,
        }

    def _state(self) -> dict[str, Any]:
        weights, optimizer = get_state_dict(self.theirs, self.their_optimizer)
        return {"model": weights, "optim": optimizer}

    def _dcp(self, path: Path) -> Callable[[], Any]:
        dcp.save(self._state(), checkpoint_id=path)
        return _nothing

    def _dcp_async(self, path: Path) -> Callable[[], Any]:
        return dcp.async_save(self._state(), checkpoint_id=path).result

    def _dcp_load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.theirs,
            self.their_optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )

    def _local(self) -> dict[str, Any]:
        weights = {n: p.detach() for n, p in self.ours.named_parameters()}
        return {"model": weights, "optim": self.our_optimizer.state_dict()}

    def _torch_save(self, path: Path) -> Callable[[], Any]:
        path.mkdir(exist_ok=True)
        with open(path / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(self._local(), file)
            file.flush()
            os.fsync(file.fileno())
        return _nothing

    def _torch_load(self, path: Path) -> None:
        state = torch.load(path / f"{dist.get_rank()}.pt", weights_only=True)
        with torch.no_grad():
            for name, parameter in self.ours.named_parameters():
                parameter.copy_(state["model"][name])
        self.our_optimizer.load_state_dict(state["optim"])


def _nothing() -> None:
    pass


class Memory:
    """The most that this process's resident memory grew."""

    def __init__(self) -> None:
        gc.collect()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the highest so far
        self._before = self._read("VmRSS")

    def grown_bytes(self) -> int:
        return max(0, self._read("VmHWM") - self._before)

    def _read(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def slowest(value: float) -> float:
    everyone = [0.0] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return max(everyone)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


def one_round(contenders: Contenders, folder: Path, number: int, measured: dict[str, list[float]]) -> None:
    def note(name: str, value: float) -> None:
        measured.setdefault(name, []).append(slowest(value))

    saves = list(contenders.saves().items())
    first = number % len(saves)  # what the disk did just before decides much: everybody is first once
    for name, save in saves[first:] + saves[:first]:
        path = folder / "checkpoint"
        if number > 0:
            # The second of two in a row counts. A virtual machine gets memory from its host when it is used,
            # and gives it back when it is free: whoever came first after a while took many times as long.
            save(path)()
            remove(path)
        memory = Memory()
        begun = time.perf_counter()
        blocked_s, finish = timed(lambda save=save, path=path: save(path))
        finish()
        dist.barrier()
        note(f"{name}: save s", time.perf_counter() - begun)
        note(f"{name}: blocked s", blocked_s)
        note(f"{name}: memory", memory.grown_bytes())
        load = contenders.loads().get(name)
        if load is not None:
            memory = Memory()
            load_s, _ = timed(lambda load=load, path=path: load(path))
            note(f"{name}: load s", load_s)
            note(f"{name}: load memory", memory.grown_bytes())
        remove(path)


def worker(rank: int, args: argparse.Namespace, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(args.ranks)}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    warnings.simplefilter("ignore")
    contenders = Contenders(args, device)
    measured: dict[str, list[float]] = {}
    for number in range(args.rounds + 1):
        found: dict[str, list[float]] = {}
        one_round(contenders, Path(args.folder), number, found)
        for name, values in found.items():
            # The first round warms up; only the memory is measured in it.
            if ("memory" in name) == (number == 0):
                measured.setdefault(name, []).extend(values)
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in measured.items()}
        torch.save((contenders.size_bytes, medians), f"{store}-results")
    dist.barrier()
    dist.destroy_process_group()


def rows(size_bytes: int, found: dict[str, float]) -> list[list[report.Cell]]:
    names = list(dict.fromkeys(name.partition(":")[0] for name in found))
    table: list[list[report.Cell]] = []
    for name in names:
        load_s = found.get(f"{name}: load s")
        load_memory = found.get(f"{name}: load memory")
        table.append(
            [
                name,
                size_bytes / found[f"{name}: save s"] / 1e9,
                found[f"{name}: blocked s"],
                found[f"{name}: memory"] / 2**20,
                None if load_s is None else size_bytes / load_s / 1e9,
                None if load_memory is None else load_memory / 2**20,
            ]
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--million", type=int, default=100, help="parameters; AdamW state is twice as much")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints are written (a new folder in the temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.folder = folder
        store = str(Path(folder) / "store")
        mp.spawn(worker, (args, store), nprocs=args.ranks)  # type: ignore[no-untyped-call]
        size_bytes, found = torch.load(f"{store}-results", weights_only=True)
    print(
        f"{report.machine()}; {args.ranks} ranks, {size_bytes / 1e9:.2f} GB, median of {args.rounds} rounds\n"
    )
    headers = ["", "save GB/s", "blocked s", "memory MiB", "load GB/s", "load memory MiB"]
    print(report.markdown(headers, rows(size_bytes, found)))
    base = found["DCP: save s"] / found["fullshard: save s"]
    load = found["DCP: load s"] / found["fullshard: load s"]
    blocked = found["fullshard, background: blocked s"] / found["DCP, async_save: blocked s"]
    print(f"\nTo DCP: save {base:.2f} times as fast, load {load:.2f}, blocked {blocked:.2f} of async_save's")


if __name__ == "__main__":
    main()
