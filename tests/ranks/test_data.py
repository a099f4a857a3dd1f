"""fs.Batches on ranks and in loaders: each rank its share, and where a run goes on after an interruption."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import fullshard as fs
import ranks
from fullshard.data import Batches
from fullshard.errors import CheckpointError, StateError

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


# --- ranks ----------------------------------------------------------------------------------------------


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
    torch.distributed.barrier()  # a rank that has ended already would break the other's connecting
    assert len(next(iter(late))) == 6
    try:
        next(early)
    except StateError as error:
        return str(error)
    return "nothing"


def test_a_loader_that_began_before_the_process_group_is_refused() -> None:
    for message in ranks.run(_begin_before_the_group, 2):
        assert "Start the process group before the loader" in message


def _uneven(size: int) -> list[list[int]]:
    return list(Batches(20, size, epochs=1))


def test_ranks_share_a_batch_that_is_no_multiple_of_them() -> None:
    shares = ranks.run(_uneven, 2, 9, init=True)
    assert [[len(share) for share in of_rank] for of_rank in shares] == [[5, 5, 5], [4, 4, 4]]
    together = [first + second for first, second in zip(*shares, strict=True)]
    assert together == [Batches(20, 9).indices(step) for step in range(3)]


def test_more_ranks_than_samples_of_a_batch_are_refused_by_name() -> None:
    for error in ranks.run(_uneven, 2, 1, init=True, expect_error=True).values():
        assert error.type_name == "OptionError"
        assert "batch_size is 1, less than one sample for each of 2 ranks" in error.message


@LOADERS
@pytest.mark.parametrize("micro", [None, 2])
def test_shares_of_any_ranks_have_each_sample_once_over_resizes(make: Any, micro: int | None) -> None:
    """With loaders that have fetched further when the run is interrupted, at any of these places."""
    expected = [sorted(Batches(23, 7, epochs=3, seed=5).indices(step)) for step in range(10)]
    state, found = Batches(23, 7, epochs=3, seed=5).state(), []
    for count, stop in ((4, 2), (2, 3), (3, 7), (1, 8), (5, 10)):
        of_ranks = []
        for rank in range(count):
            batches = Batches(23, 7, epochs=3, seed=5, micro_batch_size=micro, rank=rank, ranks=count)
            batches.resume(state)
            loader = loader_of(batches, int(rank == count // 2), make)  # processes are slow to start
            of_ranks.append(_until(batches, loader, stop))
        assert all(end == of_ranks[0][1] for _, end in of_ranks)
        state = of_ranks[0][1]
        found += [sorted(itertools.chain(*step)) for step in zip(*(s for s, _ in of_ranks), strict=True)]
    assert found == expected


def _until(batches: Batches, loader: Any, stop: int) -> tuple[list[list[int]], Any]:
    """By step, the samples that count; and the state after the last one."""
    found = []
    for step, given in batches.steps(loader):
        if isinstance(given, torch.Tensor):
            found.append(given.tolist())
        else:
            pairs = zip(given, given.weights, strict=True)
            found.append([index for batch, weight in pairs if weight for index in batch.tolist()])
        if step + 1 == stop:
            break
    return found, batches.state()


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


def test_state_of_batches_can_be_saved_as_extra(tmp_path: Any) -> None:
    assert ranks.run(_saved_and_loaded, 2, str(tmp_path / "c")) == [7, 7]


def _saved_and_loaded(path: str) -> int:
    model = fs.shard(torch.nn.Linear(3, 3))
    batches = Batches(100, 10, seed=2**80)
    batches.resume(7)
    fs.save(path, model, extra={"batches": batches.state()})
    return Batches(100, 10, seed=2**80).resume(fs.load(path, model)["batches"])
