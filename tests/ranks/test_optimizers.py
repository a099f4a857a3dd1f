"""Optimizers, schedulers and parameter groups: torch's own, on shards, with the numbers of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import cases
import engines
import optimizer_kinds as kinds
import ranks
import reference
from cases import ALL, Case, Outcome
from engines import Net, batch, build, loss_of, my_rank

Parameters = Iterable[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "AdamW loop": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-4, foreach=False),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-4, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-4, fused=True),
    "AdamW amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-4, amsgrad=True),
    "AdamW tensor rate": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), eps=1e-4, foreach=False),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, eps=1e-4, weight_decay=0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, dampening=0.2),
    "SGD nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, eps=1e-4),
    "Adagrad fused": lambda ps: torch.optim.Adagrad(ps, lr=0.05, eps=1e-4, fused=True),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, eps=1e-3, momentum=0.5, centered=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01, eps=1e-4),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01, eps=1e-4),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01, eps=1e-4),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.05, t0=2, lambd=1e-2),
}  # fmt: skip


def _train_all(strategy: str) -> dict[str, Outcome]:
    return {
        name: cases.on_a_rank(Case(optimizer=make), strategy=strategy) for name, make in OPTIMIZERS.items()
    }


@pytest.fixture(scope="module")
def trained() -> Callable[[str], list[dict[str, Outcome]]]:
    kept: dict[str, list[dict[str, Outcome]]] = {}

    def train(strategy: str) -> list[dict[str, Outcome]]:
        if strategy not in kept:
            kept[strategy] = ranks.run(_train_all, 2, strategy)
        return kept[strategy]

    return train


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_element_wise_optimizer_trains_as_in_one_process(trained: Any, name: str, strategy: str) -> None:
    outcomes = [result[name] for result in trained(strategy)]
    cases.assert_as_in_one_process(Case(optimizer=OPTIMIZERS[name]), outcomes)


def _train_lbfgs(model: nn.Module, pieces: list[int]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3)
    for step in range(3):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            losses = [loss_of(model, batch(step, rank)) / len(pieces) for rank in pieces]
            for loss in losses:
                loss.backward()
            return sum(loss.item() for loss in losses)

        optimizer.step(closure)
    return engines.whole("fullshard", model) if len(pieces) == 1 else reference.whole_parameters(model)


def _lbfgs() -> dict[str, torch.Tensor]:
    import fullshard as fs

    return _train_lbfgs(fs.shard(build(), strategy="replicate"), [my_rank()])


def test_lbfgs_is_right_under_replicate() -> None:
    expected = _train_lbfgs(build(), [0, 1])
    first, second = ranks.run(_lbfgs, 2)
    for name, value in expected.items():
        assert reference.bitwise(first[name], second[name]), f"{name} differs between ranks"
        reference.assert_close(first[name], value, name, 1e-4, 1e-5)


# --- parameter groups ----------------------------------------------------------------------------------


def _groups(model: nn.Module, how: str) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    if how == "by name":
        rest = [p for n, p in named.items() if not n.startswith("head") and "bias" not in n]
        groups = [
            {"params": [p for n, p in named.items() if n.startswith("head")], "lr": 0.05},
            {"params": [p for n, p in named.items() if "bias" in n and not n.startswith("head")], "lr": 0.0},
            {"params": rest, "weight_decay": 0.3},
        ]
    elif how == "by dim":
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.5},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
    else:
        return torch.optim.AdamW(list(named.items()), lr=0.01, eps=1e-4)  # named parameters
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-4)


def _schedule(name: str, optimizer: torch.optim.Optimizer) -> Any:
    return {
        "step": lambda: lr_scheduler.StepLR(optimizer, 1, 0.5),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 4),
        "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6),
        "warmup": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                lr_scheduler.ExponentialLR(optimizer, 0.7),
            ],
            [2],
        ),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5),
    }[name]()


def _train_scheduled(model: nn.Module, how: str, name: str, pieces: list[int]) -> dict[str, torch.Tensor]:
    optimizer = _groups(model, how)
    schedule = _schedule(name, optimizer)
    for step in range(4):
        for rank in pieces:
            (loss_of(model, batch(step, rank)) / len(pieces)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(*([1.0] if name == "plateau" else []))
    return engines.whole("fullshard", model) if len(pieces) == 1 else reference.whole_parameters(model)


SCHEDULES = [
    ("by name", "step"), ("by dim", "cosine"), ("named parameters", "one cycle"), ("by dim", "warmup"),
    ("by name", "plateau"),
]  # fmt: skip


def _train_schedules() -> list[dict[str, torch.Tensor]]:
    import fullshard as fs

    return [_train_scheduled(fs.shard(build()), how, name, [my_rank()]) for how, name in SCHEDULES]


def test_groups_and_schedulers_train_as_in_one_process() -> None:
    results = ranks.run(_train_schedules, 2)
    for index, (how, name) in enumerate(SCHEDULES):
        expected = _train_scheduled(build(), how, name, [0, 1])
        for result in results:
            for key, value in expected.items():
                reference.assert_close(result[index][key], value, f"{how}, {name}: {key}", 2e-5, 2e-6)


def _dims() -> list[list[int]]:
    import fullshard as fs

    return [[p.dim() for p in fs.shard(build(), strategy=s).parameters()] for s in ALL]


def test_parameter_at_rest_keeps_its_number_of_dimensions() -> None:
    expected = [p.dim() for p in build().parameters()]
    for found in ranks.run(_dims, 2):
        assert found == [expected] * len(ALL)


# --- state dicts of optimizers -------------------------------------------------------------------------


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step, my_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def _round_trip(name: str, strategy: str) -> bool:
    import fullshard as fs

    straight = fs.shard(build(), strategy=strategy)
    optimizer = OPTIMIZERS[name](straight.parameters())
    _steps(straight, optimizer, range(4))

    model = fs.shard(build(), strategy=strategy)
    optimizer = OPTIMIZERS[name](model.parameters())
    _steps(model, optimizer, range(2))
    kept = copy.deepcopy(optimizer.state_dict())
    again = OPTIMIZERS[name](model.parameters())
    again.load_state_dict(kept)
    _steps(model, again, range(2, 4))
    return all(
        reference.bitwise(a.detach(), b.detach())
        for a, b in zip(straight.parameters(), model.parameters(), strict=True)
    )


ROUND_TRIPS = ["AdamW fused", "AdamW loop", "SGD", "Adagrad", "RMSprop", "NAdam", "ASGD"]


def _round_trips() -> dict[str, bool]:
    return {
        f"{name}, {strategy}": _round_trip(name, strategy)
        for name in ROUND_TRIPS
        for strategy in (("zero3", "replicate") if name == "AdamW fused" else ("zero3",))
    }


def test_optimizer_that_takes_over_a_state_dict_goes_on_bitwise() -> None:
    for result in ranks.run(_round_trips, 2):
        assert not [name for name, same in result.items() if not same]


def _state_sizes() -> tuple[int, int]:
    import fullshard as fs

    model = fs.shard(build())
    optimizer = torch.optim.AdamW(model.parameters())
    _steps(model, optimizer, range(1))
    state = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    return sum(v.numel() for v in state), sum(p.numel() for p in model.parameters())


def test_optimizer_state_is_sharded_like_its_parameters() -> None:
    results = ranks.run(_state_sizes, 2)
    for state, held in results:
        assert state == 2 * held
    assert sum(held for _, held in results) == sum(p.numel() for p in build().parameters())


# --- refusals ------------------------------------------------------------------------------------------


def _refused(what: str) -> tuple[str, str, str]:
    import fullshard as fs

    model = build()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = "zero1" if what == "postponed" else "zero3"
    fs.shard(model, strategy=strategy)
    if what == "foreign":
        optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)
    elif what == "added group":
        optimizer = early
        _steps(model, optimizer, range(1))
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 7))]})
    elif what == "sum over all":
        optimizer = kinds.BySumOverAll(model.parameters())
    else:
        optimizer = early
    before = [p.detach().clone() for p in model.parameters()]
    if what == "inside full":
        loss_of(model, batch(0, my_rank())).backward()
        with fs.full(model):
            refused = cases.refusal(optimizer.step)
    elif what == "postponed":
        with fs.accumulate(model):
            loss_of(model, batch(0, my_rank())).backward()
        refused = cases.refusal(optimizer.step)
    else:
        loss_of(model, batch(0, my_rank())).backward()
        before = [p.detach().clone() for p in model.parameters()]
        refused = cases.refusal(optimizer.step)
    for p, value in zip(model.parameters(), before, strict=True):
        assert reference.bitwise(p.detach(), value), "the refused step changed something"
    return refused


REFUSED = {
    "foreign": ("OptimizerError", "(3,)", "model.parameters()"),
    "added group": ("OptimizerError", "(2, 7)", "model.parameters()"),
    "sum over all": ("OptimizerError", "BySumOverAll", "optimizer_step='gathered'"),
    "inside full": ("StateError", "inside fs.full", "fs.full"),
    "postponed": ("StateError", "postponed", "fs.accumulate"),
}


def _all_refused() -> dict[str, tuple[str, str, str]]:
    return {what: _refused(what) for what in REFUSED}


def test_step_that_would_be_wrong_is_refused_and_changes_nothing() -> None:
    for result in ranks.run(_all_refused, 2):
        for what, (kind, part, remedy) in REFUSED.items():
            assert result[what][0] == kind, (what, result[what])
            assert part in result[what][1], (what, result[what])
            assert remedy in result[what][2], (what, result[what])


def _step_between_micro_batches(name: str) -> float | str:
    """zero2 keeps full values from one micro-batch to the next: a step between them must be seen."""
    import fullshard as fs

    model = fs.shard(build(), strategy="zero2")
    optimizer = OPTIMIZERS[name](model.parameters())
    with fs.accumulate(model):
        loss_of(model, batch(0, my_rank())).backward()
        try:
            optimizer.step()
        except fs.FullshardError as error:
            return type(error).__name__
        return loss_of(model, batch(0, 0)).item()


def _steps_between() -> dict[str, float | str]:
    return {name: _step_between_micro_batches(name) for name in ("AdamW fused", "AdamW foreach", "SGD fused")}


def test_step_between_micro_batches_is_seen_by_the_next_one_or_refused() -> None:
    for found in ranks.run(_steps_between, 2):
        for name, loss in found.items():
            plain = build()
            optimizer = OPTIMIZERS[name](plain.parameters())
            for rank in range(2):
                (loss_of(plain, batch(0, rank)) / 2).backward()
            optimizer.step()
            assert loss in ("StateError", pytest.approx(loss_of(plain, batch(0, 0)).item(), rel=1e-5)), name


# --- optimizers of one's own ------------------------------------------------------------------------------

OWN: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "plain": kinds.Plain,
    "signed": kinds.Signed,
    "by the norm of each gradient": kinds.ByGradientNorm,
    "foreach": kinds.WithForeach,
    "state in the constructor": kinds.StateInConstructor,
    "a kernel of its own": kinds.OwnKernel,
    "a compiled step": kinds.compiled_adamw,
    "compiled inside": kinds.CompiledInside,
    "a wrapper without hooks": lambda ps: kinds.Wrapper(torch.optim.AdamW(ps, lr=0.01, eps=1e-4), False),
    "a subclass of AdamW": lambda ps: type("Mine", (torch.optim.AdamW,), {})(ps, lr=0.01, eps=1e-4),
    "declared": lambda ps: type("Mine", (kinds.RarelyClipped,), {"fullshard_step": "element-wise"})(ps),
    "by the norm of a parameter": kinds.ByParameterNorm,
    "late": kinds.Late,
    "declared as owned": lambda ps: type("Mine", (kinds.ByRow,), {"fullshard_step": "owned"})(ps),
    "declared as gathered": lambda ps: type("Mine", (kinds.BySumOverAll,), {"fullshard_step": "gathered"})(
        ps
    ),
}
WRONG: dict[str, tuple[Callable[[Parameters], torch.optim.Optimizer], str]] = {
    "by a sum over all": (kinds.BySumOverAll, "the sum of"),
    "random": (kinds.Noisy, "random numbers"),
    "a wrapper without hooks": (lambda ps: kinds.Wrapper(torch.optim.AdamW(ps), True), "Wrapper"),
    "a wrong declaration": (
        lambda ps: type("Mine", (kinds.Plain,), {"fullshard_step": "full"})(ps),
        "fullshard_step is 'full'",
    ),
}


def _train_own() -> dict[str, Outcome]:
    return {name: cases.on_a_rank(Case(optimizer=make)) for name, make in OWN.items()}


def test_optimizer_of_ones_own_trains_as_in_one_process() -> None:
    outcomes = ranks.run(_train_own, 2)
    with torch.compiler.set_stance("force_eager"):  # the reference need not be compiled
        for name, make in OWN.items():
            cases.assert_as_in_one_process(Case(optimizer=make), [outcome[name] for outcome in outcomes])


def _refuse_wrong() -> dict[str, tuple[str, str, str]]:
    import fullshard as fs

    refused = {}
    for name, (make, _) in WRONG.items():
        model = fs.shard(build())
        optimizer = make(model.parameters())
        loss_of(model, batch(0, my_rank())).backward()
        before = [p.detach().clone() for p in model.parameters()]
        random = torch.get_rng_state()
        refused[name] = cases.refusal(optimizer.step)
        assert all(reference.bitwise(p.detach(), b) for p, b in zip(model.parameters(), before, strict=True))
        assert torch.equal(random, torch.get_rng_state())
        if name != "a wrong declaration":
            copied = fs.shard(build(), strategy="replicate")
            optimizer = make(copied.parameters())
            loss_of(copied, batch(0, my_rank())).backward()
            optimizer.step()
    return refused


def test_optimizer_that_is_provably_right_in_no_mode_is_refused_with_the_reason_on_all_ranks() -> None:
    first, second = ranks.run(_refuse_wrong, 2)
    for name, (_, part) in WRONG.items():
        assert first[name][0] == "OptimizerError"
        assert part in first[name][1], (name, first[name])
        assert first[name][1].removeprefix("rank 0") == second[name][1].removeprefix("rank 1")


def _with_plain_companion() -> bool:
    """An optimizer of an unsharded model is none of our business."""
    import fullshard as fs

    fs.shard(build())
    plain = build(Net, seed=3)
    optimizer = torch.optim.Adafactor(plain.parameters(), lr=0.1)
    loss_of(plain, batch(0, 0)).backward()
    optimizer.step()
    return not reference.bitwise(plain.head.weight.detach(), build(Net, seed=3).head.weight.detach())


def test_optimizer_of_an_unsharded_model_is_left_alone() -> None:
    assert all(ranks.run(_with_plain_companion, 2))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.turn = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.into(x).to(torch.complex64) @ self.turn.T).abs().square().mean()


def _complex_parameters(kind: str, foreach: bool, num_ranks: int) -> None:
    import fullshard as fs

    torch.manual_seed(0)
    single = _Complex()
    model = fs.shard(copy.deepcopy(single))
    rank = torch.distributed.get_rank()
    optimizers = [getattr(torch.optim, kind)(m.parameters(), foreach=foreach) for m in (single, model)]
    for _ in range(3):
        x = torch.randn(2 * num_ranks, 6)
        parts = (x, x.chunk(num_ranks)[rank])
        for each, optimizer, part in zip((single, model), optimizers, parts, strict=True):
            each(part).backward()
            optimizer.step()
            optimizer.zero_grad()
    with fs.full(model, writeback=False):
        for mine, whole in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "RMSprop", "Adagrad"])
def test_torchs_optimizers_step_on_shards_of_complex_parameters(kind: str, foreach: bool) -> None:
    ranks.run(_complex_parameters, 2, kind, foreach, 2)
