"""Ranks whose optimizers do not do the same would train parts of one model in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from engines import HalfUsed, batch, build, loss_of, marked, my_rank, shard_blocks

STEPS = 6


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, each: Callable[[int], None]) -> str:
    import fullshard as fs

    try:
        for step in range(STEPS):
            loss_of(model, batch(step, my_rank())).backward()
            each(step)
            optimizer.zero_grad()
    except fs.FullshardError as error:
        return f"{type(error).__name__} in step {step}: {error}"
    return "nothing"


def _differing(what: str, strategy: str) -> str:
    import fullshard as fs

    model, second = fs.shard(build(), strategy=strategy), my_rank() == 1
    kind: Any = torch.optim.Adam if what == "class" and second else torch.optim.AdamW
    settings = {"betas": (0.8, 0.9)} if what == "betas" and second else {}
    optimizer = kind(model.parameters(), lr=0.02 if what == "rate" and second else 0.01, **settings)
    if what == "parameters" and second:
        optimizer = kind(list(model.parameters())[1:])

    def each(step: int) -> None:
        if what == "skipped" and second and step == 1:
            return
        if what == "twice" and second and step == 1:
            optimizer.step()
        if what == "late rate" and second and step == 2:
            optimizer.param_groups[0]["lr"] = 0.5
        if what == "gradients dropped" and second and step == 1:
            optimizer.zero_grad()
        if what == "a gradient dropped" and second and step == 3:
            next(model.parameters()).grad = None
        if what == "dropped in a closure":
            optimizer.step(lambda: optimizer.zero_grad() if second and step == 1 else None)  # type: ignore[arg-type]
        else:
            optimizer.step()

    return _loop(model, optimizer, each)


DIFFERENT = {
    "class": "classes of optimizers",
    "parameters": "classes of optimizers, or the parameters",
    "betas": "hyper-parameters",
    "rate": "learning rates",
    "late rate": "learning rates",
    "skipped": "rank 0: 1; rank 1: 0",
    "twice": "rank 0: 1; rank 1: 2",
    "gradients dropped": "parameters that have a gradient",
    "a gradient dropped": "parameters that have a gradient",
    "dropped in a closure": "parameters that have a gradient",
}


def _all_different(strategy: str) -> dict[str, str]:
    return {what: _differing(what, strategy) for what in DIFFERENT}


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_optimizers_that_differ_between_ranks_are_an_error_on_all_ranks(strategy: str) -> None:
    first, second = ranks.run(_all_different, 2, strategy)
    for what, part in DIFFERENT.items():
        for found in (first[what], second[what]):
            assert found.startswith("RankMismatch in step "), (what, found)
            assert part in found, (what, found)
        assert first[what].split(":")[0] == second[what].split(":")[0], "not at the same step"


def _alike() -> dict[str, str]:
    import fullshard as fs

    found = {}
    model = fs.shard(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)  # changes betas, too
    found["scheduler"] = _loop(model, optimizer, lambda _: (optimizer.step(), schedule.step()))  # type: ignore[arg-type,func-returns-value]

    model = fs.shard(build())
    rate = torch.tensor(0.01 * (1 + my_rank()))  # not read
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    found["tensor rate"] = _loop(model, optimizer, lambda _: optimizer.step())

    model = fs.shard(build())
    halves = list(model.parameters())[:3], list(model.parameters())[3:]
    pair = [torch.optim.SGD(half, lr=0.1) for half in halves]

    def both(step: int) -> None:
        pair[0].step()
        if step % 2:
            pair[1].step()

    found["two optimizers"] = _loop(model, pair[0], both)

    model = fs.shard(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def scaled(step: int) -> None:
        if step == 2 and my_rank() == 1:  # one rank's overflow skips the step on all
            next(p for p in model.parameters() if p.numel()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()

    found["scaler"] = _loop(model, optimizer, scaled)

    model = fs.shard(build(HalfUsed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(STEPS):
            loss_of(model, marked(batch(step, my_rank()), my_rank() == 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found["different paths"] = "nothing"
    except fs.FullshardError as error:
        found["different paths"] = str(error)

    model = shard_blocks(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = loss_of(model, batch(step, my_rank()))
        if my_rank() == 0:  # evaluates in some way of its own, after the forward that counts
            model.eval()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.train()
    found["evaluation after forward"] = "nothing"

    model = fs.shard(build(), strategy="zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with fs.accumulate(model):
            loss_of(model, batch(step, my_rank())).backward()
        loss_of(model, batch(step, my_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    found["accumulation"] = "nothing"
    return found


def test_steps_that_are_alike_raise_no_alarm() -> None:
    for found in ranks.run(_alike, 2):
        assert set(found.values()) == {"nothing"}, found


def _in_another_mode(part: str, strategy: str) -> tuple[str, bool]:
    """What is raised, and whether the step in which rank 1 evaluates has left the parameters as they were."""
    model = shard_blocks(build(), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before: list[torch.Tensor] = []

    def each(step: int) -> None:
        if step == 1 and my_rank() == 1:
            model.get_submodule(part).eval()
        before[:] = [p.detach().clone() for p in model.parameters()]
        optimizer.step()

    return _loop(model, optimizer, each), all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("strategy", ["zero3", "hybrid"])
def test_a_model_or_block_that_evaluates_on_one_rank_alone_is_an_error_before_anything_is_updated(
    strategy: str,
) -> None:
    for raised, unchanged in ranks.run(_in_another_mode, 2, "", strategy):
        assert raised.startswith("RankMismatch in step 2: "), raised
        assert "rank 0: training; rank 1: evaluation" in raised
        assert unchanged
    for raised, unchanged in ranks.run(_in_another_mode, 2, "blocks.1", strategy):
        assert raised.startswith("RankMismatch in step 2: "), raised
        assert "blocks of rank 1 differ from those of rank 0" in raised
        assert unchanged
