"""Agreements on the host go over a tree of small groups: the same results, with few connections per rank."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ranks
from fullshard.comm import messages, tree
from fullshard.comm.host_group import HostGroup, new_group
from fullshard.comm.tags import OpTag
from fullshard.comm.tree import Chain, Tree
from fullshard.errors import RankMismatch

RANKS = 5  # with groups of two: three levels, and a rank that is alone in its lowest group
TAG = OpTag("agreement", "between steps", 0)


def _group_over_small_groups() -> HostGroup:
    rank, members = dist.get_rank(), list(range(RANKS))
    group = HostGroup(members, "test", use_default=True)
    levels = tree.levels(members, rank, lambda ranks: new_group(ranks, backend="gloo"), fan=2)
    group._tree = Tree(levels)
    return group


def _value(rank: int, case: str) -> Any:
    return {
        "equal": {"seed": 3},
        "short": ("rank", rank),
        "long": bytes([rank]) * (3000 * rank),
        "one is long": bytes(200_000) if rank == 3 else None,
        "the first is long": "x" * 100_000 if rank == 0 else rank,
        "neighbours are equal": torch.arange(300) + rank // 2,
    }[case]


CASES = ["equal", "short", "long", "one is long", "the first is long", "neighbours are equal"]


def _exchanges() -> dict[str, Any]:
    group, rank = _group_over_small_groups(), dist.get_rank()
    sent: dict[str, Any] = {"levels": [(level.members, level.place) for level in group._tree.levels]}
    for case in CASES:
        sent[f"all {case}"] = group.all_gather_object(_value(rank, case), TAG)
        sent[f"first {case}"] = group.gather_object(_value(rank, case), TAG)
        sent[f"from first {case}"] = group.broadcast_object(_value(rank, case), TAG)
    sent["ints"] = group.all_gather_ints(torch.tensor([rank // 3, 2**62 - rank]), TAG)
    sent["no ints"] = group.all_gather_ints(torch.tensor([], dtype=torch.int64), TAG).shape
    values = torch.full((1000,), rank, dtype=torch.uint8)
    group.broadcast(values, TAG)
    sent["values"] = values
    sent["errors"] = []
    for tag in (OpTag("agreement", "save", 0) if rank == 3 else TAG, TAG):
        try:
            group.all_gather_object("x", tag)
        except RankMismatch as error:
            sent["errors"].append(str(error))
    return sent


def test_every_exchange_gives_every_rank_what_one_large_group_would() -> None:
    by_rank = ranks.run(_exchanges, RANKS, init=True, timeout_s=60)
    assert [sent["levels"] for sent in by_rank] == [
        [([0, 1], 0), ([0, 2], 0), ([0, 4], 0)],
        [([0, 1], 1)],
        [([2, 3], 0), ([0, 2], 1)],
        [([2, 3], 1)],
        [([0, 4], 1)],
    ]
    for rank, sent in enumerate(by_rank):
        for case in CASES:
            expected = [_value(r, case) for r in range(RANKS)]
            assert _same(sent[f"all {case}"], expected)
            assert _same(sent[f"first {case}"], expected) if rank == 0 else sent[f"first {case}"] is None
            assert _same([sent[f"from first {case}"]], expected[:1])
        assert sent["ints"].tolist() == [[r // 3, 2**62 - r] for r in range(RANKS)]
        assert sent["no ints"] == (RANKS, 0)
        assert not sent["values"].any()
        # One rank was in another operation: an error on all, which names it; the next agreement works again.
        [error] = sent["errors"]
        assert "rank 3: in agreement (save" in error
        assert "rank 2: in agreement (between steps" in error


def _same(values: list[Any], expected: list[Any]) -> bool:
    return [messages.encode(value) for value in values] == [messages.encode(value) for value in expected]


class _Recorded:
    """A gloo group that notes how many bytes this rank receives."""

    def __init__(self, group: Any) -> None:
        self._group, self.received = group, 0

    def _allgather_base(self, full: torch.Tensor, own: torch.Tensor) -> Any:
        self.received += full.numel()
        return self._group._allgather_base(full, own)

    def alltoall_base(self, received: torch.Tensor, *rest: Any) -> Any:
        self.received += received.numel()
        return self._group.alltoall_base(received, *rest)

    def broadcast(self, values: torch.Tensor, source: int) -> Any:
        self.received += values.numel()
        return self._group.broadcast(values, source)


def _bytes_received(where: str) -> int:
    members, rank = [0, 1, 2], dist.get_rank()
    recorded: list[_Recorded] = []

    def create(among: list[int]) -> _Recorded:
        recorded.append(_Recorded(new_group(among, backend="gloo")))
        return recorded[-1]

    carrier = Tree(tree.levels(members, rank, create))
    content = tree.run_of(bytes(1_000_000) if rank == 1 else b"")
    chain = Chain(carrier.exchange(tree.label_of("x"), content, tree.join_runs, where == "everywhere"))
    chain.wait()
    return sum(group.received for group in recorded)


@pytest.mark.parametrize("where", ["everywhere", "on the first"])
def test_a_large_value_of_one_rank_travels_once_and_only_where_it_is_needed(where: str) -> None:
    first, *others = ranks.run(_bytes_received, 3, where, init=True, timeout_s=60)
    assert 1_000_000 < first < (2_010_000 if where == "everywhere" else 1_010_000)
    assert all((1_000_000 < b < 1_010_000) if where == "everywhere" else b < 10_000 for b in others)


def _groups_of_models() -> tuple[list[int], list[list[float]]]:
    import fullshard as fs

    def grown() -> int:
        for _ in range(2):  # the first frees the graph, which holds the model
            gc.collect()
        counts.append(len(dist.distributed_c10d._world.pg_map))
        return counts[-1]

    rank = dist.get_rank()
    counts, values = [], []
    kept = None  # on one rank its model is not gone, so neither may use its groups again
    for step in range(5):
        torch.manual_seed(step)
        model = fs.shard(nn.Linear(4, 4), strategy="zero2" if step % 2 else "zero3")
        model(torch.ones(2, 4) * (rank + 1)).sum().backward()
        if step == 1 and rank == 0:
            kept = model
        with fs.full(model):
            values.append([float(p.detach().sum()) for p in model.parameters()])
        values[-1] += [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
        del model
        grown()
    assert (kept is not None) == (rank == 0)
    return counts, values


def _groups_of_many_models() -> list[int]:
    import fullshard as fs

    counts = []
    for _ in range(12):
        model = fs.shard(nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


def test_many_models_in_turn_keep_a_bounded_number_of_groups() -> None:
    for counts in ranks.run(_groups_of_many_models, 2, init=True, timeout_s=60):
        assert counts[-1] <= counts[0] + 2 * 4


def test_models_of_one_process_share_groups_and_take_over_those_of_models_that_are_gone() -> None:
    (first, values), (second, _) = ranks.run(_groups_of_models, 2, init=True, timeout_s=60)
    gather_and_reduce = 2
    assert first == second
    assert first[1] == first[0]
    # A set for the model that is kept; the monitor may hold the frames of a slow rank while its model goes.
    assert first[0] < first[-1] <= first[0] + 2 * gather_and_reduce
    for step, found in enumerate(values):
        torch.manual_seed(step)
        expected = [float(p.detach().sum()) for p in nn.Linear(4, 4).parameters()]
        assert found == [*expected, 16 * (2 + 4) / 2, 4 * 2]


def test_connections_per_rank_grow_with_the_logarithm_of_the_ranks() -> None:
    for count, most in ((8, 7), (16, 8), (1024, 22), (10_000, 30)):
        members = list(range(count))
        for rank in (0, 1, count // 2, count - 1):
            found = tree.levels(members, rank, lambda ranks: ranks)
            assert sum(len(level.members) - 1 for level in found) <= most
            assert all(rank in level.members for level in found)
