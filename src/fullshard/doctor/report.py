"""The result of an examination: text, JSON, and what a page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fullshard.doctor.findings import Finding
from fullshard.doctor.judges import Event, Examination, judged, of_kind
from fullshard.errors import FullshardError, StateError, unit_label

STAGES = ("output", "buffer", "gradient", "norm", "parameter")


class CheckFailed(FullshardError):
    """fs.check found that a training is not right."""


@dataclass(frozen=True)
class Cell:
    """The largest difference of one unit, stage and step, and what is allowed."""

    step: int
    stage: str
    unit: str
    tensor: str
    apart: float
    allowed: float

    @property
    def share(self) -> float:
        """Of what is allowed."""
        return self.apart / self.allowed if self.allowed else (float("inf") if self.apart else 0.0)


@dataclass(frozen=True)
class Report:
    subject: str
    ranks: int
    steps: int
    findings: tuple[Finding, ...]
    allowed: tuple[Finding, ...]  # that the user accepts
    cells: tuple[Cell, ...]
    comparisons: int
    losses: tuple[tuple[float, ...], ...]  # by step, of each rank
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def raise_if_different(self) -> None:
        if self.findings:
            first = self.findings[0]
            raise CheckFailed(f"{first.name}: {first.meaning}: {first.detail}", first.remedy)

    def text(self) -> str:
        largest = max(self.cells, key=lambda cell: cell.share, default=None)
        lines = [f"{self.subject}: {self.ranks} ranks, {self.steps} steps, {self.comparisons} comparisons"]
        if largest is not None:
            lines.append(
                f"largest difference: {largest.apart:.3g} ({largest.share:.2g} of what is allowed), "
                f"{largest.stage} {largest.tensor or 'of the model'!r} of {unit_label(largest.unit)}, "
                f"step {largest.step}"
            )
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"accepted: {finding.text()}" for finding in self.allowed]
        lines += [f"FOUND {finding.text()}" for finding in self.findings]
        if self.same:
            lines.append("the same as without sharding; nothing was found")
        return "\n".join(lines)

    def data(self) -> dict[str, Any]:
        """Plain values; numbers that JSON does not have are texts: 'nan', 'inf'."""
        data: dict[str, Any] = _for_json(self._data())
        return data

    def _data(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "same": self.same,
            "ranks": self.ranks,
            "steps": self.steps,
            "comparisons": self.comparisons,
            "findings": [finding.data() for finding in self.findings],
            "accepted": [finding.data() for finding in self.allowed],
            "losses": [list(step) for step in self.losses],
            "differences": [
                {
                    "step": cell.step,
                    "stage": cell.stage,
                    "unit": cell.unit,
                    "tensor": cell.tensor,
                    "apart": cell.apart,
                    "allowed": cell.allowed,
                }
                for cell in self.cells
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return self.text()


def _for_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _for_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(one) for one in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def reported(
    subject: str, examined: Examination, accepted: Sequence[str] = (), notes: Sequence[str] = ()
) -> Report:
    """Judge an examination. `accepted` are names of findings that do not count."""
    run = examined.sharded
    ended = any(of_kind(events, "refused") for events in run)
    if not ended and not any(of_kind(events, "sharded") for events in run):
        raise StateError(
            f"{subject} never calls fs.shard", "Shard its model: model = fs.shard(model), and run it again."
        )
    if not ended and not any(of_kind(events, "step") for events in run):
        raise StateError(
            f"{subject} never takes an optimizer step on the sharded model",
            "Nothing was trained that could be compared: run the part that trains.",
        )
    found = judged(examined)
    compared = [event for events in run for event in of_kind(events, "compared")]
    why = [event["why"] for event in of_kind(run[0], "not compared")]
    steps = max((event["step"] + 1 for event in of_kind(run[0], "step")), default=0)
    return Report(
        subject,
        len(run),
        steps,
        tuple(one for one in found if one.name not in accepted),
        tuple(one for one in found if one.name in accepted),
        tuple(_cells(compared)),
        len(compared),
        tuple(_losses(run, step) for step in range(steps)),
        (*notes, *_not_finite(run), *(f"not compared: {one}" for one in dict.fromkeys(why))),
    )


def _not_finite(run: Sequence[Sequence[Event]]) -> list[str]:
    """Where the loss is no number any more: comparisons say little from there on."""
    found = [
        (event["step"], rank, event["loss"])
        for rank, events in enumerate(run)
        for event in of_kind(events, "backward")
        if event["loss"] is not None and not isfinite(event["loss"])
    ]
    if not found:
        return []
    step, rank, loss = min(found, key=lambda one: one[:2])
    return [f"the loss is not finite: {loss} on rank {rank} in step {step}; what follows says little"]


def _losses(run: Sequence[Sequence[Event]], step: int) -> tuple[float, ...]:
    found = [
        [e["loss"] for e in of_kind(events, "backward") if e["step"] == step and e["loss"] is not None]
        for events in run
    ]
    return tuple(losses[-1] for losses in found if losses)


def _cells(compared: Sequence[Event]) -> list[Cell]:
    cells: dict[tuple[int, str, str], Cell] = {}
    for event in compared:
        cell = Cell(*(event[key] for key in ("step", "stage", "unit", "tensor", "apart", "allowed")))
        key = (cell.step, cell.stage, cell.unit)
        if key not in cells or cell.share > cells[key].share:
            cells[key] = cell
    return [cells[key] for key in sorted(cells, key=lambda one: (one[0], STAGES.index(one[1]), one[2]))]
