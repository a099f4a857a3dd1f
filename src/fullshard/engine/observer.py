"""What the engine reports while it runs, for timelines and tests. Without an observer nothing is called.

    runtime.observer = MyObserver()        # or None

`begin` and `end` bracket what the training thread does for a unit; they nest. `issued` and `waiting` concern
collectives, each known by its tag and the running number that the flight recorder gave it.
"""

from __future__ import annotations

from typing import Literal, Protocol

from fullshard.comm.tags import CommObserver

Activity = Literal[
    "gather",  # the unit's gather is issued
    "release",
    "forward",
    "recompute",  # a forward inside backward
    "backward",
    "send",  # gradients are packed and their exchange is issued
    "sum",  # an exchange is over: what arrived is summed into the gradient shard
    "end of backward",  # the unit is ''
]


class Observer(CommObserver, Protocol):
    def begin(self, activity: Activity, unit: str) -> None: ...

    def end(self, activity: Activity, unit: str) -> None: ...
