"""Which samples a step trains on: a function of the seed and the step, independent of the number of ranks."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from fullshard.comm.control import gather_from_world
from fullshard.comm.groups import own_rank, rank_count
from fullshard.elastic import reports
from fullshard.errors import CheckpointError, OptionError, StateError
from fullshard.keywords import checked_keywords
from fullshard.shares import Loop, Share, equal_parts

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
        ("per_device_batch_size", "per_device_train_batch_size", "batch_size_per_rank"),
        "batch_size is that of all ranks together; micro_batch_size is what a rank computes at once.",
    ),
    **dict.fromkeys(
        ("accumulation_steps", "gradient_accumulation_steps", "num_micro_batches", "micro_batches"),
        "Write micro_batch_size=N, which does not depend on the number of ranks.",
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

    batch_size: of the global batch, over all ranks. Ranks share it as equally as they can (64 on three ranks:
        22, 21 and 21), and a batch has at least one sample per rank.
    micro_batch_size: cut every global batch into micro-batches of so many samples (the last one has the
        rest), which do not depend on the number of ranks; see below.
    shuffle: every epoch has its own order. False takes the samples in order.
    drop_last: drop the samples of an epoch that do not fill a batch. False completes that batch with samples
        of the next epoch, so that every sample comes once per epoch and all batches are full; the last batch
        of the last epoch is completed from one more epoch.
    epochs: the number of epochs; None is endless. len() is the number of steps of all epochs.
    rank, ranks: by default those of torch.distributed, or torchrun.

    While a loop over these batches runs, a backward of a sharded model weights the gradients of each rank by
    its share of the samples: a loss that is the mean over the samples of its batch gives the gradient of the
    mean over the global batch, on any number of ranks. What cannot be weighted is an error.

    With micro_batch_size, `steps` gives the micro-batches of this rank, and their losses are not divided:

        for step, micro_batches in batches.steps(loader):
            for batch in micro_batches:
                model(batch).loss.backward()
            optimizer.step()

    Rank r of R computes micro-batch r, r + R, and so on. Every rank gets equally many: one that has no more
    gets an earlier one again, whose gradients do not count; `micro_batches.weights` are the weights of this
    rank's in the mean over the global batch, of which those are 0.

    The order is a keyed permutation that is computed for each position independently: no list of samples is
    built, whatever their number, and the order does not depend on the version of torch or numpy. Without
    micro_batch_size a step is one batch of the loader: if you accumulate over several of them, save after the
    last one of an optimizer step.

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
        micro_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        epochs: int | None = None,
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        self._num_samples = _integer(num_samples, "num_samples", 1)
        self._batch_size = _integer(batch_size, "batch_size", 1)
        self._micro_size = _micro_size(micro_batch_size, self._batch_size)
        self._seed, self._shuffle, self._drop_last = _integer(seed, "seed"), bool(shuffle), bool(drop_last)
        self._given_place = _given_place(rank, ranks)
        if drop_last and batch_size > num_samples:
            raise OptionError(
                f"a batch of {batch_size} is never full with {num_samples} samples, and drop_last is set",
                "Give a smaller batch_size, or drop_last=False to continue into the next epoch.",
            )
        self._num_steps = None if epochs is None else self._steps_of(_integer(epochs, "epochs", 1))
        self._parts()  # raises now if the batch size does not fit the ranks
        self._start = self._used = self._handed_out = 0
        self._counting = False  # whether `steps` counts what the loop has used
        self._pass = 0  # increased by every resume
        self._holder: object | None = None  # the key of the iterator that has handed out batches in this pass
        self._loop: Loop | None = None  # of `steps`, while it runs
        self._left_out: set[int] = set()  # steps that the loop does not get
        self._left_out_before = 0  # nor those from where the loop begins to before this one

    def __len__(self) -> int:
        """The steps of all epochs, the same before and after a resume."""
        if self._num_steps is None:  # Python's convention for an object without a length
            raise TypeError("fs.Batches without epochs has no len(): it is endless")
        return self._num_steps

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's indices, batch by batch, for a DataLoader."""
        return _Position(self)

    def indices(self, step: int) -> list[int]:
        """The global batch of a step. Rank r of R gets the r-th of its R parts, the first of which have one
        sample more if need be; with micro-batches, every R-th of these from the r-th on."""
        return self._samples(_integer(step, "step", 0), 0, self._batch_size)

    def steps(
        self, loader: Iterable[T], count: Callable[[T], Any] | None = None
    ) -> Generator[tuple[int, Any], None, None]:
        """(step, batch) for each batch of the loader, from where the last resume or loop stopped; with
        micro_batch_size, (step, micro-batches).

        count: a function of a batch: what its loss is a mean over, if that is not its samples, such as the
            tokens that are predicted. Gradients are weighted by it, and ranks exchange these numbers.

        A batch counts as used once the loop has it: call `state()` after its step. Starting the loader draws
        a seed from torch's generator, whose state is restored afterwards.
        """
        if self._counting:
            self.resume(self._used)
        self._counting = True
        random_numbers = torch.get_rng_state()
        iterator = iter(loader)  # a stateful loader sets our position here
        torch.set_rng_state(random_numbers)
        self._counting, here, report = True, self._pass, reports.own()
        first = self._used
        self._loop = loop = Loop(self._label)
        try:
            while got := list(islice(iterator, self._held())):
                if here != self._pass or self._handed_out <= self._used or len(got) < self._held():
                    raise StateError(
                        f"the loader gave a batch for step {self._used} that does not come from these "
                        "fs.Batches",
                        "Give the loader batch_sampler=batches, and call batches.resume before "
                        "batches.steps.",
                    )
                self._used += 1
                if self._used - 1 in self._left_out or first <= self._used - 1 < self._left_out_before:
                    continue
                if report is not None:
                    report.begins(self._used - 1)
                shares = self._shares(None if count is None else [float(count(batch)) for batch in got])
                loop.expect(shares)
                if self._micro_size is not None:
                    yield self._used - 1, MicroBatches(got, shares, loop)
                else:
                    loop.at(shares[0])
                    yield self._used - 1, got[0]
        finally:
            loop.close()

    @property
    def current_step(self) -> int:
        """The step of the batch that the loop over `steps` has now."""
        if not self._counting or self._used <= self._start:
            raise StateError("no loop over batches.steps has a batch", "Call this inside such a loop.")
        return self._used - 1

    def leave_out(self, step: int, *, from_start: bool = False) -> None:
        """The loop over `steps` does not get this step's batch; with `from_start`, nor any from where the
        loop begins to this one. For batches that spoil a run: see fs.Guard."""
        if from_start:
            self._left_out_before = max(self._left_out_before, _integer(step, "step", 0) + 1)
        self._left_out.add(_integer(step, "step", 0))

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
        if self._loop is not None:
            self._loop.close()
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
        """This rank's next samples. Only one iterator per pass, so that no sample comes twice."""
        if position.of_pass != self._pass:
            raise StateError("this iterator was made before the batches were resumed", "Make a new one.")
        if self._holder not in (None, position.key):
            raise StateError(
                f"these batches were handed out already, from step {self._start} on",
                "Loop over batches.steps(loader), which continues where it stopped; for another pass call "
                "batches.resume(0) first.",
            )
        if self._num_steps is not None and position.step >= self._num_steps:
            if position.loop is not None:
                position.loop.over = True
            raise StopIteration
        parts = self._parts()
        if position.parts not in (None, parts):
            raise StateError(
                f"batches were handed out for the share {position.parts}, and now it is {parts}",
                "Start the process group before the loader, or give rank and ranks.",
            )
        if position.loop is None and not self._counting:
            position.loop = self._unsupervised()
        indices = self._samples(position.step, *parts[position.part])
        position.parts, self._holder = parts, position.key
        self._handed_out = position.step + 1
        return indices

    def _unsupervised(self) -> Loop:
        """A loader that is iterated without `steps`: it has the same share of every batch."""
        if self._micro_size is not None:
            raise StateError(
                "a loader fetches ahead, so the weights of micro-batches are known to batches.steps alone",
                "Loop over batches.steps(loader).",
            )
        loop, shares = Loop(self._label), self._shares(None)
        loop.expect(shares)
        loop.at(shares[0])
        return loop

    @property
    def _label(self) -> str:
        return f"fs.Batches of {self._batch_size} samples"

    def _parts(self) -> tuple[tuple[int, int], ...]:
        """The ranges of a global batch that this rank reads: its share, or its micro-batches."""
        rank, ranks = self._place()
        if self._micro_size is not None:
            numbers = range(self._micro_batches)[rank::ranks] or [rank % self._micro_batches]
            return tuple(self._micro_batch(number) for number in numbers)
        if ranks > self._batch_size:
            raise OptionError(
                f"batch_size is {self._batch_size}, less than one sample for each of {ranks} ranks",
                "Give a larger batch_size, or fewer ranks; or micro_batch_size=..., with which ranks that "
                "have no micro-batch join with the weight 0.",
            )
        return (equal_parts(self._batch_size, ranks, rank),)

    @property
    def _micro_batches(self) -> int:
        """How many a global batch has."""
        return 0 if self._micro_size is None else -(-self._batch_size // self._micro_size)

    def _micro_batch(self, number: int) -> tuple[int, int]:
        assert self._micro_size is not None
        return number * self._micro_size, min((number + 1) * self._micro_size, self._batch_size)

    def _held(self) -> int:
        """How many batches of the loader this rank has per step."""
        return len(self._parts())

    def _shares(self, counts: list[float] | None) -> list[Share]:
        """Of one step: what the ranks compute at the same time, the first of each rank first."""
        rank, ranks = self._place()
        if self._micro_size is None:
            parts = [equal_parts(self._batch_size, ranks, of_rank) for of_rank in range(ranks)]
        else:
            parts = list(map(self._micro_batch, range(self._micro_batches)))
        sizes: list[float] = [stop - start for start, stop in parts]
        if counts is not None:
            sizes = self._gathered(counts, rank, ranks, len(sizes))
        total = math.fsum(sizes)
        if self._micro_size is None:
            return [Share(tuple(sizes), total, rank)]
        weights = tuple(size / total if total else 0.0 for size in sizes)
        padded = [*sizes, *[0] * (-len(sizes) % ranks)]
        return [
            Share(tuple(padded[first : first + ranks]), total, rank, first, len(sizes), weights)
            for first in range(0, len(sizes), ranks)
        ]

    def _gathered(self, counts: list[float], rank: int, ranks: int, size: int) -> list[float]:
        """The counts of all ranks, by number of micro-batch, or by rank."""
        if not all(math.isfinite(count) and count >= 0 for count in counts):
            raise OptionError(
                f"count gave {counts} for the batches of step {self._used - 1}", "Return a number from 0 on."
            )
        together = gather_from_world((rank, counts), "counts of batches") if ranks > 1 else [(rank, counts)]
        by_rank = dict(together)
        if sorted(by_rank) != list(range(ranks)):
            raise StateError(
                f"fs.Batches is shared by {ranks} ranks, of which {sorted(by_rank)} counted",
                "Give fs.Batches the rank and ranks of this run.",
            )
        return [by_rank[number % ranks][number // ranks] for number in range(size)]

    def _place(self) -> tuple[int, int]:
        return self._given_place or _place()

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


class MicroBatches(Generic[T]):
    """The micro-batches that this rank computes in one step. May be iterated again."""

    def __init__(self, batches: list[T], shares: Sequence[Share], loop: Loop) -> None:
        self._batches, self._shares, self._loop = batches, shares, loop

    def __len__(self) -> int:
        """The same on every rank."""
        return len(self._shares)

    def __iter__(self) -> Iterator[T]:
        try:
            for number, share in enumerate(self._shares):
                self._loop.at(share)
                yield self._batches[min(number, len(self._batches) - 1)]
        finally:
            self._loop.at(None)

    @property
    def numbers(self) -> list[int]:
        """Of each in the global batch, on any number of ranks: a seed for what is drawn at random."""
        return [share.first + share.rank for share in self._shares]

    @property
    def weights(self) -> list[float]:
        """Of each in the mean over the global batch; 0 for one that was computed already, or elsewhere."""
        return [share.weight / share.ranks for share in self._shares]


class _Position:
    """A position in the batches. torchdata's StatefulDataLoader keeps its state with each batch."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self.step, self.part, self.of_pass = batches._start, 0, batches._pass
        self.parts: tuple[tuple[int, int], ...] | None = None
        self.loop: Loop | None = None  # of a loader that is iterated without `steps`
        self.key = object()

    def __iter__(self) -> _Position:
        return self

    def __next__(self) -> list[int]:
        indices = self._batches._give(self)
        assert self.parts is not None
        self.part = (self.part + 1) % len(self.parts)
        self.step += not self.part
        return indices

    def state_dict(self) -> dict[str, Any]:
        return self._batches._described(self.step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._batches._micro_size is not None:
            raise StateError(
                "a loader's own state counts micro-batches, of which ranks have different numbers",
                "Save and resume batches.state().",
            )
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


def _micro_size(size: int | None, batch_size: int) -> int | None:
    if size is not None and _integer(size, "micro_batch_size", 1) > batch_size:
        raise OptionError(
            f"micro_batch_size is {size}, and batch_size {batch_size}", "Give at most the batch_size."
        )
    return None if size is None else operator.index(size)


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
