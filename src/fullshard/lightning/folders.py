"""Lightning's own readers of checkpoint files, taught to read our folders.

`MyModule.load_from_checkpoint(path)`, and a Trainer with another strategy: whole, in every process that asks.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fullshard.checkpoint.commit import is_checkpoint
from fullshard.lightning.consolidation import read_checkpoint


def teach(*modules: Any) -> None:
    """Modules of Lightning that read files with `pl_load`."""
    for module in modules:
        if not hasattr(module.pl_load, "__wrapped__"):
            module.pl_load = _reading_folders(module.pl_load)


def _reading_folders(read_file: Any) -> Any:
    @wraps(read_file)
    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not isinstance(path, (str, Path)) or not is_checkpoint(Path(path)):
            return read_file(path, map_location=map_location, weights_only=weights_only)
        device = _device(map_location)
        whole = read_checkpoint(path, weights_only=weights_only)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), whole)

    return read


def _device(map_location: Any) -> torch.device:
    """What torch.load would make of it: everything in our files was on the host."""
    host = torch.device("cpu")
    if isinstance(map_location, dict):
        return torch.device(map_location.get("cpu", host))
    if callable(map_location):
        placed = map_location(torch.empty(0).untyped_storage(), "cpu")
        return host if placed is None else torch.device(placed.device)
    return host if map_location is None else torch.device(map_location)
