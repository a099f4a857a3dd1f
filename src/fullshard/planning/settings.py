"""The settings that a plan chooses, and the record of a choice: frozen, printable, and written to a file.

A record has the arguments of `fs.shard` that were chosen, what they were chosen for, what was predicted, and
what was rejected. `fs.shard(model, plan=record)` uses it again, on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from fullshard.byte_sizes import size
from fullshard.errors import OptionError
from fullshard.extras import need
from fullshard.offload import Offload
from fullshard.option_table import STRATEGIES, CheckpointActivations
from fullshard.precision import Precision
from fullshard.text_files import replace_text

BY_NAME = "by_name"  # among the options of fs.shard: the names of those that its caller gave
FORMAT = 1
_EIGHT_BITS = {"int8": {"gather": "int8", "wire": "int8"}, "int8-across": {"across": "int8"}}


@dataclass(frozen=True)
class Settings:
    """Arguments of `fs.shard`. `wire` is 'exact', or one of the codecs that were allowed."""

    strategy: str = "zero3"
    checkpoint_activations: CheckpointActivations = False
    offload: str | Mapping[str, Any] | None = None  # a preset, or the fields of fs.Offload
    keep_full: int | str | None = None
    keep_node: int | str | None = None
    wire: str = "exact"
    micro_batch: int | None = None  # sequences per rank, where the batch was left to the plan
    accumulate: int = 1  # micro-batches per step

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise OptionError(
                f"a plan with strategy {self.strategy!r}", f"Choose one of {', '.join(STRATEGIES)}."
            )
        if self.wire != "exact" and self.wire not in _EIGHT_BITS:
            raise OptionError(f"a plan with wire {self.wire!r}", f"Choose exact, {', '.join(_EIGHT_BITS)}.")
        if isinstance(self.offload, Mapping):
            object.__setattr__(self, "offload", _Frozen(self.offload))

    def arguments(self, precision: Precision) -> dict[str, Any]:
        """Keyword arguments of `fs.shard`."""

        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("strategy", "checkpoint_activations", "keep_full", "keep_node")
        }
        found["offload"] = self.offload_option()
        if self.wire != "exact":
            dtypes = {name: getattr(torch, dtype) for name, dtype in _EIGHT_BITS[self.wire].items()}
            found["precision"] = replace(precision, **dtypes)
        return found

    def offload_option(self) -> str | Offload | None:
        if not isinstance(self.offload, Mapping):
            return self.offload
        values = dict(self.offload)
        if "kinds" in values:
            values["kinds"] = tuple(values["kinds"])
        return Offload(**values)

    def __str__(self) -> str:
        parts = [self.strategy]
        if self.checkpoint_activations:
            offloads = self.checkpoint_activations == "offload"
            parts.append("activations recomputed" + (" from host memory" if offloads else ""))
        if isinstance(self.offload, str):
            parts.append(f"offload {self.offload}")
        elif self.offload is not None:
            device = self.offload.get("device", 0)
            parts.append(
                f"offload beyond {device if isinstance(device, str) else size(device)} of the device"
            )
        for name in ("keep_full", "keep_node"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name} {value if isinstance(value, str) else size(value) if value else 0}")
        if self.wire != "exact":
            parts.append(f"{self.wire} on the wire")
        if self.micro_batch is not None:
            parts.append(f"{self.micro_batch} sequences" if self.micro_batch > 1 else "1 sequence")
        if self.accumulate > 1:
            parts.append(f"{self.accumulate} micro-batches")
        return ", ".join(parts)


class _Frozen(dict[str, Any]):
    """A dict that has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))


@dataclass(frozen=True)
class Rejected:
    """Settings that were not chosen, with the figure that ruled them out."""

    settings: Settings
    peak_bytes: int
    step_s: float | None
    why: str


@dataclass(frozen=True)
class Choice:
    """What was chosen, for what, and why. Printed, it is one line and the table of what was rejected."""

    settings: Settings
    why: str
    model: str
    ranks: int
    node_ranks: int | None
    machine: str
    memory_bytes: int  # of one device
    tokens: int | None  # per rank and step
    peak_bytes: int
    step_s: float
    rejected: tuple[Rejected, ...] = field(default=(), repr=False)

    @property
    def tokens_s(self) -> float | None:
        """Of all ranks together."""
        return None if self.tokens is None else self.tokens * self.ranks / self.step_s

    @property
    def line(self) -> str:
        return f"plan: {self.settings}: {self.why}"

    def table(self) -> list[tuple[str, str, str, str]]:
        rows = [("rejected", "peak", "step", "because")]
        for one in self.rejected:
            step = "" if one.step_s is None else seconds(one.step_s)
            rows.append((str(one.settings), size(one.peak_bytes), step, one.why))
        return rows

    def __str__(self) -> str:
        rows = self.table() if self.rejected else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.line, *lines])

    def shown(self, rows: int = 8) -> str:
        """The line, and the first rows of the table."""
        lines = str(self).splitlines()
        more = len(lines) - 2 - rows
        return "\n".join(
            lines[: rows + 2] + ([f"and {more} more: fs.plan(model).choice"] if more > 0 else [])
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON or YAML."""
        return {"fullshard_plan": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """As JSON, which is YAML too. All ranks may write the same file."""
        text = json.dumps(self.to_dict(), indent=1) + "\n"
        try:
            replace_text(path, text)
        except (OSError, ValueError) as error:  # a ValueError: a path without a name
            raise OptionError(
                f"the plan cannot be written to {str(path)!r}: {getattr(error, 'strerror', None) or error}",
                "Give a file in a folder that exists and may be written to.",
            ) from error

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Choice:
        """A record from `to_dict`. One that was written by hand needs `settings` alone."""
        if values.get("fullshard_plan", FORMAT) != FORMAT:
            raise OptionError(
                f"the plan has format {values['fullshard_plan']!r}, and this version writes {FORMAT}",
                "Plan again.",
            )
        plain: dict[str, Any] = {
            "why": "as recorded",
            "model": "",
            "ranks": 1,
            "node_ranks": None,
            "machine": "",
        }
        plain |= {"memory_bytes": 0, "tokens": None, "peak_bytes": 0, "step_s": 0.0}
        plain |= {name: value for name, value in values.items() if name != "fullshard_plan"}
        plain["settings"] = _settings(plain.get("settings"))
        plain["rejected"] = tuple(
            Rejected(_settings(one["settings"]), one["peak_bytes"], one["step_s"], one["why"])
            for one in plain.get("rejected", ())
        )
        _refuse_unknown(plain, Choice, "a plan")
        return Choice(**plain)

    @staticmethod
    def load(path: str | Path) -> Choice:
        """From a file of JSON or YAML."""
        path = Path(path)
        remedy = "Write one with fullshard plan --choose --save FILE, or with fs.plan(...).choice.save."
        try:
            text = path.read_text(encoding="utf-8")
            is_yaml = path.suffix in (".yaml", ".yml")
            values = need("yaml", "cli").safe_load(text) if is_yaml else json.loads(text)
        except (OSError, ValueError) as error:
            raise OptionError(f"the plan {str(path)!r} cannot be read: {error}", remedy) from error
        if not isinstance(values, Mapping) or "settings" not in values:
            raise OptionError(f"{str(path)!r} is no plan", remedy)
        return Choice.from_dict(values)


def seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def _settings(value: Any) -> Settings:
    if not isinstance(value, Mapping):
        raise OptionError(f"a plan whose settings are {value!r}", "Give the settings as a mapping.")
    _refuse_unknown(value, Settings, "the settings of a plan")
    return Settings(**value)


def _refuse_unknown(values: Mapping[str, Any], kind: Any, what: str) -> None:
    known = [one.name for one in fields(kind)]
    for name in values:
        if name not in known:
            raise OptionError(f"{what} has {name!r}", f"Known are {', '.join(known)}.")
