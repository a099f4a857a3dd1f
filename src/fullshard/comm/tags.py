"""What a collective serves."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class OpTag(NamedTuple):
    """The unit, phase and step that a collective serves; written to the flight recorder with it.

    Phases are forward, backward, full, inference, save, load, export. They name, and steer nothing.
    """

    unit: str
    phase: str
    step: int


class CommObserver(Protocol):
    """Called for every collective, where one is set. Operations are known by channel and running number."""

    def issued(self, channel: str, number: int, tag: OpTag) -> None: ...

    def waiting(self, channel: str, number: int) -> None: ...

    def waited(self, channel: str, number: int) -> None: ...
