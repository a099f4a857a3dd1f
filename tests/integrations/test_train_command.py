"""`fullshard train` as a person runs it: its own ranks, signals, crashes, one message for what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import ranks
import training_runs as runs
import warm
from fullshard.training.command import RunFailed, _Launch
from fullshard.training.example import EXAMPLE
from fullshard.training.folder import RunFolder
from training_runs import STEPS

LIMIT_S = 600.0
LONG = 100_000  # steps: more than are done before a signal arrives, however late that is


@contextmanager
def started(fullshard: list[str], config: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A running `fullshard train`, which is gone with all its ranks when the block ends."""
    command = [*fullshard, "train", str(config), *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not what():
        if process.poll() is not None or time.monotonic() > end_s:
            process.kill()
            raise AssertionError(f"it did not happen; the command said: {process.communicate()[0]}")
        time.sleep(0.05)


def steps_done(run: Path) -> int:
    return len(runs.metrics(run)) if (run / "metrics.jsonl").is_file() else 0


def rank_processes(config: Path) -> list[int]:
    """The ranks of a config that are alive."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if b"fullshard.training.worker" in words and str(config).encode() in words and state != "Z":
                found.append(int(folder.name))
    return found


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    runs.write_texts(tmp_path / "texts")
    return runs.write_config(
        tmp_path, training={"steps": LONG}, checkpoints={"every": 5}, sample={"tokens": 0}
    )


def cut_short(run: Path) -> int:
    """The step of a run's newest checkpoint."""
    import fullshard as fs

    newest = fs.latest(run / "checkpoints")
    assert newest is not None
    return int(newest.name.removeprefix("step-"))


def _until(config: str, overrides: list[str], steps: int, number: int) -> int:
    """Train, and get a signal on every rank when so many steps are done."""
    from fullshard.training.loop import Run

    inner = Run._step

    def step(self: Run, at: int) -> None:
        inner(self, at)
        if at + 1 == steps:
            os.kill(os.getpid(), number)

    Run._step = step  # type: ignore[method-assign]
    try:
        return runs.train(config, overrides)
    finally:
        Run._step = inner  # type: ignore[method-assign]


def test_run_whose_ranks_are_killed_goes_on_with_identical_losses(tmp_path: Path) -> None:
    runs.write_texts(tmp_path / "texts")
    config = str(runs.write_config(tmp_path))
    ended = ranks.outcome(_until, 2, config, [], 5, signal.SIGKILL, timeout_s=LIMIT_S)
    # The rank that is killed a moment later may have heard of the other's end before its own.
    assert ended.errors.keys() == {0, 1}, ended
    assert all(error.type_name == "Exit" or error.is_a("FullshardError") for error in ended.errors.values())
    assert 4 <= steps_done(tmp_path / "run") <= 5
    assert cut_short(tmp_path / "run") in (2, 4)  # the last save went on in the background
    ranks.run(runs.train, 2, config, [], timeout_s=LIMIT_S)
    ranks.run(runs.train, 2, config, [f"output={tmp_path / 'whole'}"], timeout_s=LIMIT_S)
    assert [line["step"] for line in runs.metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "whole")
    assert runs.losses(tmp_path / "run", "validation") == runs.losses(tmp_path / "whole", "validation")


def test_run_whose_launcher_is_killed_leaves_no_rank_behind_and_goes_on(long_run: Path) -> None:
    run = long_run.parent / "run"
    python = [sys.executable, "-m", "fullshard"]  # its ranks are processes that it started itself
    with started(python, long_run, "--ranks", "2", "--quiet") as process:
        wait_for(lambda: steps_done(run) >= 8 and (run / "checkpoints" / "step-000005").exists(), process)
        assert len(rank_processes(long_run)) == 2
        process.kill()
        process.wait()
        end_s = time.monotonic() + LIMIT_S
        while rank_processes(long_run) and time.monotonic() < end_s:
            time.sleep(0.05)
        assert not rank_processes(long_run), "ranks outlived the launcher"
    saved, before = cut_short(run), runs.losses(run)
    ranks.run(_until, 2, str(long_run), [], saved + 4, signal.SIGTERM, timeout_s=LIMIT_S)
    assert [line["step"] for line in runs.metrics(run)] == list(range(1, saved + 5))
    again = runs.losses(run)
    assert again[:saved] == before[:saved]
    # Ranks of tests cut the model into other units, so what comes twice is equal to rounding only.
    both = min(len(again), len(before))
    assert again[:both] == pytest.approx(before[:both], rel=1e-5)


def test_signal_saves_and_says_how_to_go_on(long_run: Path) -> None:
    run = long_run.parent / "run"
    changes = ["--set", "checkpoints.every=100000"]
    with started([f"{warm.commands()}/fullshard"], long_run, "--ranks", "2", *changes) as process:
        wait_for(lambda: steps_done(run) >= 3, process)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    done = steps_done(run)
    assert cut_short(run) == done < LONG
    assert f"Stopped by SIGINT after step {done} of {LONG}" in output
    assert f"To resume: fullshard train {long_run} --ranks 2 --set checkpoints.every=100000" in output
    assert "Traceback" not in output
    assert (run / "report.html").is_file()


def test_failure_of_a_rank_is_one_message_and_a_report(tmp_path: Path) -> None:
    runs.write_texts(tmp_path / "texts")
    # Far too large: the weights are not finite after a step or two.
    config = runs.write_config(tmp_path, training={"learning_rate": 1e30, "clip": None, "warmup_steps": 0})
    command = [f"{warm.commands()}/fullshard", "train", str(config), "--ranks", "2", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2, done
    assert done.stderr.count("the loss of step") == 1, done.stderr
    assert "training.learning_rate" in done.stderr
    assert "Traceback" not in done.stderr
    status = json.loads((tmp_path / "run" / "summary.json").read_text())["status"]
    assert status.startswith("failed: the loss of step")
    assert "failed: the loss of step" in (tmp_path / "run" / "report.html").read_text()


def _failed_as(folder: Path, errors: dict[int, dict[str, object]], codes: dict[int, int]) -> RunFailed:
    """What the launcher makes of what ranks left behind."""
    private = folder / f"private-{len(list(folder.iterdir()))}"
    private.mkdir()
    for rank, error in errors.items():
        (private / f"error-{rank}.json").write_text(json.dumps(error))
    launch = _Launch(private, 2, RunFolder(folder / "run"))
    launch._problem = SimpleNamespace(  # type: ignore[assignment]
        failures={rank: SimpleNamespace(exitcode=code) for rank, code in codes.items()}
    )
    return launch._failure()


def test_error_that_is_shown_is_the_one_that_explains_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stalled = {"traceback": "", "stalled": True, "what": "rank 1 does not answer", "remedy": ""}
    ours = {"traceback": "", "stalled": False, "what": "a disk is full", "remedy": "Empty it."}
    crash = {"traceback": "Traceback (most recent call last):\nKeyError: 'x'\n", "stalled": False}
    assert _failed_as(tmp_path, {0: stalled, 1: ours}, {0: 1, 1: 1}).what == "a disk is full"
    assert (
        _failed_as(tmp_path, {0: stalled}, {0: 1, 1: -9}).what
        == "rank 1 was ended by SIGKILL without an error message"
    )
    assert _failed_as(tmp_path, {0: stalled}, {0: 1, 1: -15}).what == "rank 1 does not answer"
    assert "ended by SIGKILL" in _failed_as(tmp_path, {0: crash}, {0: 1, 1: -9}).what
    assert "ended by SIGSEGV" in _failed_as(tmp_path, {}, {1: -11}).what
    assert capsys.readouterr().err == ""
    assert _failed_as(tmp_path, {0: stalled, 1: crash}, {0: 1, 1: 1}).what == "rank 1 failed: KeyError: 'x'"
    assert capsys.readouterr().err.count("Traceback") == 1


SAYING = """\
from fullshard.training.display import Display
display = Display(3, quiet=False)
display.sample("caf\\u00e9 \\u65e5\\u672c")
for _ in range(20000):
    display.show("a line")
open({done!r}, "w").close()
"""


def test_reader_who_leaves_and_letters_that_a_terminal_lacks_do_not_end_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAYING.format(done=str(tmp_path / "done"))]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        head = [process.stdout.readline() for _ in range(2)]
        process.stdout.close()
        assert process.wait(LIMIT_S) == 0
    assert b"text from the trained model" in head[0]
    assert head[1] == b"caf? ??\n"
    assert (tmp_path / "done").is_file()


def test_command_prints_the_example_and_refuses_a_wrong_key_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fullshard.tools.cli.start import main

    assert main(["train", "--example"]) == 0
    config = tmp_path / "config.yaml"
    config.write_text(capsys.readouterr().out)
    assert config.read_text().strip() == EXAMPLE.strip()
    assert main(["train", str(config), "--set", "training.stepps=3"]) == 2
    printed = capsys.readouterr().err
    assert "unknown key 'training.stepps'" in printed
    assert "Did you mean 'steps'?" in printed
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_time_limit_stops_a_run_which_the_same_command_goes_on_with(tmp_path: Path) -> None:
    runs.write_texts(tmp_path / "texts")
    config = runs.write_config(tmp_path)
    ranks.run(runs.train, 2, str(config), ["training.time_limit_s=1e-6"], timeout_s=LIMIT_S)
    assert steps_done(tmp_path / "run") == 1
    ranks.run(runs.train, 2, str(config), [], timeout_s=LIMIT_S)
    assert steps_done(tmp_path / "run") == STEPS
