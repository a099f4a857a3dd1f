"""`fullshard launch --elastic`: ranks and hosts that are lost are replaced, and the run ends as without that.

Parameters are compared with those of a plain run of one process. Limits end a hang; no time is asserted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_train
import warm
from ranks import free_port

SCRIPT = elastic_train.__file__
LIMIT_S = 240.0


class Agent:
    """One agent, whose output goes to a file."""

    def __init__(
        self, folder: Path, name: str, options: Sequence[str], words: Sequence[object], **more: str
    ) -> None:
        self.log = folder / f"{name}.log"
        command = ["fullshard", "launch", *options, *map(str, words)]
        variables = warm.environment({**os.environ, "FULLSHARD_HOST": name, "OMP_NUM_THREADS": "1", **more})
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, start_new_session=True, cwd=folder
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, self.text):
            assert self.process.poll() is None, f"{pattern}\n{self.text}"
            assert time.monotonic() < deadline, f"{pattern}\n{self.text}"
            time.sleep(0.05)

    def wait(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text) from None


@contextlib.contextmanager
def agents(folder: Path) -> Iterator[list[Agent]]:
    """Whatever is started inside has ended afterwards."""
    started: list[Agent] = []
    try:
        yield started
    finally:
        for agent in started:
            if agent.process.poll() is None:
                agent.process.kill()
            agent.process.wait(30)


def run(folder: Path, options: Sequence[str], steps: int, accidents: list[Any]) -> tuple[int, str]:
    with agents(folder) as started:
        words = [SCRIPT, folder / "run", steps, json.dumps(accidents)]
        started.append(Agent(folder, "here", ["--rounds", "rounds.jsonl", *options], words))
        return started[0].wait(), started[0].text


def same_as_undisturbed(folder: Path, steps: int, without: frozenset[int] = frozenset()) -> None:
    found = torch.load(folder / "run" / "final.pt")
    for mine, plain in zip(found, elastic_train.reference(steps, without), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def agent_folders(started_in: Path) -> set[str]:
    """Of the agents that were started there; other tests may have agents, too."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(process / "cwd") == str(started_in.resolve()):
                found |= set(re.findall(rb"/[\w/.-]*fullshard-agent-\w+", (process / "cmdline").read_bytes()))
    return set(map(os.fsdecode, found))


def joined(folder: Path, started: list[Agent], options: Sequence[str], words: Sequence[object]) -> Agent:
    """A second agent joins the first one, whose rank waits in step 1 and leaves after its save."""
    wait_for_file(folder / "run" / "step-0")  # a rank that is slower would leave after this one
    [own] = agent_folders(folder)
    started.append(second := Agent(folder, "two", options, words))
    second.wait_for("a round is running")
    wait_for_file(Path(own) / "reports" / "leave")  # the first agent may be slower to ask its rank for it
    (folder / "joined").touch()
    return second


def record_folders(started_in: Path) -> set[str]:
    """What ranks that were started there record in memory."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(process / "cwd") == str(started_in.resolve()):
                found |= set(re.findall(r"/[\w/.-]*/fullshard-\d+-[^/\s]+", (process / "maps").read_text()))
    return found


@pytest.mark.timeout(600)
def test_a_run_goes_on_after_a_kill_an_error_and_an_exit_and_ends_with_the_same_parameters(
    tmp_path: Path,
) -> None:
    accidents = [[1, 1, "kill"], [3, 0, "raise"], [4, 1, "exit"]]
    code, text = run(tmp_path, ["--elastic", "1:2"], 6, accidents)
    assert code == 0, text
    same_as_undisturbed(tmp_path, 6)
    assert [event["record"]["failure"]["code"] for event in events(tmp_path, "concluded")] == [-9, 1, 3]
    # This process saw no more of it than what it had written down before it died.
    assert re.search(r"rank 1 on here was ended by SIGKILL in step 1, last in \w+ of .*unit", text)
    assert "rank 0 on here failed: ValueError: once in step 3" in text
    assert "Stalled: " in text  # what the other rank raised
    begun_from = [Path(event["record"]["from"]).name for event in events(tmp_path, "concluded")]
    assert begun_from == ["", "step-0", "step-2"]
    assert [re.findall(rf"trained {step} on 2", text) for step in range(6)] == [
        [f"trained {s} on 2"] for s in range(6)
    ]


@pytest.mark.timeout(600)
def test_the_same_error_in_the_same_step_twice_ends_the_run(tmp_path: Path) -> None:
    code, text = run(tmp_path, ["--elastic", "2:2"], 6, [[2, 1, "always raise"]])
    assert code == 1
    assert re.search(
        r"step 2 failed twice with the same error \(rounds 1 and 2\).*ValueError: no such luck", text
    )
    assert len(events(tmp_path, "start")) == 2


@pytest.mark.timeout(600)
def test_a_place_that_is_lost_again_and_again_is_left_empty_as_far_as_min_allows(tmp_path: Path) -> None:
    code, text = run(tmp_path, ["--elastic", "1:2"], 3, [[-1, 1, "always kill"]])
    assert code == 0, text
    assert "place 1 of here was lost 3 times without a new step, so it is left empty" in text
    assert "round 4: 1 ranks on here (1)" in text
    same_as_undisturbed(tmp_path, 3)


@pytest.mark.timeout(600)
def test_a_signal_to_the_agent_ends_all_ranks_and_nothing_is_left(tmp_path: Path) -> None:
    with agents(tmp_path) as started:
        words = [SCRIPT, tmp_path / "run", 9, json.dumps([[1, 0, "wait nothing"]])]
        started.append(Agent(tmp_path, "here", ["--elastic", "2:2"], words))
        started[0].wait_for("trained 0")
        folders = agent_folders(tmp_path)
        assert folders
        os.kill(started[0].process.pid, signal.SIGTERM)
        assert started[0].wait() == 128 + signal.SIGTERM, started[0].text
        assert "stopped by SIGTERM" in started[0].text
    assert not any(map(os.path.exists, folders))


@pytest.mark.timeout(600)
def test_a_warning_before_a_time_limit_reaches_the_ranks_which_save_and_end_the_run(tmp_path: Path) -> None:
    with agents(tmp_path) as started:
        words = [SCRIPT, tmp_path / "run", 100_000, json.dumps([[0, 0, "listens"]])]
        started.append(Agent(tmp_path, "here", ["--elastic", "2:2"], words))
        started[0].wait_for("trained 1")  # ranks listen since the end of step 0
        os.kill(started[0].process.pid, signal.SIGUSR1)
        assert started[0].wait() == 128 + signal.SIGUSR1, started[0].text
    assert "round 2" not in started[0].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--elastic", "4:2"], "MIN must be at least 1, and MAX not below it"),
        (["--elastic", "0:2"], "MIN must be at least 1"),
        (["--elastic", "two"], "Give MIN:MAX"),
        (["--elastic", "2:"], "Give MIN:MAX"),
        (["--elastic", "3:4", "--nproc-per-node", "2"], "needs 3 ranks, and this host has 2"),
        (["--elastic", "1:2", "--nnodes", "2"], "leave --nnodes out"),
        (["--elastic", "1:2", "--rdzv-endpoint", "here:port"], "Give HOST:PORT"),
        (["--rounds", "rounds.jsonl"], "--rounds is for elastic runs"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_starts(options: list[str], message: str) -> None:
    from fullshard.errors import OptionError
    from fullshard.tools.cli import launch

    with pytest.raises(OptionError, match=re.escape(message)):
        launch.parse([*options, SCRIPT])


def meeting(limits: str, **conf: object) -> list[str]:
    text = ",".join(f"{name}={value}" for name, value in {"last_call_timeout": 0.1, **conf}.items())
    return ["--elastic", limits, "--nproc-per-node", "1", "--rdzv-conf", text]


def test_min_that_is_not_reached_in_time_is_an_error_that_names_who_is_there(tmp_path: Path) -> None:
    options = [*meeting("2:2", join_timeout=1), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    code, text = run(tmp_path, options, 3, [])
    assert code == 1
    assert "1 ranks are there, and --elastic 2:2 needs 2: waited 1 s for more; hosts: here (1)" in text


@pytest.mark.timeout(600)
def test_a_host_that_joins_gets_ranks_after_a_save_and_one_that_is_lost_is_done_without(
    tmp_path: Path,
) -> None:
    options = [*meeting("1:2"), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    waits = [[1, 0, "wait joined"], [3, 0, "wait lost"]]
    words = [SCRIPT, tmp_path / "run", 6, json.dumps(waits)]
    with agents(tmp_path) as started:
        first = Agent(tmp_path, "one", options, words)
        started.append(first)
        first.wait_for("trained 0 on 1")
        second = joined(tmp_path, started, options, words)
        first.wait_for("trained 2 on 2")  # the save of step 1 was the last of the round before
        second.process.kill()
        (tmp_path / "lost").touch()
        assert first.wait() == 0, first.text
    same_as_undisturbed(tmp_path, 6)
    assert "round 1 ended: its ranks have left after a save" in first.text
    assert "round 2: 2 ranks on one (1), two (1)" in first.text
    assert "on two is lost, with its host" in first.text
    assert first.text.count("trained 1 on") == 1  # no step was lost


IMPORTS_SLOWLY = """\
import os, sys, time
while "fullshard.elastic.nursery" in sys.orig_argv and not os.path.exists("imports"):
    time.sleep(0.02)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_train_on_until_a_new_host_has_imported_and_when_it_is_interrupted_it_leaves(
    tmp_path: Path,
) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(IMPORTS_SLOWLY)
    paths = os.pathsep.join(filter(None, [str(tmp_path / "slow"), os.environ.get("PYTHONPATH", "")]))
    options = [*meeting("1:2"), "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    waits = [[1, 0, "wait joined"], [4, 0, "wait ready"], [7, 0, "wait left"]]
    words = [SCRIPT, tmp_path / "run", 9, json.dumps(waits)]
    with agents(tmp_path) as started:
        first = Agent(tmp_path, "one", options, words)
        started.append(first)
        first.wait_for("trained 0 on 1")
        [own] = agent_folders(tmp_path)
        second = Agent(tmp_path, "two", options, words, PYTHONPATH=paths)
        started.append(second)
        second.wait_for("the ranks of this host are being prepared")
        (tmp_path / "joined").touch()
        first.wait_for("trained 3 on 1")  # three saves later
        (tmp_path / "imports").touch()
        second.wait_for("a round is running, which will make room")
        wait_for_file(Path(own) / "reports" / "leave")
        (tmp_path / "ready").touch()
        first.wait_for("trained 6 on 2")
        os.kill(second.process.pid, signal.SIGINT)
        assert second.wait() == 128 + signal.SIGINT, second.text
        (tmp_path / "left").touch()
        assert first.wait() == 0, first.text
    assert "because two was asked to stop" in first.text
    assert "trained 8 on 1" in first.text
    same_as_undisturbed(tmp_path, 9)


@pytest.mark.timeout(600)
def test_agents_with_other_limits_or_of_another_run_are_told_so_and_the_run_goes_on(tmp_path: Path) -> None:
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    words = [SCRIPT, tmp_path / "run", 3, json.dumps([[1, 0, "wait told"]])]
    with agents(tmp_path) as started:
        first = Agent(tmp_path, "one", [*meeting("1:2"), *endpoint], words)
        started.append(first)
        first.wait_for("trained 0 on 1")
        for name, options in (("two", meeting("1:3")), ("three", [*meeting("1:2"), "--rdzv-id", "other"])):
            started.append(Agent(tmp_path, name, [*options, *endpoint], words))
        assert started[1].wait() == 2, started[1].text
        assert started[2].wait() == 1, started[2].text
        (tmp_path / "told").touch()
        assert first.wait() == 0, first.text
    assert "this agent has --elastic 1:3, and the run 1:2" in started[1].text
    assert "is not of this run" in started[2].text
    assert "Give all agents the same --rdzv-id" in started[2].text
    assert "round 2" not in first.text
    same_as_undisturbed(tmp_path, 3)


@pytest.mark.timeout(600)
def test_a_killed_rank_of_a_plain_launch_leaves_no_record_behind(tmp_path: Path) -> None:
    words = [SCRIPT, tmp_path / "run", 3, json.dumps([[1, 1, "wait seen"], [1, 1, "kill"]])]
    with agents(tmp_path) as started:
        started.append(Agent(tmp_path, "here", ["--nproc-per-node", "2"], words))
        started[0].wait_for("trained 0 on 2")
        folders = record_folders(tmp_path)
        assert folders
        (tmp_path / "seen").touch()
        assert started[0].wait() == 128 + signal.SIGKILL, started[0].text
    assert not any(map(os.path.exists, folders))
