"""The fastest settings that fit: every candidate's memory by `needs`, its time by `timing`.

Candidates are strategies, with and without recomputation, with values on the device or elsewhere; of those
that fit, variants use the memory that is left: more full values or node copies kept. Those that do not fit
are tried without what the engine keeps by default. What changes numbers (8 bits on the wire) is tried only
where it is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from fullshard.byte_sizes import size, size_option
from fullshard.errors import OptionError
from fullshard.options import Options
from fullshard.planning.answers import SPARE, Question, need_of
from fullshard.planning.machines import Machine
from fullshard.planning.needs import Need, Step
from fullshard.planning.offloading import Request, host_option
from fullshard.planning.settings import Choice, Rejected, Settings, seconds
from fullshard.planning.times import MOVING
from fullshard.precision import Precision

WIRES = ("int8-across", "int8")
CLOSE = 1.02  # steps within that are taken to be equal: then the one that needs less memory is better
_RECOMPUTES = (False, True, "offload")


@dataclass(frozen=True)
class Disk:
    """Of one host, for what exceeds its memory."""

    folder: str
    free_bytes: int


@dataclass(frozen=True)
class Scope:
    """What a plan is for, and what it may choose from."""

    model: str
    ranks: int
    node_ranks: int | None
    machine: Machine
    memory_bytes: int  # of one device
    host_bytes: int | None = None  # of one host; None: no limit is known
    disk: Disk | None = None
    precision: str | Precision = "bf16"
    optimizer: str = "adamw"
    spare: float = SPARE
    on_gpu: bool = True
    strategies: tuple[str, ...] = ()  # () for all
    recomputes: tuple[Any, ...] = _RECOMPUTES
    offloads: tuple[str | None, ...] = (None, "optimizer", "auto")
    wires: tuple[str, ...] = ("exact",)
    tunes: bool = True  # keep_full and keep_node are chosen too
    state: str = "exact"  # how optimizer state rests, as fs.shard takes it
    timed: bool = True  # False: only whether candidates fit is of interest

    @property
    def levels(self) -> bool:
        return self.node_ranks is not None and 1 < self.node_ranks < self.ranks

    def question(self, strategy: str, recompute: Any, offload: Request | None) -> Question:
        return Question(
            ranks=self.ranks,
            memory_bytes=self.memory_bytes,
            strategies=(strategy,),
            precision=self.precision,
            optimizer=self.optimizer,
            recompute=recompute,
            node_ranks=self.node_ranks,
            on_gpu=self.on_gpu,
            spare=self.spare,
            offload=offload,
            machine=self.machine if self.timed else None,
            state=self.state,
        )


@dataclass(frozen=True)
class Traced:
    """One micro-batch of so many sequences, traced with and without recomputation."""

    steps: dict[Any, Step]  # by `checkpoint_activations`
    sequences: int | None = None
    tokens: int | None = None  # of one rank's step: all micro-batches
    accumulate: int = 1


@dataclass(frozen=True)
class Candidate:
    settings: Settings
    need: Need
    question: Question
    tokens: int | None

    @property
    def step_s(self) -> float:
        """Of all micro-batches: the optimizer's step is made once."""
        times = self.need.times
        assert times is not None
        more = self.settings.accumulate - 1
        return times.step_s + more * (times.step_s - times.optimizer_s)

    @property
    def per_token_s(self) -> float:
        """Per image, or other sample, where a model reads no tokens."""
        samples = (self.settings.micro_batch or 1) * self.settings.accumulate
        return self.step_s / (self.tokens or samples)

    @property
    def fits(self) -> bool:
        return self.question.fits(self.need)


@dataclass(frozen=True)
class NothingFits:
    """What the least candidate needs, and what may be done about it."""

    what: str
    remedy: str
    rejected: tuple[Rejected, ...]


def choose(scope: Scope, traces: Iterable[Traced], until_worse: bool = False) -> Choice:
    """As `search`; if nothing fits, an OptionError with what the least one needs."""
    found = search(scope, traces, until_worse)
    if isinstance(found, NothingFits):
        raise OptionError(found.what, found.remedy)
    return found


def anything_fits(scope: Scope, traced: Traced) -> bool:
    """Whether `search` would find settings. Those that need least memory are tried first."""
    frugal = replace(scope, timed=False, recomputes=scope.recomputes[::-1], offloads=scope.offloads[::-1])
    names = sorted(_strategies(scope), key=("zero3", "hybrid", "zero2", "zero1", "replicate").index)
    return any(one.fits for one in _candidates(frugal, traced, names))


def search(scope: Scope, traces: Iterable[Traced], until_worse: bool = False) -> Choice | NothingFits:
    """The fastest per token that fits.

    until_worse: `traces` are of growing micro-batches, of which no more are tried once they do not fit, or
        gain nothing over those of at most half their size. With recomputation, or offload, large ones may
        gain where those without either are the fastest of the small ones: each is followed by itself.
    """
    candidates: list[Candidate] = []
    rates: dict[Any, dict[int, float]] = {}  # by kind, and sequences of a micro-batch
    for traced in traces:
        found = list(_candidates(scope, traced, _strategies(scope)))
        candidates += found
        gains = [_gain(rates.setdefault(kind, {}), traced, rate) for kind, rate in _by_kind(found).items()]
        if until_worse and not any(gains):
            break
    fitting = [one for one in candidates if one.fits]
    if not fitting:
        return _nothing_fits(scope, candidates)
    best = _best(fitting)
    rejected = [_rejected(one, best) for one in _sorted(candidates) if one is not best]
    times = best.need.times
    assert times is not None
    return Choice(
        best.settings,
        _why(scope, best, fitting),
        scope.model,
        scope.ranks,
        scope.node_ranks,
        scope.machine.source,
        scope.memory_bytes,
        best.tokens,
        best.need.peak,
        best.step_s,
        tuple(rejected),
    )


def _by_kind(candidates: Sequence[Candidate]) -> dict[Any, float]:
    """The least time per token of those that fit, with and without recomputation and offload."""
    rates: dict[Any, float] = {}
    for one in candidates:
        if one.fits:
            kind = one.settings.checkpoint_activations, one.settings.offload is not None
            rates[kind] = min(one.per_token_s, rates.get(kind, inf))
    return rates


def _gain(rates: dict[int, float], traced: Traced, rate: float) -> bool:
    """Enter the rate; whether it is better than those of at most half as many sequences."""
    size_here = traced.sequences or 1
    before = min((other for count, other in rates.items() if 2 * count <= size_here), default=inf)
    rates[size_here] = rate
    return rate <= before / CLOSE


def _best(fitting: Sequence[Candidate]) -> Candidate:
    fastest = min(one.per_token_s for one in fitting)
    close = [one for one in fitting if one.per_token_s <= fastest * CLOSE]
    return min(close, key=lambda one: (_departures(one.settings), one.need.peak, one.per_token_s))


def _departures(settings: Settings) -> int:
    """How much is done that need not be: of two that take as long, the plainer one is better."""
    others = settings.offload is not None, bool(settings.checkpoint_activations), settings.wire != "exact"
    kept = settings.keep_full is not None, settings.keep_node is not None
    return 2 * sum(others) + sum(kept)


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda one: (not one.fits, one.per_token_s if one.fits else one.need.peak))


def _why(scope: Scope, best: Candidate, fitting: Sequence[Candidate]) -> str:
    times = best.need.times
    assert times is not None
    bound, moved = times.bound, best.need.transfers
    if bound == MOVING and moved is not None and moved.step_read:
        bound = "the disk"
    of = f"{size(best.need.peak)} of {size(scope.memory_bytes)} at the peak"
    rate = "" if best.tokens is None else f", {best.tokens * scope.ranks / best.step_s:,.0f} tokens/s"
    others = len(fitting) - 1
    fastest = f"the fastest of {len(fitting)} that fit" if others else "nothing else fits"
    return f"{seconds(best.step_s)} per step{rate}, bound by {bound}; {of}; {fastest}"


def _rejected(one: Candidate, best: Candidate) -> Rejected:
    if not one.fits:
        room = one.question.room_bytes
        over = one.need.peak - room
        if over > 0:
            why = f"does not fit: {size(over)} too much ({one.need.moment})"
        else:
            request = one.question.offload
            has_disk = request is not None and request.disk_bytes is not None
            why = "does not fit in host memory" + " and on disk" * has_disk
        return Rejected(one.settings, one.need.peak, None, why)
    slower = one.per_token_s / best.per_token_s
    if slower > 1.001:
        per = " per token" if one.tokens != best.tokens else ""
        why = f"{slower:.2f} times as long{per}"
    else:
        why = f"no faster, and {size(max(0, one.need.peak - best.need.peak))} more"
    return Rejected(one.settings, one.need.peak, one.step_s, why)


def _nothing_fits(scope: Scope, candidates: Sequence[Candidate]) -> NothingFits:
    least = min(candidates, key=lambda one: (one.need.peak, one.per_token_s))
    short = least.need.peak - least.question.room_bytes
    rejected = tuple(_rejected(one, one) for one in _sorted(candidates))
    if short <= 0:
        resting = least.need.resting
        assert resting is not None
        places = {"host memory": resting.host_bytes, "disk": resting.disk_bytes}
        needed = " and ".join(f"{size(count)} of {place}" for place, count in places.items() if count)
        or_disk = "or a disk" if scope.disk is None else "or more disk"
        return NothingFits(
            f"nothing fits for {scope.model} on {_ranks(scope)}: {least.settings} fits on the device and "
            f"needs {needed} on each host",
            f"Use more hosts, hosts with more memory, {or_disk}: --disk SIZE, fs.Planning(disk=FOLDER).",
            rejected,
        )
    return NothingFits(
        f"nothing fits for {scope.model} on {_ranks(scope)} of {size(scope.memory_bytes)}: the least, "
        f"{least.settings}, takes {size(least.need.peak)} at the peak ({least.need.moment}), which is "
        f"{size(short)} too much",
        "Use more ranks, larger devices, or fewer tokens per rank.",
        rejected,
    )


def _ranks(scope: Scope) -> str:
    return "1 rank" if scope.ranks == 1 else f"{scope.ranks} ranks"


# ---- candidates


def _candidates(scope: Scope, traced: Traced, strategies: Iterable[str]) -> Iterator[Candidate]:
    for strategy in strategies:
        for recompute in (again for again in scope.recomputes if again in traced.steps):
            for offload in scope.offloads:
                if offload is not None and strategy == "replicate" and scope.ranks > 1:
                    continue  # sharded strategies hold less, and move less
                if offload is None and strategy == "zero3" and scope.ranks == 1 and not scope.strategies:
                    continue  # zero2: what rests on the device is full there
                yield from _of(scope, traced, strategy, recompute, offload)


def _strategies(scope: Scope) -> list[str]:
    names = scope.strategies or ("replicate", "zero2", "zero3", "hybrid")
    if scope.ranks == 1 and not scope.strategies:
        return ["zero2", "zero3"]
    return [name for name in names if name != "hybrid" or scope.levels or scope.strategies]


def _of(scope: Scope, traced: Traced, strategy: str, recompute: Any, how: str | None) -> Iterator[Candidate]:
    free = scope.disk.free_bytes if scope.disk is not None and how == "auto" else None
    request = None if how is None else Request(how, scope.host_bytes, free, scope.machine.host)
    question = scope.question(strategy, recompute, request)
    step = traced.steps[recompute]
    plain = Settings(strategy, recompute, micro_batch=traced.sequences, accumulate=traced.accumulate)
    for wire in scope.wires:
        one = _candidate(traced, step, question, replace(plain, wire=wire), scope.disk)
        if one.need.transfers is not None and not any(vars(one.need.transfers).values()):
            continue  # nothing leaves the device
        yield one
        if how is None and scope.tunes:
            tuned = _tuned(scope, traced, step, question, one)
            yield from tuned if one.fits else _freed(traced, step, question, one)


def _candidate(
    traced: Traced, step: Step, question: Question, settings: Settings, disk: Disk | None = None
) -> Candidate:
    def changed(options: Options) -> Options:
        given: dict[str, Any] = {
            name: _budget(getattr(settings, name))
            for name in ("keep_full", "keep_node")
            if getattr(settings, name) is not None
        }
        if settings.wire != "exact":
            given["precision"] = settings.arguments(options.precision)["precision"]
        return replace(options, **given)

    found = need_of(step, question, settings.strategy, changed)
    if found.resting is not None and question.offload is not None:
        settings = replace(settings, offload=_offload(found, question.offload, disk))
    return Candidate(settings, found, question, traced.tokens)


def _budget(value: int | str) -> int:
    return 2**62 if value == "all" else int(value)


def _offload(one: Need, request: Request, disk: Disk | None) -> str | dict[str, Any]:
    """As `fs.shard` takes it: the device's budget as planned, rounded down."""
    resting = one.resting
    assert resting is not None
    if request.how != "auto":
        return request.how
    device = resting.budget.device
    values: dict[str, Any] = {"device": size_option(device, at_most=True) if device else 0}
    if resting.budget.host is not None:
        values["host"] = host_option(resting)
    if disk is not None and resting.disk_bytes:
        values["disk"] = disk.folder
    return values


def _tuned(
    scope: Scope, traced: Traced, step: Step, question: Question, base: Candidate
) -> Iterator[Candidate]:
    """The same with what is left of the memory: full values, or node copies, stay until backward."""
    strategy = base.settings.strategy
    if strategy not in ("zero3", "hybrid") or base.need.plan is None:
        return
    left = question.room_bytes - base.need.peak
    full = sum(unit.full_bytes for unit in base.need.plan.units)
    if left > 0 and full > 0:
        # Part of it is kept by default already; a tenth less than what is left, for what that changes.
        kept = sum(base.need.plan.units[u].full_bytes for u in base.need.plan.schedule.kept)
        budget = int(kept + 0.9 * left)
        more: int | str = "all" if budget >= full else budget // 2**20 * 2**20
        yield _candidate(traced, step, question, replace(base.settings, keep_full=more))
    if scope.levels and strategy == "zero3":
        yield _candidate(traced, step, question, replace(base.settings, keep_node="all"))
        yield _candidate(traced, step, question, replace(base.settings, keep_node=0))


def _freed(traced: Traced, step: Step, question: Question, base: Candidate) -> Iterator[Candidate]:
    """The same without what the engine keeps by default: it does not know the memory of a step beforehand."""
    if base.settings.strategy not in ("zero3", "hybrid") or base.need.plan is None:
        return
    schedule, settings = base.need.plan.schedule, base.settings
    if schedule.node_copies:
        settings = replace(settings, keep_node=0)
        one = _candidate(traced, step, question, settings)
        yield one
        if one.fits:
            return
    if schedule.kept - {0}:
        yield _candidate(traced, step, question, replace(settings, keep_full=0))
