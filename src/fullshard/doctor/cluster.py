"""What a rank reports about its host and device, and what follows from the reports of all ranks.

`local_facts` measures; the judges below are pure. A problem makes results wrong, a warning makes them slow.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fullshard import environment
from fullshard.version import VERSION

_LIBRARIES = ("numpy", "safetensors", "transformers", "accelerate", "lightning")
_DISK_BYTES = 64 * 2**20
_FEW_FILES = 4096  # a rank opens sockets to others, files of checkpoints and of its loaders
_LITTLE_DISK = 10 * 2**30
_SLOW = 0.5  # of the median
_SKEW_S = 1.0
_QUERY = (
    *("clocks.sm", "clocks.max.sm", "temperature.gpu", "power.draw"),
    "ecc.errors.uncorrected.volatile.total",
)


@dataclass(frozen=True)
class Remark:
    problem: bool
    text: str


def local_facts(folder: Path, device: torch.device) -> dict[str, Any]:
    """Of this rank. Takes a second or two."""
    return {
        "versions": versions(),
        "device": _device(device),
        "matrix_product_flops": _flops(device),
        "disk": _disk(folder),
        "host_free_bytes": environment.free_bytes(torch.device("cpu")),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cores": environment.cores(),
        "place": asdict(environment.launch()),
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "fullshard": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": _nccl(),
        "kernel": platform.release(),
    }
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _nccl() -> str | None:
    with contextlib.suppress(Exception):  # torch without NCCL
        nccl: Any = torch.cuda.nccl
        return ".".join(map(str, nccl.version())) if torch.cuda.is_available() else None
    return None


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": "CPU", "index": None}
    about = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    index = torch.cuda.current_device()
    facts = {"name": about.name, "index": index, "memory_bytes": total, "free_bytes": free}
    return facts | _queried(index)


def _queried(index: int) -> dict[str, Any]:
    """Clocks, temperature, power and memory errors, where nvidia-smi reports them."""
    asked = f"--query-gpu={','.join(_QUERY)}"
    command = ["nvidia-smi", asked, "--format=csv,noheader,nounits", "-i", str(index)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = zip(_QUERY, (part.strip() for part in answer.strip().split(",")), strict=False)
    return {name: float(value) for name, value in values if value.replace(".", "").isdigit()}


def _flops(device: torch.device) -> float:
    """Of one matrix product, the best of a few, so that a device that is slower than the others shows."""
    width, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a = torch.ones(width, width, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(8):
        begun = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * width**3 / best


def _disk(folder: Path) -> dict[str, Any]:
    """Free bytes and the speed of writing, of the folder where checkpoints would go."""
    usage = shutil.disk_usage(folder)
    facts: dict[str, Any] = {"free_bytes": usage.free, "write_bytes_s": None}
    if usage.free > 4 * _DISK_BYTES:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
            block = bytes(2**20)
            begun = time.perf_counter()
            for _ in range(_DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            facts["write_bytes_s"] = _DISK_BYTES / (time.perf_counter() - begun)
    return facts


# ---- judges


def judged(facts: Sequence[dict[str, Any]]) -> list[Remark]:
    """Facts by rank: those of `local_facts`, with 'wrong', 'skew_s' and 'pairs' from the exchanges."""
    remarks = [*_versions(facts), *_collectives(facts), *_devices(facts), *_hosts(facts), *_links(facts)]
    return sorted(remarks, key=lambda remark: not remark.problem)


def _versions(facts: Sequence[dict[str, Any]]) -> Iterator[Remark]:
    for name, first in facts[0]["versions"].items():
        others = [rank for rank, fact in enumerate(facts) if fact["versions"].get(name) != first]
        if others:
            there = facts[others[0]]["versions"].get(name)
            text = (
                f"{name} is {first} on rank 0 and {there} on rank {others[0]}: install one version everywhere"
            )
            yield Remark(name != "kernel", text)


def _collectives(facts: Sequence[dict[str, Any]]) -> Iterator[Remark]:
    for rank, fact in enumerate(facts):
        for what in fact["wrong"]:
            yield Remark(True, f"rank {rank}: the result of {what} is wrong: check its links and its device")


def _devices(facts: Sequence[dict[str, Any]]) -> Iterator[Remark]:
    typical = median(fact["matrix_product_flops"] for fact in facts)
    kinds = {fact["device"]["name"] for fact in facts}
    if len(kinds) > 1:
        yield Remark(False, f"devices differ: {', '.join(sorted(kinds))}; the slowest decides")
    for rank, fact in enumerate(facts):
        device, flops = fact["device"], fact["matrix_product_flops"]
        if len(facts) > 2 and flops < _SLOW * typical:
            yield Remark(False, f"rank {rank} computes at {flops / typical:.0%} of the median: a slow device")
        if device.get("ecc.errors.uncorrected.volatile.total", 0) > 0:
            yield Remark(True, f"rank {rank}: its GPU has uncorrected memory errors: replace or reset it")
        if device.get("temperature.gpu", 0) >= 88:
            yield Remark(
                False, f"rank {rank}: its GPU is at {device['temperature.gpu']:.0f} °C and slows down"
            )


def _hosts(facts: Sequence[dict[str, Any]]) -> Iterator[Remark]:
    for rank, fact in enumerate(facts):
        if fact["place"]["local_rank"]:
            continue  # one report per host
        if fact["open_files"] < _FEW_FILES:
            text = f"rank {rank}: only {fact['open_files']} open files are allowed: ulimit -n 65536"
            yield Remark(False, text)
        if fact["disk"]["free_bytes"] < _LITTLE_DISK:
            free = fact["disk"]["free_bytes"] / 2**30
            yield Remark(False, f"rank {rank}: {free:.1f} GiB are free where checkpoints would go")
        if abs(fact["skew_s"]) > _SKEW_S:
            text = (
                f"rank {rank}: its clock is {fact['skew_s']:+.2f} s from rank 0's: fs.latest compares times"
            )
            yield Remark(False, text)
    speeds = [fact["disk"]["write_bytes_s"] for fact in facts if fact["disk"]["write_bytes_s"]]
    for rank, fact in enumerate(facts):
        speed = fact["disk"]["write_bytes_s"]
        if len(speeds) > 2 and speed and speed < _SLOW / 2 * median(speeds):
            yield Remark(False, f"rank {rank} writes to disk at {speed / median(speeds):.0%} of the median")


def pair_table(facts: Sequence[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """Of both measurements of a pair, the slower one."""
    found: dict[tuple[int, int], float] = {}
    for fact in facts:
        for first, second, rate in fact["pairs"]:
            found[first, second] = min(rate, found.get((first, second), float("inf")))
    return found


def _node(fact: dict[str, Any]) -> int:
    return int(fact["place"]["rank"]) - int(fact["place"]["local_rank"])


def levels(facts: Sequence[dict[str, Any]]) -> dict[str, dict[tuple[int, int], float]]:
    """Rates of pairs inside nodes, and of those across."""
    split: dict[str, dict[tuple[int, int], float]] = {"inside a node": {}, "across nodes": {}}
    for (i, j), rate in pair_table(facts).items():
        inside = _node(facts[i]) == _node(facts[j])
        split["inside a node" if inside else "across nodes"][i, j] = rate
    return {name: rates for name, rates in split.items() if rates}


def _links(facts: Sequence[dict[str, Any]]) -> Iterator[Remark]:
    for name, rates in levels(facts).items():
        typical = median(rates.values())
        slow = {pair: rate for pair, rate in rates.items() if rate < _SLOW * typical}
        if len(rates) < 3:
            continue
        blamed: set[int] = set()
        for rank in range(len(facts)):
            own = [pair for pair in rates if rank in pair]
            if len(own) > 1 and sum(pair in slow for pair in own) > len(own) / 2:
                worst = median(rates[pair] for pair in own)
                text = (
                    f"rank {rank}: its links {name} run at {worst / typical:.0%} of the median: a slow rank"
                )
                blamed.add(rank)
                yield Remark(False, text)
        for (i, j), rate in slow.items():
            if not blamed & {i, j}:
                share = f"{rate / 1e9:.3g} GB/s, {rate / typical:.0%} of the median"
                yield Remark(False, f"the link of ranks {i} and {j} {name} is slow: {share}")


def recommended(facts: Sequence[dict[str, Any]], speeds: dict[str, Any] | None = None) -> list[str]:
    """Settings that follow from what was measured. `speeds`: per rank, while all ranks send, by level."""
    nodes = len({_node(fact) for fact in facts})
    rates = {name: median(level.values()) for name, level in levels(facts).items()}
    advice = [f"fs.shard(model): zero3, {'one node' if nodes == 1 else f'two levels over {nodes} nodes'}"]
    inside, across = rates.get("inside a node"), rates.get("across nodes")
    if inside and across and across < inside / 4:
        advice.append(
            f"links across nodes are {inside / across:.0f} times slower than inside: strategy='hybrid' if a "
            "node holds the model, else keep_node='all'; fs.Precision(across=torch.int8) sends a quarter"
        )
    measured = {level: speed["bandwidth_bytes_s"] for level, speed in _levels_of(speeds).items()}
    links = {"inside": measured.get("inside", inside), "across": measured.get("across", across)}
    slowest = min((rate for rate in links.values() if rate), default=0.0)
    if slowest:
        shape = f" --node-ranks {len(facts) // nodes}" if nodes > 1 and not len(facts) % nodes else ""
        rate = f" --inside {links['inside'] / 1e9:.3g}GB/s" if shape and links["inside"] else ""
        link = links["across"] if shape and links["across"] else slowest
        advice.append(
            f"fullshard plan MODEL --ranks {len(facts)}{shape} --link {link / 1e9:.3g}GB/s{rate} plans for it"
        )
    return advice


def _levels_of(speeds: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {level: speeds[level] for level in ("inside", "across") if speeds and speeds.get(level)}
