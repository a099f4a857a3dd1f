"""Ranks of several nodes: messages inside a node and between nodes, and the numbers of one process."""

from __future__ import annotations

import itertools
import os
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn

import engines
import ranks
import reference
from reference import Trace

STRATEGIES = ("zero3", "zero2", "zero1", "replicate", "hybrid")


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
    }
    return own.get(name, name)


def _train(model: nn.Module, **options: Any) -> Trace:
    rank, kinds = engines.my_rank(), dict(options)
    accumulate, clip = kinds.pop("accumulate", 1), kinds.pop("clip", 0.1)
    kinds["precision"] = _precision(kinds.get("precision", "fp32"))
    engines.shard_blocks(model, **kinds)
    steps = engines.STEPS
    mine = [engines.batch(step, rank) for step in range(steps * accumulate)]
    return reference.train_rank(model, mine, engines.loss_of, reference.adamw, steps, clip, accumulate)


def _traces(sizes: list[int], cases: list[dict[str, Any]]) -> list[Trace]:
    be_on_nodes(sizes)
    found = []
    for case in cases:
        found.append(_train(engines.build(), **case))
        ranks.end_groups_of_models()
    return found


@lru_cache
def _expected(num_ranks: int, accumulate: int = 1, clip: float | None = 0.1) -> Trace:
    batches = engines.batches(num_ranks, engines.STEPS * accumulate)
    return reference.train(
        engines.build(), batches, engines.loss_of, reference.adamw, engines.STEPS, clip, accumulate
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
    {"strategy": "zero3", "prefetch": False},
    {"strategy": "zero3", "checkpoint_activations": True},
    {"strategy": "zero3", "reduce": "scatter"},
    # Clipping adds up norms of shards, and these are others with hybrid.
    {"strategy": "zero3", "clip": None},
    {"strategy": "hybrid", "clip": None},
    *({"strategy": strategy, "accumulate": 3} for strategy in STRATEGIES),
]


@pytest.mark.parametrize("sizes", [[2, 2], pytest.param([2, 2, 2], marks=pytest.mark.long), [2, 1]])
def test_every_strategy_trains_on_nodes_as_one_process_does(sizes: list[int]) -> None:
    cases = [case for case in FP32 if sizes != [2, 1] or case["strategy"] != "hybrid"]
    found = _combined(ranks.run(_traces, sum(sizes), sizes, cases, init=True))
    first: dict[float | None, Trace] = {}
    for case, trace in zip(cases, found, strict=True):
        clip = case.get("clip", 0.1)
        expected = _expected(sum(sizes), case.get("accumulate", 1), clip)
        reference.assert_close_trace(trace, expected, rtol=2e-5, atol=2e-6)
        same_order = "accumulate" not in case and "reduce" not in case
        if same_order and (case["strategy"] != "hybrid" or clip is None):
            assert _same(trace, first.setdefault(clip, trace)), case


LOW: list[dict[str, Any]] = [
    *({"strategy": s, "precision": p} for p in ("bf16", "8-bit", "8-bit gradients") for s in STRATEGIES),
]


def test_low_precision_repeats_itself_and_is_the_same_for_strategies() -> None:
    found = _combined(ranks.run(_traces, 4, [2, 2], [*LOW, LOW[0], LOW[9], LOW[14]], init=True))
    by_case = {(case["precision"], case["strategy"]): trace for case, trace in zip(LOW, found, strict=False)}
    for again, trace in zip((LOW[0], LOW[9], LOW[14]), found[-3:], strict=True):
        assert _same(trace, by_case[again["precision"], again["strategy"]]), again
    expected = _expected(4)
    for (precision, strategy), trace in by_case.items():
        reference.assert_close_trace(trace, expected, rtol=0.05, atol=0.1)
        gathers_alike = precision != "8-bit" or strategy not in ("replicate", "hybrid")
        if strategy != "hybrid" and gathers_alike:
            assert _same(trace, by_case[precision, "zero3"]), (precision, strategy)
