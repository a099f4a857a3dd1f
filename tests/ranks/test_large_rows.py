"""Large rows over gloo: cut into messages, they bring the same bits as one collective."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_nodes import be_on_nodes
from torch import nn

import engines
import ranks
import reference
from fullshard.comm import gloo_rows

STEPS = 2
HIDDEN = 20_000  # rows of bf16 that go between two nodes of two ranks are still cut


class Wide(engines.Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(engines.WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, engines.WIDTH))
            for _ in range(2)
        )


def _trace(cut: bool, **options: Any) -> tuple[reference.Trace, int]:
    """What a training comes to, and in how many operations rows were cut."""
    made = 0
    cuts, exchange = gloo_rows.cuts, gloo_rows.exchange

    def counted(*args: Any) -> gloo_rows.Messages:
        nonlocal made
        made += 1
        return exchange(*args)

    gloo_rows.exchange = counted
    if not cut:
        gloo_rows.cuts = lambda row_bytes, ranks: []
    try:
        model = engines.shard_blocks(engines.build(Wide), **options)
        mine = [engines.batch(step, engines.my_rank()) for step in range(STEPS)]
        trace = reference.train_rank(model, mine, engines.loss_of, reference.adamw, STEPS, clip=0.1)
    finally:
        gloo_rows.cuts, gloo_rows.exchange = cuts, exchange
    return trace, made


def _train_both_ways(sizes: list[int], cases: list[dict[str, Any]]) -> list[Any]:
    be_on_nodes(sizes)
    return [[_trace(cut, **case) for cut in (True, False)] for case in cases]


CASES: list[dict[str, Any]] = [
    {"strategy": "zero3"},
    {"strategy": "replicate"},
    {"strategy": "zero2", "precision": "bf16"},
]


@pytest.mark.parametrize("sizes", [[1, 1], [2, 1], [2, 2]], ids=str)
def test_training_has_the_same_bits_and_the_numbers_of_one_process(sizes: list[int]) -> None:
    cases = [*CASES, {"strategy": "hybrid"}] if sizes == [2, 2] else CASES
    found = ranks.run(_train_both_ways, sum(sizes), sizes, cases, init=True)
    batches = engines.batches(sum(sizes), STEPS)
    one_process = reference.train(
        engines.build(Wide), batches, engines.loss_of, reference.adamw, STEPS, clip=0.1
    )
    for number, case in enumerate(cases):
        cut, entire = ([rank[number][way] for rank in found] for way in (0, 1))
        assert all(made > 0 for _, made in cut), case
        assert not any(made for _, made in entire), case
        trace, same = (reference.combine([trace for trace, _ in way]) for way in (cut, entire))
        assert trace.losses == same.losses
        assert all(
            reference.bitwise(value, same.parameters[name]) for name, value in trace.parameters.items()
        )
        if case.get("precision") is None:
            reference.assert_close_trace(trace, one_process, rtol=2e-5, atol=2e-6)


def test_rows_inside_a_node_are_not_cut() -> None:
    for [[(_, made), _]] in ranks.run(_train_both_ways, 2, [2], CASES[:1], init=True):
        assert made == 0


def _exchange() -> list[bool]:
    """Directly, where every byte shows who sent it to whom; twice, over the group of all ranks."""
    rank, count, size = dist.get_rank(), dist.get_world_size(), 2**18 + 3
    right = []
    for step in range(2):
        sent = torch.stack(
            [torch.full((size,), 16 * step + 4 * rank + to, dtype=torch.uint8) for to in range(count)]
        )
        received = torch.zeros_like(sent)
        pieces = gloo_rows.cuts(size, count)
        works = gloo_rows.exchange(dist.group.WORLD, rank, received, list(sent), pieces)
        works.wait()
        assert works.is_completed()
        expected = [16 * step + 4 * source + rank if source != rank else 0 for source in range(count)]
        right += [bool((row == value).all()) for row, value in zip(received, expected, strict=True)]
    return right


@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_row_arrives_where_it_was_sent(count: int) -> None:
    for right in ranks.run(_exchange, count, init=True):
        assert all(right)


def _lose_a_rank() -> str:
    import fullshard as fs

    be_on_nodes([1, 1])
    model = fs.shard(Wide(), keep_full=0, merge_units=0)
    loss = engines.loss_of(model, engines.batch(0, 0))
    store = dist.distributed_c10d._get_default_store()
    if engines.my_rank() == 1:
        store.wait(["forward is over"])  # not before: the other rank needs this one for it
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("forward is over", "")
    begun = time.monotonic()
    with pytest.raises(fs.FullshardError) as raised:
        loss.backward()
    assert time.monotonic() - begun < 200  # seconds on an idle machine, and no stall of ten minutes
    return str(raised.value)


def test_a_rank_that_is_lost_while_rows_are_in_flight_is_named() -> None:
    result = ranks.outcome(_lose_a_rank, 2, init=True, fresh=True)
    assert "rank 1" in result.values[0]
