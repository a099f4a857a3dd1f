"""The gradient shard type: torch's own norm, clipping and unscaling, made global.

`p.grad` holds this rank's elements. Element-wise work passes straight through. A reduction is
finished across ranks (norm, sum, max, any, ...), or refused by name: a number that is only true
for one rank is never returned silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _foreach_utils

from fullshard.comm.groups import Comm
from fullshard.engine.cuts import Cut, operand
from fullshard.engine.homes.transfers import Mark
from fullshard.engine.piecewise import (
    ABOUT,
    ELEMENT_WISE,
    IN_PLACE_OPERATORS,
    KNOWN,
    PERMUTES,
    RESHAPES,
    UNARY,
)
from fullshard.errors import GradientError, StateError
from fullshard.plan.layout import shard_shape

plainly = torch._C.DisableTorchFunctionSubclass
HANDLERS: dict[Any, Callable[..., Any]] = {}  # functions that are finished across ranks; `norms` fills it


class Holder:
    """What the gradients of one lane have in common."""

    any_postponed = False  # some holder of this process may be: the only thing the hot path looks at
    any_updating = False

    def __init__(self) -> None:
        self._postponed = False
        self._update: Mark | None = None
        self.zeroed = False  # the user zeroed them while they were postponed

    @property
    def postponed(self) -> bool:
        """fs.accumulate: the values are elsewhere, this is a token."""
        return self._postponed

    @postponed.setter
    def postponed(self, value: bool) -> None:
        self._postponed = value
        Holder.any_postponed = Holder.any_postponed or value

    def read_until(self, update: Mark | None) -> None:
        """A step that goes on beside computing reads these gradients until then."""
        self._update = update
        Holder.any_updating = Holder.any_updating or update is not None

    def await_update(self) -> None:
        """What computes with these gradients from here on begins behind a step that may read them yet."""
        if self._update is not None:
            self._update.wait()
            self._update = None


_SETTLED = Holder()


class Step:
    """How many optimizers step, one inside another: there shapes and counts are this rank's, as their
    arithmetic needs them."""

    running = 0
    on_chunks = False  # one does so on chunks, which parameters show meanwhile


class GradShard(torch.Tensor):
    """A gradient at rest. `comm` joins the ranks; `part` is what this rank answers for in a norm.

    To user code it has the unsharded shape: `shape`, `numel()` and `len()` are of all ranks together, a norm
    or a sum as well, and a mask of the unsharded shape is cut like it. While an optimizer steps, it has the
    shape of this rank's elements. What one rank cannot answer is refused, on all ranks alike.

    Under strategy 'replicate' the gradient is complete on every rank and `part` is this rank's
    interval of it: norms then add up in the same order as for shards, bit for bit.
    """

    comm: Comm
    part: torch.Tensor
    replicated: bool
    answers: bool  # in sums of what is computed from it; where ranks hold the same, the first of them does
    cut: Cut | None  # of a gradient that is not replicated

    holder: Holder

    total: type[torch.Tensor] | None = None  # the class of norms over many; None: plain tensors

    is_sparse = False  # optimizers ask each gradient: a class attribute answers without a detour through us

    @staticmethod
    def make(
        values: torch.Tensor,
        comm: Comm,
        part: torch.Tensor | None = None,
        holder: Holder | None = None,
        answers: bool = True,
        cut: Cut | None = None,
    ) -> GradShard:
        gradient = values.as_subclass(GradShard)
        gradient.comm, gradient.holder, gradient.answers = comm, holder or _SETTLED, answers
        gradient.replicated = part is not None
        gradient.cut = cut
        gradient.part = values if part is None else part
        if not answers:
            gradient.part = gradient.part.reshape(-1)[:0]
        return gradient

    def like(self, values: torch.Tensor, cut: Cut | None) -> GradShard:
        """Something computed from these elements, cut as given."""
        cut = None if Step.running else cut  # an optimizer's state has the shape that its arithmetic needs
        return GradShard.make(values, self.comm, answers=self.answers, cut=cut)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if Holder.any_updating:
            for gradient in gradients_in(args, kwargs.values()):
                gradient.holder.await_update()
        if Holder.any_postponed:
            _refuse_postponed(func, args, kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        name = name_of(func)
        many = name.startswith(("_foreach_", "_fused_"))
        if not (many or name in KNOWN or name.rstrip("_") in ELEMENT_WISE or all_replicated(args, kwargs)):
            return refuse(func, args, kwargs)
        if name not in UNARY:
            args, kwargs = fitted(func, args, kwargs, many)
        with plainly():
            out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and name not in ABOUT:
            return relabel(func, out, args, kwargs)
        if many and isinstance(out, list | tuple):
            return [relabel(func, o, (g,), {}) for o, g in zip(out, args[0], strict=True)]
        return out

    def elements(self) -> torch.Tensor:
        """Those of this rank as a plain tensor, for reading."""
        with plainly():
            return self.as_subclass(torch.Tensor)  # type: ignore[no-any-return,unused-ignore]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.replicated or self.cut is None:  # the latter is a state that an optimizer keeps
            return self.elements().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return refuse(GradShard.__reduce_ex__, (self,), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = self.elements().detach().clone()
        return copied if self.replicated else self.like(copied, self.cut)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        values = self.elements().detach()
        kept = "replicated" if self.replicated else f"this rank's {values.numel()} elements"
        return f"{type(self).__name__}({kept}, {values!r})"


def gradients_in(*places: Iterable[Any]) -> list[GradShard]:
    found: list[GradShard] = []
    for place in places:
        for arg in place:
            if isinstance(arg, GradShard):
                found.append(arg)
            elif isinstance(arg, list | tuple):
                found.extend(a for a in arg if isinstance(a, GradShard))
    return found


def _refuse_postponed(func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    name = name_of(func)
    if name in ("__get__", "__set__", "__repr__", "requires_grad_", "detach_"):
        return
    for gradient in gradients_in(args, kwargs.values()):
        if gradient.holder.postponed:
            if name not in ("zero_", "_foreach_zero_"):
                raise StateError(
                    f"{name!r} on a gradient that fs.accumulate has postponed",
                    "Run the last micro-batch outside `with fs.accumulate(model):`, then read p.grad.",
                )
            gradient.holder.zeroed = True


def all_replicated(args: Any, kwargs: Any) -> bool:
    return all(g.replicated for g in gradients_in(args, kwargs.values()))


def name_of(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def local_shape(gradient: torch.Tensor) -> tuple[int, ...]:
    """The shape of this rank's elements."""
    with plainly():
        return tuple(gradient.shape)


# ---- operands

_ORDINARY = (torch.Tensor, nn.Parameter, GradShard)


def fitted(func: Callable[..., Any], args: Any, kwargs: Any, many: bool) -> tuple[Any, Any]:
    """Arguments of an element-wise function: norms finished, unsharded operands cut to this rank's part."""
    if Step.running and many and all(map(_is_ordinary, args)) and all(map(_is_ordinary, kwargs.values())):
        return args, kwargs  # most steps of most optimizers
    args, kwargs = finish_norms(args), finish_norms(kwargs)
    if Step.running:
        return args, kwargs
    found = gradients_in(args, kwargs.values())
    if len(found) == len(args) + len(kwargs) == 1 or not found or found[0].replicated:
        return args, kwargs
    written = kwargs.get("out", args[0] if args and writes(func) else None)
    if not many:
        fit = partial(_fit, func, found[0], written)
        return tuple(map(fit, args)), {key: fit(value) for key, value in kwargs.items()}
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)]
    if not any(isinstance(item, torch.Tensor) for tensors in lists[1:] for item in tensors[:1]):
        return args, kwargs  # beside gradients, numbers only: clipping
    columns = [_fit_column(func, written, column) for column in zip(*lists, strict=True)]
    fit_lists = iter([list(row) for row in zip(*columns, strict=True)] if columns else lists)
    args = tuple(next(fit_lists) if isinstance(a, list | tuple) else a for a in args)
    return args, {k: next(fit_lists) if isinstance(v, list | tuple) else v for k, v in kwargs.items()}


def _is_ordinary(arg: Any) -> bool:
    """Whether no norm is in an argument that has many alike."""
    first = arg[0] if type(arg) is list and arg else arg
    return type(first) in _ORDINARY or not isinstance(first, torch.Tensor | list | tuple)


def _fit_column(func: Callable[..., Any], written: Any, column: tuple[Any, ...]) -> tuple[Any, ...]:
    shard = next((value for value in column if isinstance(value, GradShard)), None)
    if shard is None or shard.replicated:
        return column
    target = column[0] if written is not None else None
    return tuple(_fit(func, shard, target, value) for value in column)


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes into its first argument."""
    name = name_of(func)
    return name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _fit(func: Callable[..., Any], shard: GradShard, written: Any, value: Any) -> Any:
    """One operand: this rank's elements of it."""
    if not isinstance(value, torch.Tensor) or value is shard:
        return value
    local, cut = local_shape(shard), shard.cut
    if isinstance(value, GradShard) and not value.replicated:
        if cut is None or value.cut is None or value.cut == cut:
            return value
        return _refuse_operand(func, shard, value, "is cut differently between the ranks")
    own = local_shape(value) == local
    if own and (value is written or isinstance(value, nn.Parameter) or name_of(func) in _COPIES):
        return value
    with plainly():
        found = "would need every rank's elements" if value is written else operand(cut, local, value)
    return _refuse_operand(func, shard, value, found) if isinstance(found, str) else found


_COPIES = ("copy_", "_foreach_copy_")  # a state dict brings this rank's elements


def _refuse_operand(func: Callable[..., Any], shard: GradShard, value: torch.Tensor, why: str) -> Any:
    has = "?" if shard.cut is None else shard.cut.shape
    raise GradientError(
        f"{name_of(func)!r} of a gradient of shape {has}, of which this rank holds a part, and a tensor of "
        f"shape {local_shape(value)}, which {why}",
        "Give a tensor of the unsharded shape, or one made from the gradient (torch.zeros_like).",
    )


def _same(values: Any) -> Any:
    return values


finish_norms: Callable[[Any], Any] = _same  # set by `norms`: norms in arguments, made global


# ---- results


def relabel(func: Callable[..., Any], out: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Results of the same elements stay gradient shards, so that a later norm of them is global too."""
    for arg in args:
        if arg is out:
            return out
    found = gradients_in(args, kwargs.values())
    if not found or found[0].replicated:
        return out
    first = found[0]
    with plainly():
        if name_of(func) == "__get__" and out.numel() == first.numel():
            return first.like(out.as_subclass(torch.Tensor), _cut_of_attribute(func, first.cut))
        if out.shape == first.shape:
            return first.like(out.as_subclass(torch.Tensor), first.cut)
    return refuse(func, args, kwargs)


def _cut_of_attribute(func: Callable[..., Any], cut: Cut | None) -> Cut | None:
    """`gradient.T` and the like are other orders of the same elements; `.data` is the same."""
    name = name_of(func.__self__)  # type: ignore[attr-defined]
    if cut is None or name not in ("T", "mT", "H", "mH"):
        return cut
    dims = list(range(len(cut.shape)))
    return cut.permuted(dims[::-1] if name in ("T", "H") else [*dims[:-2], dims[-1], dims[-2]])


def reshape(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same elements in another shape: sizes and dimensions are those of the unsharded gradient."""
    shard = args[0] if args else kwargs.get("input")
    if not isinstance(shard, GradShard) or shard.replicated or shard.cut is None or Step.running:
        with plainly():
            out = func(*args, **kwargs)
        return relabel_local(shard, out) if isinstance(shard, GradShard) else out
    cut, options = shard.cut, {k: v for k, v in kwargs.items() if k != "input"}
    others = [empty_like(a) if isinstance(a, GradShard) else a for a in args[1:]]
    with plainly():
        if name_of(func) in PERMUTES:
            marked = torch.empty([d + 2 for d in range(len(cut.shape))], device="meta")
            cut = cut.permuted([n - 2 for n in func(marked, *others, **options).shape])
        else:
            try:
                out = func(empty_like(shard), *others, **options)
            except RuntimeError:  # of a size that may be this rank's: the parameter's own
                return relabel_local(shard, func(*args, **kwargs))
            if out.dtype != shard.dtype:
                return refuse(func, args, kwargs)
            cut = cut.reshaped(out.shape)
        values = shard.elements()
        return shard.like(values.reshape(shard_shape(cut.shape, values.numel())), cut)


def _set_data(_func: Callable[..., Any], args: Any, _kwargs: Any) -> None:
    """`p.grad.data = value`: other memory would be nobody's gradient, so the values are taken."""
    args[0].copy_(args[1])


HANDLERS[torch.Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]


def empty_like(shard: GradShard) -> torch.Tensor:
    """Of the unsharded shape, without memory."""
    with plainly():
        shape = shard.shape if shard.cut is None else shard.cut.shape
        return torch.empty(shape, dtype=shard.dtype, device="meta")


def relabel_local(shard: GradShard, out: torch.Tensor) -> Any:
    """A view of this rank's elements that an optimizer takes: where they lie is not followed."""
    if shard.replicated:
        return out
    with plainly():
        return shard.like(out.as_subclass(torch.Tensor), shard.cut and replace(shard.cut, order=None))


for _name in RESHAPES:
    for _owner in (torch, torch.Tensor):
        if hasattr(_owner, _name):
            HANDLERS[getattr(_owner, _name)] = reshape


def refuse(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    found = gradients_in(args, kwargs.values())
    shape = "?" if not found or found[0].cut is None else found[0].cut.shape
    raise GradientError(
        f"{name_of(func)!r} on a gradient shard (of a gradient of shape {shape}) would give a result that is "
        "true for this rank alone",
        "Use element-wise functions, norms or full sums of gradients, or strategy='replicate', whose "
        "gradients are complete on every rank.",
    )


# clip_grad_norm_ then asks for all norms in one call instead of one call a parameter.
_supported = getattr(_foreach_utils, "_foreach_supported_types", None)
if isinstance(_supported, list) and GradShard not in _supported:
    _supported.append(GradShard)
