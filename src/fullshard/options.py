"""The frozen options of a run, validated once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard import precision as _precision
from fullshard.errors import OptionError
from fullshard.policy import NO_INTEGRATION, Integration
from fullshard.precision import Precision

# Full values that stay between forward and backward unless told otherwise: too little to be worth a gather.
SMALL_BYTES = 32 * 2**20
GPU_FACTOR = 8  # on an H200 a step of a 124M GPT took 28.3 ms, and 26.5 with all of its 250 MB kept
STRATEGIES = ("replicate", "zero1", "zero2", "zero3", "hybrid")
INITIAL = ("broadcast", "verify")
REDUCE = ("auto", "exchange", "scatter")
ACROSS = ("replicate", "shard")

UnitChoice = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


@dataclass(frozen=True)
class Options:
    """What `fs.shard` was asked for. Strategies are only these four release rules (design D4)."""

    strategy: str
    precision: Precision
    units: UnitChoice
    checkpoint_activations: bool
    ignore: tuple[Any, ...]
    initial: str
    materialize: Callable[[nn.Module], Any] | None
    check_gradients: bool
    prefetch: bool
    across: str  # what hybrid does with the shards of a node: the same on every node, or cut once more
    reduce: str  # 'auto' until the ranks are known
    device: torch.device | None  # None: the model's own
    on_gpu: bool  # where the shards will be; small means something else there
    keep_full: int | None  # None: those that backward needs first, and models of SMALL_BYTES
    merge_units: int | None  # None: by device, see plan/units.py
    integration: Integration = NO_INTEGRATION

    @property
    def replicated(self) -> bool:
        """Every rank keeps every element, of parameters, gradients and optimizer state."""
        return self.strategy == "replicate"

    @property
    def releases_after_forward(self) -> bool:
        return self.strategy in ("zero3", "hybrid")

    @property
    def keeps(self) -> tuple[int, int]:
        """Bytes of full values that stay from forward to backward, and how many units stay whatever their
        size: prefetch holds two neighbours at any time, so keeping the last two costs no more than that."""
        if self.keep_full is not None:
            return self.keep_full, 0
        return SMALL_BYTES * (GPU_FACTOR if self.on_gpu else 1), 2 if self.prefetch else 1

    @property
    def small_bytes(self) -> int:
        """A model of so many bytes keeps the memory of its full values, unless its budget is smaller."""
        return SMALL_BYTES if self.keep_full is None else min(SMALL_BYTES, self.keep_full)

    @property
    def accumulates_locally(self) -> bool:
        """Whole local gradients may wait for the last micro-batch inside fs.accumulate."""
        return self.strategy in ("replicate", "zero1")


def parse(
    *,
    strategy: str,
    precision: str | Precision,
    units: Any,
    ignore: Any,
    checkpoint_activations: bool = False,
    initial: str = "broadcast",
    materialize: Callable[[nn.Module], Any] | None = None,
    check_gradients: bool = False,
    prefetch: bool = True,
    across: str = "replicate",
    reduce: str = "auto",
    keep_full: int | str | None = None,
    merge_units: int | None = None,
    device: torch.device | str | int | None = None,
    on_gpu: bool = False,
    integration: Integration | None = None,
) -> Options:
    _one_of("strategy", strategy, STRATEGIES)
    _one_of("initial", initial, INITIAL)
    _one_of("reduce", reduce, REDUCE)
    _one_of("across", across, ACROSS)
    if across == "shard" and strategy != "hybrid":
        raise OptionError(
            f"across='shard' with strategy {strategy!r}", "It is what strategy='hybrid' does between nodes."
        )
    for name, flag in (
        ("checkpoint_activations", checkpoint_activations),
        ("check_gradients", check_gradients),
        ("prefetch", prefetch),
    ):
        if not isinstance(flag, bool):
            raise OptionError(f"{name} is {flag!r}, which is neither True nor False", "Give a bool.")
    if materialize is not None and not callable(materialize):
        raise OptionError(f"materialize is {materialize!r}", "Give a function of one module.")
    return Options(
        strategy=strategy,
        precision=_precision.parse(precision),
        units=_units(units),
        checkpoint_activations=checkpoint_activations,
        ignore=_ignore(ignore),
        initial=initial,
        materialize=materialize,
        check_gradients=check_gradients,
        prefetch=prefetch,
        across=across,
        reduce=reduce,
        keep_full=_keep_full(keep_full),
        merge_units=_merge_units(merge_units),
        device=_device(device),
        on_gpu=on_gpu,
        integration=integration or NO_INTEGRATION,
    )


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise OptionError(f"unknown {name} {value!r}", f"Choose one of {', '.join(map(repr, known))}.")


def _keep_full(value: Any) -> int | None:
    if value == "all":
        return sys.maxsize
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise OptionError(
        f"keep_full is {value!r}", "Give a number of bytes, 'all', 0 for none, or None for the default."
    )


def _merge_units(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise OptionError(
        f"merge_units is {value!r}",
        "Give a number of bytes, 0 for one unit per block, or None for the default.",
    )


def _device(value: Any) -> torch.device | None:
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or isinstance(value, bool):
        raise OptionError(f"device is {value!r}", "Give 'cpu', 'cuda' or 'cuda:N'.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise OptionError(f"device is {value!r}, and this process sees {count} GPUs", "Choose another.")
    return device


def _units(units: Any) -> UnitChoice:
    if units is None:
        return None
    if isinstance(units, type):
        units = (units,)
    if isinstance(units, list | tuple | set | frozenset):
        bad = [u for u in units if not (isinstance(u, type) and issubclass(u, nn.Module))]
        if bad or not units:
            raise OptionError(
                f"units contains {bad[0]!r}, which is not a module class" if bad else "units is empty",
                "Give module classes, a function of a module that returns a bool, or None to find units.",
            )
        return tuple(units)
    if callable(units):
        return units  # type: ignore[no-any-return]
    raise OptionError(f"units is {units!r}", "Give module classes, a function of a module, or None.")


def _ignore(ignore: Any) -> tuple[Any, ...]:
    kinds = (str, nn.Module, nn.Parameter)
    listed = isinstance(ignore, list | tuple | set | frozenset)
    entries = tuple(ignore) if listed else (ignore,)
    for entry in entries:
        if not isinstance(entry, kinds):
            raise OptionError(f"ignore contains {entry!r}", "Give modules, parameters or names.")
    return entries
