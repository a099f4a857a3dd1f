"""How fast the links of a cluster are: bandwidth and latency inside a node and across nodes, in seconds.

All ranks measure one level at the same time, so a link that several ranks share counts as each rank's part of
it. A gather over n ranks sends (n - 1)/n of its bytes in n - 1 hops; the slowest rank counts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.groups import start
from fullshard.comm.host_group import new_group
from fullshard.comm.recorder_files import digest
from fullshard.comm.topology import Place, own_place
from fullshard.environment import host_name
from fullshard.link_speeds import ClusterSpeeds, LinkSpeed, device_name

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SMALL_BYTES, _SMALL_COUNT = 64, 20  # per rank
_FIRST_BYTES = 2**18  # of the gathered buffer
_LARGEST_BYTES = {"cuda": 2**28, "cpu": 2**26}  # sockets are at full speed far below


def levels(places: Sequence[Place], hosts: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """The groups inside nodes, and those across, of ranks with equal index in their node. Pure.

    `places` and `hosts`, names of hosts as numbers, are by rank. Launchers mostly number the ranks of a node
    one after the other; where they do not (`srun --distribution=cyclic`), a node is what has one name.
    """
    firsts = [rank - place.local_rank for rank, place in enumerate(places)]
    nodes = _grouped(firsts)
    if any(nodes[firsts[rank]] != _node(rank, place) for rank, place in enumerate(places)):
        nodes = _grouped(hosts)
    inside = list(nodes.values())
    largest = max(map(len, inside))
    across = [[node[index] for node in inside if index < len(node)] for index in range(largest)]
    return inside, across


def _grouped(keys: Sequence[int]) -> dict[int, list[int]]:
    """Ranks with equal keys."""
    groups: dict[int, list[int]] = {}
    for rank, key in enumerate(keys):
        groups.setdefault(key, []).append(rank)
    return groups


def _node(rank: int, place: Place) -> list[int]:
    """The ranks of its node, if they are numbered one after the other."""
    first = rank - place.local_rank
    return list(range(first, first + place.local_ranks))


def probe(enough_s: float = 0.3) -> ClusterSpeeds:
    """Measure. Every rank calls this and gets the same answer. A group that it starts ends with it.

    enough_s: a gather that takes as long is not repeated with more bytes.
    """
    started = start()
    try:
        return _probe(enough_s)
    finally:
        if started:
            dist.destroy_process_group()


def _probe(enough_s: float) -> ClusterSpeeds:
    ranks, device, place = dist.get_world_size(), job_device(), own_place()
    host = digest(host_name().encode()) >> 1  # a tensor's integers have a sign
    mine = torch.tensor([host, place.local_rank, place.local_ranks], device=device)
    rows = torch.empty(ranks, 3, dtype=mine.dtype, device=device)
    _all_gather(rows.view(-1), mine)
    found = rows.tolist()
    inside, across = levels([Place(*at) for _, *at in found], [name for name, *_ in found])
    return ClusterSpeeds(
        backend="nccl" if device.type == "cuda" else "gloo",
        device=device_name(),
        ranks=ranks,
        inside=_measured(inside, device, enough_s),
        across=_measured(across, device, enough_s),
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def job_device() -> torch.device:
    """Where collectives of this job run."""
    backend = str(dist.get_backend_config(dist.group.WORLD))
    return torch.device("cuda" if torch.cuda.is_available() and "nccl" in backend else "cpu")


def _measured(groups: list[list[int]], device: torch.device, enough_s: float) -> LinkSpeed | None:
    """Over all groups of a level at once; None if each is one rank."""
    largest = max(map(len, groups))
    if largest == 1:
        return None
    members = next(group for group in groups if dist.get_rank() in group)
    # One rank alone has nothing to gather, and agrees with the others on how long they took.
    group = new_group(members) if len(members) > 1 else None
    hops = max(1, len(members) - 1)
    small = _SMALL_BYTES * len(members)
    small_s = min(_gather_s(group, len(members), small, device) for _ in range(_SMALL_COUNT))
    latency_s = _over_ranks(small_s / hops, dist.ReduceOp.MAX, device)
    size, bandwidth = _FIRST_BYTES, 0.0
    while True:
        _gather_s(group, len(members), size, device)  # connections and buffers grow
        took_s = min(_gather_s(group, len(members), size, device) for _ in range(3))
        slowest_s = _over_ranks(took_s, dist.ReduceOp.MAX, device)
        sent = size * (len(members) - 1) / len(members)
        own = sent / max(took_s - small_s, took_s / 2, 1e-9) if group is not None else float("inf")
        bandwidth = _over_ranks(own, dist.ReduceOp.MIN, device)
        if slowest_s >= enough_s or size >= _LARGEST_BYTES[device.type]:
            break
        size *= 4
    if group is not None:
        dist.destroy_process_group(group)
    return LinkSpeed(largest, bandwidth, latency_s)


def _gather_s(group: Any, ranks: int, size: int, device: torch.device) -> float:
    """Seconds of one gather of `size` bytes, begun by all ranks at once."""
    own = torch.zeros(size // ranks, dtype=torch.uint8, device=device)
    full = torch.empty(ranks * (size // ranks), dtype=torch.uint8, device=device)
    _over_ranks(0.0, dist.ReduceOp.MAX, device)
    begun = time.perf_counter()
    if group is not None:
        _all_gather(full, own, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _over_ranks(value: float, op: Any, device: torch.device) -> float:
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op)
    return float(found)
