"""`fullshard watch`: where the ranks of a run are, from their records. Reads only, and loads no torch."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.errors import OptionError
from fullshard.tools.cli.commands import Command
from fullshard.tools.cli.printing import as_json_text, table
from fullshard.tools.cli.shared import AsJson

_EVERY_S = 1.0
_LATE_S = 2.0  # in no operation for so long, while others wait
_HEAD = (
    "rank",
    "host",
    "pid",
    "state",
    "step",
    "phase",
    "unit",
    "operation",
    "waiting",
    "for",
    "steps/s",
    "memory",
)


@dataclass(frozen=True)
class Line:
    """One rank, as it is shown and as it is in the JSON."""

    rank: int
    host: str
    pid: int
    state: str  # waiting, outside, stopped, exited, left
    step: int
    phase: str
    unit: str
    channel: str
    number: int
    seconds: float  # in this place
    late: bool
    memory_bytes: int
    steps_per_s: float | None
    at: str  # the line of its script, where it stands still
    stack: str
    silent_s: float = 0.0  # of a rank of another host: how long that was not heard of


def _watch(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A folder of records (default: the run that moved last)."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the table once, and exit.")] = False,
    dump: Annotated[
        Path | None,
        typer.Option(
            "--dump", metavar="FILE", help="Write a timeline of all records for Perfetto, and exit."
        ),
    ] = None,
    json: AsJson = False,
) -> int:
    from fullshard.comm.run_records import RunRecords, newest_run

    folder = run if run is not None else newest_run()
    if folder is None:
        raise OptionError(
            "no run of this user has records on this host",
            "Start one with two ranks or more, or give the folder: they are in /dev/shm.",
        )
    try:
        records = RunRecords(str(folder))
    except OSError as error:
        raise OptionError(
            f"{str(folder)!r} cannot be read: {error.strerror}", "Give a folder of records."
        ) from None
    if dump is not None:
        from fullshard.comm.run_timeline import timeline

        dump.write_text(json_text(timeline(records)))
        print(f"Wrote {dump}: open it at https://ui.perfetto.dev or chrome://tracing.")
        return 0
    lines = _lines(records, {}, 0.0)
    if not lines:
        raise OptionError(f"{str(folder)!r} holds no records", "Give a folder of records of this version.")
    if json:
        as_json_text({"run": str(folder), "ranks": [asdict(line) for line in lines]})
        return 0
    if once or not sys.stdout.isatty():
        table(
            _HEAD, [_cells(line) for line in lines], [_style(line) for line in lines], left=(1, 3, 5, 6, 7, 8)
        )
        for line in lines:
            if line.at:
                print(f"rank {line.rank}: at {line.at}")
        return 0
    return _live(records, str(folder))


def json_text(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _lines(records: Any, before: dict[int, int], elapsed_s: float) -> list[Line]:
    rows = records.rows()
    waits = any(row.place.waiting and row.place.since_s >= _LATE_S for row in rows)
    lines = []
    for row in rows:
        place, note = row.place, row.note
        state = (
            "exited" if not place.alive
            else "left" if place.left
            else "stopped" if row.state in ("T", "t")
            else "waiting" if place.waiting
            else "outside"
        )  # fmt: skip
        speed = (place.step - before[place.rank]) / elapsed_s if elapsed_s and place.rank in before else None
        behind = waits and place.since_s >= _LATE_S and state not in ("waiting", "left")
        late = behind or state in ("exited", "stopped")
        lines.append(
            Line(
                place.rank, place.host or records.host, place.pid, state, place.step, place.phase, place.unit,
                place.channel, place.number, round(place.since_s, 1), late,
                _memory(place.pid) if place.alive and not place.host else 0, speed,
                note.at if note is not None else "", note.stack if note is not None else "",
                round(records.silent_s(place.rank), 1),
            )
        )  # fmt: skip
    return lines


def _memory(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _cells(line: Line) -> list[str]:
    return [
        str(line.rank), line.host, str(line.pid), line.state, str(line.step) if line.number else "-",
        line.phase or "-", line.unit or ("(root)" if line.number else "-"),
        f"{line.channel} {line.number}" if line.number else "-",
        "yes" if line.state == "waiting" else "no", f"{line.seconds:.1f} s",
        "-" if line.steps_per_s is None else f"{line.steps_per_s:.2f}",
        f"{line.memory_bytes / 2**30:.2f} GiB" if line.memory_bytes else "-",
    ]  # fmt: skip


def _style(line: Line) -> str:
    return "bold red" if line.late or line.silent_s > 3.0 else "yellow" if line.seconds > _LATE_S else ""


def _live(records: Any, folder: str) -> int:
    from rich.box import SIMPLE_HEAD
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def drawn(lines: list[Line]) -> Table:
        found = Table(
            box=SIMPLE_HEAD, pad_edge=False, title=folder, caption="late ranks are red; Ctrl-C ends"
        )
        for name in _HEAD:
            found.add_column(name)
        for line in lines:
            found.add_row(*map(Text, _cells(line)), style=_style(line))
        for line in lines:
            if line.late and line.at:
                found.add_row(str(line.rank), *[""] * 4, "at", Text(line.at))
        return found

    begun, first = time.monotonic(), {line.rank: line.step for line in _lines(records, {}, 0.0)}
    with Live(drawn(_lines(records, {}, 0.0)), auto_refresh=False) as live:
        while lines := _lines(records, first, time.monotonic() - begun):
            live.update(drawn(lines), refresh=True)
            if all(line.state in ("exited", "left") for line in lines):
                break
            time.sleep(_EVERY_S)
    return 0


WATCH = Command(
    "watch",
    _watch,
    "show where the ranks of a run are, live",
    """\
Every rank of a run on this host, from the records that it keeps in shared memory: the
operation, unit, phase and step that it is in, whether it waits and for how long, its
memory, and the line of its script if it stands still. Ranks that hold the others up are
red. Ranks of other hosts are shown while a rank of this one waits for them. Nothing is
sent to the run. --dump writes the last operations of all ranks as one timeline.""",
    """\
examples:
  fullshard watch
  fullshard watch --once
  fullshard watch --json
  fullshard watch --dump hang.json

Exit code 0.""",
)
