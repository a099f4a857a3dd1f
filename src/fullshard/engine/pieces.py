"""One parameter's elements in a flat buffer of its lane."""

from __future__ import annotations

import torch

from fullshard.plan.layout import Piece


def piece_view(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A parameter's full value in a lane's flat buffer, with its own shape and memory order."""
    dense = flat[piece.start : piece.stop].view(piece.memory_shape)
    if piece.order == tuple(range(len(piece.shape))):
        return dense
    return dense.permute([piece.order.index(d) for d in range(len(piece.shape))])


def in_memory_order(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    """A full value as the flat sequence that the layout counts in."""
    return value.permute(piece.order).reshape(-1)
