"""`fs.shard(model)` alone, no names given, trains every family with the numbers of one process.

These models are so small that each is one unit by default. So they train twice: as a user gets it, and with a
unit per block, which shows that blocks, ties and experts of every family are found from its structure.
"""

from __future__ import annotations

from typing import Any

import pytest

import ranks
import reference
import tables
import zoo
from engines import BLOCKS
from reference import Trace
from zoo import FAMILIES

STEPS = 3
DEFAULTS: dict[str, Any] = {}
CLIP = 0.5  # below the usual gradient norm, so that clipping takes part


def _batch_of(name: str, step: int, rank: int) -> object:
    return FAMILIES[name].batch(2 * step + rank)


def _train_on_rank(name: str, strategy: str, options: dict[str, Any]) -> Trace:
    import os

    import fullshard as fs

    family = FAMILIES[name]
    rank = int(os.environ["RANK"])
    model = fs.shard(zoo.build(family), strategy=strategy, **options)
    batches = [_batch_of(name, step, rank) for step in range(STEPS)]
    return reference.train_rank(model, batches, family.loss, reference.adamw, STEPS, clip=CLIP)


def _check(name: str, num_ranks: int, strategy: str = "zero3", *ways: dict[str, Any]) -> None:
    family = FAMILIES[name]
    batches = [[_batch_of(name, step, rank) for rank in range(num_ranks)] for step in range(STEPS)]
    expected = reference.train(zoo.build(family), batches, family.loss, reference.adamw, STEPS, clip=CLIP)
    for options in ways or (BLOCKS,):
        traces = ranks.run(_train_on_rank, num_ranks, name, strategy, options, timeout_s=45)
        reference.assert_close_trace(reference.combine(traces), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_sharded_on_two_ranks_trains_as_one_process_does(name: str) -> None:
    _check(name, 2, "zero3", DEFAULTS, BLOCKS)


@tables.some(
    "name",
    ["llama", "gpt2_tied", "experts_skipped", "resnet_batchnorm", "lora"],
    *("experts_skipped", "resnet_batchnorm"),  # whose ranks take other paths, and have buffers
)
def test_family_sharded_on_three_ranks_trains_as_one_process_does(name: str) -> None:
    _check(name, 3)


@tables.in_turn(("strategy", "name"), ["replicate", "zero1", "zero2"], ["experts_skipped", "gpt2_tied"])
def test_family_under_every_strategy_trains_as_one_process_does(name: str, strategy: str) -> None:
    _check(name, 2, strategy)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_the_same_for_the_same_seed(name: str) -> None:
    family = FAMILIES[name]
    first, second = zoo.build(family), zoo.build(family)
    for (label, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert reference.bitwise(a, b), label
    losses = [family.loss(model, family.batch(3)).item() for model in (first, second)]
    assert losses[0] == losses[1]


def test_mixtral_batches_leave_some_experts_without_tokens_on_odd_ranks() -> None:
    family = FAMILIES["mixtral"]
    used = []
    for seed in (0, 1):
        model = zoo.build(family)
        family.loss(model, family.batch(seed)).backward()
        gradient = model.get_parameter("model.layers.0.mlp.experts.down_proj").grad
        used.append(int((gradient.flatten(1).abs().sum(1) > 0).sum()))
    assert used[0] > used[1] == 2


def test_expert_list_batches_leave_whole_experts_uncalled_on_odd_ranks() -> None:
    family = FAMILIES["experts_skipped"]
    unused = []
    for seed in (0, 1):
        model = zoo.build(family)
        family.loss(model, family.batch(seed)).backward()
        unused.append({name for name, p in model.named_parameters() if p.grad is None})
    assert unused[1] - unused[0], "every expert that the odd batch skips is skipped by the even one too"
