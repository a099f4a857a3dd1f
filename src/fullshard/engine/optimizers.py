"""Which optimizers may step on shards, and what their state dicts show.

A check comes before every step of any torch optimizer. From its first step, or from `fs.load`, on, an
optimizer's `state_dict()` holds StateShards as the model's does: a bare shard under a full name is how people
lose state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.comm.groups import Comm
from fullshard.engine import norms
from fullshard.engine.lane import Lane
from fullshard.engine.runtime import Runtime
from fullshard.errors import OptimizerError, StateError
from fullshard.plan.layout import Region

# They use full matrices, full vectors or norms of parameters, and a shard has none of these.
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
    ids = [id(p) for lane in runtime.lanes for p in (*lane.parameters, *lane.compute_parameters)]
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
    if not lane.replicated:
        return lane.comm, first
    if region is None or not region.is_cut:
        return None  # complete here: the other ranks have nothing to add
    return lane.comm, first and lane.comm.rank == 0


norms.owners_comm = _comm_of_gradient


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if not _owners:
        return None
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _checked.get(optimizer)
    if known is None or known[0] != count:
        found = _check(optimizer)
        for holder in found:
            holder.adopt_optimizer(optimizer)
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
        runtime.reduction.require_nothing_postponed()
        runtime.refuse_unseen_backward()
        runtime.steps += 1
        if any(unit.is_unsharded for unit in runtime.units):
            raise StateError("optimizer.step() inside fs.full", "Leave `with fs.full(model):` first.")
        if runtime.gathering.inference is not None:
            raise StateError(
                "optimizer.step() inside fs.inference", "Leave `with fs.inference(model):` first."
            )


def _check(optimizer: torch.optim.Optimizer) -> set[Runtime]:
    held = [(g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    runtimes = {runtime for _, p in held if (runtime := owner(p)) is not None}
    if not runtimes:
        return runtimes
    known = {id(p) for r in runtimes for p in (*r.parameters, *r.ignored)}
    exclusive = all(r.options.integration.exclusive_optimizers for r in runtimes)
    for group, parameter in held:
        strange = id(parameter) not in known
        if strange and (owner(parameter) is not None or exclusive):
            raise OptimizerError(
                f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} (group {group})"
                " that the sharded model does not own: it would train on this rank alone",
                "Build the optimizer from model.parameters(); list what each rank trains alone in ignore=.",
            )
    names = {c.__name__ for c in type(optimizer).__mro__}
    refused = sorted(names & NOT_ELEMENT_WISE)
    if refused and any(not lane.replicated or lane.specs for r in runtimes for lane in r.lanes):
        raise OptimizerError(
            f"{refused[0]} is not element-wise: it would compute from shards as if they were full matrices",
            "Use an element-wise optimizer such as AdamW, or strategy='replicate', where it is right.",
        )
    return runtimes


register_optimizer_step_pre_hook(_before_step)
