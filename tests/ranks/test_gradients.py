"""Gradients at rest: torch's own functions on `p.grad`, true for all ranks or refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ranks
import tables
from cases import assert_gradients, backward, gradients_of_one_process, sharded, whole_gradients
from engines import my_rank

WHERE = ("zero3", "zero1", "replicate")

# --- norms and clipping --------------------------------------------------------------------------------

ORDERS = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf]


def _clip(strategy: str) -> list[tuple[str, float, dict[str, Tensor | None]]]:
    found = []
    for order in ORDERS[1:]:
        for foreach in (None, True, False):
            model = sharded(strategy)
            backward(model)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, order, foreach=foreach)
            found.append((type(norm).__name__, norm.item(), whole_gradients(model)))
    return found


@tables.some("strategy", WHERE, "zero3", "replicate")
def test_clipping_by_norm_is_that_of_one_process_and_equal_on_all_ranks(strategy: str) -> None:
    first, second = ranks.run(_clip, 2, strategy)
    assert [row[1] for row in first] == [row[1] for row in second]
    for index, row in enumerate(first):
        plain = gradients_of_one_process()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, ORDERS[1:][index // 3])
        assert row[0] == "Tensor"
        assert row[1] == pytest.approx(norm.item(), rel=2e-6)
        assert_gradients(row[2], plain)


def _total_norms() -> dict[str, Any]:
    model = sharded()
    backward(model)
    gradients = [p.grad for p in model.parameters()]
    found: dict[str, Any] = {str(o): nn.utils.get_total_norm(gradients, o).item() for o in ORDERS}
    found["type"] = type(nn.utils.get_total_norm(gradients)).__name__
    found["head"] = nn.utils.clip_grad_norm_(model.head.parameters(), math.inf).item()
    found["one"] = nn.utils.clip_grad_norm_(model.head.bias, math.inf).item()
    model.zero_grad()
    found["none"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    return found


def test_total_norm_of_all_of_some_and_of_no_gradients_is_that_of_one_process() -> None:
    plain = gradients_of_one_process()
    gradients = [p.grad for p in plain.parameters()]
    for found in ranks.run(_total_norms, 2):
        for order in ORDERS:
            expected = nn.utils.get_total_norm(gradients, order).item()
            assert found[str(order)] == pytest.approx(expected, rel=2e-6)
        assert found["type"] == "Tensor"
        assert found["head"] == pytest.approx(
            nn.utils.get_total_norm([p.grad for p in plain.head.parameters()]).item(), rel=2e-6
        )
        assert found["one"] == pytest.approx(plain.head.bias.grad.norm().item(), rel=2e-6)
        assert found["none"] == 0.0


def _norm_under_hybrid() -> tuple[float, dict[str, Tensor | None]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded("hybrid", mesh=mesh)
    backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.item(), whole_gradients(model)


def test_norm_under_hybrid_counts_every_element_once() -> None:
    plain = gradients_of_one_process(num_ranks=4)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
    results = ranks.run(_norm_under_hybrid, 4, init=True)
    assert len({found for found, _ in results}) == 1
    for found, gradients in results:
        assert found == pytest.approx(norm, rel=2e-6)
        assert_gradients(gradients, plain)


def _not_finite(strategy: str, value: float) -> list[str]:
    """One bad element, in the last parameter: it lies on the last rank alone."""
    said = []
    for order in (1.0, 2.0, math.inf):
        model = sharded(strategy)
        backward(model)
        bias = model.head.bias.grad
        if strategy == "replicate":
            bias[-1] = value
        elif my_rank() == 1:
            bias.fill_(value)
        try:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append(f"no error, the norm is {norm.item()}")
    return said


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_error_if_nonfinite_is_raised_on_every_rank_where_one_holds_the_bad_element(
    strategy: str, value: float
) -> None:
    for said in ranks.run(_not_finite, 2, strategy, value):
        assert all("is non-finite" in text for text in said), said


def _clip_value(strategy: str) -> list[dict[str, Tensor | None]]:
    found = []
    for foreach in (None, True, False):
        model = sharded(strategy)
        backward(model)
        nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)
        found.append(whole_gradients(model))
    return found


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_clipping_by_value_is_that_of_one_process(strategy: str) -> None:
    plain = gradients_of_one_process()
    nn.utils.clip_grad_value_(plain.parameters(), 0.05)
    for results in ranks.run(_clip_value, 2, strategy):
        for found in results:
            assert_gradients(found, plain)


# --- reading p.grad ------------------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of order 1": lambda g: g.norm(1),
    "largest by inf norm": lambda g: torch.linalg.vector_norm(g, math.inf),
    "norm as a float": lambda g: float(g.norm()),
    "data of a norm": lambda g: g.norm().data,
    "text of a norm": lambda g: float(f"{g.norm():.3f}"),
    "list of norms": lambda g: torch.tensor([g.norm(), g.norm()]).sum(),
    "copy of a norm": lambda g: copy.deepcopy(g.norm()),
    "norm of a copy": lambda g: (g.detach().clone() * 2).norm(),
    "norm in double": lambda g: g.double().norm(),
    "sum of squares": lambda g: (g * g).sum().sqrt(),
    "sum": lambda g: g.sum() + 1,
    "sum of absolutes": lambda g: g.abs().sum(),
    "max": lambda g: g.max(),
    "amax": lambda g: g.abs().amax(),
    "min": lambda g: g.min(),
    "mean of absolutes": lambda g: g.abs().mean(),
    "mean by keyword": lambda g: torch.mean(input=g.abs()),
    "dot": lambda g: g.flatten().dot(g.flatten()),
    "cat": lambda g: torch.cat([g.view(-1), g.flatten()]).norm(),
    "vector": lambda g: nn.utils.parameters_to_vector([g, g]).norm(),
    "finite": lambda g: torch.isfinite(g).all(),
    "any": lambda g: (g > 0.2).any(),
    "count": lambda g: torch.count_nonzero(g),
    "where": lambda g: torch.where(g > 0, g, torch.zeros_like(g)).sum(),
    "equal to itself": lambda g: torch.equal(g, g.clone()),
    "close to itself": lambda g: torch.allclose(g, g.clone()),
    "foreach": lambda g: torch._foreach_mul([g, g], 2.0)[0].norm(),
    "elements over zero": lambda g: g.maximum(torch.zeros(())).sum(),
    "sign": lambda g: g.sign().abs().sum(),
}  # fmt: skip


def _read(strategy: str) -> dict[str, dict[str, float]]:
    model = sharded(strategy)
    backward(model)
    return {
        name: {n: float(read(p.grad)) for n, p in model.named_parameters() if "blocks.1" in n or "head" in n}
        for name, read in READS.items()
    }


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_whole_reductions_of_a_gradient_are_those_of_one_process(strategy: str) -> None:
    plain = dict(gradients_of_one_process().named_parameters())
    results = ranks.run(_read, 2, strategy)
    assert results[0] == results[1]
    for name, values in results[0].items():
        for parameter, value in values.items():
            expected = float(READS[name](plain[parameter].grad))
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-6), f"{name} of {parameter}"


def _unequal_on_one_rank() -> list[bool]:
    model = sharded()
    backward(model)
    gradient = model.head.weight.grad
    other = gradient.clone()
    if my_rank() == 1:
        other.add_(1.0)
    return [torch.equal(gradient, other), torch.allclose(gradient, other), gradient.equal(other)]


def test_comparison_of_gradients_has_one_answer_on_all_ranks() -> None:
    assert ranks.run(_unequal_on_one_rank, 2) == [[False] * 3] * 2


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "std": lambda g: g.std(),
    "median": lambda g: g.median(),
    "argmax": lambda g: g.argmax(),
    "norm by rows": lambda g: g.norm(dim=-1),
    "sum by rows": lambda g: g.sum(0),
    "mean by rows": lambda g: g.mean(-1),
    "max by rows": lambda g: g.max(0),
    "one element": lambda g: g[0],
    "slice": lambda g: g[:1000],
    "writing an element": lambda g: g.__setitem__(0, 0.0),
    "writing rows": lambda g: g.index_fill_(0, torch.tensor([0]), 0.0),
    "selection": lambda g: g[g > 0],
    "matrix product": lambda g: g @ torch.ones(g.shape[-1], g.shape[-1]),
    "cumsum": lambda g: g.cumsum(0),
    "softmax": lambda g: torch.softmax(g, 0),
    "method softmax": lambda g: g.softmax(0),
    "normalize": lambda g: F.normalize(g, dim=0),
    "triu": lambda g: g.triu() if g.dim() > 1 else g.flip(0),
    "roll": lambda g: g.roll(1),
    "sort": lambda g: g.sort(0),
    "chunks": lambda g: g.chunk(2),
    "rows": lambda g: list(g),
    "histogram": lambda g: torch.histc(g, 4),
    "negative norm": lambda g: g.norm(-1),
    "nuclear norm": lambda g: torch.linalg.matrix_norm(g, "nuc") if g.dim() > 1 else g.norm("nuc"),
}


def _read_wrongly() -> dict[str, list[tuple[str, str]]]:
    from fullshard import FullshardError

    model = sharded()
    backward(model)
    before = [p.grad.clone() for p in model.parameters()]
    found: dict[str, list[tuple[str, str]]] = {}
    for name, read in REFUSED.items():
        for parameter in (model.head.weight, model.blocks[0][0].weight, model.head.bias):
            try:
                said = ("nothing", str(read(parameter.grad)))
            except FullshardError as error:
                said = (type(error).__name__, str(error))
            found.setdefault(name, []).append(said)
    found["changed"] = [
        ("changed", "") for p, b in zip(model.parameters(), before, strict=True) if (p.grad != b).any()
    ]
    return found


def test_reduction_that_would_be_true_for_one_rank_alone_is_refused_on_every_rank() -> None:
    for found in ranks.run(_read_wrongly, 2):
        assert found.pop("changed") == []
        for name, said in found.items():
            for kind, message in said:
                assert kind == "GradientError", f"{name}: {message}"
