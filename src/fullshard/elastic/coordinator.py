"""Forms the rounds of an elastic run: one of its agents does, for all of them.

It is a thread that waits for messages of agents, of its own too. An agent offers ranks; when there are
enough, all get their places in a round; when a rank fails or an agent is lost, the others stop theirs; when
all have ended, the next round is formed of who is there. Agents that join while a round runs wait until its
ranks have left after a save.

Every agent has such a thread, though only one leads: the others' say to those who ask where the leader is,
and are there if they have to take over (`groups`).
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fullshard.elastic.groups import Answer, Group, Place, Role, gives_way
from fullshard.elastic.links import Link, Message, Refused, is_loopback
from fullshard.elastic.lookout import Look, Lookout
from fullshard.elastic.rounds import Ending, History, Limits, Verdict, cause, offers_now, shares

BEAT_S, LOST_S = 1.0, 8.0  # an agent is lost when nothing was heard of it for so long
_TICK_S = 0.1


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
    ready: bool = False  # its ranks can start at once
    moved: bool = False  # it was sent to another group, and closes the connection next
    port: int = 0  # where its own such thread listens
    share: int = 0  # in the current round
    endings: list[Ending] | None = None  # of its ranks in this round, once all have ended
    progress: dict[str, Any] = field(default_factory=dict)
    step: int | None = None  # of its first rank, by its last beat
    doing: str = ""  # likewise

    @property
    def busy(self) -> bool:
        return self.share > 0 and self.endings is None


@dataclass(frozen=True)
class Succession:
    """What an agent knows that goes on with the rounds of another one."""

    number: int = 0  # of the last round
    because: str = "it begins"
    failed_at: float | None = None
    members: dict[str, Place] = field(default_factory=dict)  # of the last round, without this agent
    expected: frozenset[str] = frozenset()  # those of them that seek a group, and will come


class Coordinator:
    """Runs in a thread until it is closed. `lead`, `follow` and `seek` are called by its agent."""

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        key: bytes,
        limits: Limits,
        times: Times,
        history: History,
        open_store: Callable[[], tuple[Any, int]],
    ) -> None:
        self._key, self._limits, self._times = key, limits, times
        self._history, self._open_store = history, open_store
        self._listeners = [listener]
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._role = Role.SEEKS
        self._leader: tuple[str, Place] | None = None  # of the group in which its agent is, if it follows
        self._lookout = Lookout(key)
        self._strays: dict[str, tuple[Place, float]] = {}  # who may lead a group elsewhere, and since when
        self._strayed_s = 0.0  # when a member was last lost
        self._hurries = False  # to look for it
        self._expected: frozenset[str] = frozenset()
        self._heard_number = 0  # the highest of a round in which members were, wherever that was
        self._reported_wait = False
        self.invited_by: Place | None = None  # a leader that has asked here, while this agent seeks
        self.at_endpoint = False
        self.endpoint: Place | None = None  # where else newcomers of the run come to
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
        self.address, self.port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        self.name = name  # of the agent in whose process this is
        self._thread = threading.Thread(target=self._run, name="fullshard coordinator", daemon=True)

    def start(self) -> Coordinator:
        self._thread.start()
        return self

    # ---- called by its agent, done by the thread before it handles what arrives later

    def serve(self, listener: socket.socket) -> None:
        """Listen there as well."""
        self._commands.put(lambda: self._serve(listener))

    def lead(self, succession: Succession) -> None:
        """Form rounds from now on."""
        self._commands.put(lambda: self._lead(succession))

    def follow(self, name: str, place: Place) -> None:
        """The agent is in the group of another one: whoever comes here is sent there."""
        self._commands.put(lambda: self._set_role(Role.FOLLOWS, (name, place)))

    def seek(self) -> None:
        """The agent is in no group."""
        self._commands.put(lambda: self._set_role(Role.SEEKS, None))

    def _serve(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)

    def _lead(self, succession: Succession) -> None:
        for member in list(self._members):
            self._drop(member)
        now = time.monotonic()
        self._role, self._leader = Role.LEADS, None
        self._running = self._stopping = self._growing = self._reported_wait = False
        self._number, self._because = max(self._number, succession.number), succession.because
        self._failed_at, self._forming_since, self._joined = succession.failed_at, now, now
        self._strays = {name: (place, now) for name, place in succession.members.items()}
        self._expected = succession.expected

    def _set_role(self, role: Role, leader: tuple[str, Place] | None) -> None:
        for member in list(self._members):
            if not member.moved:  # its agent has lost the connection to this thread: nobody leads here
                self._drop(member)
        self._role, self._leader, self.invited_by = role, leader, None
        self._running = False

    def close(self) -> None:
        self._closed.set()
        self._lookout.close()
        self._thread.join()
        for member in (*self._members, *self._unknown):
            member.link.close()
        self._selector.close()
        for listener in self._listeners:
            listener.close()
        self._store = None

    def _run(self) -> None:
        while not self._closed.is_set():
            events = self._selector.select(_TICK_S)
            while not self._commands.empty():
                self._commands.get()()
            for key, _ in events:
                if isinstance(key.data, Member):
                    self._receive(key.data)
                else:
                    self._accept(key.fileobj)
            self._beat_all()
            self._look_around()
            if self._over is None and self._role is Role.LEADS:
                self._decide()

    # ---- connections

    def _accept(self, listener: Any) -> None:
        with contextlib.suppress(OSError):
            member = Member(Link(listener.accept()[0], self._key))
            self._unknown.append(member)
            self._selector.register(member.link, selectors.EVENT_READ, member)

    def _receive(self, member: Member) -> None:
        try:
            messages = member.link.receive()
        except Refused:
            self._send(member, kind="refused")  # signed, so the other side finds the same
            self._lose(member)
            return
        except OSError:
            self._lose(member)
            return
        for message in messages:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version: not understood
                self._handle(member, message)

    def _drop(self, member: Member) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(member.link)
        member.link.close()
        for known in (self._unknown, self._members):
            if member in known:
                known.remove(member)

    def _lose(self, member: Member) -> None:
        if member not in self._members:
            self._drop(member)
            return
        first = self._first_rank(member)
        self._drop(member)
        if self._role is not Role.LEADS:
            return
        if member.offer and member.name != self.name:
            self._strayed_s = time.monotonic()
            self._strays[member.name] = ((member.link.address, member.port), self._strayed_s)
            self._hurries = True
        if member.busy and self._over is None:
            loaded, step, doing = member.progress.get("loaded", ""), member.step, member.doing
            lost = Ending(first, member.host, -9, step=step, loaded=loaded, doing=doing, with_host=True)
            self._lost.append(lost)
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

    # ---- other groups

    @property
    def _group(self) -> Group:
        ranks = sum(member.offer for member in self._members)
        number = max(self._number, self._heard_number)
        enough = ranks >= self._limits.least
        return Group(enough, number, ranks, self.at_endpoint, self.name, str(self._limits))

    def _look_around(self) -> None:
        """Other groups can only be where agents were, or where newcomers come to."""
        looks = self._role is Role.LEADS and self._over is None and bool(self._members)
        now, here = time.monotonic(), {member.name for member in self._members}
        # An agent that leads fewer than MIN ranks gives up after that time, too.
        self._strays = {
            name: (place, since)
            for name, (place, since) in self._strays.items()
            if name not in here and now - since < self._times.join_s
        }
        places = [place for place, _ in self._strays.values()]
        if self.endpoint is not None and not self.at_endpoint:
            places.append(self.endpoint)
        look = Look(self._group, self.port, tuple(dict.fromkeys(places))) if looks and places else None
        self._lookout.aim(look)
        if self._hurries:
            self._hurries = False
            self._lookout.hurry()
        for done in self._lookout.found():
            for one in done.found:
                answer = one.answer
                if answer is None or self._role is not Role.LEADS:
                    continue
                if answer.group is not None and gives_way(done.group, answer.group):
                    self._give_way(one.place)
                elif answer.place is not None and answer.leader not in (self.name, *here):
                    self._strays.setdefault(answer.leader, (answer.place, now))

    def _give_way(self, place: Place) -> None:
        """The agents of this group, its own too, go over to another one."""
        if self._role is not Role.LEADS or self._over is not None:
            return
        self._role, self._running, self._store = Role.SEEKS, False, None
        for member in list(self._members):
            member.moved = True
            self._send(member, kind="move", address=place[0], port=place[1])

    def _answer(self, member: Member, message: Message) -> None:
        """To whoever asks what this agent does; a leader that asks does so for its group."""
        group = self._group if self._role is Role.LEADS else None
        leader, where = ("", None) if self._leader is None else self._leader
        self._send(member, **Answer(self._role, self.name, group, leader, where).message())
        if message["group"] is None:
            return
        asking, place = Group(**message["group"]), (member.link.address, int(message["port"]))
        if self._role is Role.SEEKS:
            self.invited_by = place
        elif group is not None and asking.name != self.name and gives_way(group, asking):
            self._give_way(place)

    # ---- messages

    def _handle(self, member: Member, message: Message) -> None:
        kind = message["kind"]
        if kind == "hello":
            self._join(member, message)
        elif kind == "where":
            self._answer(member, message)
        elif kind == "ready":
            member.ready = bool(message["ready"])
            self._welcome(member)
        elif message.get("round") != self._number:
            return  # of an earlier round
        elif kind == "beat":
            step, doing = message["standing"]
            member.step, member.doing = None if step is None else int(step), str(doing)
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
        if self._role is Role.FOLLOWS and self._leader is not None:
            address, port = self._leader[1]
            self._send(member, kind="move", address=address, port=port)
            return
        if self._role is Role.SEEKS:
            self._send(member, kind="seeking")
            return
        self._unknown.remove(member)
        member.name, member.host = str(message["name"]), str(message["host"])
        member.offer, member.port = int(message["offer"]), int(message["port"])
        member.ready = bool(message["ready"])
        for other in [one for one in self._members if one.name == member.name]:
            self._lose(other)  # its connection was cut, which has not been noticed here yet
        self._members.insert(0 if member.name == self.name else len(self._members), member)
        self._joined = time.monotonic()
        self._heard_number = max(self._heard_number, int(message["number"]))
        self._send(member, kind="welcome", name=self.name)
        if self._over is not None:
            self._send(member, **self._over)
        else:
            self._welcome(member)

    def _welcome(self, member: Member) -> None:
        """A member that can have ranks at once, while a round runs: make room."""
        if not self._running or self._stopping or member.share:
            return
        if not member.ready:
            text = "the ranks of this host are being prepared; those of the others train until that is done"
        elif self._ask_to_leave():
            text = "a round is running, which will make room after its next save"
        else:
            text = f"a round is running, without room for more ranks (--elastic {self._limits}): waiting"
        self._send(member, kind="wait", text=text)

    def _ask_to_leave(self) -> bool:
        """If another round would have more ranks."""
        now = sum(member.share for member in self._members)
        given = shares(self._offers(), self._limits)
        grows = given is not None and sum(given) > now
        if grows and not self._growing:
            self._growing = True
            self._send_all(kind="leave", round=self._number)
        return grows

    def _offers(self) -> list[int]:
        members = self._members
        is_first = max(self._number, self._heard_number) == 0
        offers, ready = [one.offer for one in members], [one.ready for one in members]
        return offers_now(offers, ready, self._limits, is_first)

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
        given = shares(self._offers(), self._limits)
        now = time.monotonic()
        if all(member.name != self.name for member in self._members):
            self._forming_since = now
            return  # its own agent is about to come
        if given is None:
            self._report_wait()
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
        begun = max(self._number, self._heard_number) > 0
        if not begun and not complete and now - self._joined < self._times.last_call_s:
            return
        if self._strays and not self._lookout.has_looked_since(self._strayed_s):
            return  # who is lost here may have gone on elsewhere: then this group goes there
        here = {member.name for member in self._members}
        if not complete and self._expected - here and now - self._forming_since < LOST_S:
            return
        self._expected = frozenset()
        self._begin(given)

    def _report_wait(self) -> None:
        """Once, where a run has lost too much to go on."""
        is_early = bool(self._expected) and time.monotonic() - self._forming_since < LOST_S
        if self._number == 0 or self._reported_wait or is_early:
            return
        self._reported_wait = True
        offered = sum(member.offer for member in self._members)
        text = f"{offered} ranks are there, and --elastic {self._limits} needs {self._limits.least}"
        self._send_all(kind="wait", text=f"{text}: waiting for more, and looking for the other hosts")

    def _begin(self, given: list[int]) -> None:
        if self._heard_number > self._number and self._because == "it begins":
            self._because = "the hosts have met again"
        self._number = max(self._number, self._heard_number) + 1
        self._reported_wait = False
        self._store, port = self._open_store()
        self._replaces_s = self._failed_at
        self._running, self._stopping, self._growing = True, False, False
        self._lost, self._endings, self._progress, self._left = [], [], [], {}
        members, first = list(self._members), 0
        hosts = [member for member, share in zip(members, given, strict=True) if share]
        known = [[_address(member), member.port, member.name] for member in members]
        known.sort(key=lambda one: one[2] != self.name)  # whoever forms the rounds, then the oldest
        plan = []
        for member, share in zip(members, given, strict=True):
            member.share, member.endings, member.progress = share, None, {}
            member.step, member.doing = None, ""
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


def _address(member: Member) -> str:
    """As others may use it; empty: that of this agent's host, which each of them knows by its own link."""
    return "" if is_loopback(member.link.address) else member.link.address


def _has_trained(progress: dict[str, Any]) -> bool:
    return progress.get("trained", False) is True


def _described(hosts: list[Member]) -> str:
    return ", ".join(f"{member.host} ({member.share})" for member in hosts)
