"""The report as one HTML file that needs nothing else: findings, and a picture of the error."""

from __future__ import annotations

from html import escape
from math import log10

from fullshard.doctor.report import STAGES, Cell, Report

_CELL, _LEFT, _TOP = 26, 220, 46
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
.found { border-left: 4px solid #c0392b; padding: .2em 1em; margin: 1em 0; background: #fdf3f2 }
.accepted, .note { border-left: 4px solid #bbb; padding: .2em 1em; margin: 1em 0 }
.same { border-left: 4px solid #27865b; padding: .2em 1em; background: #f0f8f4 }
table { border-collapse: collapse }
td, th { padding: .2em .8em; text-align: left; border-bottom: 1px solid #ddd }
svg text { font: 12px system-ui, sans-serif; fill: #333 }
"""


def page(report: Report) -> str:
    found = [
        f'<div class="found"><b>{escape(f.name)}</b><br>{escape(f.text())}</div>' for f in report.findings
    ]
    found += [f'<div class="accepted">accepted: {escape(f.text())}</div>' for f in report.allowed]
    found += [f'<div class="note">{escape(note)}</div>' for note in report.notes]
    if report.same:
        found.insert(0, '<div class="same">The same as without sharding; nothing was found.</div>')
    title = f"{report.subject}: {report.ranks} ranks, {report.steps} steps"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(found)}"
        "<h2>Error by unit and step</h2><p>The largest difference between the sharded run and the unsharded "
        f"copy, as a share of what rounding allows ({report.comparisons} comparisons). Red is beyond it.</p>"
        f"{picture(report)}{_worst(report)}</body></html>"
    )


def picture(report: Report) -> str:
    """One row per unit, one column per step and stage."""
    units = sorted({cell.unit for cell in report.cells})
    stages = [stage for stage in STAGES if any(cell.stage == stage for cell in report.cells)]
    columns = [(step, stage) for step in range(report.steps) for stage in stages]
    width, height = _LEFT + len(columns) * _CELL + 10, _TOP + len(units) * _CELL + 40
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">']
    for row, unit in enumerate(units):
        y = _TOP + row * _CELL + _CELL * 2 // 3
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(unit or "root")}</text>')
    for index, (step, stage) in enumerate(columns):
        x = _LEFT + index * _CELL
        if index % len(stages) == 0:
            parts.append(f'<text x="{x}" y="16">step {step}</text>')
        parts.append(f'<text x="{x + 8}" y="36">{stage[0]}</text>')
    places = {(cell.step, cell.stage, cell.unit): cell for cell in report.cells}
    for row, unit in enumerate(units):
        for index, (step, stage) in enumerate(columns):
            cell = places.get((step, stage, unit))
            if cell is not None:
                parts.append(_rectangle(cell, _LEFT + index * _CELL, _TOP + row * _CELL))
    letters = ", ".join(f"{stage[0]}: {stage}" for stage in stages)
    parts.append(f'<text x="{_LEFT}" y="{height - 12}">{letters}</text></svg>')
    return "".join(parts)


def _rectangle(cell: Cell, x: int, y: int) -> str:
    about = f"{cell.stage} {cell.tensor}: {cell.apart:.3g} apart, {cell.allowed:.2g} allowed"
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL - 2}" height="{_CELL - 2}" fill="{colour(cell.share)}">'
        f"<title>{escape(about)}</title></rect>"
    )


def colour(share: float) -> str:
    """White for no error, through blue up to what is allowed; red beyond it, the darker the farther."""
    if not share:
        return "#eef2f5"
    if share <= 1:
        strength = max(0.0, min(1.0, 1 + log10(max(share, 1e-6)) / 6))
        return f"rgb({int(225 - 150 * strength)},{int(235 - 100 * strength)},{int(245 - 40 * strength)})"
    strength = min(1.0, log10(share) / 6) if share < float("inf") else 1.0
    return f"rgb({int(235 - 85 * strength)},{int(110 - 90 * strength)},{int(95 - 75 * strength)})"


def _worst(report: Report) -> str:
    worst = sorted(report.cells, key=lambda cell: -cell.share)[:20]
    rows = "".join(
        f"<tr><td>{cell.step}</td><td>{cell.stage}</td><td>{escape(cell.unit or 'root')}</td>"
        f"<td>{escape(cell.tensor)}</td><td>{cell.apart:.3g}</td><td>{cell.allowed:.2g}</td></tr>"
        for cell in worst
    )
    head = "".join(f"<th>{name}</th>" for name in ("step", "stage", "unit", "tensor", "apart", "allowed"))
    return f"<h2>Largest differences</h2><table><tr>{head}</tr>{rows}</table>"
