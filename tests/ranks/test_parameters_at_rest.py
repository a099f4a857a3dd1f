"""Parameters at rest: writes of unsharded values are those of one process or refused, alike on all ranks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import ranks
from cases import refusal, same, sharded, whole
from engines import build, shard_blocks

RANKS = 3  # small parameters are empty on some
ROW = torch.linspace(-1, 1, 8)
MASK = torch.rand(5, 8, generator=torch.Generator().manual_seed(3))


def _edit(model: nn.Module) -> None:
    weight, bias = model.head.weight, model.head.bias
    with torch.no_grad():
        weight.copy_(MASK)
        weight.mul_(MASK).add_(ROW)
        weight += MASK
        weight -= 0.5
        weight[...] = weight * 2
        weight[:] = MASK.double() + 1
        weight[MASK > 0.7] = 0.25
        weight.clamp_(max=MASK)
        weight.addcmul_(MASK, ROW, value=0.3)
        weight.masked_fill_(MASK < 0.2, -1.0)
        model.blocks[0][0].bias.fill_(0.5)
        bias -= 0.1 * torch.arange(5.0)
        bias.copy_(bias.detach().clone() * 2)
        weight.lerp_(MASK, 0.5)
        bias.zero_()
        bias.add_(torch.ones(5), alpha=3)


def _edited(strategy: str) -> dict[str, Tensor]:
    model = sharded(strategy)
    _edit(model)
    return whole(model)


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_unsharded_values_are_written_as_in_one_process(strategy: str) -> None:
    plain = build()
    _edit(plain)
    for values in ranks.run(_edited, RANKS, strategy):
        for name, value in plain.named_parameters():
            assert torch.allclose(values[name], value, atol=1e-6), name


def _set(target: Any, key: Any, value: Any) -> None:
    target[key] = value


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "one element": lambda m: _set(m.head.weight, (0, 0), 0.0),
    "first row": lambda m: _set(m.head.weight, 0, 0.0),
    "first element of a vector": lambda m: _set(m.head.bias, 0, 0.0),
    "rows": lambda m: _set(m.head.weight, slice(1, 3), MASK[1:3]),
    "rows by index": lambda m: m.head.weight.index_fill_(0, torch.tensor([1]), 0.0),
    "diagonal": lambda m: m.head.weight.fill_diagonal_(0.0),
    "norms of rows": lambda m: m.head.weight.renorm_(2, 0, 1.0),
    "triangle": lambda m: m.head.weight.triu_(),
    "another shape": lambda m: m.head.weight.copy_(torch.ones(3, 3)),
    "another shape in a sum": lambda m: m.head.weight.add_(torch.ones(7, 8)),
    "pickle": lambda m: pickle.dumps(m.head.weight),
    "dict": lambda m: torch.save(dict(m.named_parameters()), io.BytesIO()),
    "list": lambda m: torch.save(list(m.parameters()), io.BytesIO()),
    "nested": lambda m: torch.save({"a": [{"b": m.head.bias}]}, io.BytesIO()),
    "shallow copy": lambda m: copy.copy(m.head.weight),
}


def _refusals() -> tuple[dict[str, tuple[str, str]], bool]:
    model = sharded()
    before = whole(model)
    found = {}
    with torch.no_grad():
        for name, call in REFUSED.items():
            kind, text, remedy = refusal(lambda call=call: call(model))
            assert "head" in text or "blocks" in text, text
            assert "fs.full" in remedy
            found[name] = kind
    return found, same(before, whole(model))


def test_writes_and_pickles_of_a_part_are_refused_alike_on_all_ranks() -> None:
    results = ranks.run(_refusals, RANKS)
    assert all(found == results[0][0] and unchanged for found, unchanged in results)


def _kept() -> list[bool]:
    import fullshard as fs

    model = sharded()
    deep = copy.deepcopy({"weights": list(model.parameters())})["weights"]
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    with fs.full(model), torch.no_grad():
        model.head.weight[0] = 0.5
        model.head.weight.renorm_(2, 0, 1.0)
        torch.save(dict(model.named_parameters()), file)
        expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    file.seek(0)
    loaded = torch.load(file)
    kinds = [type(p) is nn.Parameter for p in (*model.parameters(), *deep)]
    other = nn.Linear(2, 2)
    with torch.no_grad():
        other.weight[0] = 1.0
        other.weight.fill_diagonal_(2.0)
    torch.save(other, io.BytesIO())
    return [same(loaded, expected), same(whole(model), expected), len(whole(twin)) == len(expected), *kinds]


def test_inside_full_and_in_other_models_everything_is_as_ever() -> None:
    assert all(map(all, ranks.run(_kept, 2)))


def _averaged() -> dict[str, Any]:
    student, found = sharded(), {}
    for ema in (None, swa_utils.get_ema_multi_avg_fn(0.9)):
        average = swa_utils.AveragedModel(student, multi_avg_fn=ema, use_buffers=True)
        for factor in (2.0, 3.0):
            with torch.no_grad():
                for p in student.parameters():
                    p.mul_(factor)
            average.update_parameters(student)
        found["ema" if ema else "swa"] = whole(average.module)
    frozen = build()
    frozen.blocks[0][0].weight.requires_grad_(False)
    frozen = shard_blocks(frozen)
    pair = frozen.blocks[0][0].bias, student.blocks[0][0].bias
    with torch.no_grad():
        found["refused"] = [
            refusal(lambda: pair[0].mul_(0.9).add_(pair[1], alpha=0.1))[0],
            refusal(lambda: pair[0].lerp_(pair[1], 0.1))[0],
            refusal(lambda: pair[0].copy_(pair[1]))[0],
        ]
    return found


def test_averages_are_those_of_one_process_and_refused_between_models_that_are_cut_differently() -> None:
    student, expected = build(), {}
    for ema in (None, swa_utils.get_ema_multi_avg_fn(0.9)):
        average = swa_utils.AveragedModel(student, multi_avg_fn=ema)
        for factor in (2.0, 3.0):
            with torch.no_grad():
                for p in student.parameters():
                    p.mul_(factor)
            average.update_parameters(student)
        expected["ema" if ema else "swa"] = dict(average.module.named_parameters())
    for found in ranks.run(_averaged, RANKS):
        for kind, values in expected.items():
            for name, value in values.items():
                assert torch.allclose(found[kind][name], value, atol=1e-5), (kind, name)
        assert found["refused"] == ["AtRestError"] * 3
