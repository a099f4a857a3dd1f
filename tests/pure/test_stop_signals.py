"""Signals that ask a process to stop: remembered, repeated, passed to others, and left alone by children."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fullshard import stop_signals
from fullshard.stop_signals import SIGNALS, WARNINGS, Interrupts, StopSignals, exit_code
from fullshard.tools.cli.launch_signals import PassedOn


@pytest.fixture(autouse=True)
def same_handlers_afterwards() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        assert signal.getsignal(number) == handler
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_remembered_and_ends_nothing(number: signal.Signals) -> None:
    signals = StopSignals()
    with signals.listening():
        os.kill(os.getpid(), number)
        assert signals.number == number
        assert exit_code(signals.number) == 128 + number


def test_first_of_several_signals_counts_and_none_ends_the_process() -> None:
    signals = StopSignals()
    with signals.listening():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert signals.number == signal.SIGUSR1


def test_second_interrupt_is_one_that_comes_later_and_raises_as_without_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    now_s = [100.0]
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now_s[0])
    signals = StopSignals()
    with signals.listening():
        os.kill(os.getpid(), signal.SIGINT)
        now_s[0] += 0.2  # the launcher's copy of the terminal's
        os.kill(os.getpid(), signal.SIGINT)
        now_s[0] += stop_signals.AGAIN_S + 1
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
    interrupts = Interrupts()
    assert not any(interrupts.is_second(number) for number in SIGNALS for _ in range(3))


def test_handler_of_the_script_is_called_as_well() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with StopSignals().listening():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


def test_thread_cannot_listen_and_does_not_fail() -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(StopSignals().listen()))
    thread.start()
    thread.join()
    assert answers == [False]


def _wait_for_signals(ready: Any) -> None:
    ready.set()
    time.sleep(60)


def test_forked_worker_ignores_warnings_and_is_ended_by_its_parent() -> None:
    forking = multiprocessing.get_context("fork")
    ready = forking.Event()
    with StopSignals().listening():
        worker = forking.Process(target=_wait_for_signals, args=(ready,))
        worker.start()
        assert ready.wait(60)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGUSR1)
        worker.terminate()
        worker.join(60)
    assert worker.exitcode == -signal.SIGTERM


def test_warnings_alone_may_be_expected_first() -> None:
    signals, before = StopSignals(), signal.getsignal(signal.SIGTERM)
    signals.listen(WARNINGS)
    assert signal.getsignal(signal.SIGTERM) == before
    os.kill(os.getpid(), signal.SIGUSR2)
    signals.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    signals.stop_listening()
    assert signals.number == signal.SIGUSR2


def test_exit_code_after_a_signal_is_that_of_the_signal_unless_a_rank_failed() -> None:
    passed_on = PassedOn(None)
    for codes, expected in (
        ({}, 138), ({1: 0, 2: 0}, 138), ({1: 138, 2: 0}, 138), ({1: 0, 2: 1}, 1), ({1: 138, 2: 75}, 75),
    ):  # fmt: skip
        passed_on._codes = codes
        assert passed_on.exit_code(signal.SIGUSR1) == expected
