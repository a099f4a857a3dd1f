"""A training loop with one part exchanged: the same case in one process and on ranks, held to each other.

A case is how a model is made and how one piece of a batch is turned into gradients. In one process it runs
once for each rank's piece with weight 1/ranks, on a rank once with weight 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import engines
import reference
from engines import WIDTH, Net, batch, build, loss_of, my_rank, shard_blocks
from reference import Trace

ALL = ("zero3", "zero2", "zero1", "replicate")

Piece = tuple[Tensor, Tensor]


def plainly(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = loss_of(model, piece) * weight
    loss.backward()
    return loss.item()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = Net
    backward: Callable[[nn.Module, Piece, float], float] = plainly
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    options: dict[str, Any] = field(default_factory=dict)
    after_shard: Callable[[nn.Module], Any] = lambda _: None
    steps: int = 3


@dataclass(frozen=True)
class Outcome:
    trace: Trace
    without_gradient: list[set[str]]  # names of the parameters that had none, by step


def in_one_process(case: Case, num_ranks: int = 2) -> Outcome:
    model = build(case.make)
    return _train(case, model, case.optimizer(model.parameters()), range(num_ranks), 1 / num_ranks)


def on_a_rank(case: Case, **options: Any) -> Outcome:
    model = shard_blocks(build(case.make), **(case.options | options))
    case.after_shard(model)
    outcome = _train(case, model, case.optimizer(model.parameters()), [my_rank()], 1.0)
    whole = engines.whole("fullshard", model)
    return Outcome(Trace(outcome.trace.losses, outcome.trace.grad_norms, whole), outcome.without_gradient)


def _train(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, pieces: Iterable[int], weight: float
) -> Outcome:
    losses, norms, without = [], [], []
    for step in range(case.steps):
        losses.append(sum(case.backward(model, batch(step, rank), weight) for rank in pieces))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        without.append({name for name, p in model.named_parameters() if p.grad is None})
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(Trace(losses, norms, reference.whole_parameters(model)), without)


def assert_as_in_one_process(
    case: Case, outcomes: list[Outcome], rtol: float = 2e-5, atol: float = 2e-6
) -> None:
    """Losses, norms, final parameters, and which parameters had no gradient."""
    expected = in_one_process(case, len(outcomes))
    for rank, outcome in enumerate(outcomes):
        assert outcome.without_gradient == expected.without_gradient, (
            f"rank {rank}, parameters without a gradient by step: {outcome.without_gradient}, "
            f"in one process {expected.without_gradient}"
        )
    combined = reference.combine([outcome.trace for outcome in outcomes])
    reference.assert_close_trace(combined, expected.trace, rtol, atol)


def in_turn(names: Iterable[str], options: int, always: int, others: int) -> list[tuple[str, int]]:
    """(name, number of an option): each name with the first `always` options and some `others`, in turn."""
    rest = options - always
    return [
        (name, at)
        for number, name in enumerate(names)
        for at in (*range(always), *(always + (number * others + k) % rest for k in range(others)))
    ]


def refusal(call: Callable[[], Any]) -> tuple[str, str, str]:
    """(class, message, remedy) of the FullshardError that `call` ends with; no error is a failure."""
    from fullshard import FullshardError

    try:
        value = call()
    except FullshardError as error:
        return type(error).__name__, str(error), error.remedy
    raise AssertionError(f"nothing was refused: {value!r}")


# --- short ways to what most tests do -------------------------------------------------------------------


def sharded(strategy: str = "zero3", make: Callable[[], nn.Module] = Net, **options: Any) -> nn.Module:
    return shard_blocks(build(make), strategy=strategy, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return engines.whole("fullshard", model)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(reference.bitwise(a[name].detach(), b[name].detach()) for name in a)


def fresh_values(seed: int = 0) -> dict[str, Tensor]:
    return reference.whole_parameters(build(seed=seed))


def train_step(model: nn.Module, step: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loss_of(model, batch(step, my_rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_in_one_process(steps: range, model: nn.Module | None = None) -> dict[str, Tensor]:
    model = build() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in steps:
        for rank in range(2):
            (loss_of(model, batch(step, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return reference.whole_parameters(model)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        reference.assert_close(found[name], value, name)


def backward(model: nn.Module, step: int = 0, factor: float = 1.0) -> None:
    (loss_of(model, batch(step, my_rank())) * factor).backward()


def gradients_of_one_process(steps: range = range(1), num_ranks: int = 2) -> nn.Module:
    model = build()
    for step in steps:
        for rank in range(num_ranks):
            (loss_of(model, batch(step, rank)) / num_ranks).backward()
    return model


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients put together from all ranks, by way of the parameters: p <- p.grad, then fs.full."""
    import fullshard as fs

    none = {name for name, p in model.named_parameters() if p.grad is None}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    with fs.full(model, writeback=False):
        return {n: None if n in none else v for n, v in reference.whole_parameters(model).items()}


def assert_gradients(found: dict[str, Tensor | None], expected: nn.Module) -> None:
    for name, p in expected.named_parameters():
        value = found[name]
        assert (value is None) == (p.grad is None), name
        if value is not None and p.grad is not None:
            reference.assert_close(value, p.grad, f"gradient of {name}")


class WithConv(Net):
    """Uneven sizes, a buffer, and a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        assert self.conv.weight.is_contiguous(memory_format=torch.channels_last)
        x = self.norm(x) * self.scale
        image = x[:, :6].reshape(-1, 3, 2, 1)
        return super().forward(x) + self.conv(image).mean((2, 3))
