"""A described network: what a collective asks of this rank's links. Pure.

Flat: every rank has one link. Two levels: ranks of one node communicate over `inside`, and each has one link
of its own to the other nodes. The two are separate: what is sent inside a node does not hold the link across.
In a gather or reduce-scatter over several nodes what is on other nodes crosses once per node, divided among
its ranks, and is passed on (or summed) inside; in an all-to-all every rank's own message crosses.

Latencies follow the model by which NCCL 2.30 chooses its algorithms (src/graph/tuning.cc), protocol Simple: a
ring passes every hop between its ranks, a tree or a doubling exchange the logarithm of the nodes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fullshard.errors import OptionError

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"([kMGT]?)(B|b|bit)(?:/|p)s")
_FLOPS = re.compile(_NUMBER + r"([kMGT]?)(?:FLOPS|FLOP/s|flops)?")
_DURATION = re.compile(_NUMBER + r"(s|ms|us|µs|ns)")

COLLECTIVE_S = 8.4e-6  # before anything is sent
ACROSS_HOP_S, INSIDE_HOP_S = 14e-6, 3.4e-6  # a network, and NVLink
_DOUBLING_HOP, _DOUBLING_RANK = 1 / 3.5, 1 / 5  # of a hop: per doubling, and per rank that takes part
_DOUBLING_BANDWIDTH, _TREE_BANDWIDTH = 0.75, 0.92  # of a ring's


@dataclass(frozen=True)
class Link:
    """Bytes per second one way, and the time of one hop."""

    bandwidth_bytes_s: float
    latency_s: float = ACROSS_HOP_S

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_s > 0 or self.latency_s < 0:
            raise OptionError(f"a link of {self}", "Give a bandwidth above 0 and a latency of at least 0.")

    def __str__(self) -> str:
        return f"{self.bandwidth_bytes_s / 1e9:g} GB/s and {self.latency_s * 1e6:g} µs per hop"


@dataclass(frozen=True)
class Placement:
    """A group of ranks on nodes."""

    ranks: int
    node_ranks: int  # how many of them share a node; 1 on a flat network

    @property
    def nodes(self) -> int:
        return self.ranks // self.node_ranks


@dataclass(frozen=True)
class Load:
    """What one collective asks of this rank's two links, one way. A flat network has `across` alone."""

    inside_bytes: float = 0.0
    across_bytes: float = 0.0
    inside_s: float = 0.0
    across_s: float = 0.0
    latency_s: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it takes if both links are free."""
        return self.latency_s + max(self.inside_s, self.across_s)

    @property
    def sent_bytes(self) -> float:
        return self.inside_bytes + self.across_bytes


@dataclass(frozen=True)
class Network:
    """`ranks` ranks; with `node_ranks`, nodes of that many, joined inside by `inside`.

    rings: flat collectives over nodes pass everything along every edge of their rings, as NCCL's do;
    otherwise they cross with what is missing on a node alone, the least that any algorithm sends.
    """

    ranks: int
    link: Link
    node_ranks: int | None = None
    inside: Link | None = None
    rings: bool = False
    collective_s: float = COLLECTIVE_S

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise OptionError(f"a network of {self.ranks} ranks", "Give at least one rank.")
        if (self.node_ranks is None) != (self.inside is None):
            raise OptionError(
                "a network of nodes needs both the ranks of a node and the link inside it",
                "Give both (--node-ranks and --inside), or neither for a flat network.",
            )
        if self.node_ranks is not None and (self.node_ranks < 1 or self.ranks % self.node_ranks):
            raise OptionError(
                f"{self.ranks} ranks cannot be split in nodes of {self.node_ranks}",
                "Give a number of ranks that is a multiple of the ranks of a node.",
            )

    def __str__(self) -> str:
        if self.inside is None:
            return f"{self.ranks} ranks, {self.link} each"
        return f"{self.ranks} ranks in nodes of {self.node_ranks}, {self.inside} inside, {self.link} across"

    def placement(self, members: Sequence[int]) -> Placement:
        """How the ranks of a group are spread: all on one node, one on each, or several on several."""
        if self.node_ranks is None:
            return Placement(len(members), 1)
        return Placement(len(members), len(members) // len({rank // self.node_ranks for rank in members}))

    def load(self, kind: str, size_bytes: float, group: Placement) -> Load:
        """What `kind` over a group asks of this rank's links; `size_bytes` are those of the full buffer."""
        count, here = group.ranks, group.node_ranks
        if count == 1:
            return Load()
        if kind == "all-to-all":
            inside, across = (here - 1) / count, (count - here) / count
            return self._load(inside * size_bytes, across * size_bytes, self._direct_s(group))
        if self.rings:
            across = (count - 1) / count / here if count > here else 0.0
        else:
            across = (count - here) / count / here
        inside = (count - 1) / count - across
        twice = 2 if kind == "all-reduce" else 1
        inside, across = twice * inside * size_bytes, twice * across * size_bytes
        found = [self._load(inside, across, twice * self._ring_s(group))]
        if kind == "all-reduce":
            found.append(self._load(inside, across, self._tree_s(group), _TREE_BANDWIDTH))
        elif here == 1:
            found.append(self._load(inside, across, self._doubling_s(group), _DOUBLING_BANDWIDTH))
        return min(found, key=lambda load: load.seconds)

    def _load(self, inside: float, across: float, latency_s: float, share: float = 1.0) -> Load:
        """`share` is the part of the links' bandwidth that an algorithm reaches; in the rest it waits."""
        inside_s = 0.0 if self.inside is None else inside / self.inside.bandwidth_bytes_s
        across_s = across / self.link.bandwidth_bytes_s
        latency_s += self.collective_s + (1 / share - 1) * max(inside_s, across_s)
        return Load(inside, across, inside_s, across_s, latency_s)

    @property
    def _inside_hop_s(self) -> float:
        return 0.0 if self.inside is None else self.inside.latency_s

    def _ring_s(self, group: Placement) -> float:
        inner = group.ranks - group.nodes
        return inner * self._inside_hop_s + (group.nodes - 1) * self.link.latency_s

    def _tree_s(self, group: Placement) -> float:
        """Up to the root and down again, along a chain inside each node."""
        across = math.ceil(math.log2(group.nodes)) * self.link.latency_s
        return 2 * ((group.node_ranks - 1) * self._inside_hop_s + across)

    def _doubling_s(self, group: Placement) -> float:
        """Where every rank is a node of its own: twice as much in each round."""
        rounds = math.ceil(math.log2(group.ranks))
        return (rounds * _DOUBLING_HOP + group.ranks * _DOUBLING_RANK) * self.link.latency_s

    def _direct_s(self, group: Placement) -> float:
        """Each pair on its own: one hop, and what it takes to serve one peer after the other."""
        inner, outer = group.node_ranks - 1, group.ranks - group.node_ranks
        hop = self.link.latency_s if outer else self._inside_hop_s
        return hop + _DOUBLING_RANK * (inner * self._inside_hop_s + outer * self.link.latency_s)

    def at_once(self) -> Network:
        """The same ranks on the same nodes, with messages that take no time."""
        inside = None if self.inside is None else _AT_ONCE
        return replace(self, link=_AT_ONCE, inside=inside, collective_s=0.0)


_AT_ONCE = Link(math.inf, 0.0)


def bandwidth(text: str) -> float:
    """'50GB/s' or '400Gb/s' (bits) in bytes per second."""
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{text!r} is not a bandwidth", "Write it as 50GB/s (bytes) or 400Gb/s (bits).")
    number, prefix, unit = match.groups()
    value = float(number) * _UNITS[prefix]
    if not 0 < value < math.inf:
        raise OptionError(f"{text!r} is not a bandwidth", "Give a bandwidth above 0, such as 50GB/s.")
    return value if unit == "B" else value / 8


def duration(text: str) -> float:
    """'20us' in seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{text!r} is not a time", "Write it as 20us or 0.5ms.")
    number, unit = match.groups()
    return float(number) * _SECONDS[unit]


def flop_rate(text: str) -> float:
    """'400TFLOP/s' in floating point operations per second."""
    match = _FLOPS.fullmatch(text.strip())
    value = 0.0 if match is None else float(match[1]) * _UNITS[match[2]]
    if value <= 0:
        raise OptionError(f"{text!r} is not a rate of floating point operations", "Write it as 400TFLOP/s.")
    return value
