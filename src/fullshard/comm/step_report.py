"""The small all-reduce at the end of a backward: which parameters any rank used, and what optimizers did.

Flags of used parameters are followed by one row per rank. Each rank writes its own, so that after a maximum
every rank has all of them:

    [used, used, ...  | row of rank 0 | row of rank 1 | ...]      a row: a mark, steps, three checksums

A row describes the optimizer steps on these parameters since the last report. Ranks that stepped differently,
or with other settings, would train parts of one model in different ways. The rows are looked at when the next
forward begins; on a GPU one forward later, because nothing waits for the device.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch

from fullshard.comm.watchdog import Operation, Watchdog
from fullshard.errors import RankMismatch

_ROW = 14  # bytes: a mark, the number of steps, three checksums of 4
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
        rows = bytearray(_ROW * len(members))
        at = _ROW * members.index(self._comm.world_rank)
        rows[at : at + _ROW] = own
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
        rows = {
            rank: bytes(row)
            for rank, row in zip(self._comm.world.members, message.view(-1, _ROW).tolist(), strict=True)
            if row[0] == 1  # without a mark: not a rank of its own, but a stand-in for one
        }
        if len(set(rows.values())) > 1:
            raise _mismatch(rows)


def _to_device(message: torch.Tensor, device: torch.device) -> torch.Tensor:
    return message.pin_memory().to(device, non_blocking=True)


def _mismatch(rows: dict[int, bytes]) -> RankMismatch:
    remedy = (
        "Build the same optimizer on all ranks, change its settings on all ranks alike (a scheduler that "
        "looks at a loss needs one that all ranks share), and call step() on all or on none."
    )
    steps = {rank: row[_STEPS][0] for rank, row in rows.items()}
    if len(set(steps.values())) > 1:
        taken = "; ".join(f"rank {rank}: {count}" for rank, count in steps.items())
        return RankMismatch(f"ranks took different numbers of optimizer steps: {taken}", remedy)
    what = [name for part, name in _PARTS if len({row[part] for row in rows.values()}) > 1]
    common = Counter(rows.values()).most_common(1)[0][0]
    first = next(rank for rank, row in rows.items() if row == common)
    others = ", ".join(str(rank) for rank, row in rows.items() if row != common)
    return RankMismatch(
        f"optimizers of rank {others} differ from those of rank {first} in: {'; '.join(what)}", remedy
    )
