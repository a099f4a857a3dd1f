"""A device that stops is noticed by the oldest event that has not passed; one that is only slow is not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from fullshard.comm import completions, monitor
from fullshard.comm.completions import Completions
from fullshard.comm.flight_recorder import FlightRecorder
from fullshard.comm.host_watch import HostWatch


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(completions.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(completions.time, "monotonic_ns", lambda: int(self.now * 1e9))


class Device:
    """Events pass in the order in which they were recorded; none is ever waited for."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.passed = 0

    def event(self) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                self.place = len(device.recorded)
                device.recorded.append(self)

            def query(self) -> bool:
                return self.place < device.passed

        return Event()


def test_the_oldest_operation_that_the_device_does_not_come_to_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, device = Clock(monkeypatch), Device()
    watched = Completions(device.event)
    for number in range(1, 9):
        clock.now += 0.01
        watched.note("gather", number)
    assert watched.oldest() == ("gather", 1, 0.0)
    clock.now += 3.0
    device.passed = 3
    assert watched.oldest() == ("gather", 4, 0.0)  # far behind the host, and moving
    clock.now += 5.0
    found = watched.oldest()
    assert found is not None
    assert found[:2] == ("gather", 4)
    assert found.seconds == pytest.approx(5.0)
    device.passed = 8
    assert watched.oldest() is None
    clock.now += 0.01
    watched.note("gather", 9)
    assert len({id(event) for event in device.recorded}) < len(device.recorded)  # events are used again


def test_there_are_few_events_and_a_bounded_number_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, device = Clock(monkeypatch), Device()
    watched = Completions(device.event)
    for number in range(1000):
        watched.note("gather", number)  # at the same time
    assert len(device.recorded) == 1
    for number in range(10_000):
        clock.now += 0.01
        watched.note("gather", number)
    assert len(device.recorded) == completions._MOST
    assert watched.oldest() == ("gather", 0, 0.0)  # the first is not pushed out
    captured = Completions(device.event, lambda: False)
    captured.note("gather", 1)
    assert captured.oldest() is None


def test_a_warning_names_the_operation_and_who_has_not_begun_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, device = Clock(monkeypatch), Device()
    ranks = [FlightRecorder(str(tmp_path), rank, 2) for rank in range(2)]
    try:
        watched = Completions(device.event)
        number = ranks[0].begin("gather", "forward", "blocks.3", 12)
        ranks[0].end("gather", number)
        watched.note("gather", number)
        state = monitor._Watch(HostWatch(ranks[0]), watched)
        with caplog.at_level(logging.WARNING, "fullshard"):
            monitor._look_at_device(ranks[0], state)
            assert not caplog.messages
            clock.now += 4.5
            monitor._look_at_device(ranks[0], state)
        assert len(caplog.messages) == 1
        text = caplog.messages[0]
        assert (
            "the device has not come to gather of unit 'blocks.3' (forward, step 12, operation 1) for 4 s"
            in text
        )
        assert "late: rank 1" in text
        device.passed = 1
        monitor._look_at_device(ranks[0], state)
        assert ranks[0].stuck_on_device is None
    finally:
        for rank in ranks:
            rank.close()
