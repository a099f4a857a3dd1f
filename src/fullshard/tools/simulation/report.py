"""The figures of a simulation, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from fullshard.tools.simulation.host_link import LinkFigures
from fullshard.tools.simulation.measure import Figures
from fullshard.tools.simulation.run import Result, Scenario

_ALWAYS = ("step", "exposed communication", "busiest link in use", "sent", "messages")
_OPTIONS = (
    "rank",
    "strategy",
    "keep_node",
    "reduce",
    "precision",
    "checkpoint_activations",
    "keep_full",
    "compiled",
    "offload",
    "host_memory_bytes",
    "host_link_bytes_s",
    "multiprocessors",
)
TITLES = {"fullshard": "fullshard", "fsdp2": "FSDP2"}


def title(scenario: Scenario) -> str:
    how = [scenario.strategy, scenario.precision]
    how += [f"keep_node={scenario.keep_node}"] if scenario.keep_node is not None else []
    how += ["activations computed again"] if scenario.checkpoint_activations else []
    how += ["from inputs in host memory"] if scenario.checkpoint_activations == "offload" else []
    how += ["compiled"] if scenario.compiled else []
    how += [f"offload {scenario.offload}"] if scenario.offload else []
    device = torch.cuda.get_device_name(scenario.device) if scenario.device.type == "cuda" else "this CPU"
    if scenario.multiprocessors:
        how += [f"messages take {scenario.multiprocessors} multiprocessors"]
    about = f"{scenario.what.about}; {', '.join(how)}"
    return f"{about}\n{scenario.network}; {device} plays rank {scenario.rank}"


def table(results: list[Result]) -> str:
    """One column per engine; with two, a last one with the ratio to fullshard's figure."""
    names = [TITLES[result.engine] for result in results]
    rows = [["", *names, *([f"{names[1]} / {names[0]}"] if len(results) == 2 else [])]]
    for label, value, show in _rows():
        values = [value(result) for result in results]
        if any(values) or label.lstrip() in _ALWAYS:
            rows.append([label, *map(show, values), *([] if show in (_percent, _factor) else _ratio(values))])
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=False))])
        for row in rows
    ]
    misfits = [f"{TITLES[r.engine]}: the rank does not fit in memory" for r in results if r.figures is None]
    return "\n".join([line.rstrip() for line in [*lines, *misfits]])


def as_json(scenario: Scenario, results: list[Result]) -> dict[str, Any]:
    return {
        "model": scenario.what.name,
        "about": scenario.what.about,
        "network": asdict(scenario.network),
        "device": str(scenario.device),
        **{name: getattr(scenario, name) for name in _OPTIONS},
        "engines": {result.engine: _engine_json(result) for result in results},
    }


def _engine_json(result: Result) -> dict[str, Any] | None:
    if result.figures is None:
        return None
    derived = ("wire_s", "sent_bytes", "bound_s", "exposed_s")
    figures = asdict(result.figures) | {name: getattr(result.figures, name) for name in derived}
    figures["resident_bytes"] = result.resident_bytes
    if result.plan is not None:
        figures["rest_bytes"] = _rest_bytes(result)
    if result.link is not None:
        figures["host_link"] = {**asdict(result.link), "busy_s": result.link.busy_s}
        figures["host_bytes"] = result.host_bytes
    return figures


Value = Callable[[Result], float | None]


def _rows() -> list[tuple[str, Value, Callable[[float | None], str]]]:
    def figure(read: Callable[[Figures], float]) -> Value:
        return lambda result: None if result.figures is None else read(result.figures)

    def link(read: Callable[[LinkFigures], float]) -> Value:
        return lambda result: None if result.link is None else read(result.link)

    return [
        ("step", figure(lambda f: f.step_s), _milliseconds),
        ("  if messages took no time", figure(lambda f: f.without_wire_s), _milliseconds),
        ("  exposed communication", figure(lambda f: f.exposed_s), _milliseconds),
        ("busiest link in use", figure(lambda f: f.wire_s), _milliseconds),
        ("  of the step", figure(lambda f: 100 * f.wire_s / f.step_s), _percent),
        ("  step / max(compute, link)", figure(lambda f: f.step_s / f.bound_s), _factor),
        ("link inside in use", figure(lambda f: f.inside_s), _milliseconds),
        ("link across in use", figure(lambda f: f.across_s if f.inside_s else 0.0), _milliseconds),
        ("latency of all messages", figure(lambda f: f.latency_s), _milliseconds),
        ("sent", figure(lambda f: f.sent_bytes), _size),
        ("  across", figure(lambda f: f.across_bytes if f.inside_s else 0.0), _size),
        ("messages", figure(lambda f: f.messages), _count),
        ("host, until a step is issued", figure(lambda f: f.host_s if f.peak_bytes else 0.0), _milliseconds),
        ("memory, allocated at the peak", figure(lambda f: f.peak_bytes), _size),
        ("memory, reserved", figure(lambda f: f.reserved_bytes), _size),
        ("allocator retries", figure(lambda f: f.retries), _count),
        ("memory, at rest by plan", _rest_bytes, _size),
        ("host link, this machine's", link(lambda f: f.own_bytes_s), _rate),
        ("host link", link(lambda f: f.link_bytes_s), _rate),
        ("  to the device per step", link(lambda f: f.moved.pass_up + f.moved.step_up), _size),
        ("  from the device per step", link(lambda f: f.moved.pass_down + f.moved.step_down), _size),
        ("  in use in forward, backward", link(lambda f: f.pass_s), _milliseconds),
        ("  in use in the optimizer step", link(lambda f: f.step_s), _milliseconds),
        ("step over this link, computed", link(lambda f: f.computed_step_s), _milliseconds),
        ("host memory of a node by plan", lambda result: result.host_bytes, _size),
        ("process, resident at the peak", lambda result: result.resident_bytes, _size),
    ]


def _rest_bytes(result: Result) -> float | None:
    """Parameters, gradients and AdamW's two moments, on the device."""
    if result.plan is not None and result.plan.resting is not None:
        return result.plan.resting.bytes_at("device")
    return None if result.plan is None else result.plan.parameter_bytes + 3 * result.plan.gradient_bytes


def _ratio(values: list[float | None]) -> list[str]:
    if len(values) != 2:
        return []
    first, second = values
    return [f"{second / first:.2f}" if first and second else ""]


def _cell(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


def _count(value: float | None) -> str:
    return _cell(value, "{:.0f}")


def _factor(value: float | None) -> str:
    return _cell(value, "{:.2f}")


def _percent(value: float | None) -> str:
    return _cell(value, "{:.0f} %")


def _rate(value: float | None) -> str:
    return _cell(None if value is None else value / 1e9, "{:.3g} GB/s")


def _milliseconds(value: float | None) -> str:
    return _cell(None if value is None else value * 1e3, "{:.1f} ms")


def _size(value: float | None) -> str:
    if value is not None and value < 2**30:
        return f"{value / 2**20:.1f} MiB"
    return _cell(None if value is None else value / 2**30, "{:.2f} GiB")
