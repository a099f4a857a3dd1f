"""Which samples a step trains on: a function of the seed and the step, independent of the number of ranks."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from fullshard.comm.groups import own_rank, rank_count
from fullshard.elastic import reports
from fullshard.errors import CheckpointError, OptionError, StateError
from fullshard.keywords import checked_keywords

T = TypeVar("T")
Places = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 12  # with 8, the orders of five samples were not equally likely
_ORDER = 1  # increased when the same seed gives another order, across which resuming would be wrong


_OTHER_NAMES = {
    **dict.fromkeys(
        ("global_batch_size", "batch", "size", "train_batch_size"),
        "Write batch_size=..., of all ranks together.",
    ),
    **dict.fromkeys(
        ("micro_batch_size", "per_device_batch_size", "per_device_train_batch_size", "batch_size_per_rank"),
        "batch_size is that of all ranks together.",
    ),
    **dict.fromkeys(("dataset", "data", "length", "num_examples", "n"), "Write num_samples=len(dataset)."),
    **dict.fromkeys(("num_replicas", "world_size", "num_ranks"), "Write ranks=N, or leave it out."),
    **dict.fromkeys(("num_epochs", "max_epochs"), "Write epochs=N."),
    **dict.fromkeys(("generator", "random_state", "random_seed"), "Write seed=N."),
    **dict.fromkeys(("steps", "num_steps", "max_steps"), "Write epochs=N; None, the default, is endless."),
}


@checked_keywords(_OTHER_NAMES)
class Batches:
    """A batch sampler whose batches depend on the seed and the step alone; each rank gets its share of them.

        batches = fs.Batches(len(dataset), batch_size=64)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=4)
        if path := fs.latest(root):
            batches.resume(fs.load(path, model, optimizer)["batches"])
        for step, batch in batches.steps(loader):
            ...
            fs.save(f"{root}/step-{step}", model, optimizer, extra={"batches": batches.state()})

    batch_size: of the global batch, over all ranks; must be a multiple of the number of ranks.
    shuffle: every epoch has its own order. False takes the samples in order.
    drop_last: drop the samples of an epoch that do not fill a batch. False completes that batch with samples
        of the next epoch, so that every sample comes once per epoch and all batches are full; the last batch
        of the last epoch is completed from one more epoch.
    epochs: the number of epochs; None is endless. len() is the number of steps of all epochs.
    rank, ranks: by default those of torch.distributed, or torchrun.

    The order is a keyed permutation that is computed for each position independently: no list of samples is
    built, whatever their number, and the order does not depend on the version of torch or numpy. A step is
    one batch of the loader: if it yields micro-batches, save after the last one of an optimizer step.

    Worker processes fetch ahead, so only the loop knows which batches were used. `steps` counts them. A
    torchdata StatefulDataLoader counts them itself: save and load its own state instead, with or without
    `steps`. That state includes this rank's worker seeds, so it differs between ranks; save `state()` as well
    to resume on another number of ranks.

    After fs.load on as many ranks, random numbers drawn by the model, the loop and a loader without workers
    continue exactly if the loop is over `steps`; otherwise the seed that a starting loader draws shifts them.
    Those drawn in worker processes start anew: derive them from the sample's index, or give the dataset of a
    StatefulDataLoader a state_dict with its generators.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        epochs: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self._num_samples = _integer(num_samples, "num_samples", 1)
        self._batch_size = _integer(batch_size, "batch_size", 1)
        self._seed, self._shuffle, self._drop_last = _integer(seed, "seed"), bool(shuffle), bool(drop_last)
        self._given_place = _given_place(rank, ranks)
        if drop_last and batch_size > num_samples:
            raise OptionError(
                f"a batch of {batch_size} is never full with {num_samples} samples, and drop_last is set",
                "Give a smaller batch_size, or drop_last=False to continue into the next epoch.",
            )
        self._num_steps = None if epochs is None else self._steps_of(_integer(epochs, "epochs", 1))
        self._share()  # raises now if the batch size does not fit the ranks
        self._start = self._used = self._handed_out = 0
        self._counting = False  # whether `steps` counts what the loop has used
        self._pass = 0  # increased by every resume
        self._holder: _Position | None = None  # the iterator that has handed out batches in this pass

    def __len__(self) -> int:
        """The steps of all epochs, the same before and after a resume."""
        if self._num_steps is None:  # Python's convention for an object without a length
            raise TypeError("fs.Batches without epochs has no len(): it is endless")
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's indices, batch by batch, for a DataLoader."""
        return _Position(self)

    def indices(self, step: int) -> list[int]:
        """The global batch of a step. Rank r of R gets the r-th of its R equal parts."""
        return self._samples(_integer(step, "step", 0), 0, self._batch_size)

    def steps(self, loader: Iterable[T]) -> Iterator[tuple[int, T]]:
        """(step, batch) for each batch of the loader, from where the last resume or loop stopped.

        A batch counts as used once the loop has it: call `state()` after its step. Starting the loader draws
        a seed from torch's generator, whose state is restored afterwards.
        """
        if self._counting:
            self.resume(self._used)
        random_numbers = torch.get_rng_state()
        iterator = iter(loader)  # a stateful loader sets our position here
        torch.set_rng_state(random_numbers)
        self._counting, here, report = True, self._pass, reports.own()
        for batch in iterator:
            if here != self._pass or self._handed_out <= self._used:
                raise StateError(
                    f"the loader gave a batch for step {self._used} that does not come from these fs.Batches",
                    "Give the loader batch_sampler=batches, and call batches.resume before batches.steps.",
                )
            self._used += 1
            if report is not None:
                report.begins(self._used - 1)
            yield self._used - 1, batch

    def state(self) -> dict[str, Any]:
        """The position after the batch that the loop over `steps` has now, for `extra` of fs.save."""
        # Not named state_dict: torchdata would call it, and save a position that includes prefetched batches.
        if self._holder is not None and not self._counting:
            raise StateError(
                "a loader fetches ahead, so fs.Batches does not know which batches were used",
                "Loop over batches.steps(loader), or save the state of a StatefulDataLoader.",
            )
        return self._described(self._used)

    def resume(self, state: Mapping[str, Any] | int) -> int:
        """Continue from a state, or from a step; returns the step. Earlier iterators become invalid."""
        step = self._checked(state) if isinstance(state, Mapping) else state
        self._start = self._used = self._handed_out = _integer(step, "step", 0)
        self._counting, self._pass, self._holder = False, self._pass + 1, None
        return self._start

    def _described(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "num_samples": self._num_samples,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._drop_last,
            "order": _ORDER,
        }

    def _checked(self, state: Mapping[str, Any]) -> Any:
        mine = self._described(0)
        missing = [name for name in mine if name not in state]
        if missing:
            raise CheckpointError(
                f"a state of fs.Batches has {', '.join(mine)}; this one lacks {', '.join(missing)}",
                "Resume with what batches.state() gave.",
            )
        for name, value in mine.items():
            if name != "step" and state[name] != value:
                raise CheckpointError(
                    f"the saved order of samples has {name}={state[name]!r}, and this one {value!r}",
                    "Give fs.Batches what the run that saved gave it; to change the order on purpose, resume "
                    "with a step instead of a state.",
                )
        return state["step"]

    def _give(self, position: _Position) -> list[int]:
        """This rank's share of a batch. Only one iterator per pass, so that no sample comes twice."""
        if position.of_pass != self._pass:
            raise StateError("this iterator was made before the batches were resumed", "Make a new one.")
        if self._holder not in (None, position):
            raise StateError(
                f"these batches were handed out already, from step {self._start} on",
                "Loop over batches.steps(loader), which continues where it stopped; for another pass call "
                "batches.resume(0) first.",
            )
        if self._num_steps is not None and position.step >= self._num_steps:
            raise StopIteration
        share = self._share()
        if position.share not in (None, share):
            raise StateError(
                f"batches were handed out for the share {position.share}, and now it is {share}",
                "Start the process group before the loader, or give rank and ranks.",
            )
        indices = self._samples(position.step, *share)
        position.share, self._holder = share, position
        self._handed_out = position.step + 1
        return indices

    def _share(self) -> tuple[int, int]:
        """The range of this rank's samples in a global batch."""
        rank, ranks = self._given_place or _place()
        if self._batch_size % ranks:
            raise OptionError(
                f"batch_size is {self._batch_size}, which {ranks} ranks cannot share equally",
                "Give a multiple of the ranks: gradients are averaged over them with equal weight.",
            )
        size = self._batch_size // ranks
        return rank * size, (rank + 1) * size

    def _steps_of(self, epochs: int) -> int:
        if self._drop_last:
            return epochs * (self._num_samples // self._batch_size)
        return -(-epochs * self._num_samples // self._batch_size)

    def _samples(self, step: int, first: int, last: int) -> list[int]:
        if self._drop_last:
            epoch, within = divmod(step, self._num_samples // self._batch_size)
            offset = within * self._batch_size + first
        else:
            epoch, offset = divmod(step * self._batch_size + first, self._num_samples)
        samples: list[int] = []
        while (left := last - first - len(samples)) > 0:  # once, unless the batch continues in the next epoch
            stop = min(offset + left, self._num_samples)
            samples += self._order(epoch, offset, stop)
            epoch, offset = epoch + 1, 0
        return samples

    def _order(self, epoch: int, start: int, stop: int) -> list[int]:
        """The samples at these positions of an epoch."""
        if not self._shuffle:
            return list(range(start, stop))
        text = f"fullshard batches {self._seed} {epoch}"
        keys = np.frombuffer(hashlib.shake_256(text.encode()).digest(8 * _ROUNDS), "<u8")
        order: list[int] = _permuted(
            np.arange(start, stop, dtype=np.uint64), self._num_samples, keys
        ).tolist()
        return order


class _Position:
    """A position in the batches. torchdata's StatefulDataLoader keeps its state with each batch."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.step, self.of_pass = batches._start, batches._pass
        self.share: tuple[int, int] | None = None

    def __iter__(self) -> _Position:
        return self

    def __next__(self) -> list[int]:
        indices = self._batches._give(self)
        self.step += 1
        return indices

    def state_dict(self) -> dict[str, Any]:
        return self._batches._described(self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.of_pass = self._batches.resume(state), self._batches._pass


def _permuted(places: Places, size: int, keys: Places) -> Places:
    """These positions under a keyed permutation of range(size).

    A Feistel network: a position is written as two digits, and each round adds a hash of one digit to the
    other, which is invertible. The bases are about the square root of size, so that few results lie beyond
    size; these are permuted again until they are inside, which preserves the bijection.
    """
    high_base = math.isqrt(size - 1) + 1
    bases = np.uint64(high_base), np.uint64(-(-size // high_base))
    permuted = _rounds(places, bases, keys)
    while (outside := permuted >= size).any():
        permuted[outside] = _rounds(permuted[outside], bases, keys)
    return permuted


def _rounds(places: Places, bases: tuple[np.uint64, np.uint64], keys: Places) -> Places:
    digits = [places // bases[1], places % bases[1]]
    for number, key in enumerate(keys):
        this, other = number % 2, 1 - number % 2
        digits[this] = (digits[this] + _mixed(digits[other] + key) % bases[this]) % bases[this]
    return digits[0] * bases[1] + digits[1]


def _mixed(values: Places) -> Places:
    """The finalizer of SplitMix64: flipping one input bit changes about half of the output bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _place() -> tuple[int, int]:
    return own_rank(), rank_count()


def _given_place(rank: int | None, ranks: int | None) -> tuple[int, int] | None:
    if rank is None and ranks is None:
        return None
    if rank is None or ranks is None or not 0 <= rank < ranks:
        raise OptionError(f"rank is {rank} and ranks is {ranks}", "Give both, rank from 0 to ranks - 1.")
    return rank, ranks


def _integer(value: Any, name: str, least: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        at_least = "" if least is None else f" of at least {least}"
        raise OptionError(f"{name} is {value!r}", f"Give an integer{at_least}.")
    return number
