"""Lightning's own readers of checkpoint files, extended to our folders, and our strategies' names.

`MyModule.load_from_checkpoint(path)`, or a Trainer with another strategy, reads the unsharded values in every
process that calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fullshard.checkpoint.commit import is_checkpoint
from fullshard.lightning.consolidation import read_checkpoint
from fullshard.patches import Patches

# Trainer(strategy="fullshard"): names, and the options that they stand for, as for Lightning's "fsdp".
NAMES: dict[str, dict[str, Any]] = {"fullshard": {}, "fullshard_cpu_offload": {"cpu_offload": True}}

_PATCHES = Patches()
_readers: list[ModuleType] = []  # modules of Lightning that read files with `pl_load`
_strategies: list[tuple[Any, type]] = []  # registries of Lightning, and our class for each


def add(readers: Sequence[ModuleType], strategies: Sequence[tuple[Any, type]] = ()) -> None:
    """Patch the modules and registries of one of Lightning's two packages."""
    _readers.extend(readers)
    _strategies.extend(strategies)
    turn_on()


def turn_on() -> None:
    """Called on import. A second call changes nothing."""
    for module in _readers:
        _PATCHES.replace(module, "pl_load", _reading_folders)
    for registry, strategy in _strategies:
        for name, options in NAMES.items():
            text = "fully sharded data parallel by fullshard"
            registry.register(name, strategy, description=text, override=True, **options)


def turn_off() -> None:
    """Restore Lightning's own readers, and remove our strategies' names. The classes can still be used."""
    _PATCHES.undo()
    for registry, _ in _strategies:
        for name in NAMES.keys() & registry.keys():
            registry.remove(name)


def _reading_folders(read_file: Any) -> Any:
    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not isinstance(path, (str, Path)) or not is_checkpoint(Path(path)):
            return read_file(path, map_location=map_location, weights_only=weights_only)
        device = _device(map_location)
        values = read_checkpoint(path, weights_only=weights_only)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)

    return read


def _device(map_location: Any) -> torch.device:
    """The device that torch.load would choose: all values in our files are on the host."""
    host = torch.device("cpu")
    if isinstance(map_location, dict):
        return torch.device(map_location.get("cpu", host))
    if callable(map_location):
        placed = map_location(torch.empty(0).untyped_storage(), "cpu")
        return host if placed is None else torch.device(placed.device)
    return host if map_location is None else torch.device(map_location)
