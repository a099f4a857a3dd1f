"""The options of `fs.shard`: each declared once, in TABLE, and validated once, by `parse`.

The agreement between ranks, the doors and the command line take names, defaults, choices and help from TABLE.
Written out again, because editors and type checkers read no table: the signature and docstring of `fs.shard`,
the fields of `Options` and the keys of `ShardOptions`. tests/pure/test_options.py compares them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import precision as _precision
from fullshard.errors import OptionError
from fullshard.policy import NO_INTEGRATION, Integration
from fullshard.precision import Precision

# Full values of at most this size stay between forward and backward by default: releasing them saves too
# little memory to be worth a second gather.
SMALL_BYTES = 32 * 2**20
GPU_FACTOR = 8  # on an H200 a step of a 124M GPT took 28.3 ms, and 26.5 with all of its 250 MB kept

Strategy = Literal["replicate", "zero1", "zero2", "zero3", "hybrid"]
Across = Literal["replicate", "shard"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
ACROSS: tuple[str, ...] = get_args(Across)
INITIAL = ("broadcast", "verify")
REDUCE = ("auto", "exchange", "scatter")

UnitChoice = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


@dataclass(frozen=True)
class Options:
    """A request to `fs.shard`, validated. A strategy is one of four release rules (design D4)."""

    strategy: str
    precision: Precision
    units: UnitChoice
    checkpoint_activations: bool
    ignore: tuple[Any, ...]
    initial: str
    materialize: Callable[[nn.Module], Any] | None
    device: torch.device | None  # None: the model's own
    check_gradients: bool
    prefetch: bool
    keep_full: int | None  # None: those that backward needs first, and models of SMALL_BYTES
    merge_units: int | None  # None: by device, see plan/units.py
    reduce: str  # 'auto' until the ranks are known
    across: str  # hybrid: shards are the same on every node, or are cut once more
    on_gpu: bool  # the shards will be on a GPU: small means something else there
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
        """A model of at most this size keeps the memory of its full values, unless `keep_full` is smaller."""
        return SMALL_BYTES if self.keep_full is None else min(SMALL_BYTES, self.keep_full)

    @property
    def accumulates_locally(self) -> bool:
        """Unsharded local gradients may accumulate until the last micro-batch inside fs.accumulate."""
        return self.strategy in ("replicate", "zero1")


class ShardOptions(TypedDict, total=False):
    """Keyword arguments of `fs.shard` that a door passes on as they are. Others have a form of their own
    there: `precision` and `device`."""

    strategy: str
    mesh: DeviceMesh | None
    units: Any
    checkpoint_activations: bool
    ignore: Any
    initial: str
    materialize: Callable[[nn.Module], Any] | None
    check_gradients: bool
    prefetch: bool
    keep_full: int | str | None
    merge_units: int | None
    reduce: str
    across: str


@dataclass(frozen=True)
class Option:
    """One option: `check` turns a given value into the one that `Options` holds, or raises OptionError.

    Without a check of its own, an option takes one of its choices, or a bool.
    """

    name: str
    default: Any
    help: str
    check: Callable[[Any], Any] | None = None
    choices: tuple[str, ...] = ()
    agreed: bool = True  # must be equal on all ranks; False for objects that ranks cannot compare

    def parsed(self, value: Any) -> Any:
        if self.check is not None:
            return self.check(value)
        return _one_of(self.name, self.choices, value) if self.choices else _flag(self.name, value)


def parse(*, on_gpu: bool = False, integration: Integration | None = None, **given: Any) -> Options:
    """Validated options; those that are not given have their defaults."""
    for name in given:
        if name not in TABLE:
            near = get_close_matches(name, TABLE, 1)
            meant = f"Did you mean {near[0]!r}? " if near else ""
            raise OptionError(f"unknown option {name!r}", f"{meant}Options are {', '.join(TABLE)}.")
    values = {name: option.parsed(given.get(name, option.default)) for name, option in TABLE.items()}
    if values["across"] == "shard" and values["strategy"] != "hybrid":
        raise OptionError(
            f"across='shard' with strategy {values['strategy']!r}",
            "It applies between the nodes of strategy='hybrid'.",
        )
    return Options(**values, on_gpu=on_gpu, integration=integration or NO_INTEGRATION)


def _one_of(name: str, known: tuple[str, ...], value: Any) -> str:
    if not isinstance(value, str) or value not in known:
        raise OptionError(f"unknown {name} {value!r}", f"Choose one of {', '.join(map(repr, known))}.")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}, which is neither True nor False", "Give a bool.")
    return value


def _materialize(value: Any) -> Callable[[nn.Module], Any] | None:
    if value is not None and not callable(value):
        raise OptionError(f"materialize is {value!r}", "Give a function of one module.")
    return value  # type: ignore[no-any-return]


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


TABLE: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "strategy",
            "zero3",
            "'zero3' (default), 'zero2', 'zero1', 'replicate', or 'hybrid' (shard inside, replicate across).",
            choices=STRATEGIES,
        ),
        Option("precision", "fp32", "'fp32', 'bf16', 'fp16', or an fs.Precision.", _precision.parse),
        Option(
            "units",
            None,
            "None finds them; or module classes; or a function of a module that returns a bool.",
            _units,
            agreed=False,
        ),
        Option("checkpoint_activations", False, "recompute the activations of each block in backward."),
        Option(
            "ignore",
            (),
            "modules, parameters or names that stay as they are on every rank, unsynchronised.",
            _ignore,
            agreed=False,
        ),
        Option(
            "initial",
            "broadcast",
            "'broadcast' gives every rank the first rank's values; 'verify' raises if ranks differ.",
            choices=INITIAL,
        ),
        Option(
            "materialize",
            None,
            "for a meta-device model, a function that initialises one module's own tensors.",
            _materialize,
            agreed=False,
        ),
        Option(
            "device",
            None,
            "where shards and buffers go, unit by unit, so that no device holds all of a model that was "
            "built on the host: 'cuda' is this rank's GPU. None is where the model is; for a meta model the "
            "GPU.",
            _device,
            agreed=False,
        ),
        Option(
            "check_gradients",
            False,
            "raise on all ranks when a gradient is not finite, naming rank and parameter.",
        ),
        Option("prefetch", True, "gather the next unit while this one computes."),
        Option(
            "keep_full",
            None,
            "bytes of full values that zero3 and hybrid may keep from forward to backward, which saves each "
            "kept unit its second gather; 'all', or 0 for none. None keeps what backward needs first.",
            _keep_full,
        ),
        Option(
            "merge_units",
            None,
            "bytes up to which neighbouring small blocks share a unit, and below which a small model is one "
            "unit; 0 keeps one unit per block; None chooses by device. Units that `units` picks are not "
            "merged.",
            _merge_units,
        ),
        Option(
            "reduce",
            "auto",
            "'exchange' sends gradients all-to-all and their owners sum them in fp32; 'scatter' sends fp32, "
            "summed on the way by the backend; 'auto' takes the one that sends less between nodes.",
            choices=REDUCE,
        ),
        Option(
            "across",
            "replicate",
            "for hybrid: 'replicate' keeps the same shards on every node; 'shard' cuts them once more, so "
            "that masters and optimizer state are spread over all ranks, and each step gathers them between "
            "nodes once.",
            choices=ACROSS,
        ),
    )
}
