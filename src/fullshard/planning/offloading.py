"""Offload as it is requested of a plan: which values may leave the device, and what a host has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fullshard.byte_sizes import size_option
from fullshard.errors import OptionError
from fullshard.offload import PRESETS, Offload
from fullshard.plan.homes import Budget, Resting
from fullshard.planning.needs import Need
from fullshard.planning.transfers import Rates

Needed = Callable[[Budget], Need]  # the memory that a strategy needs under a budget
ASSUMED_FLOPS = 100e12  # per second and device, where none is given: what a card of 24 GB reaches


@dataclass(frozen=True)
class Request:
    """`how` is a preset of the option `offload`. Bytes are those of one host, which its ranks share.

    'auto' fills the device as far as the predicted peak allows. The engine, which does not know activations
    beforehand, fills less with the same word: the plan prints the fs.Offload that does as planned.
    """

    how: str = "auto"
    host_bytes: int | None = None  # None: no limit
    disk_bytes: int | None = None  # None: no disk
    rates: Rates = field(default_factory=Rates)
    flops: float | None = None
    one_backward: bool = False  # gradients rest as they were computed
    split_masters: bool = False  # on the host, masters rest as what restores them
    overlap: bool = False  # an optimizer's step goes on beside the next forward
    slabs: int | None = None  # bytes for chunks of such a step

    def __post_init__(self) -> None:
        if self.how not in PRESETS:
            raise OptionError(f"--offload is {self.how!r}", f"Choose one of {', '.join(PRESETS)}.")
        if self.host_bytes is None and self.disk_bytes is not None:
            raise OptionError(
                "a disk takes what host memory cannot hold, and that has no limit", "Give --host-memory."
            )
        if self.slabs is not None and not self.overlap:
            raise OptionError("--slabs are for chunks of a step that goes on", "Give --overlap as well.")
        given = {"--host-memory": self.host_bytes, "--disk": self.disk_bytes, "--slabs": self.slabs}
        for name, value in given.items():
            if value is not None and value < 2**20:  # a bare 512 is 512 bytes
                remedy = "Write it as 8GiB." if name == "--slabs" else "Write it as 512GiB or 2TB."
                raise OptionError(f"{name} is {value} bytes", remedy)

    @property
    def option(self) -> Offload:
        """What lanes depend on, whatever the budget."""
        return Offload(
            one_backward=self.one_backward,
            split_masters=self.split_masters,
            overlap=self.overlap,
            slabs=self.slabs,
        )

    def budget(self, spare: float, node_ranks: int, activation_bytes: int) -> Budget:
        """With nothing on the device that may leave it. `activation_bytes`: of each rank, on the host too.

        Where the host has no room for these alone, its budget is below 0, and nothing fits.
        """
        host = None
        if self.host_bytes is not None:
            host = round(self.host_bytes * (1 - spare)) // node_ranks - activation_bytes
        return Budget(0, host, self.disk_bytes is not None, PRESETS[self.how].kinds, node_ranks)


def placed_need(request: Request, budget: Budget, room_bytes: int, needed: Needed) -> Need:
    """The need under a budget; with 'auto', with as much on the device as its room allows."""
    least = needed(budget)
    if request.how != "auto" or least.peak > room_bytes:
        return least
    low, high = 0, room_bytes
    while high - low > room_bytes // 100:
        middle = (low + high + 1) // 2
        more = needed(replace(budget, device=middle))
        if more.peak > room_bytes:
            high = middle
        else:
            low, least = middle, more
    return least


def shortage(one: Need, request: Request) -> str | None:
    """Which memory of the host does not suffice, and what would; None if both do."""
    resting = one.resting
    assert resting is not None
    budget = resting.budget
    if budget.host is not None and resting.host_bytes > budget.host * budget.node_ranks:
        return "host"
    if request.disk_bytes is not None and resting.disk_bytes > request.disk_bytes:
        return "disk"
    return None


def host_option(resting: Resting) -> str:
    """The memory of a host, to be written as an option: if values are on disk, more of it would have more of
    them in memory than was planned; if none are, they are the same with any that has room for them."""
    assert resting.budget.host is not None
    return size_option(resting.budget.host * resting.budget.node_ranks, at_most=resting.disk_bytes > 0)


def as_option(one: Need, request: Request) -> str:
    """What to write in a script for homes like these."""
    resting = one.resting
    assert resting is not None
    budget = resting.budget
    is_preset = request.option == Offload()
    if request.how != "auto" and budget.host is None and is_preset:
        return repr(request.how)
    parts = []
    if budget.device:  # more of it, and the peak could be above the memory
        parts.append(f'device="{size_option(budget.device, at_most=True)}"')
    if budget.host is not None:
        parts.append(f'host="{host_option(resting)}"')
    parts += ["disk=FOLDER"] * budget.has_disk
    if request.how == "optimizer":
        parts.append(f"kinds={budget.kinds!r}")
    parts += ["one_backward=True"] * request.one_backward
    parts += ["split_masters=True"] * request.split_masters
    parts += ["overlap=True"] * request.overlap
    parts += [] if request.slabs is None else [f'slabs="{size_option(request.slabs)}"']
    return f"fs.Offload({', '.join(parts)})"
