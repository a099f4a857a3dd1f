"""The last operations of all ranks as one timeline, in the format of Chrome's tracing, which Perfetto opens.

Records have no times of single operations, except of the last sixteen events of a rank: these are drawn by
the clock. The operations of a channel before them are drawn one after the other, one millisecond each, so
that what every rank began, and where two differ, can be seen.
"""

from __future__ import annotations

from typing import Any

from fullshard.comm.run_records import RunRecords

_STEP_US = 1000


def timeline(records: RunRecords) -> dict[str, Any]:
    """Per rank a process, per channel a thread with its last 64 operations, and one with its last events."""
    events: list[dict[str, Any]] = []
    for row in records.rows():
        place = row.place
        name = f"rank {place.rank} on {place.host or records.host} (pid {place.pid}): {place.doing}"
        events.append(_named("process_name", place.rank, 0, name))
        events.append(
            {"ph": "M", "pid": place.rank, "name": "process_sort_index", "args": {"sort_index": place.rank}}
        )
        if row.note is not None and row.note.at:
            events.append(_instant(place.rank, 0, 0, f"at {row.note.at}", {"stack": row.note.stack}))
    for rank, peer in records.peers().items():
        timed = peer.events()
        events.append(_named("thread_name", rank, 1, "last events, by the clock"))
        for event, after in zip(timed, [*timed[1:], None], strict=True):
            channel, phase, unit = peer.text(event.entry)
            end_ns = after.time_ns if after is not None else event.now_ns
            args = {"channel": channel, "number": event.entry.number, "step": event.entry.step}
            doing = "waiting in" if event.waiting else "after"
            title = f"{doing} {channel} of {unit or 'the root unit'} ({phase})"
            events.append(_span(rank, 1, event.time_ns / 1000, (end_ns - event.time_ns) / 1000, title, args))
        start_us = timed[0].time_ns / 1000 if timed else 0.0
        for index, (channel, entries) in enumerate(peer.recent().items()):
            thread = 2 + index
            events.append(_named("thread_name", rank, thread, f"{channel}: last operations, in their order"))
            for entry in entries:
                _, phase, unit = peer.text(entry)
                args = {"number": entry.number, "step": entry.step, "complete": entry.ended}
                behind = entries[-1].number - entry.number + 1
                title = f"{unit or 'the root unit'} ({phase})" + ("" if entry.ended else ", not complete")
                events.append(_span(rank, thread, start_us - behind * _STEP_US, _STEP_US, title, args))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": {"name": name}}


def _span(rank: int, thread: int, at_us: float, length_us: float, name: str, args: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": rank, "tid": thread, "ts": at_us, "dur": length_us, "name": name, "args": args}


def _instant(rank: int, thread: int, at_us: float, name: str, args: Any) -> dict[str, Any]:
    return {"ph": "i", "s": "p", "pid": rank, "tid": thread, "ts": at_us, "name": name, "args": args}
