"""The schedule of a step: what is gathered, kept, released and reduced, and in which order.

Pure. The runtime executes it, `fs.plan` prints it, and `fullshard plan` sums bytes over it.

Ranks may take different paths through a model; collectives must match. So every rank takes part in every
unit's gather and reduce, in one order. In the first forward the ranks agree before each gather on which
units any of them needs, which is correct for every path but waits for the slowest rank. The schedule is made
from the paths of that pass. From then on each pass is a walk along it: a rank that skips a unit takes part in
its gather and goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from fullshard.options import Options

# A head tied to its embedding is called at both ends of a pass; below this it is not worth a second gather.
RETURNING_BYTES = 128 * 2**20
# Exchanges of gradients in flight at a time; one of more than LARGE_BYTES is issued when none is in flight.
IN_FLIGHT = 4
LARGE_BYTES = 128 * 2**20
# Gathers between nodes that are issued beyond the unit that is gathered inside the node: two messages keep a
# link busy, and their memory is that of a unit divided by the ranks of a node.
CROSS_AHEAD = 2


class Walk:
    """One pass along an order of unit indices."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._at = 0

    @property
    def at(self) -> int:
        """How many entries were passed."""
        return self._at

    def entry(self, at: int) -> int | None:
        return self._order[at] if at < len(self._order) else None

    def up_to(self, unit: int) -> Iterator[tuple[int, bool]] | None:
        """Pass the entries from here to the next one of `unit`, each when taken; None if there is none."""
        try:
            stop = self._order.index(unit, self._at) + 1
        except ValueError:
            return None
        return (self.take() for _ in range(stop - self._at))

    def holds(self, unit: int) -> bool:
        """Whether `unit` is still to come."""
        return unit in self._order[self._at :]

    def next(self) -> int | None:
        return self._order[self._at] if self._at < len(self._order) else None

    def take(self) -> tuple[int, bool]:
        """Pass one entry: its unit, and whether it repeats the entry before it (still full, no gather)."""
        at, self._at = self._at, self._at + 1
        return self._order[at], at > 0 and self._order[at - 1] == self._order[at]

    def remaining(self) -> Iterator[tuple[int, bool]]:
        return (self.take() for _ in range(len(self._order) - self._at))


class ScheduledUnit(NamedTuple):
    """What the schedule depends on, of one unit. The root is unit 0."""

    full_bytes: int
    inside: frozenset[int] = frozenset()  # units within its modules; none for the root
    rereads: bool = True  # backward reads its full value
    stays_full: bool | None = None  # from forward to backward; None: as the release rule has it
    share_bytes: int = 0  # what a gather between nodes brings to a rank; 0 where there is one level
    training_bytes: int = 0  # at rest on a rank, with gradients and Adam's state


Phase = Literal["forward", "backward"]


class Call(NamedTuple):
    """A unit computes. Between the calls of other units it is the root, 0."""

    phase: Phase
    unit: int
    done: bool = False  # after it the unit's gradients are complete


@dataclass(frozen=True)
class Schedule:
    """One training step, by unit indices: the same on every rank.

    Whether an entry of a walk gathers follows from the schedule alone, never from one rank's path.
    """

    forward: tuple[int, ...]  # entries of the forward walk: calls, with repeats
    backward: tuple[int, ...]  # entries of the backward walk, if all that is kept is still full
    reduce: tuple[int, ...]  # the order in which gradients are reduced; units that do not train are left out
    gathers: tuple[int, ...]  # by unit, gathers per step
    kept: frozenset[int]  # full from forward to backward
    returning: frozenset[int]  # small and called again later in the pass: full until then
    held: frozenset[int]  # called several times while ranks take different paths: full until the pass ends
    releases: bool  # what is not kept is released after forward
    prefetch: bool  # the next entry of a walk is gathered while a unit computes
    diverges: bool  # ranks take different paths
    units: tuple[ScheduledUnit, ...]
    node_copies: frozenset[int] = frozenset()  # whose node's share stays from forward to backward

    @property
    def crossings(self) -> tuple[int, ...]:
        """By unit, gathers between nodes per step, where there are nodes."""
        return tuple(n - (unit in self.node_copies) for unit, n in enumerate(self.gathers))

    @property
    def node_copy_bytes(self) -> int:
        return sum(self.units[unit].share_bytes for unit in self.node_copies)

    @cached_property
    def crossed_ahead(self) -> frozenset[int]:
        """Units whose gather between nodes may be issued ahead: those that a pass gathers once."""
        if not self.prefetch:
            return frozenset()
        return frozenset(unit for unit, calls in Counter(self.forward).items() if calls == 1)

    def backward_walk(self, full: Iterable[int], unused: Set[int] = frozenset()) -> tuple[int, ...]:
        """The entries of one backward: `full` when it begins, `unused` in the backward of every rank.

        An evaluation between forward and backward may have released what the schedule keeps.
        """
        still_full = self.kept.intersection(full)
        if not unused and (still_full == self.kept or not self.releases):
            return self.backward
        return _backward(self.forward, self.units, self.releases, still_full, unused)

    def calls(self) -> list[Call]:
        """One step in which units are called as the forward walk has it."""
        begins = backward_order(self.forward, [unit.inside for unit in self.units], frozenset())
        last = {unit: at for at, unit in enumerate(begins)}
        return [
            *(Call("forward", unit) for unit in self.forward),
            Call("backward", 0),
            *(Call("backward", unit, last[unit] == at) for at, unit in enumerate(begins)),
            Call("backward", 0, True),
        ]

    def full_at(self, calls: Sequence[Call]) -> Iterator[set[int]]:
        """For each call of one step, the units that are full, or are being gathered, while it runs."""
        around = _around(self.units)
        ahead = self._ahead(calls) if self.prefetch else [0] * len(calls)
        last_call = {call.unit: at for at, call in enumerate(calls) if call.phase == "forward"}
        last_done = {call.unit: at for at, call in enumerate(calls) if call.done}
        called: set[int] = set()  # in forward
        in_use = set(self.kept)  # in backward: full until their gradients are complete
        for at, (phase, unit, _) in enumerate(calls):
            full = {0, unit, ahead[at], *around[unit]}
            if phase == "forward":
                called.add(unit)
                full |= called & (self.kept | self.held)
                full |= {u for u in called & self.returning if last_call[u] >= at}
            else:
                in_use.add(unit)
                full = (full | in_use) & self._full_in_backward
                if last_done.get(unit) == at:
                    in_use.discard(unit)
            yield full

    def full_bytes_at(self, calls: Sequence[Call]) -> list[int]:
        """For each call of one step, the bytes of these units' full values."""
        return [sum(self.units[unit].full_bytes for unit in full) for full in self.full_at(calls)]

    def share_bytes_at(self, calls: Sequence[Call]) -> list[int]:
        """For each call of one step, the bytes of shares that came between nodes: kept or on their way."""
        if not any(unit.share_bytes for unit in self.units):
            return [0] * len(calls)
        depth = 1 + CROSS_AHEAD if self.prefetch else 0
        held, copies = [], 0
        following = self._following(calls, depth)
        called: set[int] = set()
        for (phase, unit, _), coming in zip(calls, following, strict=True):
            if phase == "forward" and unit in self.node_copies and unit not in called:
                copies += self.units[unit].share_bytes
                called.add(unit)
            elif phase == "backward" and unit in called:
                copies -= self.units[unit].share_bytes
                called.discard(unit)
            crossing = coming - called if phase == "backward" else coming
            held.append(copies + sum(self.units[u].share_bytes for u in crossing))
        return held

    def _following(self, calls: Sequence[Call], depth: int) -> list[set[int]]:
        """By call, the units that its walk gathers next, up to `depth` of them."""
        gathered = {"forward": set(self.forward), "backward": set(self.backward) - self.kept}
        found: list[set[int]] = [set()] * len(calls)
        following: dict[str, list[int]] = {"forward": [], "backward": []}
        for at in range(len(calls) - 1, -1, -1):
            call, coming = calls[at], following[calls[at].phase]
            found[at] = set(coming[:depth])
            if call.unit and call.unit in gathered[call.phase] and call.unit not in coming[:1]:
                following[call.phase] = [call.unit, *coming[:depth]]
        return found

    @cached_property
    def _full_in_backward(self) -> frozenset[int]:
        return self.kept.union(self.backward, (0,))

    def _ahead(self, calls: Sequence[Call]) -> list[int]:
        """By call, the unit that its walk gathers next; 0, which is full in any case, where there is none."""
        gathered = {"forward": set(self.forward), "backward": set(self.backward) - self.kept}
        ahead, following = [0] * len(calls), {"forward": 0, "backward": 0}
        for at in range(len(calls) - 1, -1, -1):
            call = calls[at]
            ahead[at] = following[call.phase]
            if call.unit and call.unit in gathered[call.phase]:
                following[call.phase] = call.unit
        return ahead


def make_schedule(
    paths: Sequence[Sequence[int]], units: Sequence[ScheduledUnit], options: Options
) -> Schedule:
    """From the path that each rank took through the units in its first forward, the root first."""
    diverges, releases = not one_path(paths), options.releases_after_forward
    order = tuple(settle(paths, _parents(units)))
    again = _calls_after_others(order)
    returning: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    if releases and not diverges:
        returning = frozenset(unit for unit in again if units[unit].full_bytes <= RETURNING_BYTES)
    if diverges:
        held = frozenset(unit for path in paths for unit, calls in Counter(path).items() if calls > 1)
    kept = _kept(order, units, options, diverges)
    backward = _backward(order, units, releases, kept, frozenset())
    gathers = [0 if options.replicated else 1] * len(units)
    if releases:
        for unit in (*(unit for unit in again if unit not in returning), *set(backward)):
            gathers[unit] += 1
    schedule = Schedule(
        forward=order,
        backward=backward,
        reduce=tuple(reduce_order(order)),
        gathers=tuple(gathers),
        kept=kept,
        returning=returning,
        held=held,
        releases=releases,
        prefetch=options.prefetch,
        diverges=diverges,
        units=tuple(units),
    )
    return replace(schedule, node_copies=_node_copies(schedule, options))


def _node_copies(schedule: Schedule, options: Options) -> frozenset[int]:
    """Of the units that backward gathers again, the last ones of forward, within the budget.

    By default that is half of what a rank holds anyway: values at rest with gradients and Adam's state, and
    full values at the peak. With offload memory is short: none.
    """
    shares = [unit.share_bytes for unit in schedule.units]
    again = frozenset(schedule.backward) if schedule.releases else frozenset()
    if not any(shares) or not again:
        return frozenset()
    budget = options.keep_node
    if budget is None:
        held = sum(unit.training_bytes for unit in schedule.units)
        peak = max(schedule.full_bytes_at(schedule.calls()))
        budget = 0 if options.offload is not None else (held + peak) // 2
    others = frozenset(range(len(shares))) - again
    return frozenset(kept_units(schedule.forward, shares, budget, 0, others))


def _kept(
    order: Sequence[int], units: Sequence[ScheduledUnit], options: Options, diverges: bool
) -> frozenset[int]:
    if not options.releases_after_forward:
        return frozenset(range(len(units)))
    kept = set() if units[0].stays_full is False else {0}
    if not diverges:
        not_reread = {index for index, unit in enumerate(units) if not unit.rereads}
        kept |= kept_units(order, [unit.full_bytes for unit in units], *options.keeps, not_reread)
        kept |= {index for index, unit in enumerate(units) if index and unit.stays_full}
    around = _around(units)  # a unit that is released releases those inside it
    return frozenset(unit for unit in kept if around[unit] <= kept)


def _backward(
    order: Sequence[int],
    units: Sequence[ScheduledUnit],
    releases: bool,
    still_full: Set[int],
    unused: Set[int],
) -> tuple[int, ...]:
    left_out = {index for index, unit in enumerate(units) if not unit.rereads}.union(unused)
    if releases:
        left_out |= still_full
    return tuple(backward_order(order, [unit.inside for unit in units], left_out))


def _parents(units: Sequence[ScheduledUnit]) -> list[int]:
    """By unit, the innermost unit around it. Outer units come first, so the innermost is written last."""
    parents = [0] * len(units)
    for outer, unit in enumerate(units):
        for inner in unit.inside:
            parents[inner] = outer
    return parents


def _around(units: Sequence[ScheduledUnit]) -> list[set[int]]:
    """By unit, all units around it, without the root."""
    around: list[set[int]] = [set() for _ in units]
    for outer, unit in enumerate(units):
        for inner in unit.inside:
            around[inner].add(outer)
    return around


def _calls_after_others(order: Sequence[int]) -> list[int]:
    """The entries of units that were called before, with calls of other units between."""
    called: set[int] = set()
    again = []
    for at, unit in enumerate(order):
        if unit and unit in called and order[at - 1] != unit:
            again.append(unit)
        called.add(unit)
    return again


def settle(paths: Sequence[Sequence[int]], parents: Sequence[int]) -> list[int]:
    """The order that all later passes follow, from the path each rank took in the first one.

    `parents[u]` is the unit around u, 0 for the root. One path taken by all is the order, repeated calls
    included. Different paths are merged, each unit once, so that no rank's path runs against the order
    if that can be had. Units nobody called come behind their predecessor by definition; units inside
    another come directly behind it.
    """
    order = list(paths[0]) if one_path(paths) else _merged(paths)
    called = set(order)
    for unit in range(len(parents)):
        if unit not in called:
            order.insert(order.index(unit - 1) + 1 if unit else 0, unit)
    return _nested(order, parents)


def one_path(paths: Sequence[Sequence[int]]) -> bool:
    return all(list(path) == list(paths[0]) for path in paths)


def _merged(paths: Sequence[Sequence[int]]) -> list[int]:
    """Units by the smallest index among those before which no rank called another one that is left."""
    firsts = [list(dict.fromkeys(path)) for path in paths]
    before: dict[int, set[int]] = {}
    for path in firsts:
        for i, unit in enumerate(path):
            before.setdefault(unit, set()).update(path[i - 1 : i] if i else ())
    order: list[int] = []
    while before:
        free = [unit for unit, earlier in before.items() if not earlier & before.keys()]
        unit = min(free or before)  # none is free: ranks call them in opposite orders, and any choice will do
        order.append(unit)
        del before[unit]
    return order


def _nested(order: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Each unit directly behind the unit around it, or behind its latest call so far."""
    early: dict[int, list[list[int]]] = {}  # called before the unit around them
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
    groups: list[list[int]] = []  # a unit with those inside this call of it
    at = 0
    while at < len(order):
        unit, first = order[at], at + 1
        at = first
        while unit != 0 and at < len(order) and order[at] in inside[unit]:
            at += 1
        group = [] if unit == 0 or unit in left_out else [unit]
        groups.append(group + backward_order(order[first:at], inside, left_out))
    return [unit for group in reversed(groups) for unit in group]


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


def in_flight_limit(size_bytes: int) -> int:
    """How many exchanges of gradients may be in flight with one of `size_bytes`, itself included.

    gloo uses a link both ways at once only while several are in flight; large ones hold much memory.
    """
    return 1 if size_bytes > LARGE_BYTES else IN_FLIGHT


def across_limit(size_bytes: int) -> int:
    """How many exchanges between nodes may be in flight, of which each receives `size_bytes`.

    Each is that part of an exchange inside the node that one of its ranks sums.
    """
    return 2 if size_bytes > LARGE_BYTES else IN_FLIGHT


def host_limit(leg: int) -> int:
    """The same for leg 1, 2, ... of a reduce where a host issues each leg when the one before it is over.

    A rank that waits for a leg of unit v must not wait for one that another rank has not issued and will not
    issue before it gets something from this one. That other rank has sent all that this one has sent, and of
    these at most IN_FLIGHT per leg can be in earlier legs there: with as many later than v here, v is not.
    """
    return IN_FLIGHT * leg
