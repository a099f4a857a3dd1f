"""What an examination can find, each with what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fullshard.errors import unit_label

# By name: what it means, and the remedy.
KINDS: dict[str, tuple[str, str]] = {
    "same-data-on-ranks": (
        "ranks read the same data",
        "Give each rank its own part: fs.Batches, a DistributedSampler, or data[rank::ranks].",
    ),
    "loss-is-a-sum": (
        "the loss is a sum, where ranks are averaged",
        "Use the mean over the batch; a sum on several ranks gives gradients that depend on their number.",
    ),
    "mean-over-uneven-counts": (
        "the loss is a mean over a different number of elements on each rank, or in each micro-batch",
        "Divide sums by the count over all ranks and micro-batches, times the number of ranks.",
    ),
    "same-random-numbers-on-ranks": (
        "ranks draw the same random numbers",
        "Seed each rank differently after fs.shard: torch.manual_seed(seed + rank).",
    ),
    "batchnorm-statistics-differ": (
        "statistics of BatchNorm differ between ranks",
        "Convert with nn.SyncBatchNorm.convert_sync_batchnorm on GPUs, freeze the statistics, or use another "
        "normalisation: a checkpoint has the first rank's.",
    ),
    "buffer-differs-between-ranks": (
        "a buffer differs between ranks",
        "Average or broadcast it after its update: a checkpoint has the first rank's values.",
    ),
    "parameter-not-synchronised": (
        "a parameter is trained and not synchronised",
        "Make it part of the model that fs.shard gets, and leave it out of ignore=.",
    ),
    "parameter-in-no-optimizer": (
        "a parameter gets gradients, and no optimizer holds it",
        "Give the optimizer all of model.parameters(), or freeze it with requires_grad_(False).",
    ),
    "frozen-parameter-changed": (
        "a parameter with requires_grad=False has changed",
        "Leave it out of the optimizer, and do not write into it; or let it train. If it is meant, as for a "
        "target network: --accept frozen-parameter-changed.",
    ),
    "tied-weights-untied": (
        "weights that were tied are two parameters",
        "Tie them again before fs.shard: head.weight = embedding.weight.",
    ),
    "learning-rate-scaled-twice": (
        "the learning rate grows with the number of ranks twice",
        "Scale it once for the larger global batch, in the optimizer or in the schedule.",
    ),
    "learning-rate-scaled": (
        "the learning rate depends on the number of ranks, and the global batch does not follow it",
        "Use the learning rate of one process on the same global batch.",
    ),
    "loss-scaled-by-ranks": (
        "the loss is multiplied, or divided, by the number of ranks",
        "Leave the factor out: gradients are averaged over ranks already.",
    ),
    "accumulation-without-division": (
        "gradients of micro-batches are added up without a division by their number",
        "Divide each micro-batch's loss by the number of micro-batches per step.",
    ),
    "clipping-before-unscaling": (
        "gradients are clipped while they are scaled",
        "Call scaler.unscale_(optimizer) before clipping.",
    ),
    "wrong-backward-under-recomputation": (
        "gradients change when activations are recomputed",
        "Keep everything that backward needs in ctx.save_for_backward, and nothing in globals or in the "
        "module: a recomputed forward runs twice.",
    ),
    "non-deterministic": (
        "the same inputs and random numbers give other values the second time",
        "Use torch.use_deterministic_algorithms(True), and torch's generators for what is random.",
    ),
    "kept-value-edited": (
        "a value that is kept for later was edited in place",
        "Write to a copy, without .data; edit parameters between steps.",
    ),
    "wrong-resume": (
        "a resumed run does not continue where it stopped",
        "Restore all that was saved: step, scheduler, data order (fs.Batches) and optimizer.",
    ),
    "differs-from-one-process": (
        "one process on the same global batch gets other gradients",
        "Compare the loss of a rank with the loss of the global batch.",
    ),
    "refused": ("fullshard refuses what the script does", "The error names what to change."),
    "numbers-differ": (
        "the sharded run differs from the unsharded copy",
        "Please report it with `fullshard doctor --report`.",
    ),
}


@dataclass(frozen=True)
class Finding:
    name: str
    detail: str
    unit: str | None = None
    tensor: str | None = None
    step: int | None = None
    apart: float | None = None
    allowed: float | None = None

    @property
    def meaning(self) -> str:
        return KINDS[self.name][0]

    @property
    def remedy(self) -> str:
        return KINDS[self.name][1]

    def text(self) -> str:
        where = [] if self.step is None else [f"step {self.step}"]
        where += [] if self.unit is None else [unit_label(self.unit)]
        place = f" ({', '.join(where)})" if where else ""
        return f"{self.name}{place}: {self.meaning}: {self.detail}. {self.remedy}"

    def data(self) -> dict[str, Any]:
        return asdict(self) | {"meaning": self.meaning, "remedy": self.remedy}
