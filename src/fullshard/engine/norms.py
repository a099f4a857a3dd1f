"""Norms, sums and comparisons of gradient shards, finished across ranks.

Importing this module teaches GradShard these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _device

from fullshard.comm.groups import Comm
from fullshard.engine import gradients
from fullshard.engine.cuts import Cut, is_everything
from fullshard.engine.gradients import (
    HANDLERS,
    GradShard,
    Step,
    all_replicated,
    gradients_in,
    name_of,
    plainly,
    refuse,
    relabel,
)
from fullshard.engine.homes.away_gradients import AwayGradient
from fullshard.errors import GradientError
from fullshard.plan.layout import shard_shape


@functools.cache
def _unknown(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


class PartialNorm(torch.Tensor):
    """One gradient's norm before the ranks have summed it. Stacking many of them costs one all-reduce;
    any other use finishes this one at once. Where torch reads it unseen (`alpha=`), it is NaN.
    """

    comm: Comm
    order: float
    total: type[torch.Tensor] | None  # see GradShard
    local: torch.Tensor
    value: torch.Tensor | None  # of all ranks, once it was used

    @staticmethod
    def make(
        local: torch.Tensor, comm: Comm, order: float, total: type[torch.Tensor] | None = None
    ) -> PartialNorm:
        partial = _unknown(local.dtype, local.device).as_subclass(PartialNorm)
        partial.comm, partial.order, partial.total = comm, order, total
        partial.local, partial.value = local, None
        return partial

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and isinstance(args[0], PartialNorm) and args[0].value is None:
            with plainly():
                moved = func(args[0].local, *args[1:], **kwargs)
                return PartialNorm.make(moved, args[0].comm, args[0].order, args[0].total)
        if name_of(func) == "__get__":
            with plainly():
                out = func(*args, **kwargs)
            if not isinstance(out, torch.Tensor):
                return out  # shape, dtype, device, ...
        out = func(*finish(args), **finish(kwargs))
        if func in (torch.stack, torch.cat) and args and isinstance(args[0], list | tuple):
            kind = getattr(args[0][0], "total", None)
            return out if kind is None else out.as_subclass(kind)
        return out


def finish(value: Any) -> Any:
    """Arguments of a function, with the norms in them made global, wherever they are."""
    partials = list(_partials(value))
    if not partials:
        return value
    _sum_up(partials)
    return _finished(value)


def _partials(value: Any) -> Iterator[PartialNorm]:
    items = value.values() if isinstance(value, dict) else value
    for item in items:
        if isinstance(item, PartialNorm):
            yield item
        elif isinstance(item, list | tuple | dict):
            yield from _partials(item)


def _finished(value: Any) -> Any:
    if isinstance(value, PartialNorm):
        return value.value
    if isinstance(value, dict):
        return {key: _finished(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_finished, value))
    return value


gradients.finish_norms = finish


def _sum_up(partials: Sequence[PartialNorm]) -> None:
    """All of one kind together. What was summed is kept: a write in place changes that."""
    kinds: dict[tuple[int, float, torch.dtype], list[PartialNorm]] = {}
    for partial in partials:
        if partial.value is None:
            kinds.setdefault((id(partial.comm), partial.order, partial.local.dtype), []).append(partial)
    for (_, order, dtype), alike in kinds.items():
        with plainly():
            local = torch.stack([partial.local for partial in alike]).to(torch.float64)
            total = _combine(local, order, alike[0].comm).to(dtype)
            for partial, value in zip(alike, total.unbind(), strict=True):
                partial.value = value


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


def _local_norms(shards: Sequence[GradShard], order: float, dtype: torch.dtype | None) -> list[PartialNorm]:
    if shards[0].comm.fixed_sums:
        return _fixed_norms(shards, order, dtype)
    values: dict[int, torch.Tensor] = {}
    near: dict[int, torch.Tensor] = {}
    for i, g in enumerate(shards):
        if isinstance(g, AwayGradient):  # one after the other: they may not fit on the device together
            values[i] = _norm_of_away(g, order, dtype)
        elif g.part.numel():
            near[i] = g.part
        else:
            values[i] = torch.zeros((), dtype=dtype or _real(g.dtype), device=g.device)
    if near:
        values |= zip(near, torch._foreach_norm(list(near.values()), order, dtype=dtype), strict=True)
    return [PartialNorm.make(values[i], g.comm, order, g.total) for i, g in enumerate(shards)]


def _fixed_norms(shards: Sequence[GradShard], order: float, dtype: torch.dtype | None) -> list[PartialNorm]:
    """Norms of all ranks, the same bits however elements are cut into shards (reduce='fixed').

    Powers of elements are rounded to multiples of one unit, so coarse that sums of them are exact in fp64, in
    any order; what that leaves out is summed in the same way, in a finer unit. The unit follows from the
    largest element and the number of elements of the unsharded gradient.
    """
    comm = shards[0].comm
    largest = comm.max_shards(torch.stack([_largest(shard.part) for shard in shards]))
    if order == float("inf"):
        totals = largest
    elif order == 0:
        totals = comm.sum_shards(torch.stack([shard.part.count_nonzero().double() for shard in shards]))
    else:
        scales = torch.exp2(-torch.frexp(largest).exponent.double())
        pairs = zip(shards, scales.unbind(), strict=True)
        sums = torch.stack([_exact_sums(shard, order, scale) for shard, scale in pairs])
        totals = comm.sum_shards(sums).sum(1).pow_(1.0 / order).div_(scales)
        totals = torch.where(largest.isfinite(), totals, largest)
    values = [total.to(dtype or _real(g.dtype)) for g, total in zip(shards, totals.unbind(), strict=True)]
    partials = [PartialNorm.make(v, comm, order, g.total) for g, v in zip(shards, values, strict=True)]
    for partial, value in zip(partials, values, strict=True):
        partial.value = value
    return partials


def _largest(part: torch.Tensor) -> torch.Tensor:
    return part.abs().max().double() if part.numel() else part.new_zeros((), dtype=torch.float64)


def _exact_sums(shard: GradShard, order: float, scale: torch.Tensor) -> torch.Tensor:
    """Two sums of this rank's elements, exact over all ranks: a coarse one, and of what that leaves out."""
    bits = 50 - _count_on_all_ranks(shard).bit_length()  # so many multiples of 2^-bits are added exactly
    values = (shard.part.abs().double() * scale).pow_(order)  # at most 1
    coarse = (values * 2.0**bits).round_().mul_(2.0**-bits)
    fine = values.sub_(coarse).mul_(4.0**bits).round_().mul_(4.0**-bits)
    return torch.stack([coarse.sum(), fine.sum()])


def _count_on_all_ranks(shard: GradShard) -> int:
    if shard.cut is not None:
        return _count(shard)
    return int(shard.comm.sum_shards(torch.tensor(float(shard.part.numel()), device=shard.device)))


def _norm_of_away(shard: AwayGradient, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    known = shard.known_norm if order == 2.0 and dtype is None else None
    if known is not None:
        return known
    part = shard.part
    if not part.numel():
        return torch.zeros((), dtype=dtype or _real(part.dtype), device=part.device)
    return torch._foreach_norm([part], order, dtype=dtype)[0]


def _device_of(shard: torch.Tensor) -> torch.device:
    with plainly():
        return shard.comm.device if isinstance(shard, AwayGradient) else shard.device


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
        if _is_differentiable(gradient):
            return _differentiable_norm(gradient, _order(order), func, given.get("dtype"))
        return _local_norms([gradient], _order(order), given.get("dtype"))[0]


def _is_differentiable(shard: GradShard) -> bool:
    """Of a parameter in a penalty. An AwayGradient is not: its part is not brought here to ask."""
    return not isinstance(shard, AwayGradient) and shard.part.requires_grad


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks of what each computed from its elements. Each is one term: its gradient passes."""

    @staticmethod
    def forward(_: Any, local: torch.Tensor, comm: Comm) -> torch.Tensor:
        return comm.sum_shards(local.detach().clone())

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0], None


def sum_over_ranks(local: torch.Tensor, comm: Comm) -> torch.Tensor:
    if local.requires_grad:
        return _SumOverRanks.apply(local, comm)  # type: ignore[no-any-return,no-untyped-call]
    return comm.sum_shards(local.clone())


def _differentiable_norm(
    shard: GradShard, order: float, func: Callable[..., Any], dtype: torch.dtype | None
) -> torch.Tensor:
    """Of a parameter in a penalty; of zeros it has the gradient zero, as torch's own."""
    if order in (0.0, float("inf")):
        return refuse(func, (shard,), {})  # type: ignore[no-any-return]
    part = shard.part if dtype is None else shard.part.to(dtype)
    total = sum_over_ranks(part.abs().pow(order).sum(), shard.comm)
    positive = total > 0
    return torch.where(positive, total, 1).pow(1 / order) * positive


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
        if len(args) == 2 and isinstance(args[1], torch.Tensor):  # maximum of two
            args, kwargs = gradients.fitted(torch.maximum, args, kwargs, many=False)
            with plainly():
                return relabel(torch.add, func(*args, **kwargs), args, kwargs)
        if not isinstance(gradient, GradShard) or len(args) > 1 or set(options) - {"dtype"}:
            return refuse(func, args, kwargs)
        if _is_differentiable(gradient) and combine != "sum" and name_of(func) not in ("any", "all"):
            return refuse(func, args, kwargs)  # its gradient is that of one element, on one rank
        with plainly():
            if name_of(func) in ("any", "all") and not gradient.part.numel():
                out = torch.tensor(name_of(func) == "all", device=gradient.device)
            elif combine == "sum":
                return sum_over_ranks(func(gradient.part, **options), gradient.comm)
            else:
                out = func(gradient.part if gradient.part.numel() else _neutral(combine, gradient), **options)
            flags = out.dtype is torch.bool
            local = out.to(torch.uint8) if flags else out.clone()
            total: torch.Tensor = getattr(gradient.comm, f"{combine}_shards")(local)
            return total.to(torch.bool) if flags else total

    return reduce


def _neutral(combine: str, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.dtype is torch.bool:
        return gradient.new_full((1,), combine == "min")
    return gradient.new_full((1,), float("-inf") if combine == "max" else float("inf"))


def _count(shard: GradShard) -> int:
    assert shard.cut is not None
    return shard.cut.num_elements


def _mean(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    gradient = args[0] if args else kwargs["input"]
    if gradient.replicated:
        with plainly():
            return func(*args, **kwargs)
    if len(args) > 1 or set(kwargs) - {"input"}:
        return refuse(func, args, kwargs)
    if gradient.cut is not None:
        return torch.sum(gradient) / _count(gradient)
    count = torch.tensor(float(gradient.part.numel()), device=gradient.device)
    return torch.sum(gradient) / gradient.comm.sum_shards(count)


def _compare(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """torch.equal and allclose: true where every rank's part agrees."""
    args, kwargs = gradients.fitted(func, args, kwargs, many=False)
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
    found = gradients_in(args)
    if found[0].replicated:
        with plainly():
            return func(*args, **kwargs)
    # Beside tensor parallelism some count on one rank of its group and some on all: no one answer for both.
    parallel = found[0].comm.world is not found[0].comm
    if parallel or len(found) < len(args[0]):
        return refuse(func, args, kwargs)
    with plainly():
        if Step.running or any(g.cut is None for g in found):
            return GradShard.make(func(*args, **kwargs).as_subclass(torch.Tensor), found[0].comm)
        shape = tuple(func(list(map(gradients.empty_like, found)), *args[1:], **kwargs).shape)
        flat = torch.cat([g.elements().reshape(-1).to(g.comm.device) for g in found])  # some are on the host
        return found[0].like(flat.view(shard_shape(shape, flat.numel())), Cut(shape, None))


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
    if all_replicated(args, kwargs):
        with plainly():
            return func(*args, **kwargs)  # type: ignore[no-any-return]
    number = not isinstance(value, torch.Tensor) or value.dim() == 0
    if is_everything(mask) and isinstance(target, GradShard):
        target.copy_(value) if isinstance(value, torch.Tensor) else target.fill_(value)
        return None
    if not (isinstance(mask, torch.Tensor) and mask.dtype is torch.bool and number):
        return refuse(func, args, kwargs)  # type: ignore[no-any-return]
    (target, mask, value), _ = gradients.fitted(func, args, kwargs, many=False)
    if gradients.local_shape(mask) != gradients.local_shape(target):
        return refuse(func, args, kwargs)  # type: ignore[no-any-return]
    with plainly():
        return func(target, mask, value)  # type: ignore[no-any-return]


# ---- what a gradient is, and how its values leave torch


def _never(*_: Any) -> bool:
    return False


def _own(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with plainly():
        return func(*args, **kwargs)


def _about_all_ranks(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Questions about the shape are answered for the unsharded gradient, except while an optimizer steps."""

    def call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        shard = args[0] if args else kwargs.get("input")
        if Step.running or not isinstance(shard, GradShard) or shard.replicated or shard.cut is None:
            return _own(func, args, kwargs)
        return answer(shard, *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})

    return call


def _shape(shard: GradShard, dim: int | None = None) -> Any:
    assert shard.cut is not None
    return torch.Size(shard.cut.shape) if dim is None else shard.cut.shape[dim]


def _length(shard: GradShard) -> int:
    assert shard.cut is not None
    return shard.cut.shape[0]


def _size_bytes(shard: GradShard) -> int:
    return _count(shard) * shard.element_size()


def _number(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """item(), float() and bool(): of a gradient that has one element, on whichever rank."""
    shard = args[0]
    if _is_local(args, kwargs):
        return _own(func, args, kwargs)
    if _count(shard) != 1:
        return refuse(func, args, kwargs)
    with plainly():
        return func(shard.comm.sum_shards(shard.part.detach().sum()))


def _leaving(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Values that would leave torch, or lose their type: one rank's part under the name of all."""
    return _own(func, args, kwargs) if _is_local(args, kwargs) else refuse(func, args, kwargs)


def _is_local(args: Any, kwargs: Any) -> bool:
    """Whether this rank's elements are meant: by an optimizer that steps, or of a state that it keeps."""
    return Step.running > 0 or all(g.replicated or g.cut is None for g in gradients_in(args, kwargs.values()))


HANDLERS |= {
    torch.Tensor.device.__get__: lambda _, args, __: _device_of(*args),
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
    torch.Tensor.shape.__get__: _about_all_ranks(_shape),  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__: _about_all_ranks(_size_bytes),  # type: ignore[attr-defined]
    torch.Tensor.size: _about_all_ranks(_shape),
    torch.numel: _about_all_ranks(_count),
    torch.Tensor.numel: _about_all_ranks(_count),
    torch.Tensor.nelement: _about_all_ranks(_count),
    torch.Tensor.__len__: _about_all_ranks(_length),
}
_NUMBERS = ("item", "__float__", "__int__", "__bool__", "__index__", "__complex__")
HANDLERS |= {getattr(torch.Tensor, name): _number for name in _NUMBERS}
_LEAVING = ("numpy", "tolist", "__array__", "__dlpack__", "new_tensor")
HANDLERS |= {getattr(torch.Tensor, name): _leaving for name in _LEAVING}
HANDLERS[torch.Tensor.__cuda_array_interface__.__get__] = _leaving


# ---- functions that make a tensor from anything, and hand a gradient to none of the above

_CONSTRUCTORS = {"tensor": "aten::tensor", "as_tensor": "aten::as_tensor", "asarray": None}


def _constructor(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, GradShard):
            if not _is_local((data,), {}):
                return refuse(original, (data,), {})
        elif isinstance(data, list | tuple | PartialNorm):
            (data,) = finish((data,))
        return original(data, *args, **kwargs)

    return make


def watch_constructors() -> None:
    """From now on `torch.tensor(gradient)` is refused; norms in `torch.tensor([...])` are of all ranks."""
    by_device = getattr(_device, "_device_constructors", None)
    register = getattr(torch.jit._builtins, "_register_builtin", None)
    if by_device is None or register is None:
        return
    by_device()  # `with torch.device(...)` keeps a set of torch's own
    for name, builtin in _CONSTRUCTORS.items():
        original = getattr(torch, name)
        if hasattr(original, "__wrapped__"):
            continue
        wrapped = _constructor(original)
        wrapped.__module__, wrapped.__qualname__ = "torch", name
        if builtin is not None:
            register(wrapped, builtin)  # scripted functions go on calling torch's own
        setattr(torch, name, wrapped)


for _combine_name, _functions in {
    "sum": ("sum", "count_nonzero"),
    "max": ("max", "amax", "any"),
    "min": ("min", "amin", "all"),
}.items():
    for _function in _functions:
        HANDLERS[getattr(torch, _function)] = _reduction(_combine_name)
        HANDLERS[getattr(torch.Tensor, _function)] = _reduction(_combine_name)
