"""Plain Python values as JSON and back, exactly: no pickle, so a checkpoint cannot run code.

What JSON lacks is written as an object with one name that begins with '$': tuples, tensors, arrays, bytes,
numbers that are not finite, dicts with other keys than strings. Small tensors, arrays and bytes are written
in place; large ones go into a safetensors file under the path of the value, with their checksum in the tree,
so that two trees are equal if their values are.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch

from fullshard.checkpoint.format.checksums import checksum
from fullshard.checkpoint.format.headers import is_count
from fullshard.comm.groups import as_bytes
from fullshard.errors import CheckpointError

INLINE_BYTES = 16 * 1024
MAX_INLINE_BYTES = 2**20  # what compressed bytes may grow to
_MAX_DEPTH = 100
_MAX_BITS = 2048  # of a number written with decimal digits: Python reads no more than 640 of them for sure
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
Tree = Any


class Encoder:
    """Turns values into trees; collects the tensors too large to be written in place."""

    def __init__(self, inline_bytes: int | None = None) -> None:
        self._inline_bytes = INLINE_BYTES if inline_bytes is None else inline_bytes
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Tree:
        if depth > _MAX_DEPTH:
            raise _refused(path, value, f"lies more than {_MAX_DEPTH} levels deep")
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, np.generic):
            return {"$scalar": self._array(np.asarray(value), path)}
        if isinstance(value, int):
            return int(value) if value.bit_length() <= _MAX_BITS else {"$int": hex(value)}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._tensor(value, path)}
        if isinstance(value, np.ndarray):
            return {"$array": self._array(value, path)}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": self._raw(bytes(value), path)}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        return self._container(value, path, depth)

    def _container(self, value: Any, path: str, depth: int) -> Tree:
        if type(value) in _SEQUENCES:
            items = [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            if isinstance(value, (set, frozenset)):
                items.sort(key=json.dumps)  # sets that are equal differ in their order from rank to rank
            return items if type(value) is list else {_SEQUENCES[type(value)]: items}
        if isinstance(value, dict):
            plain = type(value) is not Counter and all(type(k) is str and k[:1] != "$" for k in value)
            items = [self.encode(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()]
            if plain:
                return dict(zip(value, items, strict=True))
            keys = [self.encode(k, f"{path} key {i}", depth + 1) for i, k in enumerate(value)]
            tag = "$counter" if type(value) is Counter else "$dict"
            return {tag: [[k, v] for k, v in zip(keys, items, strict=True)]}
        raise _refused(path, value, "cannot be written as plain data")

    def _tensor(self, value: torch.Tensor, path: str) -> Tree:
        if value.layout is not torch.strided or value.is_quantized:
            raise _refused(path, value, "is not a dense tensor")
        plain = dense(value).cpu()
        raw = as_bytes(plain).numpy().data
        said: dict[str, Any] = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
        if len(raw) <= self._inline_bytes:
            return said | {"data": _packed(bytes(raw))}
        return said | self._store(plain, path)

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Tree:
        if value.dtype.kind not in "biufc":
            raise _refused(path, value, f"has dtype {value.dtype}")
        said = {"dtype": value.dtype.str, "shape": list(value.shape)}
        return said | self._raw(np.ascontiguousarray(value).tobytes(), path)

    def _raw(self, data: bytes, path: str) -> dict[str, Any]:
        if len(data) <= self._inline_bytes:
            return {"data": _packed(data)}
        return self._store(torch.frombuffer(bytearray(data), dtype=torch.uint8), path)

    def _store(self, plain: torch.Tensor, path: str) -> dict[str, Any]:
        while path in self.tensors:  # two keys of a dict may look alike
            path += "+"
        self.tensors[path] = plain
        return {"at": path, "crc32": checksum(as_bytes(plain).numpy().data)}


def dense(value: torch.Tensor) -> torch.Tensor:
    """The same elements, one after the other in memory, nothing about them postponed."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    # torch calls one element contiguous whatever its stride, and then cannot see it as bytes.
    return plain.clone(memory_format=torch.contiguous_format) if plain.numel() == 1 else plain


_SEQUENCES: dict[type, str] = {
    list: "",
    tuple: "$tuple",
    torch.Size: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
}


def decode(tree: Tree, stored: Callable[[str], torch.Tensor]) -> Any:
    """The value of a tree; `stored` gives a tensor that was too large to be written in place."""
    try:
        return _decode(tree, stored, 0)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  a tree from a file may be anything
        raise CheckpointError(
            f"a value in the manifest cannot be read ({type(error).__name__}: {str(error)[:200]})",
            "The checkpoint is damaged; use another one.",
        ) from None


def _decode(tree: Tree, stored: Callable[[str], torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(tree, list):
        return [_decode(v, stored, depth + 1) for v in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {k: _decode(v, stored, depth + 1) for k, v in tree.items()}
    (content,) = tree.values()
    if tag in _MAKERS:
        return _MAKERS[tag]([_decode(v, stored, depth + 1) for v in content])
    if tag in ("$dict", "$counter"):
        pairs = [(_decode(k, stored, depth + 1), _decode(v, stored, depth + 1)) for k, v in content]
        return dict(pairs) if tag == "$dict" else Counter(dict(pairs))
    return _decode_leaf(tag, content, stored)


_MAKERS: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


def _decode_leaf(tag: str, content: Any, stored: Callable[[str], torch.Tensor]) -> Any:
    if tag == "$tensor":
        return _decode_tensor(content, stored)
    if tag in ("$array", "$scalar"):
        array = _decode_array(content, stored)
        return array if tag == "$array" else array[()]
    if tag == "$bytes":
        return bytes(_decode_raw(content, stored))
    if tag == "$float":
        return float(content)
    if tag == "$int":
        return int(content, 16)
    if tag == "$dtype":
        return _DTYPES[content]
    raise ValueError(f"unknown {tag[:40]}")


def _decode_tensor(said: dict[str, Any], stored: Callable[[str], torch.Tensor]) -> torch.Tensor:
    shape, dtype = _shape(said), _DTYPES[said["dtype"]]
    if "at" in said:
        value = stored(said["at"])
        if (tuple(value.shape), value.dtype) != (shape, dtype):
            raise ValueError(f"{said['at']} has another shape or dtype than the manifest says")
        return value
    raw = bytearray(_unpacked(said["data"]))
    if len(raw) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for a tensor of shape {shape}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(shape).clone()


def _decode_array(said: dict[str, Any], stored: Callable[[str], torch.Tensor]) -> np.ndarray[Any, Any]:
    kind = np.dtype(str(said["dtype"]))
    if kind.kind not in "biufc":
        raise ValueError(f"an array of {kind}")
    array: np.ndarray[Any, Any] = np.frombuffer(_decode_raw(said, stored), dtype=kind)
    return array.reshape(_shape(said)).copy()


def _decode_raw(said: dict[str, Any], stored: Callable[[str], torch.Tensor]) -> Any:
    if "at" not in said:
        return _unpacked(said["data"])
    value = stored(said["at"])
    if value.dtype != torch.uint8 or value.dim() != 1:
        raise ValueError(f"{said['at']} is not a row of bytes")
    return value.numpy().data


def _shape(said: dict[str, Any]) -> tuple[int, ...]:
    shape = said["shape"]
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(is_count, shape)):
        raise ValueError("a shape that is not a list of counts")
    return tuple(shape)


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str) -> bytes:
    inflate = zlib.decompressobj()
    data = inflate.decompress(base64.b64decode(text, validate=True), MAX_INLINE_BYTES)
    if not inflate.eof or inflate.unused_data:
        raise ValueError("packed bytes do not end where they should")
    return data


def _refused(path: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a {type(value).__name__} that {why}"
        if not why.startswith(("is", "has", "lies"))
        else f"{path} (a {type(value).__name__}) {why}",
        "Save numbers, strings, lists, dicts, tuples, tensors and arrays; leave out functions and objects.",
    )
