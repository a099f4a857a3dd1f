"""A described network: how long a collective holds this rank's wire. Pure.

Flat: every rank has one link. Two levels: ranks of one node communicate over `inside`, and each has one link
of its own to the other nodes. Times are those of the algorithms that NCCL uses when messages are large:
a gather or reduce-scatter crosses between nodes once a node, because it is passed on (or summed) inside;
in an all-to-all every rank's own message crosses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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

    def seconds(self, kind: str, size_bytes: float, members: Sequence[int]) -> float:
        """How long `kind` over `members` holds the wire; `size_bytes` are those of the full buffer."""
        count = len(members)
        if count == 1:
            return 0.0
        if kind == "all-reduce":
            return 2 * self.seconds("reduce-scatter", size_bytes, members)
        if self.inside is None or self.node_ranks is None:
            return self.link.latency_s + size_bytes * (count - 1) / count / self.link.bandwidth_bytes_s
        here = count // len({rank // self.node_ranks for rank in members})
        near = size_bytes * (here - 1 if kind == "all-to-all" else count - 1) / count
        near_s = near / self.inside.bandwidth_bytes_s if here > 1 else 0.0
        if here == count:
            return self.inside.latency_s + near_s
        far = size_bytes * (count - here) / count
        if kind != "all-to-all":
            far /= here
        return self.link.latency_s + max(near_s, far / self.link.bandwidth_bytes_s)


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
