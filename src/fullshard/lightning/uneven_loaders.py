"""Evaluation with different numbers of batches per rank: all ranks finish each dataloader together.

A rank that is out of batches would continue to code in which Lightning may reduce values over ranks, while
other ranks still need its shards. So at the end of each dataloader it joins the forwards of the ranks that
still have batches. Where all ranks have the same number, nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any

AllGather = Callable[[int], list[int]]  # this rank's number to those of all ranks


class EvaluationLoaders:
    """The dataloaders of one evaluation, one after the other."""

    def __init__(self, loop: Any, all_gather: AllGather) -> None:
        self._fetcher = loop._data_fetcher
        sequential = self._fetcher.combined_loader._mode == "sequential"
        lengths = loop.max_batches if sequential else [self._fetcher.length]
        if self._fetcher.length is not None and not all(map(_has_length, loop._combined_loader.flattened)):
            self._fetch_ahead()
        known = [-1 if self._fetcher.length is None else int(length) for length in lengths]
        of_all_ranks = [set(all_gather(length)) for length in known]
        self.uneven = any(len(numbers) > 1 or -1 in numbers for numbers in of_all_ranks)
        self._left = len(known)
        self._ends = list(accumulate(known))

    def _fetch_ahead(self) -> None:
        """Lightning took a limit for the length. A stream may end earlier, which shows one batch ahead."""
        fetcher = self._fetcher
        fetcher.length = None
        if not hasattr(fetcher, "batches"):
            return
        plain: Any = type(fetcher).__mro__[1]  # which fetches one batch, and keeps none
        with suppress(StopIteration):
            fetcher.batches.append(plain.__next__(fetcher))

    @property
    def has_no_batch(self) -> bool:
        """Whether this rank has no batch at all, which is known before the first step."""
        return self.uneven and bool(self._fetcher.done)

    def count_ended(self) -> int:
        """How many dataloaders end on this rank with the current batch, empty ones included."""
        fetcher = self._fetcher
        if fetcher.done:
            count = self._left
        elif fetcher.length is not None:
            count = self._ends.count(fetcher.fetched)
        else:  # then Lightning has the next batch: (batch, its number in its dataloader, dataloader)
            ahead: Any = getattr(fetcher, "batches", ())  # not where a step takes the iterator itself
            count = int(bool(ahead) and ahead[0][1] == 0)
        self._left -= count
        return count


def skip_together(trainer: Any, module: Any, all_gather: AllGather) -> None:
    """Skip an evaluation only where no rank has a batch.

    Lightning skips it on a rank without batches, where these are allowed, and other ranks need its shards.
    """
    flag = "allow_zero_length_dataloader_with_multiple_devices"
    if not any(getattr(holder, flag, False) for holder in (module, trainer.datamodule)):
        return
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        kind: Any = type(loop)
        if not hasattr(kind, "_skips_together"):

            def skip(self: Any, own: Any = kind.skip) -> bool:
                return not any(all_gather(int(not own.fget(self))))

            loop.__class__ = type(kind.__name__, (kind,), {"skip": property(skip), "_skips_together": True})


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False
