"""Folders of torch.distributed.checkpoint, as FSDP2 uses them: read into shards, and written from them.

Importing that package takes a second, so the modules in here that need it are imported when they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.checkpoint.loading.reading import Foreign

if TYPE_CHECKING:
    from fullshard.checkpoint.dcp.writing import save, write_folder

__all__ = ["is_dcp", "open_dcp", "save", "write_folder"]


def is_dcp(path: Path) -> bool:
    return (path / ".metadata").is_file()  # format.METADATA


def open_dcp(path: Path) -> Foreign:
    from fullshard.checkpoint.dcp.reading import Tiles

    return Tiles(path)


def __getattr__(name: str) -> Any:
    if name in ("save", "write_folder"):
        from fullshard.checkpoint.dcp import writing

        return getattr(writing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
