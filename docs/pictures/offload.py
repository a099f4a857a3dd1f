"""Draws docs/pictures/offload.svg: `python docs/pictures/offload.py`.

What rests where, by `offload=`: `fs.plan`'s own numbers for a Llama of 8B parameters on one rank in bf16,
with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from strategies import GIB, box, svg, text

import fullshard as fs
from fullshard.plan.homes import KINDS, Resting
from fullshard.plan.plan import Plan
from fullshard.planning.decoder import Decoder
from fullshard.tools.simulation.presets import PRESETS

FILE = Path(__file__).resolve().parent / "offload.svg"
COLOURS = {"compute": "#3b82f6", "master": "#8b5cf6", "gradients": "#f59e0b", "state": "#10b981"}
IN_A_STEP = "#94a3b8"  # full values at their peak, and slabs
PLACES = ("device", "host", "disk")
LEFT, HEADER, ROW, BAR, SCALE, GAP = 250, 50, 50, 28, 2.5, 60  # SCALE: pixels per GiB
OFFLOADS: dict[str, fs.Offload | str | None] = {
    "None": None,
    'kinds=("state",)': fs.Offload(kinds=("state",)),
    '"optimizer"': "optimizer",
    'device="48GiB"': fs.Offload(device="48GiB"),
    '"host"': "host",
    "one_backward, split_masters": fs.Offload(one_backward=True, split_masters=True),
    'host="64GiB", disk=...': fs.Offload(host="64GiB", disk="scratch"),
}


class Bar(NamedTuple):
    colour: str
    size_bytes: int


def plans() -> Iterator[tuple[str, Plan]]:
    with torch.device("meta"):
        model = Decoder(PRESETS["llama-8b"])
    for name, offload in OFFLOADS.items():
        yield name, fs.plan(model, ranks=1, strategy="zero3", precision="bf16", offload=offload)


def bars(plan: Plan, place: str) -> list[Bar]:
    found = [Bar(COLOURS[kind], size) for kind, size in at_rest(plan, place).items() if size]
    if place == "device":
        found.append(Bar(IN_A_STEP, plan.full_bytes_at_peak + slab_bytes(plan.resting)))
    return found


def at_rest(plan: Plan, place: str) -> dict[str, int]:
    if plan.resting is not None:
        return {kind: plan.resting.bytes_at(place, kind) for kind in KINDS}
    held = (0, plan.parameter_bytes, plan.gradient_bytes, plan.state_bytes)
    return dict(zip(KINDS, held if place == "device" else (0, 0, 0, 0), strict=True))


def slab_bytes(resting: Resting | None) -> int:
    return 0 if resting is None else resting.slab_bytes


def draw() -> str:
    shown = list(plans())
    most = {place: max(total(bars(plan, place)) for _, plan in shown) for place in PLACES}
    left, starts = float(LEFT), {}
    for place in PLACES:
        starts[place] = left
        left += SCALE * most[place] / GIB + GAP
    parts = [text(starts[place], HEADER - 20, place, size=14) for place in PLACES]
    for row, (name, plan) in enumerate(shown):
        y = HEADER + ROW * row
        parts.append(text(LEFT - 15, y + 19, name.replace('"', "&quot;"), "end"))
        for place in PLACES:
            parts += row_of(bars(plan, place), starts[place], y)
    bottom = HEADER + ROW * len(shown) + 25
    return svg(round(left) + 20, bottom + 20, parts + legend(bottom))


def row_of(found: list[Bar], x: float, y: float) -> list[str]:
    parts = []
    for bar in found:
        width = SCALE * bar.size_bytes / GIB
        parts.append(box(x, y, width, BAR, bar.colour))
        x += width
    return [*parts, text(x + 6, y + 19, f"{total(found) / GIB:.0f} GiB", size=12)] if found else []


def total(found: list[Bar]) -> int:
    return sum(bar.size_bytes for bar in found)


def legend(y: float) -> list[str]:
    parts, x = [], 20.0
    for name, colour in {**COLOURS, "in a step: full values, slabs": IN_A_STEP}.items():
        parts += [box(x, y - 11, 14, 14, colour), text(x + 20, y, name)]
        x += 50 + 7.2 * len(name)
    return parts


if __name__ == "__main__":
    FILE.write_text(draw())
