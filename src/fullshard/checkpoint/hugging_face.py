"""Models as Hugging Face keeps them: safetensors and an index, read straight into shards."""

from __future__ import annotations

import json
from pathlib import Path

from fullshard.checkpoint.headers import MAX_HEADER_BYTES, parse_json
from fullshard.checkpoint.manifest import check_file_name
from fullshard.checkpoint.reading import Blocks, Foreign, add_once, whole_tensors
from fullshard.errors import CheckpointError

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def is_model(path: Path) -> bool:
    return (path / _FILE).is_file() or (path / _INDEX).is_file()


def open_model(path: Path) -> Foreign:
    source = Foreign(path, Blocks(path, None, 2**20))
    try:
        for file in _files(path):
            add_once(source.model, whole_tensors(source.blocks, file), file)
    except BaseException:
        source.close()
        raise
    return source


def _files(path: Path) -> list[str]:
    if (path / _FILE).is_file():
        return [_FILE]
    index = path / _INDEX
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{str(index)!r} is too large for an index", "Use another copy of it.")
    said = parse_json(str(index), index.read_bytes())
    where = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(where, dict):
        raise CheckpointError(f"{str(index)!r} has no weight_map", f"Use another copy: {json.dumps(_INDEX)}.")
    return sorted({check_file_name(name) for name in where.values()})
