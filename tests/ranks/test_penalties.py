"""fs.penalty: L1, L2, EWC and others on parameters at rest have the value and the gradient of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import ranks
import tables
from cases import ALL, assert_gradients, backward, refusal, sharded, whole, whole_gradients
from engines import batch, build, loss_of, my_rank

Term = Callable[[str, Tensor], Any]
START = {name: value.detach() for name, value in build(seed=1).named_parameters()}

TERMS: dict[str, Term] = {
    "l1": lambda _, p: p.abs(),
    "l1 by hand": lambda _, p: p.abs().sum(),
    "l2": lambda _, p: 0.5 * p.square().sum(),
    "mean squares of matrices": lambda _, p: (p**2).mean() / 2 if p.dim() > 1 else 0.0,
    "by the number of elements": lambda _, p: p.square() / p.numel(),
    "norms": lambda _, p: p.norm(),
    "elastic weights": lambda n, p: START[n].abs() * (p - START[n]).square(),
    "smooth": lambda _, p: torch.nn.functional.relu(p).exp() - torch.tanh(p),
    "one parameter": lambda n, p: (p * torch.arange(5.0)).sum() ** 2 if n == "head.bias" else 0,
}  # fmt: skip


def _value(model: nn.Module, term: Term) -> Tensor:
    """In one process."""
    return sum(torch.as_tensor(term(name, p)).sum() for name, p in model.named_parameters())


def _in_one_process(term: Term, num_ranks: int, weight: Callable[[int], float] = lambda _: 1.0) -> nn.Module:
    model = build()
    for step in range(2):
        for rank in range(num_ranks):
            loss = loss_of(model, batch(step, rank)) + 0.1 * _value(model, term)
            (loss * weight(rank) / num_ranks).backward()
    return model


def _penalised(strategy: str, names: list[str]) -> dict[str, Any]:
    import fullshard as fs

    found = {}
    for name in names:
        term = TERMS[name]
        model = sharded(strategy)
        with fs.accumulate(model):  # two micro-batches, each with the penalty
            value = fs.penalty(model, term)
            (loss_of(model, batch(0, my_rank())) + 0.1 * value).backward()
        if name == "l2":  # in a backward of its own, before and after
            (0.05 * fs.penalty(model, term)).backward()
            backward(model, 1)
            (0.05 * fs.penalty(model, term)).backward()
        else:
            (0.1 * fs.penalty(model, term) + loss_of(model, batch(1, my_rank()))).backward()
        found[name] = value.item(), whole_gradients(model)
        ranks.end_groups_of_models()
    return found


def _check(found: dict[str, Any], num_ranks: int) -> None:
    for name, (value, gradients) in found.items():
        term = TERMS[name]
        assert value == pytest.approx(_value(build(), term).item(), rel=1e-5), name
        assert_gradients(gradients, _in_one_process(term, num_ranks))


def _terms(strategy: str) -> list[str]:
    """All on shards; where values are whole, a sum, a norm, and terms of single parameters."""
    return list(TERMS) if strategy.startswith("zero") else ["l2", "norms", "elastic weights", "one parameter"]


@tables.some("strategy", ALL, "zero3", "replicate")
def test_penalty_has_the_value_and_the_gradient_of_one_process(strategy: str) -> None:
    for found in ranks.run(_penalised, 3, strategy, _terms(strategy), timeout_s=120):
        _check(found, 3)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("zero3", 1), ("hybrid", 4)])
def test_penalty_on_one_rank_and_over_replicas(strategy: str, num_ranks: int) -> None:
    names = _terms(strategy if num_ranks > 1 else "replicate")
    for found in ranks.run(_penalised, num_ranks, strategy, names, timeout_s=120):
        _check(found, num_ranks)


def _trained(strategy: str, precision: str) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    import fullshard as fs

    model = sharded(strategy, precision=precision)
    model.blocks[0][0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    start = {n: p.detach().clone() for n, p in model.named_parameters()}  # this rank's elements
    fisher: dict[str, Tensor] = {}
    for step in range(3):
        loss = loss_of(model, batch(step, my_rank())) + 0.01 * fs.penalty(model, TERMS["l1"])
        if fisher:  # made from gradients
            loss = loss + fs.penalty(model, lambda n, p: fisher[n] * (p - start[n]).square())
        norms.append(_step(model, optimizer, loss, fisher))
    with torch.no_grad():
        plain = fs.penalty(model, TERMS["l2"])
    return whole(model), norms, {"value": plain.item(), "history": plain.requires_grad}


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, fisher: dict[str, Tensor]
) -> float:
    """The norm before clipping. The first step fills `fisher` from its gradients."""
    loss.backward()
    if not fisher:
        fisher.update(
            {n: torch.zeros_like(p) if p.grad is None else p.grad.square() for n, p in _named(model)}
        )
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


@pytest.mark.parametrize(
    ("strategy", "precision"), [("zero3", "fp32"), ("zero2", "bf16"), ("hybrid", "fp32")]
)
def test_training_with_penalties_clipping_and_frozen_parameters(strategy: str, precision: str) -> None:
    num_ranks = 4 if strategy == "hybrid" else 2
    plain = build()
    plain.blocks[0][0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    start, fisher, norms = {n: p.detach().clone() for n, p in _named(plain)}, {}, []
    for step in range(3):
        loss = sum(loss_of(plain, batch(step, rank)) for rank in range(num_ranks)) / num_ranks
        loss = loss + 0.01 * _value(plain, TERMS["l1"])
        if fisher:
            loss = loss + sum((fisher[n] * (p - start[n]).square()).sum() for n, p in _named(plain))
        norms.append(_step(plain, optimizer, loss, fisher))
    rough = {} if precision == "fp32" else {"rtol": 0.05, "atol": 0.03}
    for values, found, last in ranks.run(_trained, num_ranks, strategy, precision):
        assert found == pytest.approx(norms, rel=rough.get("rtol", 1e-4))
        expected = _value(plain, TERMS["l2"]).item()
        assert last == {"value": pytest.approx(expected, rel=rough.get("rtol", 1e-4)), "history": False}
        for name, value in plain.named_parameters():
            assert torch.allclose(values[name], value, **(rough or {"atol": 1e-5})), name


def _weighted(strategy: str) -> list[dict[str, Any]]:
    """Each rank multiplies its loss by a weight of its own, the penalty included."""
    import fullshard as fs

    model = sharded(strategy)
    for step in range(2):
        loss = loss_of(model, batch(step, my_rank())) + 0.1 * fs.penalty(model, TERMS["l1"])
        (loss * (1.0 + my_rank())).backward()
    first, model = whole_gradients(model), sharded(strategy)
    with fs.accumulate(model):
        (loss_of(model, batch(0, my_rank())) + fs.penalty(model, TERMS["l1"])).backward()
    model.zero_grad()  # drops both
    for step in range(2):  # the penalty in the first micro-batch alone
        if step == 0:
            with fs.accumulate(model):
                loss = loss_of(model, batch(0, my_rank())) + 0.2 * fs.penalty(model, TERMS["l1"])
                loss.backward()
        else:
            backward(model, step)
    return [first, whole_gradients(model)]


@tables.some("strategy", ["zero3", "replicate", "hybrid"], "zero3", "hybrid")
def test_penalty_counts_as_the_mean_over_ranks_and_waits_for_the_last_micro_batch(strategy: str) -> None:
    num_ranks = 4 if strategy == "hybrid" else 2
    weighted = _in_one_process(TERMS["l1"], num_ranks, lambda rank: 1.0 + rank)
    plain = _in_one_process(TERMS["l1"], num_ranks)
    for first, second in ranks.run(_weighted, num_ranks, strategy):
        assert_gradients(first, weighted)
        assert_gradients(second, plain)


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "largest": lambda m: _penalty(m, lambda _, p: p.abs().max()),
    "rows": lambda m: _penalty(m, lambda _, p: p.norm(dim=-1).sum()),
    "first element": lambda m: _penalty(m, lambda _, p: p[0]),
    "as numbers": lambda m: _penalty(m, lambda _, p: float(p.detach().numpy().sum())),
    "unfitting": lambda m: _penalty(m, lambda _, p: p * torch.ones(3, 3, 3)),
    "nothing": lambda m: _penalty(m, lambda *_: None),
    "inside full": lambda m: _inside_full(m),
    "at rest": lambda m: (
        loss_of(m, batch(0, my_rank())) + sum(p.abs().sum() for p in m.parameters())
    ).backward(),
}


def _penalty(model: nn.Module, term: Term) -> Tensor:
    import fullshard as fs

    return fs.penalty(model, term)


def _inside_full(model: nn.Module) -> Tensor:
    import fullshard as fs

    with fs.full(model):
        return fs.penalty(model, TERMS["l1"])


def _refusals() -> dict[str, tuple[str, str, str]]:
    found = {name: refusal(lambda call=call: call(sharded())) for name, call in REFUSED.items()}
    model = sharded()
    refusal(lambda: _penalty(model, lambda _, p: p.max()))
    (loss_of(model, batch(0, my_rank())) + _penalty(model, TERMS["l1"])).backward()  # it goes on
    return found


def _after_a_failed_backward() -> list[bool]:
    import fullshard as fs

    found = []
    for offload in (None, "host"):
        gradients = []
        for fails in (True, False):
            model = sharded("zero3", check_gradients=True, offload=offload)
            if fails:
                value = fs.penalty(model, lambda _, p: p.sum())
                with pytest.raises(fs.FullshardError, match="not finite"):
                    (loss_of(model, batch(0, my_rank())) * float("nan") + value).backward()
                model.zero_grad()
            backward(model, 1)
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        found.append(all(map(torch.equal, *gradients)))
    return found


def test_penalty_of_a_backward_that_failed_does_not_join_a_later_one() -> None:
    assert ranks.run(_after_a_failed_backward, 2) == [[True, True]] * 2


def _counted(strategy: str) -> bool:
    import fullshard as fs

    values = []
    for counter in (nullcontext(), FlopCounterMode(display=False)):
        model = sharded(strategy)
        with counter:
            (loss_of(model, batch(0, my_rank())) + fs.penalty(model, lambda _, p: p.square())).backward()
        values.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return all(map(torch.equal, *values))


def test_penalty_works_under_a_dispatch_mode() -> None:
    assert all(ranks.run(_counted, 2, "zero3"))


def test_penalty_that_cannot_be_right_is_refused_alike_on_all_ranks() -> None:
    results = ranks.run(_refusals, 3)
    for name in REFUSED:
        assert len({found[name][0] for found in results}) == 1, [found[name] for found in results]
    assert "fs.penalty" in results[0]["at rest"][2]
