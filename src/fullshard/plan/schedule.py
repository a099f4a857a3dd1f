"""The agreed order of units: learned once, then followed by every rank.

Ranks may take different paths through a model. Collectives may not: so every rank takes part in
every unit's gather and reduce, in one order. The first forward learns it with a roll call before
each gather (who needs what?), which is right for any path but waits for the slowest rank. From then
on each pass is a walk along the order: a rank that skips a unit takes part in its gather and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence, Set


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

    def holds(self, unit: int) -> bool:
        """Whether `unit` is still to come."""
        return unit in self._order[self._at :]

    def next(self) -> int | None:
        return self._order[self._at] if self._at < len(self._order) else None

    def take(self) -> tuple[int, bool]:
        """Pass one entry: its unit, and whether it repeats the entry before it (still full, no gather)."""
        at, self._at = self._at, self._at + 1
        return self._order[at], at > 0 and self._order[at - 1] == self._order[at]

    def remaining(self) -> list[tuple[int, bool]]:
        return [self.take() for _ in range(len(self._order) - self._at)]


def settle(paths: Sequence[Sequence[int]], parents: Sequence[int]) -> list[int]:
    """The order that all later passes follow, from the path each rank took in the first one.

    `parents[u]` is the unit around u, 0 for the root. One path taken by all is the order, repeated calls
    included. Different paths are merged, each unit once, so that no rank's path runs against the order
    if that can be had. Units nobody called come behind their predecessor by definition; units inside
    another come directly behind it.
    """
    order = list(paths[0]) if one_path(paths) else _merged(paths)
    for unit in range(len(parents)):
        if unit not in order:
            order.insert(order.index(unit - 1) + 1 if unit else 0, unit)
    return _nested(order, parents)


def one_path(paths: Sequence[Sequence[int]]) -> bool:
    return all(list(path) == list(paths[0]) for path in paths)


def _merged(paths: Sequence[Sequence[int]]) -> list[int]:
    """Units by the smallest index among those that no rank wants another unit before."""
    firsts = [list(dict.fromkeys(path)) for path in paths]
    before: dict[int, set[int]] = {}
    for path in firsts:
        for i, unit in enumerate(path):
            before.setdefault(unit, set()).update(path[i - 1 : i] if i else ())
    order: list[int] = []
    while before:
        free = [unit for unit, earlier in before.items() if not earlier & before.keys()]
        unit = min(free or before)  # no unit is free: ranks go round in opposite ways, any choice will do
        order.append(unit)
        del before[unit]
    return order


def _nested(order: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Each unit directly behind the unit around it, or behind its latest call so far."""
    early: dict[int, list[list[int]]] = {}  # those met before the unit around them
    latest: dict[int, list[list[int]]] = {}  # unit: the groups inside its latest call
    top: list[list[int]] = []
    tree: dict[int, list[list[int]]] = {id(top): top}
    for unit in order:
        group = [unit]
        inside = early.pop(unit, [])
        tree[id(group)] = latest[unit] = inside
        around = parents[unit]
        home = top if around == 0 else latest.get(around)
        (early.setdefault(around, []) if home is None else home).append(group)

    def flat(groups: list[list[int]]) -> list[int]:
        return [u for group in groups for u in (*group, *flat(tree[id(group)]))]

    return flat(top)


def backward_order(order: Sequence[int], inside: Sequence[Set[int]], left_out: Set[int]) -> list[int]:
    """The order in which backwards begin, without the root (full from the start) and without `left_out`.

    That is the reverse, except that a unit begins before those inside it: `inside[u]` are u's.
    """
    found: list[int] = []
    rest = list(order)
    while rest:
        unit = rest.pop(0)
        nested = []
        while unit != 0 and rest and rest[0] in inside[unit]:
            nested.append(rest.pop(0))
        if unit != 0 and unit not in left_out:
            found[:0] = [unit, *backward_order(nested, inside, left_out)]
        else:
            found[:0] = backward_order(nested, inside, left_out)
    return found


def kept_units(
    order: Sequence[int], sizes: Sequence[int], budget_bytes: int, at_least: int, no_need: Set[int]
) -> set[int]:
    """Units that stay full from forward to backward: the last ones, which backward needs first.

    `at_least` of them stay whatever their size; further ones while the sum of sizes is within the budget.
    The root (always full) and those in `no_need` do not count.
    """
    kept: set[int] = set()
    total = 0
    for unit in dict.fromkeys(reversed(order)):
        if unit == 0 or unit in no_need:
            continue
        total += sizes[unit]
        if len(kept) >= at_least and total > budget_bytes:
            break
        kept.add(unit)
    return kept


def reduce_order(order: Sequence[int]) -> list[int]:
    """A unit's gradients are complete after the backward of its first call."""
    return list(reversed(list(dict.fromkeys(order))))
