"""One step of a model on the meta device, where nothing is computed: which tensors live when.

Counted is what the engine does not manage: activations, temporaries, gradients from the moment they are made
until their unit is done, and buffers. Parameters are not counted. A moment lasts from one change of unit to
the next, so that the engine's own buffers can be added to each (`needs`).

What the model returns lives until the step is over, because callers write `out = model(...)` and then
`out.loss.backward()`. The logits of a language model are large.

Attention counts as fused kernels compute it: queries, keys, values, the output and one number per row are
saved, not the score matrix. Dropout saves one byte per value. Large Linears write their weight's gradient
into the engine's buffer (`engine.direct`), so here it takes no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.engine.activations import (
    Buffer,
    Buffers,
    Copying,
    DeviceKeeper,
    HostKeeper,
    Keeper,
    Link,
    checkpointed,
)
from fullshard.engine.direct import MIN_BYTES
from fullshard.option_table import CheckpointActivations
from fullshard.plan.schedule import Call, Phase
from fullshard.plan.units import Unit
from fullshard.planning.work import Work, attention, backward_of_attention, moved, product, work_of

Run = Callable[[nn.Module], tuple[Tensor, Any]]  # a model's forward: its loss, and all that it returned

_ROUND = 512  # bytes: CUDA's allocator rounds up to multiples of it


@dataclass(frozen=True)
class Moment:
    """Bytes that live during a call of a unit: at their peak, and when the next call begins."""

    call: Call
    peak_bytes: int
    end_bytes: int
    work: tuple[Work, ...] = ()  # what the device computes meanwhile


class _Operators:
    """Operators on the meta device, computed once for all calls with the same kinds of arguments.

    The layers of a model are alike. To find the shape of a result takes up to 600 us, because torch does it
    in Python; to make a tensor of a known shape takes a few.
    """

    def __init__(self) -> None:
        self._results: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
        self._makes: dict[Any, bool] = {}  # by operator: False if it does not just make one tensor

    def call(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if not self._makes.setdefault(operator, True):
            return operator(*args, **kwargs)
        try:
            key = operator, _kind(args), _kind(kwargs)
            known = self._results.get(key)
        except TypeError:  # a value that has no hash
            return operator(*args, **kwargs)
        if known is not None:
            return torch.empty_strided(known[0], known[1], dtype=known[2], device="meta")
        out = operator(*args, **kwargs)
        if not _makes_one_tensor(operator._schema) or _shares(out, (args, kwargs)):
            self._makes[operator] = False
        elif out.device.type == "meta":
            self._results[key] = (out.size(), out.stride(), out.dtype)
        return out


def _makes_one_tensor(schema: Any) -> bool:
    mentioned = (*schema.arguments, *schema.returns)
    return [str(one.type) for one in schema.returns] == ["Tensor"] and not any(
        one.alias_info for one in mentioned
    )


def _shares(out: Tensor, arguments: Any) -> bool:
    """Whether the result is a view after all: `_unsafe_view` is one, and its schema does not have it."""
    storage = out.untyped_storage()._cdata
    return any(
        isinstance(x, Tensor) and x.untyped_storage()._cdata == storage for x in tree_leaves(arguments)
    )


def _kind(value: Any) -> Any:
    """What the shape of a result depends on: equal for arguments that differ in their values alone."""
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    if isinstance(value, dict):
        return tuple((name, _kind(each)) for name, each in value.items())
    return type(value), value  # 1 and 1.0 are equal, and their results differ


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts the bytes of all storages that operators make, until they are freed."""

    def __init__(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._operators = _Operators()
        self._known: dict[int, Any] = {}
        self._outside = {t.untyped_storage()._cdata for t in parameters}
        self.moments: list[Moment] = []
        self.live = self._peak = 0
        self._now = Call("forward", 0)
        self._ending: Callable[[], None] | None = None
        self._work: list[Work] = []
        self._unwritten: list[Tensor] = []  # stand for values that the engine has elsewhere: no copy is made
        for buffer in buffers:
            self._count(buffer.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._operators.call(func, args, kwargs or {})
        for value in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        if not self._copies_nothing(func, args):
            self._work += work_of(func, args, kwargs, out)
        return out

    def add(self, work: Work) -> None:
        """Of a kernel that is no operator here."""
        self._work.append(work)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """A tensor of one element in place of a large one that the engine has already."""
        self._unwritten.append(tensor)
        return tensor

    def _copies_nothing(self, func: Any, args: Any) -> bool:
        if not self._unwritten or func is not torch.ops.aten.copy_.default:
            return False
        return any(args[1].untyped_storage()._cdata == t.untyped_storage()._cdata for t in self._unwritten)

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._known or key in self._outside:
            return
        size = -(-storage.nbytes() // _ROUND) * _ROUND
        self._known[key] = weakref.ref(storage, partial(self._freed, key, size))
        self.live += size
        self._peak = max(self._peak, self.live)

    def _freed(self, key: int, size: int, _: Any) -> None:
        if self._known.pop(key, None) is not None:
            self.live -= size

    def mark(self, phase: Phase, unit: int, ending: Callable[[], None] | None = None) -> None:
        """A call of `unit` begins; `ending` frees its gradients when the next call begins."""
        self.moments.append(Moment(self._now, self._peak, self.live, tuple(self._work)))
        self._work.clear()
        self._unwritten.clear()
        if self._ending is not None:
            self._ending()
        self._ending = ending
        self._now, self._peak = Call(phase, unit, ending is not None), self.live


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, meter: Meter) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.meter, ctx.work = meter, attention(query, key, value, causal)
        meter.add(ctx.work)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        ctx.meter.add(backward_of_attention(ctx.work))
        return *(torch.empty_like(saved) for saved in ctx.saved_tensors[:3]), None, None


class _Grouped(torch.autograd.Function):
    """Rows of each expert times its matrix. On meta, torch's own operator supports only bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, meter: Meter) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.meter, ctx.work = meter, product(len(x), weight.shape[-1], x.shape[-1], x.element_size())
        meter.add(ctx.work)
        return x.new_empty(len(x), weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad[:2], strict=True)
        for _ in filter(None, ctx.needs_input_grad[:2]):
            ctx.meter.add(ctx.work)
        return *(torch.empty_like(saved) if needed else None for saved, needed in pairs), None


class _Norm(torch.autograd.Function):
    """RMSNorm as the one kernel that torch has for it on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: int, meter: Meter) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        out = torch.empty_like(x)
        ctx.meter = meter
        meter.add(moved(x, out))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        ctx.meter.add(moved(gradient, x, x, x))  # of the input, then of the weight
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None, None


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, meter: Meter) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.meter = meter
        ctx.has_bias = bias is not None
        out = x @ weight.t()
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        to_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        ctx.meter.add(product(len(weight), weight.shape[1], x[..., 0].numel(), x.element_size()))
        return to_x, ctx.meter.stand_in(weight.new_empty(())).expand(weight.shape), to_bias, None


@contextmanager
def _kernels(direct: set[int], meter: Meter) -> Iterator[None]:
    """Attention, norms, dropout, experts and large Linears with the memory that they need on a device.

    They are replaced where modules look them up: a TorchFunctionMode is not active when checkpointing
    recomputes in backward.
    """
    attention, linear, dropout = F.scaled_dot_product_attention, F.linear, F.dropout
    grouped, rms_norm = F.grouped_mm, F.rms_norm

    def fused(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        if query.shape[-3] != key.shape[-3] and not more.get("enable_gqa"):
            # Heads that share a key by broadcasting: no fused kernel supports that, and the scores are saved.
            return attention(query, key, value, *rest, **more)
        causal = bool(more.get("is_causal", rest[2] if len(rest) > 2 else False))
        return _Flash.apply(query, key, value, causal, meter)  # type: ignore[no-untyped-call, unused-ignore]

    def into_place(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if id(weight) in direct:
            return _Direct.apply(x, weight, bias, meter)  # type: ignore[no-untyped-call, unused-ignore]
        return linear(x, weight, bias)

    def normed(
        x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Any:
        rows = x.numel() // max(1, prod(shape))
        if weight is not None and weight.dtype != x.dtype:  # no kernel of its own
            return rms_norm(x, list(shape), weight, eps)
        return _Norm.apply(x, weight, rows, meter)  # type: ignore[no-untyped-call, unused-ignore]

    def masked(x: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def by_expert(x: Tensor, weight: Tensor, **more: Any) -> Any:
        own = x.dim() != 2 or weight.dim() != 3 or weight.dtype is torch.bfloat16
        return grouped(x, weight, **more) if own else _Grouped.apply(x, weight, meter)  # type: ignore[no-untyped-call, unused-ignore]

    F.grouped_mm = by_expert  # type: ignore[assignment, unused-ignore]
    F.dropout = masked  # type: ignore[assignment, unused-ignore]
    F.scaled_dot_product_attention = fused  # type: ignore[assignment, unused-ignore]
    F.linear = into_place  # type: ignore[assignment, unused-ignore]
    F.rms_norm = normed  # type: ignore[assignment, unused-ignore]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.linear, F.dropout = attention, linear, dropout
        F.grouped_mm, F.rms_norm = grouped, rms_norm


def direct_weights(units: Sequence[Unit]) -> list[set[int]]:
    """By unit, the weights whose gradients are written into the send buffer (`engine.direct`)."""
    by_unit: list[set[int]] = []
    for unit in units:
        weights = set()
        for member in unit.members:
            (module, name), alone = member.sites[0], len(member.sites) == 1
            size = member.parameter.numel() * member.parameter.element_size()
            large = alone and size >= MIN_BYTES and member.parameter.requires_grad
            if large and name == "weight" and type(module) is nn.Linear:
                weights.add(id(member.parameter))
        by_unit.append(weights)
    return by_unit


@dataclass(frozen=True, eq=False)
class Trace:
    """Forward and backward, as moments."""

    moments: Sequence[Moment]
    buffer_bytes: int
    returned_bytes: int  # the model's output: still alive during the optimizer's step
    host_bytes: int  # inputs of blocks that wait in host memory


class _Host(Link):
    """Host memory that is counted and not allocated, and copies that take no time."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.buffers: _Counted = _Counted()

    def down(self, tensor: Tensor, buffer: Buffer) -> Copying:
        return Copying(buffer.used, None)

    def up(self, buffer: Buffer, tensor: Tensor) -> Copying:
        return Copying(buffer.used, None)


class _Counted(Buffers):
    def __init__(self) -> None:
        super().__init__(torch.empty)
        self._used = self.peak = 0

    def take(self, size_bytes: int) -> Buffer:
        self._used += size_bytes
        self.peak = max(self.peak, self._used)
        return Buffer(torch.empty(0), size_bytes)

    def give(self, buffer: Buffer) -> None:
        self._used -= buffer.size_bytes


class _Recomputed:
    """`forward` of a block whose activations are computed again in backward."""

    def __init__(self, original: Callable[..., Any], keeper: Keeper) -> None:
        self._original, self._keeper = original, keeper

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = self._keeper.hold("", args, kwargs)
        return checkpointed(self._compute, held, torch.empty(0, device="meta"), args, kwargs, False)

    def _compute(self, _first: bool, args: Any, kwargs: Any) -> Any:
        return self._original(*args, **kwargs)


def trace(model: nn.Module, units: Sequence[Unit], run: Run, recompute: CheckpointActivations) -> Trace:
    """Of a model on meta whose parameters have the compute dtype."""
    host = _Host()
    offload = recompute == "offload"
    keeper: Keeper = HostKeeper(torch.device("meta"), host) if offload else DeviceKeeper()
    meter = Meter(model.parameters(), model.buffers())
    buffer_bytes, direct = meter.live, set().union(*direct_weights(units))
    for index, unit in enumerate(units[1:], start=1):
        watch = _Watch(meter, index, unit)
        for module in unit.modules:
            if recompute and any(module.children()):
                module.__dict__["forward"] = _Recomputed(module.forward, keeper)
            module.register_forward_pre_hook(watch.enter)
            module.register_forward_hook(watch.leave)
    with _kernels(direct, meter), meter:
        loss, returned = run(model)
        meter.mark("backward", 0)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        meter.mark("backward", 0, model.zero_grad)  # the last unit is done, and now the root is
        meter.mark("backward", 0)
        returned_bytes = meter.live - buffer_bytes
        del returned
    return Trace(meter.moments, buffer_bytes, returned_bytes, host.buffers.peak)


class _Watch:
    """One unit's hooks: when it begins and ends, forward and backward."""

    def __init__(self, meter: Meter, index: int, unit: Unit) -> None:
        self._meter, self._index = meter, index
        self._parameters = [member.parameter for member in unit.members]
        self._calls = 0

    def enter(self, _module: nn.Module, _args: Any) -> None:
        self._meter.mark("forward", self._index)

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        first, self._calls = self._calls == 0, self._calls + 1
        self._meter.mark("forward", 0)
        for value in tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                begins = partial(self._backward, first)
                value.register_hook(begins)  # type: ignore[no-untyped-call, unused-ignore]

    def _backward(self, first: bool, _gradient: Tensor) -> None:
        """Its backward begins. That of its first call is its last: then its gradients are freed."""
        self._meter.mark("backward", self._index, self._drop if first else None)

    def _drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
