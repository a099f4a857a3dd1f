"""A thread that notices when this process stands still: it writes where, and warns whom it waits for.

Once per second it looks at this process's flight recorders, which costs microseconds while they move, and
twice per second while one stands still. Where one has not moved for two seconds, the thread writes a note for
the other ranks: the line of the script, the stack, and the collective of torch.distributed in which the
script waits, if any. Where this rank has waited for four, it logs a warning that names the late ranks and
what they do; the next after twice the time. Nothing is raised here: a rank may be late for good reasons, and
is waited for. Where ranks are on several hosts, it publishes and reads summaries as well (`host_watch`).
"""

from __future__ import annotations

import linecache
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm import standing
from fullshard.comm.completions import Completions
from fullshard.comm.flight_recorder import FlightRecorder
from fullshard.comm.host_watch import HostWatch
from fullshard.comm.recorder_files import Note
from fullshard.comm.standing import Standing
from fullshard.comm.store_link import StoreLink, link_to_default_store
from fullshard.environment import host_name

_log = logging.getLogger("fullshard")
_TICK_S, _QUICK_TICK_S = 1.0, 0.5  # and while a recorder stands still
_NOTE_S = 2.0
WARN_S, DEVICE_S = 4.0, 4.0
_STORE_S = 0.3  # to wait for the store, once per second; an answer that is later is for the next time
# Functions of torch.distributed that return on no rank before all ranks of the group have called them.
_COLLECTIVES = frozenset(
    [
        *("barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor"),
        *("all_gather_single", "all_gather_object", "all_to_all", "all_to_all_single"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    ]
)
_SMALL_BYTES = 2**20  # data of a larger one may be on its way for seconds, on ranks that began it
_STACK_SIZE, _STACK_DEPTH = 4000, 24
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_COLLECTIVES_FILE = os.path.join(_TORCH, "distributed", "distributed_c10d.py")


@dataclass
class _Watch:
    """What is known of one recorder that does not move."""

    hosts: HostWatch
    completions: Completions | None = None  # where the host does not wait for the device
    next_device_warning_s: float = DEVICE_S
    sequence: int = -1
    quiet_s: float = 0.0
    place: tuple[Any, ...] = ()  # where the script stands: a frame, or operations that it is blocked in
    place_since_ns: int = 0
    next_warning_s: float = WARN_S
    warned: bool = False
    earlier: dict[int, Standing] = field(default_factory=dict)
    stacks: set[int] = field(default_factory=set)  # ranks of other hosts whose stacks were printed


_watched: weakref.WeakKeyDictionary[FlightRecorder, _Watch] = weakref.WeakKeyDictionary()
_thread_of_pid = 0
_link: StoreLink | None = None  # of this world, once ranks are on several hosts
_link_world: Any = None
_new = threading.Event()
_lock, _link_lock = threading.Lock(), threading.Lock()


def watch(recorder: FlightRecorder, completions: Completions | None = None) -> None:
    """Look at this recorder from now on, as long as it exists; and at what its device completes."""
    global _thread_of_pid
    with _lock:
        hosts = HostWatch(recorder)
        _watched[recorder] = _Watch(hosts, completions)
        recorder.before_leaving = partial(_leave, hosts)
        if _thread_of_pid != os.getpid():  # a forked process has no threads
            _thread_of_pid = os.getpid()
            threading.Thread(target=_run, name="fullshard monitor", daemon=True).start()
    _new.set()


def _leave(hosts: HostWatch, recorder: FlightRecorder) -> None:
    hosts.leave(recorder, _store() if recorder.spans_hosts else None)


def _store() -> StoreLink | None:
    global _link, _link_world
    with _link_lock:
        if dist.is_initialized() and _link_world is not dist.group.WORLD:
            _link, _link_world = link_to_default_store(), dist.group.WORLD
    return _link


def forget_world() -> None:
    """The process groups have ended: hold none of them, and no store."""
    global _link, _link_world
    with _link_lock:
        _link = _link_world = None


def _run() -> None:
    tick_s = _TICK_S
    while True:
        _new.wait(tick_s)  # a new recorder is published at once: a run may fail in its first second
        _new.clear()
        with _lock:
            watched = list(_watched.items())
        _exchange_summaries([state.hosts for _, state in watched])
        stands_s: dict[int, float] = {}
        for recorder, state in watched:
            try:
                stands_s[recorder.thread] = _stands_s(recorder.thread, watched)
                _look(recorder, state, stands_s[recorder.thread])
            except Exception as error:  # noqa: BLE001  a recorder that is closed meanwhile, a full log: no harm
                _log.debug("the monitor failed: %r", error)
        tick_s = _QUICK_TICK_S if any(s >= _TICK_S for s in stands_s.values()) else _TICK_S
        watched.clear()
        recorder = state = None  # type: ignore[assignment]  # they may be collected while this thread sleeps


def _stands_s(thread: int, watched: list[tuple[FlightRecorder, _Watch]]) -> float:
    """How long a thread has stood still: one that works with another model does not."""
    return min(recorder.quiet_s() for recorder, _ in watched if recorder.thread == thread)


def _exchange_summaries(watches: list[HostWatch]) -> None:
    """Publish what the ranks of this host do, and read the other hosts' summaries while one here waits."""
    try:
        jobs = [job for watch in watches if (job := watch.job()) is not None]
        link = _store() if any(watch.spans_hosts for watch in watches) else None
        if link is not None:
            if jobs:
                link.submit(jobs, _STORE_S)
            for watch in watches:
                watch.settle(link)
    except Exception as error:  # noqa: BLE001  as above
        _log.debug("the monitor failed: %r", error)


def _look_at_device(recorder: FlightRecorder, state: _Watch) -> None:
    """Warn of an operation that the device does not come to while nothing before it completes either."""
    stuck = state.completions.oldest() if state.completions is not None else None
    if stuck is None or stuck.seconds < _NOTE_S:
        recorder.stuck_on_device, state.next_device_warning_s = None, DEVICE_S
        return
    recorder.stuck_on_device = stuck.channel, stuck.number
    if stuck.seconds < state.next_device_warning_s - _TICK_S / 2:
        return
    state.next_device_warning_s *= 2
    standings = standing.standings(recorder, stuck.channel, stuck.number)
    late = "".join(f"; late: {text}" for text in standing.late_texts(recorder, stuck.channel, standings, {}))
    _log.warning(
        "rank %d on %s: %s%s", recorder.rank, host_name(), _device_text(recorder, stuck.seconds), late
    )


def _device_text(recorder: FlightRecorder, seconds: float = 0.0) -> str:
    if recorder.stuck_on_device is None:
        return ""
    during = f" for {seconds:.0f} s" if seconds else ""
    return f"the device has not come to {recorder.operation(*recorder.stuck_on_device)}{during}"


def _look(recorder: FlightRecorder, state: _Watch, stands_s: float) -> None:
    _look_at_device(recorder, state)
    if recorder.sequence != state.sequence:
        if state.warned:
            _log.warning("rank %d: the operation went on after %.0f s", recorder.rank, state.quiet_s)
        state.sequence, state.next_warning_s, state.earlier, state.warned = (
            recorder.sequence,
            WARN_S,
            {},
            False,
        )
        state.stacks.clear()
    state.quiet_s = quiet_s = recorder.quiet_s()
    if min(quiet_s, stands_s) < _NOTE_S:
        return
    recorder.write_note(_own_note(recorder, state))
    blocked = recorder.blocked_in
    if blocked is None:
        return
    if state.warned:
        _print_stacks(recorder, state)
    if quiet_s < state.next_warning_s - 2 * _TICK_S:
        return
    standings = standing.standings(recorder, *blocked)
    if quiet_s < state.next_warning_s:
        state.earlier = {**standings, **state.earlier}
        return
    if text := standing.warning(recorder, quiet_s, standings, state.earlier):
        state.next_warning_s *= 2
        state.earlier, state.warned = {}, True
        _log.warning("%s", text)


def _print_stacks(recorder: FlightRecorder, state: _Watch) -> None:
    """Of late ranks of other hosts, where they have come: nobody can run py-spy on all hosts."""
    for rank, peer in recorder.remote.items():
        if peer.stack and rank not in state.stacks:
            state.stacks.add(rank)
            _log.warning("stack of %s:\n%s", peer.place().who, peer.stack)


def _own_note(recorder: FlightRecorder, state: _Watch) -> Note:
    frame = sys._current_frames().get(recorder.thread)
    name, members = _collective(frame)
    waits = tuple(
        (other.folder.key, *blocked)
        for other in list(_watched)
        if other.thread == recorder.thread and (blocked := other.blocked_in) is not None
    )
    # A wait of ours calls torch again every second: it is known by its operation, not by its frame.
    place = waits or ((id(frame), frame.f_lasti) if frame is not None else ())
    now_ns = time.monotonic_ns()
    if place != state.place:
        state.place, state.place_since_ns = place, now_ns
    stack = _stack(recorder.thread)
    at = "; ".join(filter(None, (_device_text(recorder), _line(frame))))
    return Note(at, name, members, waits, state.place_since_ns, now_ns, stack)


def _stack(first: int) -> str:
    """Of all threads of this process, the one that uses the recorder first; the innermost lines of each."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    # This one has `frames` among its variables: a cycle that would keep what all threads compute with.
    del frames[threading.get_ident()]
    texts, room = [], _STACK_SIZE
    for ident in sorted(frames, key=lambda each: (each != first, each)):
        if str(names.get(ident, "")).startswith("fullshard "):
            continue
        lines = [f"  {f.filename[-80:]}:{f.lineno} in {f.name}" for f in _frames(frames[ident])]
        text = "\n".join([f"thread {names.get(ident, ident)}, innermost first:", *lines])
        if len(text) > room:
            break
        texts.append(text)
        room -= len(text)
    return "\n".join(texts)


def _frames(frame: FrameType | None) -> Iterator[traceback.FrameSummary]:
    for _ in range(_STACK_DEPTH):
        if frame is None:
            return
        code = frame.f_code
        yield traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name, lookup_line=False)
        frame = frame.f_back


def _line(frame: FrameType | None) -> str:
    """The innermost line that is not torch's or ours, with the function that it calls."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _PACKAGE, "<frozen")):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).strip()[:120]
    return f"{file[-120:]}:{line} in {frame.f_code.co_name}" + (f": {text}" if text else "")


def _collective(frame: FrameType | None) -> tuple[str, int]:
    """The collective that the script called and waits in, and the ranks that it needs, as a mask."""
    found: FrameType | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            return "", 0  # one of ours: it is in a recorder
        if found is None and file == _COLLECTIVES_FILE and frame.f_code.co_name in _COLLECTIVES:
            found = frame
        frame = frame.f_back
    if found is None:
        return "", 0
    given = dict(found.f_locals)
    if sum(map(_bytes, given.values())) > _SMALL_BYTES:
        return "", 0
    ranks = dist.get_process_group_ranks(given.get("group") or dist.group.WORLD)
    return found.f_code.co_name, sum(1 << rank for rank in ranks)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel()) * value.element_size()
    return sum(map(_bytes, value)) if type(value) in (list, tuple) else 0
