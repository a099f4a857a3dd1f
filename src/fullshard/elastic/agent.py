"""The agent of one host in an elastic run: it starts and stops the ranks here, as rounds are formed.

One of the agents forms the rounds (`coordinator`): the one at the run's endpoint. If that host is lost, the
oldest of the others takes over. All agents know it from the members of the last round, so no vote is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fullshard.elastic.coordinator import BEAT_S, LOST_S, Coordinator, Times
from fullshard.elastic.links import Link, Message, Refused, connect, key_of, listen
from fullshard.elastic.local_ranks import LocalRanks, Nursery, Round
from fullshard.elastic.rounds import Ending, History, Limits
from fullshard.environment import host_name
from fullshard.stop_signals import Interrupts

_TICK_S = 0.1
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # of schedulers, before a time limit
_PROGRESS_S = 0.5
_SUCCESSION_S = 20.0  # in which another agent takes over from one that is lost


@dataclass(frozen=True)
class Endpoint:
    """Where the agents of a run meet; without an address, on this host alone."""

    address: str = ""
    port: int = 0
    is_here: bool | None = None  # None: whoever can listen there


@dataclass(frozen=True)
class Request:
    """What the user asked of this agent."""

    run: str
    limits: Limits
    offer: int  # ranks of this host
    endpoint: Endpoint
    times: Times
    max_fruitless: int
    shutdown_s: float | None = None  # from a signal to SIGKILL; None: however long a save takes
    record: Path | None = None


class Agent:
    """Runs until the run is over; `run` returns the exit code."""

    def __init__(
        self, request: Request, nursery: Nursery, ranks: LocalRanks, open_store: Any, say: Any
    ) -> None:
        self._request, self._nursery, self._ranks = request, nursery, ranks
        self._open_store, self._say = open_store, say  # say: prints a line for the user
        self._key, self._name = key_of(request.run), f"{host_name()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._coordinator: Coordinator | None = None
        self._forms = False  # whether this agent forms the rounds in which it is
        self._link: Link | None = None
        self._selector = selectors.DefaultSelector()
        self._spare: Any = None  # the socket on which this agent would form rounds
        self._members: list[tuple[str, int, str]] = []  # of the last round, the oldest first
        self._number = 0
        self._sent_end = self._sent_failure = True
        self._beat = self._looked = 0.0
        self._first_step: int | None = None
        self._trained = False
        self._signals: list[int] = []
        self._warned: int | None = None
        self._interrupts = Interrupts()
        self._leaving: int | None = None  # the signal that ended the part of this host
        self._code: int | None = None
        self._watched_nursery = -1
        self._waited_since = time.monotonic()

    def run(self) -> int:
        with self._handling_signals():
            try:
                self._nursery.start()
                self._meet()
                while self._code is None:
                    self._turn()
                return self._code
            finally:
                self._close()

    def _close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._nursery.close()
        self._selector.close()
        if self._coordinator is not None:
            self._coordinator.close()
        elif self._spare is not None:
            self._spare.close()

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {n: signal.signal(n, self._note_signal) for n in (*_ENDS, *_WARNINGS)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, _: Any) -> None:
        self._signals.append(number)

    # ---- meeting the others

    def _meet(self) -> None:
        """Find who forms rounds, or do it."""
        target = self._request.endpoint
        if not target.address:
            self._coordinate(listen("127.0.0.1", 0))
            self._connect("127.0.0.1", self._coordinator_port)
            return
        deadline = time.monotonic() + self._request.times.join_s
        while self._leaving is None and not self._signals:
            if target.is_here is not True and self._try_connect(target.address, target.port):
                return
            if target.is_here is not False and self._try_listen(target):
                self._connect(self._reachable(target.address), target.port)
                return
            if time.monotonic() > deadline:
                waited = f"nobody answered at {target.address}:{target.port} for"
                self._over(1, f"{waited} {self._request.times.join_s:g} s. Start the agent of that host")
                return
            time.sleep(0.3)

    def _reachable(self, address: str) -> str:
        return "127.0.0.1" if self._request.endpoint.is_here else address

    @property
    def _coordinator_port(self) -> int:
        assert self._coordinator is not None
        return self._coordinator.port

    def _try_listen(self, target: Endpoint) -> bool:
        address = "0.0.0.0" if target.is_here else target.address
        try:
            listener = listen(address, target.port)
        except OSError:
            return False
        self._coordinate(listener)
        return True

    def _coordinate(self, listener: Any, number: int = 0, because: str = "") -> None:
        request = self._request
        history = History(request.max_fruitless)
        self._forms = True
        self._coordinator = Coordinator(
            listener, self._key, request.limits, request.times, history, self._open_store
        )
        self._coordinator.name = self._name
        if number:
            self._coordinator.continue_after(number, because, time.monotonic())
            self._coordinator.watch(request.endpoint.address, request.endpoint.port)
        self._coordinator.start()

    def _try_connect(self, address: str, port: int) -> bool:
        try:
            self._connect(address, port)
        except OSError:
            return False
        return True

    def _connect(self, address: str, port: int) -> None:
        link = connect(address, port, self._key)
        if self._spare is None and self._coordinator is None:
            self._spare = listen(link.own_address, 0)
        own_port = self._coordinator_port if self._coordinator else self._spare.getsockname()[1]
        self._link = link
        self._selector.register(link, selectors.EVENT_READ)
        link.send(
            kind="hello",
            name=self._name,
            host=host_name(),
            offer=self._request.offer,
            limits=str(self._request.limits),
            port=own_port,
        )
        self._waited_since = time.monotonic()

    def _disconnect(self) -> None:
        if self._link is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _succeed(self) -> None:
        """Whoever formed the rounds is lost: end the ranks here, and go on with the oldest that is left."""
        self._disconnect()
        self._end_ranks()
        if self._leaving is not None:
            return
        if self._forms or not self._members:
            self._over(1, "the agent that formed the rounds is gone before the first one")
            return
        self._say(f"{self._members[0][2].rsplit('-', 2)[0]}, which formed the rounds, is lost")
        deadline = time.monotonic() + _SUCCESSION_S
        while time.monotonic() < deadline and not self._signals:
            for address, port, name in self._members[1:]:
                if name == self._name:
                    self._take_over(f"{self._members[0][2].rsplit('-', 2)[0]} is lost")
                    return
                if self._try_connect(address, port):
                    return
            time.sleep(0.3)
        self._over(1, "no other agent of the last round could be reached")

    def _take_over(self, because: str) -> None:
        """Form rounds from now on. Where this agent has done so before it gave way, it listens already."""
        if self._coordinator is None:
            self._coordinate(self._spare, self._number, because)
            self._connect(str(self._spare.getsockname()[0]), self._coordinator_port)
            return
        self._forms = True
        self._coordinator.continue_after(self._number, because, time.monotonic())
        self._connect(self._reachable(self._request.endpoint.address), self._coordinator_port)

    def _end_ranks(self) -> None:
        """At once: their round is over."""
        self._ranks.stop()
        while self._ranks.running:
            self._select(beats=False)
            self._ranks.look()
        self._sent_end = self._sent_failure = True

    # ---- one turn

    def _turn(self) -> None:
        self._select()
        self._ranks.look()
        self._forward_signals()
        if self._code is not None:
            return
        if self._link is None:
            if self._leaving is not None and not self._ranks.running:
                self._over(128 + self._leaving, f"stopped by {signal.Signals(self._leaving).name}")
            return
        try:
            self._report()
        except OSError:
            self._succeed()

    def _select(self, beats: bool = True) -> None:
        if self._nursery.fileno() != self._watched_nursery:
            self._watched_nursery = self._nursery.fileno()
            if self._watched_nursery >= 0:
                self._selector.register(self._nursery, selectors.EVENT_READ)
        for key, _ in self._selector.select(_TICK_S):
            if key.fileobj is self._nursery:
                self._from_nursery()
            elif key.fileobj is self._link and beats:
                self._from_coordinator()

    def _from_nursery(self) -> None:
        descriptor = self._nursery.fileno()
        messages = self._nursery.receive()
        if messages is None:
            self._selector.unregister(descriptor)
            self._watched_nursery = -1
            self._ranks.end_all()
            return
        for message in messages:
            self._ranks.handle(message)

    def _from_coordinator(self) -> None:
        assert self._link is not None
        try:
            messages = self._link.receive()
        except Refused as error:
            self._over(
                1,
                f"the agent at {self._link.address} is not of this run ({error}). Give all agents the same "
                "--rdzv-id and FULLSHARD_RUN_SECRET",
            )
            return
        except OSError:
            self._succeed()
            return
        for message in messages:
            if self._code is None:
                self._handle(message)

    def _handle(self, message: Message) -> None:
        kind = message["kind"]
        if kind in ("start", "concluded", "trains", "wait"):
            self._say(message["text"])
        if kind in ("start", "concluded", "trains", "over"):
            self._record(message)
        if kind == "start":
            self._start(message)
        elif kind == "stop" and message["round"] == self._number:
            self._ranks.stop()
        elif kind == "leave" and message["round"] == self._number:
            self._ranks.request_to_leave()
        elif kind == "move" and self._leaving is None:
            self._disconnect()
            self._end_ranks()
            self._forms = False
            if not self._try_connect(message["address"], message["port"]):
                self._meet()
        elif kind == "over":
            self._over(int(message["code"]), str(message["text"]))

    def _start(self, message: Message) -> None:
        assert self._link is not None
        self._members = [(str(a), int(p), str(n)) for a, p, n in message["members"]]
        round_ = Round(**message["round"], address=self._link.address)
        self._number = round_.number
        self._first_step, self._trained = None, False
        if round_.count and self._leaving is None:
            self._nursery.start()
            self._ranks.start(round_)
            self._sent_end = self._sent_failure = False

    def _report(self) -> None:
        """Beats, the progress of the ranks, and how they ended."""
        assert self._link is not None
        now = time.monotonic()
        if now - self._link.heard_s > LOST_S:
            raise ConnectionError("not heard of")
        if now - self._beat >= BEAT_S:
            self._beat = now
            self._link.send(kind="beat")
        if self._sent_end:
            if self._leaving is not None:
                self._disconnect()
            return
        failed = next((ending for ending in self._ranks.endings() if ending.failed), None)
        if failed is not None and not self._sent_failure:
            self._sent_failure = True
            self._ranks.stop()
            self._link.send(kind="failed", round=self._number, ending=asdict(failed))
        if not self._trained and now - self._looked >= _PROGRESS_S:
            self._looked = now
            if self._progress()["trained"]:
                self._trained = True
                self._link.send(kind="progress", round=self._number, progress=self._progress())
        if not self._ranks.running:
            self._sent_end = True
            endings = self._ranks.endings()
            self._link.send(
                kind="ended",
                round=self._number,
                endings=[asdict(ending) for ending in endings],
                progress=self._progress(),
                leaves=self._leaves_after(endings),
            )

    def _progress(self) -> dict[str, Any]:
        known = self._ranks.progress()
        if self._first_step is None:
            self._first_step = known["step"]
        stepped = known["step"] is not None and known["step"] > (self._first_step or 0)
        return {**known, "trained": self._trained or stepped or known["counted"] > 0}

    def _forward_signals(self) -> None:
        """Ranks decide how they end: a script that looks at `fs.stop_requested` saves first."""
        while self._signals:
            number = self._signals.pop(0)
            self._ranks.send_signal(signal.SIGKILL if self._interrupts.is_second(number) else number)
            if number in _WARNINGS:
                self._warned = number
                continue
            self._leaving = self._leaving or number
            if self._request.shutdown_s is not None:
                self._ranks.stop(self._request.shutdown_s)
            if not self._ranks.running:
                self._over(128 + self._leaving, f"stopped by {signal.Signals(number).name}")

    def _leaves_after(self, endings: list[Ending]) -> int | None:
        """The signal after which this agent leaves, now that its ranks have ended."""
        if all(ending.code == 0 for ending in endings):
            self._leaving = None  # they have come to the end of the run
        elif self._warned is not None and any(
            ending.code in (128 + self._warned, -self._warned) for ending in endings
        ):
            self._leaving = self._warned  # they have saved before a time limit, or do not look at the signal
        return self._leaving

    def _over(self, code: int, text: str) -> None:
        self._code = code if self._leaving is None else 128 + self._leaving
        if code or self._leaving is not None:
            self._say(text)

    def _record(self, message: Message) -> None:
        """One line of JSON per event, written by the agent that forms the rounds."""
        if self._request.record is None or not self._forms:
            return
        line = {"event": message["kind"], "time": time.time(), "text": message["text"]}
        line |= {name: message[name] for name in ("round", "record", "code") if name in message}
        with open(self._request.record, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
