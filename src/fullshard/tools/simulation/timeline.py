"""One step as a timeline that Perfetto (ui.perfetto.dev) opens: compute, wire and host, by unit.

Nothing here costs a step that is not traced. For the traced step, methods of the live objects are wrapped
on their instances; afterwards the wrappers are taken off. On a device, compute is timed by events on its
stream and wire by events on the wire's; a span on compute begins when the device comes to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.engine.gather import current_task
from fullshard.engine.runtime import Runtime, engine_of
from fullshard.engine.unit import NO_TASK, LiveUnit, State
from fullshard.tools.simulation.group import Cluster
from fullshard.tools.simulation.models import Training
from fullshard.tools.simulation.wire import Message, event

ROWS = ("compute", "wire", "host")
ROOT = "(root)"


@dataclass(eq=False)
class Slice:
    """What a row does for a while."""

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
    """A stack of slices, of which the top is what the row does now: so spans of a row never overlap."""

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
        self._traffic = cluster.wire.traffic
        self._on_device = cluster.device.type == "cuda"
        self.host = Row(time.perf_counter)
        self.compute = Row(self._on_stream) if self._on_device else Row(time.perf_counter)
        self._undo: list[tuple[Any, str]] = []
        self._messages: list[Message] = []
        self._began_s = 0.0
        self._began: Any = None
        self._stream: Any = None

    def _on_stream(self) -> Any:
        now = event(timed=True)
        now.record(self._stream)
        return now

    def computes(self) -> bool:
        """The current stream is that of compute, not one that waits beside it."""
        return not self._on_device or bool(torch.cuda.current_stream() == self._stream)

    def __enter__(self) -> Tracer:
        if self._on_device:
            torch.cuda.synchronize()
            self._stream = torch.cuda.current_stream()
            self._began = self._on_stream()
        self._began_s = time.perf_counter()
        self._traffic.log = self._messages
        return self

    def __exit__(self, *_: object) -> None:
        self._traffic.log, self._traffic.label = None, None
        for owner, name in reversed(self._undo):
            del vars(owner)[name]
        self._undo.clear()
        if self._on_device:
            torch.cuda.synchronize()

    # ---- while it records

    def push(self, piece: Slice) -> None:
        self.compute.push(piece)
        self.host.push(piece)

    def drop(self, piece: Slice) -> None:
        self.compute.drop(piece)
        self.host.drop(piece)

    @contextmanager
    def span(self, piece: Slice) -> Iterator[None]:
        self.push(piece)
        try:
            yield
        finally:
            self.drop(piece)

    @contextmanager
    def on_host(self, piece: Slice) -> Iterator[None]:
        self.host.push(piece)
        try:
            yield
        finally:
            self.host.drop(piece)

    def sent_for(self, piece: Slice) -> None:
        self._traffic.label = piece

    def wrap(self, owner: Any, name: str, around: Callable[..., AbstractContextManager[Any]]) -> None:
        """`around(*args)` is entered for each call of this one object's method."""
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with around(*args, **kwargs) as tell:
                result = original(*args, **kwargs)
                if tell is not None:
                    tell(result)
            return result

        vars(owner)[name] = call
        self._undo.append((owner, name))

    # ---- when it is over

    def spans(self) -> list[Span]:
        found = [*self._of_row("compute", self.compute), *self._of_row("host", self.host)]
        for message in self._messages:
            piece = message.label or Slice(message.kind)
            if message.kind == "all-reduce":
                piece = replace(piece, kind=message.kind)
            start, stop = self._us(message.start), self._us(message.stop)
            found.append(Span("wire", piece, start, stop, message.sent_bytes))
        return found

    def _of_row(self, name: str, row: Row) -> list[Span]:
        found: list[Span] = []
        times = [(self._us(when), piece) for when, piece in row.marks]
        for (start, piece), (stop, _) in pairwise(times):
            if piece is None or stop <= start:
                continue
            last = found[-1] if found else None
            if last is not None and last.stop_us == start and last.slice.name == piece.name:
                found[-1] = replace(last, stop_us=stop)
            else:
                found.append(Span(name, piece, start, stop))
        return found

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
            _Watch(tracer, runtime)
        else:
            _watch_modules(tracer, training, hooks)
        _watch_optimizer(tracer, training.optimizer, hooks)
        training()
        if cluster.device.type == "cuda":
            torch.cuda.synchronize()
    return tracer.spans()


class _Watch:
    """fullshard's own objects, wrapped."""

    def __init__(self, tracer: Tracer, runtime: Runtime) -> None:
        self._tracer, self._runtime = tracer, runtime
        self._running: list[tuple[int, Slice]] = []  # forwards, and recomputations in backward
        self._backward: dict[int, Slice] = {}
        self._travelling: dict[tuple[str, int], Slice] = {}
        wrap = tracer.wrap
        for unit in runtime.units:
            wrap(unit, "issue", partial(self._host, "issue", unit))
            wrap(unit, "release", partial(self._release, unit))
            wrap(unit, "enter", partial(self._enter, unit))
            wrap(unit, "leave", partial(self._leave, unit))
        wrap(runtime, "_begin", self._begin)
        wrap(runtime, "_ended", self._ended)
        wrap(runtime, "_end_backward", self._end_backward)
        wrap(runtime.reduction, "_send", self._pack)
        wrap(runtime.reduction, "_finish_oldest", self._sum)
        wrap(runtime.comm.recorder, "begin", self._record)
        wrap(runtime.comm.watchdog, "wait_for", self._wait)

    def _slice(self, kind: str, unit: LiveUnit | str) -> Slice:
        name = unit if isinstance(unit, str) else unit.name
        return Slice(kind, name or ROOT)

    # ---- units

    @contextmanager
    def _host(self, kind: str, unit: LiveUnit) -> Iterator[None]:
        with self._tracer.on_host(self._slice(kind, unit)):
            yield

    @contextmanager
    def _release(self, unit: LiveUnit) -> Iterator[None]:
        if unit.state is State.AT_REST or unit.pass_state.depth or not unit.releasable:
            yield
            return
        with self._tracer.on_host(self._slice("release", unit)):
            yield

    @contextmanager
    def _enter(self, unit: LiveUnit, *_: Any) -> Iterator[None]:
        kind = "recompute" if self._runtime.gathering.backward is not None else "forward"
        piece = self._slice(kind, unit)
        self._running.append((unit.index, piece))
        self._tracer.push(piece)
        yield

    @contextmanager
    def _leave(self, unit: LiveUnit, *_: Any) -> Iterator[None]:
        yield
        at = max(i for i, (index, _) in enumerate(self._running) if index == unit.index)
        self._tracer.drop(self._running.pop(at)[1])

    # ---- backward

    @contextmanager
    def _begin(self, unit: LiveUnit, _: Any) -> Iterator[None]:
        if unit.index not in self._backward:
            self._backward[unit.index] = piece = self._slice("backward", unit)
            self._tracer.push(piece)
        yield

    @contextmanager
    def _ended(self, unit: LiveUnit) -> Iterator[Callable[[Any], None]]:
        def tell(over: Any) -> None:
            if over and unit.index in self._backward:
                self._tracer.drop(self._backward.pop(unit.index))

        yield tell

    @contextmanager
    def _end_backward(self) -> Iterator[None]:
        while self._backward:
            self._tracer.drop(self._backward.popitem()[1])
        with self._tracer.span(Slice("end of backward")):
            yield

    @contextmanager
    def _pack(self, index: int) -> Iterator[None]:
        with self._tracer.span(self._slice("pack", self._runtime.units[index])):
            yield

    @contextmanager
    def _sum(self) -> Iterator[None]:
        arriving = self._runtime.reduction.in_flight[0]
        with self._tracer.span(self._slice("sum", arriving.reduction.lane.unit)):
            yield

    # ---- the wire

    @contextmanager
    def _record(self, channel: str, phase: str, unit: str, _: int) -> Iterator[Callable[[int], None]]:
        """Every collective begins with an entry in the record, which names its unit."""
        piece = Slice(channel, unit or ROOT, phase)
        self._tracer.sent_for(piece)

        def tell(number: int) -> None:
            self._travelling[channel, number] = piece

        yield tell

    @contextmanager
    def _wait(self, _: Any, channel: str, number: int) -> Iterator[None]:
        what = self._travelling.pop((channel, number), None) or Slice(f"{channel} of the step before")
        piece = Slice("wait", what.unit, what.kind)
        with self._tracer.span(piece) if self._tracer.computes() else self._tracer.on_host(piece):
            yield


def _watch_modules(tracer: Tracer, training: Training, hooks: ExitStack) -> None:
    """Any other engine: the blocks' forward and backward, by torch's own hooks."""
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
        if module is not training.model:  # its inputs need no gradient: torch would not say when it ends
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
        for thread, row in enumerate(ROWS):
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
