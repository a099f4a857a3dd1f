"""What an operator asks of a device: products, attention, and bytes that pass through its memory. Pure.

Views and allocations are nothing. Everything that is neither a product nor attention is taken to be bound by
memory: it reads its arguments and writes its results once. Lookups read what they return, not their table.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

from torch import Tensor


class Work(NamedTuple):
    """One kernel. `sizes` grow linearly with the batch: a product's m, n, k and how many there are of it;
    attention's floating point operations, forward or backward; bytes."""

    kind: str  # 'product', 'attention', 'attention backward' or 'bytes'
    sizes: tuple[float, ...]
    itemsize: int = 2  # bytes of an element

    @property
    def flop(self) -> float:
        if self.kind == "bytes":
            return 0.0
        return 2.0 * prod(self.sizes) if self.kind == "product" else self.sizes[0]


_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach"),
    *("lift_fresh", "_local_scalar_dense", "is_same_size", "sym_size", "resize_", "set_", "alias"),
    *("_assert_async", "_assert_tensor_metadata", "is_pinned", "record_stream", "item"),
}
_LOOKUPS = {"embedding", "index", "index_select", "gather", "take", "select_scatter", "nll_loss_forward"}
_WRITES = {"embedding_dense_backward", "nll_loss_backward", "zero_", "fill_", "zeros_like", "full_like"}


def attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Work:
    """Scores and their product with the values; half of them if later positions are hidden."""
    rows = prod(query.shape[:-1])
    flop = 2.0 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return Work("attention", (flop / 2 if causal else flop,), query.element_size())


def backward_of_attention(forward: Work) -> Work:
    """Five products instead of two: the scores are computed once more."""
    return Work("attention backward", (2.5 * forward.sizes[0],), forward.itemsize)


def product(m: int, n: int, k: int, itemsize: int, times: int = 1) -> Work:
    return Work("product", (m, n, k, times), itemsize)


def moved(*tensors: Tensor) -> Work:
    return Work("bytes", (float(sum(map(_bytes, tensors))),))


def work_of(operator: Any, args: Any, kwargs: Any, out: Any) -> tuple[Work, ...]:
    """The kernels of one call of an operator of aten."""
    name = operator._schema.name.partition("::")[2]
    counted = _PRODUCTS.get(name)
    if counted is not None:
        return counted(args, out)
    if name in _FREE or _is_view(operator):
        return ()
    results = _tensors(out)
    if name in _LOOKUPS:
        return (Work("bytes", (2.0 * sum(map(_bytes, results)),)),)
    read = [] if name in _WRITES else _tensors((args, kwargs))
    size = sum(map(_bytes, read)) + sum(map(_bytes, results))
    return (Work("bytes", (float(size),)),) if size else ()


@cache
def _is_view(operator: Any) -> bool:
    """It returns what it was given, and writes nothing."""
    returned = [one.alias_info for one in operator._schema.returns]
    return any(info is not None and not info.is_write for info in returned)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _bytes(tensor: Tensor) -> int:
    """An expanded tensor is as large as its memory."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _mm(args: Any, _out: Any) -> tuple[Work, ...]:
    left, right = args if len(args) == 2 else args[1:3]
    if left.dim() == 3:
        times, m, k = left.shape
        return (product(m, right.shape[-1], k, left.element_size(), times),)
    return (product(left.shape[0], right.shape[1], left.shape[1], left.element_size()),)


def _grouped_mm(args: Any, _out: Any) -> tuple[Work, ...]:
    left, right = args[:2]
    return (product(prod(left.shape[:-1]), right.shape[-1], left.shape[-1], left.element_size()),)


def _convolution(args: Any, out: Any) -> tuple[Work, ...]:
    return (_convolved(out, args[1]),)


def _convolution_backward(args: Any, out: Any) -> tuple[Work, ...]:
    gradient, _, weight = args[:3]
    return tuple(_convolved(gradient, weight) for one in out[:2] if one is not None)


def _convolved(out: Tensor, weight: Tensor) -> Work:
    rows = out.shape[0] * prod(out.shape[2:])
    return product(rows, weight.shape[0], prod(weight.shape[1:]), weight.element_size())


_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "addbmm"), _mm),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped_mm),
    **dict.fromkeys(("convolution", "convolution_overrideable", "cudnn_convolution"), _convolution),
    "convolution_backward": _convolution_backward,
}
