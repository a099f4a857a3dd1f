"""Which optimizers may step on shards, and what their state dicts show.

A check comes before every step of any torch optimizer. From its first step, or from `fs.load`, on, an
optimizer's `state_dict()` holds StateShards as the model's does: a bare part under a whole name is how people
lose state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard import norms
from fullshard.collectives import Comm
from fullshard.errors import OptimizerError, StateError
from fullshard.layout import Region
from fullshard.runtime import Runtime
from fullshard.shards import Lane
from fullshard.state import StateShard, shard_of, to_rest
from fullshard.tensor_parallel import is_cut

# They look at whole matrices, whole vectors or norms of parameters, and a shard has none of these.
NOT_ELEMENT_WISE = {
    "Adafactor", "LBFGS", "Muon", "Shampoo", "DistributedShampoo", "SOAP", "SM3", "Lamb", "LAMB", "FusedLAMB",
    "Lars", "LARS", "LARC", "NovoGrad", "CAME", "GaLoreAdamW", "GaLoreAdafactor", "KFAC", "AdaLomo",
    "Lomo", "SparseAdam", "Apollo", "APOLLOAdamW", "FusedNovoGrad", "DistributedMuon", "MuonWithAuxAdam",
}  # fmt: skip

_owners: dict[int, weakref.ref[Runtime]] = {}
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[weakref.ref[Runtime]]]] = (
    weakref.WeakKeyDictionary()
)


def own(runtime: Runtime) -> None:
    """From now on these parameters, and their compute twins, are known to be this runtime's."""
    ids = [id(p) for lane in runtime.lanes for p in (*lane.parameters, *lane.computing)]
    reference = weakref.ref(runtime)
    _owners.update(dict.fromkeys(ids, reference))
    weakref.finalize(runtime, _forget, ids)


def _forget(ids: list[int]) -> None:
    for key in ids:
        _owners.pop(key, None)


def owner(parameter: torch.Tensor) -> Runtime | None:
    reference = _owners.get(id(parameter))
    return reference() if reference is not None else None


def _comm_of_gradient(gradient: torch.Tensor) -> tuple[Comm, bool] | None:
    """The ranks that share the parameter whose .grad this is, and whether this one answers for it in sums;
    None for a parameter that is not sharded."""
    for runtime in {r for reference in _owners.values() if (r := reference()) is not None}:
        for lane in runtime.lanes:
            for parameter, piece in zip(lane.parameters, lane.layout.pieces, strict=True):
                if parameter.grad is gradient:
                    return _answering(lane, piece.region)
    return None


def _answering(lane: Lane, region: Region | None) -> tuple[Comm, bool] | None:
    first = region is None or region.first
    if not lane.whole_at_rest:
        return lane.comm, first
    if region is None or not region.is_cut:
        return None  # whole: nothing to ask the others
    return lane.comm, first and lane.comm.rank == 0


norms.owners_comm = _comm_of_gradient


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if not _owners:
        return None
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _checked.get(optimizer)
    if known is None or known[0] != count:
        found = _check(optimizer)
        if found:
            show_whole_shapes(optimizer)
        known = (count, [weakref.ref(r) for r in found])
        _checked[optimizer] = known
    runtimes = [runtime for reference in known[1] if (runtime := reference()) is not None]
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if runtimes and callable(closure):  # it brings the last micro-batch: gradients are looked at behind it
        behind = functools.partial(_closed, closure, runtimes)
        return (
            ((args[0], behind, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": behind})
        )
    _require_gradients(runtimes)
    return None


def _closed(closure: Callable[[], Any], runtimes: list[Runtime]) -> Any:
    loss = closure()
    _require_gradients(runtimes)
    return loss


def _require_gradients(runtimes: list[Runtime]) -> None:
    for runtime in runtimes:
        runtime.reduction.require_nothing_piled()
        runtime.refuse_unseen_backward()
        runtime.steps += 1
        if any(unit.whole for unit in runtime.units):
            raise StateError("optimizer.step() inside fs.full", "Leave `with fs.full(model):` first.")
        if runtime.gathering.staying is not None:
            raise StateError(
                "optimizer.step() inside fs.inference", "Leave `with fs.inference(model):` first."
            )


def _check(optimizer: torch.optim.Optimizer) -> set[Runtime]:
    held = [(g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    runtimes = {runtime for _, p in held if (runtime := owner(p)) is not None}
    if not runtimes:
        return runtimes
    resting = {id(p) for r in runtimes for p in (*r.parameters, *r.ignored)}
    for group, parameter in held:
        strange = id(parameter) not in resting
        if strange and (owner(parameter) is not None or all(r.alone for r in runtimes)):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} (group {group})"
                " that the sharded model does not own: it would train on this rank alone",
                "Build the optimizer from model.parameters(); list what each rank trains alone in ignore=.",
            )
    names = {c.__name__ for c in type(optimizer).__mro__}
    refused = sorted(names & NOT_ELEMENT_WISE)
    if refused and any(not lane.whole_at_rest or lane.specs for r in runtimes for lane in r.lanes):
        raise OptimizerError(
            f"{refused[0]} is not element-wise: it would compute from shards as if they were whole matrices",
            "Use an element-wise optimizer such as AdamW, or strategy='replicate', where it is right.",
        )
    return runtimes


def show_whole_shapes(optimizer: torch.optim.Optimizer) -> None:
    """State dicts of this optimizer know their whole shapes from now on; what was loaded before is cut."""
    if _to_shards in optimizer._optimizer_state_dict_post_hooks.values():
        return
    optimizer.register_state_dict_post_hook(_to_shards)
    optimizer.register_load_state_dict_post_hook(_to_own_elements)
    _to_own_elements(optimizer)


def _places(optimizer: torch.optim.Optimizer) -> dict[int, tuple[Lane, int]]:
    """Where the parameters of an optimizer lie, by their identity; those whose state is whole left out."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    runtimes = {runtime for p in held if (runtime := owner(p)) is not None}
    lanes = [lane for r in runtimes for lane in r.lanes if not lane.whole_at_rest or lane.specs]
    return {id(p): (lane, i) for lane in lanes for i, p in enumerate(lane.parameters)}


def _to_shards(optimizer: torch.optim.Optimizer, said: dict[str, Any]) -> dict[str, Any]:
    places = _places(optimizer)
    order = [p for group in optimizer.param_groups for p in group["params"]]
    state = dict(said["state"])  # its values are the optimizer's own dicts
    for index, parameter in enumerate(order):
        if index in state and id(parameter) in places:
            lane, at = places[id(parameter)]
            state[index] = {
                key: _to_shard(f"{lane.layout.pieces[at].name}.{key}", value, lane, at)
                for key, value in state[index].items()
            }
    return {**said, "state": state}


def _to_shard(key: str, value: Any, lane: Lane, index: int) -> Any:
    """Element-wise state becomes a StateShard; a step count, say, is the same on every rank."""
    if not isinstance(value, torch.Tensor) or value.shape != lane.resting[index].shape or value.dim() == 0:
        return value
    if lane.whole_at_rest:
        spec = lane.specs[index]
        return value if spec is None else spec.wrap(value)
    return shard_of(lane, index, value, key)


def _to_own_elements(optimizer: torch.optim.Optimizer) -> None:
    """What load_state_dict was given, whole values or StateShards: this rank's elements stay."""
    places = _places(optimizer)
    numbers = {"step"}  # one for a parameter; that of a parameter without dimensions looks like its elements
    for parameter, state in optimizer.state.items():
        if id(parameter) in places and places[id(parameter)][0].layout.pieces[places[id(parameter)][1]].shape:
            numbers |= {k for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 0}
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor) or id(parameter) not in places:
            continue
        lane, index = places[id(parameter)]
        piece = lane.layout.pieces[index]
        for key, value in state.items():
            shard = isinstance(value, StateShard)
            whole = isinstance(value, torch.Tensor) and tuple(value.shape) == piece.whole_shape
            differs = isinstance(value, torch.Tensor) and value.shape != lane.resting[index].shape
            if shard or (whole and key not in numbers and (is_cut(value) or differs)):
                state[key] = to_rest(f"{piece.name}.{key}", value, lane, index).clone()


register_optimizer_step_pre_hook(_before_step)
