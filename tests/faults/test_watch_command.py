"""`fullshard watch` on the records of ranks that move, wait and are stopped. The ranks load no torch."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from test_flight_recorder import Peer, Start, start

from fullshard.comm import host_summary
from fullshard.comm.host_summary import Row, Summary
from fullshard.comm.recorder_files import HEADER, SHARED, WORD, Place
from fullshard.tools.cli import app

__all__ = ["start"]


def watch(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert app.run(["watch", *words]) == 0
    return capsys.readouterr().out


def stuck_run(start: Start) -> tuple[Peer, Peer]:
    """Rank 0 waits in an operation that rank 1, which is stopped, has not begun."""
    first, second = start(0, 3), start(1, 3)
    for peer in (first, second):
        peer.do(
            "n = r.begin('gather', 'forward', 'blocks.0', 5)", "r.wait_begin('gather', n)", "r.wait_end()"
        )
        peer.do("r.end('gather', n)")
    first.do("n = r.begin('gather', 'forward', 'blocks.1', 5)", "r.wait_begin('gather', n)")
    second.process.send_signal(signal.SIGSTOP)
    os.waitpid(second.process.pid, os.WUNTRACED)  # until it is stopped
    return first, second


def test_ranks_are_shown_with_what_they_do_and_ranks_of_other_hosts_as_far_as_they_are_known(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = stuck_run(start)
    table = watch(capsys, str(tmp_path), "--once")
    assert "gather 2" in table
    assert "blocks.1" in table
    assert "stopped" in table
    far = Row(Place(2, 7, "reduce", "backward", "head", 4, True, 1.0, True, pid=99), "S", 0.0, {}, None)
    text = host_summary.verified(host_summary.pack(Summary("far", 1.0, [far]), b"k", "p"), b"k", "p")
    assert text is not None
    known = {"hosts": [[text.decode(), 0.5, time.monotonic()]]}
    (tmp_path / SHARED).write_bytes(bytes(HEADER.size + WORD.size) + json.dumps(known).encode())
    found = json.loads(watch(capsys, str(tmp_path), "--json"))
    by_rank = {line["rank"]: line for line in found["ranks"]}
    assert [by_rank[rank]["state"] for rank in range(3)] == ["waiting", "stopped", "waiting"]
    assert by_rank[0]["unit"] == "blocks.1"
    assert (by_rank[1]["pid"], by_rank[1]["late"]) == (second.process.pid, True)
    assert (by_rank[2]["host"], by_rank[2]["unit"], by_rank[2]["step"]) == ("far", "head", 4)
    second.process.send_signal(signal.SIGCONT)
    assert first.do("r.blocked_in") == ("gather", 2)  # nothing was changed


def test_a_dump_is_one_timeline_of_all_ranks(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stuck_run(start)
    file = tmp_path / "hang.json"
    assert "perfetto" in watch(capsys, str(tmp_path), "--dump", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert any("rank 0" in name and "waiting in gather of unit 'blocks.1'" in name for name in names)
    spans = [event for event in events if event["ph"] == "X" and event["tid"] > 1]
    by_rank = {rank: [e["name"] for e in spans if e["pid"] == rank] for rank in (0, 1)}
    assert by_rank[0] == ["blocks.0 (forward)", "blocks.1 (forward), not complete"]
    assert by_rank[1] == ["blocks.0 (forward)"]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_what_is_no_run_is_an_error_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["watch", str(tmp_path / "nowhere")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert app.run(["watch", str(tmp_path)]) == 2
    assert "holds no records" in capsys.readouterr().err
