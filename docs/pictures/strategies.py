"""Draws docs/pictures/at-rest.svg and docs/pictures/memory.svg: `python docs/pictures/strategies.py`.

The first shows who keeps what, for four ranks. The second has `fs.plan`'s own numbers for a Llama of 8B
parameters on eight ranks in bf16 with AdamW.
"""

from __future__ import annotations

from pathlib import Path

import torch

import fullshard as fs
from fullshard.planning.decoder import Decoder
from fullshard.tools.simulation.presets import PRESETS

HERE = Path(__file__).resolve().parent
INK, PAPER = "#334155", "#ffffff"
COLOURS = {
    "parameters": "#3b82f6",
    "gradients": "#f59e0b",
    "optimizer state": "#10b981",
    "full values at the peak": "#94a3b8",
}
STRATEGIES = ("replicate", "zero1", "zero2", "zero3")
GIB = 2**30


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 13) -> str:
    style = f'font-family="sans-serif" font-size="{size}" fill="{INK}" text-anchor="{anchor}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}" stroke="{PAPER}" stroke-width="1"/>'


def svg(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, box(0, 0, width, height, PAPER), *parts, "</svg>", ""])


def legend(names: list[str], y: float) -> list[str]:
    parts, x = [], 20.0
    for name in names:
        parts += [box(x, y - 11, 14, 14, COLOURS[name]), text(x + 20, y, name)]
        x += 40 + 7.2 * len(name)
    return parts


def at_rest() -> str:
    """A column a rank; in each, three bars: what lies there of parameters, gradients, optimizer state."""
    parts, kinds = [], list(COLOURS)[:3]
    rows = (("replicate", 4), ("zero1, zero2, zero3", 1), ("hybrid, two nodes of two", 2))
    for row, (name, share) in enumerate(rows):
        top = 40 + 110 * row
        parts.append(text(20, top - 8, name))
        for rank in range(4):
            left = 20 + 150 * rank
            parts.append(text(left + 60, top + 78, f"rank {rank}", "middle", 11))
            for line, kind in enumerate(kinds):
                y = top + 20 * line
                parts.append(box(left, y, 120, 16, "#e2e8f0"))
                first = 0 if share == 4 else rank % (4 // share)
                parts.append(box(left + 120 * first * share / 4, y, 120 * share / 4, 16, COLOURS[kind]))
    return svg(640, 400, parts + legend(kinds, 385))


def memory() -> str:
    with torch.device("meta"):
        model = Decoder(PRESETS["llama-8b"])
    parts, scale = [], 6.0
    for row, name in enumerate(STRATEGIES):
        plan = fs.plan(model, ranks=8, strategy=name, precision="bf16")
        sizes = (
            plan.parameter_bytes,
            plan.gradient_bytes,
            2 * plan.gradient_bytes,
            plan.full_bytes_at_peak,
        )
        y, x = 30 + 50 * row, 110.0
        parts.append(text(100, y + 20, name, "end"))
        for size_bytes, colour in zip(sizes, COLOURS.values(), strict=True):
            width = scale * size_bytes / GIB * 0.8
            parts.append(box(x, y, width, 30, colour))
            x += width
        parts.append(text(x + 8, y + 20, f"{sum(sizes) / GIB:.1f} GiB"))
    return svg(840, 275, parts + legend(list(COLOURS), 255))


if __name__ == "__main__":
    (HERE / "at-rest.svg").write_text(at_rest())
    (HERE / "memory.svg").write_text(memory())
