"""The gradient shard type: torch's own norm, clipping and unscaling, made global.

`p.grad` holds this rank's elements. Element-wise work passes straight through. A reduction is
finished across ranks (norm, sum, max, any, ...), or refused by name: a number that is only true
for one rank is never returned silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _foreach_utils

from fullshard.comm.groups import Comm
from fullshard.engine.piecewise import ABOUT, ELEMENT_WISE, KNOWN, RESHAPES
from fullshard.errors import GradientError, StateError

plainly = torch._C.DisableTorchFunctionSubclass
HANDLERS: dict[Any, Callable[..., Any]] = {}  # functions that are finished across ranks; `norms` fills it


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

    Under strategy 'replicate' the gradient is complete on every rank and `part` is this rank's
    interval of it: norms then add up in the same order as for shards, bit for bit.
    """

    comm: Comm
    part: torch.Tensor
    replicated: bool
    answers: bool  # in sums of what is computed from it; where ranks hold the same, the first of them does

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
    ) -> GradShard:
        gradient = values.as_subclass(GradShard)
        gradient.comm, gradient.holder, gradient.answers = comm, holder or _SETTLED, answers
        gradient.replicated = part is not None
        gradient.part = values if part is None else part
        if not answers:
            gradient.part = gradient.part.reshape(-1)[:0]
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if Holder.any_postponed:
            _refuse_postponed(func, args, kwargs)
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        name = name_of(func)
        many = name.startswith(("_foreach_", "_fused_"))
        if not (many or name in KNOWN or name.rstrip("_") in ELEMENT_WISE or all_replicated(args, kwargs)):
            return refuse(func, args, kwargs)
        with plainly():
            out = func(*args, **kwargs)
        if type(out) is torch.Tensor and name not in ABOUT:
            return relabel(func, out, args, kwargs)
        if many and isinstance(out, list | tuple):
            return [relabel(func, o, (g,), {}) for o, g in zip(out, args[0], strict=True)]
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with plainly():
            return self.detach().clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with plainly():
            values = self.detach().as_subclass(torch.Tensor)
        kept = "replicated" if self.replicated else f"this rank's {values.numel()} elements"
        return f"GradShard({kept}, {values!r})"


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


def relabel(func: Callable[..., Any], out: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Results of the same elements stay gradient shards, so that a later norm of them is global too."""
    for arg in args:
        if arg is out:
            return out
    found = gradients_in(args, kwargs.values())
    if not found or found[0].replicated:
        return out
    if out.shape == found[0].shape or (name_of(func) in RESHAPES and out.numel() == found[0].numel()):
        return GradShard.make(out, found[0].comm, answers=found[0].answers)
    return refuse(func, args, kwargs)


def refuse(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    shapes = [tuple(g.shape) for g in gradients_in(args, kwargs.values())]
    raise GradientError(
        f"{name_of(func)!r} on a gradient shard (of shape {shapes[0] if shapes else '?'}) would give a "
        "result that is true for this rank alone",
        "Use element-wise functions, norms or full sums of gradients, or strategy='replicate', whose "
        "gradients are complete on every rank.",
    )


# clip_grad_norm_ then asks for all norms in one call instead of one call a parameter.
_supported = getattr(_foreach_utils, "_foreach_supported_types", None)
if isinstance(_supported, list) and GradShard not in _supported:
    _supported.append(GradShard)
