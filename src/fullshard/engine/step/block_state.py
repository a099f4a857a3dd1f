"""What an optimizer keeps for a parameter between steps, where that rests in 8-bit blocks.

A BlockState has the shape and dtype that the optimizer gave its state, and no memory of its own: its values
are rows of bytes in the home of states (see `low_bit`). Whatever reads it computes with decoded values, and
what is written in place is encoded. Inside a step there are plain tensors instead (see `streamed`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fullshard.engine.step import low_bit
from fullshard.engine.tensors import note_writes_of, note_written, written_by
from fullshard.precision import BLOCK

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_SLICE = torch.ops.aten.slice.Tensor


class BlockState(torch.Tensor):
    rows: torch.Tensor  # in their home
    first: int  # element of the rows

    @staticmethod
    def make(
        rows: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...] | None = None,
        first: int = 0,
    ) -> BlockState:
        """Elements of `rows` from `first` on, in the order of memory."""
        state: BlockState = torch.Tensor._make_wrapper_subclass(
            BlockState, shape, strides=stride, dtype=dtype, device=rows.device
        )
        state.rows, state.first = rows, first
        return state

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """At rest."""
        return self.rows.numel()

    def decoded(self) -> torch.Tensor:
        """A plain tensor with its values."""
        start = self.first // BLOCK
        rows = self.rows[start : low_bit.rows_of(self.first + self.numel())]
        flat = torch.empty(len(rows) * BLOCK, dtype=self.dtype, device=rows.device)
        low_bit.decode(rows.detach(), flat)
        return flat.as_strided(self.shape, self.stride(), self.first - start * BLOCK)

    def write(self, values: torch.Tensor) -> None:
        """Encode all of it; `values` have its shape."""
        start = self.first // BLOCK
        rows = self.rows[start : low_bit.rows_of(self.first + self.numel())]
        flat = torch.zeros(len(rows) * BLOCK, dtype=self.dtype, device=rows.device)
        if self.first % BLOCK or self._shares_last_row:  # elements beside these stay
            low_bit.decode(rows, flat)
        flat.as_strided(self.shape, self.stride(), self.first - start * BLOCK).copy_(values)
        low_bit.encode(flat, rows)
        note_written([self.rows])

    @property
    def _shares_last_row(self) -> bool:
        return low_bit.rows_of(self.first + self.numel()) < len(self.rows)

    def _viewing(self, shape: tuple[int, ...], first: int) -> BlockState:
        return BlockState.make(self.rows, self.dtype, shape, first=first)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        view = _view(func, args) if isinstance(args[0], BlockState) else None
        if view is not None:
            return view
        plain: dict[int, torch.Tensor] = {}

        def decoded(value: Any) -> Any:
            if not isinstance(value, BlockState):
                return value
            return plain.setdefault(id(value), value.decoded())

        out = func(*tree_map(decoded, args), **tree_map(decoded, kwargs))
        if not func._schema.is_mutable:
            return out
        own = {id(plain[id(state)]): state for state in written_by(func, args, kwargs, BlockState)}
        for state in own.values():
            state.write(plain[id(state)])
        note_writes_of(func, args, kwargs)
        return tree_map(lambda value: own.get(id(value), value), out)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = memo[id(self)] = self.decoded()
        return copied

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.decoded()!r} in 8-bit blocks"


def decoded(value: Any) -> Any:
    """A BlockState's values, and anything else as it is."""
    return value.decoded() if isinstance(value, BlockState) else value


def _view(func: Any, args: Any) -> BlockState | None:
    """Of views that a save needs, no values are decoded until they are read."""
    state: BlockState = args[0]
    if func in _SAME:
        return BlockState.make(state.rows, state.dtype, state.shape, state.stride(), state.first)
    if not state.is_contiguous():
        return None
    if func in _VIEWS:
        count = state.numel()
        shape = tuple(args[1])
        if -1 in shape:
            known = prod(size for size in shape if size >= 0)
            if known == 0 or count % known:
                return None
            shape = tuple(count // known if size == -1 else size for size in shape)
        return state._viewing(shape, state.first)
    if func is _SLICE and state.dim() == 1:
        given: list[Any] = list(args[1:])
        dim, start, stop, step = given + [0, None, None, 1][len(given) :]
        if dim in (0, -1) and step == 1:
            first, last, _ = slice(start, stop).indices(len(state))
            return state._viewing((max(0, last - first),), state.first + first)
    return None
