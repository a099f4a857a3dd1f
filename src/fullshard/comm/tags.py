"""What a collective serves."""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["shard", "forward", "backward", "full", "inference", "save", "load", "export"]


class OpTag(NamedTuple):
    """The unit, phase and step that a collective serves; written to the flight recorder with it."""

    unit: str
    phase: str
    step: int
