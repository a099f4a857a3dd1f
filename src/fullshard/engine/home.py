"""Where a shard rests, and how it comes to the device that computes.

A lane allocates its shard and its gradient shard in its home, stages the shard before it is encoded for a
gather, and hands sums back to the home of the gradient. No other module assumes that a shard rests on the
compute device. `DeviceHome`, where both are the same, is the only home so far.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Home(Protocol):
    compute_device: torch.device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory in this home."""
        ...

    def stage(self, shard: torch.Tensor) -> torch.Tensor:
        """The values of a shard on the compute device, for reading."""
        ...

    def put_back(self, shard: torch.Tensor, values: torch.Tensor) -> None:
        """Write values that lie on the compute device into a shard."""
        ...


class DeviceHome:
    """Shards rest on the device that computes: staging costs nothing."""

    def __init__(self, compute_device: torch.device) -> None:
        self.compute_device = compute_device

    def zeros(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_elements, dtype=dtype, device=self.compute_device)

    def stage(self, shard: torch.Tensor) -> torch.Tensor:
        return shard

    def put_back(self, shard: torch.Tensor, values: torch.Tensor) -> None:
        shard.copy_(values)
