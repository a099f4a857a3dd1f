"""Builds the engine from units, in one transaction: if anything raises, the module is as it was."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard import environment, integrations
from fullshard.comm.groups import Comm, as_bytes
from fullshard.engine import hooks
from fullshard.engine.homes.away_gradients import watch_clipping
from fullshard.engine.homes.home import HomeChoice
from fullshard.engine.homes.model_device import show_compute_device
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import in_memory_order
from fullshard.engine.runtime import Runtime
from fullshard.engine.slots import Slots
from fullshard.engine.step import optimizers
from fullshard.engine.unit import LiveUnit
from fullshard.engine.writes import get_data
from fullshard.errors import FullshardError, ModelError, OffloadError, RankMismatch
from fullshard.options import Options
from fullshard.plan import tensor_parallel
from fullshard.plan.homes import Free
from fullshard.plan.plan import LanePlan, Plan, lanes_of, nesting, plan_of
from fullshard.plan.units import Member, Unit
from fullshard.policy import ValueSource
from fullshard.state.copying import duplicate
from fullshard.state.materialize import Materializer
from fullshard.state.optimizer_state import show_state_shards
from fullshard.state.state_dict import attach_state
from fullshard.state.value_sources import GivenFunction, ModuleInitializers

Planned = list[tuple[LanePlan, list[Member]]]


def build(model: nn.Module, units: Sequence[Unit], comm: Comm, options: Options) -> Runtime:
    plan = plan_of(units, comm.ranks, options)
    lanes_by_unit = [lanes_of(unit, comm.ranks, options) for unit in units]
    free = None if options.offload is None else _least_free(comm)
    materializer, choice, problem = None, None, None
    try:
        materializer = Materializer(model, comm.device, _value_source(model, options))
        if options.offload is not None and free is not None:
            plan = plan.with_offload(options.offload, free)
        choice = _homes(plan, comm.device, options)
    except FullshardError as error:
        problem = error
    comm.raise_together(problem)
    assert materializer is not None
    assert choice is not None
    undo: list[Callable[[], None]] = []
    try:
        if options.initial == "verify":
            _verify(model, units, comm)
        live = []
        for index, (unit, planned) in enumerate(zip(units, lanes_by_unit, strict=True)):
            _fill(unit, materializer, comm)
            lanes = [_lane(unit, plan_, members, comm, options, choice) for plan_, members in planned]
            live.append(_live(index, unit, planned, lanes, comm))
            _show_sharded(lanes, undo, materializer)
        _fill_rest(model, materializer, comm)
        _move_rest(model, [p for unit in live for lane in unit.lanes for p in lane.parameters], comm, undo)
        for buffer in map(tensor_parallel.local_of, model.buffers()):
            comm.broadcast_in_tp_group([buffer])
            comm.broadcast(buffer)
    except BaseException:
        for step in undo:
            step()
        materializer.undo()
        raise
    for live_unit, inside in zip(live, nesting(live), strict=True):
        live_unit.hold([live[index] for index in sorted(inside)])
    if sum(unit.full_bytes for unit in live) <= options.small_bytes:
        for lane in (lane for unit in live for lane in unit.lanes):
            lane.keeps_memory = True
    runtime = Runtime(live, comm, options)
    for lane in runtime.lanes:
        lane.show_to(options.integration.present)
    runtime.plan = plan
    runtime.copier = duplicate
    runtime.adopt_optimizer = show_state_shards
    sharded = set(map(id, runtime.parameters))
    runtime.ignored = [p for p in model.parameters() if id(p) not in sharded]
    hooks.attach(runtime, model)
    if options.offload is not None and comm.device.type != "cpu":
        show_compute_device(model)
    integrations.attach(runtime, model)
    _attach_state(runtime, model)
    optimizers.own(runtime)
    return runtime


def free_memory(device: torch.device, node_ranks: int | None = None) -> Free:
    """What a rank may take here, as one of `node_ranks`, or of as many as were launched on this host."""
    launched = environment.launch().local_ranks
    node_ranks = launched if node_ranks is None else node_ranks
    host = environment.free_bytes(torch.device("cpu")) * launched // node_ranks
    if device.type == "cpu":  # one memory for both
        return Free(host // 2, host // 2, node_ranks)
    return Free(environment.free_bytes(device), host, node_ranks)


def _least_free(comm: Comm) -> Free:
    """The same on all ranks, so that each chooses the same homes."""
    here = free_memory(comm.device)
    by_rank = comm.all_gather_ints([here.device, here.host, here.node_ranks], "offload")
    device, host = by_rank[:, :2].amin(dim=0).tolist()
    return Free(int(device), int(host), int(by_rank[:, 2].max()))


def _homes(plan: Plan, device: torch.device, options: Options) -> HomeChoice:
    """Where the values of every lane rest, as planned."""
    offload, resting = options.offload, plan.resting
    if offload is None or resting is None:
        return HomeChoice(None, device, None)
    watch_clipping()
    return HomeChoice(resting.homes, device, None if offload.disk is None else Path(offload.disk))


def _value_source(model: nn.Module, options: Options) -> ValueSource:
    if options.integration.values is not None:
        return options.integration.values
    if options.materialize is not None:
        return GivenFunction(options.materialize)
    return ModuleInitializers(model, (integrations.initializer_of,))


def _fill(unit: Unit, materializer: Materializer, comm: Comm) -> None:
    _together(comm, materializer, [module for member in unit.members for module, _ in member.sites])


def _fill_rest(model: nn.Module, materializer: Materializer, comm: Comm) -> None:
    _together(comm, materializer, list(model.modules()))


def _move_rest(
    model: nn.Module, sharded: Sequence[nn.Parameter], comm: Comm, undo: list[Callable[[], None]]
) -> None:
    """Move buffers and ignored parameters to the device that computes."""
    at_rest, device = set(map(id, sharded)), comm.device
    moved: dict[int, torch.Tensor] = {}  # a buffer that several modules share stays shared
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                undo.append(partial(operator.setitem, module._buffers, name, buffer))
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
    for parameter in model.parameters():
        if parameter.device != device and id(parameter) not in at_rest:
            undo.append(partial(setattr, parameter, "data", parameter.data))
            parameter.data = parameter.data.to(device)


def _together(comm: Comm, materializer: Materializer, modules: list[nn.Module]) -> None:
    if not materializer.needed:
        return
    problem: FullshardError | None = None
    try:
        materializer.fill(modules)
    except FullshardError as error:
        problem = error
    except Exception as error:  # noqa: BLE001  a user's initializer may fail on one rank only
        problem = ModelError(
            f"{type(error).__name__} while initialising the model: {error}", "See its cause."
        )
        problem.__cause__ = error
    comm.raise_together(problem)


def _verify(model: nn.Module, units: Sequence[Unit], comm: Comm) -> None:
    """With initial='verify': raise if ranks that hold the same part of a parameter built different values."""
    digests: dict[tuple[str, Any], str] = {}
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    members = [m for unit in units for m in unit.members if not m.parameter.is_meta]
    for member in sorted(members, key=lambda m: order[m.name]):  # report the first in definition order
        raw = as_bytes(tensor_parallel.local_of(member.parameter).detach().cpu().contiguous())
        part = None if member.region is None else member.region.offsets
        digests[member.name, part] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    first: dict[tuple[str, Any], tuple[int, str]] = {}
    for rank, theirs in zip(comm.world.members, comm.world.all_gather_object(digests), strict=True):
        for key, digest in theirs.items():
            before, same = first.setdefault(key, (rank, digest))
            if digest != same:
                raise RankMismatch(
                    f"rank {rank} built other values than rank {before} for parameter {key[0]!r}",
                    "Seed every rank alike, or use initial='broadcast', where the first rank's values win.",
                )


def _lane(
    unit: Unit, plan: LanePlan, members: list[Member], comm: Comm, options: Options, choice: HomeChoice
) -> Lane:
    """A lane with the first rank's values in its shard. Only one lane is ever unsharded here."""
    parameters = [member.parameter for member in members]
    lane, problem = None, None
    try:
        where = choice.next()
        lane = Lane(unit.name, plan.layout, plan.dtypes, parameters, comm, options.replicated, where)
    except OffloadError as error:
        problem = error
    if choice.has_disk:
        comm.raise_together(problem)
    assert lane is not None
    flat = torch.zeros(plan.layout.total, dtype=plan.dtypes.rest, device=comm.device)
    for piece, member in zip(plan.layout.pieces, members, strict=True):
        part = tensor_parallel.part_of(member.parameter.detach(), piece.region)
        flat[piece.start : piece.stop].copy_(in_memory_order(part, piece))
    comm.broadcast_in_tp_group(lane.uncut_views(flat))
    comm.broadcast(flat)
    lane.home.put_back(lane.rest, flat if options.replicated else lane.own_interval(flat))
    return lane


def _live(index: int, unit: Unit, planned: Planned, lanes: list[Lane], comm: Comm) -> LiveUnit:
    slots = Slots(unit.name, unit.modules)
    sites = []
    for lane, (_, members) in zip(lanes, planned, strict=True):
        for member, compute in zip(members, lane.compute_parameters, strict=True):
            for module, attribute in member.sites:
                slots.add_site((module, attribute), member.parameter, compute, member.name)
                sites.append((module, attribute))
            for alias in member.aliases:
                place = alias.container, alias.key
                slots.add_alias(place, member.parameter, compute, member.name)
    return LiveUnit(index, unit.name, unit.modules, lanes, slots, sites, unit.merged, unit.policy, comm)


def _show_sharded(lanes: list[Lane], undo: list[Callable[[], None]], materializer: Materializer) -> None:
    for lane in lanes:
        # What was materialised here goes back to meta on failure; keeping it would keep the unsharded model.
        for parameter in lane.parameters:
            if materializer.made(parameter):
                continue
            if tensor_parallel.is_cut(parameter):
                from fullshard.engine.dtensors import make_plain, restore_dtensor

                undo.append(partial(restore_dtensor, parameter, make_plain(parameter)))
            else:
                undo.append(partial(setattr, parameter, "data", get_data(parameter)))
        lane.show_sharded()


def _attach_state(runtime: Runtime, model: nn.Module) -> None:
    places: dict[nn.Module, dict[str, tuple[Lane, int]]] = {}
    for unit in runtime.units:
        index = {id(p): (lane, i) for lane in unit.lanes for i, p in enumerate(lane.parameters)}
        for module, attribute in unit.sites:
            parameter = module._parameters[attribute]
            places.setdefault(module, {})[attribute] = index[id(parameter)]
    for module in model.modules():
        attach_state(module, places.get(module, {}))
