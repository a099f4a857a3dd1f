"""A run as one HTML file that stands alone: from what lies in its folder, at any time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fullshard.byte_sizes import size
from fullshard.training.charts import Series, chart
from fullshard.training.folder import RunFolder

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --soft: #667; --rule: #dde;
  --card: #f6f7f9; --c0: #2563c9; --c1: #d9730d; --c2: #1a8754; --c3: #a03bb5; --c4: #b3261e; --c5: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171a; --ink: #e6e8eb; --soft: #9aa3af;
  --rule: #2c3138; --card: #1d2025; --c0: #6ea8ff; --c1: #ffa94d; --c2: #5bd197; --c3: #d58be6;
  --c4: #ff8a80; --c5: #9aa3af; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 1120px; padding: 24px; }
h1 { font-size: 1.5em; margin: 0 0 .2em; } h2 { font-size: 1.1em; margin: 1.8em 0 .5em; }
.note, .label, .tick, .legend, dt { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; }
.cards div { background: var(--card); border-radius: 8px; padding: 10px 14px; }
.cards dt { font-size: .85em; }
.cards dd { margin: 0; font-size: 1.25em; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 18px; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 4px; }
.legend { margin: 0; font-size: .9em; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.c0 { --own: var(--c0); } .c1 { --own: var(--c1); } .c2 { --own: var(--c2); }
.c3 { --own: var(--c3); } .c4 { --own: var(--c4); } .c5 { --own: var(--c5); }
.line { stroke: var(--own); } .dot { fill: var(--own); } .legend span { color: var(--own); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: 3px 14px 3px 0; text-align: right; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
pre { background: var(--card); border-radius: 8px; padding: 12px 14px; overflow-x: auto;
  white-space: pre-wrap; }
"""


def write_report(folder: RunFolder) -> Path:
    """Write report.html from metrics.jsonl, summary.json and config.json."""
    folder.replace(folder.report.name, render(folder))
    return folder.report


def render(folder: RunFolder) -> str:
    lines = folder.read_metrics()
    train = [line for line in lines if line.get("kind") == "train"]
    validation = [line for line in lines if line.get("kind") == "validation"]
    summary, config = folder.read("summary.json") or {}, folder.read("config.json") or {}
    title = f"{folder.path.name}: {summary.get('model', 'a model')}"
    parts = [
        f"<h1>{escape(title)}</h1><p class='note'>{escape(str(summary.get('status', 'no status')))}</p>",
        *(f"<p class='note'>{escape(str(note))}</p>" for note in summary.get("notes", ())),
        _cards(train, validation, summary),
        _charts(train, validation, len(summary.get("held", ()))),
        _memory(summary),
        _text("Text from the trained model", summary.get("sample")),
        _plan(summary),
        _text("Config", json.dumps(config, indent=2)),
        _versions(summary),
        # The numbers of the charts, all of them, for a program that reads this page.
        f"<script type='application/json' id='metrics'>{_script_safe(json.dumps(lines))}</script>",
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _script_safe(text: str) -> str:
    """Nothing in it can end the element it is in."""
    return text.replace("<", "\\u003c")


def _cards(
    train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]
) -> str:
    cards: list[tuple[str, str, str]] = []
    if train:
        last = train[-1]
        cards += [
            ("step", "step", f"{last['step']:,} of {summary.get('steps', last['step']):,}"),
            ("train-loss", "training loss", f"{last['loss']:.4f}"),
        ]
    if validation:
        best = min(line["loss"] for line in validation)
        cards.append(("validation-loss", "validation loss", f"{validation[-1]['loss']:.4f}"))
        cards.append(("best-validation-loss", "best validation loss", f"{best:.4f}"))
    if train:
        rates = sorted(line["tokens_per_s"] for line in train)
        cards.append(("tokens", "tokens seen", f"{train[-1]['tokens']:,}"))
        cards.append(("tokens-per-s", "tokens/s (median)", f"{rates[len(rates) // 2]:,.0f}"))
    if "parameters" in summary:
        cards.append(("parameters", "parameters", f"{summary['parameters']:,}"))
        cards.append(("ranks", "ranks", f"{summary['ranks']}, {summary['device']}"))
    items = [f"<div><dt>{name}</dt><dd id='{key}'>{escape(value)}</dd></div>" for key, name, value in cards]
    return f"<dl class='cards'>{''.join(items)}</dl>"


def _charts(train: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]], ranks: int) -> str:
    def points(
        lines: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0
    ) -> list[tuple[float, float]]:
        return [(line["step"], line[name] * scale) for line in lines if line.get(name) is not None]

    losses = [Series("training", points(train, "loss"))]
    if validation:
        losses.append(Series("validation", points(validation, "loss"), dots=True))
    memory = [
        Series(
            f"rank {rank}",
            [(line["step"], line["memory"][rank] / 2**20) for line in train if len(line["memory"]) > rank],
        )
        for rank in range(min(6, ranks or 1))
    ]
    figures = [
        ("loss", "Loss (nats a token)", chart(losses, "step", "loss")),
        (
            "learning-rate",
            "Learning rate",
            chart([Series("", points(train, "learning_rate"))], "step", "rate"),
        ),
        (
            "gradient-norm",
            "Gradient norm, before clipping",
            chart([Series("", points(train, "gradient_norm"))], "step", "norm"),
        ),
        (
            "throughput",
            "Tokens a second, all ranks",
            chart([Series("", points(train, "tokens_per_s"))], "step", "tokens/s"),
        ),
        ("memory", "Memory of each rank, MiB", chart(memory, "step", "MiB")),
    ]
    items = [
        f"<figure id='chart-{key}'><figcaption>{name}</figcaption>{svg}</figure>"
        for key, name, svg in figures
    ]
    return f"<h2>Training</h2><div class='charts'>{''.join(items)}</div>"


def _memory(summary: Mapping[str, Any]) -> str:
    held, unsharded, peaks = summary.get("held"), summary.get("whole"), summary.get("peaks")
    if not held or not unsharded or not peaks:
        return ""
    kinds = ("parameters", "gradients", "optimizer_state", "total")
    rows = [(f"rank {rank}", one, size(peaks[rank])) for rank, one in enumerate(held)]
    rows.append(("one unsharded process", unsharded, ""))
    cells = [
        [name, *(size(one[kind]) for kind in kinds), f"{one['total'] / unsharded['total']:.1%}", peak]
        for name, one, peak in rows
    ]
    note = "allocated on its GPU" if summary.get("device") == "cuda" else "resident in its process"
    head = ["at rest", "parameters", "gradients", "optimizer state", "total", "share", "peak"]
    return (
        "<h2>Memory per rank</h2>"
        f"<p class='note'>At rest: tensors between steps. Peak: the most that was {note}.</p>"
        + _table("memory", head, cells)
    )


def _plan(summary: Mapping[str, Any]) -> str:
    units = summary.get("units")
    if not units:
        return ""
    head = ["unit", "parameters", "at rest on a rank", "full", "gathers a step"]
    cells = [
        [
            unit["name"] or "(root)",
            f"{unit['elements']:,}",
            size(unit["rest"]),
            size(unit["full"]),
            str(unit["gathers"]),
        ]
        for unit in units
    ]
    note = (
        f"Strategy {summary.get('strategy')}. Full values at the peak: {size(summary['full_at_peak'])}; "
        f"sent by a rank in a step: {size(summary['sent_per_step'])}."
    )
    return f"<h2>Plan</h2><p class='note'>{escape(note)}</p>{_table('plan', head, cells)}"


def _versions(summary: Mapping[str, Any]) -> str:
    versions = summary.get("versions", {})
    return "<h2>Versions</h2>" + _table(
        "versions", ["what", "version"], [[k, str(v)] for k, v in versions.items()]
    )


def _table(key: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='wide'><table id='{key}'><tr>{top}</tr>{body}</table></div>"


def _text(name: str, text: Any) -> str:
    return f"<h2>{escape(name)}</h2><pre>{escape(str(text))}</pre>" if text else ""
