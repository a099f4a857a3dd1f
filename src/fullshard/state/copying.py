"""`copy.deepcopy` of a sharded model: a second engine over the same ranks, with shards of its own.

Modules copy themselves while this runs, half-made ones included, so only shards are copied here;
the places that show parameters are looked up when the copy first computes.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch import nn

from fullshard.comm.groups import Comm
from fullshard.engine.hooks import StandIn
from fullshard.engine.lane import Lane
from fullshard.engine.runtime import Runtime
from fullshard.engine.slots import Slots
from fullshard.engine.step import optimizers
from fullshard.engine.unit import LiveUnit
from fullshard.errors import StateError
from fullshard.plan.aliases import find_aliases


def duplicate(runtime: Runtime, memo: dict[int, Any]) -> Runtime:
    if id(runtime) in memo:
        return memo[id(runtime)]  # type: ignore[no-any-return]
    runtime.gathering.forget_interrupted()
    if any(unit.pass_state.depth or unit.is_unsharded for unit in runtime.units):
        raise StateError("deepcopy of a sharded model that is not at rest", "Copy it between steps.")
    runtime.settle_step()
    twin = memo[id(runtime)] = object.__new__(Runtime)
    for unit in runtime.units:
        memo[id(unit)] = object.__new__(LiveUnit)
        for lane in unit.lanes:
            memo[id(lane)] = _lane(lane, memo)
    units = [_unit(unit, runtime.comm, memo) for unit in runtime.units]
    for unit, old in zip(units, runtime.units, strict=True):
        unit.hold([units[inner.index] for inner in old.inner])
    twin.__init__(units, runtime.comm, runtime.options)  # type: ignore[misc]
    twin.plan, twin.copier, twin.guard = runtime.plan, runtime.copier, runtime.guard
    twin.adopt_optimizer = runtime.adopt_optimizer
    twin.gathering.copy_schedule(runtime.gathering)
    twin.ignored = [copy.deepcopy(p, memo) for p in runtime.ignored]
    twin.unfinished = partial(_finish, twin)
    twin.guard(twin)
    optimizers.own(twin)
    return twin


def _lane(lane: Lane, memo: dict[int, Any]) -> Lane:
    lane.take_assigned()
    parameters: list[nn.Parameter] = [copy.deepcopy(p, memo) for p in lane.parameters]
    twin = Lane(lane.unit, lane.layout, lane.dtypes, parameters, lane.comm, lane.replicated, lane.homes)
    twin.rest.copy_(lane.rest)
    twin.show_sharded()
    twin.show_to(lane.present)
    return twin


def _unit(unit: LiveUnit, comm: Comm, memo: dict[int, Any]) -> LiveUnit:
    twin: LiveUnit = memo[id(unit)]
    modules = [copy.deepcopy(module, memo) for module in unit.modules]
    sites = [(copy.deepcopy(module, memo), attribute) for module, attribute in unit.sites]
    lanes = [memo[id(lane)] for lane in unit.lanes]
    slots = Slots(unit.name, modules)
    same = unit.merged, unit.policy, comm
    twin.__init__(unit.index, unit.name, modules, lanes, slots, sites, *same)  # type: ignore[misc]
    return twin


def _finish(runtime: Runtime) -> None:
    """Every module of the copy is there now: find the places that show its parameters."""
    runtime.unfinished = None
    references = find_aliases(runtime.root.modules[0])
    for unit in runtime.units:
        compute = {
            id(p): (p, c, piece.name)
            for lane in unit.lanes
            for p, c, piece in zip(lane.parameters, lane.compute_parameters, lane.layout.pieces, strict=True)
        }
        for module, attribute in unit.sites:
            sharded = module._parameters[attribute]
            unit.slots.add_site((module, attribute), *compute[id(sharded)])
            stand_in = module.__dict__.get("forward")
            if isinstance(stand_in, StandIn) and not unit.slots.stands_in(stand_in):
                unit.slots.add_forward(module, stand_in)
        for key, known in compute.items():
            for reference in references.get(key, ()):
                unit.slots.add_alias((reference.container, reference.key), *known)
    runtime.watch_sites()
