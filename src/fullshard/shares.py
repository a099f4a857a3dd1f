"""Which share of the global batch a backward is over, as the loop over `fs.Batches` has it.

A rank's loss is the mean over its own samples. Where ranks have shares of different sizes, or a global batch
is cut into micro-batches, these means have different weights in the mean over the global batch. The loop
knows them, the engine applies them: every loop over fs.Batches is registered here while it runs, and each
backward of a sharded model asks for the share that its gradients are of.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.errors import StateError


@dataclass(frozen=True, eq=False)
class Share:
    """What each rank's backward is over, at the same time: samples, or whatever the loop counts."""

    sizes: tuple[float, ...]  # by rank
    total: float  # of the global batch
    rank: int
    first: int = 0  # the micro-batch of the first rank, by number in the global batch; the next ones follow
    micro_batches: int = 0  # in the global batch; 0 if that is not cut into any
    weights: tuple[float, ...] = ()  # of all of these, in their order

    @property
    def ranks(self) -> int:
        return len(self.sizes)

    @property
    def scale(self) -> float:
        """The weight of the largest share beside that of a rank in a mean over ranks."""
        largest = max(self.sizes)
        return largest * self.ranks / self.total if largest else 1.0

    @property
    def factor(self) -> float:
        """This rank's share as a part of the largest: 0 for a rank that has none."""
        largest = max(self.sizes)
        return self.sizes[self.rank] / largest if largest else 0.0

    @property
    def weight(self) -> float:
        """This rank's gradients count so much in a mean over ranks."""
        return self.factor * self.scale

    @property
    def last(self) -> bool:
        """No micro-batch of the global batch comes after these."""
        return self.first + self.ranks >= self.micro_batches

    @property
    def equal(self) -> bool:
        """All ranks have the same, and there are no micro-batches: the mean over ranks needs no weights."""
        return not self.micro_batches and all(size * self.ranks == self.total for size in self.sizes)

    def counts_as(self, other: Share) -> bool:
        return not self.micro_batches and not other.micro_batches and self.sizes == other.sizes


def equal_parts(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The range of one of so many parts of `range(size)`: the first ones have one more if need be."""
    least, more = divmod(size, ranks)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


class Loop:
    """A loop over batches while it runs, and the share that a backward would be over now."""

    def __init__(self, what: str) -> None:
        self.what = what  # for messages
        self.over = False  # nothing that it gave is still to be computed
        self._share: Share | None = None
        self._unused: set[Share] = set()
        _loops.add(self)
        _lost.clear()

    def expect(self, shares: Sequence[Share]) -> None:
        """A step begins: a backward of the model is to be over each of these."""
        self._share, self._unused = None, {share for share in shares if not share.equal}
        if self._unused and not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_check_used))

    def at(self, share: Share | None) -> None:
        """The loop's body has the batch of this share now; or none."""
        self._share = share

    def current(self) -> Share:
        if self._share is None:
            raise StateError(
                f"a backward outside the loop over the micro-batches of {self.what}: its weight is not known",
                "Call backward once for each of them, inside `for batch in micro_batches:`.",
            )
        self._unused.discard(self._share)
        return self._share

    @property
    def unused(self) -> int:
        return len(self._unused)

    def close(self) -> None:
        self.over = True
        _loops.discard(self)

    def __del__(self) -> None:
        if not self.over and self._share is not None and not self._share.equal:
            _lost.append(self.what)


_loops: weakref.WeakSet[Loop] = weakref.WeakSet()
_lost: list[str] = []  # loops that are gone, of which a batch may still be computed
_hooks: list[Any] = []  # on the steps of optimizers


def forget_lost() -> None:
    """A model begins to train."""
    _lost.clear()


def current(ranks: int) -> Share | None:
    """What a backward of a model on so many ranks is over; None if all ranks count alike."""
    if not _loops:
        if _lost:
            raise StateError(
                f"a batch of {_lost[0]} is weighted by its rank's share of samples, but the loop is gone",
                "Loop over batches.steps(loader), or hold its iterator until the last backward.",
            )
        return None
    loops = list(_loops)
    shares = [loop.current() for loop in loops]
    share = shares[0]
    for other, loop in zip(shares[1:], loops[1:], strict=True):
        if not (share.counts_as(other) or (share.equal and other.equal)):
            raise StateError(
                f"loops over {loops[0].what} and {loop.what} run at the same time, and ranks have other "
                "shares of the one than of the other: gradients cannot have the weights of both",
                "Give batch sizes that are multiples of the number of ranks; or end one loop before the "
                "other: a loop over batches.steps(loader) ends where it is left.",
            )
    if share.equal:
        return None
    if share.ranks != ranks:
        raise StateError(
            f"{loops[0].what} is shared by {share.ranks} ranks, and the model is on {ranks}",
            "Give fs.Batches the rank and ranks of the model; beside tensor parallelism, of its data axis.",
        )
    return share


def _check_used(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before a step: losses of another model were not weighted, or not all of them."""
    for loop in list(_loops):
        if loop.unused and len(args) < 2 and kwargs.get("closure") is None and _has_gradients(optimizer):
            raise StateError(
                f"optimizer.step() in a loop over {loop.what}, where losses have weights, without a backward "
                f"of a sharded model for each batch of this rank ({loop.unused} missing)",
                "Call backward for each batch on a model of fs.shard (strategy='replicate' shards nothing); "
                "or give a batch_size that the ranks share equally, without micro_batch_size.",
            )


def _has_gradients(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
