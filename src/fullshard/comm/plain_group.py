"""Sums and exchanges of the doctor's own: plain torch.distributed, apart from what it checks."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.host_group import new_group


class PlainGroup:
    """All ranks of the job, on the host. Every rank must make the same calls."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._group = new_group(list(range(self.ranks)), "gloo") if self.ranks > 1 else None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on the host."""
        values = values.detach().cpu().contiguous()
        if self._group is not None and values.numel():
            dist.all_reduce(values, group=self._group)
        return values

    def gather_text(self, text: str) -> list[str]:
        """The text of every rank, by rank."""
        if self._group is None:
            return [text]
        own = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = torch.zeros(self.ranks, dtype=torch.int64)
        sizes[self.rank] = own.numel()
        sizes = self.sum(sizes)
        rows = torch.zeros(self.ranks, int(sizes.max()), dtype=torch.uint8)
        rows[self.rank, : own.numel()] = own
        rows = self.sum(rows)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def gather_values(self, value: Any) -> list[Any]:
        """A value that JSON can express, of every rank."""
        return [json.loads(text) for text in self.gather_text(json.dumps(value))]
