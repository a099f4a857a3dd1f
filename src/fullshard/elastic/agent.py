"""The agent of one host in an elastic run: it starts and stops the ranks here, as rounds are formed.

One of the agents forms the rounds (`coordinator`): the one at the run's endpoint. If that host is lost, the
oldest of the others takes over. All agents know it from the members of the last round, so no vote is needed.
An agent that was cut off finds the group of the others again, from the same members (`groups`).
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

from fullshard.elastic.coordinator import BEAT_S, LOST_S, Coordinator, Succession, Times
from fullshard.elastic.groups import Asked, Place, Role, Step, next_step
from fullshard.elastic.links import Link, Message, Refused, as_seen_through, connect, key_of, listen
from fullshard.elastic.local_ranks import LocalRanks, Nursery, Round
from fullshard.elastic.lookout import ask_all, first_messages, question
from fullshard.elastic.rounds import Ending, History, Limits
from fullshard.environment import host_name
from fullshard.stop_signals import Interrupts

_TICK_S = 0.1
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # of schedulers, before a time limit
_PROGRESS_S = 0.5
_RETRY_S = 0.3
_MOST_MOVES = 4  # from agent to agent, until one names where the leader is


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
        self._leader = ""  # the name of the agent that forms the rounds
        self._leader_at: Place | None = None
        self._members: list[tuple[str, int, str]] = []  # of the last round, the oldest first
        self._number = 0
        self._sent_end = self._sent_failure = True
        self._sent_ready = False  # that ranks can start here at once
        self._beat = self._looked = 0.0
        self._turned = time.monotonic()
        self._first_step: int | None = None
        self._trained = False
        self._signals: list[int] = []
        self._warned: int | None = None
        self._interrupts = Interrupts()
        self._leaving: int | None = None  # the signal that ended the part of this host
        self._code: int | None = None
        self._watched_nursery = -1

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
        """Find who forms rounds, or do it. Without a link afterwards, a signal has come, or the end."""
        target = self._request.endpoint
        if not target.address:
            self._serve(listen("127.0.0.1", 0), at_endpoint=True)
            self._lead(Succession())
            return
        deadline = time.monotonic() + self._request.times.join_s
        while self._leaving is None and not self._signals and self._code is None:
            if target.is_here is not True and self._join(target.address, target.port):
                return
            if target.is_here is not False and self._try_listen(target):
                self._lead(Succession(self._number))
                return
            if time.monotonic() > deadline:
                waited = f"nobody answered at {target.address}:{target.port} for"
                self._over(1, f"{waited} {self._request.times.join_s:g} s. Start the agent of that host")
                return
            time.sleep(_RETRY_S)

    def _try_listen(self, target: Endpoint) -> bool:
        if self._coordinator is not None and self._coordinator.at_endpoint:
            return True
        address = "0.0.0.0" if target.is_here else target.address
        try:
            listener = listen(address, target.port)
        except OSError:
            return False
        self._serve(listener, at_endpoint=True)
        return True

    def _serve(self, listener: Any, at_endpoint: bool = False) -> None:
        """Answer there. An agent that need not form rounds does so, too: others ask it what it does."""
        request = self._request
        if self._coordinator is None:
            self._coordinator = Coordinator(
                listener,
                self._name,
                self._key,
                request.limits,
                request.times,
                History(request.max_fruitless),
                self._open_store,
            )
            if request.endpoint.address:
                self._coordinator.endpoint = (request.endpoint.address, request.endpoint.port)
            self._coordinator.start()
        else:
            self._coordinator.serve(listener)
        self._coordinator.at_endpoint |= at_endpoint

    def _lead(self, succession: Succession) -> None:
        """Form rounds from now on, also for this host."""
        coordinator = self._coordinator
        assert coordinator is not None
        coordinator.lead(succession)
        self._forms = True
        address = "127.0.0.1" if coordinator.address == "0.0.0.0" else coordinator.address
        if self._join(address, coordinator.port):
            return
        inner = listen("127.0.0.1", 0)  # an interface that is down may take the host's own address with it
        coordinator.serve(inner)
        if not self._join("127.0.0.1", int(inner.getsockname()[1])) and not self._signals:
            self._over(1, f"this agent cannot connect to itself, at {address}:{coordinator.port}")

    def _join(self, address: str, port: int) -> bool:
        """Whether there is an answer from a group, which takes this host in, or has come to the end.

        A connection alone says nothing: the system accepts it for a process that stands still.
        """
        for _ in range(_MOST_MOVES):
            try:
                link = connect(address, port, self._key)
            except OSError:
                return False
            try:
                if self._coordinator is None:
                    self._serve(listen(link.own_address, 0))
                link.send(**self._hello())
                messages = first_messages(link, LOST_S)
            except OSError:
                messages = []
            except Refused as error:
                self._refuse(link, error)
                return True
            kind = messages[0]["kind"] if messages else ""
            if kind == "move":
                address, port = as_seen_through(link, messages[0]["address"]), int(messages[0]["port"])
                link.close()
                continue
            if kind == "over":
                self._handle(messages[0])
            if kind != "welcome":
                link.close()
                return kind == "over"
            self._enter(link, port, str(messages[0]["name"]))
            for message in messages[1:]:
                self._handle(message)
            return True
        return False

    def _hello(self) -> Message:
        assert self._coordinator is not None
        self._sent_ready = self._nursery.ready
        return {
            "kind": "hello",
            "name": self._name,
            "host": host_name(),
            "offer": self._request.offer,
            "ready": self._sent_ready,
            "limits": str(self._request.limits),
            "port": self._coordinator.port,
            "number": self._number,
        }

    def _enter(self, link: Link, port: int, leader: str) -> None:
        assert self._coordinator is not None
        self._link, self._leader, self._leader_at = link, leader, (link.address, port)
        self._selector.register(link, selectors.EVENT_READ)
        self._forms = leader == self._name
        if not self._forms:
            self._coordinator.follow(leader, self._leader_at)

    def _disconnect(self) -> None:
        if self._link is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._link)
            self._link.close()
            self._link = None

    def _leave_group(self) -> None:
        """The ranks here end, and agents that ask learn that this one looks for a leader."""
        self._forms = False
        if self._coordinator is not None:
            self._coordinator.seek()
        self._disconnect()
        self._end_ranks()

    def _seek(self) -> None:
        """Whoever formed the rounds is lost to this agent: go on with those that are left, or come back."""
        self._leave_group()
        if self._leaving is not None:
            return
        if self._leader:
            self._say(f"the connection to {_host(self._leader)}, which formed the rounds, is lost")
        if not self._members:
            self._meet()
            return
        began = time.monotonic()
        lost = {(address, port) for address, port, name in self._members if name == self._leader}
        if self._leader_at is not None:
            lost.add(self._leader_at)
        while not self._signals and self._code is None:
            older, others = self._ask_others(lost)
            waited_s = time.monotonic() - began
            step = next_step(older, others, lost, patient=waited_s < LOST_S)
            if step is Step.TAKE_OVER:
                self._take_over([*older, *others])
                return
            if not isinstance(step, Step) and self._join(*step):
                return
            if waited_s > self._request.times.join_s:
                self._over(1, f"no group of the run has taken this host in for {waited_s:.0f} s")
                return
            time.sleep(_RETRY_S)

    def _ask_others(self, lost: set[Place]) -> tuple[list[Asked], list[Asked]]:
        """Everybody who may know of a group: the members before this one, and the others."""
        assert self._coordinator is not None
        names = [name for _, _, name in self._members]
        own = names.index(self._name) if self._name in names else len(names)
        places = [(address, port) for address, port, _ in self._members]
        endpoint = self._request.endpoint
        more = [*lost, (endpoint.address, endpoint.port), self._coordinator.invited_by]
        others = [*places[own + 1 :], *(place for place in more if place is not None and place[0])]
        asked = ask_all(list(dict.fromkeys([*places[:own], *others])), self._key, question())
        older = [one for one in asked if one.place in places[:own]]
        rest = [one for one in asked if one.place not in places[:own]]
        return older, [one for one in rest if one.answer is None or one.answer.name != self._name]

    def _take_over(self, asked: list[Asked]) -> None:
        answers = [one.answer for one in asked if one.answer is not None]
        because = f"{_host(self._leader)} is lost" if self._leader else "no other group is left"
        self._lead(
            Succession(
                self._number,
                because,
                time.monotonic(),
                {name: (address, port) for address, port, name in self._members if name != self._name},
                frozenset(answer.name for answer in answers if answer.role is Role.SEEKS),
            )
        )

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
            if self._leaving is None:
                self._seek()
            elif not self._ranks.running:
                self._over(128 + self._leaving, f"stopped by {signal.Signals(self._leaving).name}")
            return
        try:
            self._report()
        except OSError:
            self._seek()

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
            if not self._nursery.ready and self._leaving is None:  # one that cannot start waits for a round
                self._nursery.start()
            return
        for message in messages:
            self._ranks.handle(message)

    def _from_coordinator(self) -> None:
        assert self._link is not None
        try:
            messages = self._link.receive()
        except Refused as error:
            self._refuse(self._link, error)
            return
        except OSError:
            self._seek()
            return
        for message in messages:
            if self._code is None:
                self._handle(message)

    def _refuse(self, link: Link, error: Refused) -> None:
        self._over(
            1,
            f"the agent at {link.address} is not of this run ({error}). Give all agents the same "
            "--rdzv-id and FULLSHARD_RUN_SECRET",
        )

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
            self._move(message)
        elif kind == "over":
            self._over(int(message["code"]), str(message["text"]))

    def _move(self, message: Message) -> None:
        """To another group of the run, to which that of this agent gives way."""
        assert self._link is not None
        address = str(message["address"])
        if not self._forms:
            address = as_seen_through(self._link, address)
        self._leave_group()
        if self._join(address, int(message["port"])) or self._code is not None:
            return
        self._leader = ""  # it is not lost
        self._seek()

    def _start(self, message: Message) -> None:
        assert self._link is not None
        link = self._link
        self._members = [(as_seen_through(link, str(a)), int(p), str(n)) for a, p, n in message["members"]]
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
        if now - self._turned > LOST_S / 2:  # this process stood still: the leader may be there nevertheless
            self._link.heard_s = now
        self._turned = now
        if now - self._link.heard_s > LOST_S and not self._forms:
            raise ConnectionError("not heard of")
        if now - self._beat >= BEAT_S:
            self._beat = now
            self._link.send(kind="beat", round=self._number, standing=self._standing())
        if self._nursery.ready != self._sent_ready:
            self._sent_ready = self._nursery.ready
            self._link.send(kind="ready", ready=self._sent_ready)
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

    def _standing(self) -> tuple[int | None, str]:
        """Of the first rank, should this host be lost."""
        return self._ranks.standing() if self._ranks.running else (None, "")

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


def _host(name: str) -> str:
    """The host of an agent, from its name."""
    return name.rsplit("-", 2)[0]
