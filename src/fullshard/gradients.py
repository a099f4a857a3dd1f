"""The gradient shard type: torch's own norm, clipping and unscaling, made global.

`p.grad` holds this rank's elements. Element-wise work passes straight through. A reduction is
finished across ranks (norm, sum, max, any, ...), or refused by name: a number that is only true
for one rank never leaves silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _foreach_utils

from fullshard.collectives import Comm
from fullshard.errors import GradientError, StateError
from fullshard.piecewise import ABOUT, ELEMENT_WISE, KNOWN, RESHAPES

_plainly = torch._C.DisableTorchFunctionSubclass


class Holder:
    """What the gradients of one lane have in common."""

    any_postponed = False  # some holder of this process may be: the only thing the hot path looks at

    def __init__(self) -> None:
        self._postponed = False
        self.zeroed = False  # the user zeroed them while they were postponed

    @property
    def postponed(self) -> bool:
        """fs.accumulate: the values are elsewhere, this is a token."""
        return self._postponed

    @postponed.setter
    def postponed(self, value: bool) -> None:
        self._postponed = value
        Holder.any_postponed = Holder.any_postponed or value


_SETTLED = Holder()


class GradShard(torch.Tensor):
    """A gradient at rest. `comm` joins the ranks; `part` is what this rank answers for in a norm.

    Under strategy 'replicate' the gradient is whole on every rank and `part` is this rank's
    interval of it: norms then add up in the same order as for shards, bit for bit.
    """

    comm: Comm
    part: torch.Tensor
    whole: bool

    holder: Holder

    @staticmethod
    def make(
        values: torch.Tensor, comm: Comm, part: torch.Tensor | None = None, holder: Holder | None = None
    ) -> GradShard:
        gradient = values.as_subclass(GradShard)
        gradient.comm, gradient.holder = comm, holder or _SETTLED
        gradient.whole = part is not None
        gradient.part = values if part is None else part
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if Holder.any_postponed:
            _refuse_postponed(func, args, kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        name = _name(func)
        many = name.startswith(("_foreach_", "_fused_"))
        if not (many or name in KNOWN or name.rstrip("_") in ELEMENT_WISE or _all_whole(args, kwargs)):
            return _refuse(func, args, kwargs)
        with _plainly():
            out = func(*args, **kwargs)
        if type(out) is torch.Tensor and name not in ABOUT:
            return _relabel(func, out, args, kwargs)
        if many and isinstance(out, list | tuple):
            return [_relabel(func, o, (g,), {}) for o, g in zip(out, args[0], strict=True)]
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with _plainly():
            return self.detach().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with _plainly():
            values = self.detach().as_subclass(torch.Tensor)
        kept = "whole" if self.whole else f"this rank's {values.numel()} elements"
        return f"GradShard({kept}, {values!r})"


def _gradients(*places: Iterable[Any]) -> list[GradShard]:
    found: list[GradShard] = []
    for place in places:
        for arg in place:
            if isinstance(arg, GradShard):
                found.append(arg)
            elif isinstance(arg, list | tuple):
                found.extend(a for a in arg if isinstance(a, GradShard))
    return found


def _refuse_postponed(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    name = _name(func)
    if name in ("__get__", "__set__", "__repr__", "requires_grad_", "detach_"):
        return
    for gradient in _gradients(args, kwargs.values()):
        if gradient.holder.postponed:
            if name not in ("zero_", "_foreach_zero_"):
                raise StateError(
                    f"{name!r} on a gradient that fs.accumulate has postponed",
                    "Run the last micro-batch outside `with fs.accumulate(model):`, then read p.grad.",
                )
            gradient.holder.zeroed = True


def _all_whole(args: Any, kwargs: Any) -> bool:
    return all(g.whole for g in _gradients(args, kwargs.values()))


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def _relabel(func: Callable[..., Any], out: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Results of the same elements stay gradient shards, so that a later norm of them is global too."""
    for arg in args:
        if arg is out:
            return out
    found = _gradients(args, kwargs.values())
    if not found or found[0].whole:
        return out
    if out.shape == found[0].shape or (_name(func) in RESHAPES and out.numel() == found[0].numel()):
        return GradShard.make(out, found[0].comm)
    return _refuse(func, args, kwargs)


def _refuse(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    shapes = [tuple(g.shape) for g in _gradients(args, kwargs.values())]
    raise GradientError(
        f"{_name(func)!r} on a gradient shard (of shape {shapes[0] if shapes else '?'}) would give a result "
        "that is true for this rank alone",
        "Use element-wise functions, norms or whole sums of gradients, or strategy='replicate', whose "
        "gradients are whole on every rank.",
    )


# ---- norms


class PartialNorm(torch.Tensor):
    """One gradient's norm before the ranks have spoken. Stacking many of them costs one all-reduce;
    any other use finishes this one at once."""

    comm: Comm
    order: float

    @staticmethod
    def make(value: torch.Tensor, comm: Comm, order: float) -> PartialNorm:
        partial = value.as_subclass(PartialNorm)
        partial.comm, partial.order = comm, order
        return partial

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to:
            with _plainly():
                return PartialNorm.make(func(*args, **kwargs), args[0].comm, args[0].order)
        if func in (torch.stack, torch.cat) and isinstance(args[0], list | tuple):
            return func(_finish(args[0]), *args[1:], **kwargs)
        if _name(func) == "__get__":
            with _plainly():
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
        with _plainly():
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
        )
        for i, g in enumerate(gradients)
    ]


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.empty((), dtype=dtype).abs().dtype if dtype.is_complex else dtype


def _norm_call(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """torch.norm, Tensor.norm, linalg.norm and linalg.vector_norm of a whole gradient."""
    names = ["input", "p", "dim", "keepdim", "out", "dtype"]
    if func in (torch.linalg.vector_norm, torch.linalg.norm):
        names = ["x", "ord", "dim", "keepdim"]
    said = dict(zip(names, args, strict=False)) | kwargs
    gradient = said.get("input", said.get("x", said.get("self", said.get("A"))))
    if isinstance(gradient, GradShard) and gradient.whole and said.get("dim") is not None:
        with _plainly():
            return func(*args, **kwargs)
    if not isinstance(gradient, GradShard) or said.get("dim") is not None or said.get("out") is not None:
        return _refuse(func, args, kwargs)
    order = said.get("p", said.get("ord"))
    if func is torch.linalg.norm and order is not None and gradient.dim() > 1:
        return _refuse(func, args, kwargs)  # that is a matrix norm
    with _plainly():
        return _local_norms([gradient], _order(order), said.get("dtype"))[0]


def _foreach_norm(_: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    said = dict(zip(["self", "ord", "dtype"], args, strict=False)) | kwargs
    tensors = said.get("self", said.get("tensors"))
    if not all(isinstance(t, GradShard) for t in tensors):
        # A tensor that the user assigned to the p.grad of a sharded parameter is a shard too.
        tensors = [t if isinstance(t, GradShard) else _labelled(t) for t in tensors]
        return [torch.linalg.vector_norm(t, said.get("ord", 2), dtype=said.get("dtype")) for t in tensors]
    with _plainly():
        return _local_norms(tensors, _order(said.get("ord", 2)), said.get("dtype"))


def _nobody(_: torch.Tensor) -> Comm | None:
    return None


# Set by `optimizers`: the ranks that share the parameter whose .grad this is.
owners_comm: Callable[[torch.Tensor], Comm | None] = _nobody


def _labelled(gradient: torch.Tensor) -> torch.Tensor:
    comm = owners_comm(gradient)
    return gradient if comm is None else GradShard.make(gradient, comm)


# ---- other reductions of a whole gradient


def _reduction(combine: str) -> Callable[..., Any]:
    def reduce(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        gradient = args[0] if args else kwargs.get("input")
        if _all_whole(args, kwargs):
            with _plainly():
                return func(*args, **kwargs)
        options = {k: v for k, v in kwargs.items() if k != "input" and v is not None}
        if len(args) == 2 and isinstance(args[1], torch.Tensor):
            with _plainly():
                return _relabel(torch.add, func(*args, **kwargs), args, kwargs)  # maximum of two
        if not isinstance(gradient, GradShard) or len(args) > 1 or set(options) - {"dtype"}:
            return _refuse(func, args, kwargs)
        with _plainly():
            if _name(func) in ("any", "all") and not gradient.numel():
                out = torch.tensor(_name(func) == "all", device=gradient.device)
            else:
                out = func(gradient.part if gradient.numel() else _neutral(combine, gradient), **options)
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
    if gradient.whole:
        with _plainly():
            return func(*args, **kwargs)
    if len(args) > 1 or set(kwargs) - {"input"}:
        return _refuse(func, args, kwargs)
    count = torch.tensor(float(gradient.numel()), device=gradient.device)
    return torch.sum(gradient) / gradient.comm.sum_shards(count)


def _compare(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """torch.equal and allclose: true where every rank's part agrees."""
    with _plainly():
        found = _gradients(args, kwargs.values())
        here = torch.tensor(int(func(*args, **kwargs)), dtype=torch.uint8, device=found[0].device)
        return bool(here if found[0].whole else found[0].comm.min_shards(here))


def _dot(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if len(args) == 2 and not any(g.whole for g in _gradients(args)):
        return torch.sum(args[0] * args[1])
    with _plainly():
        return func(*args, **kwargs)


def _concatenate(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    with _plainly():
        out = func(*args, **kwargs)
    found = _gradients(args)
    if found[0].whole:
        return out
    return GradShard.make(out, found[0].comm) if len(found) == len(args[0]) else _refuse(func, args, kwargs)


def _unscale(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """GradScaler's check: an inf on one rank skips the step on every rank."""
    with _plainly():
        func(*args, **kwargs)
        found = _gradients(args)[0]
        if not found.whole:
            found.comm.max_shards(args[1])
    return None


def _never(*_: Any) -> bool:
    return False


_HANDLERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.is_sparse.__get__: _never,  # type: ignore[attr-defined]  # asked by optimizers, often
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
        _HANDLERS[getattr(torch, _function)] = _reduction(_combine_name)
        _HANDLERS[getattr(torch.Tensor, _function)] = _reduction(_combine_name)

# clip_grad_norm_ then asks for all norms in one call instead of one call a parameter.
_supported = getattr(_foreach_utils, "_foreach_supported_types", None)
if isinstance(_supported, list) and GradShard not in _supported:
    _supported.append(GradShard)
