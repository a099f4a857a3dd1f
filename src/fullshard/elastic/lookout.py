"""Asking agents what they do: by one that seeks a group, and all the time by those that lead one.

Places are asked at once, each in a thread of its own, since one that is cut off answers nobody until the
limit. An agent counts as there when it has answered with a signature, not when it can be connected to: the
system completes connections for a process that stands still.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from fullshard.elastic.groups import Answer, Asked, Group, Place
from fullshard.elastic.links import Link, Message, Refused, as_seen_through, connect

ANSWER_S = 2.0  # to connect and to answer; it is the time of a thread that does nothing else
_LOOK_S = 1.0  # between two looks
_MOST_AT_ONCE = 128


def first_messages(link: Link, limit_s: float) -> list[Message]:
    """What arrives first; nothing, if that takes too long. Raises OSError and Refused."""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        while (left_s := deadline - time.monotonic()) > 0:
            if selector.select(left_s) and (messages := link.receive()):
                return messages
    return []


def ask(place: Place, key: bytes, question: Message, limit_s: float = ANSWER_S) -> Asked:
    began = time.monotonic()
    try:
        link = connect(*place, key, limit_s)
    except OSError:
        return Asked(place)
    try:
        link.send(**question)
        messages = first_messages(link, began + limit_s - time.monotonic())
        if not messages:
            return Asked(place, silent=True)
        answer = Answer.of(messages[0])
        if answer.place is not None:
            address, port = answer.place
            answer = replace(answer, place=(as_seen_through(link, address), port))
        return Asked(place, answer)
    except (OSError, Refused, KeyError, TypeError, ValueError):
        return Asked(place)
    finally:
        link.close()


def ask_all(places: Sequence[Place], key: bytes, question: Message) -> list[Asked]:
    if not places:
        return []
    with ThreadPoolExecutor(min(len(places), _MOST_AT_ONCE)) as pool:
        return list(pool.map(lambda place: ask(place, key, question), places))


@dataclass(frozen=True)
class Look:
    """One look around: for whom, where, and what came of it."""

    group: Group
    port: int  # where its leader listens
    places: tuple[Place, ...]
    found: tuple[Asked, ...] = ()

    @property
    def question(self) -> Message:
        return question(self.group, self.port)


def question(group: Group | None = None, port: int = 0) -> Message:
    """Of a leader, with its group: an agent that leads another one decides by it, too."""
    return {"kind": "where", "group": None if group is None else vars(group), "port": port}


class Lookout:
    """A thread that looks for other groups of the run, while there are places where one may be."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._next: Look | None = None
        self._found: queue.SimpleQueue[Look] = queue.SimpleQueue()
        self._wake, self._closed = threading.Event(), False
        self._looked_s = 0.0  # when the last complete look began
        self._thread = threading.Thread(target=self._run, name="fullshard lookout", daemon=True)
        self._thread.start()

    def aim(self, look: Look | None) -> None:
        self._next = look

    def hurry(self) -> None:
        self._wake.set()

    def has_looked_since(self, moment_s: float) -> bool:
        return self._looked_s >= moment_s and self._found.empty()

    def found(self) -> Iterator[Look]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._found.get_nowait()

    def close(self) -> None:
        """It ends by itself, after the places that it is asking just now."""
        self._closed = True
        self._wake.set()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(_LOOK_S)
            self._wake.clear()
            began, look = time.monotonic(), self._next
            if look is not None and not self._closed:
                self._found.put(replace(look, found=tuple(ask_all(look.places, self._key, look.question))))
                self._looked_s = began
