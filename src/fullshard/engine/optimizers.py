"""Which optimizers may step on shards.

A check comes before every step of any torch optimizer. Torch's own element-wise classes pass by their type. A
copy of any other one is tried on synthetic shards before its first step (`optimizer_trial`): what is not
provably element-wise is refused, unless its class declares `fullshard_step = "element-wise"`.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import optim
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.comm.groups import Comm
from fullshard.engine import norms
from fullshard.engine.gradients import Step
from fullshard.engine.lane import Lane
from fullshard.engine.optimizer_trial import Placed, is_compiled_call, try_on_shards
from fullshard.engine.reduce_buffers import PlainGradients
from fullshard.engine.runtime import Runtime
from fullshard.engine.streamed_step import StreamedStep
from fullshard.errors import OptimizerError, StateError
from fullshard.offload import Offload
from fullshard.plan.layout import Region

_F = TypeVar("_F", bound=Callable[..., Any])
# By exact type: a subclass may do anything in its step.
_ELEMENT_WISE = {
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
}  # fmt: skip
_PLAIN = {int, float, bool, type(None)}  # settings that ranks compare
_DECLARATION = "fullshard_step"  # an attribute of an optimizer or its class


@dataclass(frozen=True)
class _Checked:
    """What the check before an optimizer's first step has found."""

    count: int  # of its parameters: another one means another check
    runtimes: list[weakref.ref[Runtime]]
    plain_gradients: bool
    groups: list[tuple[int, list[str]]]  # those with sharded parameters; the settings that ranks compare
    identity: int  # a checksum of its class and of the sharded parameters in each group
    streamed: StreamedStep | None  # for values that do not rest on the compute device


_owners: dict[int, weakref.ref[Runtime]] = {}
_checked: weakref.WeakKeyDictionary[Optimizer, _Checked] = weakref.WeakKeyDictionary()
_plain_gradients: dict[int, PlainGradients] = {}  # of optimizers whose step runs, by identity


def _as_it_is(function: _F) -> _F:
    return function


# Of a compiled step, what follows the hooks is compiled. torch.compiler.disable imports the compiler now.
_uncompiled: Callable[[_F], _F] = getattr(torch, "_disable_dynamo", None) or _as_it_is


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


@_uncompiled
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    if not _owners:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _checked.get(optimizer)
    if known is None or known.count != count:
        runtimes, plain = _check(optimizer, callable(closure))
        for holder in runtimes:
            holder.adopt_optimizer(optimizer)
        references = [weakref.ref(r) for r in runtimes]
        known = _Checked(
            count, references, plain, *_identity(optimizer, runtimes), _streamed(optimizer, runtimes)
        )
        _checked[optimizer] = known
    live = [runtime for reference in known.runtimes if (runtime := reference()) is not None]
    _note_step(optimizer, known, live)
    if live and callable(closure):  # it brings the last micro-batch: gradients are looked at behind it
        after = functools.partial(_closed, closure, live, optimizer, known)
        return ((args[0], after, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": after})
    _require_gradients(live)
    Step.running += bool(live)
    _show_gradients(optimizer, known)
    return None


def _streamed(optimizer: Optimizer, runtimes: Iterable[Runtime]) -> StreamedStep | None:
    lanes, offloads = [], []
    for runtime in runtimes:
        if any(lane.streams_steps for lane in runtime.lanes):
            lanes += runtime.lanes
            offloads.append(runtime.options.offload or Offload())
    if not lanes:
        return None
    steps = {(offload.step, offload.overlap) for offload in offloads}
    if len(steps) > 1:
        raise OptimizerError(
            f"{type(optimizer).__name__} holds parameters of models that step in different ways",
            "Give these models the same fs.Offload(step=..., overlap=...), or an optimizer each.",
        )
    step, overlap = steps.pop()
    return StreamedStep(optimizer, lanes, min(offload.chunk for offload in offloads), step == "host", overlap)


def streamed_step(optimizer: Optimizer) -> StreamedStep | None:
    """That of its steps; before the first, one that has homes for states which are loaded."""
    known = _checked.get(optimizer)
    if known is not None:
        return known.streamed
    held = (p for group in optimizer.param_groups for p in group["params"])
    return _streamed(optimizer, {runtime for p in held if (runtime := owner(p)) is not None})


def _show_gradients(optimizer: Optimizer, known: _Checked) -> None:
    """Steps on what is offloaded run now. What remains has its gradients as this optimizer needs them."""
    if known.streamed is not None:
        for runtime in (held for reference in known.runtimes if (held := reference()) is not None):
            for lane in runtime.lanes:
                lane.take_assigned()  # a step that is not streamed updates what was assigned
        step = type(optimizer).step
        known.streamed.run(functools.partial(getattr(step, "__wrapped__", step), optimizer))
    if known.plain_gradients:
        _show_plain_gradients(optimizer)


def _identity(optimizer: Optimizer, runtimes: Iterable[Runtime]) -> tuple[list[tuple[int, list[str]]], int]:
    """The groups that ranks compare, and a checksum that is the same in any order of groups."""
    names = {id(p): lane.layout.pieces[i].name for r in runtimes for p, lane, i in r.places()}
    total, groups = 0, []
    for index, group in enumerate(optimizer.param_groups):
        held = sorted(names[id(p)] for p in group["params"] if id(p) in names)
        if held:
            groups.append((index, sorted(key for key in group if key != "lr" and _is_plain(group[key]))))
            total += zlib.crc32("\0".join((type(optimizer).__qualname__, *held)).encode())
    return groups, total & 0xFFFFFFFF


def _note_step(optimizer: Optimizer, known: _Checked, runtimes: Iterable[Runtime]) -> None:
    """What the ranks compare at the end of the next backward. Tensors among settings are not read."""
    settings = rates = 0
    for index, keys in known.groups:
        group = optimizer.param_groups[index]
        settings += _checksum([group.get(key) for key in keys])
        rates += _checksum([group.get("lr")])
    for runtime in runtimes:
        runtime.comm.report.note(known.identity, settings, rates)


def _checksum(values: list[Any]) -> int:
    # Something else than a number may be there now, such as a tensor.
    return zlib.crc32(repr([value for value in values if _is_plain(value)]).encode())


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(v) in _PLAIN for v in value))


@_uncompiled
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    Step.running = max(0, Step.running - 1)
    plain = _plain_gradients.pop(id(optimizer), None)
    if plain is not None:
        plain.restore()
    known = _checked.get(optimizer)
    if known is not None and known.streamed is not None:
        known.streamed.finish()


def _show_plain_gradients(optimizer: Optimizer) -> None:
    """Until its step is over."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    _plain_gradients[id(optimizer)] = PlainGradients(held)


def _closed(
    closure: Callable[[], Any], runtimes: list[Runtime], optimizer: Optimizer, known: _Checked
) -> Any:
    running, Step.running = Step.running, 0
    _after_step(optimizer)
    loss = closure()
    _require_gradients(runtimes)
    Step.running = max(1, running)
    _show_gradients(optimizer, known)
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


def _check(optimizer: Optimizer, closure: bool) -> tuple[set[Runtime], bool]:
    """The runtimes whose parameters it holds, and whether it needs plain gradients."""
    held = [(g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    runtimes = {runtime for _, p in held if (runtime := owner(p)) is not None}
    if not runtimes:
        return runtimes, False
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
    return runtimes, _is_element_wise_with_plain_gradients(optimizer, runtimes, closure)


def _is_element_wise_with_plain_gradients(
    optimizer: Optimizer, runtimes: Iterable[Runtime], closure: bool
) -> bool:
    """Whether it is element-wise only if gradients are plain tensors. One that is not at all is refused."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    placed = {
        id(p): Placed(piece.shape, piece.order, lane.layout.shard_sizes(piece))
        for runtime in runtimes
        for lane in runtime.lanes
        if not lane.replicated or lane.specs or lane.streams_steps
        for p, piece in zip(lane.parameters, lane.layout.pieces, strict=True)
        if id(p) in held
    }
    if not placed:
        return False
    modules = [module for runtime in runtimes for module in runtime.model.modules()]
    for wrapper in _wrappers(optimizer):
        if not _is_declared(wrapper) and all(map(_is_setting, vars(wrapper).values())):
            verdict = try_on_shards(wrapper, placed, closure, modules)
            if verdict.tried and verdict.finding is not None:
                raise _not_element_wise(wrapper, verdict.finding)
    if type(optimizer) in _ELEMENT_WISE or _is_declared(optimizer):
        return is_compiled_call()
    verdict = try_on_shards(optimizer, placed, closure, modules)
    if verdict.finding is not None:
        raise _not_element_wise(optimizer, verdict.finding)
    return verdict.plain_gradients or is_compiled_call()


def _is_declared(optimizer: Optimizer) -> bool:
    declared = getattr(optimizer, _DECLARATION, None)
    if declared not in (None, "element-wise"):
        raise OptimizerError(
            f"{type(optimizer).__name__}.{_DECLARATION} is {declared!r}", "The only value is 'element-wise'."
        )
    return declared is not None


def _wrappers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers whose `step` is calling this one's, the innermost first.

    Those that do not initialise their base class have no hooks, so nothing else sees their steps.
    """
    found: list[Optimizer] = []
    inner, frame = optimizer, sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, Optimizer) and any(value is inner for value in vars(caller).values()):
            if caller not in _checked:
                found.append(caller)
            inner = caller
    return found


def _is_setting(value: Any) -> bool:
    """What a wrapper is tried with: not a scaler or a trainer, say, whose parts a copy cannot have."""
    package = type(value).__module__.split(".")[0]
    return isinstance(value, Optimizer) or package in ("builtins", "collections", "functools", "torch")


def _not_element_wise(optimizer: Optimizer, finding: str) -> OptimizerError:
    name, base = type(optimizer).__name__, type(optimizer).__base__
    kind = name if base is None or base is Optimizer else f"{name} (a subclass of {base.__name__})"
    return OptimizerError(
        f"{kind} is not provably element-wise, and its parameters are sharded: {finding}",
        "Use an element-wise optimizer such as AdamW, or strategy='replicate', under which it is right. "
        f"If you know better, set {name}.{_DECLARATION} = 'element-wise'.",
    )


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
