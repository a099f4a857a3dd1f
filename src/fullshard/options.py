"""The options of `fs.shard`: each declared once, in `option_table`, and validated once, by `parse`.

The agreement between ranks, the doors and the command line take names, defaults, choices and help from TABLE.
Written out again, because editors and type checkers read no table: the signature and docstring of `fs.shard`,
the fields of `Options` and the keys of `ShardOptions`. tests/pure/test_options.py compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.errors import OptionError
from fullshard.keywords import unknown
from fullshard.offload import Offload
from fullshard.option_table import OTHER_NAMES, TABLE, CheckpointActivations
from fullshard.policy import NO_INTEGRATION, Integration
from fullshard.precision import Precision

# Full values of at most this size stay between forward and backward by default: releasing them saves too
# little memory to be worth a second gather.
SMALL_BYTES = 32 * 2**20
GPU_FACTOR = 8  # on an H200 a step of a 124M GPT took 28.3 ms, and 26.5 with all of its 250 MB kept

UnitChoice = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None


@dataclass(frozen=True)
class Options:
    """A request to `fs.shard`, validated. A strategy is one of four release rules (design D4)."""

    strategy: str
    precision: Precision
    units: UnitChoice
    checkpoint_activations: CheckpointActivations
    ignore: tuple[Any, ...]
    initial: str
    materialize: Callable[[nn.Module], Any] | None
    device: torch.device | None  # None: the model's own
    offload: Offload | None  # which values rest away from the compute device; None: none
    state: str  # how optimizer state rests
    check_gradients: bool
    prefetch: bool
    keep_full: int | None  # None: those that backward needs first, and models of SMALL_BYTES
    keep_node: int | None  # None: within half of what a rank holds anyway, see plan/schedule.py
    merge_units: int | None  # None: by device, see plan/units.py
    reduce: str  # 'auto' until the ranks are known
    optimizer_step: str
    plan: Any  # None: a plan has become these options by then
    on_gpu: bool  # the shards will be on a GPU: small means something else there
    nodes: int = 1  # groups of ranks whose sums of gradients are added up once more; 1 until ranks are known
    why_flat: str = ""  # ranks are on several nodes, but messages are those of one level
    integration: Integration = NO_INTEGRATION

    @property
    def replicated(self) -> bool:
        """Every rank keeps every element, of parameters, gradients and optimizer state."""
        return self.strategy == "replicate"

    @property
    def two_level(self) -> bool:
        """Ranks of several nodes all hold different shards: messages go between nodes and inside each."""
        return self.nodes > 1 and self.strategy != "hybrid"

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
    checkpoint_activations: CheckpointActivations
    ignore: Any
    initial: str
    materialize: Callable[[nn.Module], Any] | None
    offload: str | Offload | None
    state: str
    check_gradients: bool
    prefetch: bool
    keep_full: int | str | None
    keep_node: int | str | None
    merge_units: int | None
    reduce: str
    optimizer_step: str
    plan: Any


def parse(*, on_gpu: bool = False, integration: Integration | None = None, **given: Any) -> Options:
    """Validated options; those that are not given have their defaults."""
    for name in given:
        if name not in TABLE:
            raise unknown("fs.shard", name, TABLE, OTHER_NAMES)
    values = {name: option.parsed(given.get(name, option.default)) for name, option in TABLE.items()}
    options = Options(**values, on_gpu=on_gpu, integration=integration or NO_INTEGRATION)
    if options.reduce == "fixed":
        _require_fixed_order(options)
    if options.offload is not None and options.offload.one_backward:
        _require_computed_gradients(options)
    return options


def require_one_rank(options: Options, ranks: int) -> None:
    if options.offload is not None and options.offload.one_backward and ranks > 1:
        raise OptionError(
            f"Offload.one_backward is True on {ranks} ranks, whose gradients are summed in fp32",
            "Leave out one_backward: it is for a model that one rank trains.",
        )


def _require_computed_gradients(options: Options) -> None:
    precision = options.precision
    if precision.compute != torch.bfloat16:
        raise OptionError(
            "Offload.one_backward is True, and gradients are not computed in bfloat16",
            "Give precision='bf16', or leave out one_backward.",
        )
    if precision.wire not in (None, torch.bfloat16, torch.int8) or options.reduce in ("fixed", "scatter"):
        raise OptionError(
            "Offload.one_backward keeps gradients as they were computed, and fs.Precision(wire=...) or "
            f"reduce={options.reduce!r} asks for another dtype or a sum of several backwards",
            "Leave out one of them.",
        )


def _require_fixed_order(options: Options) -> None:
    """8-bit blocks that are sent are cut as shards are: what they round depends on the number of ranks."""
    for name in ("wire", "across", "gather"):
        if getattr(options.precision, name) == torch.int8:
            raise OptionError(
                "reduce='fixed' gives the same bits on any number of ranks, but shards cut the 8-bit blocks "
                f"of precision=fs.Precision({name}=torch.int8)",
                "Leave out one of them.",
            )
