"""torch.distributed.checkpoint folders, FSDP2's among them: read into shards, and written from them."""

from __future__ import annotations

from pathlib import Path

from fullshard.checkpoint.reading import Foreign


def is_dcp(path: Path) -> bool:
    return (path / ".metadata").is_file()


def open_dcp(path: Path) -> Foreign:
    raise NotImplementedError(path)
