"""One step as a timeline that Perfetto (ui.perfetto.dev) opens: compute, links and host, by unit.

Steps that are not traced cost nothing. For the traced step the engine has an observer; other engines are
observed by torch's module hooks. On a GPU, compute is timed by events on its stream and links by the device's
clock; a span of compute begins when the device reaches it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.comm.tags import OpTag
from fullshard.engine.graph_tasks import NO_TASK, current_task
from fullshard.engine.observer import Activity
from fullshard.engine.runtime import engine_of
from fullshard.tools.simulation.group import Cluster
from fullshard.tools.simulation.models import Training
from fullshard.tools.simulation.wire import Message, event

LINK_ROWS = ("wire", "inside", "across")  # a flat network has the first, nodes have the others
ROWS = ("compute", *LINK_ROWS, "host")
ROOT = "(root)"


@dataclass(eq=False)
class Slice:
    """One activity on a row."""

    kind: str  # forward, recompute, backward, gather, reduce, wait, release, ...
    unit: str = ""
    detail: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.unit, f"({self.detail})" if self.detail else "")))


@dataclass(frozen=True)
class Span:
    """A slice with its times, in microseconds since the step began."""

    row: str
    slice: Slice
    start_us: float
    stop_us: float
    sent_bytes: float | None = None


class Row:
    """A stack of slices, of which the top one runs: so spans of a row never overlap."""

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self._stack: list[Slice] = []
        self.marks: list[tuple[Any, Slice | None]] = []

    def push(self, piece: Slice) -> None:
        self._stack.append(piece)
        self.marks.append((self._now(), piece))

    def drop(self, piece: Slice) -> None:
        self._stack.remove(piece)
        self.marks.append((self._now(), self._stack[-1] if self._stack else None))


class Tracer:
    """Records one step: `with` begins it, `spans` reads it when it is over."""

    def __init__(self, cluster: Cluster) -> None:
        self._wire, self._traffic = cluster.wire, cluster.wire.traffic
        self._flat = cluster.network.inside is None
        self._on_device = cluster.device.type == "cuda"
        self.host = Row(time.perf_counter)
        self.compute = Row(self._on_stream) if self._on_device else Row(time.perf_counter)
        self._messages: list[Message] = []
        self._began_s = self._wire_began_s = 0.0
        self._began: Any = None
        self._stream: Any = None

    def _on_stream(self) -> Any:
        now = event(timed=True)
        now.record(self._stream)
        return now

    def computes(self) -> bool:
        """Whether the current stream is the one that computes."""
        return not self._on_device or bool(torch.cuda.current_stream() == self._stream)

    def __enter__(self) -> Tracer:
        if self._on_device:
            torch.cuda.synchronize()
            self._stream = torch.cuda.current_stream()
            on_device_s = self._wire.now()
            self._began = self._on_stream()
        self._began_s = time.perf_counter()
        self._wire_began_s = on_device_s if self._on_device else self._began_s
        self._traffic.log = self._messages
        return self

    def __exit__(self, *_: object) -> None:
        self._traffic.log, self._traffic.label = None, None
        if self._on_device:
            torch.cuda.synchronize()

    # ---- while it records

    def push(self, piece: Slice) -> None:
        self.compute.push(piece)
        self.host.push(piece)

    def drop(self, piece: Slice) -> None:
        self.compute.drop(piece)
        self.host.drop(piece)

    def sent_for(self, piece: Slice) -> None:
        self._traffic.label = piece

    # ---- when it is over

    def spans(self) -> list[Span]:
        spans = [*self._of_row("compute", self.compute), *self._of_row("host", self.host)]
        for message in self._messages:
            piece = message.label or Slice(message.kind)
            if message.kind == "all-reduce":
                piece = replace(piece, kind=message.kind)
            for link, times in self._wire.intervals(message).items():
                start, stop = ((when - self._wire_began_s) * 1e6 for when in times)
                sent = message.load.inside_bytes if link == "inside" else message.load.across_bytes
                spans.append(Span("wire" if self._flat else link, piece, start, stop, sent))
        return spans

    def _of_row(self, name: str, row: Row) -> list[Span]:
        spans: list[Span] = []
        times = [(self._us(when), piece) for when, piece in row.marks]
        for (start, piece), (stop, _) in pairwise(times):
            if piece is None or stop <= start:
                continue
            last = spans[-1] if spans else None
            if last is not None and last.stop_us == start and last.slice.name == piece.name:
                spans[-1] = replace(last, stop_us=stop)
            else:
                spans.append(Span(name, piece, start, stop))
        return spans

    def _us(self, when: Any) -> float:
        if isinstance(when, float):
            return (when - self._began_s) * 1e6
        return float(self._began.elapsed_time(when)) * 1e3


def trace(training: Training, cluster: Cluster) -> list[Span]:
    """The spans of one more step."""
    tracer = Tracer(cluster)
    runtime = engine_of(training.model)
    with ExitStack() as hooks, tracer:
        if runtime is not None:
            runtime.observer = _Recorder(tracer)
            hooks.callback(setattr, runtime, "observer", None)
        else:
            _watch_modules(tracer, training, hooks)
        _watch_optimizer(tracer, training.optimizer, hooks)
        training()
        if cluster.device.type == "cuda":
            torch.cuda.synchronize()
    return tracer.spans()


_SHOWN_AS = {"gather": "issue", "send": "pack"}  # the message itself is on the wire's row
_ON_HOST = ("gather", "release")  # no work for the device


class _Recorder:
    """An `Observer` of fullshard's engine that fills a tracer's rows."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: list[tuple[Activity, Slice]] = []
        self._in_flight: dict[tuple[str, int], Slice] = {}
        self._waits: list[tuple[Slice, tuple[Row, ...]]] = []

    def begin(self, activity: Activity, unit: str) -> None:
        if activity == "end of backward":
            for begun, piece in [entry for entry in self._open if entry[0] == "backward"]:
                self.end(begun, piece.unit)  # autograd has no node that would end them before
        piece = Slice(
            _SHOWN_AS.get(activity, activity), "" if activity == "end of backward" else unit or ROOT
        )
        self._open.append((activity, piece))
        for row in self._rows(activity):
            row.push(piece)

    def end(self, activity: Activity, unit: str) -> None:
        unit = "" if activity == "end of backward" else unit or ROOT
        for at in range(len(self._open) - 1, -1, -1):
            if self._open[at][0] == activity and self._open[at][1].unit == unit:
                _, piece = self._open.pop(at)
                for row in self._rows(activity):
                    row.drop(piece)
                return

    def _rows(self, activity: Activity) -> tuple[Row, ...]:
        host, compute = self._tracer.host, self._tracer.compute
        return (host,) if activity in _ON_HOST else (compute, host)

    def issued(self, channel: str, number: int, tag: OpTag) -> None:
        piece = Slice(channel, tag.unit or ROOT, tag.phase)
        self._tracer.sent_for(piece)
        self._in_flight[channel, number] = piece

    def waiting(self, channel: str, number: int) -> None:
        operation = self._in_flight.pop((channel, number), None) or Slice(f"{channel} of the step before")
        piece = Slice("wait", operation.unit, operation.kind)
        host, compute = self._tracer.host, self._tracer.compute
        rows = (compute, host) if self._tracer.computes() else (host,)
        self._waits.append((piece, rows))
        for row in rows:
            row.push(piece)

    def waited(self, channel: str, number: int) -> None:
        piece, rows = self._waits.pop()
        for row in rows:
            row.drop(piece)


def _watch_modules(tracer: Tracer, training: Training, hooks: ExitStack) -> None:
    """Of any other engine: forward and backward of the blocks, by torch's hooks."""
    names = {module: name for name, module in training.model.named_modules()}
    running: dict[tuple[bool, nn.Module], Slice] = {}

    def begin(backward: bool, module: nn.Module, *_: Any) -> None:
        recomputed = "recompute" if current_task() != NO_TASK else "forward"
        piece = Slice("backward" if backward else recomputed, names[module] or ROOT)
        running[backward, module] = piece
        tracer.push(piece)

    def end(backward: bool, module: nn.Module, *_: Any) -> None:
        tracer.drop(running.pop((backward, module)))

    for module in (training.model, *training.blocks):
        if module._compiled_call_impl is not None:
            continue  # a hook would be compiled too
        removers = [
            module.register_forward_pre_hook(partial(begin, False), prepend=True),
            module.register_forward_hook(partial(end, False)),
        ]
        if module is not training.model:  # its inputs need no gradient: torch has no hook for its end
            removers += [
                module.register_full_backward_pre_hook(partial(begin, True), prepend=True),
                module.register_full_backward_hook(partial(end, True)),
            ]
        for remover in removers:
            hooks.callback(remover.remove)


def _watch_optimizer(tracer: Tracer, optimizer: torch.optim.Optimizer, hooks: ExitStack) -> None:
    piece = Slice("optimizer step")
    hooks.callback(optimizer.register_step_pre_hook(lambda *_: tracer.push(piece)).remove)
    hooks.callback(optimizer.register_step_post_hook(lambda *_: tracer.drop(piece)).remove)


@dataclass
class Timeline:
    """Traced steps of one or more engines, as one file in Chrome's trace format."""

    events: list[dict[str, Any]] = field(default_factory=list)
    _engines: int = 0

    def add(self, engine: str, spans: list[Span]) -> None:
        number, self._engines = self._engines, self._engines + 1
        self._name("process_name", number, 0, engine)
        links = {span.row for span in spans} & set(LINK_ROWS)
        for thread, row in enumerate(ROWS):
            if row not in LINK_ROWS or row in links:
                self._name("thread_name", number, thread, row)
                self._name("thread_sort_index", number, thread, thread)
        for span in sorted(spans, key=lambda span: span.start_us):
            start, stop = round(span.start_us, 3), round(span.stop_us, 3)
            args: dict[str, Any] = {"unit": span.slice.unit} if span.slice.unit else {}
            if span.sent_bytes is not None:
                args["sent_bytes"] = round(span.sent_bytes)
            self.events.append(
                {
                    "ph": "X",
                    "pid": number,
                    "tid": ROWS.index(span.row),
                    "name": span.slice.name,
                    "cat": span.slice.kind,
                    "ts": start,
                    "dur": round(stop - start, 3),
                    "args": args,
                }
            )

    def _name(self, kind: str, engine: int, thread: int, value: str | int) -> None:
        key = "sort_index" if kind.endswith("index") else "name"
        self.events.append({"ph": "M", "pid": engine, "tid": thread, "name": kind, "args": {key: value}})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}, indent=0))
