"""The flight recorder: what a rank knows about the others when something stalls.

Peers are real processes, each a tiny interpreter driven line by line; they load the recorder alone, without
the package and so without torch, and start in well under a second.
"""

from __future__ import annotations

import ast
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fullshard.comm import recorder_files as module
from fullshard.comm.flight_recorder import RING, SETTLED_S, FlightRecorder, Place

PEER = """
import sys, time, types
package = sys.modules["fullshard"] = types.ModuleType("fullshard")
package.__path__ = [sys.argv[1]]  # not by its __init__, which imports torch: that takes seconds
from fullshard.comm.flight_recorder import FlightRecorder
r = FlightRecorder(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
print(None, flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except SyntaxError:
        exec(line)
        print(None, flush=True)
"""
PACKAGE = str(Path(module.__file__).parents[1])


class Peer:
    """A rank in a process of its own."""

    def __init__(self, directory: str, rank: int, ranks: int) -> None:
        command = [sys.executable, "-c", PEER, PACKAGE, directory, str(rank), str(ranks)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.answer()

    def send(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")

    def answer(self, limit_s: float = 120.0) -> Any:
        assert self.process.stdout  # the limit ends a hang; a busy machine has held a plain start for 10 s
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        assert ready, "the peer did not answer in time"
        return ast.literal_eval(self.process.stdout.readline())

    def do(self, *lines: str) -> Any:
        result = None
        for line in lines:
            self.send(line)
            result = self.answer()
        return result

    def leave(self) -> None:
        """End in good order: the interpreter reaches its exit handlers."""
        assert self.process.stdin
        self.process.stdin.close()
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


Start = Callable[[int, int], Peer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    peers: list[Peer] = []

    def start_one(rank: int, ranks: int) -> Peer:
        peers.append(Peer(str(tmp_path), rank, ranks))
        return peers[-1]

    yield start_one
    for peer in peers:
        peer.kill()
        for stream in (peer.process.stdin, peer.process.stdout):
            if stream:
                stream.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[int, int], FlightRecorder]]:
    made: list[FlightRecorder] = []

    def make_one(rank: int, ranks: int) -> FlightRecorder:
        made.append(FlightRecorder(str(tmp_path), rank, ranks))
        return made[-1]

    yield make_one
    for each in made:
        each.close()


Make = Callable[[int, int], FlightRecorder]


def place(records: FlightRecorder, rank: int) -> Place:
    found = records.places()[rank]
    assert found is not None
    return found


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.record"


def wait_in(records: FlightRecorder, channel: str, phase: str, unit: str) -> int:
    number = records.begin(channel, phase, unit, 1)
    records.wait_begin(channel, number)
    return number


def test_a_waiting_peer_is_told_with_unit_phase_step_and_number(make: Make, start: Start) -> None:
    mine, peer = make(0, 2), start(1, 2)
    assert str(place(mine, 1)).endswith("it had not begun any operation")
    peer.do("r.begin('gather', 'forward', 'blocks.2', 12)", "r.begin('gather', 'forward', 'blocks.3', 12)")
    assert not place(mine, 1).waiting, "issued is not blocked"
    peer.do("r.wait_begin('gather', 2)")
    time.sleep(0.2)
    there = place(mine, 1)
    assert there == Place(1, 2, "gather", "forward", "blocks.3", 12, True, there.since_s, True, pid=there.pid)
    assert there.since_s >= 0.2
    assert str(there).startswith(
        "rank 1: waiting in gather of unit 'blocks.3' (forward, step 12, operation 2) for "
    )
    peer.do("r.wait_end()", "r.end('gather', 2)")
    assert re.match(
        r"rank 1: outside any operation for [\d.]+ s; last was gather of unit", str(place(mine, 1))
    )


def test_a_killed_peer_is_reported_gone_with_its_last_place(make: Make, start: Start) -> None:
    mine, peer = make(0, 2), start(1, 2)
    peer.do("r.begin('gather', 'forward', '', 7)", "r.wait_begin('gather', 1)")
    number = wait_in(mine, "gather", "forward", "")
    assert mine.verdict("gather", number) is None
    os.kill(peer.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60.0
    while (reason := mine.verdict("gather", number)) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    # The process is a zombie here: its parent, this test, has not collected it.
    assert reason == (
        "rank 1: process has exited; last was gather of the root unit (forward, step 7, operation 1)"
    )
    assert not place(mine, 1).alive


def test_a_stopped_peer_is_alive_and_its_place_is_known(make: Make, start: Start) -> None:
    mine, peer = make(0, 2), start(1, 2)
    peer.do("r.begin('reduce', 'backward', 'a', 3)")
    os.kill(peer.process.pid, signal.SIGSTOP)
    there = place(mine, 1)
    assert (there.alive, there.unit, there.waiting) == (True, "a", False)


def test_another_process_with_the_same_pid_does_not_pass_for_the_peer(
    make: Make, start: Start, tmp_path: Path
) -> None:
    mine, _peer = make(0, 2), start(1, 2)
    assert place(mine, 1).alive
    with open(file_of(tmp_path, 1), "r+b") as file:
        file.seek(24)
        began = struct.unpack("=q", file.read(8))[0]
        file.seek(24)
        file.write(struct.pack("=q", began - 1))
    assert not place(mine, 1).alive


def test_different_operations_under_one_number_are_noticed_at_once_and_by_both(
    make: Make, start: Start
) -> None:
    mine, peer = make(0, 3), start(1, 3)
    start(2, 3).do("r.begin('gather', 'forward', 'blocks.0', 1)")
    peer.do("r.begin('control', 'save', '', 1)", "r.begin('gather', 'forward', 'blocks.2', 1)")
    number = mine.begin("gather", "forward", "blocks.0", 1)
    (other,) = mine.disagreement("gather")
    assert (other.rank, other.number, other.unit) == (1, 1, "blocks.2")
    reason = mine.verdict("gather", number)
    assert reason is not None
    assert "rank 1 began gather of unit 'blocks.2'" in reason
    assert "rank 0 began gather of unit 'blocks.0'" in reason
    assert peer.do("[each.rank for each in r.disagreement('gather')]") == [0, 2]
    assert mine.disagreement("control") == [], "this rank has begun nothing there"


def test_a_difference_is_noticed_though_a_peer_was_late_for_the_newest_operation(
    make: Make, start: Start
) -> None:
    mine, peer = make(0, 2), start(1, 2)
    for unit in ("a", "b", "c"):
        mine.begin("gather", "forward", unit, 1)
        assert mine.disagreement("gather") == []
    peer.do("r.begin('gather', 'forward', 'a', 1)", "r.begin('gather', 'forward', 'x', 1)")
    assert [(other.number, other.unit) for other in mine.disagreement("gather")] == [(2, "x")]
    assert mine.verdict("gather", 1) is None, "operation 1 is the same on both and may still end"


def test_prefetch_in_one_order_is_no_disagreement_however_far_apart(make: Make, start: Start) -> None:
    mine, peer = make(0, 2), start(1, 2)
    for ahead in range(5):
        mine.begin("gather", "forward", f"blocks.{ahead}", 1)
        assert mine.disagreement("gather") == []
    # The peer meets its labels in another order first: its own label table must not matter.
    peer.do("r.begin('reduce', 'backward', 'blocks.4', 1)")
    for behind in range(5):
        peer.do(f"r.begin('gather', 'forward', 'blocks.{behind}', 1)")
        assert mine.disagreement("gather") == []
        assert peer.do("r.disagreement('gather')") == []
    mine.wait_begin("gather", 2)
    assert mine.verdict("gather", 2) is None


def test_the_ring_may_wrap_around(make: Make, start: Start) -> None:
    mine, peer = make(0, 2), start(1, 2)
    total = 3 * RING + 5
    peer.do(f"[r.begin('gather', 'forward', str(i % 7), i) for i in range({total})]")
    for i in range(total):
        mine.begin("gather", "forward", str(i % 7), i)
        assert mine.disagreement("gather") == []
    mine.begin("gather", "forward", "right", 1)
    peer.do("r.begin('gather', 'forward', 'wrong', 1)")
    assert [other.number for other in mine.disagreement("gather")] == [total + 1]
    mine.end("gather", 1)  # long overwritten: must not mark the operation that took its slot
    mine.places()
    entry = mine._peers[0].entry("gather", 3 * RING + 1)
    assert entry is not None
    assert (entry.number, entry.ended) == (3 * RING + 1, False)
    mine.wait_begin("gather", total)
    assert (place(mine, 0).number, place(mine, 0).step) == (total, total - 1)


def test_a_definite_mutual_wait_is_found_after_two_seconds_and_not_before(make: Make, start: Start) -> None:
    """A save under `if rank == 0`: it waits in control, the other in the next gather."""
    mine, peer = make(0, 2), start(1, 2)
    peer.do("r.begin('gather', 'forward', 'blocks.0', 8)")
    began = time.monotonic()
    peer.do("r.wait_begin('gather', 1)")
    number = wait_in(mine, "control", "save", "")
    settled = time.monotonic()
    while (reason := mine.verdict("control", number)) is None:
        assert time.monotonic() < settled + SETTLED_S + 60.0
        time.sleep(0.02)
    assert time.monotonic() - began >= SETTLED_S
    assert reason == (
        "rank 0 waits in control of the root unit (save, step 1, operation 1), which rank 1 has not begun; "
        "rank 1 waits in gather of unit 'blocks.0' (forward, step 8, operation 1), which rank 0 has not begun"
        ": none of them can continue"
    )
    assert peer.do("r.verdict('gather', 1)") is not None


def test_a_circle_of_three_is_found_and_waiting_on_one_slow_rank_is_not(make: Make, start: Start) -> None:
    mine, one, two = make(0, 4), start(1, 4), start(2, 4)
    mine.declare("ring", [0, 1])
    mine.declare("back", [2, 0])
    one.do("r.declare('forth', [1, 2])", "r.begin('forth', 'x', '', 1)", "r.wait_begin('forth', 1)")
    two.do("r.declare('forth', [1, 2])", "r.declare('back', [2, 0])", "r.begin('back', 'x', '', 1)")
    number = wait_in(mine, "ring", "x", "")
    time.sleep(SETTLED_S + 0.1)
    # Rank 2 computes: 0 waits for 1, 1 waits for 2, and 2 may come.
    assert mine.verdict("ring", number) is None
    two.do("r.wait_begin('back', 1)")
    time.sleep(SETTLED_S + 0.1)
    assert (mine.verdict("ring", number) or "").count("has not begun") == 3


def test_groups_that_share_a_channel_name_are_kept_apart(make: Make, start: Start) -> None:
    """Hybrid: rank 1 waits in an outer group without rank 0, and rank 0 for rank 1. Rank 3 is only slow."""
    mine, peer, other = make(0, 4), start(1, 4), start(3, 4)
    mine.declare("inner", [0, 1])
    mine.declare("outer", [0, 2])
    peer.do("r.declare('inner', [0, 1])", "r.declare('outer', [1, 3])")
    peer.do("r.begin('outer', 'backward', 'a', 1)", "r.wait_begin('outer', 1)")
    other.do("r.declare('outer', [1, 3])", "r.declare('inner', [2, 3])", "r.begin('inner', 'x', 'else', 1)")
    number = wait_in(mine, "inner", "forward", "a")
    time.sleep(SETTLED_S + 0.1)
    assert mine.verdict("inner", number) is None
    assert mine.disagreement("inner") == []
    other.kill()
    assert mine.verdict("inner", number) is None, "rank 3 has no part in it"
    assert "rank 3: process has exited" in peer.do("r.verdict('outer', 1)")


def test_a_slow_healthy_peer_gives_no_verdict(make: Make, start: Start) -> None:
    mine, peer = make(0, 2), start(1, 2)
    peer.do("r.begin('gather', 'forward', 'a', 1)", "r.wait_begin('gather', 1)", "r.wait_end()")
    mine.begin("gather", "forward", "a", 1)
    peer.send(f"time.sleep({SETTLED_S + 0.5})")  # it computes, outside any operation
    number = wait_in(mine, "gather", "forward", "b")
    end = time.monotonic() + SETTLED_S + 0.4
    while time.monotonic() < end:
        assert mine.verdict("gather", number) is None
        time.sleep(0.05)
    assert str(place(mine, 1)).startswith("rank 1: outside any operation for ")
    peer.answer()


def test_a_peer_that_waits_for_a_third_rank_gives_no_verdict(make: Make, start: Start) -> None:
    mine, peer = make(0, 3), start(1, 3)
    start(2, 3)
    peer.do("r.begin('gather', 'forward', 'a', 1)", "r.wait_begin('gather', 1)")
    mine.begin("gather", "forward", "a", 1)
    number = wait_in(mine, "gather", "forward", "b")  # prefetched further than the peer
    time.sleep(SETTLED_S + 0.1)
    assert mine.verdict("gather", number) is None
    assert peer.do("r.verdict('gather', 1)") is None


def test_a_peer_that_leaves_is_missed_only_by_operations_it_had_no_part_in(
    make: Make, start: Start, tmp_path: Path
) -> None:
    mine, peer = make(0, 2), start(1, 2)
    number = wait_in(mine, "gather", "forward", "a")
    peer.do("r.begin('gather', 'forward', 'a', 1)", "r.end('gather', 1)")
    mine.wait_end()  # opens the peers' files
    mine.wait_begin("gather", number)
    peer.leave()
    assert not file_of(tmp_path, 1).exists(), "a normal exit removes the file"
    assert mine.verdict("gather", number) is None, "the peer had done its part"
    mine.wait_end()
    number = wait_in(mine, "gather", "full", "a")
    time.sleep(SETTLED_S)
    assert "rank 1: process has exited" in (mine.verdict("gather", number) or "")


def test_a_forked_child_does_not_remove_its_parents_record(make: Make, tmp_path: Path) -> None:
    mine = make(0, 1)
    child = os.fork()
    if child == 0:
        mine.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert file_of(tmp_path, 0).exists()
    mine.begin("gather", "forward", "a", 1)
    assert not place(mine, 0).left
    mine.close()
    mine.close()
    assert list(tmp_path.iterdir()) == []
    assert mine.places() == [None]


def test_garbage_files_are_unknown_and_raise_nothing(make: Make, start: Start, tmp_path: Path) -> None:
    mine, peer = make(0, 6), start(5, 6)
    whole = file_of(tmp_path, 0).read_bytes()
    file_of(tmp_path, 1).write_bytes(b"")
    file_of(tmp_path, 2).write_bytes(os.urandom(len(whole)))
    file_of(tmp_path, 3).write_bytes(whole)  # says rank 0 of itself
    (tmp_path / "rank-4.record").mkdir()
    number = wait_in(mine, "gather", "forward", "a")
    peer.do("r.begin('gather', 'forward', 'b', 1)")
    assert mine.places()[1:5] == [None] * 4
    assert [other.rank for other in mine.disagreement("gather")] == [5]
    for size in (20_000, 3000, 1400, 100, 0):  # cut short while it is open
        os.truncate(file_of(tmp_path, 5), size)
        mine.places(), mine.disagreement("gather"), mine.verdict("gather", number)
    assert mine.places()[5] is None


def test_noise_after_a_right_header_raises_nothing(make: Make, tmp_path: Path) -> None:
    mine = make(0, 2)
    number = wait_in(mine, "gather", "forward", "a")
    header = bytearray(file_of(tmp_path, 0).read_bytes())
    header[32:40] = struct.pack("=q", 1)  # the rank
    for seed in range(30):
        noise = bytearray(os.urandom(len(header)))
        noise[:64] = header[:64]
        if seed % 2:  # keep the channels' names too, so that the rings are read
            noise[: module.CHANNELS_OFFSET] = header[: module.CHANNELS_OFFSET]
        file_of(tmp_path, 1).write_bytes(noise)
        mine.places(), mine.disagreement("gather"), mine.verdict("gather", number)


def test_a_reader_never_sees_a_half_written_event(make: Make, start: Start, tmp_path: Path) -> None:
    mine, peer = make(0, 2), start(1, 2)
    over = tmp_path / "over"
    peer.do("import os", "n = 0")
    # Unit, step and number always belong together; the writer does nothing but write, until it is over.
    peer.send(
        f"while n % 64 or not os.path.exists({str(over)!r}): "
        "n = r.begin('gather', 'f', str((n + 1) % 50), n + 1); "
        "r.wait_begin('gather', n); r.wait_end(); r.end('gather', n)"
    )
    seen: set[int] = set()
    begun = time.monotonic()  # a busy machine shows few of them in a second
    while time.monotonic() - begun < (1.0 if len(seen) > 50 else 120.0):
        there = place(mine, 1)
        if there.number:
            assert (there.unit, there.step) == (str(there.number % 50), there.number)
            seen.add(there.number)
    assert len(seen) > 50
    over.touch()
    peer.answer()
    assert peer.do("n") >= max(seen)


def test_a_writer_killed_half_way_leaves_its_previous_place_whole(make: Make, tmp_path: Path) -> None:
    mine, other = make(0, 2), make(1, 2)
    other.begin("gather", "forward", "a", 1)
    with open(file_of(tmp_path, 1), "r+b", buffering=0) as file:
        file.seek(module.SEQUENCE_OFFSET + 8 + 2 * module.EVENT.size)
        file.write(struct.pack("=qqq", 2, 1, 99))  # the start of event 2; event 1 is the last published
        assert (place(mine, 1).number, place(mine, 1).unit) == (1, "a")
        file.seek(module.SEQUENCE_OFFSET)
        file.write(struct.pack("=q", 2))  # published though torn, as weakly ordered memory may show it
        assert mine.places()[1] is None


def test_a_stale_file_of_an_earlier_run_is_not_taken_for_a_peer(
    make: Make, start: Start, tmp_path: Path
) -> None:
    start(1, 2).kill()
    assert file_of(tmp_path, 1).exists(), "a killed process leaves its file"
    mine = make(0, 2)
    number = wait_in(mine, "gather", "forward", "a")
    assert mine.places()[1] is None
    assert mine.verdict("gather", number) is None
    start(1, 2).do("r.begin('gather', 'forward', 'a', 9)")
    assert place(mine, 1).step == 9, "the new run's file is found as soon as it exists"


def test_more_labels_than_the_table_holds_are_still_compared(make: Make, start: Start) -> None:
    mine, peer = make(0, 2), start(1, 2)
    peer.do("[r.begin('gather', 'forward', 'u' * 1000 + str(i), 1) for i in range(300)]")
    for i in range(300):
        mine.begin("gather", "forward", "u" * 1000 + str(i), 1)
    assert mine.disagreement("gather") == []
    assert (place(mine, 1).channel, place(mine, 1).unit) == ("gather", "?")
    mine.begin("gather", "forward", "v", 1)
    peer.do("r.begin('gather', 'forward', 'w', 1)")
    assert [other.number for other in mine.disagreement("gather")] == [301]


def test_misuse_is_named(make: Make) -> None:
    mine = make(0, 2)
    mine.begin("gather", "forward", "a", 1)
    with pytest.raises(ValueError, match="has not begun"):
        mine.end("gather", 2)
    with pytest.raises(ValueError, match="already used"):
        mine.declare("gather", [0])
    for i in range(1, module.MAX_CHANNELS):
        mine.begin(f"channel {i}", "forward", "a", 1)
    with pytest.raises(ValueError, match="cannot add channel 'one more'"):
        mine.begin("one more", "forward", "a", 1)
    with pytest.raises(ValueError, match="not one of 2 ranks"):
        make(2, 2)
