"""Which optimizers may step on shards: a check before every step of any torch optimizer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard import norms
from fullshard.collectives import Comm
from fullshard.errors import OptimizerError, StateError
from fullshard.runtime import Runtime

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


def _comm_of_gradient(gradient: torch.Tensor) -> Comm | None:
    """The ranks that share the parameter whose .grad this is; None for a parameter that is not sharded."""
    for runtime in {r for reference in _owners.values() if (r := reference()) is not None}:
        if not runtime.options.whole_at_rest and any(p.grad is gradient for p in runtime.parameters):
            return runtime.comm
    return None


norms.owners_comm = _comm_of_gradient


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if not _owners:
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _checked.get(optimizer)
    if known is None or known[0] != count:
        known = (count, [weakref.ref(r) for r in _check(optimizer)])
        _checked[optimizer] = known
    for reference in known[1]:
        runtime = reference()
        if runtime is None:
            continue
        runtime.reduction.require_nothing_piled()
        runtime.refuse_unseen_backward()
        runtime.steps += 1
        if any(unit.whole for unit in runtime.units):
            raise StateError("optimizer.step() inside fs.full", "Leave `with fs.full(model):` first.")


def _check(optimizer: torch.optim.Optimizer) -> set[Runtime]:
    held = [(g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    runtimes = {runtime for _, p in held if (runtime := owner(p)) is not None}
    if not runtimes:
        return runtimes
    resting = {id(p) for r in runtimes for p in (*r.parameters, *r.ignored)}
    for group, parameter in held:
        if id(parameter) not in resting:
            raise OptimizerError(
                f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} (group {group})"
                " that the sharded model does not own: it would train on this rank alone",
                "Build the optimizer from model.parameters(); list what each rank trains alone in ignore=.",
            )
    names = {c.__name__ for c in type(optimizer).__mro__}
    refused = sorted(names & NOT_ELEMENT_WISE)
    if refused and any(not r.options.whole_at_rest for r in runtimes):
        raise OptimizerError(
            f"{refused[0]} is not element-wise: it would compute from shards as if they were whole matrices",
            "Use an element-wise optimizer such as AdamW, or strategy='replicate', where it is right.",
        )
    return runtimes


register_optimizer_step_pre_hook(_before_step)
