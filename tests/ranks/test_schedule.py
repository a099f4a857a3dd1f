"""One schedule: what `fs.plan` prints, what the engine does in a step, and what the planner sums over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import ranks
from fullshard.comm.tags import OpTag
from fullshard.options import parse
from fullshard.plan.plan import plan_of
from fullshard.plan.schedule import Call, Schedule, ScheduledUnit, make_schedule
from fullshard.plan.units import find_units
from fullshard.planning.needs import Step
from fullshard.planning.tracing import trace

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Outer(nn.Module):
    """A unit with units inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)))


class Stack(nn.Module):
    """Blocks behind an embedding, whose backward does not read its table."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.token(index)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Nested(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outer() for _ in range(2))


class Returning(Stack):
    """The first block is called once more at the end."""

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](super().forward(index))


class Tied(nn.Module):
    """A head tied to its embedding: one unit with two modules, large enough to be a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(2**17, 32)
        self.narrow = nn.Linear(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.widen = nn.Linear(WIDTH, 32)
        self.head = nn.Linear(32, 2**17, bias=False)
        self.head.weight = self.token.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.token(index))
        for block in self.blocks:
            x = block(x)
        return self.head(self.widen(x))[:, :8]


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, Block | Outer | nn.Embedding)


MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "stack": (Stack, _is_unit),
    "nested": (Nested, _is_unit),
    "returning": (Returning, _is_unit),
    "tied": (Tied, None),
}


class Seen:
    """An observer: the calls of a step, and which units were full during each of them."""

    def __init__(self, names: list[str]) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._full: set[int] = set()
        self._open: int | None = None
        self.calls: list[tuple[str, int]] = []
        self.full: list[set[int]] = []
        self.gathers: list[tuple[str, int]] = []
        self.reduces: list[int] = []
        self.sent: Counter[str] = Counter()

    def begin(self, activity: str, unit: str) -> None:
        index = self._index[unit]
        if activity == "gather":
            self.gathers.append(("backward" if self._in_backward else "forward", index))
            self._full.add(index)
        elif activity == "send":
            self.reduces.append(index)
        elif activity in ("forward", "backward"):
            self._close()
            self.calls.append((activity, index))
            self.full.append(set(self._full))
            self._open = len(self.full) - 1 if activity == "backward" else None
        elif activity == "end of backward":
            self._close()

    def end(self, activity: str, unit: str) -> None:
        if activity == "release":
            self._full.discard(self._index[unit])
        elif activity == "backward":
            self._close()

    @property
    def _in_backward(self) -> bool:
        return bool(self.calls) and self.calls[-1][0] == "backward"

    def _close(self) -> None:
        """A backward gathers after it has begun: what is full is noted when the next activity comes."""
        if self._open is not None:
            self.full[self._open], self._open = set(self._full), None

    def issued(self, channel: str, number: int, tag: OpTag) -> None:
        if channel == "gather":
            self.sent[tag.unit] += 1

    def waiting(self, channel: str, number: int) -> None: ...

    def waited(self, channel: str, number: int) -> None: ...


def _observed(kind: str, options: dict[str, Any]) -> tuple[Schedule, Schedule, list[str], Seen]:
    """One step after the schedule is known: the plan's schedule, the engine's, and what was observed."""
    import fullshard as fs

    torch.manual_seed(0)
    model_class, units = MODELS[kind]
    model = fs.shard(model_class(), units=units, merge_units=0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runtime = model._fullshard
    names = [unit.name for unit in runtime.units]
    seen = Seen(names)
    for step in range(3):
        runtime.observer = seen if step == 2 else None
        model(torch.arange(6) % 32).square().mean().backward()
        runtime.observer = None
        optimizer.step()
        optimizer.zero_grad()
    return fs.plan(model).schedule, runtime.gathering.schedule, names, seen


def _all_observed(cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    found = []
    for case in cases:
        found.append(_observed(*case))
        ranks.end_groups_of_models()
    return found


def _traced(kind: str, options: dict[str, Any]) -> tuple[Schedule, list[Call]]:
    """The planner's: from one step on the meta device."""
    model_class, units = MODELS[kind]
    with torch.device("meta"):
        model, index = model_class(), torch.zeros(6, dtype=torch.long)
    parsed = parse(units=units, merge_units=0, **options)
    planned = find_units(model, parsed)

    def run(module: nn.Module) -> tuple[torch.Tensor, Any]:
        out = module(index)
        return out.square().mean(), out

    step = Step(planned, trace(model, planned, run, recompute=False), "sgd", on_gpu=False)
    return plan_of(planned, 2, parsed, step.path).schedule, step.calls


def _first_backwards(calls: Iterable[tuple[Call, set[int]]]) -> list[tuple[str, int, set[int]]]:
    """Calls of units, without those of the root between others. A backward begins once, whatever follows."""
    found: list[tuple[str, int, set[int]]] = []
    for (phase, unit, _), full in calls:
        begun = any(entry[:2] == (phase, unit) for entry in found)
        if not (begun and (phase == "backward" or unit == 0)):
            found.append((phase, unit, full))
    return found


def _gathering_entries(schedule: Schedule) -> list[tuple[str, int]]:
    """The entries of the walks that gather, in their order."""
    if not schedule.releases:
        return [("forward", unit) for unit in dict.fromkeys(schedule.forward)]
    found: list[tuple[str, int]] = []
    for at, unit in enumerate(schedule.forward):
        repeats = at > 0 and schedule.forward[at - 1] == unit
        if not repeats and not (unit in schedule.returning and ("forward", unit) in found):
            found.append(("forward", unit))
    return found + [("backward", unit) for unit in dict.fromkeys(schedule.backward)]


STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "zero3"},
    {"strategy": "zero3", "keep_full": 0},
    {"strategy": "zero3", "keep_full": "all"},
    {"strategy": "zero3", "prefetch": False},
    {"strategy": "zero2"},
    {"strategy": "replicate"},
]


@pytest.mark.parametrize("kind", MODELS)
def test_plan_engine_and_planner_have_one_schedule(kind: str) -> None:
    cases = [(kind, options) for options in STRATEGIES]
    for (_, options), observed in zip(
        cases, ranks.run(_all_observed, 2, cases, init=True, timeout_s=120)[0], strict=True
    ):
        planned, executed, names, seen = observed
        traced, calls = _traced(kind, options)
        case = (kind, options)
        assert traced == executed, case
        if kind != "returning":  # a module that is called twice is known when it is called, not before
            assert planned == executed, case
        # What was gathered and reduced, in order, and what of it was sent.
        assert seen.gathers == _gathering_entries(executed), case
        assert [seen.sent[name] for name in names] == list(executed.gathers), case
        assert tuple(seen.reduces) == executed.reduce, case
        # What was full at each call: by the schedule's own calls, by the planner's trace, and in the engine.
        by_schedule = _first_backwards(zip(executed.calls(), executed.full_at(executed.calls()), strict=True))
        by_trace = _first_backwards(zip(calls, executed.full_at(calls), strict=True))
        by_engine = [(*call, full) for call, full in zip(seen.calls, seen.full, strict=True)]
        if executed.releases or kind not in ("returning", "tied"):  # else it holds first calls only
            assert by_trace == by_schedule, case
        if options["strategy"] != "replicate":  # there parameters rest full
            assert by_engine == by_trace, case


def _options(**more: Any) -> Any:
    return parse(**{"strategy": "zero3", "precision": "fp32", "units": None, "ignore": (), **more})


def test_what_is_inside_a_released_unit_is_not_kept() -> None:
    inside = [frozenset(), frozenset({2, 3}), frozenset(), frozenset(), frozenset()]
    units = [ScheduledUnit(10, within) for within in inside]
    schedule = make_schedule([[0, 4, 1, 2, 3]], units, _options(keep_full=20))
    assert schedule.kept == {0}
    assert make_schedule([[0, 4, 1, 2, 3]], units, _options(keep_full=30)).kept == {0, 1, 2, 3}


def test_ranks_on_different_paths_keep_nothing_and_hold_what_they_call_again() -> None:
    units = [ScheduledUnit(10)] * 4
    schedule = make_schedule([[0, 1, 2, 1, 3], [0, 3]], units, _options())
    assert (schedule.forward, schedule.kept, schedule.held) == ((0, 1, 2, 3), {0}, {1})
    assert schedule.backward == (3, 2, 1)
    assert schedule.gathers == (1, 2, 2, 2)


def test_what_an_evaluation_released_is_gathered_again_in_backward() -> None:
    schedule = make_schedule([range(5)], [ScheduledUnit(2**30)] * 5, _options())
    assert schedule.kept == {0, 3, 4}
    assert schedule.backward == schedule.backward_walk({0, 3, 4}) == (2, 1)
    assert schedule.backward_walk({0}) == (4, 3, 2, 1)
    assert schedule.backward_walk({0, 3, 4}, unused={1}) == (2,)
