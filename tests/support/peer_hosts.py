"""Hosts that are none: keepers in this process, and ranks that believe to be on hosts of these names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from fullshard.elastic.keeper import Keeper

Spots = list[tuple[str, dict[str, str]]]  # by rank: the name of its host, and what the host's agent sets


class Hosts:
    """Each name is a host with an agent that keeps copies."""

    def __init__(self) -> None:
        self.keepers: dict[str, Keeper] = {}

    def spots(self, names: str, host: str = "") -> Spots:
        """One letter per rank: 'aab' has two ranks on host a. A host that is not there yet comes up.

        host: the agents are all on this one.
        """
        for name in names:
            if name not in self.keepers:
                self.keepers[name] = Keeper("test").__enter__()
        return [(host or name, self.keepers[name].variables()) for name in names]

    def lose(self, name: str) -> None:
        self.keepers.pop(name).close()


@contextlib.contextmanager
def hosts() -> Iterator[Hosts]:
    up = Hosts()
    try:
        yield up
    finally:
        for name in list(up.keepers):
            up.lose(name)


def arrive(spots: Spots) -> None:
    """In a rank, before anything else: it is on its host."""
    name, variables = spots[int(os.environ["RANK"])]
    os.environ.update(variables, FULLSHARD_HOST=name)


def places_held(names: Hosts, which: str) -> list[tuple[str, int]]:
    """What a host keeps: (name of the checkpoint, rank), in order."""
    from fullshard.elastic.keeper_places import Places

    word: Any = names.keepers[which].variables()["FULLSHARD_KEEPER"]
    process, token, numbers = word.split(":")
    held = Places(token, int(process), [int(n) for n in numbers.split(",")]).held()
    return sorted((os.path.basename(described["path"]), described["rank"]) for _, _, described in held)
