"""The manifest: one JSON file that describes a checkpoint. A folder is a checkpoint if it has one.

It holds the checksum of its own bytes, the checksums of the blocks of every other file, and everything that
is not a large tensor. It is written last, so a folder without it was never finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fullshard.checkpoint.format.budget import is_within_budget, parse_json
from fullshard.checkpoint.format.headers import is_count
from fullshard.comm.messages import record
from fullshard.errors import CheckpointError, DamagedCheckpoint

NAME = "fullshard.json"
FORMAT, VERSION = "fullshard checkpoint", 1
SHARED_FILE = "extra.safetensors"  # large tensors among the values that are equal on every rank
MAX_BYTES = 512 * 2**20
_PREFIX = b'{"sha256":"'
_AFTER_SUMMARY = b',"block_bytes":'  # the field after those of a Summary; inside a string, quotes are escaped
BEGINNING_BYTES = len(_PREFIX)
_REMEDY = "The checkpoint is damaged; use another one."
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def is_values_file(name: str) -> bool:
    """Whether a file holds large tensors among values, rather than the model's or the optimizer's."""
    return name == SHARED_FILE or name.startswith("rank-")


def rank_file(rank: int) -> str:
    """The file of the large tensors among one rank's own values."""
    return f"rank-{rank:05}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """A file's size and the CRC-32 of each of its blocks."""

    size_bytes: int
    blocks: Sequence[int]  # packed: a checkpoint of 1 TB has a million

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", array("I", self.blocks))


@dataclass(frozen=True)
class Count:
    tensors: int = 0
    elements: int = 0


@record
@dataclass(frozen=True)
class Part:
    """An entry of one rank's file of parts: elements [start, stop) of a tensor of that shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The contents of `fullshard.json`. Trees are values as encoded by `format.values`."""

    id: str
    saved_at_ns: int
    software: Mapping[str, str]
    layout: Mapping[str, Any]  # how it was saved (ranks, strategy, files); informational, not needed to load
    block_bytes: int
    files: Mapping[str, FileRecord]
    model: Count
    optimizer: Count
    tied: Mapping[str, str] = field(
        default_factory=dict
    )  # further name: name under which the tensor is stored
    modules: Mapping[str, Any] = field(default_factory=dict)  # trees of get_extra_state(), by module name
    optimizer_state: Any = None  # class, groups, and how each parameter's state is stored
    extra: Mapping[str, Any] = field(default_factory=dict)  # trees that are equal on every rank
    ranks: tuple[Mapping[str, Any], ...] = ()  # each rank's trees: extra, random, values that differ
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)  # by file, if ranks wrote their own

    def files_of(self, kind: str) -> list[str]:
        """The safetensors files of 'model' or 'optimizer' that all ranks share."""
        pattern = re.compile(rf"{kind}(-\d{{5}}-of-\d{{5}})?\.safetensors")
        return sorted(name for name in self.files if pattern.fullmatch(name))


@dataclass(frozen=True)
class Summary:
    """Which checkpoint a manifest belongs to."""

    id: str
    saved_at_ns: int
    layout: Mapping[str, Any]


def to_bytes(manifest: Manifest) -> bytes:
    body = {
        "format": FORMAT,
        "version": VERSION,
        "id": manifest.id,
        "saved_at_ns": manifest.saved_at_ns,
        "software": dict(manifest.software),
        "layout": dict(manifest.layout),
        "block_bytes": manifest.block_bytes,
        "files": {
            name: {"bytes": record.size_bytes, "crc32": "".join(f"{crc:08x}" for crc in record.blocks)}
            for name, record in manifest.files.items()
        },
        "model": _count_out(manifest.model),
        "optimizer": _count_out(manifest.optimizer),
        "tied": dict(manifest.tied),
        "modules": dict(manifest.modules),
        "optimizer_state": manifest.optimizer_state,
        "extra": dict(manifest.extra),
        "ranks": [dict(rank) for rank in manifest.ranks],
        "parts": {
            name: [[part.name, part.start, part.stop, list(part.shape)] for part in parts]
            for name, parts in manifest.parts.items()
        },
    }
    rest = json.dumps(body, separators=(",", ":"), allow_nan=False)[1:].encode()
    rest = b'",' + rest
    data = _PREFIX + hashlib.sha256(rest).hexdigest().encode() + rest
    if len(data) > MAX_BYTES or not is_within_budget(data):  # it could never be loaded
        raise CheckpointError(
            f"the values to save take {len(data)} bytes of JSON, which is too much to be read back safely",
            "Save long lists as tensors or arrays.",
        )
    return data


def check_beginning(data: bytes) -> None:
    """Raise unless a file begins as a manifest does, before the rest of it is read."""
    if not data.startswith(_PREFIX):
        raise DamagedCheckpoint(f"{NAME!r} does not begin as a manifest does", _REMEDY)


def from_bytes(data: bytes) -> Manifest:
    _check_sum(data)
    return parse(data)


def summary_from_bytes(data: bytes) -> Summary:
    """The summary of a manifest whose bytes are right. The rest, which may be long, is not parsed."""
    _check_sum(data)
    head, found, _ = data.partition(_AFTER_SUMMARY)
    with contextlib.suppress(DamagedCheckpoint, KeyError, TypeError, ValueError, AttributeError):
        if found:
            return _summary(_body(head + b"}"))
    saved = parse(data)  # its fields are in another order
    return Summary(saved.id, saved.saved_at_ns, saved.layout)


def _summary(body: dict[str, Any]) -> Summary:
    return Summary(
        id=_text(body["id"], "id"),
        saved_at_ns=_count(body["saved_at_ns"], "saved_at_ns"),
        layout=_object(body["layout"], "layout"),
    )


def _check_sum(data: bytes) -> None:
    rest = data[len(_PREFIX) + 64 :]
    expected = data[len(_PREFIX) : len(_PREFIX) + 64]
    check_beginning(data)
    if hashlib.sha256(rest).hexdigest().encode() != expected:
        raise DamagedCheckpoint(f"{NAME!r} does not have the checksum that it carries", _REMEDY)


def parse(data: bytes) -> Manifest:
    """A manifest from its JSON, with every field checked except the checksum of the manifest itself."""
    body = _body(data)
    try:
        return _manifest(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"field {error}" if isinstance(error, KeyError) else str(error)[:200]
        raise DamagedCheckpoint(f"{NAME!r} is incomplete or malformed: {what}", _REMEDY) from None


def _body(data: bytes) -> dict[str, Any]:
    body = parse_json(NAME, data)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{NAME!r} is not a manifest of fullshard", _REMEDY)
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{NAME!r} has format version {str(body.get('version'))[:40]}; this fullshard reads {VERSION}",
            "Use the version of fullshard that wrote it, or a newer one.",
        )
    return body


def _manifest(body: dict[str, Any]) -> Manifest:
    block_bytes = body["block_bytes"]
    if not is_count(block_bytes) or not 512 <= block_bytes <= 2**26:
        raise ValueError(f"block_bytes is {str(block_bytes)[:40]}")
    return Manifest(
        id=_text(body["id"], "id"),
        saved_at_ns=_count(body["saved_at_ns"], "saved_at_ns"),
        software={_text(k, "software"): _text(v, "software") for k, v in body["software"].items()},
        layout=_object(body["layout"], "layout"),
        block_bytes=block_bytes,
        files={
            check_file_name(name): _file(name, record, block_bytes) for name, record in body["files"].items()
        },
        model=_count_in(body["model"]),
        optimizer=_count_in(body["optimizer"]),
        tied={_text(k, "tied"): _text(v, "tied") for k, v in body["tied"].items()},
        modules=_object(body["modules"], "modules"),
        optimizer_state=body["optimizer_state"],
        extra=_object(body["extra"], "extra"),
        ranks=tuple(_object(rank, "ranks") for rank in body["ranks"]),
        parts={check_file_name(name): tuple(map(_part, parts)) for name, parts in body["parts"].items()},
    )


def check_file_name(name: Any) -> str:
    """Raise unless this is a plain file name, which cannot lead out of the folder."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or ".." in name:
        raise DamagedCheckpoint(
            f"the checkpoint names a file {str(name)[:200]!r}, which is not a plain file name",
            "Do not load it: it may have been made to read or write elsewhere.",
        )
    return name


def _file(name: str, record: Any, block_bytes: int) -> FileRecord:
    size, crcs = _count(record["bytes"], name), _text(record["crc32"], name)
    count = -(-size // block_bytes)
    if len(crcs) != 8 * count or re.search("[^0-9a-f]", crcs):
        raise ValueError(f"file {name!r} of {size} bytes has checksums of {len(crcs) // 8} blocks")
    packed = array("I", bytes.fromhex(crcs))
    if sys.byteorder == "little":
        packed.byteswap()
    return FileRecord(size, packed)


def _part(value: Any) -> Part:
    name, start, stop, shape = value
    if not all(map(is_count, (start, stop, *shape))) or start > stop or len(shape) > 64:
        raise ValueError(f"a part of {str(name)[:200]!r} is malformed")
    return Part(_text(name, "parts"), start, stop, tuple(shape))


def _count_out(count: Count) -> dict[str, int]:
    return {"tensors": count.tensors, "elements": count.elements}


def _count_in(value: Any) -> Count:
    return Count(_count(value["tensors"], "tensors"), _count(value["elements"], "elements"))


def _count(value: Any, what: str) -> int:
    if not is_count(value) and not (what == "saved_at_ns" and type(value) is int and 0 <= value < 2**63):
        raise ValueError(f"{what} is {str(value)[:40]}, not a count")
    return int(value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} is {str(value)[:40]}, not a string")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value
