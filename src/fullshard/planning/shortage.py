"""When a device runs out of memory: what was held, by kind and unit, against the plan, and what would fit.

Nothing is watched while a model trains. An OutOfMemoryError that ends the script is explained by the hook for
uncaught exceptions, from what the engine holds at that moment.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fullshard.byte_sizes import size, size_option
from fullshard.engine.graph_tasks import NO_TASK
from fullshard.engine.homes.home import Home
from fullshard.engine.runtime import Runtime
from fullshard.engine.unit import LiveUnit, State
from fullshard.errors import unit_label
from fullshard.offload import PRESETS

_SCALES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "bytes": 1}
_watched: weakref.WeakSet[Runtime] = weakref.WeakSet()
_installed: list[Any] = []


def watch(runtime: Runtime) -> None:
    """Explain an OutOfMemoryError that ends this process, for this model too."""
    _watched.add(runtime)
    if _installed and sys.excepthook is _installed[-1]:
        return
    before = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        before(kind, error, trace)  # may be ours of an earlier start, which init_process_group has wrapped
        shortage = _shortage_in(error)
        if shortage is not None and not hasattr(shortage, "fullshard_explained"):
            shortage.fullshard_explained = True  # type: ignore[attr-defined]
            for one in _involved(shortage):
                sys.stderr.write(f"{explain(one, shortage)}\n")

    _installed.append(hook)
    sys.excepthook = hook


def _involved(error: BaseException) -> list[Runtime]:
    """Of the models of this process, the one whose unit the traceback names, else those in a backward."""
    named = [one for one in list(_watched) if _computing(one.units, error) is not None]
    if not named and len(_watched) > 1:
        for _ in range(2):  # models of earlier attempts, whose errors were caught: some go in a second round
            gc.collect()
    models = list(_watched)
    return named or [one for one in models if one.gathering.backward is not None] or models


def _shortage_in(error: BaseException | None) -> BaseException | None:
    """The OutOfMemoryError that this error is, or comes from."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error


def explain(runtime: Runtime, error: BaseException) -> str:
    """What the model held when the device had no more, and the cheapest change that would fit."""
    plan, options = runtime.plan, runtime.options
    device = runtime.comm.device
    where = _computing(runtime.units, error)  # in a backward, its recomputation
    in_backward = runtime.gathering.backward is not None
    full = _full(runtime, None if in_backward else where)
    where, phase = where or _in_backward(runtime.units), "backward" if in_backward else "forward"
    full_bytes = sum(unit.full_bytes for unit in full)
    rows = [
        *_at_rest(runtime),
        ("full values", full_bytes, plan.full_bytes_at_peak),
    ]
    taken = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    rest = max(0, taken - sum(held for _, held, _ in rows))
    lines = [
        f"fullshard: rank {runtime.comm.world_rank} ran out of memory on {device}"
        + ("" if where is None else f" in {phase} of {unit_label(where.name)}")
        + f" ({options.strategy}, {runtime.comm.ranks} ranks). It held, against the plan:"
    ]
    lines += [f"  {name}: {size(held)}, planned {size(planned)}" for name, held, planned in rows]
    largest = sorted(full, key=lambda unit: -unit.full_bytes)[:3]
    if largest:
        named = ", ".join(f"{unit_label(unit.name)} {size(unit.full_bytes)}" for unit in largest)
        lines.append(f"  full were {len(full)} of {len(runtime.units)} units, the largest: {named}")
    if taken:
        lines.append(f"  everything else (activations, gradients in flight, other tensors): {size(rest)}")
    choice = plan.choice
    if choice is not None and choice.peak_bytes:
        lines.append(f"  planned at the peak: {size(choice.peak_bytes)} of {size(choice.memory_bytes)}")
    lines.append(f"fullshard: {remedy(runtime, requested_bytes(str(error)), full_bytes, rest)}")
    return "\n".join(lines)


def _at_rest(runtime: Runtime) -> list[tuple[str, int, int]]:
    """What rests on the device, by name: bytes that are held, and those of the plan."""
    plan = runtime.plan
    parameters, gradients, state = plan.parameter_bytes, plan.gradient_bytes, plan.state_bytes
    resting = plan.resting
    if resting is not None:
        kinds = (("master", "compute"), ("gradients",), ("state",))
        parameters, gradients, state = (sum(resting.bytes_at("device", k) for k in each) for each in kinds)
    homes = [(lane.home, lane.rest.nbytes) for lane in runtime.lanes]
    shards = [lane.compute_shard for lane in runtime.lanes if lane.compute_shard is not None]
    homes += [(shard.home, shard.values.nbytes) for shard in shards]
    sums = [lane.gradients for lane in runtime.lanes if lane.gradients is not None]
    rows = [
        ("parameters at rest", _on_device(homes), parameters),
        ("gradients", _on_device((one.home, one.flat.untyped_storage().nbytes()) for one in sums), gradients),
        ("optimizer state, by plan", state, state),
    ]
    return rows if resting is None else [*rows, ("slabs, by plan", plan.slab_bytes, plan.slab_bytes)]


def _on_device(held: Iterable[tuple[Home, int]]) -> int:
    return sum(num_bytes for home, num_bytes in held if home.kind == "device")


def _full(runtime: Runtime, in_forward: LiveUnit | None) -> list[LiveUnit]:
    """A backward that failed leaves its units as they were; a forward has released them: by the schedule."""
    if in_forward is None:
        return [unit for unit in runtime.units if unit.state is not State.AT_REST]
    schedule = runtime.plan.schedule
    calls = schedule.calls()
    at = next((i for i, call in enumerate(calls) if call[:2] == ("forward", in_forward.index)), 0)
    return [runtime.units[index] for index in sorted(list(schedule.full_at(calls))[at])]


def requested_bytes(message: str) -> int:
    """What CUDA's allocator could not give, by its message; 0 if that does not have it."""
    found = re.search(r"allocate ([0-9.]+) (KiB|MiB|GiB|bytes)", message)
    return round(float(found[1]) * _SCALES[found[2]]) if found else 0


def remedy(runtime: Runtime, needed: int, full_bytes: int, activations: int) -> str:
    """Of the changes that free enough, the one that costs least time."""
    options, plan = runtime.options, runtime.plan
    sizes = sorted((unit.full_bytes for unit in runtime.units), reverse=True)
    resting = sum(unit.nbytes for unit in (lane.rest for lane in runtime.lanes))
    masters = [lane.rest.nbytes for lane in runtime.lanes if lane.dtypes.rest != lane.dtypes.compute]
    away = plan.state_bytes + sum(masters)
    changes: list[tuple[str, int]] = []  # in the order of what they cost
    if options.strategy in ("zero2", "zero1", "replicate"):
        changes.append(("strategy='zero3'", max(0, full_bytes - sum(sizes[:2]))))
    elif full_bytes > sum(sizes[:2]):
        changes.append(("keep_full=0", full_bytes - sum(sizes[:2])))
    if plan.schedule.node_copies and options.keep_node != 0:
        changes.append(("keep_node=0", plan.schedule.node_copy_bytes))
    budget = None if plan.resting is None else plan.resting.budget.device
    if budget:
        less = min(budget, max(needed, 2**30))
        changes.append((f"fs.Offload(device={size_option(budget - less, at_most=True)!r})", less))
    if not options.checkpoint_activations:
        changes.append(("checkpoint_activations=True", activations // 2))
    elif options.checkpoint_activations is True and runtime.comm.device.type == "cuda":
        changes.append(("checkpoint_activations='offload'", activations // 4))
    if options.offload is None:
        changes.append(("offload='optimizer'", away))
        changes.append(("offload='host'", away + resting))
    elif options.offload == PRESETS["optimizer"]:
        changes.append(("offload='host'", resting))
    enough = [change for change in changes if change[1] >= max(1, needed)]
    wanted = f" for the {size(needed)} that were requested" if needed else ""
    if enough:
        name, freed = enough[0]
        return f"The cheapest change that would fit: {name}, which frees about {size(freed)}{wanted}."
    if changes:
        name, freed = max(changes, key=lambda change: change[1])
        if freed:
            return (
                f"No single change frees enough{wanted}: {name} frees about {size(freed)}. Use it with fewer "
                "tokens per rank, or more ranks."
            )
    if not options.checkpoint_activations:
        return "Write checkpoint_activations=True, or use fewer tokens per rank."
    return "Use fewer tokens per rank, or more ranks; fullshard plan shows what would fit."


def _computing(units: list[LiveUnit], error: BaseException) -> LiveUnit | None:
    """The innermost unit whose forward was running, by the traceback; None in a backward."""
    unit_of = {id(module): unit for unit in units[1:] for module in unit.modules}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = unit_of.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def _in_backward(units: list[LiveUnit]) -> LiveUnit | None:
    """The innermost unit whose backward has begun and is not over."""
    begun = {u.index: u for u in units[1:] if u.pass_state.task != NO_TASK and u.pass_state.pending}
    inner = [unit for unit in begun.values() if not begun.keys() & set(unit.inner_indices)]
    return inner[-1] if inner else None
