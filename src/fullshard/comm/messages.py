"""Plain values as bytes and back, for control messages between ranks. Reading one runs no code.

A message is the length of its text, the text, and raw bytes: JSON for the structure, with tensors, arrays and
byte strings behind it. What JSON lacks is an object with the single name '$'. Records are dataclasses and
named tuples of this package that are registered here by name; nothing else is ever constructed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import torch

from fullshard.errors import FullshardError, NotSupported
from fullshard.precision import DTYPES

T = TypeVar("T", bound=type)
MAX_BYTES = 2**30  # of one message; what is announced as larger is refused before memory is taken for it
_MAX_DEPTH = 100
_LENGTH = struct.Struct("<q")
_records: dict[str, type] = {}


def record(kind: T) -> T:
    """A class decorator: instances of this dataclass, all of whose fields are given when it is made, or of
    this named tuple, may be sent."""
    _records[_name(kind)] = kind
    return kind


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def encode(value: Any) -> bytes:
    """The message; of a value that cannot be sent, one that raises an error wherever it is read."""
    try:
        return _encode(value)
    except _Unsendable as problem:
        return _encode_tree({"$": ["unsendable", str(problem)]}, [])


def decode(message: bytes, sender: int) -> Any:
    """The value of a message; `sender` is for errors."""
    try:
        return _Reader(message).value()
    except _Unsendable as problem:
        raise NotSupported(f"rank {sender} cannot send {problem}", "Use plain values there.") from None
    except FullshardError:
        raise
    except Exception as error:  # noqa: BLE001  bytes from another process may be anything
        raise FullshardError(
            f"a message of rank {sender} cannot be read ({type(error).__name__}: {str(error)[:200]})",
            "Run the same version of fullshard on every rank.",
        ) from None


class _Unsendable(Exception):
    pass


def _encode(value: Any) -> bytes:
    blobs: list[bytes] = []
    return _encode_tree(_tree(value, blobs, 0), blobs)


def _encode_tree(tree: Any, blobs: list[bytes]) -> bytes:
    text = json.dumps([tree, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def _tree(value: Any, blobs: list[bytes], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _Unsendable(f"a value that is nested more than {_MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float) and not isinstance(value, np.generic):
        return float(value) if math.isfinite(value) else {"$": ["float", repr(float(value))]}
    if isinstance(value, int):
        return int(value)
    name = _name(type(value))
    if _records.get(name) is type(value):
        fields = value if isinstance(value, tuple) else vars(value).values()
        return {"$": ["record", name, [_tree(v, blobs, depth + 1) for v in fields]]}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_tree(v, blobs, depth + 1) for v in value]
        kind = next(k for k in (list, tuple, set, frozenset) if isinstance(value, k))
        return items if kind is list else {"$": [kind.__name__, items]}
    if isinstance(value, dict):
        pairs = [[_tree(k, blobs, depth + 1), _tree(v, blobs, depth + 1)] for k, v in value.items()]
        plain = all(type(k) is str and k != "$" for k in value)
        return dict(pairs) if plain else {"$": ["dict", pairs]}
    return {"$": _leaf(value, blobs)}


def _leaf(value: Any, blobs: list[bytes]) -> list[Any]:
    def stored(data: bytes) -> int:
        blobs.append(data)
        return len(blobs) - 1

    if isinstance(value, bytes | bytearray):
        return ["bytes", stored(bytes(value))]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if type(value) in (torch.Tensor, torch.nn.Parameter) and _is_dense(value):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = torch.view_as_real(plain) if plain.is_complex() else plain
        data = raw.clone().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), stored(data)]
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if _is_plain(array.dtype):
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            dtype = array.dtype.str if array.dtype.names is None else array.dtype.descr
            return [kind, dtype, list(array.shape), stored(np.ascontiguousarray(array).tobytes())]
    raise _Unsendable(f"a {type(value).__module__}.{type(value).__qualname__}")


def _is_dense(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Numbers, or records of numbers."""
    kinds = [dtype] if dtype.fields is None else [field[0] for field in dtype.fields.values()]
    return all(kind.kind in "biufc" for kind in kinds)


def _tensor(dtype: torch.dtype, shape: list[int], data: memoryview) -> torch.Tensor:
    if any(size < 0 for size in shape) or prod(shape) * dtype.itemsize != len(data):
        raise ValueError("a tensor of another size than its bytes")
    if not len(data):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


class _Reader:
    def __init__(self, message: bytes) -> None:
        (length,) = _LENGTH.unpack_from(message)
        start = _LENGTH.size + length
        if not 0 <= length <= len(message) - _LENGTH.size:
            raise ValueError("a text longer than its message")
        self._tree, sizes = json.loads(message[_LENGTH.size : start])
        self._blobs = list(self._cut(memoryview(message)[start:], sizes))

    @staticmethod
    def _cut(data: memoryview, sizes: list[int]) -> Iterator[memoryview]:
        if any(size < 0 for size in sizes) or sum(sizes) != len(data):
            raise ValueError("its parts are not as long as announced")
        at = 0
        for size in sizes:
            yield data[at : at + size]
            at += size

    def value(self) -> Any:
        return self._value(self._tree, 0)

    def _value(self, tree: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH + 1:
            raise ValueError("too deep")
        if isinstance(tree, list):
            return [self._value(v, depth + 1) for v in tree]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {k: self._value(v, depth + 1) for k, v in tree.items()}
        tag, *content = tree["$"]
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](self._value(v, depth + 1) for v in content[0])
        if tag == "dict":
            return {self._value(k, depth + 1): self._value(v, depth + 1) for k, v in content[0]}
        if tag == "record":
            return _records[content[0]](*(self._value(v, depth + 1) for v in content[1]))
        return self._leaf(tag, *content)

    def _leaf(self, tag: str, *content: Any) -> Any:
        if tag == "unsendable":
            raise _Unsendable(str(content[0]))
        if tag == "float":
            return float(content[0])
        if tag == "dtype":
            return DTYPES[content[0]]
        if tag == "path":
            return Path(content[0])
        if tag == "bytes":
            return bytes(self._blobs[content[0]])
        name, shape, blob = content
        data = self._blobs[blob]
        if tag == "tensor":
            return _tensor(DTYPES[name], shape, data)
        described: Any = name if isinstance(name, str) else [(str(field), str(kind)) for field, kind in name]
        dtype = np.dtype(described)
        if tag not in ("array", "scalar") or not _is_plain(dtype):
            raise ValueError(f"unknown {tag[:40]}")
        array: Any = np.frombuffer(data, dtype=dtype).reshape(shape).copy()
        return array if tag == "array" else array[()]


_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
