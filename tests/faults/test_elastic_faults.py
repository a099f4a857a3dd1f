"""What may go wrong on two and three hosts (network namespaces) with two agents of an elastic run each: it is
named on another host, the run goes on without a word from the user and ends with the parameters of an
undisturbed one, and nothing is left behind.

Limits end a hang; times are printed with `-s`, not asserted: when rank and host were named on another host,
and when training went on.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from test_elastic import LIMIT_S, same_as_undisturbed
from test_elastic_hosts import Host

import elastic_train
import namespaces
from namespaces import Node

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]
AT, BACK, STEPS, STALL_S = 6, 8, 12, 12  # BACK: from here on all hosts that come back are there
PER_HOST = 2  # agents, of one rank each
PORT = 29400


@dataclass(frozen=True)
class Fault:
    kind: str
    named: str  # in a line that another host prints; {rank}, {host}
    lossy: bool = False  # the links between the hosts
    comes_back: bool = True  # the host is there again, or was never away

    def __str__(self) -> str:
        return self.kind + (" on a lossy link" if self.lossy else "")


UNIT = r".*(of the root unit|of unit|'\w+')"
# By a rank that waited for it, or by the agents, if these have ended the others before.
GONE = (
    rf"(Stalled: .*rank {{rank}} on {{host}}: process has exited{UNIT}"
    rf"|rank {{rank}} on {{host}} was ended by SIGKILL in step \d+, last in{UNIT})"
)
STANDS = r"has waited \d+ s in \w+ of (the root )?unit.*Late: .*rank {rank} on {host}.*"
STOPPED = STANDS + "(stopped by a signal|not heard of)"
NAMED = r"ranks? (\d+, )*{rank}(, \d+)* on {host}: "
SILENT = rf"({NAMED}this host was not heard of{UNIT}|in \w+ of (the root )?unit.*{NAMED}nothing was heard)"
LOST = rf"rank \d+ on {{host}} is lost, with its host in step \d+, last in{UNIT}"  # of any of its agents
EXITS = f"Stalled: .*rank {{rank}} on {{host}}: (has left|process has exited){UNIT}"
KINDS = [
    Fault("kill", GONE),
    Fault("stop", STOPPED),
    Fault("raise", EXITS),
    Fault("exit", EXITS),
    Fault("loop", STANDS + "computing, at .* in happen"),
    Fault("cut link", SILENT),
    Fault("full disk", "on {host}.* No space left"),
    Fault("host gone", f"({SILENT}|{GONE}|{LOST})", comes_back=False),
]
FAULTS = [*KINDS, *(replace(fault, lossy=True) for fault in KINDS if fault.kind != "exit")]


class Run:
    """All agents of one run, and what they have printed since the fault."""

    def __init__(self, folder: Path, nodes: Sequence[Node], fault: Fault, victim: int) -> None:
        self.folder, self.nodes, self.fault = folder, nodes, fault
        count = PER_HOST * len(nodes)
        happens = fault.kind if fault.kind in ("kill", "stop", "raise", "exit", "loop") else "mark"
        self.mark = folder / f"happened-{happens}-{AT}"
        least = max(count - PER_HOST, count // 2 + 1) if fault.kind == "cut link" else count - PER_HOST
        words = ["--elastic", f"{least}:{count}", "--rounds", str(folder / "rounds.jsonl")]
        words += ["--rdzv-endpoint", f"{nodes[0].address}:{PORT}", "--nproc-per-node", "1"]
        words += [elastic_train.__file__, str(folder / "run"), str(STEPS)]
        words += [json.dumps([[AT, victim, happens], [BACK, 0, "wait back"]])]
        self.agents = [Host(node, folder, words, number) for node in nodes for number in range(PER_HOST)]

    def wait(self, what: str, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < deadline, f"not {what}\n{self.text()}"
            time.sleep(0.05)

    def text(self, without: str = "") -> str:
        """Of the hosts but one."""
        return "\n".join(a.text for a in self.agents if not without or not _is(a.node, without))


def _is(node: Node, host: str) -> bool:
    return str(node.namespace)[-1] == host[-1]


def _happens(kind: str, host: Node, fill: Path) -> None:
    """What comes from outside."""
    if kind == "cut link":
        namespaces.cut(host)
    if kind == "host gone":
        for pid in namespaces.processes(host):
            namespaces.kill(pid)
    if kind == "full disk":
        with open(fill, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))


def _ends(run: Run, node: Node, host: str, fill: Path) -> None:
    """What came from outside. A link is up again when the others have given the host up."""
    if run.fault.kind == "cut link":
        run.wait("without it", lambda: re.search("round 2: 4 ranks|needs 3", run.text(without=host)))
        namespaces.ip("-n", str(node.namespace), "link", "set", node.interface, "up")
        there = re.compile("a round is running, which will make room|round 2: [34] ranks")
        own = [agent for agent in run.agents if _is(agent.node, host)]
        run.wait("back", lambda: all(there.search(agent.text) for agent in own))
    if run.fault.kind == "full disk":
        fill.unlink()
    (run.folder / "back").touch()


def _survive(run: Run, victim: int) -> str:
    """To its end; the row of the table."""
    fault, fill = run.fault, run.folder / "run" / "fill"
    for agent in run.agents:
        agent.start()
    run.wait("there", run.mark.exists)
    at, host = json.loads(run.mark.read_text())
    if "mark" in run.mark.name:
        at = time.time()
    node = next(node for node in run.nodes if _is(node, host))
    _happens(fault.kind, node, fill)
    pattern = fault.named.format(rank=victim, host=host)
    run.wait(f"named as {pattern!r}", lambda: re.search(pattern, run.text(without=host)))
    named_s = time.time() - at
    _ends(run, node, host, fill)
    there = [agent for agent in run.agents if fault.comes_back or not _is(agent.node, host)]
    codes = [agent.wait() for agent in there]
    assert codes == [0] * len(there), f"{codes}\n{run.text()}"
    same_as_undisturbed(run.folder, STEPS)
    left = [pid for node in run.nodes for pid in namespaces.processes(node)]
    assert not left, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
    files = [
        file for agent in there if agent.log.name.endswith("-0.log")
        for file in namespaces.shared_memory(agent.node)
    ]  # fmt: skip
    assert not files, files
    assert not fault.lossy or any(map(namespaces.num_lost, run.nodes))
    lines = (run.folder / "rounds.jsonl").read_text().splitlines()
    again = [e["time"] - at for e in map(json.loads, lines) if e["event"] == "trains" and e["time"] > at]
    shown = f"{again[0]:.1f}" if again else "-"  # the agent that writes this down may have been away
    return f"| {fault} | {len(run.nodes)} | rank {victim} on {host} | {named_s:.1f} | {shown} |"


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_it_is_named_on_another_host_and_the_run_goes_on(
    tmp_path: Path, fault: Fault, hosts: int, victim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACE_S", "0.1")
    monkeypatch.setenv("FULLSHARD_STALL_TIMEOUT_S", str(STALL_S))
    (tmp_path / "run").mkdir()
    try:
        with namespaces.small_disk(tmp_path / "run", 2**21), namespaces.connected(hosts) as nodes:
            if fault.lossy:
                namespaces.shape(nodes, 4e6, lossy=True, burst=2000)  # of two packets at once one is lost
            print(_survive(Run(tmp_path, nodes, fault, victim), victim))
    except namespaces.Unavailable as reason:
        pytest.skip(str(reason))
