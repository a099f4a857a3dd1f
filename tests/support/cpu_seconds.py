"""CPU seconds per test and per file, of all processes that tests start; unlike wall time, they hardly depend
on what else the machine does.

    PYTHONPATH=tests/support python -m pytest -p cpu_seconds --cpu-seconds table.tsv tests/ranks/test_wire.py

Ranks and commands are forked from servers that this process has started (`warm`), so they are its
descendants, and what ended ones used is in the sums of those that waited for them. The imports of a server
are counted to the test that was the first to need it.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", metavar="FILE", help="write the CPU seconds of every test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--cpu-seconds"):
        config.pluginmanager.register(Table(Path(config.getoption("--cpu-seconds"))))


class Table:
    def __init__(self, path: Path) -> None:
        self.file = path.open("w", buffering=1)
        self.files: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = used(os.getpid())
        result = yield
        seconds = used(os.getpid()) - before
        self.files[item.nodeid.split("::")[0]] += seconds
        self.file.write(f"{seconds:.2f}\t{item.nodeid}\n")
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"CPU seconds per file, {sum(self.files.values()):.1f} in all")
        for name, seconds in sorted(self.files.items(), key=lambda item: -item[1]):
            terminalreporter.line(f"{seconds:8.1f}  {name}")


def used(process: int) -> float:
    """CPU seconds of a process and its descendants, those that have ended and been waited for included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                parents[int(name)] = int(fields[1])
                ticks[int(name)] = sum(map(int, fields[11:15]))
    return sum(number for p, number in ticks.items() if _descends(p, process, parents)) / TICKS


def _descends(process: int, ancestor: int, parents: dict[int, int]) -> bool:
    while process not in (0, ancestor):
        process = parents.get(process, 0)
    return process == ancestor
