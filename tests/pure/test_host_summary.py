"""Summaries of hosts: small, signed, read as data only; and a rank of another host as read from one."""

from __future__ import annotations

import time
import zlib
from dataclasses import replace

import pytest

from fullshard.comm import host_summary
from fullshard.comm.host_summary import Channel, RemotePeer, Row, Summary, silent_hosts
from fullshard.comm.recorder_files import RING, Note, Place

KEY, PURPOSE = b"k" * 32, "watch/abc/1"


def note(at: str) -> Note:
    now_ns = time.monotonic_ns()
    return Note(at, "barrier", 2**16 - 1, (("abc", "gather", 7),), now_ns - 5 * 10**9, now_ns)


def row(rank: int, waiting: bool = True, noted: bool = False) -> Row:
    unit = f"model.layers.{rank % 3}.mlp"
    place = Place(rank, 1000 + rank, "gather", "backward", unit, 417, waiting, 2.5, True, pid=4000 + rank)
    hashes = b"".join((1000 + rank - i).to_bytes(8, "little") for i in (3, 2, 1, 0))
    channels = {
        name: Channel(2**16 - 1, 1000 + rank, 0b1110, hashes)
        for name in ("control", "replica", "gather", "reduce", "gather across", "reduce across")
    }
    at = f"/home/someone/projects/run/train.py:{100 + rank} in main: loss = model(batch).loss"
    return Row(place, "S", 12.5, channels, note(at) if noted else None)


def host(rows: list[Row], clock_s: float = 10.0) -> Summary:
    return Summary("node-17.cluster.example.org", clock_s, rows)


def test_eight_ranks_fit_into_a_kilobyte_with_as_many_notes_as_there_is_room_for() -> None:
    moving = host_summary.pack(host([row(rank) for rank in range(8)]), KEY, PURPOSE)
    assert len(moving) < 1000
    rows = [row(rank, waiting=rank != 5, noted=True) for rank in range(8)]
    stuck = host_summary.pack(host(rows), KEY, PURPOSE)
    assert len(stuck) <= 1000
    found = host_summary.unpack(stuck, KEY, PURPOSE)
    assert found is not None
    assert found.rows[5].note is not None  # the rank that is in no operation comes first
    assert "train.py:105" in found.rows[5].note.at
    print(len(moving), len(stuck))


def test_a_summary_comes_back_as_it_was() -> None:
    sent = host([row(3), row(4, waiting=False)])
    found = host_summary.unpack(host_summary.pack(sent, KEY, PURPOSE), KEY, PURPOSE)
    assert found is not None
    assert (found.host, found.clock_s) == (sent.host, sent.clock_s)
    for theirs, mine in zip(found.rows, sent.rows, strict=True):
        assert theirs.place == replace(mine.place, host=sent.host)
        assert theirs.channels == mine.channels


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"nonsense",
        bytes(16) + zlib.compress(b'{"v":1,"host":"x","clock":1,"texts":[],"rows":[]}'),
        host_summary.pack(host([row(0)]), b"another key", PURPOSE),
        host_summary.pack(host([row(0)]), KEY, "watch/abc/2"),
        host_summary.sign(b"[" * 100_000, KEY, PURPOSE),
        host_summary.sign(b'{"v":1,"host":"x","clock":1,"texts":[],"rows":[[1]]}', KEY, PURPOSE),
        host_summary.sign(b" " * 2**22, KEY, PURPOSE),
    ],
    ids=["empty", "garbage", "unsigned", "other key", "other place", "deep", "short row", "large"],
)
def test_what_is_not_signed_or_is_no_summary_is_not_read(foreign: bytes) -> None:
    assert host_summary.unpack(foreign, KEY, PURPOSE) is None


def peer(found: Row, age_s: float = 0.0) -> RemotePeer:
    return RemotePeer(host([found]), found, age_s, time.monotonic())


def test_operations_of_a_remote_rank_are_known_as_far_as_its_summary_goes() -> None:
    remote = peer(row(0))
    not_begun = remote.entry("gather", 1001)
    assert not_begun is not None
    assert not_begun.number < 1001
    newest, before, old = (remote.entry("gather", number) for number in (1000, 999, 900))
    assert newest is not None
    assert before is not None
    assert old is not None
    assert (newest.number, newest.ended) == (1000, False)
    assert (before.number, before.ended) == (999, True)
    assert newest.label[16:] == (1000).to_bytes(8, "little")
    assert old.number == 900 + RING
    assert remote.entry("never used", 1) == (0, b"", 0, False)
    assert remote.has_member("gather", 15)
    assert not remote.has_member("gather", 16)


def test_hosts_that_are_not_heard_of_are_named_with_their_ranks_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_summary.time, "monotonic", lambda: 100.0)
    gone = [peer(row(rank), age_s=7.0) for rank in (2, 3)]
    left = peer(Row(replace(row(4).place, left=True), "", 0.0, {}, None), age_s=60.0)
    texts = silent_hosts([peer(row(0)), *gone, left])
    assert len(texts) == 1
    assert "ranks 2, 3 on node-17.cluster.example.org: this host was not heard of for 7 s" in texts[0]
    assert "waiting in gather of unit 'model.layers.2.mlp'" in texts[0]
    assert not gone[0].is_fresh
