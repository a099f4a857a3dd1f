"""Output of the commands: plain text in a pipe, rich tables and progress bars on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullshard.checkpoint.tools.report import Progress, Report, quiet
from fullshard.errors import OptionError

_GIVE_A_FILE = "Give a file in a folder that exists and may be written to."


def print_report(report: Report, as_json: bool = False) -> int:
    """Print a report; returns the exit code."""
    if as_json:
        as_json_text(report.data())
    else:
        print(report.text())
    return 1 if report.damaged else 0


def as_json_text(data: Any) -> None:
    print(json.dumps(data, indent=1))


def refuse_unwritable(option: str, file: Path | None) -> None:
    """Before minutes of work whose result `write` could not write."""
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise OptionError(f"{option} {str(file)!r} cannot be written", _GIVE_A_FILE)


def write(option: str, file: Path, text: str) -> None:
    """The file that an option names."""
    try:
        file.write_text(text)
    except OSError as error:
        raise OptionError(
            f"{option} {str(file)!r} cannot be written: {error.strerror or error}", _GIVE_A_FILE
        ) from error


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str] = (), left: Sequence[int] = (0,)
) -> None:
    """Print a table of numbers; the columns `left` hold text.

    In a pipe, columns are separated by two blanks and every row is one line, however wide, for `grep`.
    """
    if sys.stdout.isatty():
        _rich_table(head, rows, styles, left)
        return
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    for row in cells:
        line = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(line).rstrip())


def _rich_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str], left: Sequence[int]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(head):
        drawn.add_column(name, justify="left" if index in left else "right", overflow="fold")
    for index, row in enumerate(rows):
        drawn.add_row(*map(Text, row), style=styles[index] if styles else None)
    Console().print(drawn)


@contextmanager
def progress(verb: str) -> Iterator[Progress]:
    """A progress bar on a terminal, removed at the end; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield quiet
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as bar:
        task = bar.add_task(verb, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield show
