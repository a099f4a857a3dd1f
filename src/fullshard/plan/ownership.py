"""Which rank steps on which tensor, where an optimizer needs entire tensors: plain integers.

Every tensor gets one owner. Large ones are dealt first, each to the rank with the least load so far, in
which the work of matrix products and the memory count alike: both are even, and all ranks have one result.

Each owner's tensors are then cut into buckets of limited size. Bucket k has the k-th part of every owner's,
so that in each of them every rank has about as much to do.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

_VECTOR = 64  # multiplications per element of what is no matrix: passes over memory


@dataclass(frozen=True)
class Load:
    """What a tensor costs its owner: multiplications, and bytes."""

    cost: int
    size_bytes: int


def load_of(shape: Sequence[int], item_bytes: int) -> Load:
    """By the products that matrix optimizers compute: X X', its square, and that times X, per matrix.

    Of more than two dimensions, those of the last two, if all of these are large, are one matrix, and the
    others count them; kernels of a convolution are flattened.
    """
    elements = prod(shape)
    cost = _VECTOR * elements
    if len(shape) >= 2 and elements:
        rows, columns = (shape[-2], shape[-1]) if is_stack(shape) else (shape[0], elements // shape[0])
        small, large = sorted((rows, columns))
        cost += elements // (rows * columns) * (4 * small * small * large + 2 * small**3)
    return Load(cost, elements * item_bytes)


def is_stack(shape: Sequence[int]) -> bool:
    """Whether it is a stack of matrices, such as the weights of experts, and not a convolution's kernels."""
    return len(shape) == 3 and min(shape[1:]) > 16


def deal(loads: Sequence[Load], ranks: int, before: Sequence[int | None] = ()) -> list[int]:
    """The owner of each tensor. Those that had one `before` keep it."""
    owners = list(before) + [None] * (len(loads) - len(before))
    costs, sizes = [0] * ranks, [0] * ranks
    all_cost = sum(load.cost for load in loads) or 1
    all_bytes = sum(load.size_bytes for load in loads) or 1

    def share(cost: int, size_bytes: int) -> int:
        return max(cost * all_bytes, size_bytes * all_cost)

    for load, owner in zip(loads, owners, strict=True):
        if owner is not None:
            costs[owner] += load.cost
            sizes[owner] += load.size_bytes
    least = [(share(costs[rank], sizes[rank]), rank) for rank in range(ranks)]
    heapq.heapify(least)
    order = sorted(range(len(loads)), key=lambda i: (-share(loads[i].cost, loads[i].size_bytes), i))
    for index in order:
        if owners[index] is None:
            rank = least[0][1]
            owners[index] = rank
            costs[rank] += loads[index].cost
            sizes[rank] += loads[index].size_bytes
            heapq.heapreplace(least, (share(costs[rank], sizes[rank]), rank))
    return [owner for owner in owners if owner is not None]


def in_buckets(loads: Sequence[Load], owners: Sequence[int], most_bytes: int) -> list[list[int]]:
    """Tensors in the order of steps: of each owner at most this size per bucket, or one tensor.

    The fullest bucket, in which every rank that owns anything has a part, is the last one.
    """
    buckets: list[list[int]] = []
    at: dict[int, tuple[int, int]] = {}  # by owner: its last bucket, and how full that is
    order = sorted(range(len(loads)), key=lambda i: (-loads[i].size_bytes, i))
    for index in order:
        size = loads[index].size_bytes
        bucket, filled = at.get(owners[index], (0, 0))
        if filled and filled + size > most_bytes:
            bucket, filled = bucket + 1, 0
        at[owners[index]] = (bucket, filled + size)
        if bucket == len(buckets):
            buckets.append([])
        buckets[bucket].append(index)
    return [sorted(bucket) for bucket in reversed(buckets)]


def bytes_by_owner(loads: Sequence[Load], owners: Sequence[int]) -> list[int]:
    sizes: dict[int, int] = {}
    for load, owner in zip(loads, owners, strict=True):
        sizes[owner] = sizes.get(owner, 0) + load.size_bytes
    return list(sizes.values())


def imbalance(loads: Sequence[Load], owners: Sequence[int], ranks: int) -> tuple[float, float]:
    """The largest load of a rank, in multiplications and in bytes, relative to the mean."""
    costs, sizes = [0] * ranks, [0] * ranks
    for load, owner in zip(loads, owners, strict=True):
        costs[owner] += load.cost
        sizes[owner] += load.size_bytes
    return max(costs) * ranks / max(1, sum(costs)), max(sizes) * ranks / max(1, sum(sizes))


@dataclass(frozen=True)
class Owners:
    """How evenly tensors are dealt to ranks: what the busiest rank has, relative to the mean."""

    tensors: int
    ranks: int
    idle: int  # ranks that own nothing: a tensor is never cut
    work: float
    memory: float
    largest: tuple[str, float]  # a tensor, and its share of what a rank has on average

    def __str__(self) -> str:
        text = (
            f"{self.tensors} tensors on {self.ranks - self.idle} owners; the busiest rank has "
            f"{self.work:.2f} of the mean work and {self.memory:.2f} of the mean memory"
        )
        name, share = self.largest
        if share > 1.1:
            text += f", of which {name!r} alone is {share:.2f}"
        return text + (f"; {self.idle} ranks own nothing" if self.idle else "")


def owners_of(tensors: Sequence[tuple[str, Sequence[int], int]], ranks: int) -> Owners | None:
    """For tensors by name, shape and bytes per element; None for none of them."""
    loads = [load_of(shape, item_bytes) for _, shape, item_bytes in tensors]
    if not loads:
        return None
    owners = deal(loads, ranks)
    cost = max(1, sum(load.cost for load in loads))
    size_bytes = max(1, sum(load.size_bytes for load in loads))
    shares = [ranks * max(load.cost / cost, load.size_bytes / size_bytes) for load in loads]
    at = max(range(len(loads)), key=lambda index: shares[index])
    work, memory = imbalance(loads, owners, ranks)
    return Owners(len(loads), ranks, ranks - len(set(owners)), work, memory, (tensors[at][0], shares[at]))
