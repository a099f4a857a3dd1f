"""The small all-reduce at the end of a backward: which parameters any rank used, and what optimizers did.

Flags of used parameters are followed by rows. Each rank writes its own, so that after a maximum every rank
has all of them:

    [used, used, ...  | row of rank 0 | row of rank 1 | ...]      a row: a mark, steps, six checksums

A row describes the optimizer steps on these parameters since the last report. Ranks that stepped differently,
or with other settings, would train parts of one model in different ways. The rows are looked at when the next
forward begins; on a GPU one forward later, because nothing waits for the device.

The fifth checksum is of the operations that the rank has begun (units, phases, how many), and of whether more
micro-batches are to come; the sixth is of the units in training mode. Where the host waits for messages, both
are compared before the optimizer steps. Ranks whose operations differ exchange the last of them, and the
error names the first that differs.

There are at most 64 rows, so that a report does not grow with the number of ranks: ranks 3, 67, 131 ... share
one. A row is therefore written twice, as it is and inverted: the maxima of both are the largest and the
smallest that was written, and ranks of one row that differ are noticed as well.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from fullshard.comm.watchdog import Operation, Watchdog
from fullshard.errors import RankMismatch

_MOST_ROWS = 64
_ROW = 26  # bytes: a mark, the number of steps, six checksums of 4; then the same inverted
_STEPS = slice(1, 2)
_PARTS = (
    (slice(2, 6), "classes of optimizers, or the parameters that they hold"),
    (slice(6, 10), "hyper-parameters"),
    (slice(10, 14), "learning rates"),
    (slice(14, 18), "parameters that have a gradient"),
)
_OPERATIONS = slice(18, 22)
_MODES = slice(22, 26)
_SAME_CALLS = "Every rank must make the same calls on a sharded model in the same order."


class _Ranks(Protocol):
    """What a report needs of a Comm."""

    device: torch.device
    world_rank: int
    all_ranks: int
    replicas: int
    two_level: bool
    watchdog: Watchdog

    @property
    def world(self) -> Any: ...
    def start_max(self, values: torch.Tensor) -> Operation: ...
    def max_everywhere(self, values: torch.Tensor) -> None: ...


class StepReport:
    """Of one Comm: the steps since the last report, and the report in flight."""

    def __init__(self, comm: _Ranks) -> None:
        self._comm = comm
        self._steps, self._sums = 0, [0] * len(_PARTS)
        self._more_to_come = False
        self._in_flight: tuple[Operation | None, torch.Tensor, int] | None = None  # its tensor, flags in it
        self._arriving: tuple[torch.Tensor, Any] | None = None  # rows on the host once the event has passed

    @property
    def operation(self) -> Operation | None:
        """The all-reduce that may still be in flight."""
        return None if self._in_flight is None else self._in_flight[0]

    def note(self, identity: int, settings: int, rates: int) -> None:
        """An optimizer steps: checksums of its class and parameters, its settings, its learning rates."""
        watchdog = self._comm.watchdog
        if self._in_flight is not None and watchdog.host_waits:
            operation, message, flags = self._in_flight
            if operation is not None:
                operation.wait()
            if rows := self._differing(message[flags:].cpu()):
                _compare_modes(rows)
                self._compare_operations(rows)
        self._steps += 1
        for index, value in enumerate((identity, settings, rates)):
            self._add(index, value)

    def note_gradients(self, present: int) -> None:
        """A checksum of which parameters have a gradient, when the optimizer comes to look at them."""
        self._add(len(_PARTS) - 1, present)

    def _add(self, index: int, value: int) -> None:
        self._sums[index] = (self._sums[index] + value) & 0xFFFFFFFF

    def exchange(self, used: list[bool], more_to_come: bool = False, modes: int = 0) -> list[bool]:
        """Which flags any rank has set. A rank that has set them all does not wait for the others.

        more_to_come: this was a micro-batch, and not the last one. modes: what `modes_of` returned.
        """
        self.check()
        self._more_to_come = more_to_come
        message = self._message(used, modes)
        if all(used) and self._comm.replicas == 1:
            operation = self._comm.start_max(message)
            self._in_flight = (operation, message, len(used))
            if self._comm.watchdog.profiled:
                operation.wait()
            return used
        self._comm.max_everywhere(message)
        self._in_flight = (None, message, len(used))
        return used if all(used) else [bool(flag) for flag in message[: len(used)].tolist()]

    def _message(self, used: list[bool], modes: int) -> torch.Tensor:
        members = self._comm.world.members
        trail = self._comm.watchdog.recorder.trail(self._channels())
        sums = [*self._sums, trail ^ self._more_to_come, modes]
        own = bytes([1, min(self._steps, 255)]) + b"".join(s.to_bytes(4, "little") for s in sums)
        count = min(len(members), _MOST_ROWS)
        rows = bytearray(2 * _ROW * count)
        at = 2 * _ROW * (members.index(self._comm.world_rank) % count)
        rows[at : at + 2 * _ROW] = own + _inverted(own)
        self._steps, self._sums = 0, [0] * len(_PARTS)
        message = torch.frombuffer(bytearray(used) + rows, dtype=torch.uint8)
        return message if self._comm.device.type == "cpu" else _to_device(message, self._comm.device)

    def _channels(self) -> list[str]:
        """Those on which all ranks have begun the same operations at the end of a backward: not with second
        legs of gathers, which begin when the first are over. None with tensor parallelism, whose ranks need
        not have the same parts of the same units."""
        if len(self._comm.world.members) != self._comm.all_ranks:
            return []
        second = ["gather"] if self._comm.two_level else []
        known = self._comm.watchdog.recorder.channels()
        return sorted(name for name in known if name.startswith(("gather", "reduce")) and name not in second)

    def check(self) -> None:
        """Raise if the last report that is there shows that ranks' optimizers did not do the same."""
        if self._arriving is not None and self._arriving[1].query():
            rows, self._arriving = self._arriving[0], None
            self._compare(rows)
        if self._in_flight is None:
            return
        operation, message, flags = self._in_flight
        self._in_flight = None
        if operation is not None:
            operation.wait()
        rows = message[flags:]
        if rows.device.type == "cpu":
            self._compare(rows)
        else:
            host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(rows, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(rows.device))
            self._arriving = (host, event)

    def _compare(self, message: torch.Tensor) -> None:
        rows = self._differing(message)
        if not rows:
            return
        _compare_modes(rows)
        if self._comm.device.type == "cpu":
            self._compare_operations(rows)
        if len({row[: _OPERATIONS.start] for _, row in rows}) > 1:
            raise _mismatch(rows)
        if len({row for _, row in rows}) > 1 and self._comm.device.type != "cpu":
            raise RankMismatch(
                f"ranks are in different operations: {_odd_ones(rows, _OPERATIONS)}", _SAME_CALLS
            )

    def _differing(self, message: torch.Tensor) -> list[tuple[str, bytes]]:
        """What ranks have written, with these ranks, unless all have written the same: then nothing. Two
        values where several that share a row differ."""
        data = message.numpy().tobytes()
        members, count = self._comm.world.members, len(data) // (2 * _ROW)
        if data == (data[:_ROW] + _inverted(data[:_ROW])) * count:
            return []
        rows: list[tuple[str, bytes]] = []
        for index in range(count):
            row = data[2 * _ROW * index : 2 * _ROW * (index + 1)]
            if row[0] == 1:  # without a mark: not a rank of its own, but a stand-in for one
                ranks = _ranks(members[index::count])
                rows += [(ranks, value) for value in sorted({row[:_ROW], _inverted(row[_ROW:])})]
        return rows

    def _compare_operations(self, rows: list[tuple[str, bytes]]) -> None:
        """On all ranks, which have the same rows: if any has begun other operations, exchange which."""
        if len({row[_OPERATIONS] for _, row in rows}) <= 1:
            return
        last = self._comm.watchdog.recorder.last_operations(self._channels())
        world = self._comm.world
        rows_sent = world.all_gather_object((self._more_to_come, last))
        more = {rank: sent[0] for rank, sent in zip(world.members, rows_sent, strict=True)}
        by_rank = {rank: sent[1] for rank, sent in zip(world.members, rows_sent, strict=True)}
        if len(set(more.values())) > 1:
            inside = ", ".join(str(rank) for rank, flag in more.items() if flag)
            last_one = ", ".join(str(rank) for rank, flag in more.items() if not flag)
            raise RankMismatch(
                f"ranks have different numbers of micro-batches: rank {inside} has more to come (inside "
                f"fs.accumulate), rank {last_one} has not",
                "Run the same number of micro-batches on all ranks; fs.even_batches serves ranks with fewer.",
            )
        if difference := first_difference(by_rank):
            raise RankMismatch(f"ranks are in different operations: {difference}", _SAME_CALLS)


def modes_of(modules: Iterable[nn.Module]) -> int:
    """A checksum of the modules in training mode. Its lowest bit is the mode of the first one, the model."""
    modes = bytes([module.training for module in modules])
    return zlib.crc32(modes) & ~1 | modes[0]


def _compare_modes(rows: list[tuple[str, bytes]]) -> None:
    if len({row[_MODES] for _, row in rows}) <= 1:
        return
    models = [(ranks, row[_MODES][0] & 1) for ranks, row in rows]
    if len({training for _, training in models}) > 1:
        what = "; ".join(f"rank {ranks}: {'training' if t else 'evaluation'}" for ranks, t in models)
    else:
        what = f"blocks of {_odd_ones(rows, _MODES)}"
    raise RankMismatch(
        f"the model is in different modes on the ranks of one step: {what}",
        "Call train() and eval() on all ranks alike, and train() again after an evaluation on one of them.",
    )


def _inverted(row: bytes) -> bytes:
    return bytes(255 - byte for byte in row)


def _ranks(sharing: list[int]) -> str:
    """The ranks of a row; any of them may have written it."""
    return " or ".join(map(str, sharing[:4])) + (" ..." if len(sharing) > 4 else "")


def _to_device(message: torch.Tensor, device: torch.device) -> torch.Tensor:
    return message.pin_memory().to(device, non_blocking=True)


def _mismatch(rows: list[tuple[str, bytes]]) -> RankMismatch:
    remedy = (
        "Build the same optimizer on all ranks, change its settings on all ranks alike (a scheduler that "
        "looks at a loss needs one that all ranks share), and call step() and zero_grad() on all or on none."
    )
    steps = [(ranks, row[_STEPS][0]) for ranks, row in rows]
    if len({count for _, count in steps}) > 1:
        taken = "; ".join(f"rank {ranks}: {count}" for ranks, count in steps)
        return RankMismatch(f"ranks took different numbers of optimizer steps: {taken}", remedy)
    what = [name for part, name in _PARTS if len({row[part] for _, row in rows}) > 1]
    odd = _odd_ones(rows, slice(0, _OPERATIONS.start))
    return RankMismatch(f"optimizers of {odd} in: {'; '.join(what)}", remedy)


def _odd_ones(rows: list[tuple[str, bytes]], part: slice) -> str:
    common = Counter(row[part] for _, row in rows).most_common(1)[0][0]
    first = next(ranks for ranks, row in rows if row[part] == common)
    others = ", ".join(ranks for ranks, row in rows if row[part] != common)
    return f"rank {others} differ from those of rank {first}"


def first_difference(by_rank: dict[int, dict[str, tuple[int, list[str]]]]) -> str | None:
    """The first operation that is not the same on all ranks, as far back as they remember; or, where the last
    ones are the same, who has begun more of them. None: only numbers of gathers ahead differ."""
    for channel in sorted({name for known in by_rank.values() for name in known}):
        known = {rank: found[channel] for rank, found in by_rank.items() if channel in found}
        newest = {rank: number for rank, (number, _) in known.items()}
        start = max(number - len(words) + 1 for number, words in known.values())
        for number in range(start, min(newest.values()) + 1):
            words = {rank: texts[number - newest[rank] - 1] for rank, (_, texts) in known.items()}
            if len(set(words.values())) > 1:
                common = Counter(words.values()).most_common(1)[0][0]
                first = next(rank for rank, text in words.items() if text == common)
                odd = next(rank for rank, text in words.items() if text != common)
                return (
                    f"rank {odd} began {channel}, {words[odd]}, where rank {first} began {channel}, "
                    f"{words[first]} (operation {number})"
                )
        if channel.startswith("reduce") and len(set(newest.values())) > 1:
            most = max(newest, key=lambda rank: newest[rank])
            least = min(newest, key=lambda rank: newest[rank])
            return (
                f"rank {most} has begun {newest[most] - newest[least]} operations more than rank {least}, "
                f"the last of them {channel}, {known[most][1][-1]}"
            )
    return None
