"""Forms the rounds of an elastic run: one of its agents does, for all of them.

It is a thread that waits for messages of agents, of its own too. An agent offers ranks; when there are
enough, all get their places in a round; when a rank fails or an agent is lost, the others stop theirs; when
all have ended, the next round is formed of who is there. Agents that join while a round runs wait until its
ranks have left after a save.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fullshard.elastic.links import Link, Message, Refused, connect
from fullshard.elastic.rounds import Ending, History, Limits, Verdict, cause, shares

BEAT_S, LOST_S = 1.0, 8.0  # an agent is lost when nothing was heard of it for so long
_TICK_S = 0.1
_LOOK_S = 1.0  # between looks at the endpoint of the run, where an agent may have started anew


@dataclass(frozen=True)
class Times:
    """How long to wait for agents."""

    join_s: float = 600.0  # for MIN ranks
    last_call_s: float = 0.0  # for more of them, in the first round


@dataclass(eq=False)
class Member:
    """One agent."""

    link: Link
    name: str = ""  # unique among the agents of a run
    host: str = ""
    offer: int = 0
    port: int = 0  # where it would listen, if it had to form rounds
    share: int = 0  # in the current round
    endings: list[Ending] | None = None  # of its ranks in this round, once all have ended
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return self.share > 0 and self.endings is None


class Coordinator:
    """Runs in a thread until `over` is set, or until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        limits: Limits,
        times: Times,
        history: History,
        open_store: Callable[[], tuple[Any, int]],
    ) -> None:
        self._listener, self._key, self._limits, self._times = listener, key, limits, times
        self._history, self._open_store = history, open_store
        self._members: list[Member] = []
        self._unknown: list[Member] = []  # connections that have not yet introduced themselves
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._store: Any = None
        self._number = 0
        self._running = self._stopping = self._growing = False
        self._forming_since = self._joined = self._beat = time.monotonic()
        self._failed_at: float | None = None  # when a round last failed, or its ranks left
        self._replaces_s: float | None = None  # the same, of the round that the current one replaces
        self._lost: list[Ending] = []  # of hosts that were lost in this round
        self._endings: list[Ending] = []  # of the ranks of this round, as far as they have ended
        self._progress: list[dict[str, Any]] = []
        self._left: dict[str, int] = {}  # hosts that were asked to stop in this round, and by which signal
        self._because = "it begins"
        self._over: Message | None = None
        self._closed = threading.Event()
        self._watched: tuple[str, int] | None = None
        self._looked = 0.0
        self._elsewhere: dict[str, Any] = {}  # where a group is that this one has given way to
        self._elsewhere_s = 0.0  # when it was last heard of
        self.port = int(listener.getsockname()[1])
        self.name = ""  # of the agent in whose process this is
        self._thread = threading.Thread(target=self._run, name="fullshard coordinator", daemon=True)

    def start(self) -> Coordinator:
        self._thread.start()
        return self

    def continue_after(self, number: int, because: str, failed_at: float) -> None:
        """The rounds of an agent that is gone are continued here. For when nobody is a member."""
        self._elsewhere = {}
        self._number, self._because, self._failed_at = number, because, failed_at

    def watch(self, address: str, port: int) -> None:
        """Before `start`: whoever comes to the endpoint of the run, which nobody serves, is sent here."""
        self._watched = (address, port)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        for member in (*self._members, *self._unknown):
            member.link.close()
        self._selector.close()
        self._listener.close()
        self._store = None

    def _run(self) -> None:
        while not self._closed.is_set():
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            self._beat_all()
            self._look_at_endpoint()
            if self._over is None:
                self._decide()

    # ---- connections

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            member = Member(Link(self._listener.accept()[0], self._key))
            self._unknown.append(member)
            self._selector.register(member.link, selectors.EVENT_READ, member)

    def _receive(self, member: Member) -> None:
        try:
            messages = member.link.receive()
        except (OSError, Refused):
            self._lose(member)
            return
        for message in messages:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version: not understood
                self._handle(member, message)

    def _lose(self, member: Member) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.link)
        member.link.close()
        if member in self._unknown:
            self._unknown.remove(member)
            return
        if member not in self._members:
            return
        first = self._first_rank(member)
        self._members.remove(member)
        if member.busy and self._over is None:
            known = member.progress
            step, loaded = known.get("step"), known.get("loaded", "")
            self._lost.append(Ending(first, member.host, -9, step=step, loaded=loaded, with_host=True))
            self._fail(f"{member.host} is lost")

    def _send(self, member: Member, **message: Any) -> None:
        try:
            member.link.send(**message)
        except OSError:
            self._lose(member)

    def _send_all(self, **message: Any) -> None:
        for member in list(self._members):
            self._send(member, **message)

    def _beat_all(self) -> None:
        now = time.monotonic()
        if now - self._beat < BEAT_S:
            return
        # After a pause of this process (a debugger, a suspended machine) nobody is lost yet.
        paused = now - self._beat > LOST_S / 2
        self._beat = now
        for member in [*self._members, *self._unknown]:
            if paused:
                member.link.heard_s = now
            if now - member.link.heard_s > LOST_S:
                self._lose(member)
        self._send_all(kind="beat")

    def _look_at_endpoint(self) -> None:
        """An agent that starts at the run's endpoint finds nobody there, and forms rounds of its own."""
        if self._watched is None or time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        address, port = self._watched
        with contextlib.suppress(OSError, Refused):
            link = connect(address, port, self._key, 0.5)
            try:
                link.send(kind="elsewhere", port=self.port, number=self._number)
                deadline = time.monotonic() + 0.5
                while time.monotonic() < deadline and not link.receive():
                    time.sleep(0.02)
            finally:
                link.close()

    # ---- messages

    def _handle(self, member: Member, message: Message) -> None:
        kind = message["kind"]
        if kind == "hello":
            self._join(member, message)
        elif kind == "elsewhere":
            self._redirect(member, message)
        elif message.get("round") != self._number:
            return  # a beat, or of an earlier round
        elif kind == "progress":
            self._note_progress(member, message["progress"])
        elif kind == "failed":
            self._fail(str(Ending(**message["ending"])))
        elif kind == "ended":
            member.endings = [Ending(**ending) for ending in message["endings"]]
            self._note_progress(member, message["progress"])
            self._endings += member.endings
            self._progress.append(member.progress)
            if message["leaves"] is not None:
                member.offer = 0  # it closes the connection next
                self._left[member.host] = int(message["leaves"])

    def _note_progress(self, member: Member, progress: dict[str, Any]) -> None:
        trained = self._is_training
        member.progress = progress
        if self._is_training and not trained:
            self._trains()

    def _join(self, member: Member, message: Message) -> None:
        if message["limits"] != str(self._limits):
            text = f"this agent has --elastic {message['limits']}, and the run {self._limits}"
            self._send(member, kind="over", code=2, text=f"{text}. Give all agents of a run the same.")
            self._lose(member)
            return
        self._unknown.remove(member)
        member.name, member.host = str(message["name"]), str(message["host"])
        member.offer, member.port = int(message["offer"]), int(message["port"])
        self._members.append(member)
        self._joined = time.monotonic()
        if self._over is not None:
            self._send(member, **self._over)
        elif self._elsewhere and self._joined - self._elsewhere_s < LOST_S:
            self._send(member, kind="move", **self._elsewhere)
        elif self._running and not self._stopping:
            self._send(
                member, kind="wait", text="a round is running, which will make room after its next save"
            )
            self._ask_to_leave()

    def _redirect(self, member: Member, message: Message) -> None:
        """There is a group of agents of this run elsewhere. Ours go there, if it has had more rounds."""
        self._send(member, kind="beat")
        if int(message["number"]) > self._number:
            self._elsewhere = {"address": member.link.address, "port": int(message["port"])}
            self._elsewhere_s = time.monotonic()
            self._send_all(kind="move", **self._elsewhere)

    def _ask_to_leave(self) -> None:
        """If another round would have more ranks."""
        now = sum(member.share for member in self._members)
        given = shares([member.offer for member in self._members], self._limits)
        if given is not None and sum(given) > now and not self._growing:
            self._growing = True
            self._send_all(kind="leave", round=self._number)

    # ---- rounds

    def _first_rank(self, member: Member) -> int:
        before = self._members[: self._members.index(member)]
        return sum(one.share for one in before)

    def _fail(self, text: str) -> None:
        if self._running and not self._stopping:
            self._stopping = True
            self._failed_at = time.monotonic()
            self._send_all(kind="stop", round=self._number, text=text)

    def _decide(self) -> None:
        if self._running:
            if not any(member.busy for member in self._members):
                self._conclude()
            return
        given = shares([member.offer for member in self._members], self._limits)
        now = time.monotonic()
        if not self._members:  # all have gone elsewhere, this agent too
            self._forming_since = now
        elif given is None:
            offered = sum(member.offer for member in self._members)
            if now - self._forming_since > self._times.join_s:
                hosts = ", ".join(f"{one.host} ({one.offer})" for one in self._members) or "none"
                self._finish(
                    1,
                    f"{offered} ranks are there, and --elastic {self._limits} needs {self._limits.least}: "
                    f"waited {self._times.join_s:g} s for more; hosts: {hosts}. Start more hosts, or give a "
                    "smaller MIN",
                )
        if given is None:
            return
        complete = sum(given) == self._limits.most
        if self._number == 0 and not complete and now - self._joined < self._times.last_call_s:
            return
        self._begin(given)

    def _begin(self, given: list[int]) -> None:
        self._number += 1
        self._store, port = self._open_store()
        self._replaces_s = self._failed_at
        self._running, self._stopping, self._growing = True, False, False
        self._lost, self._endings, self._progress, self._left = [], [], [], {}
        members, first = list(self._members), 0
        hosts = [member for member, share in zip(members, given, strict=True) if share]
        known = [[member.link.address, member.port, member.name] for member in members]
        known.sort(key=lambda one: one[2] != self.name)  # whoever forms the rounds, then the oldest
        plan = []
        for member, share in zip(members, given, strict=True):
            member.share, member.endings, member.progress = share, None, {}
            index = hosts.index(member) if share else 0
            plan.append({"first": first, "count": share, "host_index": index})
            first += share
        text = f"round {self._number}: {first} ranks on {_described(hosts)}; because {self._because}"
        for member, own in zip(members, plan, strict=True):
            message = {"number": self._number, "ranks": first, "hosts": len(hosts), "port": port, **own}
            self._send(member, kind="start", members=known, text=text, round=message)

    @property
    def _is_training(self) -> bool:
        return any(_has_trained(member.progress) for member in self._members)

    def _trains(self) -> None:
        """A rank has begun a second step: what was lost in the round before has been made good."""
        loaded = next((m.progress["loaded"] for m in self._members if m.progress.get("loaded")), "")
        taken = None if self._replaces_s is None else time.monotonic() - self._replaces_s
        after = "" if taken is None else f", {taken:.1f} s after the round before ended"
        ranks = sum(member.share for member in self._members)
        self._send_all(
            kind="trains",
            round=self._number,
            text=f"round {self._number}: trains from {loaded or 'the beginning'}{after}",
            record={"ranks": ranks, "from": loaded, "seconds": taken},
        )

    def _conclude(self) -> None:
        """All ranks of a round have ended."""
        self._running, self._store = False, None
        self._forming_since = time.monotonic()
        endings = [self._after_signals(ending) for ending in self._endings]
        failure = next(iter(self._lost), None) or cause(endings)
        if failure is None and all(ending.code == 0 and not ending.left for ending in endings):
            self._finish(0, "done")
            return
        self._failed_at = self._failed_at if self._stopping else self._forming_since
        progress = self._progress
        if failure is None:
            hosts = ", ".join(self._left)
            self._because = f"{hosts} was asked to stop" if hosts else "hosts have joined"
            self._report(None, Verdict(), progress)
            return
        verdict = self._history.after(self._number, failure, self._has_progressed(progress))
        self._because = str(failure)
        if verdict.without is not None and self._give_up(verdict.without[0]):
            self._because = verdict.text
        self._report(failure, verdict, progress)
        if verdict.exit_code is not None:
            self._finish(verdict.exit_code, verdict.text)
        elif not self._can_go_on():
            left = sum(member.offer for member in self._members)
            self._finish(
                failure.exit_code,
                f"{left} ranks are left, and --elastic {self._limits} needs {self._limits.least}; the last "
                f"failure: {failure}",
            )

    def _give_up(self, host: str) -> bool:
        """One place of a host, if MIN ranks are left without it; otherwise it is tried again."""
        member = next((one for one in self._members if one.host == host and one.offer), None)
        if member is None or sum(one.offer for one in self._members) <= self._limits.least:
            return False
        member.offer -= 1
        return True

    def _after_signals(self, ending: Ending) -> Ending:
        """A rank that ended because its host, or that of another one, was asked to stop has not failed."""
        asked = ending.host in self._left or ending.code - 128 in self._left.values()
        return replace(ending, left=True) if asked else ending

    def _can_go_on(self) -> bool:
        """Where others may still join, MIN is waited for."""
        offers = [member.offer for member in self._members]
        return self._times.last_call_s > 0 or shares(offers, self._limits) is not None

    def _has_progressed(self, progress: list[dict[str, Any]]) -> bool:
        """Whether a rank came to a step that no round before had reached, from where it began."""
        progressed = False
        for one in progress:
            step = one.get("step")
            base, reached = ("", step) if step is not None else (one.get("loaded", ""), one.get("counted", 0))
            if reached > self._history.best.get(base, 0):
                self._history.best[base] = reached
                progressed = True
        return progressed

    def _report(self, failure: Ending | None, verdict: Verdict, progress: list[dict[str, Any]]) -> None:
        saved, loaded = (
            next((one[name] for one in progress if one.get(name)), "") for name in ("saved", "loaded")
        )
        what = "its ranks have left after a save" if failure is None else str(failure)
        newest = f"; newest save: {saved}" if saved else ""
        self._send_all(
            kind="concluded",
            round=self._number,
            text=f"round {self._number} ended: {what}{newest}",
            record={
                "failure": None if failure is None else asdict(failure) | {"text": str(failure)},
                "verdict": verdict.text,
                "from": loaded,
                "saved": saved,
            },
        )

    def _finish(self, code: int, text: str) -> None:
        self._over = {"kind": "over", "code": code, "text": text}
        self._send_all(**self._over)


def _has_trained(progress: dict[str, Any]) -> bool:
    return progress.get("trained", False) is True


def _described(hosts: list[Member]) -> str:
    return ", ".join(f"{member.host} ({member.share})" for member in hosts)
