"""fs.Batches: which samples a step has, on which rank; lengths and options."""

from __future__ import annotations

import hashlib
import itertools
import math
import tracemalloc
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.data import Batches
from fullshard.errors import CheckpointError, OptionError, StateError


def batches_of(size: int = 23, batch_size: int = 4, **options: Any) -> Batches:
    return Batches(size, batch_size, **options)


SIZES = st.integers(1, 200)


SEEDS = st.integers(-(2**70), 2**70)


@settings(deadline=None, max_examples=60)
@given(size=SIZES, batch_size=st.integers(1, 70), seed=SEEDS, epochs=st.integers(1, 4))
def test_every_sample_comes_once_an_epoch(size: int, batch_size: int, seed: int, epochs: int) -> None:
    batches = Batches(size, batch_size, seed=seed, epochs=epochs)
    stream = list(itertools.chain.from_iterable(batches))
    assert len(stream) == len(batches) * batch_size  # all batches are full
    for epoch in range(epochs):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert 0 <= len(stream) - epochs * size < batch_size  # no more is added than the last batch lacks


@settings(deadline=None, max_examples=60)
@given(size=SIZES, batch_size=st.integers(1, 70), seed=SEEDS)
def test_drop_last_leaves_out_less_than_a_batch_of_each_epoch(size: int, batch_size: int, seed: int) -> None:
    batch_size = min(batch_size, size)
    batches = Batches(size, batch_size, seed=seed, epochs=3, drop_last=True)
    found = list(batches)
    assert len(found) == len(batches) == 3 * (size // batch_size)
    for epoch in range(3):
        of_epoch = found[epoch * (size // batch_size) : (epoch + 1) * (size // batch_size)]
        samples = list(itertools.chain.from_iterable(of_epoch))
        assert len(set(samples)) == len(samples) > size - batch_size


@settings(deadline=None, max_examples=40)
@given(size=SIZES, share=st.integers(1, 8), step=st.integers(0, 300), drop_last=st.booleans())
def test_ranks_have_together_the_same_global_batch_whatever_their_number(
    size: int, share: int, step: int, drop_last: bool
) -> None:
    batch_size = 12 * share
    options: Any = {"drop_last": drop_last and batch_size <= size}
    whole = Batches(size, batch_size, **options).indices(step)
    for count in (1, 2, 3, 4, 6, 12):
        together: list[int] = []
        for rank in range(count):
            batches = Batches(size, batch_size, rank=rank, ranks=count, **options)
            batches.resume(step)
            together += next(iter(batches))
        assert together == whole


def test_order_of_a_seed_is_the_one_that_checkpoints_rely_on() -> None:
    # Never to be changed without a new number in the state: runs that were saved go on in this order.
    assert Batches(10, 10).indices(0) == [3, 6, 1, 0, 5, 2, 9, 7, 4, 8]
    assert Batches(10, 10).indices(1) == [9, 0, 3, 6, 2, 8, 4, 7, 5, 1]
    assert Batches(10, 10, seed=-7).indices(0) == [9, 3, 7, 8, 5, 6, 2, 4, 0, 1]
    assert Batches(10**15, 2, seed=3).indices(2 * 10**9) == [842796976932457, 283200421480583]
    assert Batches(10, 10).state()["order"] == 1


def _sample_at(place: int, size: int, seed: int, epoch: int) -> int:
    """The order as docs would tell it, in Python's own numbers."""
    digest = hashlib.shake_256(f"fullshard batches {seed} {epoch}".encode()).digest(96)
    keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(12)]
    high = next(h for h in itertools.count(math.isqrt(size)) if h * h >= size)
    bases = (high, math.ceil(Fraction(size, high)))
    while True:
        digits = list(divmod(place, bases[1]))
        for i, key in enumerate(keys):
            x = (digits[1 - i % 2] + key) % 2**64
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
            digits[i % 2] = (digits[i % 2] + (x ^ (x >> 31))) % bases[i % 2]
        place = digits[0] * bases[1] + digits[1]
        if place < size:
            return place


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 2**62), seed=SEEDS, epoch=st.integers(0, 2**40), data=st.data())
def test_order_is_the_same_in_plain_python(size: int, seed: int, epoch: int, data: Any) -> None:
    place = data.draw(st.integers(0, size - 1))
    assert Batches(size, 1, seed=seed).indices(epoch * size + place) == [_sample_at(place, size, seed, epoch)]


def test_unshuffled_order_is_that_of_the_dataset() -> None:
    assert [batches_of(5, 3, shuffle=False).indices(s) for s in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = [Batches(1000, 1000, seed=seed).indices(epoch) for seed in range(5) for epoch in range(5)]
    for a, b in itertools.combinations(orders, 2):
        same_place = sum(x == y for x, y in zip(a, b, strict=True))
        assert same_place < 10  # one is expected of two random orders


@pytest.mark.parametrize("size", [3, 5])
def test_all_orders_of_a_few_samples_are_equally_likely(size: int) -> None:
    tries, kinds = 4000, math.factorial(size)
    batches = Batches(size, size, seed=11)
    found = Counter(tuple(batches.indices(epoch)) for epoch in range(tries))
    chi = sum(
        (found[order] - tries / kinds) ** 2 / (tries / kinds) for order in itertools.permutations(range(size))
    )
    freedom = kinds - 1
    assert chi < freedom + 3 * math.sqrt(2 * freedom), f"{chi:.1f} with {freedom} degrees of freedom"


def test_neighbours_do_not_stay_neighbours() -> None:
    orders = np.array([Batches(400, 400, seed=seed).indices(0) for seed in range(300)])
    for distance in (1, 20, 21):  # of places; 20 is the root of 400, where the digits change
        gap = orders[:, distance:] - orders[:, :-distance]
        for value in (1, -1, 20, 21):
            mean = (gap == value).mean()
            assert abs(mean - (400 - abs(value)) / (400 * 399)) < 0.0006, (distance, value)


def test_a_huge_dataset_takes_no_memory_for_its_order() -> None:
    batches = Batches(10**12, 64)
    tracemalloc.start()
    found = [index for step in range(100) for index in batches.indices(step * 10**7)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(found)) == 6400
    assert 0 <= min(found) < 10**10 < 99 * 10**10 < max(found) < 10**12
    assert peak < 2**20, f"{peak} bytes"


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_uneven_shares_are_together_the_global_batch(drop_last: bool, shuffle: bool) -> None:
    options: Any = {"drop_last": drop_last, "shuffle": shuffle, "epochs": 2}
    whole = Batches(150, 64, **options)
    shares = [list(Batches(150, 64, rank=rank, ranks=3, **options)) for rank in range(3)]
    assert [len(of_rank[0]) for of_rank in shares] == [22, 21, 21]
    assert len(whole) == len(shares[0])
    for step, of_ranks in enumerate(zip(*shares, strict=True)):
        assert list(itertools.chain(*of_ranks)) == whole.indices(step)


@settings(deadline=None, max_examples=60)
@given(batch_size=st.integers(1, 40), micro=st.integers(1, 40), count=st.integers(1, 9))
def test_micro_batches_do_not_depend_on_the_number_of_ranks(batch_size: int, micro: int, count: int) -> None:
    micro = min(micro, batch_size)
    whole = Batches(50, batch_size, seed=1, epochs=2)
    computed: dict[int, list[list[int]]] = {}
    for rank in range(count):
        batches = Batches(50, batch_size, seed=1, epochs=2, micro_batch_size=micro, rank=rank, ranks=count)
        assert len(batches) == len(whole)
        for step, given_batches in batches.steps(batches):
            assert len(given_batches) == math.ceil(math.ceil(batch_size / micro) / count)
            weighted = list(zip(given_batches, given_batches.weights, strict=True))
            computed.setdefault(step, [[]] * -(-batch_size // micro))
            for place, (samples, weight) in enumerate(weighted):
                assert weight in (0, pytest.approx(len(samples) / batch_size))
                if weight:
                    computed[step][place * count + rank] = samples
    for step in range(len(whole)):
        assert list(itertools.chain(*computed[step])) == whole.indices(step)
        assert all(len(samples) == micro for samples in computed[step][:-1])


def test_a_batch_of_fewer_samples_than_ranks_is_refused() -> None:
    with pytest.raises(OptionError, match="batch_size is 3, less than one sample for each of 4 ranks"):
        Batches(100, 3, rank=0, ranks=4)


def test_micro_batches_need_a_loop_that_knows_their_weights() -> None:
    with pytest.raises(StateError, match=r"batches\.steps alone"):
        next(iter(Batches(100, 8, micro_batch_size=2)))


def test_a_state_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(CheckpointError, match="lacks step, num_samples"):
        batches_of().resume({"epoch": 3})


def test_endless_batches_have_no_length() -> None:
    with pytest.raises(TypeError, match="it is endless"):
        len(batches_of())
    assert list(itertools.islice(batches_of(), 2)) == [batches_of().indices(0), batches_of().indices(1)]


def test_length_is_the_same_after_a_resume() -> None:
    batches = batches_of(epochs=2)
    batches.resume(5)
    assert len(batches) == 12


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 0}, "num_samples is 0"),
        ({"size": 2.0}, r"num_samples is 2\.0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"seed": "a"}, "seed is 'a'"),
        ({"epochs": 0}, "epochs is 0"),
        ({"rank": 1}, "rank is 1 and ranks is None"),
        ({"rank": 2, "ranks": 2}, "rank is 2 and ranks is 2"),
        ({"size": 3, "drop_last": True}, "a batch of 4 is never full with 3 samples"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0"),
        ({"micro_batch_size": 5}, "micro_batch_size is 5, and batch_size 4"),
    ],
)
def test_options_without_meaning_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        batches_of(**options)


@pytest.mark.parametrize("step", [-1, 1.5, None])
def test_a_step_without_meaning_is_refused(step: Any) -> None:
    with pytest.raises(OptionError, match="step is"):
        batches_of().resume(step)


def test_numbers_of_numpy_are_numbers() -> None:
    assert Batches(np.int64(23), np.int32(4)).indices(np.int64(1)) == batches_of().indices(1)
    assert type(Batches(np.int64(23), 4).state()["num_samples"]) is int
