"""Folders of torch.distributed.checkpoint, as FSDP2 uses them: read into shards, and written from them."""

from __future__ import annotations

from pathlib import Path

from fullshard.checkpoint.dcp.format import METADATA
from fullshard.checkpoint.dcp.reading import Tiles
from fullshard.checkpoint.dcp.writing import save, write_folder
from fullshard.checkpoint.loading.reading import Foreign

__all__ = ["is_dcp", "open_dcp", "save", "write_folder"]


def is_dcp(path: Path) -> bool:
    return (path / METADATA).is_file()


def open_dcp(path: Path) -> Foreign:
    return Tiles(path)
