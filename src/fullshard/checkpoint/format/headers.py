"""The header of a safetensors file: built from a list of tensors, and read from files that may be hostile.

    8 bytes   n, the header's length, little-endian
    n bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
    the rest  the tensors' bytes, row-major, without gaps

Every number of a header is checked before it is used, and no memory is allocated by its values alone
(`format.budget`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from fullshard.checkpoint.format.budget import parse_json
from fullshard.comm.messages import record
from fullshard.errors import CheckpointError, DamagedCheckpoint

MAX_HEADER_BYTES = 64 * 2**20
_ALIGN_BYTES = 64
_REMEDY = "The file is damaged or not a safetensors file; use another copy of it."

_CODES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
        "U64": "uint64", "U32": "uint32", "U16": "uint16", "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }.items()
    if hasattr(torch, name)
}  # fmt: skip
_NAMES = {dtype: code for code, dtype in _CODES.items()}


@record
@dataclass(frozen=True)
class Tensor:
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def natural_order(name: str) -> tuple[list[tuple[int, str]], str]:
    """A sort key by which layer 2 precedes layer 10."""
    texts = re.split(r"([0-9]+)", name)
    numbers = [text.lstrip("0") for text in texts[1::2]]  # not int(): a name may have any number of digits
    key: list[tuple[int, str]] = [(0, "")] * len(texts)
    key[::2] = [(0, text) for text in texts[::2]]
    key[1::2] = [(len(number), number) for number in numbers]
    return key, name


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{name!r} has dtype {dtype}, which safetensors cannot hold",
            "Convert it before saving, or leave it out.",
        )


def build(tensors: Sequence[Tensor], needs: str = "") -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file with these tensors, and the offset in the file of each one.

    `needs` names the file without which this one should not be trusted.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | ({"needs": needs} if needs else {})}
    begin = 0
    for tensor in tensors:
        check_dtype(tensor.name, tensor.dtype)
        end = begin + tensor.size_bytes
        offsets = [begin, end]
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-(len(text) + 8) // _ALIGN_BYTES) * _ALIGN_BYTES - 8)  # aligns the data
    head = len(text).to_bytes(8, "little") + text
    starts = {t.name: len(head) + int(header[t.name]["data_offsets"][0]) for t in tensors}
    return head, starts


class Header(NamedTuple):
    """The contents of a header."""

    tensors: dict[str, Tensor]
    begins: dict[str, int]  # offset in the file of each tensor's bytes
    needs: str  # the file without which this one should not be trusted, if it names one


def read(file: str, size_bytes: int, read_at: Callable[[int, int], bytes]) -> Header:
    """The header of a file of that size. `read_at(begin, end)` returns bytes of the file."""
    if size_bytes < 8:
        raise DamagedCheckpoint(f"{file!r} has {size_bytes} bytes, too few for a safetensors file", _REMEDY)
    length = int.from_bytes(read_at(0, 8), "little")
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise DamagedCheckpoint(
            f"{file!r} claims a header of {length} bytes; the file has {size_bytes}", _REMEDY
        )
    header = parse_json(file, read_at(8, 8 + length))
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"the header of {file!r} is not an object", _REMEDY)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedCheckpoint(f"the metadata of {file!r} does not map names to strings", _REMEDY)
    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, value in header.items():
        tensors[name], begin, end = _tensor(file, name, value)
        spans.append((begin, end, name))
    _check_spans(file, sorted(spans), size_bytes - 8 - length)
    return Header(tensors, {name: 8 + length + begin for begin, _, name in spans}, metadata.get("needs", ""))


def _tensor(file: str, name: str, value: Any) -> tuple[Tensor, int, int]:
    def refuse(why: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"tensor {name[:200]!r} in {file!r} {why}", _REMEDY)

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise refuse("is not described by dtype, shape and data_offsets")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in _CODES:
        raise refuse(f"has the unknown dtype {str(code)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(is_count, shape)):
        raise refuse("has a shape that is not a list of counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise refuse("has data_offsets that are not two counts")
    tensor = Tensor(name, _CODES[code], tuple(shape))
    if offsets[1] - offsets[0] != tensor.size_bytes:
        raise refuse(f"has {offsets[1] - offsets[0]} bytes; its shape and dtype need {tensor.size_bytes}")
    return tensor, offsets[0], offsets[1]


def _check_spans(file: str, spans: Iterable[tuple[int, int, str]], data_bytes: int) -> None:
    at = 0
    for begin, end, name in spans:
        if begin != at:
            what = "overlaps the one before it" if begin < at else "leaves a gap before it"
            raise DamagedCheckpoint(f"tensor {name[:200]!r} in {file!r} {what}", _REMEDY)
        at = end
    if at != data_bytes:
        raise DamagedCheckpoint(
            f"{file!r} has {data_bytes} bytes of tensors, its header describes {at}: it was cut short, or "
            "something was appended",
            _REMEDY,
        )


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**60
