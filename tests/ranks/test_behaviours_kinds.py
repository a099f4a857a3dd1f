"""What must come out right where FSDP2 does not, behaviours 7 and 9: kinds of parameters, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engines
import ranks
import reference
import tables
from engines import (
    STEPS,
    WIDTH,
    Net,
    assert_same,
    batch,
    build,
    expected,
    holds,
    my_rank,
    on_both_engines,
    sgd,
)
from reference import Trace

# --- 7. kinds of parameters ------------------------------------------------------------------------------


def _odd_parameter(kind: str) -> nn.Parameter:
    if kind == "scalar":
        return nn.Parameter(torch.tensor(0.7))
    if kind == "empty":
        return nn.Parameter(torch.zeros(0, 4))
    if kind == "non-contiguous":
        return nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    if kind == "channels-last":
        return nn.Parameter(torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last))
    if kind == "mixed dtype":
        return nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    if kind == "complex":
        return nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
    if kind == "one element":
        return nn.Parameter(torch.ones(1))
    return nn.Parameter(torch.randn(WIDTH), requires_grad=False)


class OddBlock(nn.Module):
    """A linear layer, and beside it one parameter of an unusual kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.odd = _odd_parameter(kind)

    def forward(self, x: Tensor) -> Tensor:
        x, odd = self.linear(x), self.odd
        if self.kind == "empty":
            return x + odd.sum()
        if self.kind == "non-contiguous":
            assert odd.stride() == (1, WIDTH), f"strides became {odd.stride()}"
            return x @ odd
        if self.kind == "channels-last":
            assert odd.is_contiguous(memory_format=torch.channels_last), f"strides became {odd.stride()}"
            return (
                x + torch.nn.functional.conv2d(x.view(-1, 4, 2, 1), odd, padding=1).mean((1, 2, 3))[:, None]
            )
        if self.kind == "complex":
            return x * torch.view_as_real(odd * odd).sum(-1)
        return (x * odd).to(x.dtype)


class OddNet(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock(kind) for _ in range(2))


class TiedAcrossUnits(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.blocks[1][2].bias = self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


class TiedInsideUnit(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.blocks:
            layer.append(nn.Linear(WIDTH, 13))
            layer.append(nn.Linear(13, WIDTH))
            layer[3].weight = layer[0].weight


ODD_KINDS = {
    "scalar": "doesn't support scalar parameters",
    "empty": "_chunk_cat expects non-empty tensor",
    "non-contiguous": "does not support non-contiguous parameters",
    "channels-last": "does not support non-contiguous parameters",
    "mixed dtype": "expects uniform original parameter dtype",
    "complex": "expects uniform original parameter dtype",
    "tied across units": "already managed by another FSDP group",
}
KINDS_FSDP2_HAS = ["frozen beside trainable", "one element", "tied inside a unit"]
MODELS: dict[str, Callable[[], nn.Module]] = {
    kind: (lambda kind=kind: OddNet(kind)) for kind in [*ODD_KINDS, *KINDS_FSDP2_HAS]
} | {"tied across units": TiedAcrossUnits, "tied inside a unit": TiedInsideUnit}


def _train_odd(engine: str, kind: str, options: dict[str, Any]) -> Trace:
    model = engines.shard(engine, build(MODELS[kind]), **options)
    return engines.train(engine, model, sgd(model.parameters()))


@on_both_engines
@pytest.mark.parametrize("kind", ODD_KINDS)
def test_parameter_of_an_unusual_kind_trains_as_in_one_process(engine: str, kind: str) -> None:
    def check() -> None:
        assert_same(ranks.run(_train_odd, 2, engine, kind, {}), expected(MODELS[kind]))

    holds(engine, check, ODD_KINDS[kind])


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("kind", KINDS_FSDP2_HAS)
def test_parameter_of_a_kind_fsdp2_has_trains_as_in_one_process(engine: str, kind: str) -> None:
    assert_same(ranks.run(_train_odd, 2, engine, kind, {}), expected(MODELS[kind]))


@tables.in_turn(("kind", "strategy"), MODELS, ["zero2", "zero1", "replicate"])
def test_parameter_of_an_unusual_kind_is_right_under_every_strategy(kind: str, strategy: str) -> None:
    assert_same(ranks.run(_train_odd, 2, "fullshard", kind, {"strategy": strategy}), expected(MODELS[kind]))


def _train_a_copy(engine: str) -> tuple[Trace, bool]:
    model = engines.shard(engine, build())
    twin = copy.deepcopy(model)
    trace = engines.train(engine, twin, sgd(twin.parameters()))
    fresh = reference.whole_parameters(build())
    untouched = all(reference.bitwise(v, fresh[n]) for n, v in engines.whole(engine, model).items())
    return trace, untouched


@on_both_engines
def test_deepcopy_of_a_sharded_model_trains_apart_from_the_original_or_is_refused(engine: str) -> None:
    def check() -> None:
        try:
            results = ranks.run(_train_a_copy, 2, engine)
        except ranks.RankFailure as failure:
            if all(error.is_a("FullshardError") for error in failure.errors.values()):
                return
            raise
        assert_same([trace for trace, _ in results], expected())
        assert all(untouched for _, untouched in results), "training the copy changed the original"

    holds(engine, check, "does not support deepcopy")


# --- 9. optimizers that are not element-wise --------------------------------------------------------------


def _adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


def _muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # It orthogonalises in bf16: a rounding of the gradient may move a step by 4e-3 of its length.
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)


def _rprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Rprop(parameters, lr=0.01)


OPTIMIZERS = {"Adafactor": _adafactor, "Muon": _muon, "Rprop": _rprop}


def _train_lbfgs(model: nn.Module, rows: list[list[Any]]) -> list[float]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    losses = []
    for pieces in rows:

        def closure(pieces: list[Any] = pieces) -> float:
            optimizer.zero_grad()
            total = 0.0
            for piece in pieces:
                loss = engines.loss_of(model, piece) / len(pieces)
                loss.backward()
                total += loss.item()
            return total

        losses.append(float(optimizer.step(closure)))
    return losses


def _train_with(engine: str, name: str, options: dict[str, Any]) -> Trace:
    model = engines.shard(engine, build(), **options)
    if name == "LBFGS":
        losses = _train_lbfgs(model, [[batch(step, my_rank())] for step in range(STEPS)])
        return Trace(losses, [0.0] * STEPS, engines.whole(engine, model))
    return engines.train(engine, model, OPTIMIZERS[name](model.parameters()))


def _expected_with(name: str) -> Trace:
    model = build()
    if name == "LBFGS":
        losses = _train_lbfgs(model, engines.batches())
        return Trace(losses, [0.0] * STEPS, reference.whole_parameters(model))
    trace = reference.train(model, engines.batches(), engines.loss_of, OPTIMIZERS[name], STEPS)
    return Trace(trace.losses, [0.0] * STEPS, trace.parameters)


FSDP2_WITH = {
    "Adafactor": "in-place operations that require placement changes",
    "LBFGS": "Cannot flatten unevenly sharded tensor",
}


def test_optimizer_over_all_parameters_is_refused_by_name_with_the_remedy() -> None:
    for message in engines.refusals(_train_with, "fullshard", "LBFGS", {"strategy": "zero3"}):
        assert "LBFGS" in message
        assert "optimizer_step='gathered'" in message
        assert "replicate" in message


def test_optimizer_over_all_parameters_is_right_with_gathered_steps() -> None:
    options = {"strategy": "zero2", "optimizer_step": "gathered"}
    results = ranks.run(_train_with, 2, "fullshard", "LBFGS", options)
    reference.assert_close_trace(reference.combine(results), _expected_with("LBFGS"), 1e-4, 1e-5)


@pytest.mark.parametrize("name", FSDP2_WITH)
def test_optimizer_that_is_not_element_wise_still_goes_wrong_under_fsdp2(name: str) -> None:
    def check() -> None:
        assert_same(ranks.run(_train_with, 2, "fsdp2", name, {}), _expected_with(name))

    holds("fsdp2", check, FSDP2_WITH[name])


@tables.in_turn(("name", "strategy"), ["Adafactor", "Muon"], ["zero3", "replicate", "zero2", "zero1"], 1)
def test_optimizer_that_is_not_element_wise_is_right(name: str, strategy: str) -> None:
    """Muon is not compared with FSDP2: DTensor multiplies the whole matrices, and what is off is its bf16
    rounding's."""
    tolerance = 1e-3 if name == "Muon" else 2e-5
    results = ranks.run(_train_with, 2, "fullshard", name, {"strategy": strategy})
    reference.assert_close_trace(reference.combine(results), _expected_with(name), tolerance, tolerance)


@on_both_engines
def test_rprop_is_element_wise_and_trains_as_in_one_process(engine: str) -> None:
    def check() -> None:
        assert_same(ranks.run(_train_with, 2, engine, "Rprop", {}), _expected_with("Rprop"))

    holds(engine, check, "in-place operations that require placement changes")
