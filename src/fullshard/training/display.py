"""A run on a terminal: a progress bar while it trains, a few lines at its end. On rank 0 only."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from fullshard.byte_sizes import size
from fullshard.extras import need

MIB = 2**20
NARROW = 72  # columns of a terminal below which bar and table do not fit


class Display:
    """A progress bar on a terminal, plain lines elsewhere, nothing if quiet."""

    def __init__(self, num_steps: int, quiet: bool) -> None:
        need("rich", "cli")
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if isinstance(sys.stdout, io.TextIOWrapper):
            # A model may write what the terminal's encoding does not have; that must not end a run.
            sys.stdout.reconfigure(errors="replace")
        self.console, self._quiet, self._num_steps = Console(quiet=quiet), quiet, num_steps
        vars(self.console)["on_broken_pipe"] = self._reader_left  # which would end this process
        self._is_narrow = self.console.width < NARROW and self.console.is_terminal
        columns = [
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
        ]
        self._progress = Progress(
            *([] if self._is_narrow else [BarColumn(bar_width=16)]),
            *columns,
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self._task = self._progress.add_task("training", total=num_steps, figures="")
        self._shown_steps = 0

    def _reader_left(self) -> None:
        """Continue the run when a reader such as `| head` has closed the pipe."""
        self.console.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def show(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def start(self, step: int) -> None:
        self._progress.update(self._task, completed=step)
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def step(self, line: dict[str, Any]) -> None:
        figures = f"loss {line['loss']:.3f}"
        if not self._is_narrow:
            figures += f"  {line['tokens_per_s']:,.0f} tokens/s  {_memory(line['memory'])}"
        self._progress.update(self._task, completed=line["step"], figures=figures)
        every = max(1, self._num_steps // 16)
        due = line["step"] // every > self._shown_steps // every or not self._shown_steps
        if due and not self.console.is_terminal:
            self.show(f"step {line['step']}/{self._num_steps}  {figures}")
            self._shown_steps = line["step"]

    def evaluated(self, step: int, loss: float) -> None:
        self.show(f"step {step}: validation loss {loss:.4f}")

    def held(self, ranks: Sequence[dict[str, int]], unsharded: dict[str, int], peaks: Sequence[int]) -> None:
        """What each rank holds at rest, compared with one unsharded process."""
        from rich.table import Table

        table = Table(title="Held at rest, MiB")
        for column in ("", "parameters", "gradients", "optimizer", "total", "share", "peak"):
            table.add_column(column, justify="right" if column else "left")
        rows = [(f"rank {rank}", held, peaks[rank]) for rank, held in enumerate(ranks)]
        for name, held, peak in [*rows, ("unsharded", unsharded, None)]:
            sizes = [held[kind] for kind in ("parameters", "gradients", "optimizer_state", "total")]
            share = f"{held['total'] / unsharded['total']:.1%}"
            shown = "" if peak is None else f"{peak / MIB:,.0f}"
            is_last = name == rows[-1][0]
            table.add_row(name, *(f"{s / MIB:,.2f}" for s in sizes), share, shown, end_section=is_last)
        if not self._is_narrow:
            self.console.print(table)
            return
        for name, held, peak in rows:  # a table would be cut to its first digits
            self.show(f"{name}: {size(held['total'])} at rest, {size(peak)} at the peak")
        self.show(f"unsharded: {size(unsharded['total'])} at rest")

    def sample(self, text: str) -> None:
        self.console.rule("text from the trained model")
        self.show(text)
        self.console.rule()


def _memory(ranks: Sequence[int]) -> str:
    if len(ranks) <= 4:
        return " | ".join(f"{held / MIB:,.0f}" for held in ranks) + " MiB"
    return f"{size(min(ranks))} to {size(max(ranks))}"
