"""Ranks that exchange messages on the host, recorded and watched. The tree that carries them is shared."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fullshard.comm import messages, run_secrets, tree
from fullshard.comm.flight_recorder import FlightRecorder
from fullshard.comm.group_names import named_by_members, times_called
from fullshard.comm.recorder_files import (
    folder_for,
    records_parent,
    records_prefix,
    remove_abandoned,
    remove_if_empty,
)
from fullshard.comm.store_link import reaching_the_store
from fullshard.comm.tags import OpTag
from fullshard.comm.tree import Chain, Level, Tree
from fullshard.comm.watchdog import Watchdog
from fullshard.environment import own_host_name, stall_timeout_s

_CHANNEL = "control"
_PIECE_BYTES = 16 * 2**20  # of what one rank sends another at a time
_FIRST = OpTag("agreement", "shard", 0)
_CREATION_S = 30.0  # at least, however short the limit for a stall is
# For ranks that have not come to fs.shard yet: they may load or download a model first. torch waits as long.
_ARRIVAL_S = 1800.0


def peers_are_absent() -> bool:
    """Whether this process plays one rank of many without other processes, as with torch's 'fake' backend."""
    return bool(getattr(dist.group.WORLD, "peers_are_absent", False)) or dist.get_backend() == "fake"


def new_group(ranks: list[int], backend: str | None = None) -> Any:
    # Without other processes, agreements on the host go over that backend too, and groups need no
    # names that all ranks share.
    if peers_are_absent():
        return dist.new_group(ranks, use_local_synchronization=True)
    # gloo's own limit, for creating the group as well. NCCL keeps its own.
    limit_s = max(stall_timeout_s(), _CREATION_S)
    timeout = timedelta(seconds=limit_s) if (backend or dist.get_backend()) == "gloo" else None
    with named_by_members(ranks):
        return dist.new_group(ranks, backend=backend, timeout=timeout, use_local_synchronization=True)


Lane = Literal["script", "save"]  # the thread that exchanges: the script's own, or one that saves beside it


class HostGroup:
    """Collectives of plain values on the host, over `members` of the world. One thread at a time.

    watchdog: that of a model, whose recorder then has the operations; None opens a recorder for the group.
    use_default: the script's own group will do, where it is one of these ranks on the host.
    training: of a group that a background save uses: the watchdog of the training loop beside it.
    """

    def __init__(
        self,
        members: list[int],
        purpose: str,
        watchdog: Watchdog | None = None,
        use_default: bool = False,
        training: Watchdog | None = None,
    ) -> None:
        self.members, self.ranks = members, len(members)
        self.index = members.index(dist.get_rank())
        self.is_alone = self.ranks == 1 or peers_are_absent()
        self._mesh: Any = None
        lane: Lane = "script" if training is None else "save"
        if watchdog is None:
            recorder = open_recorder(members, purpose)
            weakref.finalize(self, recorder.close)
            arrival_s = _ARRIVAL_S if use_default else 0.0
            watchdog = Watchdog(recorder, True, stall_timeout_s(), arrival_s, training)
            with self._blocking(watchdog, purpose):
                self._tree = self._find_tree(use_default, lane)
        else:
            self._tree = self._find_tree(use_default, lane)
        self.watchdog, self.recorder = watchdog, watchdog.recorder

    def _find_tree(self, use_default: bool, lane: Lane) -> Tree:
        if self.is_alone:
            return Tree([])
        if use_default and _default_group_serves(self.members):
            return Tree([Level(dist.group.WORLD, self.members, self.index, is_top=True)])
        return _shared_tree(self.members, lane)

    @contextmanager
    def _blocking(self, watchdog: Watchdog, phase: str) -> Iterator[None]:
        if self.is_alone:
            yield
            return
        watchdog.recorder.thread = threading.get_ident()
        with watchdog.blocking(_CHANNEL, OpTag("process groups", phase, 0)):
            yield

    def blocking(self, phase: str) -> AbstractContextManager[None]:
        """Around a call that blocks until all ranks of this group make it, such as creating groups."""
        return self._blocking(self.watchdog, phase)

    def all_gather_object(self, value: Any, tag: OpTag) -> list[Any]:
        """Every rank's plain value, by rank, on every rank. Ranks with the same value share one object."""
        if self.is_alone:
            return [value] * self.ranks
        return self._decoded(self._exchange(tree.run_of(messages.encode(value)), tree.join_runs, True, tag))

    def gather_object(self, value: Any, tag: OpTag) -> list[Any] | None:
        """Every rank's plain value, by rank, on the first rank only, which alone waits for them."""
        if self.is_alone:
            return [value] * self.ranks if self.index == 0 else None
        data = self._exchange(tree.run_of(messages.encode(value)), tree.join_runs, False, tag)
        return self._decoded(data) if self.index == 0 else None

    def broadcast_object(self, value: Any, tag: OpTag) -> Any:
        """The first rank's plain value on every rank."""
        if self.is_alone:
            return value
        mine = messages.encode(value) if self.index == 0 else b""
        return messages.decode(self._exchange(mine, lambda parts: parts[0], True, tag), self.members[0])

    def all_gather_ints(self, values: torch.Tensor, tag: OpTag) -> torch.Tensor:
        """Every rank's numbers, one row per rank."""
        if self.is_alone:
            return values.expand(self.ranks, -1)
        data = self._exchange(tree.run_of(values.numpy().tobytes()), tree.join_runs, True, tag)
        runs = tree.runs_in(data)
        rows = np.frombuffer(b"".join(row for _, row in runs), dtype=np.int64).reshape(len(runs), len(values))
        return torch.from_numpy(rows.repeat([count for count, _ in runs], axis=0))

    def broadcast(self, values: torch.Tensor, tag: OpTag) -> None:
        """The first rank's bytes, in place, on every rank."""
        if not self.is_alone:
            self._run(lambda _: self._tree.broadcast(values), tag)

    def connect_pairs(self) -> None:
        """Before the first `exchange_bytes`. All ranks must call it together."""
        if not self.is_alone:
            with self.blocking("peer copies"):
                self._mesh = _shared_mesh(self.members)

    def exchange_bytes(
        self,
        sizes: Mapping[tuple[int, int], int],
        outgoing: Callable[[int, int, int], torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        tag: OpTag,
    ) -> None:
        """Bytes from rank to rank, in pieces: `sizes[source, target]`, which every rank knows.

        outgoing: (target, begin, end) to these bytes of what goes there. incoming: where what comes from a
        source is written.
        """
        for begin in range(0, max(sizes.values(), default=0), _PIECE_BYTES):
            pieces = {pair: min(size - begin, _PIECE_BYTES) for pair, size in sizes.items() if size > begin}
            self._run(partial(self._piece, begin, pieces, outgoing, incoming), tag)

    def _piece(
        self,
        begin: int,
        sizes: Mapping[tuple[int, int], int],
        outgoing: Callable[[int, int, int], torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        _: int,
    ) -> Generator[Any, None, None]:
        leaving = [sizes.get((self.index, target), 0) for target in range(self.ranks)]
        coming = [sizes.get((source, self.index), 0) for source in range(self.ranks)]
        sent = [outgoing(target, begin, begin + size) for target, size in enumerate(leaving) if size]
        places = [incoming[source][begin : begin + size] for source, size in enumerate(coming) if size]
        received = places[0] if len(places) == 1 else torch.empty(sum(coming), dtype=torch.uint8)
        joined = sent[0] if len(sent) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *sent])
        yield self._mesh.alltoall_base(received, joined, coming, leaving)
        if len(places) > 1:
            for place, part in zip(places, torch.split(received, [n for n in coming if n]), strict=True):
                place.copy_(part)

    def _exchange(
        self, content: bytes, merge: Callable[[list[bytes]], bytes], everywhere: bool, tag: OpTag
    ) -> bytes:
        def steps(number: int) -> Generator[Any, None, Any]:
            text = f"{tag.unit} ({tag.phase}, operation {number} of {self.recorder.folder.name[-8:]})"
            return self._tree.exchange(tree.label_of(text), content, merge, everywhere)

        message = self._run(steps, tag)
        if message is not None and message.failed:
            tree.raise_failure(message)
        return b"" if message is None else bytes(message.content)

    def _decoded(self, data: bytes) -> list[Any]:
        values: list[Any] = []
        for count, message in tree.runs_in(data):
            values += [messages.decode(message, self.members[len(values)])] * count
        return values

    def _run(self, steps: Callable[[int], Generator[Any, None, Any]], tag: OpTag) -> Any:
        # The groups' own methods: a background save continues when the script ends its process groups.
        self.recorder.thread = threading.get_ident()
        number = self.watchdog.begin(_CHANNEL, tag)
        chain = Chain(steps(number))
        self.watchdog.wait_for(chain, _CHANNEL, number)
        return chain.result


_trees: dict[tuple[Lane, tuple[int, ...]], tuple[Any, Tree]] = {}  # with the world that they belong to


def _shared_tree(members: list[int], lane: Lane) -> Tree:
    """One per process, for all models of these ranks. All of them must make the first call together."""
    world, key = dist.group.WORLD, (lane, tuple(members))
    known = _trees.get(key)
    if known is None or known[0] is not world:
        levels = tree.levels(members, dist.get_rank(), lambda ranks: new_group(ranks, backend="gloo"))
        _trees[key] = known = world, Tree(levels)
    return known[1]


_meshes: dict[tuple[int, ...], tuple[Any, Any]] = {}  # with the world that they belong to


def _shared_mesh(members: list[int]) -> Any:
    """One group per process in which any two of these ranks exchange bytes. All of them must make the first
    call together."""
    world, key = dist.group.WORLD, tuple(members)
    known = _meshes.get(key)
    if known is None or known[0] is not world:
        _meshes[key] = known = world, new_group(members, backend="gloo")
    return known[1]


def _default_group_serves(members: list[int]) -> bool:
    """Whether the script's own group joins exactly these ranks, and moves host memory by gloo."""
    if len(members) != dist.get_world_size():
        return False
    try:
        return bool(distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).name() == "gloo")
    except (RuntimeError, AttributeError):
        return False


def open_recorder(members: list[int], purpose: str) -> FlightRecorder:
    """A recorder in a folder that the ranks of this host share. Its name needs no message: it is derived from
    a word in the store of the world, the ranks, and how many such recorders they opened before."""
    name = os.urandom(12).hex()
    if not peers_are_absent():
        store = distributed_c10d._get_default_store()
        key = hashlib.sha256(f"{purpose} {members}".encode()).hexdigest()[:16]
        count = times_called(store, f"fullshard recorder {key}", len(members))
        with reaching_the_store():
            run = store.compare_set("fullshard run", "", os.urandom(16).hex())
        name = hashlib.sha256(f"{run!r} {key} {count}".encode()).hexdigest()[:24]
    parent, prefix = records_parent(), records_prefix()
    remove_abandoned(parent, prefix)
    if (named := own_host_name()) is not None:
        prefix += hashlib.sha256(named.encode()).hexdigest()[:8] + "-"
    recorder = _recorder_in(parent, prefix + name, members)
    recorder.on_close = lambda: remove_if_empty(os.path.join(parent, prefix + name))
    return recorder


_MAX_TRIES = 100  # each failed one means that another rank of this host has come and gone meanwhile


def _recorder_in(parent: str, name: str, members: list[int]) -> FlightRecorder:
    """A rank that leaves early removes the folder if it is empty, also between the moments in which this rank
    makes the folder, opens it and writes into it: then it is made again."""
    for tries in itertools.count(1):
        folder = None
        try:
            folder = folder_for(parent, name)
            return FlightRecorder(folder, members.index(dist.get_rank()), len(members), members)
        except FileNotFoundError:
            if folder is not None:
                folder.close()
            if tries == _MAX_TRIES:
                raise
    raise AssertionError("the loop above has no other end")


leases_by_grid: dict[Hashable, tuple[Any, list[Any]]] = {}  # of group_leases, with their world
_first_groups: dict[tuple[int, ...], tuple[Any, HostGroup]] = {}  # with the world that they belong to


def first_group(members: list[int]) -> HostGroup:
    """The group in which these ranks agree before a model has groups of its own. All of them must call it."""
    world, key = dist.group.WORLD, tuple(members)
    if peers_are_absent():
        return HostGroup(members, "shard", use_default=True)
    known = _first_groups.get(key)
    if known is None or known[0] is not world:
        _first_groups[key] = known = world, HostGroup(members, "shard", use_default=True)
        proposal = run_secrets.propose(known[1].index == 0)
        run_secrets.remember(members, known[1].all_gather_object(proposal, _FIRST))
    return known[1]


def forget_first_groups() -> None:
    """The process groups end."""
    _first_groups.clear()
    _trees.clear()
    _meshes.clear()
    leases_by_grid.clear()
