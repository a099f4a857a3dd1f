"""A described network: what a collective asks of this rank's links. Pure.

Flat: every rank has one link. Two levels: ranks of one node communicate over `inside`, and each has one link
of its own to the other nodes. The two are separate: what is sent inside a node does not hold the link across.
Loads are those of the algorithms that NCCL uses when messages are large: in a gather or reduce-scatter over
several nodes what is on other nodes crosses once per node, divided among its ranks, and is passed on (or
summed) inside; in an all-to-all every rank's own message crosses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from fullshard.errors import OptionError

_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"([kMGT]?)(B|b|bit)(?:/|p)s")
_FLOPS = re.compile(_NUMBER + r"([kMGT]?)(?:FLOPS|FLOP/s|flops)?")
_DURATION = re.compile(_NUMBER + r"(s|ms|us|µs|ns)")


@dataclass(frozen=True)
class Link:
    """Bytes per second one way, and the time before the first of them arrives."""

    bandwidth_bytes_s: float
    latency_s: float = 20e-6

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_s > 0 or self.latency_s < 0:
            raise OptionError(f"a link of {self}", "Give a bandwidth above 0 and a latency of at least 0.")

    def __str__(self) -> str:
        return f"{self.bandwidth_bytes_s / 1e9:g} GB/s and {self.latency_s * 1e6:g} µs"


@dataclass(frozen=True)
class Placement:
    """A group of ranks on nodes."""

    ranks: int
    node_ranks: int  # how many of them share a node; 1 on a flat network


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

    def times(self, count: int) -> Load:
        return Load(*(count * value for value in astuple(self)))


@dataclass(frozen=True)
class Network:
    """`ranks` ranks; with `node_ranks`, nodes of that many, joined inside by `inside`."""

    ranks: int
    link: Link
    node_ranks: int | None = None
    inside: Link | None = None

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
        if kind == "all-reduce":
            return self.load("reduce-scatter", size_bytes, group).times(2)
        across = size_bytes * (count - here) / count
        if kind == "all-to-all":
            inside = size_bytes * (here - 1) / count
        else:
            across /= here
            inside = size_bytes * (count - 1) / count - across
        latency = self.link.latency_s if self.inside is None or across else self.inside.latency_s
        inside_s = 0.0 if self.inside is None else inside / self.inside.bandwidth_bytes_s
        return Load(inside, across, inside_s, across / self.link.bandwidth_bytes_s, latency)

    def at_once(self) -> Network:
        """The same ranks on the same nodes, with messages that take no time."""
        return replace(self, link=_AT_ONCE, inside=None if self.inside is None else _AT_ONCE)


_AT_ONCE = Link(1e18, 0.0)


def bandwidth(text: str) -> float:
    """'50GB/s' or '400Gb/s' (bits) in bytes per second."""
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{text!r} is not a bandwidth", "Write it as 50GB/s (bytes) or 400Gb/s (bits).")
    number, prefix, unit = match.groups()
    value = float(number) * _UNITS[prefix]
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
