"""Process groups are found by all of their members, also where torch has no naming function to replace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import ranks
from fullshard.comm import group_names


def _torch_whose_function_is_gone(patch: pytest.MonkeyPatch) -> None:
    torchs = distributed_c10d._hash_ranks_to_str

    def name_of(ranks: list[int], use_hashed_name: bool) -> str:
        if use_hashed_name:
            return torchs(ranks)
        distributed_c10d._world.group_count += 1
        return str(distributed_c10d._world.group_count - 1)

    patch.delattr(distributed_c10d, "_hash_ranks_to_str")
    patch.setattr(distributed_c10d, "_process_group_name", name_of)


def _torch_whose_function_takes_more(patch: pytest.MonkeyPatch) -> None:
    torchs, name_of = distributed_c10d._hash_ranks_to_str, distributed_c10d._process_group_name
    patch.setattr(distributed_c10d, "_hash_ranks_to_str", lambda ranks, count=None: torchs(ranks))
    patch.setattr(distributed_c10d, "_process_group_name", name_of)


def _torch_that_does_not_call_it(patch: pytest.MonkeyPatch) -> None:
    function = distributed_c10d._hash_ranks_to_str
    _torch_whose_function_is_gone(patch)
    patch.setattr(distributed_c10d, "_hash_ranks_to_str", function, raising=False)


def _torch_as_it_is(patch: pytest.MonkeyPatch) -> None:
    pass


def _shard_beside_a_group_of_one_rank(change: Callable[[pytest.MonkeyPatch], None]) -> list[float]:
    import fullshard as fs

    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        dist.new_group([0])  # known to rank 0 alone, which makes the number of groups differ
        torch.manual_seed(dist.get_rank())
        found = []
        for strategy in ("zero3", "zero1"):
            model = fs.shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), strategy=strategy)
            model(torch.ones(2, 3)).sum().backward()
            with fs.full(model):
                found += [float(p.sum()) for p in model.parameters()]
        return found


TORCHS = [
    _torch_as_it_is,
    _torch_whose_function_is_gone,
    _torch_whose_function_takes_more,
    _torch_that_does_not_call_it,
]


@pytest.mark.parametrize("change", TORCHS, ids=lambda change: change.__name__.strip("_"))
def test_ranks_with_different_numbers_of_groups_find_each_other(change: Any) -> None:
    first, second = ranks.run(_shard_beside_a_group_of_one_rank, 2, change, init=True, timeout_s=60)
    assert first == second


def test_this_torch_has_the_naming_function() -> None:
    """If this fails, the fallback is in use: look for torch's new name for it."""
    assert group_names._naming_function() is distributed_c10d._hash_ranks_to_str
    assert "_hash_ranks_to_str" in inspect.getsource(distributed_c10d._process_group_name)
