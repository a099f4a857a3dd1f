"""Runs of real processes in which a rank gets stuck or leaves (`hang_cases`), and how they ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ranks
import warm

SCRIPT = Path(__file__).with_name("hang_cases.py")
LIMIT_S = 150.0


@dataclass
class Ended:
    """How a run went: by rank, lines with the time since the event, exit status, and when it ended."""

    lines: list[list[tuple[float, str]]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def text(self, rank: int) -> str:
        return "\n".join(line for _, line in self.lines[rank])

    def first(self, pattern: str, ranks: Sequence[int] | None = None) -> float | None:
        """When a line with this was printed first, in seconds since the event."""
        lines = [line for rank, line in enumerate(self.lines) if ranks is None or rank in ranks]
        times = [at for of_rank in lines for at, line in of_rank if re.search(pattern, line)]
        return min(times, default=None)


def run(
    case: str, folder: Path, stall_s: float, last: Sequence[int], hosts: Sequence[str] = (), victim: int = 1
) -> Ended:
    """All ranks to their ends, except that those of `last` get a second only: they are stuck, or gone.

    hosts: the host of each rank, by name; none: two ranks of this one.
    """
    folder.mkdir()
    count = len(hosts) or 2
    port, ended = ranks.free_port(), Ended()
    processes = [
        _start(case, folder, rank, port, stall_s, hosts or ("",) * 2, victim) for rank in range(count)
    ]
    order = sorted(range(count), key=lambda rank: rank in last)
    with ThreadPoolExecutor(2 * count) as readers:
        errors = [readers.submit(_timed_lines, process) for process in processes]
        outputs = [readers.submit(process.stdout.read) for process in processes]  # type: ignore[union-attr]
        try:
            ended.statuses, ended.times = [None] * count, [0.0] * count
            for place, rank in enumerate(order):
                limit_s = 1.0 if place > 0 and rank in last else LIMIT_S
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ended.statuses[rank] = processes[rank].wait(limit_s)
                ended.times[rank] = time.time()
        finally:
            for process in processes:
                process.kill()
                process.wait()
        ended.outputs = [output.result() for output in outputs]
        marks = folder / "event"
        event = float(marks.read_text()) if marks.exists() else time.time()
        ended.lines = [[(at - event, line) for at, line in error.result()] for error in errors]
        ended.times = [at - event for at in ended.times]
    return ended


def _start(
    case: str, folder: Path, rank: int, port: int, stall_s: float, hosts: Sequence[str], victim: int
) -> subprocess.Popen[str]:
    variables = {
        **warm.environment(dict(os.environ)),
        "RANK": str(rank),
        "LOCAL_RANK": str(hosts[:rank].count(hosts[rank])),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_WORLD_SIZE": str(hosts.count(hosts[rank])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "FULLSHARD_STALL_TIMEOUT_S": str(stall_s),
        "FULLSHARD_HOST": hosts[rank],
        "OMP_NUM_THREADS": "1",
        "VICTIM": str(victim),
    }
    command = [f"{warm.commands()}/python", str(SCRIPT), case, str(folder)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _timed_lines(process: subprocess.Popen[str]) -> list[tuple[float, str]]:
    assert process.stderr is not None
    return [(time.time(), line.rstrip()) for line in process.stderr]


def print_row(case: str, ended: Ended, others: Sequence[int] | None = None) -> None:
    def first(pattern: str) -> str:
        at = ended.first(pattern, others)
        return "-" if at is None else f"{at:.1f}"

    message = r"(errors\.\w+: |^KeyboardInterrupt|caught )"
    row: list[Any] = [case, first("has waited"), first(message), f"{ended.times[0]:.1f}", *ended.statuses]
    print("| " + " | ".join(map(str, row)) + " |")
