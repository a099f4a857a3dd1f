"""Which strategies fit, and if none does, what would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fullshard.byte_sizes import size, size_option
from fullshard.errors import OptionError
from fullshard.option_table import CheckpointActivations
from fullshard.options import Options, parse
from fullshard.plan.plan import planned_levels
from fullshard.plan.units import find_units
from fullshard.planning.adapters import Adapters
from fullshard.planning.needs import OPTIMIZERS, Need, Step, in_compute_dtype, need
from fullshard.planning.offloading import Request, placed_need, shortage
from fullshard.planning.subjects import Subject
from fullshard.planning.tracing import trace

STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
SPARE = 0.08  # of the memory: CUDA's context, NCCL's buffers, what the allocator cannot use
_MOST_RANKS = 2**17


@dataclass(frozen=True)
class Question:
    """A request to plan a model: ranks, memory, and how it is to be trained."""

    ranks: int = 8
    memory_bytes: int = 0
    strategies: tuple[str, ...] = STRATEGIES
    precision: str = "bf16"
    optimizer: str = "adamw"
    recompute: CheckpointActivations = False
    node_ranks: int | None = None
    accumulate: bool = False
    on_gpu: bool = True
    spare: float = SPARE
    adapters: Adapters | None = None  # None: every parameter trains
    offload: Request | None = None

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
    advice: tuple[str, ...]

    def fits(self, one: Need) -> bool:
        return self.question.fits(one)

    @property
    def best(self) -> Need | None:
        """Of those that fit, the one that moves for the shortest time, and then the one that sends least."""
        fitting = [one for one in self.needs if self.fits(one)]
        return min(fitting, key=lambda one: (self.moving_s(one), one.sent_bytes, one.peak), default=None)

    def count_flop(self) -> float:
        """Floating point operations of one rank's step; those of a backward are twice those of the forward.

        Of a frozen base they are as many: only the gradients of its inputs are computed.
        """
        model, question = _model(self.subject, self.question)[0], self.question
        compute = question.options("zero3").precision.compute
        with in_compute_dtype(model, compute), torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.subject.run(model)
        passes = (3 if question.adapters is None else 2) + (1 if question.recompute else 0)
        return float(passes * counter.get_total_flops())

    def moving_s(self, one: Need) -> float:
        """Between homes, per step."""
        if one.transfers is None or self.question.offload is None:
            return 0.0
        return one.transfers.seconds(self.question.offload.rates, self.question.host_ranks)


def answer(subject: Subject, question: Question) -> Answer:
    model, count = _model(subject, question)
    step = _step(model, subject, question)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    needs = tuple(_need(step, question, strategy) for strategy in question.strategies)
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
        (),
    )
    return plain if plain.best is not None else replace(plain, advice=tuple(_advice(plain, step)))


def _model(subject: Subject, question: Question) -> tuple[nn.Module, int]:
    """The model on meta, with its adapters, and the number of its parameters without them."""
    model = subject.build()
    if question.adapters is None:
        return model, sum(parameter.numel() for parameter in model.parameters())
    return model, question.adapters.attach(model, question.options("zero3").precision.compute)


def _need(step: Step, question: Question, strategy: str) -> Need:
    sharing, request = question.sharing(strategy), question.offload
    needed = partial(need, step, sharing, question.options(strategy))
    if request is None:
        return needed()
    budget = request.budget(question.spare, question.host_ranks, step.trace.host_bytes)
    return placed_need(request, budget, question.room_bytes, lambda some: needed(budget=some))


def _step(model: nn.Module, subject: Subject, question: Question) -> Step:
    options = question.options("zero3")
    units = find_units(model, options)
    with in_compute_dtype(model, options.precision.compute):
        try:
            traced = trace(model, units, subject.run, question.recompute)
        except Exception as error:  # a forward that reads values, of which there are none
            raise OptionError(
                f"the forward of {subject.name} does not run without values: {type(error).__name__}: {error}",
                "Plan with a size that `fullshard plan --list` shows, or measure it with fullshard simulate.",
            ) from error
    return Step(units, traced, question.optimizer, question.on_gpu, question.accumulate)


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
            f"{size(least.rest)} of each with {least.strategy}. It would need more ranks, or offload."
        )
    else:
        lines.append(
            f"{name} does not train on {have} with these options{away}: {least.strategy} takes "
            f"{size(least.rest)} at rest and {size(least.peak)} at the peak ({least.moment})."
        )
    lines += _offload_line(question, step)
    fewest = _fewest(step, question)
    lines.append(_ranks_line("With these options", fewest, question))
    if not question.recompute:
        again = replace(question, recompute=True)
        other = _step(_model(answer.subject, again)[0], answer.subject, again)
        here = _need(other, again, "zero3")
        if again.fits(here):
            lines.append(f"With --checkpoint-activations zero3 fits here: {size(here.peak)} at the peak.")
        else:
            lines.append(_ranks_line("With --checkpoint-activations", _fewest(other, again), question))
            lines += _offload_line(again, other, " and --checkpoint-activations")
    if fewest is None:
        lines.append("Fewer tokens per rank help: smaller --batch or --sequence.")
    return lines


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
    """What a host must have for these homes, and for inputs of blocks."""
    assert one.resting is not None
    needed = one.resting.host_bytes + question.host_ranks * step.trace.host_bytes
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
    """The smallest number of ranks on which zero3 fits, with offload of entire hosts; None: there is none."""
    each = 1 if question.offload is None else question.host_ranks

    def fits(hosts: int) -> bool:
        inner = None if question.offload is None else each
        other = replace(question, ranks=hosts * each, node_ranks=inner, strategies=("zero3",))
        return other.fits(_need(step, other, "zero3"))

    high = 1
    while not fits(high):
        high *= 2
        if high * each > _MOST_RANKS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * each
