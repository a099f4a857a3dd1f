"""An elastic run on two hosts (network namespaces), each of which is lost and comes back, also the one where
they meet: its power is cut, its agent stands still, its link is down. And a soak: one of four ranks is killed
at random moments, again and again.

Times are printed with `-s`, not asserted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_elastic import LIMIT_S, same_as_undisturbed

import elastic_train
import namespaces
import peer_train
from namespaces import Node

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]
STEPS = 17


class Host:
    """The agent of one host, or one of several there. Each start adds to one file."""

    def __init__(self, node: Node, folder: Path, words: list[str], number: int = 0) -> None:
        self.node, self.log = node, folder / f"{node.namespace}-{number}.log"
        self.log.touch()
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._seen = 0

    def start(self) -> None:
        command = [*self.node.enter, sys.executable, "-m", "fullshard", "launch", *self._words]
        variables = namespaces._environment(self.node)
        self._seen = len(self.text)
        with open(self.log, "a") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> None:
        """In what was printed since the last start."""
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.text[self._seen :]):
            assert time.monotonic() < deadline, f"{pattern}\n{self.text}"
            time.sleep(0.05)

    def lose(self) -> None:
        """As if its power were cut: every process in it is gone."""
        for pid in namespaces.processes(self.node):
            namespaces.kill(pid)
        assert self._process is not None
        self._process.wait(30)

    def signal(self, number: int) -> None:
        """To its agent, not to its ranks."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(LIMIT_S)


@contextlib.contextmanager
def two_hosts(
    folder: Path, limits: str, accidents: list[list[object]], ranks: tuple[int, int] = (2, 2)
) -> Iterator[tuple[Host, Host]]:
    try:
        with namespaces.connected(2) as nodes:
            meets = ["--elastic", limits, "--rounds", str(folder / "rounds.jsonl")]
            meets += ["--rdzv-endpoint", f"{nodes[0].address}:29400", "--nproc-per-node"]
            words = [elastic_train.__file__, str(folder / "run"), str(STEPS), json.dumps(accidents)]
            a, b = ([*meets, str(number), *words] for number in ranks)
            yield Host(nodes[0], folder, a), Host(nodes[1], folder, b)
    except namespaces.Unavailable as reason:
        pytest.skip(str(reason))


def test_each_of_two_hosts_is_lost_and_comes_back_and_the_parameters_are_the_same(tmp_path: Path) -> None:
    marks = {3: "b is lost", 5: "b is back", 8: "a is lost", 10: "a is back", 14: "b is lost again"}
    accidents: list[list[object]] = [[step, 0, f"wait {mark}"] for step, mark in marks.items()]
    with two_hosts(tmp_path, "2:4", accidents) as (a, b):
        a.start()
        b.start()
        a.wait_for("trained 2 on 4")
        b.lose()
        (tmp_path / marks[3]).touch()
        a.wait_for("trained 4 on 2")
        b.start()
        b.wait_for("a round is running")
        (tmp_path / marks[5]).touch()
        a.wait_for("trained 7 on 4")
        a.lose()
        (tmp_path / marks[8]).touch()
        b.wait_for("trained 9 on 2")
        a.start()
        a.wait_for("a round is running")
        (tmp_path / marks[10]).touch()
        b.wait_for("trained 13 on 4")
        b.lose()
        (tmp_path / marks[14]).touch()
        assert a.wait() == 0, a.text + b.text
        assert "node-b, which formed the rounds, is lost" in a.text
        same_as_undisturbed(tmp_path, STEPS)
        assert "on node-b is lost, with its host" in a.text
        assert "node-a, which formed the rounds, is lost" in b.text
        for event in map(json.loads, (tmp_path / "rounds.jsonl").read_text().splitlines()):
            print(f"{event['time']:.1f}", event["text"])


def test_a_host_whose_agent_stood_still_comes_back_by_itself_also_the_one_where_they_meet(
    tmp_path: Path,
) -> None:
    marks = {3: "b stands still", 5: "b is back", 8: "a stands still", 10: "a is back"}
    accidents: list[list[object]] = [[step, 0, f"wait {mark}"] for step, mark in marks.items()]
    with two_hosts(tmp_path, "2:4", accidents) as (a, b):
        a.start()
        b.start()
        a.wait_for("trained 2 on 4")
        for host, other, first, ranks in ((b, a, 3, "2 ranks on node-a"), (a, b, 8, "2 ranks on node-b")):
            host.signal(signal.SIGSTOP)
            other.wait_for(ranks)
            (tmp_path / marks[first]).touch()
            other.wait_for(f"trained {first + 1} on 2")
            began = time.monotonic()
            host.signal(signal.SIGCONT)
            host.wait_for("a round is running, which will make room")
            print(f"back {time.monotonic() - began:.1f} s after its agent went on")
            (tmp_path / marks[first + 2]).touch()
            other.wait_for(f"trained {first + 4} on 4")
        assert (a.wait(), b.wait()) == (0, 0), a.text + b.text
        same_as_undisturbed(tmp_path, STEPS)


def test_a_host_whose_link_was_down_trains_nothing_below_min_and_comes_back_by_itself(tmp_path: Path) -> None:
    marks = {3: "b is cut off", 5: "b is back"}
    accidents: list[list[object]] = [[step, 0, f"wait {mark}"] for step, mark in marks.items()]
    with two_hosts(tmp_path, "2:3", accidents, ranks=(2, 1)) as (a, b):
        a.start()
        b.start()
        a.wait_for("trained 2 on 3")
        namespaces.cut(b.node)
        (tmp_path / marks[3]).touch()
        a.wait_for("trained 4 on 2")
        b.wait_for("1 ranks are there, and --elastic 2:3 needs 2")
        began = time.monotonic()
        namespaces.ip("-n", str(b.node.namespace), "link", "set", b.node.interface, "up")
        b.wait_for("a round is running, which will make room")
        print(f"back {time.monotonic() - began:.1f} s after its link")
        (tmp_path / marks[5]).touch()
        a.wait_for("trained 7 on 3")
        assert (a.wait(), b.wait()) == (0, 0), a.text + b.text
        assert "trained" not in b.text  # the first rank prints it: b has led none
        same_as_undisturbed(tmp_path, STEPS)


def test_two_halves_below_min_wait_for_each_other_and_go_on_together(tmp_path: Path) -> None:
    accidents: list[list[object]] = [[3, 0, "wait cut"]]
    with two_hosts(tmp_path, "4:4", accidents) as (a, b):
        a.start()
        b.start()
        a.wait_for("trained 2 on 4")
        namespaces.cut(b.node)
        for host in (a, b):
            host.wait_for("2 ranks are there, and --elastic 4:4 needs 4")
        namespaces.ip("-n", str(b.node.namespace), "link", "set", b.node.interface, "up")
        (tmp_path / "cut").touch()
        assert (a.wait(), b.wait()) == (0, 0), a.text + b.text
        assert set(re.findall(r"trained \d+ on (\d)", a.text + b.text)) == {"4"}
        same_as_undisturbed(tmp_path, STEPS)


def ranks_of(agent: int) -> list[int]:
    """The processes of an agent's ranks: children of the one from which they are forked."""
    return [
        rank
        for nursery in _children(agent)
        if b"elastic.nursery" in Path(f"/proc/{nursery}/cmdline").read_bytes()
        for rank in _children(nursery)
    ]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("script", [elastic_train, peer_train], ids=["disk", "peers"])
def test_one_of_four_ranks_is_killed_at_random_moments_again_and_again(tmp_path: Path, script: Any) -> None:
    """KILLS of them, each up to GAP_S after the one before; a run of STEPS takes PACE_S longer per step."""
    kills, steps = int(os.environ.get("KILLS", "12")), int(os.environ.get("STEPS", "400"))
    dice, gap_s = random.Random(0), float(os.environ.get("GAP_S", "1.5"))
    limit_s = LIMIT_S + 2 * steps * float(os.environ.get("PACE_S", "0"))
    words = [script.__file__, str(tmp_path / "run"), str(steps), "[]"]
    command = [sys.executable, "-m", "fullshard", "launch", "--elastic", "2:4", "--rounds", "rounds.jsonl"]
    lines = tmp_path / "rounds.jsonl"
    with open(tmp_path / "log", "w") as log:
        agent = subprocess.Popen([*command, *words], stdout=log, stderr=log, cwd=tmp_path)
    try:
        for number in range(kills):
            deadline = time.monotonic() + LIMIT_S
            while agent.poll() is None and _trained(lines) <= number:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()[-4000:]
                time.sleep(0.02)
            time.sleep(dice.uniform(0, gap_s))
            if ranks := ranks_of(agent.pid):
                os.kill(dice.choice(ranks), signal.SIGKILL)
        assert agent.wait(limit_s) == 0, (tmp_path / "log").read_text()[-4000:]
    finally:
        agent.kill()
        agent.wait()
    same_as_undisturbed(tmp_path, steps)
    text = (tmp_path / "log").read_text()
    saved = -1
    for word, step in re.findall(r"(trained|saved) (\d+)", text):
        assert word == "saved" or int(step) > saved, f"step {step} was saved, and trained again"
        saved = int(step) if word == "saved" else saved
    trained = [int(step) for step in re.findall(r"trained (\d+) on", text)]
    repeated = len(trained) - len(set(trained))
    found = [event["record"]["seconds"] for event in map(json.loads, lines.read_text().splitlines())
             if event["event"] == "trains" and event["record"]["seconds"] is not None]  # fmt: skip
    print(f"{len(found)} kills; training again after {sorted(round(s, 1) for s in found)} s")
    print(f"{repeated} steps were trained again: those whose save was under way")
    assert repeated <= kills


def _trained(lines: Path) -> int:
    if not lines.exists():
        return 0
    return sum(
        json.loads(line)["event"] == "trains"
        for line in lines.read_text().splitlines(True)
        if line.endswith("\n")
    )
