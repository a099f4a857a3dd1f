"""What a benchmark leaves behind: one line about the machine, Markdown tables, bar plots.

Shared by all benchmarks, so that their results look alike. Nothing here names the host or a path: results
are meant to be published.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

OUTPUT = Path(__file__).resolve().parent.parent / "bench-output"
Cell = str | int | float | None

OURS_COLOR, BASE_COLOR, OTHER_COLOR = "#2b6cb0", "#4a5568", "#b8c0cc"


def machine() -> str:
    """One line: processor, cores, GPUs, torch, Python."""
    cores = os.cpu_count() or 1
    parts = [f"{_processor()}, {cores} {'core' if cores == 1 else 'cores'}"]
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        parts.append(f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    parts += [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    return "; ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join(names[0].split()) if names else platform.machine()


def markdown(headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table. A column that holds numbers only is aligned to the right; None is a dash."""
    texts = [[_text(cell) for cell in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in texts) and bool(rows) for i in range(len(headers))]
    widths = [max(len(row[i]) for row in [list(headers), *texts]) for i in range(len(headers))]
    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    lines = [_line(headers, widths, numeric), _line(rule, widths, numeric)]
    return "\n".join([*lines, *(_line(row, widths, numeric) for row in texts)])


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    sized = zip(cells, widths, numeric, strict=True)
    return f"| {' | '.join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in sized)} |"


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:.0f}"
    return "-" if cell is None else str(cell)


def _is_number(text: str) -> bool:
    return text in ("-", "") or text.replace(".", "", 1).replace("-", "", 1).removesuffix("x").isdigit()


def bar_plot(
    path: Path,
    groups: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    unit: str,
    baseline: str | None = None,
    ours: str = "fullshard",
) -> Path:
    """One panel a group, one horizontal bar a contender, shorter is better; the suffix says the format.

    Panels have scales of their own, because groups differ by orders of magnitude. Bars whose name begins
    with `ours` are coloured. Each bar is labelled with its value and, where its group has `baseline`, with
    its ratio to it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [len(bars) for bars in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), 1, squeeze=False, figsize=(9.0, 0.9 + sum(0.3 * h + 0.7 for h in heights)),
        height_ratios=[h + 0.6 for h in heights], layout="constrained",
    )  # fmt: skip
    for axis, (name, bars) in zip(axes[:, 0], groups.items(), strict=True):
        base = bars.get(baseline) if baseline else None
        colors = [
            OURS_COLOR if bar.startswith(ours) else BASE_COLOR if bar == baseline else OTHER_COLOR
            for bar in bars
        ]
        drawn = axis.barh(list(bars), list(bars.values()), color=colors, height=0.72)
        labels = [_bar_label(value, base) for value in bars.values()]
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.bar_label(drawn, labels, padding=4, fontsize=8, bbox=behind)
        if base is not None:
            axis.axvline(base, color=BASE_COLOR, linewidth=0.8, linestyle=":", zorder=0)
        axis.set_title(name, loc="left", fontsize=10, fontweight="bold")
        axis.set_xlim(0, max(bars.values()) * 1.2)
        axis.invert_yaxis()
        axis.tick_params(labelsize=8, length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1, 0].set_xlabel(unit + (f"; x is the ratio to {baseline}" if baseline else ""), fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _bar_label(value: float, base: float | None) -> str:
    shown = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{shown}  ({value / base:.2f}x)" if base else shown
