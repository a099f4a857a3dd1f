"""Values beside the tensors: what all ranks agree on is stored once, what differs by rank for each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fullshard.checkpoint.format.values import Encoder, Tree
from fullshard.errors import CheckpointError

SHARED_FILE = "extra.safetensors"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


@dataclass
class Trees:
    """Of one rank: trees that every rank has alike, its own, and the large tensors of each."""

    shared: dict[str, Tree] = field(default_factory=dict)
    own: dict[str, Tree] = field(default_factory=dict)
    shared_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    own_tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def add_own(self, name: str, tree: Tree, encoder: Encoder | None = None) -> None:
        self.own[name] = tree
        if encoder is not None:
            self.own_tensors |= encoder.tensors


def encode_extra(extra: Mapping[str, Any] | None) -> dict[str, tuple[Tree, Encoder]]:
    """The user's own values, name by name."""
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(f"extra is a {type(extra).__name__}", "Give a dict of plain values.")
    encoded = {}
    for name, value in (extra or {}).items():
        if not isinstance(name, str) or name.startswith("$"):
            raise CheckpointError(f"extra has the name {name!r}", "Use texts that do not begin with '$'.")
        encoder = Encoder()
        encoded[name] = encoder.encode(value, f"extra[{name!r}]"), encoder
    return encoded


def sort_out(encoded: dict[str, tuple[Tree, Encoder]], digests: list[dict[str, str]]) -> Trees:
    """Which of the user's values are the same on every rank, by every rank's digests of its own."""
    trees = Trees()
    own: dict[str, Tree] = {}
    for name, (tree, encoder) in encoded.items():
        if len({theirs.get(name) for theirs in digests}) == 1:
            trees.shared[name] = tree
            trees.shared_tensors |= encoder.tensors
        else:
            own[name] = tree
            trees.own_tensors |= encoder.tensors
    trees.own["extra"] = own
    return trees


def digest(tree: Tree) -> str:
    return hashlib.sha256(json.dumps(tree, allow_nan=False).encode()).hexdigest()
