"""The numbers to be met: the same training in one process, unsharded, on the global batch.

A global batch is the list of what each rank gets, `batches[step][rank]`. Its loss is the mean of the ranks'
losses, computed rank slice by rank slice, so that a loss that is a mean over tokens, a contrastive loss and
BatchNorm see here what they see on a rank. With `accumulate=k` the batches come k to a step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LossFn = Callable[[nn.Module, Any], Tensor]
OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Trace:
    """What a training run left: a loss and a gradient norm a step, and the parameters at its end."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, Tensor]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # eps far above Adam's own 1e-8: where a gradient is zero but for rounding (the bias of an attention's
    # keys is one) Adam divides noise by noise, and two right runs part by the whole learning rate.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    batches: Sequence[Sequence[Any]],
    loss_fn: LossFn,
    optimizer_fn: OptimizerFn,
    steps: int,
    clip: float | None = None,
    accumulate: int = 1,
) -> Trace:
    """Train unsharded on `steps * accumulate` global batches; a rank without a batch does not count."""
    optimizer = optimizer_fn(model.parameters())
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for batch in batches[step * accumulate : (step + 1) * accumulate]:
            for piece in batch:
                loss = loss_fn(model, piece) / (len(batch) * accumulate)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(_clip(model, clip))
        optimizer.step()
        optimizer.zero_grad()
    return Trace(losses, norms, whole_parameters(model))


def train_rank(
    model: nn.Module,
    batches: Sequence[Any],
    loss_fn: LossFn,
    optimizer_fn: OptimizerFn,
    steps: int,
    clip: float | None = None,
    accumulate: int = 1,
) -> Trace:
    """The same loop as a rank runs it on a model that `fs.shard` has sharded; `batches` are this rank's."""
    import fullshard as fs

    optimizer = optimizer_fn(model.parameters())
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for index in range(accumulate):
            last = index == accumulate - 1
            with contextlib.nullcontext() if last else fs.accumulate(model):
                loss = loss_fn(model, batches[step * accumulate + index]) / accumulate
                loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(_clip(model, clip))
        optimizer.step()
        optimizer.zero_grad()
    with fs.full(model, writeback=False):
        return Trace(losses, norms, whole_parameters(model))


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.detach().clone(memory_format=torch.contiguous_format) for name, p in model.named_parameters()
    }


def _clip(model: nn.Module, clip: float | None) -> float:
    # With an infinite limit the factor is exactly one: the norm is read and nothing changed.
    return float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip is None else clip))


def combine(traces: Sequence[Trace]) -> Trace:
    """The ranks' traces as one: losses averaged. What must be equal on all ranks is checked to be."""
    first = traces[0]
    for rank, trace in enumerate(traces):
        assert trace.grad_norms == first.grad_norms, (
            f"gradient norms differ: rank 0 {first.grad_norms}, rank {rank} {trace.grad_norms}"
        )
        assert list(trace.parameters) == list(first.parameters), f"rank {rank} names other parameters"
        for name, value in trace.parameters.items():
            assert bitwise(value, first.parameters[name]), f"{name} of rank {rank} is not that of rank 0"
    losses = [sum(column) / len(traces) for column in zip(*(t.losses for t in traces), strict=True)]
    return Trace(losses, first.grad_norms, first.parameters)


def bitwise(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bits; NaNs of the same bits are equal, 0.0 and -0.0 are not."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    a, b = (t.to_dense() if t.is_sparse else t for t in (a, b))
    as_bytes = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*as_bytes)


def assert_close_trace(a: Trace, b: Trace, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """`a` equals the reference `b` to rounding; otherwise the message names the step or the parameter."""
    for what, ours, theirs in (
        ("loss", a.losses, b.losses),
        ("gradient norm", a.grad_norms, b.grad_norms),
    ):
        assert len(ours) == len(theirs), f"{what}: {len(ours)} steps against {len(theirs)}"
        for step, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            close = abs(x - y) <= atol + rtol * abs(y)
            assert close, f"{what} of step {step}: {x!r}, reference {y!r} (all: {ours} against {theirs})"
    missing = b.parameters.keys() ^ a.parameters.keys()
    assert not missing, f"parameters on one side only: {sorted(missing)}"
    for name, reference in b.parameters.items():
        assert_close(a.parameters[name], reference, f"parameter {name}", rtol, atol)


def assert_close(value: Tensor, reference: Tensor, what: str, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert value.shape == reference.shape, f"{what}: {tuple(value.shape)}, reference {tuple(reference.shape)}"
    assert value.dtype == reference.dtype, f"{what}: {value.dtype}, reference {reference.dtype}"
    if torch.allclose(value, reference, rtol=rtol, atol=atol):
        return
    gap = (value - reference).abs()
    worst = int(gap.flatten().argmax())
    raise AssertionError(
        f"{what}: off by up to {gap.max().item():.3g} at element {worst} of {gap.numel()}: "
        f"{value.flatten()[worst].item()!r}, reference {reference.flatten()[worst].item()!r}"
    )
