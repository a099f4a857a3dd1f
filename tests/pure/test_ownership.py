"""Owners of tensors: even in work and in memory, the same on all ranks."""

from __future__ import annotations

import pytest

from fullshard.plan.ownership import Load, deal, imbalance, in_buckets, is_stack, load_of


def _llama(hidden: int, inner: int, keys: int, layers: int) -> list[Load]:
    matrices = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    matrices += [(inner, hidden), (inner, hidden), (hidden, inner)]
    shapes = [shape for _ in range(layers) for shape in (*matrices, (hidden,), (hidden,))]
    return [load_of(shape, 4) for shape in shapes]


LLAMAS = {"8B": (4096, 14336, 1024, 32), "70B": (8192, 28672, 1024, 80)}


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("ranks", [8, 64])
def test_owners_of_a_llamas_matrices_are_balanced_in_work_and_in_memory(name: str, ranks: int) -> None:
    loads = _llama(*LLAMAS[name])
    work, memory = imbalance(loads, deal(loads, ranks), ranks)
    assert work <= 1.1
    assert memory <= 1.1


def test_more_ranks_than_tensors_leave_ranks_without_one() -> None:
    loads = [load_of((64, 64), 4)] * 3
    assert sorted(deal(loads, 5)) == [0, 1, 2]


def test_an_owner_is_kept_when_parameters_are_added() -> None:
    loads = _llama(64, 256, 32, 2)
    before = deal(loads, 3)
    added = deal([*loads, load_of((512, 512), 4)], 3, before)
    assert added[:-1] == before


def test_buckets_hold_every_tensor_once_and_the_last_one_has_a_part_of_every_owner() -> None:
    loads = _llama(64, 256, 32, 3)
    owners = deal(loads, 4)
    most = max(load.size_bytes for load in loads)
    buckets = in_buckets(loads, owners, most)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(loads)))
    assert len(buckets) > 1
    assert {owners[i] for i in buckets[-1]} == set(range(4))
    for bucket in buckets:
        for owner in range(4):
            assert sum(loads[i].size_bytes for i in bucket if owners[i] == owner) <= most


def test_experts_are_a_stack_of_matrices_and_kernels_are_not() -> None:
    assert is_stack((8, 64, 128))
    assert not is_stack((64, 64, 3))
    assert not is_stack((64, 64, 3, 3))
    assert load_of((8, 64, 128), 4).cost == 8 * load_of((64, 128), 4).cost


def test_nothing_to_deal() -> None:
    assert deal([], 4) == []
    assert in_buckets([], [], 100) == []
    assert deal([load_of((), 4), load_of((0, 5), 4)], 2) == [0, 1]
