"""Values other than the model's tensors: stored once if all ranks agree, otherwise per rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.checkpoint.format.values import INLINE_BYTES, Encoder, Tree
from fullshard.errors import CheckpointError

_INLINE_OF_ALL = 2**18  # bytes: of one value of every rank, together


def inline_bytes(ranks: int) -> int:
    """How large a value may be in the manifest, which has those of all ranks; larger ones go into files."""
    return min(INLINE_BYTES, _INLINE_OF_ALL // ranks)


@dataclass
class ExtraValues:
    """One rank's values: trees that are equal on every rank, its own trees, and the large tensors of each."""

    shared: dict[str, Tree] = field(default_factory=dict)
    own: dict[str, Tree] = field(default_factory=dict)
    shared_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    own_tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def add_own(self, name: str, tree: Tree, encoder: Encoder | None = None) -> None:
        self.own[name] = tree
        if encoder is not None:
            self.own_tensors |= encoder.tensors


def encode_extra(extra: Mapping[str, Any] | None, ranks: int) -> dict[str, tuple[Tree, Encoder]]:
    """The user's values by name, each with the encoder that holds its large tensors."""
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(f"extra is a {type(extra).__name__}", "Give a dict of plain values.")
    encoded = {}
    for name, value in (extra or {}).items():
        if not isinstance(name, str) or name.startswith("$"):
            raise CheckpointError(f"extra has the name {name!r}", "Use strings that do not begin with '$'.")
        encoder = Encoder(inline_bytes(ranks))
        encoded[name] = encoder.encode(value, f"extra[{name!r}]"), encoder
    return encoded


def split_by_rank(encoded: dict[str, tuple[Tree, Encoder]], digests: list[dict[str, str]]) -> ExtraValues:
    """Sort the user's values into those equal on every rank and this rank's own, by all ranks' digests."""
    values = ExtraValues()
    own: dict[str, Tree] = {}
    for name, (tree, encoder) in encoded.items():
        if len({of_rank.get(name) for of_rank in digests}) == 1:
            values.shared[name] = tree
            values.shared_tensors |= encoder.tensors
        else:
            own[name] = tree
            values.own_tensors |= encoder.tensors
    values.own["extra"] = own
    return values


def digest(tree: Tree) -> str:
    return hashlib.sha256(json.dumps(tree, allow_nan=False).encode()).hexdigest()
