"""What follows from how a round of an elastic run has ended. Pure.

A round is one start of all ranks. It ends when a rank fails, when a host is lost, or when the ranks leave
after a save because hosts have joined. `History` decides what is next: another round, one with fewer
ranks, or the end.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from fullshard.errors import OptionError

STRIKES = 3  # losses of one place in a row, without a new step, after which it is left empty
MAX_FRUITLESS = 5  # rounds in a row without a new step, by default

# Signals that come from outside: a rank that is killed has made no mistake, and is started again.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP}


@dataclass(frozen=True)
class Limits:
    """How many ranks a run may have, over all hosts."""

    least: int
    most: int

    @staticmethod
    def parse(text: str) -> Limits:
        """MIN:MAX, or one number for both."""
        first, colon, last = text.partition(":")
        words = (first, last if colon else first)
        if not all(word.isdecimal() and word.isascii() for word in words):
            raise OptionError(f"--elastic is {text!r}", "Give MIN:MAX, numbers of ranks: --elastic 2:8.")
        least, most = map(int, words)
        if not 1 <= least <= most:
            raise OptionError(
                f"--elastic is {text!r}", "MIN must be at least 1, and MAX not below it: --elastic 2:8."
            )
        return Limits(least, most)

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Ending:
    """How one rank of a round has ended."""

    rank: int
    host: str
    code: int  # negative: a signal
    error: str = ""  # the exception, where the rank wrote one
    at_s: float = 0.0  # by the clock of its host
    step: int | None = None  # the last that it began
    loaded: str = ""  # the checkpoint from which it went on
    place: int = 0  # of the ranks of its host
    left: bool = False  # it left after a save, because it was asked to
    stopped: bool = False  # its agent ended it
    with_host: bool = False  # its host is lost, and it is the first rank of it
    doing: str = ""  # the operation in which it was last

    @property
    def failed(self) -> bool:
        return not self.left and not self.stopped and self.code != 0

    @property
    def is_from_outside(self) -> bool:
        return self.code < 0 and -self.code in _FROM_OUTSIDE

    @property
    def how(self) -> str:
        if self.with_host:
            return "is lost, with its host"
        if self.code < 0:
            return f"was ended by {_signal_name(-self.code)}"
        return f"failed: {_shortened(self.error)}" if self.error else f"failed with exit code {self.code}"

    @property
    def signature(self) -> str:
        """The same for the same mistake on another rank, at another address, after another time."""
        text = self.error or f"exit code {self.code}"
        return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", text)

    @property
    def exit_code(self) -> int:
        return 128 - self.code if self.code < 0 else self.code or 1

    def __str__(self) -> str:
        at = "" if self.step is None else f" in step {self.step}"
        if self.code < 0 and self.doing:
            at += f", last in {self.doing}"
        return f"rank {self.rank} on {self.host} {self.how}{at}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shortened(text: str, most: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."


def cause(endings: Sequence[Ending]) -> Ending | None:
    """The failure behind the others: a rank that was killed, or the first that raised something of its own.

    A rank that has lost another one raises `Stalled`, or what its communication library raises, later.
    """
    failed = [ending for ending in endings if ending.failed]
    killed = [ending for ending in failed if ending.code < 0]
    own = [ending for ending in failed if "Stalled" not in ending.error.partition(":")[0]]
    return next(iter(sorted(killed or own or failed, key=lambda ending: ending.at_s)), None)


@dataclass(frozen=True)
class Verdict:
    """What is next: a further round, perhaps without one place of a host; or the end with an exit code."""

    exit_code: int | None = None
    text: str = ""
    without: tuple[str, int] | None = None  # host and place


@dataclass
class History:
    """The rounds so far, as far as they matter for the next one."""

    max_fruitless: int = MAX_FRUITLESS
    best: dict[str, int] = field(default_factory=dict)  # by the state that a round began from: newest step
    seen: dict[tuple[str, int | None, str], int] = field(default_factory=dict)
    strikes: dict[tuple[str, int], int] = field(default_factory=dict)
    fruitless: int = 0

    def after(self, number: int, failure: Ending, progressed: bool) -> Verdict:
        """The verdict on a round that ended with this failure."""
        self.fruitless = 0 if progressed else self.fruitless + 1
        if progressed:
            self.strikes.clear()
        if not failure.is_from_outside:
            base = failure.loaded if failure.step is None else ""
            key = (base, failure.step, failure.signature)
            if key in self.seen:
                where = "the script failed twice with the same error before its first step"
                if failure.step is not None:
                    where = f"step {failure.step} failed twice with the same error"
                return Verdict(
                    failure.exit_code,
                    f"{where} (rounds {self.seen[key]} and {number}), so it is not started again: {failure}",
                )
            self.seen[key] = number
        elif not failure.with_host:
            place = (failure.host, failure.place)
            self.strikes[place] = self.strikes.get(place, 0) + 1
            if self.strikes[place] >= STRIKES:
                self.strikes.clear()
                return Verdict(
                    text=f"place {failure.place} of {failure.host} was lost {STRIKES} times without a new "
                    "step, so it is left empty",
                    without=place,
                )
        if self.fruitless > self.max_fruitless:
            return Verdict(
                failure.exit_code,
                f"{self.fruitless} rounds in a row ended without a new step, so it is not started again; the "
                f"last: {failure}",
            )
        return Verdict(text=str(failure))


def shares(offers: Sequence[int], limits: Limits) -> list[int] | None:
    """How many ranks each host gets, the oldest first; None while there are fewer than MIN."""
    if sum(offers) < limits.least:
        return None
    left, given = limits.most, []
    for offer in offers:
        given.append(min(offer, left))
        left -= given[-1]
    return given


def offers_now(
    offers: Sequence[int], ready: Sequence[bool], limits: Limits, is_first: bool = False
) -> list[int]:
    """What each host has for a round that begins now.

    All ranks would wait for a host that still imports what its ranks need, so it comes later, unless there
    are fewer than MIN without it. When a run begins, all hosts import at the same time.
    """
    at_once = [offer if is_ready else 0 for offer, is_ready in zip(offers, ready, strict=True)]
    return list(offers) if is_first or sum(at_once) < limits.least else at_once
