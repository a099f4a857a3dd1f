"""Messages of all ranks on the host, over a tree of small gloo groups.

A gloo group connects every pair of its ranks. Here each group has at most eight, and the first of them stands
for all in a group of the next level:

    level 1                          [0  8  16]
    level 0    [0 1 2 3 4 5 6 7]  [8 9 ... 15]  [16 17 18]

So a rank has at most seven connections per level, however many ranks there are. In an exchange, messages go
up and are merged at the first rank of every group; the result goes down again. Each group begins with one
frame of a fixed size per rank: the size of the message, the operation in which the rank is, and the message
itself where it is short. Frames of different operations are an error on all ranks of the tree, also between
hosts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from fullshard.comm import messages
from fullshard.errors import FullshardError, NotSupported, RankMismatch

FAN = 8
_FRAME = 512
_HEAD = struct.Struct("<qqB")  # size of the message, ranks that it stands for, whether it is an error
_LABEL = 8 + 128  # of an operation: a digest, and the beginning of its text
_SHORT = _FRAME - _HEAD.size - _LABEL
Steps = Generator[Any, None, "Message | None"]  # yields works, one after the other


class Message(NamedTuple):
    content: bytes
    failed: bool = False  # the content is the text of an error, and goes to all ranks as it is


class Frame(NamedTuple):
    size: int
    ranks: int
    failed: bool
    label: bytes
    start: bytes  # of the content, at most _SHORT


class Level(NamedTuple):
    """A group of the tree that this rank is in."""

    group: Any
    members: list[int]  # ranks of the world, for errors
    place: int  # of this rank in the group
    is_top: bool

    def frames(self, frame: bytes) -> Generator[Any, None, list[Frame]]:
        rows = torch.empty(len(self.members), _FRAME, dtype=torch.uint8)
        yield self.group._allgather_base(rows.view(-1), _tensor(frame))
        return [_unpack(row.numpy().tobytes()) for row in rows]

    def to_first(self, content: bytes, sizes: list[int]) -> Generator[Any, None, list[bytes]]:
        """The others' contents, at the first rank; elsewhere nothing. Sends no padding."""
        others, first = [0, *sizes[1:]], self.place == 0
        received = torch.empty(sum(others) if first else 0, dtype=torch.uint8)
        sent = torch.empty(0, dtype=torch.uint8) if first else _tensor(content)
        incoming = others if first else [0] * len(sizes)
        outgoing = [sent.numel(), *[0] * (len(sizes) - 1)]
        yield self.group.alltoall_base(received, sent, incoming, outgoing)
        return [part.numpy().tobytes() for part in torch.split(received, others)[1:]] if first else []

    def from_first(self, message: Message | None) -> Generator[Any, None, Message]:
        frame = _tensor(_pack(message, 0, b"")) if message else torch.empty(_FRAME, dtype=torch.uint8)
        yield self.group.broadcast(frame, 0)
        head = _unpack(frame.numpy().tobytes())
        if head.size <= _SHORT:
            return message or Message(head.start, head.failed)
        content = _tensor(message.content) if message else torch.empty(head.size, dtype=torch.uint8)
        yield self.group.broadcast(content, 0)
        return message or Message(content.numpy().tobytes(), head.failed)


class Tree:
    """The levels that this rank is in, from the lowest one up."""

    def __init__(self, levels: list[Level]) -> None:
        self.levels = levels

    def exchange(
        self, label: bytes, content: bytes, merge: Callable[[list[bytes]], bytes], everywhere: bool
    ) -> Steps:
        """Contents of all ranks, merged: on every rank, or on the first one only (elsewhere None)."""
        message: Message | None = Message(content)
        ranks, known = 1, True
        for level in self.levels:
            assert message is not None  # only the first rank of a group is in the next level
            content = message.content
            frames = yield from level.frames(_pack(message, ranks, label))
            ranks, message = sum(frame.ranks for frame in frames), _problem(frames, level.members)
            known = message is not None or all(frame.size <= _SHORT for frame in frames)
            if not known:
                others = yield from level.to_first(content, [frame.size for frame in frames])
                message = Message(merge([content, *others])) if level.place == 0 else None
            elif message is None and (level.place == 0 or level.is_top):
                message = Message(merge([frame.start for frame in frames]))
        highest = self.levels[-1]
        if not everywhere:
            return message if highest.place == 0 or (message is not None and message.failed) else None
        for level in reversed(self.levels):
            if level is highest and level.is_top and known:
                continue  # its ranks have seen all frames
            message = yield from level.from_first(message if level.place == 0 else None)
        return message

    def broadcast(self, values: torch.Tensor) -> Generator[Any, None, None]:
        """The first rank's values, in place. All ranks know how many they are."""
        for level in reversed(self.levels):
            yield level.group.broadcast(values, 0)


class Chain:
    """Several works one after the other, waited for as one."""

    def __init__(self, steps: Generator[Any, None, Any]) -> None:
        self._steps, self._work, self.result = steps, None, None
        self._advance()

    def _advance(self) -> None:
        try:
            self._work = next(self._steps)
        except StopIteration as end:
            self._work, self.result = None, end.value

    def is_completed(self) -> bool:
        return self._work is None

    def wait(self, timeout: timedelta | None = None) -> bool:
        while self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
            self._advance()
        return True


def levels(members: list[int], rank: int, create: Callable[[list[int]], Any], fan: int = FAN) -> list[Level]:
    """The groups of this rank, of at most `fan` each, created together with their other members."""
    found: list[Level] = []
    heads, index = list(members), members.index(rank)
    while len(heads) > 1 and (not found or found[-1].place == 0):
        start = index // fan * fan
        block, is_top = heads[start : start + fan], len(heads) <= fan
        if len(block) > 1:
            found.append(Level(create(block), block, index - start, is_top))
        heads, index = heads[::fan], index // fan
    return found


def label_of(text: str) -> bytes:
    """An operation as frames name it."""
    data = text.encode("utf-8", "backslashreplace")
    return hashlib.blake2b(data, digest_size=8).digest() + data[: _LABEL - 8].ljust(_LABEL - 8)


def _text(label: bytes) -> str:
    return label[8:].decode(errors="replace").rstrip()


def _pack(message: Message, ranks: int, label: bytes) -> bytes:
    head = _HEAD.pack(len(message.content), ranks, message.failed) + label.ljust(_LABEL)
    return (head + message.content[:_SHORT]).ljust(_FRAME, b"\0")


def _unpack(data: bytes) -> Frame:
    size, ranks, failed = _HEAD.unpack_from(data)
    start = _HEAD.size + _LABEL
    return Frame(size, ranks, bool(failed), data[_HEAD.size : start], data[start : start + max(size, 0)])


def _problem(frames: list[Frame], members: list[int]) -> Message | None:
    """What is wrong with the frames of a group. Every rank of the group comes to the same result."""
    for rank, frame in zip(members, frames, strict=True):
        if frame.failed:
            return Message(frame.start, failed=True)
        if frame.label != frames[0].label:
            first, other = _text(frames[0].label), _text(frame.label)
            return _failure(RankMismatch, f"rank {members[0]}: in {first}; rank {rank}: in {other}")
        if not 0 <= frame.size <= messages.MAX_BYTES * frame.ranks:
            return _failure(NotSupported, f"rank {rank} sends a message of {frame.size} bytes")
    return None


def _failure(kind: type[FullshardError], text: str) -> Message:
    return Message(f"{kind.__name__}\0{text}".encode()[:_SHORT], failed=True)


def raise_failure(message: Message) -> None:
    """Raise the error that a failed message is."""
    kind, _, text = message.content.decode(errors="replace").partition("\0")
    if kind == NotSupported.__name__:
        raise NotSupported(
            f"{text}; the limit is {messages.MAX_BYTES}",
            "Keep large values out of what ranks agree on; save them with fs.save.",
        )
    raise RankMismatch(
        f"ranks are in different operations: {text}",
        "Every rank must make the same calls on a sharded model in the same order.",
    )


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


# ---- what is exchanged: one message per rank, equal ones of neighbours once

_RUN = struct.Struct("<qq")  # ranks with this message, its size


def run_of(message: bytes) -> bytes:
    """This rank's message, as `join_runs` merges it with the others'."""
    return _RUN.pack(1, len(message)) + message


def runs_in(data: bytes) -> list[tuple[int, bytes]]:
    """Numbers of neighbouring ranks with the same message, and that message."""
    runs, at = [], 0
    while at < len(data):
        count, size = _RUN.unpack_from(data, at)
        start = at + _RUN.size
        if count < 1 or not 0 <= size <= len(data) - start:
            raise ValueError("a run that is longer than its data")
        runs.append((count, data[start : start + size]))
        at = start + size
    return runs


def join_runs(parts: list[bytes]) -> bytes:
    joined: list[tuple[int, bytes]] = []
    for part in parts:
        for count, message in runs_in(part):
            if joined and joined[-1][1] == message:
                joined[-1] = (joined[-1][0] + count, message)
            else:
                joined.append((count, message))
    return b"".join(_RUN.pack(count, len(message)) + message for count, message in joined)
