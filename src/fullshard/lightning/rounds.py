"""Evaluation with other numbers of batches on each rank: all ranks leave a dataloader together.

A rank that is out of batches goes on to what follows, where Lightning may sum numbers over ranks, while
others still need its shards. So each dataloader is a round, which ends for all at once: who is done takes
part in the passes of those who are not. As many batches on each rank need no agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Any


class Rounds:
    """The dataloaders of one evaluation, one after the other."""

    def __init__(self, loop: Any, tell: Callable[[int], list[int]]) -> None:
        self._fetcher = loop._data_fetcher
        one_after_the_other = self._fetcher.combined_loader._mode == "sequential"
        lengths = loop.max_batches if one_after_the_other else [self._fetcher.length]
        if self._fetcher.length is not None and not all(map(_has_length, loop._combined_loader.flattened)):
            self._fetch_ahead()
        known = [-1 if self._fetcher.length is None else int(length) for length in lengths]
        told = [set(tell(length)) for length in known]
        self.together = any(len(each) > 1 or -1 in each for each in told)
        self._left = len(known)
        self._ends = list(accumulate(known))

    def _fetch_ahead(self) -> None:
        """Lightning took a limit for a length. A stream may end before it, which shows one batch ahead."""
        fetcher = self._fetcher
        fetcher.length = None
        if not hasattr(fetcher, "batches"):
            return
        plain: Any = type(fetcher).__mro__[1]  # which fetches one batch, and keeps none
        with suppress(StopIteration):
            fetcher.batches.append(plain.__next__(fetcher))

    @property
    def has_none(self) -> bool:
        """This rank has no batch at all, which shows before the first step."""
        return self.together and bool(self._fetcher.done)

    def ended(self) -> int:
        """How many dataloaders end on this rank with the batch at hand. Empty ones count."""
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


def skip_together(trainer: Any, module: Any, tell: Callable[[int], list[int]]) -> None:
    """Lightning skips an evaluation of a rank that has no batch, if it may have none, and others need it."""
    flag = "allow_zero_length_dataloader_with_multiple_devices"
    if not any(getattr(holder, flag, False) for holder in (module, trainer.datamodule)):
        return
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        kind: Any = type(loop)
        if not hasattr(kind, "_skips_together"):

            def skip(self: Any, own: Any = kind.skip) -> bool:
                return not any(tell(int(not own.fget(self))))

            loop.__class__ = type(kind.__name__, (kind,), {"skip": property(skip), "_skips_together": True})


def _has_length(loader: Any) -> bool:
    try:
        return len(loader) >= 0
    except (TypeError, NotImplementedError):
        return False
