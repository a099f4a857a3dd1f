"""Norms, sums and comparisons of gradient shards, finished across ranks.

Importing this module teaches GradShard these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fullshard.comm.groups import Comm
from fullshard.engine.gradients import (
    HANDLERS,
    GradShard,
    all_replicated,
    gradients_in,
    name_of,
    plainly,
    refuse,
    relabel,
)
from fullshard.errors import GradientError


class PartialNorm(torch.Tensor):
    """One gradient's norm before the ranks have error_fields. Stacking many of them costs one all-reduce;
    any other use finishes this one at once."""

    comm: Comm
    order: float
    total: type[torch.Tensor] | None  # see GradShard

    @staticmethod
    def make(
        value: torch.Tensor, comm: Comm, order: float, total: type[torch.Tensor] | None = None
    ) -> PartialNorm:
        partial = value.as_subclass(PartialNorm)
        partial.comm, partial.order, partial.total = comm, order, total
        return partial

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            with plainly():
                return PartialNorm.make(func(*args, **kwargs), args[0].comm, args[0].order, args[0].total)
        if func in (torch.stack, torch.cat) and isinstance(args[0], list | tuple):
            out = func(_finish(args[0]), *args[1:], **kwargs)
            kind = getattr(args[0][0], "total", None)
            return out if kind is None else out.as_subclass(kind)
        if name_of(func) == "__get__":
            with plainly():
                out = func(*args, **kwargs)
            if not isinstance(out, torch.Tensor):
                return out  # shape, dtype, device, ...
        return func(*_finish(args), **kwargs)


def _finish(values: Sequence[Any]) -> list[Any]:
    """Replace partial norms by global ones, all of one kind together."""
    result = list(values)
    kinds: dict[tuple[int, float], list[int]] = {}
    for i, value in enumerate(result):
        if isinstance(value, PartialNorm):
            kinds.setdefault((id(value.comm), value.order), []).append(i)
    for (_, order), places in kinds.items():
        comm, dtype = result[places[0]].comm, result[places[0]].dtype
        with plainly():
            local = torch.stack([result[i] for i in places]).to(torch.float64)
            total = _combine(local, order, comm).to(dtype)
        for i, value in zip(places, total.unbind(), strict=True):
            result[i] = value
    return result


def _combine(norms: torch.Tensor, order: float, comm: Comm) -> torch.Tensor:
    if order == float("inf"):
        return comm.max_shards(norms)
    if order == 0:
        return comm.sum_shards(norms)
    return comm.sum_shards(norms.pow_(order)).pow_(1.0 / order)


def _order(value: Any) -> float:
    order = 2.0 if value in (None, "fro") else value
    if not isinstance(order, int | float) or order < 0:
        raise GradientError(
            f"a norm of order {value!r} of a gradient shard is not supported", "Use 0, 1, 2, or inf."
        )
    return float(order)


def _local_norms(
    gradients: Sequence[GradShard], order: float, dtype: torch.dtype | None
) -> list[PartialNorm]:
    parts = [g.part for g in gradients]
    filled = [i for i, part in enumerate(parts) if part.numel()]
    values: dict[int, torch.Tensor] = {}
    if filled:
        norms = torch._foreach_norm([parts[i] for i in filled], order, dtype=dtype)
        values = dict(zip(filled, norms, strict=True))
    return [
        PartialNorm.make(
            values[i] if i in values else torch.zeros((), dtype=dtype or _real(g.dtype), device=g.device),
            g.comm,
            order,
            g.total,
        )
        for i, g in enumerate(gradients)
    ]


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.empty((), dtype=dtype).abs().dtype if dtype.is_complex else dtype


def _norm_call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """torch.norm, Tensor.norm, linalg.norm and linalg.vector_norm of a full gradient."""
    names = ["input", "p", "dim", "keepdim", "out", "dtype"]
    if func in (torch.linalg.vector_norm, torch.linalg.norm):
        names = ["x", "ord", "dim", "keepdim"]
    given = dict(zip(names, args, strict=False)) | kwargs
    gradient = given.get("input", given.get("x", given.get("self", given.get("A"))))
    if isinstance(gradient, GradShard) and gradient.replicated and given.get("dim") is not None:
        with plainly():
            return func(*args, **kwargs)
    if not isinstance(gradient, GradShard) or given.get("dim") is not None or given.get("out") is not None:
        return refuse(func, args, kwargs)
    order = given.get("p", given.get("ord"))
    if func is torch.linalg.norm and order is not None and gradient.dim() > 1:
        return refuse(func, args, kwargs)  # that is a matrix norm
    with plainly():
        return _local_norms([gradient], _order(order), given.get("dtype"))[0]


def _foreach_norm(_: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    given = dict(zip(["self", "ord", "dtype"], args, strict=False)) | kwargs
    tensors = given.get("self", given.get("tensors"))
    if not all(isinstance(t, GradShard) for t in tensors):
        # A tensor that the user assigned to the p.grad of a sharded parameter is a shard too.
        tensors = [t if isinstance(t, GradShard) else _labelled(t) for t in tensors]
        return [torch.linalg.vector_norm(t, given.get("ord", 2), dtype=given.get("dtype")) for t in tensors]
    with plainly():
        return _local_norms(tensors, _order(given.get("ord", 2)), given.get("dtype"))


def _nobody(_: torch.Tensor) -> tuple[Comm, bool] | None:
    return None


# Set by `optimizers`: the ranks that share the parameter whose .grad this is, and whether this one answers.
owners_comm: Callable[[torch.Tensor], tuple[Comm, bool] | None] = _nobody


def _labelled(gradient: torch.Tensor) -> torch.Tensor:
    found = owners_comm(gradient)
    return gradient if found is None else GradShard.make(gradient, found[0], answers=found[1])


# ---- other reductions of a full gradient


def _reduction(combine: str) -> Callable[..., Any]:
    def reduce(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        gradient = args[0] if args else kwargs.get("input")
        if all_replicated(args, kwargs):
            with plainly():
                return func(*args, **kwargs)
        options = {k: v for k, v in kwargs.items() if k != "input" and v is not None}
        if len(args) == 2 and isinstance(args[1], torch.Tensor):
            with plainly():
                return relabel(torch.add, func(*args, **kwargs), args, kwargs)  # maximum of two
        if not isinstance(gradient, GradShard) or len(args) > 1 or set(options) - {"dtype"}:
            return refuse(func, args, kwargs)
        with plainly():
            if name_of(func) in ("any", "all") and not gradient.part.numel():
                out = torch.tensor(name_of(func) == "all", device=gradient.device)
            else:
                out = func(gradient.part if gradient.part.numel() else _neutral(combine, gradient), **options)
            flags = out.dtype is torch.bool
            local = out.to(torch.uint8) if flags else out.clone()
            total: torch.Tensor = getattr(gradient.comm, f"{combine}_shards")(local)
            return total.to(torch.bool) if flags else total

    return reduce


def _neutral(combine: str, gradient: torch.Tensor) -> torch.Tensor:
    if combine == "sum":
        return gradient.new_zeros(1)
    if gradient.dtype is torch.bool:
        return gradient.new_full((1,), combine == "min")
    return gradient.new_full((1,), float("-inf") if combine == "max" else float("inf"))


def _mean(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    gradient = args[0] if args else kwargs["input"]
    if gradient.replicated:
        with plainly():
            return func(*args, **kwargs)
    if len(args) > 1 or set(kwargs) - {"input"}:
        return refuse(func, args, kwargs)
    count = torch.tensor(float(gradient.part.numel()), device=gradient.device)
    return torch.sum(gradient) / gradient.comm.sum_shards(count)


def _compare(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """torch.equal and allclose: true where every rank's part agrees."""
    with plainly():
        found = gradients_in(args, kwargs.values())
        here = torch.tensor(int(func(*args, **kwargs)), dtype=torch.uint8, device=found[0].device)
        return bool(here if found[0].replicated else found[0].comm.min_shards(here))


def _dot(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if len(args) == 2 and not any(g.replicated for g in gradients_in(args)):
        return torch.sum(args[0] * args[1])
    with plainly():
        return func(*args, **kwargs)


def _concatenate(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with plainly():
        out = func(*args, **kwargs)
    found = gradients_in(args)
    if found[0].replicated:
        return out
    # Beside tensor parallelism some count on one rank of its group and some on all: no one answer for both.
    parallel = found[0].comm.world is not found[0].comm
    if parallel or len(found) < len(args[0]):
        return refuse(func, args, kwargs)
    return GradShard.make(out, found[0].comm)


def _unscale(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """GradScaler's check: an inf on one rank skips the step on every rank."""
    with plainly():
        func(*args, **kwargs)
        cut = next((g for g in gradients_in(args) if not g.replicated), None)
        if cut is not None:
            cut.comm.max_shards(args[1])
    return None


def _set_item(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """g[mask] = number, where the mask has g's own shape: element-wise (Rprop does it)."""
    target, mask, value = args
    own = isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and mask.shape == target.shape
    number = not isinstance(value, torch.Tensor) or value.dim() == 0
    if not (own and number) and not all_replicated(args, kwargs):
        return refuse(func, args, kwargs)  # type: ignore[no-any-return]
    with plainly():
        func(*args, **kwargs)
    return None


def _never(*_: Any) -> bool:
    return False


HANDLERS |= {
    torch.Tensor.is_sparse.__get__: _never,  # type: ignore[attr-defined]  # optimizers read it often
    torch.norm: _norm_call,
    torch.Tensor.norm: _norm_call,
    torch.linalg.norm: _norm_call,
    torch.linalg.vector_norm: _norm_call,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    torch.cat: _concatenate,
    torch.dot: _dot,
    torch.vdot: _dot,
    torch.Tensor.dot: _dot,
    torch.Tensor.vdot: _dot,
    torch.Tensor.__setitem__: _set_item,
    torch.equal: _compare,
    torch.allclose: _compare,
    torch.Tensor.equal: _compare,
    torch.Tensor.allclose: _compare,
}
for _combine_name, _functions in {
    "sum": ("sum", "count_nonzero"),
    "max": ("max", "amax", "any"),
    "min": ("min", "amin", "all"),
}.items():
    for _function in _functions:
        HANDLERS[getattr(torch, _function)] = _reduction(_combine_name)
        HANDLERS[getattr(torch.Tensor, _function)] = _reduction(_combine_name)
