"""A rank of another host that is stuck, gone or somewhere else: named by rank and host within seconds.

Hosts are names here (`FULLSHARD_HOST`): ranks with different ones see nothing of each other but what goes
through the store. Limits end a hang; times are printed with `-s`, not asserted: when rank and host were
named, when with what the rank does, and exit statuses.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import hang_runs
import namespaces
import ranks
import warm
from hang_runs import Ended

STALL_S = 12


@dataclass(frozen=True)
class Case:
    name: str  # of hang_cases
    hosts: str  # of the ranks, a letter each
    victim: int
    named: str  # in what a rank of another host prints: a warning, or its error
    error: str = ""  # in the errors of all others; the same by default

    def __str__(self) -> str:
        return f"{self.name}, rank {self.victim} of {self.hosts}"

    @property
    def far(self) -> list[int]:
        """The ranks of other hosts than the victim's."""
        return [r for r, host in enumerate(self.hosts) if host != self.hosts[self.victim]]


def late(rank: int, doing: str) -> str:
    return rf"has waited \d+ s in .*Late: .*rank {rank} on node-\w \(pid \d+\): .*{doing}"


SIGNAL, GONE, STILL = "stopped by a signal", "process has exited", "nothing moved for .*late: "
SILENT = r"on node-\w: this host was not heard of for \d+ s"
STORE = "the store of this run .*on the host of rank 0.* has not answered"  # it died before anything was read
CASES = [
    Case("killed", "abb", 1, f"Stalled: .*rank 1 on node-b: {GONE}", GONE),
    Case("killed", "ab", 1, f"Stalled: .*rank 1 {SILENT}"),
    Case("stopped", "abb", 1, late(1, SIGNAL), STILL + ".*" + SIGNAL),
    Case("loop", "abb", 2, late(2, r"computing, at .*hang_cases.py:\d+ in loop"), STILL),
    Case("leaves", "ab", 1, r"Stalled: .*rank 1 on node-b: (has left|process has exited)"),
]
DIFFERENT = "different operations: |began .* where rank|has not begun"
MORE = [
    Case("extra pass in evaluation", "abb", 1, DIFFERENT, "nothing was updated"),
    Case("another unit", "ab", 1, DIFFERENT, "nothing was updated"),
    Case(
        "micro-batches", "ab", 1, "numbers of micro-batches: rank 1 has more to come", "nothing was updated"
    ),
    Case("extra step", "ab", 1, "rank 1 on node-b: has left the run"),
    Case("killed", "abb", 0, rf"Stalled: .*(rank 0 (on node-a: {GONE}|{SILENT})|{STORE})"),
    Case("stopped", "ab", 1, f"Late: rank 1 {SILENT}", STILL),
    Case("out of memory", "abb", 2, rf"Stalled: .*rank 2 on node-b: (has left|{GONE})", "rank 2"),
    Case("exits", "abb", 2, f"Stalled: .*rank 2 on node-b: {GONE}", "rank 2"),
    Case("sleep", "abb", 1, late(1, "sleeping, or waiting.*in sleeps"), STILL),
    Case("lock", "ab", 1, late(1, "sleeping, or waiting.*in locked"), STILL),
    Case("stopped in backward", "abb", 2, late(2, SIGNAL), STILL),
    Case("stopped in the optimizer", "aab", 2, late(2, SIGNAL) + "|" + SILENT, STILL),
    Case("stopped in a save", "abb", 1, late(1, SIGNAL), STILL),
    # Named when they are late; that neither will ever go on is known when both have stood still for longer.
    Case(
        *("forward alone", "ab", 1, late(1, "in in_barrier")),
        r"rank 1 on node-b waits in torch.distributed.barrier .*none of them can",
    ),
    Case("full disk in a save", "abb", 1, "rank 1 on node-b reports: .*No space left", "No space left"),
    Case("killed", "abc", 1, f"Stalled: .*rank 1 (on node-b: {GONE}|{SILENT})"),
    Case("stopped", "abc", 2, f"Late: rank 2 {SILENT}", STILL),
    Case("loop", "abc", 1, late(1, r"computing, at .*hang_cases.py:\d+ in loop"), STILL),
    Case(
        *("two models", "ab", 1, late(1, "in two_models")),
        "none of them can continue|rank 1 on node-b: has left",
    ),
]


def _run(case: Case, folder: Path) -> Ended:
    hosts = [f"node-{letter}" for letter in case.hosts]
    return hang_runs.run(case.name, folder, STALL_S, (case.victim,), hosts, case.victim)


def _problems(case: Case, ended: Ended) -> list[str]:
    wrong = []
    for rank, status in enumerate(ended.statuses):
        if rank == case.victim:
            continue
        if status != 1:
            wrong.append(f"{case}: rank {rank} ended with {status}:\n{ended.text(rank)}")
        if not re.search(case.error or "Stalled|RankMismatch", ended.text(rank)):
            wrong.append(f"{case}: rank {rank} raised no {case.error!r}:\n{ended.text(rank)}")
    text = "\n".join(ended.text(rank) for rank in case.far)
    if not re.search(case.named, text):
        wrong.append(f"{case}: not named as {case.named!r}:\n{text}")
    stack = rf"stack of rank {case.victim} on node-b:\n.*\n.*in loop"
    if case.name == "loop" and not re.search(stack, text):
        wrong.append(f"{case}: no stack:\n{text}")
    return wrong


def _check(cases: list[Case], folder: Path, at_once: int) -> None:
    if os.environ.get("HANGS"):
        cases = [case for case in CASES + MORE if re.search(os.environ["HANGS"], str(case))]
    warm.commands()
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(_run, cases, [folder / str(number) for number in range(len(cases))]))
    for case, ended in zip(cases, found, strict=True):
        explained = ended.first(case.named, case.far)
        named = ended.first(rf"{case.named}|rank {case.victim} on node-{case.hosts[case.victim]}", case.far)
        shown = ["-" if at is None else f"{at:.1f}" for at in (named, explained)]
        print(f"| {case} | {' | '.join(shown)} | {ended.statuses} |")
    # On a machine that is busy with other tests a rank may be late for other reasons: once more, alone.
    suspects = [case for case, ended in zip(cases, found, strict=True) if _problems(case, ended)]
    again = [(case, _run(case, folder / f"again-{number}")) for number, case in enumerate(suspects)]
    wrong = [problem for case, ended in again for problem in _problems(case, ended)]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.timeout(900)
def test_a_rank_of_another_host_is_named_with_its_host_and_what_it_does(tmp_path: Path) -> None:
    _check(CASES, tmp_path, at_once=5)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_kinds_of_stuck_and_lost_ranks_of_other_hosts_are_named(tmp_path: Path) -> None:
    _check((CASES + MORE) * 3, tmp_path, at_once=4)


@pytest.mark.timeout(900)
def test_a_cut_link_is_named_on_both_sides_with_host_and_ranks(tmp_path: Path) -> None:
    try:
        # On a machine that is busy with other tests a host may be silent for other reasons: once more.
        wrong = _with_a_cut_link(tmp_path / "first") and _with_a_cut_link(tmp_path / "again")
    except namespaces.Unavailable as error:
        pytest.skip(str(error))
    assert not wrong, "\n\n".join(wrong)


def _with_a_cut_link(folder: Path) -> list[str]:
    """What neither side named, with all that it printed."""
    folder.mkdir()
    command = [f"{warm.commands()}/python", str(hang_runs.SCRIPT), "keeps stepping", str(folder)]
    with namespaces.connected(2) as nodes:
        common = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": nodes[0].address,
            "MASTER_PORT": str(ranks.free_port()),
            "FULLSHARD_STALL_TIMEOUT_S": "14",
        }
        commands = [["env", f"RANK={rank}", *command] for rank in range(2)]
        with namespaces.running(nodes, commands, folder, **common) as started:
            _wait_for(lambda: (folder / "event").exists(), started, folder)
            cut_at = time.time()
            namespaces.cut(nodes[1])
            _wait_for(lambda: all(process.poll() is not None for process in started), started, folder)
            print(f"ended {time.time() - cut_at:.1f} s after the cut")
    silent = "this host was not heard of for"
    expected = (
        (
            rf"has waited \d+ s in .*Late: rank 1 on node-b: {silent}",
            rf"Stalled: .*nothing moved .*rank 1 on node-b: {silent}",
        ),
        (
            rf"has waited \d+ s in .*Late: the store of this run .*rank 0 on node-a: {silent}",
            rf"Stalled: .*rank 0 on node-a: {silent}",
        ),
    )
    texts = [(folder / f"node-{index}.log").read_text() for index in range(2)]
    return [
        f"no {part!r}:\n{text}"
        for parts, text in zip(expected, texts, strict=True)
        for part in parts
        if not re.search(part, text)
    ]


def _wait_for(done: Callable[[], bool], started: list[subprocess.Popen[str]], folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, namespaces.logs(folder)
        assert any(process.poll() is None for process in started) or done(), namespaces.logs(folder)
        time.sleep(0.1)
