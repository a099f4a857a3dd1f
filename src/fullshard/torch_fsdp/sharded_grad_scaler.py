"""`ShardedGradScaler`: torch's stock scaler, since its check of gradients is global here."""

from __future__ import annotations

from typing import Any

import torch


class ShardedGradScaler(torch.amp.GradScaler):  # type: ignore[misc,unused-ignore]
    """`process_group` is taken and not used: the ranks are those of the gradients."""

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
