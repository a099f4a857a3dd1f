"""Plain Python values as JSON and back, exactly: no pickle, so a checkpoint cannot run code.

What JSON lacks is written as an object with one name that begins with '$': tuples, tensors, arrays, bytes,
numbers that are not finite, dicts with other keys than strings. Small tensors are written in place; large
ones go into a safetensors file under the path of the value, with their checksum in the tree, so that two
trees are equal if their values are.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fullshard.checkpoint.checksums import checksum
from fullshard.collectives import as_bytes
from fullshard.errors import CheckpointError

INLINE_BYTES = 16 * 1024
_MAX_INLINE_BYTES = 2**26  # what compressed bytes may grow to
_MAX_DEPTH = 100
Tree = Any


class Encoder:
    """Turns values into trees; collects the tensors too large to be written in place."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Tree:
        if depth > _MAX_DEPTH:
            raise _refused(path, value, f"lies more than {_MAX_DEPTH} levels deep")
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, np.generic):
            return {"$scalar": self._array(np.asarray(value), path)}
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._tensor(value, path)}
        if isinstance(value, np.ndarray):
            return {"$array": self._array(value, path)}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": _packed(bytes(value))}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        return self._container(value, path, depth)

    def _container(self, value: Any, path: str, depth: int) -> Tree:
        if type(value) in (list, tuple, torch.Size, set, frozenset):
            items = [self.encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
            tags: dict[Any, str] = {tuple: "$tuple", torch.Size: "$tuple", set: "$set", frozenset: "$set"}
            return items if type(value) is list else {tags[type(value)]: items}
        if isinstance(value, dict):
            items = [(k, self.encode(v, f"{path}[{k!r}]", depth + 1)) for k, v in value.items()]
            if type(value) is Counter:
                return {"$counter": [[self.encode(k, path, depth + 1), v] for k, v in items]}
            if all(type(k) is str and not k.startswith("$") for k in value):
                return dict(items)
            return {"$dict": [[self.encode(k, path, depth + 1), v] for k, v in items]}
        raise _refused(path, value, "cannot be written as plain data")

    def _tensor(self, value: torch.Tensor, path: str) -> Tree:
        if value.layout is not torch.strided or value.is_quantized:
            raise _refused(path, value, "is not a dense tensor")
        plain = value.detach().cpu().contiguous()
        raw = as_bytes(plain).numpy().data
        said: dict[str, Any] = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
        if len(raw) <= INLINE_BYTES:
            return said | {"data": _packed(bytes(raw))}
        self.tensors[path] = plain
        return said | {"at": path, "crc32": checksum(raw)}

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Tree:
        if value.dtype.kind not in "biufc":
            raise _refused(path, value, f"has dtype {value.dtype}")
        return {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "data": _packed(np.ascontiguousarray(value).tobytes()),
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
    if depth > 2 * _MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(tree, list):
        return [_decode(v, stored, depth + 1) for v in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {k: _decode(v, stored, depth + 1) for k, v in tree.items()}
    (content,) = tree.values()
    if tag in ("$tensor", "$array", "$scalar"):
        return _decode_block(tag, content, stored)
    if tag == "$bytes":
        return _unpacked(content)
    if tag == "$float":
        return float(content)
    if tag == "$dtype":
        return _dtype(content)
    items = _decode(content, stored, depth + 1)
    makers: dict[str, Callable[[Any], Any]] = {
        "$tuple": tuple,
        "$set": set,
        "$dict": dict,
        "$counter": _counter,
    }
    return makers[tag](items)


def _counter(items: Any) -> Counter[Any]:
    return Counter(dict(items))


def _decode_block(tag: str, said: dict[str, Any], stored: Callable[[str], torch.Tensor]) -> Any:
    shape = tuple(int(n) for n in said["shape"])
    if "at" in said:
        value = stored(said["at"])
        if (tuple(value.shape), value.dtype) != (shape, _dtype(said["dtype"])):
            raise ValueError(f"{said['at']} has another shape or dtype than the manifest says")
        return value
    raw = bytearray(_unpacked(said["data"]))
    if tag == "$tensor":
        dtype = _dtype(said["dtype"])
        return (
            torch.frombuffer(raw, dtype=dtype).reshape(shape).clone()
            if raw
            else torch.empty(shape, dtype=dtype)
        )
    kind = np.dtype(said["dtype"])
    if kind.kind not in "biufc":
        raise ValueError(f"an array of {kind}")
    array = np.frombuffer(raw, dtype=kind).reshape(shape).copy()
    return array if tag == "$array" else array[()]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _unpacked(text: str) -> bytes:
    inflate = zlib.decompressobj()
    data = inflate.decompress(base64.b64decode(text, validate=True), _MAX_INLINE_BYTES)
    if not inflate.eof:
        raise ValueError("packed bytes do not end")
    return data


def _refused(path: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is a {type(value).__name__} that {why}"
        if not why.startswith(("is", "has", "lies"))
        else f"{path} (a {type(value).__name__}) {why}",
        "Save numbers, strings, lists, dicts, tuples, tensors and arrays; leave out functions and objects.",
    )
