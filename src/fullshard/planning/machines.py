"""A machine as a plan sees it: how fast its devices compute and its links send. Pure.

Rates are those that kernels reach, not those of a data sheet. `measured` on a machine (`fullshard env
--rates`), or described by the name of a card: public figures, times the part of them that training is known
to reach on one of them (an H200).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from math import inf, log2
from typing import Any, NamedTuple

from fullshard.errors import OptionError
from fullshard.planning.network import ACROSS_HOP_S, INSIDE_HOP_S, Link, Network
from fullshard.planning.transfers import Rates
from fullshard.planning.work import Work


class ProductRate(NamedTuple):
    """Floating point operations per second of a product of these dimensions."""

    m: int
    n: int
    k: int
    flop_s: float


@dataclass(frozen=True)
class Device:
    """One device. `products` are of 16-bit elements, `wide_products` of fp32."""

    name: str
    memory_bytes: int
    products: tuple[ProductRate, ...]
    wide_products: tuple[ProductRate, ...]
    attention_flop_s: float  # forward, 16 bits
    attention_backward_flop_s: float
    memory_bytes_s: float  # that element-wise kernels reach
    optimizer_bytes_s: float  # the same of an optimizer's step
    kernel_s: float  # from one kernel to the next
    launch_s: float  # host time per kernel: a step takes at least that long
    is_gpu: bool = True

    def seconds(self, work: Work) -> float:
        """Of one kernel."""
        if work.kind == "bytes":
            return self.kernel_s + work.sizes[0] / self.memory_bytes_s
        if work.kind == "product":
            return self.kernel_s + self._product_s(work)
        rate = self.attention_flop_s if work.kind == "attention" else self.attention_backward_flop_s
        if work.itemsize > 2:
            rate *= self.wide_products[-1].flop_s / self.products[-1].flop_s
        return self.kernel_s + work.flop / rate

    def _product_s(self, work: Work) -> float:
        m, n, k, times = work.sizes
        rates = self.products if work.itemsize <= 2 else self.wide_products
        moved = work.itemsize * times * (m * k + k * n + m * n)
        return max(work.flop / _interpolated(rates, m, n * times ** (1 / 3), k), moved / self.memory_bytes_s)


def _interpolated(rates: tuple[ProductRate, ...], m: float, n: float, k: float) -> float:
    """Weighted by how near the shapes of the table are, in doublings of each dimension.

    A product and its transpose are alike: of the two ways to compare m and n the nearer one counts.
    """
    total = weights = 0.0
    x, y, z = (log2(max(1.0, value)) for value in (m, n, k))
    for rate in rates:
        a, b, c = log2(rate.m), log2(rate.n), log2(rate.k)
        rows = min((x - a) ** 2 + (y - b) ** 2, (x - b) ** 2 + (y - a) ** 2)
        weight = 1 / (rows + (z - c) ** 2 + 1e-3) ** 2
        total, weights = total + weight * rate.flop_s, weights + weight
    return total / weights


@dataclass(frozen=True)
class Machine:
    """A device, the links between ranks, and those to host memory and disk."""

    device: Device
    inside: Link  # between ranks of a node
    across: Link  # of each rank, to other nodes
    host: Rates
    source: str  # where the rates come from, in words

    def network(self, ranks: int, node_ranks: int | None) -> Network:
        if node_ranks is None or node_ranks >= ranks:
            return Network(ranks, self.inside)
        return Network(ranks, self.across, node_ranks, self.inside)


def as_values(machine: Machine) -> dict[str, Any]:
    """For a file."""
    return asdict(machine)


def from_values(values: dict[str, Any]) -> Machine:
    """Raises KeyError, TypeError or ValueError if they are not those of a machine."""
    device = dict(values["device"])
    for name in ("products", "wide_products"):
        device[name] = tuple(ProductRate(int(m), int(n), int(k), float(f)) for m, n, k, f in device[name])
        if not device[name]:
            raise ValueError(f"no {name}")
    rates = [rate.flop_s for name in ("products", "wide_products") for rate in device[name]]
    rates += [value for name, value in device.items() if name.endswith(("_bytes_s", "_flop_s"))]
    if not all(0 < rate < inf for rate in rates):
        raise ValueError("a rate that is no positive number")
    links = {name: Link(**values[name]) for name in ("inside", "across")}
    return Machine(Device(**device), **links, host=Rates(**values["host"]), source=str(values["source"]))


# ---- cards by name


class _Card(NamedTuple):
    """Public figures: dense 16-bit and fp32 TFLOP/s, GB and TB/s of memory, GB/s one way between devices of
    a node, and of PCIe."""

    flop_t: float
    wide_flop_t: float
    memory_gb: int
    memory_tb_s: float
    inside_gb_s: float
    pcie_gb_s: float
    full_name: str


CARDS: dict[str, _Card] = {
    "h200": _Card(989, 67, 141, 4.8, 450, 64, "NVIDIA H200"),
    "h100": _Card(989, 67, 80, 3.35, 450, 64, "NVIDIA H100 (SXM)"),
    "h100-pcie": _Card(756, 51, 80, 2.0, 64, 64, "NVIDIA H100 (PCIe)"),
    "h20": _Card(148, 44, 96, 4.0, 450, 64, "NVIDIA H20"),
    "b200": _Card(2250, 80, 180, 8.0, 900, 64, "NVIDIA B200"),
    "a100-80": _Card(312, 19.5, 80, 2.0, 300, 32, "NVIDIA A100 80 GB"),
    "a100-40": _Card(312, 19.5, 40, 1.55, 300, 32, "NVIDIA A100 40 GB"),
    "v100": _Card(125, 15.7, 32, 0.9, 150, 16, "NVIDIA V100 32 GB"),
    "l40s": _Card(362, 91, 48, 0.864, 32, 32, "NVIDIA L40S"),
    "l4": _Card(121, 30, 24, 0.3, 16, 16, "NVIDIA L4"),
    "a10": _Card(125, 31, 24, 0.6, 32, 32, "NVIDIA A10"),
    "a6000": _Card(155, 39, 48, 0.768, 32, 32, "NVIDIA RTX A6000"),
    "rtx4090": _Card(165, 82, 24, 1.01, 32, 32, "NVIDIA RTX 4090"),
    "rtx3090": _Card(71, 35, 24, 0.936, 32, 32, "NVIDIA RTX 3090"),
    "rtx5090": _Card(210, 105, 32, 1.79, 64, 64, "NVIDIA RTX 5090"),
    "t4": _Card(65, 8.1, 16, 0.32, 16, 16, "NVIDIA T4"),
    "mi300x": _Card(1307, 163, 192, 5.3, 448, 64, "AMD MI300X"),
    "mi250x": _Card(383, 48, 128, 3.2, 250, 32, "AMD MI250X"),
}
_ALIASES = {"a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "4090": "rtx4090"}
_ALIASES |= {"3090": "rtx3090", "5090": "rtx5090", "a10g": "a10", "h100-sxm": "h100"}
# Of the public figures, by the size of a product: what an H200 reaches, see docs/benchmarks.md.
_REACHED = {128: 0.01, 256: 0.04, 512: 0.12, 1024: 0.27, 2048: 0.49, 4096: 0.68, 8192: 0.76}
_ATTENTION, _ATTENTION_BACKWARD, _MEMORY, _LINK = 0.45, 0.36, 0.85, 0.85
NIC_BYTES_S = 50e9  # of each rank to other nodes, where none is given: 400 Gb/s


def _wide(card: _Card, part: float) -> float:
    """fp32 units are slower, and so are kept busy by smaller products."""
    return card.wide_flop_t * 1e12 * min(0.8, 2 * part)


def described(name: str) -> Machine:
    """The machine of a card, by its name."""
    plain = name.lower().removeprefix("nvidia").removeprefix("amd")
    plain = "-".join(plain.replace("_", " ").replace("-", " ").split())
    card = CARDS.get(_ALIASES.get(plain, plain)) or CARDS.get(plain.replace("-", ""))
    if card is None:
        near = get_close_matches(plain, [*CARDS, *_ALIASES], 1)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise OptionError(f"unknown card {name!r}", f"{meant}Choose one of {', '.join(CARDS)}.")
    products = tuple(ProductRate(s, s, s, card.flop_t * 1e12 * part) for s, part in _REACHED.items())
    wide = tuple(ProductRate(s, s, s, _wide(card, part)) for s, part in _REACHED.items())
    device = Device(
        name=card.full_name,
        memory_bytes=int(card.memory_gb * 1e9),
        products=products,
        wide_products=wide,
        attention_flop_s=card.flop_t * 1e12 * _ATTENTION,
        attention_backward_flop_s=card.flop_t * 1e12 * _ATTENTION_BACKWARD,
        memory_bytes_s=card.memory_tb_s * 1e12 * _MEMORY,
        optimizer_bytes_s=card.memory_tb_s * 1e12 * _MEMORY,
        kernel_s=2e-6,
        launch_s=30e-6,
    )
    one_way = card.pcie_gb_s * 1e9 * _LINK
    return Machine(
        device,
        Link(card.inside_gb_s * 1e9 * _LINK, INSIDE_HOP_S),
        Link(NIC_BYTES_S, ACROSS_HOP_S),
        Rates().with_link(one_way),
        f"public figures of {card.full_name}",
    )
