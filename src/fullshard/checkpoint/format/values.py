"""Plain Python values as JSON and back, exactly and without pickle, so that loading runs no code.

What JSON lacks is encoded as an object with one name that begins with '$': tuples, tensors, arrays, bytes,
non-finite numbers, dicts with keys other than strings. Small tensors, arrays and bytes are stored inline;
large ones go into a safetensors file under the path of the value, with their checksum in the tree, so that
trees are equal if their values are.
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

from fullshard.checkpoint.format.budget import Budget
from fullshard.checkpoint.format.checksums import checksum
from fullshard.checkpoint.format.headers import is_count
from fullshard.comm.groups import as_bytes
from fullshard.errors import CheckpointError, DamagedCheckpoint
from fullshard.precision import DTYPES

INLINE_BYTES = 16 * 1024
MAX_INLINE_BYTES = 2**20  # limit of decompressed bytes
_MAX_DEPTH = 100
_MAX_RATIO = 8  # of raw to packed bytes
_NODE_BYTES = 40  # of a value that is decoded, with its place
_MAX_BITS = 2048  # of an integer in decimal: Python may refuse to parse more than 640 digits
Tree = Any


class Encoder:
    """Encodes values as trees; collects the tensors that are too large to be inline.

    With `of_optimizer`, a tensor that is not row-major in memory is so again when it is decoded: products of
    matrices are rounded differently then. And no tensor may be a key: it would be a parameter.
    """

    def __init__(self, inline_bytes: int | None = None, of_optimizer: bool = False) -> None:
        self._inline_bytes = INLINE_BYTES if inline_bytes is None else inline_bytes
        self._of_optimizer = of_optimizer
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Tree:
        if depth > _MAX_DEPTH:
            raise _refused(path, value, f"is nested more than {_MAX_DEPTH} levels deep")
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
                items.sort(key=json.dumps)  # equal sets may differ in order between ranks
            return items if type(value) is list else {_SEQUENCES[type(value)]: items}
        if isinstance(value, dict):
            plain = type(value) is not Counter and all(type(k) is str and k[:1] != "$" for k in value)
            found = next((k for k in value if isinstance(k, torch.Tensor)), None)
            if self._of_optimizer and found is not None:  # by identity, which nothing that is loaded has
                raise _refused(f"a key of {path}", found, "cannot be found again after a load")
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
        kind: dict[str, Any] = {"dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
        order = memory_order(value) if self._of_optimizer else None
        if order is not None:
            kind["order"] = list(order)
        if len(raw) <= self._inline_bytes:
            return kind | {"data": _packed(bytes(raw))}
        return kind | self._store(plain, path)

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Tree:
        if value.dtype.kind not in "biufc":
            raise _refused(path, value, f"has dtype {value.dtype}")
        kind = {"dtype": value.dtype.str, "shape": list(value.shape)}
        return kind | self._raw(np.ascontiguousarray(value).tobytes(), path)

    def _raw(self, data: bytes, path: str) -> dict[str, Any]:
        if len(data) <= self._inline_bytes:
            return {"data": _packed(data)}
        return self._store(torch.frombuffer(bytearray(data), dtype=torch.uint8), path)

    def _store(self, plain: torch.Tensor, path: str) -> dict[str, Any]:
        while path in self.tensors:  # two keys of a dict may have the same repr
            path += "+"
        self.tensors[path] = plain
        return {"at": path, "crc32": checksum(as_bytes(plain).numpy().data)}


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions from that with the largest steps in memory to that with the smallest; None if row-major."""
    strides = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda dim: -strides[dim]))
    return None if value.is_contiguous() or order == tuple(range(value.dim())) else order


def in_order(value: torch.Tensor, order: Any) -> torch.Tensor:
    """The same elements with their dimensions in this order in memory; ValueError if it is none."""
    if not isinstance(order, list) or sorted(order) != list(range(value.dim())):
        raise ValueError("an order that does not list the dimensions")
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(value.dim())])


def dense(value: torch.Tensor) -> torch.Tensor:
    """The same elements, contiguous in memory, without lazy conjugation or negation."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous()
    # A single element is contiguous whatever its stride, but then cannot be viewed as bytes.
    return plain.clone(memory_format=torch.contiguous_format) if plain.numel() == 1 else plain


_SEQUENCES: dict[type, str] = {
    list: "",
    tuple: "$tuple",
    torch.Size: "$tuple",
    set: "$set",
    frozenset: "$frozenset",
}


def decode(tree: Tree, stored: Callable[[str], torch.Tensor], budget: Budget | None = None) -> Any:
    """The value of a tree; `stored` returns a tensor that was too large to be inline."""
    try:
        return _Decoder(stored, budget or Budget("a value", 0, 0)).value(tree, 0)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  a tree from a file may be anything
        raise DamagedCheckpoint(
            f"a value in the manifest cannot be read ({type(error).__name__}: {str(error)[:200]})",
            "The checkpoint is damaged; use another one.",
        ) from None


_MAKERS: dict[str, Callable[[Any], Any]] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


class _Decoder:
    def __init__(self, stored: Callable[[str], torch.Tensor], budget: Budget) -> None:
        self._stored, self._budget = stored, budget

    def value(self, tree: Tree, depth: int) -> Any:
        self._budget.charge(_NODE_BYTES)
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        if isinstance(tree, list):
            return [self.value(v, depth + 1) for v in tree]
        if not isinstance(tree, dict):
            return tree
        tag = next(iter(tree), "")
        if not tag.startswith("$"):
            return {k: self.value(v, depth + 1) for k, v in tree.items()}
        (content,) = tree.values()
        if tag in _MAKERS:
            return _MAKERS[tag]([self.value(v, depth + 1) for v in content])
        if tag in ("$dict", "$counter"):
            pairs = [(self.value(k, depth + 1), self.value(v, depth + 1)) for k, v in content]
            return dict(pairs) if tag == "$dict" else Counter(dict(pairs))
        return self._leaf(tag, content)

    def _leaf(self, tag: str, content: Any) -> Any:
        if tag == "$tensor":
            return self._tensor(content)
        if tag in ("$array", "$scalar"):
            array = self._array(content)
            return array if tag == "$array" else array[()]
        if tag == "$bytes":
            return bytes(self._raw(content))
        if tag == "$float":
            return float(content)
        if tag == "$int":
            return int(content, 16)
        if tag == "$dtype":
            return DTYPES[content]
        raise ValueError(f"unknown {tag[:40]}")

    def _tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        shape, dtype = _shape(entry), DTYPES[entry["dtype"]]
        if "at" in entry:
            value = self._stored(entry["at"])
            if (tuple(value.shape), value.dtype) != (shape, dtype):
                raise ValueError(f"{entry['at']} has another shape or dtype than in the manifest")
            return in_order(value, entry["order"]) if "order" in entry else value
        raw = bytearray(self._unpacked(entry["data"]))
        if len(raw) != prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for a tensor of shape {shape}")
        if not raw:
            return torch.empty(shape, dtype=dtype)
        value = torch.frombuffer(raw, dtype=dtype).reshape(shape).clone()
        return in_order(value, entry["order"]) if "order" in entry else value

    def _array(self, entry: dict[str, Any]) -> np.ndarray[Any, Any]:
        dtype = np.dtype(str(entry["dtype"]))
        if dtype.kind not in "biufc":
            raise ValueError(f"an array of {dtype}")
        array: np.ndarray[Any, Any] = np.frombuffer(self._raw(entry), dtype=dtype)
        return array.reshape(_shape(entry)).copy()

    def _raw(self, entry: dict[str, Any]) -> Any:
        if "at" not in entry:
            return self._unpacked(entry["data"])
        value = self._stored(entry["at"])
        if value.dtype != torch.uint8 or value.dim() != 1:
            raise ValueError(f"{entry['at']} is not a flat tensor of bytes")
        return value.numpy().data

    def _unpacked(self, text: str) -> bytes:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(text, validate=True), MAX_INLINE_BYTES)
        self._budget.charge(len(data))
        if not inflate.eof or inflate.unused_data:
            raise ValueError("packed bytes do not end where they should")
        return data


def _shape(entry: dict[str, Any]) -> tuple[int, ...]:
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(is_count, shape)):
        raise ValueError("a shape that is not a list of counts")
    return tuple(shape)


def _packed(data: bytes) -> str:
    packed = zlib.compress(data, 1)
    if len(data) > _MAX_RATIO * len(packed):
        packed = zlib.compress(data, 0)  # zeros, say: what is read is bounded by a multiple of what is stored
    return base64.b64encode(packed).decode()


def _refused(path: str, value: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} (a {type(value).__name__}) {why}",
        "Save numbers, strings, lists, dicts, tuples, tensors and arrays; leave out functions and objects.",
    )
