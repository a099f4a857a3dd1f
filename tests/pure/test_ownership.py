"""Owners of tensors: even in work and in memory, the same on all ranks."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

import fullshard as fs
from fullshard.plan.ownership import Load, deal, imbalance, in_buckets, is_stack, load_of


class _Llama(nn.Module):
    """The parameters of a Llama: their shapes, no values."""

    def __init__(self, hidden: int, inner: int, keys: int, layers: int, words: int = 128256) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, device="meta")
        self.embed_tokens = nn.Embedding(words, hidden, device="meta")
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "q": linear(hidden, hidden),
                    "k": linear(hidden, keys),
                    "v": linear(hidden, keys),
                    "o": linear(hidden, hidden),
                    "gate": linear(hidden, inner),
                    "up": linear(hidden, inner),
                    "down": linear(inner, hidden),
                    "norms": nn.ModuleList(nn.RMSNorm(hidden, device="meta") for _ in range(2)),
                }
            )
            for _ in range(layers)
        )
        self.lm_head = linear(hidden, words)


def _llama(*sizes: int) -> list[Load]:
    return [load_of(p.shape, 4) for p in _Llama(*sizes).layers.parameters()]


LLAMAS = {"8B": (4096, 14336, 1024, 32), "70B": (8192, 28672, 1024, 80)}


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("ranks", [8, 64])
def test_owners_of_a_llamas_matrices_are_balanced_in_work_and_in_memory(name: str, ranks: int) -> None:
    loads = _llama(*LLAMAS[name])
    work, memory = imbalance(loads, deal(loads, ranks), ranks)
    assert work <= 1.1
    assert memory <= 1.1


def test_a_plan_shows_the_balance_of_owners_what_is_too_large_and_who_is_idle() -> None:
    model = _Llama(*LLAMAS["8B"])
    trained = fs.plan(model, ranks=8, optimizer_step="owned")
    assert trained.owners is not None
    assert "owned steps: 290 tensors on 8 owners; the busiest rank has" in str(trained)
    assert "owned steps" not in str(fs.plan(model, ranks=8))
    model.embed_tokens.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    for ranks in (8, 64):
        owners = fs.plan(model, ranks=ranks, optimizer_step="owned").owners
        assert owners is not None
        assert max(owners.work, owners.memory) <= 1.1
        assert not owners.idle
    many = str(fs.plan(model, ranks=512, optimizer_step="owned"))
    assert "288 tensors on 288 owners" in many
    assert "'layers.0.gate.weight' alone is 4.31; 224 ranks own nothing" in many


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
