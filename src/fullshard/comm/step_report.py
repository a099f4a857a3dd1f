"""The small all-reduce at the end of a backward: which parameters any rank used, and what optimizers did.

Flags of used parameters are followed by rows. Each rank writes its own, so that after a maximum every rank
has all of them:

    [used, used, ...  | row of rank 0 | row of rank 1 | ...]      a row: a mark, steps, three checksums

A row describes the optimizer steps on these parameters since the last report. Ranks that stepped differently,
or with other settings, would train parts of one model in different ways. The rows are looked at when the next
forward begins; on a GPU one forward later, because nothing waits for the device.

There are at most 64 rows, so that a report does not grow with the number of ranks: ranks 3, 67, 131 ... share
one. A row is therefore written twice, as it is and inverted: the maxima of both are the largest and the
smallest that was written, and ranks of one row that differ are noticed as well.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch

from fullshard.comm.watchdog import Operation, Watchdog
from fullshard.errors import RankMismatch

_MOST_ROWS = 64
_ROW = 14  # bytes: a mark, the number of steps, three checksums of 4; then the same inverted
_STEPS = slice(1, 2)
_PARTS = (
    (slice(2, 6), "classes of optimizers, or the parameters that they hold"),
    (slice(6, 10), "hyper-parameters"),
    (slice(10, 14), "learning rates"),
)


class _Ranks(Protocol):
    """What a report needs of a Comm."""

    device: torch.device
    world_rank: int
    replicas: int
    watchdog: Watchdog

    @property
    def world(self) -> Any: ...
    def start_max(self, values: torch.Tensor) -> Operation: ...
    def max_everywhere(self, values: torch.Tensor) -> None: ...


class StepReport:
    """Of one Comm: the steps since the last report, and the report in flight."""

    def __init__(self, comm: _Ranks) -> None:
        self._comm = comm
        self._steps, self._sums = 0, [0, 0, 0]
        self._in_flight: tuple[Operation | None, torch.Tensor, int] | None = None  # its tensor, flags in it
        self._arriving: tuple[torch.Tensor, Any] | None = None  # rows on the host once the event has passed

    @property
    def operation(self) -> Operation | None:
        """The all-reduce that may still be in flight."""
        return None if self._in_flight is None else self._in_flight[0]

    def note(self, identity: int, settings: int, rates: int) -> None:
        """An optimizer steps: checksums of its class and parameters, its settings, its learning rates."""
        self._steps += 1
        for index, value in enumerate((identity, settings, rates)):
            self._sums[index] = (self._sums[index] + value) & 0xFFFFFFFF

    def exchange(self, used: list[bool]) -> list[bool]:
        """Which flags any rank has set. A rank that has set them all does not wait for the others."""
        self.check()
        message = self._message(used)
        if all(used) and self._comm.replicas == 1:
            operation = self._comm.start_max(message)
            self._in_flight = (operation, message, len(used))
            if self._comm.watchdog.profiled:
                operation.wait()
            return used
        self._comm.max_everywhere(message)
        self._in_flight = (None, message, len(used))
        return used if all(used) else [bool(flag) for flag in message[: len(used)].tolist()]

    def _message(self, used: list[bool]) -> torch.Tensor:
        members = self._comm.world.members
        own = bytes([1, min(self._steps, 255)]) + b"".join(s.to_bytes(4, "little") for s in self._sums)
        count = min(len(members), _MOST_ROWS)
        rows = bytearray(2 * _ROW * count)
        at = 2 * _ROW * (members.index(self._comm.world_rank) % count)
        rows[at : at + 2 * _ROW] = own + _inverted(own)
        self._steps, self._sums = 0, [0, 0, 0]
        message = torch.frombuffer(bytearray(used) + rows, dtype=torch.uint8)
        return message if self._comm.device.type == "cpu" else _to_device(message, self._comm.device)

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
        data = message.numpy().tobytes()
        count = len(data) // (2 * _ROW)
        if data == (data[:_ROW] + _inverted(data[:_ROW])) * count:
            return
        members = self._comm.world.members
        rows: list[tuple[str, bytes]] = []
        for index in range(count):
            row = data[2 * _ROW * index : 2 * _ROW * (index + 1)]
            if row[0] == 1:  # without a mark: not a rank of its own, but a stand-in for one
                ranks = _ranks(members[index::count])
                rows += [(ranks, value) for value in sorted({row[:_ROW], _inverted(row[_ROW:])})]
        if len({row for _, row in rows}) > 1:
            raise _mismatch(rows)


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
        "looks at a loss needs one that all ranks share), and call step() on all or on none."
    )
    steps = [(ranks, row[_STEPS][0]) for ranks, row in rows]
    if len({count for _, count in steps}) > 1:
        taken = "; ".join(f"rank {ranks}: {count}" for ranks, count in steps)
        return RankMismatch(f"ranks took different numbers of optimizer steps: {taken}", remedy)
    what = [name for part, name in _PARTS if len({row[part] for _, row in rows}) > 1]
    common = Counter(row for _, row in rows).most_common(1)[0][0]
    first = next(ranks for ranks, row in rows if row == common)
    others = ", ".join(ranks for ranks, row in rows if row != common)
    return RankMismatch(
        f"optimizers of rank {others} differ from those of rank {first} in: {'; '.join(what)}", remedy
    )
