"""Which group of agents an agent belongs to, after a network has fallen apart or a process stood still. Pure.

A group is one agent that leads (it forms the rounds) and those that follow it. An agent that has lost its
leader seeks one. Every agent answers those that ask, whichever of the three it does, so all of them can
decide by what is there now, and not by what the last round was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, StrEnum
from typing import Any

Place = tuple[str, int]  # address and port


class Role(StrEnum):
    LEADS = "leads"
    FOLLOWS = "follows"
    SEEKS = "seeks"


@dataclass(frozen=True, order=True)
class Group:
    """What its leader says of it. Of two groups the greater one stays, by these fields in this order."""

    has_least: bool  # MIN ranks are offered: it trains, or is about to
    number: int  # of its last round
    ranks: int  # offered
    at_endpoint: bool  # where newcomers ask first
    name: str  # of its leader, so that no two are equal
    limits: str = field(default="", compare=False)


def gives_way(own: Group, other: Group) -> bool:
    """Whether the agents of `own` go over to `other`. Of two groups exactly one does.

    With other limits there is nothing to compare: who came later goes, and is refused there.
    """
    if own.limits != other.limits:
        return (own.number, own.name) < (other.number, other.name)
    return own < other


@dataclass(frozen=True)
class Answer:
    """Of an agent that was asked what it does."""

    role: Role
    name: str
    group: Group | None = None  # which it leads
    leader: str = ""  # whom it follows, and where that is
    place: Place | None = None

    def message(self) -> dict[str, Any]:
        return {"kind": "here", **asdict(self)}

    @staticmethod
    def of(message: dict[str, Any]) -> Answer:
        """Raises KeyError, TypeError or ValueError where it is none."""
        group, place = message["group"], message["place"]
        return Answer(
            Role(message["role"]),
            str(message["name"]),
            None if group is None else Group(**group),
            str(message["leader"]),
            None if place is None else (str(place[0]), int(place[1])),
        )


@dataclass(frozen=True)
class Asked:
    """What came of asking at one place."""

    place: Place
    answer: Answer | None = None
    silent: bool = False  # somebody is there, and does not answer: a process that stands still


class Step(Enum):
    WAIT = "wait"
    TAKE_OVER = "take over"


def next_step(
    older: Sequence[Asked], others: Sequence[Asked], lost: Collection[Place], patient: bool
) -> Place | Step:
    """What an agent does that seeks: join the group at a place, lead one, or ask again.

    `older` are the members of the last round that come before this agent, `others` everybody else; `lost` is
    where the lost leader was. An agent leads if no older one can, and nobody follows a leader that this agent
    cannot reach. While `patient`, an older agent that stands still may go on yet; not so the lost leader,
    whose silence has been waited out.
    """
    everybody = [*older, *others]
    answers = [one.answer for one in everybody if one.answer is not None]
    groups = [(one.answer.group, one.place) for one in everybody if one.answer and one.answer.group]
    if groups:
        return max(groups)[1]
    followed = [answer.place for answer in answers if answer.role is Role.FOLLOWS and answer.place]
    unheard = {one.place for one in everybody if one.answer is None}
    if followed:
        return next((place for place in followed if place not in unheard), Step.WAIT)
    if any(one.answer is not None for one in older):
        return Step.WAIT
    if patient and any(one.silent and one.place not in lost for one in older):
        return Step.WAIT
    return Step.TAKE_OVER
