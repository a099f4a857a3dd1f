"""fs.Batches: which samples a step has, on which rank, and where a run goes on after an interruption."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import fullshard as fs
import ranks
from fullshard.data import Batches
from fullshard.errors import CheckpointError, OptionError, StateError

WORKERS = pytest.mark.parametrize("workers", [0, 2])
LOADERS = pytest.mark.parametrize("make", [DataLoader, StatefulDataLoader])


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def batches_of(size: int = 23, batch_size: int = 4, **options: Any) -> Batches:
    return Batches(size, batch_size, **options)


def loader_of(batches: Batches, workers: int = 0, make: Any = DataLoader, dataset: Any = None) -> Any:
    return make(dataset or Numbers(23), batch_sampler=batches, num_workers=workers)


def used(batches: Batches, loader: Any, stop: int | None = None) -> list[list[int]]:
    """What the loop gets until (not with) step `stop`."""
    found = []
    if stop is None or batches.state()["step"] < stop:
        for step, batch in batches.steps(loader):
            assert batch.tolist() == batches.indices(step)
            found.append(batch.tolist())
            if stop is not None and step == stop - 1:
                break
    return found


# --- the order ------------------------------------------------------------------------------------------

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


# --- ranks ----------------------------------------------------------------------------------------------


def test_a_batch_that_ranks_cannot_share_equally_is_refused() -> None:
    with pytest.raises(OptionError, match="batch_size is 10, which 4 ranks cannot share"):
        Batches(100, 10, rank=0, ranks=4)


def _first_share(of_group: bool) -> list[int]:
    if of_group:
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    return next(iter(Batches(40, 12)))


@pytest.mark.parametrize("init", [False, True], ids=["from_torchrun", "from_the_process_group"])
def test_each_rank_gets_its_own_share(init: bool) -> None:
    shares = ranks.run(_first_share, 2, init, init=init)
    assert shares[0] + shares[1] == Batches(40, 12).indices(0)
    assert [len(share) for share in shares] == [6, 6]


def _begin_before_the_group() -> str:
    saved = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    batches = Batches(40, 12)
    early, late = iter(batches), Batches(40, 12)
    assert len(next(early)) == 12  # nobody could know of the other rank
    os.environ.update(saved)
    torch.distributed.init_process_group("gloo")
    assert len(next(iter(late))) == 6
    try:
        next(early)
    except StateError as error:
        return str(error)
    return "nothing"


def test_a_loader_that_began_before_the_process_group_is_refused() -> None:
    for message in ranks.run(_begin_before_the_group, 2):
        assert "Start the process group before the loader" in message


def _uneven() -> None:
    Batches(100, 9)


def test_ranks_of_a_run_that_cannot_share_a_batch_refuse_it_by_name() -> None:
    for error in ranks.run(_uneven, 2, init=True, expect_error=True).values():
        assert error.type_name == "OptionError"
        assert "batch_size is 9, which 2 ranks" in error.message


# --- going on where a run was interrupted ---------------------------------------------------------------


@WORKERS
@LOADERS
@pytest.mark.parametrize("stop", [0, 1, 5, 17, 18])
def test_batches_fetched_ahead_are_not_lost(make: Any, workers: int, stop: int) -> None:
    expected = [batches_of().indices(step) for step in range(18)]
    first = batches_of(epochs=3)
    assert len(first) == 18
    before = used(first, loader_of(first, workers, make), stop)
    again = batches_of(epochs=3)
    assert again.resume(first.state()) == stop
    assert before + used(again, loader_of(again, workers, make)) == expected


@WORKERS
@pytest.mark.parametrize("stop", [0, 1, 5, 17, 18])
@pytest.mark.parametrize("counted", [False, True], ids=["by_itself", "in_steps"])
def test_a_stateful_loader_goes_on_by_its_own_state(workers: int, stop: int, counted: bool) -> None:
    expected = [batches_of().indices(step) for step in range(18)]

    def loop(batches: Batches, loader: Any) -> Iterator[list[int]]:
        steps = batches.steps(loader) if counted else enumerate(loader)
        return (batch.tolist() for _, batch in steps)

    batches = batches_of(epochs=3)
    loader = loader_of(batches, workers, StatefulDataLoader)
    state = loader.state_dict()
    found, going = [], loop(batches, loader)
    for _ in range(stop):
        found.append(next(going))
        state = loader.state_dict()
    if stop == 18:
        assert next(going, None) is None
        state = loader.state_dict()  # of a run that is over, and must not begin again
    del going
    batches = batches_of(epochs=3)
    loader = loader_of(batches, workers, StatefulDataLoader)
    loader.load_state_dict(state)
    assert found + list(loop(batches, loader)) == expected


@pytest.mark.parametrize("persistent", [False, True])
@LOADERS
def test_a_loop_that_was_left_goes_on_where_it_was(make: Any, persistent: bool) -> None:
    batches = batches_of()
    loader = make(Numbers(23), batch_sampler=batches, num_workers=2, persistent_workers=persistent)
    found = [used(batches, loader, stop) for stop in (3, 4, 11)]
    assert list(itertools.chain(*found)) == [batches.indices(step) for step in range(11)]


def test_steps_end_once_with_the_epochs() -> None:
    batches = batches_of(epochs=2)
    loader = loader_of(batches)
    assert len(used(batches, loader)) == len(loader) == 12
    assert used(batches, loader) == []


def test_state_is_refused_where_nobody_counted_what_was_used() -> None:
    batches = batches_of()
    assert batches.state()["step"] == 0
    next(iter(loader_of(batches, 2)))
    with pytest.raises(StateError, match=r"batches\.steps\(loader\)"):
        batches.state()


def test_a_second_pass_over_the_same_batches_is_refused() -> None:
    batches = batches_of(epochs=1)
    loader = loader_of(batches)
    first = [batch.tolist() for batch in loader]
    with pytest.raises(StateError, match="handed out already, from step 0 on"):
        next(iter(loader))
    batches.resume(0)
    assert [batch.tolist() for batch in loader] == first


@WORKERS
def test_an_iterator_made_before_a_resume_is_void(workers: int) -> None:
    batches = batches_of()
    iterator = iter(loader_of(batches, workers))
    batches.resume(3)
    with pytest.raises(StateError, match="made before the batches were resumed"):
        next(iterator)


def test_steps_refuse_a_loader_that_has_other_batches() -> None:
    batches = batches_of()
    with pytest.raises(StateError, match="does not come from these"):
        next(batches.steps(loader_of(batches_of())))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "seed=0, and this one 1"),
        ({"size": 24}, "num_samples=23, and this one 24"),
        ({"batch_size": 8}, "batch_size=4, and this one 8"),
        ({"shuffle": False}, "shuffle=True, and this one False"),
        ({"drop_last": True}, "drop_last=False, and this one True"),
    ],
)
@pytest.mark.parametrize("make", [None, StatefulDataLoader], ids=["of_batches", "of_a_stateful_loader"])
def test_a_state_of_another_order_is_refused(change: dict[str, Any], says: str, make: Any) -> None:
    other = batches_of(**change)
    if make is None:
        with pytest.raises(CheckpointError, match=says):
            other.resume(batches_of().state())
        return
    loader = loader_of(other, 0, make)
    loader.load_state_dict(loader_of(batches_of(), 0, make).state_dict())
    with pytest.raises(CheckpointError, match=says):
        next(iter(loader))


def test_a_state_that_is_none_of_ours_is_refused() -> None:
    with pytest.raises(CheckpointError, match="lacks step, num_samples"):
        batches_of().resume({"epoch": 3})


def test_more_epochs_may_be_added_to_a_run() -> None:
    first = batches_of(epochs=1)
    used(first, loader_of(first))
    more = batches_of(epochs=2)
    assert more.resume(first.state()) == 6
    assert used(more, loader_of(more)) == [more.indices(step) for step in range(6, 12)]


@LOADERS
@WORKERS
def test_beginning_a_loader_leaves_the_random_numbers_as_they_were(make: Any, workers: int) -> None:
    batches = batches_of()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    next(batches.steps(loader_of(batches, workers, make)))
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(5)
    batches.resume(0)
    next(iter(loader_of(batches, workers, make)))
    assert not torch.equal(torch.rand(3), expected)  # why `steps` looks after them


class Noisy(Numbers):
    """Every sample draws from all generators of its process; their states go with it where one asks."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])


class NoisyWithState(Noisy):
    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])


@pytest.mark.parametrize("exact", [False, True])
def test_random_numbers_of_workers_go_on_where_the_dataset_has_them_in_its_state(exact: bool) -> None:
    dataset = NoisyWithState(23) if exact else Noisy(23)

    def loop(state: Any, stop: int) -> tuple[list[torch.Tensor], Any]:
        batches = batches_of()
        loader = loader_of(batches, 2, StatefulDataLoader, dataset)
        if state is not None:
            loader.load_state_dict(state)
        taken = itertools.takewhile(lambda item: item[0] < stop, batches.steps(loader))
        found = []
        for step, batch in taken:
            found.append(batch)
            state = loader.state_dict()
            if step == stop - 1:
                break
        return found, state

    torch.manual_seed(0)
    whole, _ = loop(None, 9)
    torch.manual_seed(0)
    before, state = loop(None, 5)
    after, _ = loop(state, 9)
    assert all(torch.equal(a, b) for a, b in zip(before, whole[:5], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, whole[5:], strict=True)) == exact


# --- options --------------------------------------------------------------------------------------------


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


def test_state_of_batches_can_be_saved_as_extra(tmp_path: Any) -> None:
    assert ranks.run(_saved_and_loaded, 2, str(tmp_path / "c")) == [7, 7]


def _saved_and_loaded(path: str) -> int:
    model = fs.shard(torch.nn.Linear(3, 3))
    batches = Batches(100, 10, seed=2**80)
    batches.resume(7)
    fs.save(path, model, extra={"batches": batches.state()})
    return Batches(100, 10, seed=2**80).resume(fs.load(path, model)["batches"])
