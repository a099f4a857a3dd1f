"""Values that every rank has for itself, such as numbers that an optimizer counts, compared between ranks.

One value is stored for all ranks, so it must be one. Checksums go with the agreement that a save needs
anyway; what is stored where is known when they have been exchanged.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field

from fullshard.checkpoint.format.checksums import checksum
from fullshard.checkpoint.format.values import Tree
from fullshard.comm.messages import record
from fullshard.errors import RankMismatch


@dataclass(frozen=True)
class Undecided:
    """A state of a parameter: stored once if it is equal on all ranks, otherwise by each rank for itself."""

    name: str
    interval: list[int]  # this rank's elements of the parameter
    tree: Tree
    device: str  # of a tensor; '' for a plain value
    entry: dict[str, Tree]  # in the manifest; filled in when it is known


@record
@dataclass(frozen=True)
class Checksums:
    """Of the values of one rank."""

    required: dict[str, int]
    by_key: dict[str, int]


@dataclass
class Compared:
    required: dict[str, int] = field(default_factory=dict)  # by description: must be equal
    by_key: defaultdict[str, list[Undecided]] = field(default_factory=lambda: defaultdict(list))

    def require(self, what: str, tree: Tree) -> None:
        """Refuse the save unless this is equal on all ranks."""
        self.required[what] = _checksum(tree)

    def checksums(self) -> Checksums:
        # By key, not by parameter: of small shards, blocks may be equal by chance.
        by_key = {k: _checksum([[one.name, one.tree] for one in of]) for k, of in self.by_key.items()}
        return Checksums(self.required, by_key)

    def differing(self, ranks: list[Checksums]) -> set[str]:
        """Keys whose values differ between ranks. Raises on every rank if required values do."""
        first = ranks[0]
        for rank, other in enumerate(ranks):
            for what in (*first.required, *other.required):
                if first.required.get(what) != other.required.get(what):
                    raise RankMismatch(
                        f"{what}: not the same on rank {rank} as on rank 0, and one value is saved for all",
                        "Give fs.save the same optimizer on all ranks, after the same steps, and let what it "
                        "keeps follow from what all ranks have.",
                    )
        return {key for key in self.by_key if len({other.by_key.get(key) for other in ranks}) > 1}


def _checksum(tree: Tree) -> int:
    return checksum(json.dumps(tree).encode())
