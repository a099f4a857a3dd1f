"""What a planned step means for a run: tokens per second, days, and the size and time of its checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fullshard.byte_sizes import size
from fullshard.planning.answers import Answer
from fullshard.planning.needs import OPTIMIZERS, Need
from fullshard.planning.settings import seconds

_STATE_BYTES = 4


@dataclass(frozen=True)
class Run:
    """Of all ranks together."""

    step_s: float
    tokens_per_step: int | None
    flop: float  # of one rank's step
    ranks: int
    checkpoint_bytes: int
    checkpoint_s: float
    train_tokens: float | None

    @property
    def tokens_s(self) -> float | None:
        return None if self.tokens_per_step is None else self.tokens_per_step / self.step_s

    @property
    def tflop_s(self) -> float:
        """That each rank reaches."""
        return self.flop / self.step_s / 1e12

    @property
    def train_s(self) -> float | None:
        if self.train_tokens is None or self.tokens_s is None:
            return None
        return self.train_tokens / self.tokens_s

    @property
    def lines(self) -> list[str]:
        lines = []
        if self.tokens_s is not None:
            lines.append(
                f"{self.tokens_s:,.0f} tokens/s on {self.ranks} rank{'s' * (self.ranks > 1)}, "
                f"{self.tflop_s:.0f} TFLOP/s each."
            )
        if self.train_s is not None and self.train_tokens is not None:
            lines.append(f"{self.train_tokens:.3g} tokens take {_days(self.train_s)}.")
        lines.append(
            f"A checkpoint with optimizer state has {size(self.checkpoint_bytes)}, and takes "
            f"{seconds(self.checkpoint_s)} to write if every host writes its part at the rate of its disk."
        )
        return lines

    def as_values(self) -> dict[str, Any]:
        more = {"tokens_s": self.tokens_s, "tflop_s": self.tflop_s, "train_s": self.train_s}
        return asdict(self) | more


def _days(duration_s: float) -> str:
    if duration_s < 3600:
        return f"{duration_s / 60:.1f} minutes"
    return f"{duration_s / 86400:.1f} days" if duration_s >= 86400 else f"{duration_s / 3600:.1f} hours"


def run_of(answer: Answer, one: Need, train_tokens: float | None, step_s: float | None = None) -> Run:
    question = answer.question
    assert question.machine is not None
    assert one.times is not None
    kept, _ = OPTIMIZERS[question.optimizer]
    total = checkpoint_bytes(answer.num_parameters, answer.num_trainable, kept)
    hosts = max(1, question.ranks // question.host_ranks)
    tokens = answer.subject.tokens
    return Run(
        step_s or one.times.step_s,
        None if tokens is None else tokens * question.ranks,
        answer.flop,
        question.ranks,
        total,
        total / hosts / question.machine.host.disk_write,
        train_tokens,
    )


def checkpoint_bytes(parameters: int, trainable: int, states: int) -> int:
    """fp32 masters of what trains, what is frozen in 2 bytes, and the optimizer's state."""
    return 4 * trainable + 2 * (parameters - trainable) + _STATE_BYTES * states * trainable
