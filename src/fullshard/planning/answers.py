"""Which strategies fit, and if none does, what would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import Any
from weakref import WeakKeyDictionary

from fullshard.byte_sizes import size, size_option
from fullshard.errors import FullshardError, OptionError
from fullshard.option_table import CheckpointActivations
from fullshard.options import Options, parse
from fullshard.plan.homes import first_fitting
from fullshard.plan.plan import planned_levels
from fullshard.plan.schedule import Phase
from fullshard.plan.units import Unit, find_units
from fullshard.planning.adapters import Adapters
from fullshard.planning.failures import explained, refuse_frozen
from fullshard.planning.machines import Machine
from fullshard.planning.needs import OPTIMIZERS, Need, Step, in_compute_dtype, need
from fullshard.planning.network import Network
from fullshard.planning.offloading import Request, placed_need, shortage
from fullshard.planning.subjects import Subject
from fullshard.planning.timing import Timer
from fullshard.planning.tracing import Trace, trace
from fullshard.precision import Precision

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
SPARE = 0.08  # of the memory: CUDA's context, NCCL's buffers, what the allocator cannot use
_MOST_RANKS = 2**17

Changed = Callable[[Options], Options]


def _as_it_is(options: Options) -> Options:
    return options


@dataclass(frozen=True)
class Question:
    """A request to plan a model: ranks, memory, and how it is to be trained."""

    ranks: int = 8
    memory_bytes: int = 0
    strategies: tuple[str, ...] = STRATEGIES
    precision: str | Precision = "bf16"
    optimizer: str = "adamw"
    recompute: CheckpointActivations = False
    node_ranks: int | None = None
    accumulate: bool = False
    on_gpu: bool = True
    spare: float = SPARE
    adapters: Adapters | None = None  # None: every parameter trains
    offload: Request | None = None
    machine: Machine | None = None  # with one, how long a step takes
    units: Any = None  # module classes, or None to find them
    rings: bool = False  # flat collectives over nodes are NCCL's rings
    state: str = "exact"  # how optimizer state rests, as fs.shard takes it

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise OptionError(f"{self.ranks} ranks", "Give at least 1.")
        if self.memory_bytes < 2**20:  # a bare 24 is 24 bytes
            raise OptionError(f"{self.memory_bytes} bytes of memory", "Write it as 24GiB or 80GB.")
        if self.optimizer not in OPTIMIZERS:
            raise OptionError(
                f"unknown optimizer {self.optimizer!r}", f"Choose one of {', '.join(OPTIMIZERS)}."
            )
        if not 0 <= self.spare < 1:
            raise OptionError(f"{self.spare:.0%} of the memory to spare", "Give 0 to 99 percent.")
        if self.accumulate and self.offload is not None and self.offload.one_backward:
            adding = [name for name in self.strategies if name not in ("zero1", "replicate")]
            if adding:
                raise OptionError(
                    f"{', '.join(adding)} add micro-batches to gradients at rest, and --one-backward keeps "
                    "those of one backward",
                    "Give --strategy zero1 or replicate, or leave out --accumulate or --one-backward.",
                )
        inner = self.node_ranks
        if "hybrid" in self.strategies and inner is None:
            raise OptionError("strategy 'hybrid' shards inside a node", "Give --node-ranks.")
        if inner is not None and (inner < 1 or self.ranks % inner):
            raise OptionError(
                f"{self.ranks} ranks in nodes of {inner}", "Give a number of ranks that nodes divide."
            )

    @property
    def room_bytes(self) -> int:
        return round(self.memory_bytes * (1 - self.spare))

    @property
    def host_ranks(self) -> int:
        """Ranks that share the memory of a host."""
        return self.node_ranks or self.ranks

    def fits(self, one: Need) -> bool:
        if one.peak > self.room_bytes:
            return False
        return self.offload is None or shortage(one, self.offload) is None

    @property
    def network(self) -> Network | None:
        if self.machine is None:
            return None
        return replace(self.machine.network(self.ranks, self.node_ranks), rings=self.rings)

    def options(self, strategy: str) -> Options:
        return self._shared(strategy)[1]

    def sharing(self, strategy: str) -> int:
        """Ranks that share one copy."""
        return self._shared(strategy)[0]

    def _shared(self, strategy: str) -> tuple[int, Options]:
        options = parse(
            strategy=strategy,
            precision=self.precision,
            checkpoint_activations=self.recompute,
            state=self.state,
            offload=None if self.offload is None else self.offload.option,
            on_gpu=self.on_gpu,
        )
        return planned_levels(options, self.ranks, self.node_ranks or self.ranks)


@dataclass(frozen=True)
class Answer:
    """The memory that each strategy needs; if none fits, `advice` has what would."""

    subject: Subject
    question: Question
    num_parameters: int
    num_trainable: int
    needs: tuple[Need, ...]
    saved_bytes: int  # activations of the blocks
    loss_bytes: int  # in addition, for logits and loss
    returned_bytes: int  # of that, what the model returns and its caller keeps
    host_bytes: int  # inputs of blocks in host memory
    step: Step
    advice: tuple[str, ...]

    def fits(self, one: Need) -> bool:
        return self.question.fits(one)

    @property
    def best(self) -> Need | None:
        """Of those that fit, the fastest; without rates the one that moves for the shortest time, and then
        the one that sends least."""
        fitting = [one for one in self.needs if self.fits(one)]
        return min(fitting, key=self._rank, default=None)

    def _rank(self, one: Need) -> tuple[float, ...]:
        # Steps that take as long to a hundredth differ in nothing that the model knows.
        step_s = 0.0 if one.times is None else float(f"{one.times.step_s:.2g}")
        return step_s, self.moving_s(one), one.sent_bytes, one.peak

    @property
    def flop(self) -> float:
        """Floating point operations of one rank's step."""
        return self.flop_of("forward") + self.flop_of("backward")

    def flop_of(self, phase: Phase) -> float:
        moments = (moment for moment in self.step.trace.moments if moment.call.phase == phase)
        return sum(work.flop for moment in moments for work in moment.work)

    def moving_s(self, one: Need) -> float:
        """Between homes, per step."""
        if one.transfers is None or self.question.offload is None:
            return 0.0
        return one.transfers.seconds(self.question.offload.rates, self.question.host_ranks)


def answer(subject: Subject, question: Question) -> Answer:
    step, count = step_of(subject, question)
    trainable = sum(m.parameter.numel() for u in step.units for m in u.members if m.parameter.requires_grad)
    needs = tuple(need_of(step, question, strategy) for strategy in question.strategies)
    plain = Answer(
        subject,
        question,
        count if question.adapters is None else count + trainable,
        trainable,
        needs,
        step.saved_bytes,
        max(0, step.activation_peak_bytes - step.saved_bytes),
        step.trace.returned_bytes,
        step.trace.host_bytes,
        step,
        (),
    )
    return plain if plain.best is not None else replace(plain, advice=tuple(_advice(plain, step)))


def need_of(step: Step, question: Question, strategy: str, changed: Changed = _as_it_is) -> Need:
    """Of one strategy, with its time if the machine is known. `changed`: options that differ besides."""
    one = _need(step, question, strategy, changed)
    network = question.network
    if question.machine is None or network is None:
        return one
    timer = timer_of(step, question.machine)
    options = replace(changed(question.options(strategy)), on_gpu=step.on_gpu)
    assert one.plan is not None
    return replace(one, times=timer.times(one.plan, options, question.machine, network))


_TIMERS: WeakKeyDictionary[Trace, dict[Machine, Timer]] = WeakKeyDictionary()


def timer_of(step: Step, machine: Machine) -> Timer:
    """Kernels are timed once for a trace and a machine."""
    known = _TIMERS.setdefault(step.trace, {})
    if machine not in known:
        known[machine] = Timer(step, machine.device)
    timer = known[machine]
    return timer if timer.step is step else timer.of(step)


def _need(step: Step, question: Question, strategy: str, changed: Changed = _as_it_is) -> Need:
    sharing, request = question.sharing(strategy), question.offload
    needed = partial(need, step, sharing, changed(question.options(strategy)))
    if request is None:
        return needed()
    budget = request.budget(question.spare, question.host_ranks, step.trace.host_bytes)
    return placed_need(request, budget, question.room_bytes, lambda some: needed(budget=some))


def step_of(subject: Subject, question: Question) -> tuple[Step, int]:
    """One traced step of the model, with its adapters, and how many parameters it has without them."""
    units, traced, count = _traced(
        subject,
        question.precision,
        question.recompute,
        question.adapters,
        question.on_gpu,
        question.units,
    )
    return Step(units, traced, question.optimizer, question.on_gpu, question.accumulate), count


@lru_cache(maxsize=32)
def _traced(
    subject: Subject,
    precision: str | Precision,
    recompute: CheckpointActivations,
    adapters: Adapters | None,
    on_gpu: bool,
    units: Any,
) -> tuple[list[Unit], Trace, int]:
    """What does not depend on ranks, strategy and optimizer: traced once, however often it is asked for."""
    options = parse(precision=precision, checkpoint_activations=recompute, units=units)
    model = subject.build()
    count = sum(parameter.numel() for parameter in model.parameters())
    if adapters is not None:
        adapters.attach(model, options.precision.compute)
    refuse_frozen(subject.name, model, subject.source)
    found = find_units(model, replace(options, on_gpu=on_gpu))
    with in_compute_dtype(model, options.precision.compute):
        try:
            traced = trace(model, found, subject.run, recompute)
        except FullshardError:
            raise
        except Exception as error:  # of a forward that is not ours
            raise explained(subject.name, error, subject.source) from error
    return found, traced, count


def _advice(answer: Answer, step: Step) -> list[str]:
    """What would fit."""
    question, name = answer.question, answer.subject.name
    least = min(answer.needs, key=lambda one: one.peak)
    have = f"{question.ranks} ranks of {size(question.memory_bytes)}"
    if least.peak <= question.room_bytes:
        return _host_advice(answer, step)
    lines = []
    away = "" if question.offload is None else f", --offload {question.offload.how}"
    if least.rest > question.room_bytes:
        lines.append(
            f"{name} does not train on {have}{away}: parameters, gradients and optimizer state alone take "
            f"{size(least.rest)} of each with {least.strategy}. It would need {_less_each(least)}, or "
            "offload."
        )
    else:
        lines.append(
            f"{name} does not train on {have} with these options{away}: {least.strategy} takes "
            f"{size(least.rest)} at rest and {size(least.peak)} at the peak ({least.moment})."
        )
    lines += _kept_line(answer, step)
    lines += _slabs_line(question, step)
    lines += _offload_line(question, step)
    fewest = _fewest(step, question)
    one_backward = question.offload is not None and question.offload.one_backward
    how = "Without --one-backward, which is for one rank" if one_backward else "With these options"
    lines.append(_ranks_line(how, fewest, question))
    if not question.recompute:
        again = replace(question, recompute=True)
        other, _ = step_of(answer.subject, again)
        here = _need(other, again, "zero3")
        if again.fits(here):
            lines.append(f"With --checkpoint-activations zero3 fits here: {size(here.peak)} at the peak.")
        else:
            lines.append(_ranks_line("With --checkpoint-activations", _fewest(other, again), question))
            lines += _offload_line(again, other, " and --checkpoint-activations")
    if fewest is None:
        lines.append("Fewer tokens per rank help: smaller --batch or --sequence.")
    return lines


def _less_each(one: Need) -> str:
    """What divides the values at rest further: with some strategies more ranks do not."""
    return "a strategy that shards more" if one.strategy in ("replicate", "hybrid") else "more ranks"


def _kept_line(answer: Answer, step: Step) -> list[str]:
    """Whether a strategy fits without what the engine keeps from forward to backward by default."""
    question = answer.question
    for one in sorted(answer.needs, key=lambda one: one.peak):
        for given in _kept_by_default(one):
            freed = _need(step, question, one.strategy, partial(replace, **given))
            if question.fits(freed):
                options = ", ".join(f"{name}={value}" for name, value in given.items())
                return [
                    f"With fs.shard(model, {options}) {one.strategy} fits here: {size(freed.peak)} at the "
                    "peak. --choose considers it."
                ]
    return []


def _slabs_line(question: Question, step: Step) -> list[str]:
    """Whether a strategy fits where chunks of a step have no more memory than they need."""
    request = question.offload
    if request is None or request.slabs is None:
        return []
    without = replace(question, offload=replace(request, slabs=None))
    for one in (_need(step, without, strategy) for strategy in question.strategies):
        if without.fits(one):
            return [f"Without --slabs {one.strategy} fits here: {size(one.peak)} at the peak."]
    return []


def _kept_by_default(one: Need) -> list[dict[str, Any]]:
    """Options that keep less, the cheapest first."""
    if one.plan is None or one.strategy not in ("zero3", "hybrid"):
        return []
    copies: dict[str, Any] = {"keep_node": 0} if one.plan.schedule.node_copies else {}
    full = [{**copies, "keep_full": 0}] if one.plan.schedule.kept - {0} else []
    return [copies, *full] if copies else full


def _offload_line(question: Question, step: Step, more: str = "") -> list[str]:
    """Whether offload would be enough, where it was not requested."""
    if question.offload is not None and question.offload.how != "optimizer":
        return []
    one = _need(step, replace(question, offload=Request("host")), "zero3")
    if one.peak > question.room_bytes or one.resting is None:
        return []
    host = size(_host_memory(one, question, step))
    return [
        f"With --offload host{more} zero3 fits: {size(one.peak)} at the peak, and {host} of host memory for "
        f"{_ranks_of_a_host(question)}."
    ]


def _host_memory(one: Need, question: Question, step: Step) -> int:
    """What a host must have for these homes, for inputs of blocks, and for buffers of a disk."""
    assert one.resting is not None
    beside = step.trace.host_bytes + one.resting.disk_buffer_bytes
    needed = one.resting.host_bytes + question.host_ranks * beside
    return ceil(needed / (1 - question.spare))


def _ranks_of_a_host(question: Question) -> str:
    return f"the {question.host_ranks} ranks of a host" if question.host_ranks > 1 else "the rank"


def _host_advice(answer: Answer, step: Step) -> list[str]:
    """It fits on the device, but not in the memory of its host."""
    question, request = answer.question, answer.question.offload
    assert request is not None
    one = next((one for one in answer.needs if one.strategy == "zero3"), answer.needs[-1])
    assert one.resting is not None
    missing, where = shortage(one, request), _ranks_of_a_host(question)
    if missing == "disk":
        needed = size_option(one.resting.disk_bytes)
        lines = [f"With {one.strategy}, {where} would need --disk {needed}: every value has two slots there."]
    else:
        needed = size_option(_host_memory(one, question, step))
        if request.disk_bytes is not None and one.resting.disk_bytes > request.disk_bytes:
            needed += f" and --disk {size_option(one.resting.disk_bytes)}"
        lines = [f"With {one.strategy}, {where} would need --host-memory {needed}."]
    if request.disk_bytes is None:
        with_disk = replace(question, offload=replace(request, disk_bytes=2**60))
        other = _need(step, with_disk, one.strategy)
        if with_disk.fits(other) and other.resting is not None:
            disk = size_option(other.resting.disk_bytes)
            lines.append(f"With --disk {disk}, what the host cannot hold would rest there.")
    fewest = _fewest(step, question)
    if fewest is not None:
        lines.append(f"With hosts like this one, zero3 fits on {fewest} ranks or more.")
    return lines


def _ranks_line(how: str, fewest: int | None, question: Question) -> str:
    room = size(question.memory_bytes)
    if fewest is None:
        return f"{how}, no number of ranks of {room} is enough: what is not sharded does not fit in one."
    return f"{how}, zero3 fits on {fewest} ranks of {room} or more."


def _fewest(step: Step, question: Question) -> int | None:
    """The smallest number of ranks on which zero3 fits, of entire nodes or hosts; None: there is none.

    As the engine plans it by default, like the table: on several nodes with copies of their shares.
    """
    inner = question.node_ranks if question.offload is None else question.host_ranks
    each = inner or 1
    if question.offload is not None:  # gradients of several ranks are sums
        question = replace(question, offload=replace(question.offload, one_backward=False))

    def fits(nodes: int) -> bool:
        other = replace(question, ranks=nodes * each, node_ranks=inner, strategies=("zero3",))
        return other.fits(_need(step, other, "zero3"))

    nodes = first_fitting(fits, _MOST_RANKS // each)
    return None if nodes is None else nodes * each
