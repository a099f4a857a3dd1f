"""One rank's training: as in one process, but for `fs.shard`, `fs.save` and the figures that ranks exchange.

Every rank works on its part of each global batch; losses and gradients are those of the global batch, for any
number of ranks: a rank's loss is a sum over its targets, divided by the number of targets of all ranks.
"""

from __future__ import annotations

import contextlib
import math
import struct
import time
import warnings
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import api
from fullshard.checkpoint.load import Loaded, load
from fullshard.checkpoint.save import save
from fullshard.checkpoint.saving.background import Saving
from fullshard.comm.groups import rank_count
from fullshard.data import Batches
from fullshard.engine.runtime import runtime_of
from fullshard.errors import CheckpointError, DamagedCheckpoint, GradientError, Uninitialised
from fullshard.policy import NO_INTEGRATION
from fullshard.shares import equal_parts
from fullshard.training import holdings, models
from fullshard.training.folder import RunFolder
from fullshard.training.models import Subject
from fullshard.training.optimizing import learning_rate, make_adamw
from fullshard.training.settings import Settings, micro_batches
from fullshard.training.stopping import StopRequest
from fullshard.training.tokens import IGNORED, Sequences


class Watcher:
    """Called on rank 0 during a run. This one does nothing, for the other ranks."""

    def step(self, line: dict[str, Any], shown: bool) -> None:
        """The figures of one step; `shown` for the last of several."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """A validation loss."""


@dataclass(frozen=True)
class Job:
    """What one rank trains, on which data, and where."""

    settings: Settings
    subject: Subject
    train: Sequences
    validation: Sequences | None
    folder: RunFolder
    device: torch.device


@dataclass
class Pending:
    """Steps whose figures were not yet exchanged between ranks."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


class Run:
    """A sharded model, its optimizer, and where its training stands."""

    def __init__(self, job: Job) -> None:
        settings, self.job = job.settings, job
        self.notes: list[str] = []  # for the user, about how the run is done
        self.model = self._sharded()
        self.notes += self._without_validation()
        self.comm = runtime_of(self.model).comm
        self.rank, self.ranks = self.comm.members.index(self.comm.world_rank), self.comm.all_ranks
        self.optimizer = make_adamw(self.model, settings.training, job.device)
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        fp16 = settings.sharding.precision == "fp16"
        self._scaler = torch.amp.GradScaler(job.device.type, enabled=fp16)
        self._batches = Batches(
            len(job.train), settings.training.sequences, seed=settings.seed, rank=self.rank, ranks=self.ranks
        )
        self._saving: Saving | None = None
        self._pending = Pending()
        self._clock_s, self._figures_step = 0.0, 0
        self.saved: Path | None = None
        self.done = 0  # steps
        # Every rank draws another dropout; a resume restores the generators.
        torch.manual_seed(settings.seed + 1 + self.rank)

    # ---- before and after

    def _sharded(self) -> nn.Module:
        """Initialised unit by unit, alike on any number of ranks: no host ever holds the unsharded model."""
        subject, settings = self.job.subject, self.job.settings
        if all(t.is_meta for t in (*subject.model.parameters(), *subject.model.buffers())):
            with contextlib.suppress(Uninitialised):
                return self._shard(subject.model)
        self.notes.append(
            f"{subject.name} cannot be built unit by unit: each rank held all of it on its host for a moment."
        )
        torch.manual_seed(settings.seed)
        return self._shard(models.on_host(settings))

    def _shard(self, model: nn.Module) -> nn.Module:
        settings = self.job.settings
        torch.manual_seed(settings.seed)
        return api.shard_with(
            NO_INTEGRATION,
            model,
            strategy=settings.sharding.strategy,
            precision=settings.sharding.precision,
            checkpoint_activations=settings.sharding.checkpoint_activations,
            offload=settings.sharding.offload,
            state=settings.sharding.state,
            materialize=self.job.subject.materialize,
            device=self.job.device,
            plan=self._planning() if settings.sharding.strategy == "auto" else None,
        )

    def _planning(self) -> dict[str, Any]:
        """For one micro-batch, as `Subject.logits` gives it to the model."""
        settings, ranks = self.job.settings, rank_count()
        _, size = micro_batches(settings, ranks)
        tokens = torch.zeros(size, settings.training.sequence_length, dtype=torch.long)
        own = self.job.subject.shape is not None
        batch: Any = tokens if own else {"input_ids": tokens, "use_cache": False}
        return {"batch": batch}

    def begin(self) -> Path | None:
        """Load the newest checkpoint of the run, and return it; or the initial weights, and return None."""
        newest, extra = self._resumed()
        if newest is None:
            if self.job.subject.weights is not None:
                self._load(self.job.subject.weights)
            return None
        if not isinstance(extra.get("step"), int) or "scaler" not in extra:
            raise CheckpointError(
                f"{str(newest)!r} was not saved by `fullshard train`", "Name another output, or remove it."
            )
        self.done, self.saved = extra["step"], newest
        self._scaler.load_state_dict(extra["scaler"])
        return newest

    def _resumed(self) -> tuple[Path | None, Loaded]:
        """The newest checkpoint that is right, loaded. A load raises on all ranks before anything changes."""
        passed_over: list[str] = []
        for newest in self.job.folder.newest_first():
            try:
                extra = self._load(newest, self.optimizer)
            except DamagedCheckpoint as error:
                passed_over.append(f"{str(newest)!r} is damaged and was passed over: {error.what}.")
                continue
            self.notes += passed_over
            return newest, extra
        if passed_over:
            raise DamagedCheckpoint(
                f"no checkpoint of the run is right: {' '.join(passed_over)}",
                "Restore one from a copy; or move them elsewhere, and the same command starts again.",
            )
        return None, Loaded()

    def _load(self, path: Path, optimizer: torch.optim.Optimizer | None = None) -> Loaded:
        """Notes of the load become lines of the run and of its report, instead of Python warnings."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = load(path, self.model, optimizer)
        self.notes += [f"Loading {str(path)!r}: {note}." for note in loaded.notes]
        return loaded

    def save(self, background: bool) -> None:
        """A checkpoint after the steps so far, in the background if requested; the next one waits for it."""
        path = self.job.folder.checkpoint(self.done)
        extra = {"step": self.done, "scaler": self._scaler.state_dict()}
        keep = self.job.settings.checkpoints.keep_last
        self._saving = save(
            path, self.model, self.optimizer, extra=extra, keep_last=keep, background=background
        )
        self.saved = path

    def save_last(self) -> None:
        """At the end of a run, however it ends: all steps so far are on disk."""
        if self.saved != self.job.folder.checkpoint(self.done):
            self.save(background=False)
        if self._saving is not None:
            self._saving.wait()

    # ---- steps

    def train(self, watcher: Watcher, stop: StopRequest) -> int:
        """Train to the last step; returns what stopped it, or 0."""
        settings = self.job.settings
        self.model.train()
        if self.done == 0:
            self._evaluate(watcher)
        self._clock_s, self._figures_step = time.monotonic(), self.done
        while self.done < settings.training.steps:
            self._step(self.done)
            self.done += 1
            last = self.done == settings.training.steps
            evaluates = last or _due(self.done, settings.evaluation.every)
            saves = not last and _due(self.done, settings.checkpoints.every)
            if not (evaluates or saves or _due(self.done, settings.logging.every)):
                continue
            stopped = self._exchange_figures(watcher, stop.requested())
            if evaluates:
                self._evaluate(watcher)
            if stopped:
                return stopped
            if saves:
                self.save(background=True)
        return 0

    def _step(self, step: int) -> None:
        training = self.job.settings.training
        # Cleared at the start, so that the last step's gradients still count in what a rank holds.
        self.optimizer.zero_grad()
        rate = learning_rate(step, training)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        indices = self._batches.indices(step)
        num_targets = max(1, self.job.train.count_targets(indices))
        mine = indices[slice(*equal_parts(len(indices), self.ranks, self.rank))]
        parts, _ = micro_batches(self.job.settings, self.ranks)
        loss = torch.zeros((), device=self.job.device)
        for part in range(parts):
            some = mine[part * len(mine) // parts : (part + 1) * len(mine) // parts]
            waits = part < parts - 1
            with api.accumulate(self.model) if waits else contextlib.nullcontext():
                # A rank that has none left takes part with a sequence whose targets are ignored.
                total = self._summed_loss(*self._padded(self.job.train, some, max(1, len(some))))
                # Gradients are averaged over ranks; their mean is to be that over the targets of all.
                self._scaler.scale(total * (self.ranks / num_targets)).backward()  # type: ignore[no-untyped-call]
            loss += total.detach() / num_targets
        self._scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(
            self._parameters, math.inf if training.clip is None else training.clip
        )
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self._pending.lines.append({"kind": "train", "step": step + 1, "learning_rate": rate})
        self._pending.losses.append(loss)
        self._pending.norms.append(norm.detach())

    def _summed_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs = inputs.to(self.job.device, non_blocking=True)
        logits = self.job.subject.logits(self.model, inputs)
        targets = targets.to(self.job.device, non_blocking=True)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def _exchange_figures(self, watcher: Watcher, stop: int) -> int:
        """Sum the figures of recent steps over ranks, and agree on whether to stop after this step."""
        pending, self._pending = self._pending, Pending()
        mine = torch.stack(pending.losses).double().tolist()
        norms = torch.stack(pending.norms).tolist()
        rows = self.comm.all_gather_ints([stop, holdings.memory_now(self.job.device), *map(_as_bits, mine)])
        now_s = time.monotonic()
        training = self.job.settings.training
        tokens_per_step = training.sequences * training.sequence_length
        rate = (self.done - self._figures_step) * tokens_per_step / max(now_s - self._clock_s, 1e-9)
        for index, (line, norm) in enumerate(zip(pending.lines, norms, strict=True)):
            line["loss"] = sum(_from_bits(int(bits)) for bits in rows[:, 2 + index])
            # JSON has no infinity; with fp16 the first norms may be infinite, and such steps are skipped.
            line |= {
                "gradient_norm": norm if math.isfinite(norm) else None,
                "tokens": line["step"] * tokens_per_step,
                "tokens_per_s": rate,
            }
            line["memory"] = [int(held) for held in rows[:, 1]]
            self._refuse_not_finite(line)
            watcher.step(line, shown=index == len(norms) - 1)
        self._clock_s, self._figures_step = time.monotonic(), self.done
        return next((int(a) for a in rows[:, 0] if a), 0)

    def _refuse_not_finite(self, line: dict[str, Any]) -> None:
        finite = {"loss": math.isfinite(line["loss"]), "gradient norm": line["gradient_norm"] is not None}
        if finite["loss"] and (finite["gradient norm"] or self._scaler.is_enabled()):
            return
        what = f"loss of step {line['step']} is {line['loss']}"
        if finite["loss"]:
            what = f"gradient norm of step {line['step']} is not finite"
        saved = (
            "no checkpoint was saved before" if self.saved is None else f"{str(self.saved)!r} is from before"
        )
        raise GradientError(
            f"the {what}; {saved}",
            "Take a smaller training.learning_rate or a longer training.warmup_steps, and another output.",
        )

    # ---- validation

    def _without_validation(self) -> list[str]:
        """Why there is no validation loss where one is expected."""
        data, settings = self.job.validation, self.job.settings
        if not settings.evaluation.every or (data is None and not settings.data.validation_fraction):
            return []
        if data is None:
            share = f"{settings.data.validation_fraction:.3g} of {len(self.job.train)} sequences"
            return [
                f"No validation loss: {share} is less than one. Give more text, data.validation, or a larger "
                "data.validation_fraction."
            ]
        if not data.count_targets(self._validated(data)):
            return ["No validation loss: the sequences for it are prompts, without anything to be learned."]
        return []

    def _validated(self, data: Sequences) -> list[int]:
        """Indices of the sequences for the validation loss, spread evenly over `data`."""
        count = min(len(data), self.job.settings.evaluation.sequences)
        return [index * len(data) // count for index in range(count)]

    @torch.no_grad()
    def _evaluate(self, watcher: Watcher) -> None:
        """The mean loss over the validation sequences. All ranks run the same number of forwards; the last is
        padded with sequences whose targets are ignored."""
        data, settings = self.job.validation, self.job.settings
        if data is None or not settings.evaluation.every:
            return
        begun_s = time.monotonic()
        chosen = self._validated(data)
        _, size = micro_batches(settings, self.ranks)
        total, count = torch.zeros((), dtype=torch.float64, device=self.job.device), 0
        self.model.eval()
        for first in range(0, len(chosen), size * self.ranks):
            mine = range(first + self.rank * size, first + (self.rank + 1) * size)
            inputs, targets = self._padded(data, [chosen[i] for i in mine if i < len(chosen)], size)
            total += self._summed_loss(inputs, targets).double()
            count += int((targets != IGNORED).sum())
        self.model.train()
        rows = self.comm.all_gather_ints([_as_bits(float(total)), count])
        targets_of_all = int(rows[:, 1].sum())
        if targets_of_all:  # prompts alone have no loss; 0 would look like a perfect one
            mean = sum(_from_bits(int(bits)) for bits in rows[:, 0]) / targets_of_all
            watcher.evaluated(
                {"kind": "validation", "step": self.done, "loss": mean, "sequences": len(chosen)}
            )
        self._clock_s += time.monotonic() - begun_s  # not counted in the speed of training

    def _padded(self, data: Sequences, indices: SequenceOf[int], size: int) -> tuple[Tensor, Tensor]:
        missing = size - len(indices)
        inputs, targets = data.batch([*indices, *[0] * missing])
        if missing:
            targets[-missing:] = IGNORED
        return inputs, targets

    # ---- at the end

    def gather_holdings(self) -> tuple[list[dict[str, int]], list[int]]:
        """The bytes that every rank holds at rest, and the peak of its memory."""
        mine = holdings.at_rest(self.model, self.optimizer)
        sizes = [mine.parameters, mine.gradients, mine.optimizer_state]
        rows = self.comm.all_gather_ints([*sizes, holdings.memory_peak(self.job.device)]).tolist()
        return [holdings.Holdings(*row[:3]).as_dict() for row in rows], [row[3] for row in rows]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _as_bits(value: float) -> int:
    """A float as the integer that ranks exchange."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _from_bits(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
