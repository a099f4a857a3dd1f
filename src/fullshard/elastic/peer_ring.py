"""Which ranks hold copies of which others' state. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Spot = tuple[str, str]  # the host of a rank, and the keeper whose memory it uses


@dataclass(frozen=True)
class Ring:
    """For each rank, the ranks that hold a copy of its state besides its own host."""

    targets: list[list[int]]
    note: str = ""  # what the copies do not protect from

    def pairs(self) -> list[tuple[int, int]]:
        """(rank, holder of a copy)."""
        return [(rank, target) for rank, targets in enumerate(self.targets) for target in targets]


def ring(spots: Sequence[Spot], peers: int) -> Ring:
    """Copies go to the next hosts, in the order of their first ranks; ranks of a host share them out."""
    hosts = list(dict.fromkeys(host for host, _ in spots))
    keepers = list(dict.fromkeys(spots))
    homes: list[object] = [host for host, _ in spots] if len(hosts) > 1 else list(spots)
    order = list(dict.fromkeys(homes))
    members = {home: [rank for rank, other in enumerate(homes) if other == home] for home in order}
    count = min(peers, len(order) - 1)
    targets: list[list[int]] = []
    for home in homes:
        at, place = order.index(home), len(targets)
        following = [members[order[(at + 1 + i) % len(order)]] for i in range(count)]
        number = members[home].index(place)
        targets.append([there[number % len(there)] for there in following])
    return Ring(targets, _note(len(hosts), len(keepers), peers))


def _note(hosts: int, keepers: int, peers: int) -> str:
    if keepers == 1:
        return (
            "all ranks are on one host: copies are in the memory of its agent, which protects from lost "
            "processes, not from a lost host; save to disk as well"
        )
    if hosts == 1:
        return (
            "all ranks are on one host: copies are in the memory of its agents, which protects from lost "
            "processes and agents, not from a lost host; save to disk as well"
        )
    if peers >= hosts:
        return f"peers={peers}, but there are {hosts} hosts: each state is on all of them"
    return ""
