"""The agreed order of units: learned once, then followed by every rank.

Ranks may take different paths through a model. Collectives may not: so every rank takes part in
every unit's gather and reduce, in one order. The first forward learns it with a roll call before
each gather (who needs what?), which is right for any path but waits for the slowest rank. From then
on each pass is a walk along the order: a rank that skips a unit takes part in its gather and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence


class Walk:
    """One pass along an order of unit indices."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._at = 0

    def up_to(self, unit: int) -> list[tuple[int, bool]] | None:
        """Pass the entries from here to the next one of `unit`; None, and none passed, if there is none."""
        try:
            stop = self._order.index(unit, self._at) + 1
        except ValueError:
            return None
        return [self.take() for _ in range(stop - self._at)]

    def next(self) -> int | None:
        return self._order[self._at] if self._at < len(self._order) else None

    def take(self) -> tuple[int, bool]:
        """Pass one entry: its unit, and whether it repeats the entry before it (still full, no gather)."""
        at, self._at = self._at, self._at + 1
        return self._order[at], at > 0 and self._order[at - 1] == self._order[at]

    def remaining(self) -> list[tuple[int, bool]]:
        return [self.take() for _ in range(len(self._order) - self._at)]


def complete_order(seen: Sequence[int], num_units: int) -> list[int]:
    """The order seen, with units nobody called put behind their predecessor by definition."""
    order = list(seen)
    for unit in range(num_units):
        if unit not in order:
            place = order.index(unit - 1) + 1 if unit else 0
            order.insert(place, unit)
    return order


def backward_order(order: Sequence[int], left_out: set[int]) -> list[int]:
    """The reverse, without the root (full from the start) and without `left_out`."""
    return [unit for unit in reversed(order) if unit != 0 and unit not in left_out]


def reduce_order(order: Sequence[int]) -> list[int]:
    """A unit's gradients are complete after the backward of its first call."""
    return list(reversed(list(dict.fromkeys(order))))
