"""Which strategies fit, and if none does, what would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from fullshard.byte_sizes import size
from fullshard.errors import OptionError
from fullshard.option_table import CheckpointActivations
from fullshard.options import Options, parse
from fullshard.plan.units import find_units
from fullshard.tools.planning.adapters import Adapters
from fullshard.tools.planning.needs import OPTIMIZERS, Need, Step, in_compute_dtype, need
from fullshard.tools.planning.subjects import Subject
from fullshard.tools.planning.tracing import trace

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
        if inner is not None and "hybrid" not in self.strategies:
            raise OptionError(
                f"nodes of {inner} ranks matter only to hybrid, which is not among the strategies",
                "Leave out --node-ranks, or add --strategy hybrid.",
            )
        if "hybrid" in self.strategies and inner is None:
            raise OptionError("strategy 'hybrid' shards inside a node", "Give --node-ranks.")
        if inner is not None and (inner < 1 or self.ranks % inner):
            raise OptionError(
                f"{self.ranks} ranks in nodes of {inner}", "Give a number of ranks that nodes divide."
            )

    @property
    def room_bytes(self) -> int:
        return round(self.memory_bytes * (1 - self.spare))

    def options(self, strategy: str) -> Options:
        return parse(
            strategy=strategy,
            precision=self.precision,
            checkpoint_activations=self.recompute,
            on_gpu=self.on_gpu,
        )

    def sharing(self, strategy: str) -> int:
        """Ranks that share one copy."""
        return self.node_ranks or self.ranks if strategy == "hybrid" else self.ranks


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
        return one.peak <= self.question.room_bytes

    @property
    def best(self) -> Need | None:
        """Of those that fit, the one that sends least."""
        fitting = [one for one in self.needs if self.fits(one)]
        return min(fitting, key=lambda one: (one.sent_bytes, one.peak), default=None)


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
    sharing = question.sharing(strategy)
    return need(step, sharing, question.options(strategy), question.ranks // sharing)


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
    lines = []
    if least.rest > question.room_bytes:
        lines.append(
            f"{name} does not train on {have}: parameters, gradients and optimizer state alone take "
            f"{size(least.rest)} of each with {least.strategy}. It would need more ranks, or offload to host "
            "memory or disk, which fullshard does not have yet."
        )
    else:
        lines.append(
            f"{name} does not train on {have} with these options: {least.strategy} takes "
            f"{size(least.rest)} at rest and {size(least.peak)} at the peak ({least.moment})."
        )
    fewest = _fewest(step, question)
    lines.append(_ranks_line("With these options", fewest, question))
    if not question.recompute:
        again = replace(question, recompute=True)
        other = _step(_model(answer.subject, again)[0], answer.subject, again)
        here = _need(other, again, "zero3")
        if here.peak <= question.room_bytes:
            lines.append(f"With --checkpoint-activations zero3 fits here: {size(here.peak)} at the peak.")
        else:
            lines.append(_ranks_line("With --checkpoint-activations", _fewest(other, again), question))
    if fewest is None:
        lines.append("Fewer tokens per rank help: smaller --batch or --sequence.")
    return lines


def _ranks_line(how: str, fewest: int | None, question: Question) -> str:
    room = size(question.memory_bytes)
    if fewest is None:
        return f"{how}, no number of ranks of {room} is enough: what is not sharded does not fit in one."
    return f"{how}, zero3 fits on {fewest} ranks of {room} or more."


def _fewest(step: Step, question: Question) -> int | None:
    """The smallest number of ranks on which zero3 fits; None if there is none."""
    peak = partial(need, step, options=question.options("zero3"))
    high = 1
    while peak(ranks=high).peak > question.room_bytes:
        high *= 2
        if high > _MOST_RANKS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if peak(ranks=middle).peak > question.room_bytes:
            low = middle
        else:
            high = middle
    return high
