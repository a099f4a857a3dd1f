"""Ranks of several nodes: messages inside a node and between nodes, and the numbers of one process."""

from __future__ import annotations

import copy
import itertools
import os
import random
import time
from collections import Counter
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import engines
import ranks
import reference
from fullshard.comm.watchdog import Operation
from fullshard.errors import OptionError
from reference import Trace

STRATEGIES = ("zero3", "zero2", "zero1", "replicate", "hybrid")
STEPS = 2  # the first one learns the order in which units are needed


def be_on_nodes(sizes: list[int], interleaved: bool = False) -> None:
    """What a launcher sets for this rank on nodes with so many ranks each."""
    rank = engines.my_rank()
    if interleaved:
        os.environ.update(LOCAL_RANK=str(rank // len(sizes)), LOCAL_WORLD_SIZE=str(sizes[0]))
        return
    starts = [0, *itertools.accumulate(sizes)]
    node = next(node for node, start in enumerate(starts[1:]) if rank < start)
    os.environ.update(LOCAL_RANK=str(rank - starts[node]), LOCAL_WORLD_SIZE=str(sizes[node]))


def _precision(name: str) -> Any:
    import fullshard as fs

    own = {
        "8-bit": fs.Precision(compute=torch.bfloat16, gather=torch.int8, wire=torch.int8),
        "8-bit gradients": fs.Precision(wire=torch.int8),
        "8-bit across": fs.Precision(compute=torch.bfloat16, across=torch.int8),
        "bf16 across": fs.Precision(across=torch.bfloat16),
        "all in 8 bits across": fs.Precision(across=torch.int8, error_feedback=False),
    }
    return own.get(name, name)


def _train(model: nn.Module, **options: Any) -> Trace:
    rank, kinds = engines.my_rank(), dict(options)
    accumulate, clip = kinds.pop("accumulate", 1), kinds.pop("clip", 0.1)
    kinds["precision"] = _precision(kinds.get("precision", "fp32"))
    copied = kinds.pop("copied", False)
    engines.shard_blocks(model, **kinds)
    model = copy.deepcopy(model) if copied else model
    mine = [engines.batch(step, rank) for step in range(STEPS * accumulate)]
    return reference.train_rank(model, mine, engines.loss_of, reference.adamw, STEPS, clip, accumulate)


def _traces(sizes: list[int], cases: list[dict[str, Any]]) -> list[Trace]:
    be_on_nodes(sizes)
    found = []
    for case in cases:
        found.append(_train(engines.build(), **case))
        ranks.end_groups_of_models()
    return found


@lru_cache
def _expected(num_ranks: int, accumulate: int = 1, clip: float | None = 0.1) -> Trace:
    batches = engines.batches(num_ranks, STEPS * accumulate)
    return reference.train(
        engines.build(), batches, engines.loss_of, reference.adamw, STEPS, clip, accumulate
    )


def _combined(found: list[list[Trace]]) -> list[Trace]:
    """By case."""
    return [reference.combine(traces) for traces in zip(*found, strict=True)]


def _same(a: Trace, b: Trace) -> bool:
    return all(reference.bitwise(value, b.parameters[name]) for name, value in a.parameters.items())


FP32: list[dict[str, Any]] = [
    *({"strategy": strategy} for strategy in STRATEGIES),
    {"strategy": "zero3"},
    {"strategy": "zero3", "keep_full": 0},
    {"strategy": "zero3", "keep_full": 0, "keep_node": 0},
    {"strategy": "zero3", "keep_full": 0, "keep_node": 2000},
    {"strategy": "zero3", "keep_node": "all", "prefetch": False, "keep_full": 0},
    {"strategy": "zero3", "offload": "host", "keep_full": 0, "keep_node": "all"},
    {"strategy": "zero3", "copied": True},
    {"strategy": "zero3", "checkpoint_activations": True},
    {"strategy": "zero3", "reduce": "scatter"},
    # Clipping adds up norms of shards, and these are others with hybrid.
    {"strategy": "zero3", "clip": None},
    {"strategy": "hybrid", "clip": None},
    *({"strategy": strategy, "accumulate": 2} for strategy in STRATEGIES),
]


def _cases(sizes: list[int]) -> list[dict[str, Any]]:
    """Uneven nodes are one: what concerns nodes has no effect there, and the rest is in `test_numbers`."""
    if sizes != [2, 1]:
        return FP32
    return [c for c in FP32 if c["strategy"] != "hybrid" and (len(c) == 1 or "keep_node" in c)]


@pytest.mark.parametrize("sizes", [[2, 2], pytest.param([2, 2, 2], marks=pytest.mark.long), [2, 1]])
def test_every_strategy_trains_on_nodes_as_one_process_does(sizes: list[int]) -> None:
    cases = _cases(sizes)
    found = _combined(ranks.run(_traces, sum(sizes), sizes, cases, init=True))
    first: dict[float | None, Trace] = {}
    for case, trace in zip(cases, found, strict=True):
        clip = case.get("clip", 0.1)
        expected = _expected(sum(sizes), case.get("accumulate", 1), clip)
        reference.assert_close_trace(trace, expected, rtol=2e-5, atol=2e-6)
        same_order = "accumulate" not in case and "reduce" not in case
        if same_order and (case["strategy"] != "hybrid" or clip is None):
            assert _same(trace, first.setdefault(clip, trace)), case


ONE = ("8-bit", "8-bit gradients", "bf16")  # for all strategies
LOW: list[dict[str, Any]] = [
    *({"strategy": s, "precision": p} for p in ONE for s in STRATEGIES),
    *(
        {"strategy": s, "precision": p, "keep_full": 0, "keep_node": keep}
        for p in ("8-bit", "8-bit across", "bf16 across", "all in 8 bits across")
        for s, keep in (
            ("zero3", "all"),
            ("zero3", 0),
            ("zero2", None),
            ("replicate", None),
            ("hybrid", None),
        )
        if p != "8-bit" or s == "zero3"  # others keep nothing
    ),
    {"strategy": "zero3", "precision": "8-bit across", "keep_full": 0, "keep_node": "all"},
    {"strategy": "hybrid", "precision": "8-bit across", "keep_full": 0},
    {"strategy": "zero2", "precision": "8-bit"},
    # Sums go back to replicas as they are; clipping adds up norms of other shards there.
    {"strategy": "zero3", "precision": "bf16", "clip": None},
    {"strategy": "hybrid", "precision": "bf16", "clip": None},
]


def test_low_precision_repeats_itself_and_is_the_same_for_strategies() -> None:
    found = _combined(ranks.run(_traces, 4, [2, 2], LOW, init=True))
    first: dict[Any, Trace] = {}
    for case, trace in zip(LOW, found, strict=True):
        clip = case.get("clip", 0.1)
        reference.assert_close_trace(trace, _expected(4, clip=clip), rtol=0.05, atol=0.1)
        precision, strategy = case["precision"], case["strategy"]
        # Replicated values are not gathered, and so not rounded; those of replicas are inside the node.
        apart = precision not in ("bf16", "8-bit gradients", "bf16 across") and strategy == "replicate"
        apart = apart or (strategy == "hybrid" and clip is not None)
        key = (precision, strategy, clip) if apart else (precision, clip)
        assert _same(trace, first.setdefault(key, trace)), case


def _count(begin: Any, sent: Counter[str], channel: str, phase: str, unit: str, step: int) -> int:
    if step == 2:
        sent[f"{channel}, {phase}"] += 1
    return int(begin(channel, phase, unit, step))


def _crossings(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    import fullshard as fs

    be_on_nodes([2, 2])
    found = []
    for case in cases:
        accumulate, options = case.get("accumulate", 1), {k: v for k, v in case.items() if k != "accumulate"}
        model = engines.shard_blocks(engines.build(), **options)
        recorder, sent = model._fullshard.comm.recorder, Counter[str]()
        recorder.begin = partial(_count, recorder.begin, sent)
        mine = [engines.batch(step, engines.my_rank()) for step in range(3 * accumulate)]
        reference.train_rank(model, mine, engines.loss_of, reference.adamw, 3, None, accumulate)
        kept = sum(p.numel() for p in model.parameters())
        plan = fs.plan(model)
        found.append({"sent": sent, "kept": kept, "units": len(plan.units), "text": str(plan)})
        found[-1]["crossings"] = sum(plan.schedule.crossings)
        ranks.end_groups_of_models()
    return found


def test_what_a_rank_keeps_for_backward_is_not_gathered_between_nodes_again() -> None:
    cases: list[dict[str, Any]] = [
        {"keep_full": 0, "keep_node": "all"},
        {"keep_full": 0, "keep_node": 0},
        {"strategy": "zero2"},
        {"keep_full": 0, "keep_node": "all", "accumulate": 3},
        {"keep_full": 0, "keep_node": 0, "accumulate": 3},
    ]
    found = ranks.run(_crossings, 4, cases, init=True)
    whole = sum(p.numel() for p in engines.build().parameters())
    for case, *by_rank in zip(cases, *found, strict=True):
        assert sum(rank["kept"] for rank in by_rank) == whole, "each element is on one rank"
        for rank in by_rank:
            units, sent, passes = rank["units"], rank["sent"], case.get("accumulate", 1)
            again = units - 1 if case.get("keep_full") == 0 else 0  # the root stays full
            kept = again if case.get("keep_node") == "all" else 0  # from forward to backward, and to the next
            assert sent["gather, forward"] == passes * units
            assert sent["gather across, forward"] == units + (passes - 1) * (units - kept)
            assert sent.get("gather, backward", 0) == passes * again
            assert sent.get("gather across, backward", 0) == passes * (again - kept)
            assert rank["crossings"] == units + again - kept
            assert ("node copy" in rank["text"]) == (case.get("keep_node") == "all")
            assert "on 2 nodes" in rank["text"]
            assert sent["reduce across, backward"] == passes * units


class _Skipping(engines.Net):
    """Ranks take different paths: the sign of the first element decides which blocks are called."""

    def __init__(self) -> None:
        super().__init__(num_blocks=12)

    def forward(self, x: Tensor) -> Tensor:
        skipped = (1, 4, 5, 6, 10, 11) if x[0, 0] > 0 else (0, 2, 3, 7, 8, 9)
        for index, layer in enumerate(self.blocks):
            if index not in skipped:
                x = x + layer(x)
        out: Tensor = self.head(x)
        return out


def _marked(step: int, rank: int, from_step: int) -> tuple[Tensor, Tensor]:
    return engines.marked(engines.batch(step, rank), (step + rank) % 3 == 0 and step >= from_step)


def _paths(sizes: list[int], cases: list[dict[str, Any]], from_step: int) -> list[Trace]:
    be_on_nodes(sizes)
    found = []
    for case in cases:
        case = dict(case)
        accumulate = case.pop("accumulate", 1)
        model = engines.shard_blocks(engines.build(_Skipping), **case)
        mine = [_marked(step, engines.my_rank(), from_step) for step in range(engines.STEPS * accumulate)]
        found.append(
            reference.train_rank(
                model, mine, engines.loss_of, reference.adamw, engines.STEPS, 0.1, accumulate
            )
        )
        ranks.end_groups_of_models()
    return found


def _paths_over_slow_links(cases: list[dict[str, Any]], from_step: int) -> list[Trace]:
    """Nothing that was sent has arrived before it is waited for."""
    with mock.patch.object(Operation, "over", return_value=False):
        return _paths([2, 2], cases, from_step)


def _expected_paths(from_step: int, accumulate: int = 1) -> Trace:
    steps = range(engines.STEPS * accumulate)
    return reference.train(
        engines.build(_Skipping),
        [[_marked(step, rank, from_step) for rank in range(4)] for step in steps],
        engines.loss_of,
        reference.adamw,
        engines.STEPS,
        0.1,
        accumulate,
    )


@pytest.mark.parametrize("from_step", [0, 1])
def test_ranks_of_nodes_may_take_different_paths(from_step: int) -> None:
    cases: list[dict[str, Any]] = [
        {"strategy": "zero3", "keep_full": 0},
        {"strategy": "zero3", "keep_full": 0, "keep_node": 0},
        {"strategy": "zero2"},
        {"strategy": "hybrid"},
    ]
    expected = _expected_paths(from_step)
    for trace in _combined(ranks.run(_paths, 4, [2, 2], cases, from_step, init=True)):
        reference.assert_close_trace(trace, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("from_step", [0, 1])
def test_ranks_on_different_paths_do_not_wait_in_a_circle_however_late_messages_are(from_step: int) -> None:
    cases: list[dict[str, Any]] = [
        {"strategy": "zero2"},
        {"strategy": "zero2", "accumulate": 3},
        {"strategy": "zero1", "accumulate": 3},
        {"strategy": "zero3"},
        {"strategy": "zero3", "keep_full": 0},
        {"strategy": "zero3", "keep_full": "all", "accumulate": 3},
    ]
    found = ranks.run(_paths_over_slow_links, 4, cases, from_step, init=True)
    for case, trace in zip(cases, _combined(found), strict=True):
        expected = _expected_paths(from_step, case.get("accumulate", 1))
        reference.assert_close_trace(trace, expected, rtol=2e-5, atol=2e-6)


def _arranged(sizes: list[int], interleaved: bool, variables: dict[str, str]) -> tuple[int, str, str]:
    import fullshard as fs

    be_on_nodes(sizes, interleaved)
    os.environ.update(variables)
    plan = fs.plan(engines.shard_blocks(engines.build()))
    return plan.nodes, plan.why_flat, str(plan)


@pytest.mark.parametrize(
    ("sizes", "interleaved", "expected", "why"),
    [
        ([2, 2], False, 2, ""),
        ([2, 1], False, 1, "nodes of 2 and 1 ranks"),
        ([2, 2], True, 1, "not numbered one after the other"),
        ([1, 1], False, 1, ""),
        ([3], False, 1, ""),
    ],
)
def test_nodes_are_those_of_the_launcher(
    sizes: list[int], interleaved: bool, expected: int, why: str
) -> None:
    for nodes, reason, text in ranks.run(_arranged, sum(sizes), sizes, interleaved, {}, init=True):
        assert nodes == expected
        assert why in reason
        assert why in text
        assert (f"on {expected} nodes" in text) == (expected > 1)


def _shard_as(
    sizes: list[int], interleaved: bool, variables: dict[int, dict[str, str]], options: dict[str, Any]
) -> None:
    be_on_nodes(sizes, interleaved)
    os.environ.update(variables.get(engines.my_rank(), {}))
    engines.shard_blocks(engines.build(), **options)


@pytest.mark.parametrize(
    ("sizes", "interleaved", "why"),
    [
        ([2, 1, 1], False, "nodes of 2 and 1 ranks"),
        ([2, 1], False, "nodes of 2 and 1 ranks"),
        ([2, 2], True, "not numbered one after the other"),
    ],
)
def test_hybrid_without_a_mesh_is_refused_on_nodes_that_are_no_equal_groups(
    sizes: list[int], interleaved: bool, why: str
) -> None:
    options = {"strategy": "hybrid"}
    for message in engines.refusals(
        _shard_as, sizes, interleaved, {}, options, num_ranks=sum(sizes), init=True
    ):
        assert why in message
        assert "Pass a mesh" in message


@pytest.mark.parametrize("strategy", ["zero3", "hybrid"])
@pytest.mark.parametrize("value", ["0", "nan", "1.5", "two"])
def test_a_wrong_number_of_local_ranks_on_one_rank_is_an_error_on_all(strategy: str, value: str) -> None:
    wrong = {1: {"LOCAL_WORLD_SIZE": value}}
    options = {"strategy": strategy}
    for message in engines.refusals(_shard_as, [2, 1], False, wrong, options, num_ranks=3, init=True):
        assert "LOCAL_WORLD_SIZE" in message
        assert value in message


def _in_mesh(rows: list[list[int]]) -> tuple[int, str]:
    from torch.distributed.device_mesh import DeviceMesh

    import fullshard as fs

    be_on_nodes([2, 2])
    mesh = DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("node", "shard"))
    plan = fs.plan(engines.shard_blocks(engines.build(), mesh=mesh))
    return plan.nodes, plan.why_flat


@pytest.mark.parametrize(
    ("rows", "nodes"), [([[0, 1, 2, 3]], 1), ([[0], [1], [2], [3]], 1), ([[0, 2], [1, 3]], 2)]
)
def test_a_mesh_that_names_its_nodes_is_right_whatever_the_launcher_has(
    rows: list[list[int]], nodes: int
) -> None:
    assert ranks.run(_in_mesh, 4, rows, init=True) == [(nodes, "")] * 4


def _beside_an_outsider() -> str:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("node", "shard"))
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        model = engines.shard_blocks(engines.build(), mesh=mesh)
    except OptionError as error:
        store.set("refused", "")
        return str(error)
    engines.loss_of(model, engines.batch(0, engines.my_rank())).backward()
    store.wait(["refused"], timedelta(seconds=20))
    return ""


def test_a_rank_outside_the_mesh_is_refused_while_the_others_train() -> None:
    *inside, outside = ranks.run(_beside_an_outsider, 3, init=True)
    assert inside == ["", ""]
    assert "does not contain rank 2" in outside


def test_a_plan_of_hybrid_on_nodes_that_do_not_divide_the_ranks_is_refused() -> None:
    import fullshard as fs

    with pytest.raises(OptionError, match="3 ranks on nodes of 2"):
        fs.plan(engines.build(), ranks=3, node_ranks=2, strategy="hybrid")


def _uneven_batches(strategy: str) -> Trace:
    import fullshard as fs

    be_on_nodes([2, 2])
    rank = engines.my_rank()
    model = engines.shard_blocks(engines.build(), strategy=strategy)
    optimizer = reference.adamw(model.parameters())
    for piece in fs.even_batches([engines.batch(step, rank) for step in range(2 + (rank != 1))], model):
        engines.loss_of(model, piece).backward()
        optimizer.step()
        optimizer.zero_grad()
    with fs.full(model, writeback=False):
        return Trace([], [], reference.whole_parameters(model))


@pytest.mark.parametrize("strategy", ["zero3", "hybrid"])
def test_ranks_of_nodes_may_run_out_of_batches(strategy: str) -> None:
    model = engines.build()
    optimizer = reference.adamw(model.parameters())
    for step in range(3):
        pieces = [engines.batch(step, rank) for rank in range(4) if step < 2 or rank != 1]
        for piece in pieces:
            (engines.loss_of(model, piece) / len(pieces)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = reference.combine(ranks.run(_uneven_batches, 4, strategy, init=True))
    expected = Trace([], [], reference.whole_parameters(model))
    reference.assert_close_trace(found, expected, rtol=2e-5, atol=2e-6)


def _lagging(strategy: str) -> list[float]:
    """Blocks of backward take a random time, another one on each rank."""
    import fullshard as fs

    be_on_nodes([2, 2])
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(14)))
    fs.shard(model, strategy=strategy, merge_units=0, keep_full=0, units=nn.Sequential)
    lags = random.Random(engines.my_rank())
    for block in model:
        block.register_full_backward_hook(lambda *_: time.sleep(lags.choice((0, 0, 0.002, 0.01))))
    losses = []
    for step in range(6):
        torch.manual_seed(10 * step + engines.my_rank())
        loss = model(torch.randn(4, 32, requires_grad=True)).square().mean()
        loss.backward()
        losses.append(loss.item())
        model.zero_grad()
    ranks.end_groups_of_models()
    return losses


def _all_lagging() -> list[list[float]]:
    return [_lagging(strategy) for strategy in ("hybrid", "zero3", "zero2", "replicate")]


@pytest.mark.long
def test_ranks_that_lag_at_random_do_not_wait_in_a_circle() -> None:
    for found in ranks.run(_all_lagging, 4, init=True):
        assert all(losses == found[0] for losses in found)
