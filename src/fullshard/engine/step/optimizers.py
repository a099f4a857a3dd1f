"""How optimizers step on shards.

A check comes before every step of any torch optimizer. Torch's own element-wise classes pass by their type. A
copy of any other one is tried on synthetic parameters before its first step (`trial`):

    element-wise   it steps on shards
    owned          it looks at entire tensors, each by itself: it steps on these (`owned`)
    gathered       it looks at all of them together: by request only, because every rank then needs the memory
                   of an unsharded model

What the trial cannot show is refused. `fs.shard(..., optimizer_step=...)`, or an attribute `fullshard_step`
of the optimizer or its class, declares it instead.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fullshard.comm.groups import Comm
from fullshard.engine import norms
from fullshard.engine.gradients import Step
from fullshard.engine.lane import Lane
from fullshard.engine.reduce_buffers import PlainGradients
from fullshard.engine.runtime import Runtime
from fullshard.engine.step.muon import MuonStep, matrices
from fullshard.engine.step.muon import is_known as is_known_muon
from fullshard.engine.step.owned import OwnedStep, deal_owners
from fullshard.engine.step.streamed import StreamedStep
from fullshard.engine.step.trial import (
    Placed,
    Verdict,
    is_compiled_call,
    try_in_chunks,
    try_on_shards,
    try_owned,
)
from fullshard.errors import OptimizerError, StateError, unit_label
from fullshard.muon import Muon
from fullshard.offload import Offload
from fullshard.option_table import OPTIMIZER_STEPS
from fullshard.plan.layout import Region

_F = TypeVar("_F", bound=Callable[..., Any])
# By exact type: a subclass may do anything in its step.
_ELEMENT_WISE = {
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
}  # fmt: skip
# Those that look at entire tensors, each by itself, and those that look at all of them together.
_OWNED = {Muon, *(kind for name in ("Adafactor", "Muon") if (kind := getattr(optim, name, None)) is not None)}
_GLOBAL: dict[type[Optimizer], str] = {
    optim.LBFGS: "it searches along one direction for all parameters together"
}
_PLAIN = {int, float, bool, type(None)}  # settings that ranks compare
_DECLARATION = "fullshard_step"  # an attribute of an optimizer or its class
_HOOKED_STEP = getattr(
    Optimizer.profile_hook_step(lambda: None), "__code__", None
)  # torch's code around steps
_HOOK = "fullshard"  # the key of ours among an optimizer's hooks, which torch numbers


@dataclass(frozen=True)
class _Checked:
    """What the check before an optimizer's first step has found."""

    subject: tuple[Any, ...]  # its parameters and the kind of its settings: others mean another check
    runtimes: list[weakref.ref[Runtime]]
    plain_gradients: bool
    groups: list[tuple[int, list[str]]]  # those with sharded parameters; the settings that ranks compare
    identity: int  # a checksum of its class and of the sharded parameters in each group
    sharded: list[tuple[int, torch.Tensor]]  # its sharded parameters, with a checksum of their names
    streamed: StreamedStep | None  # for values that do not rest on the compute device
    owned: OwnedStep | None  # for steps on entire tensors
    muon: MuonStep | None  # for those of which a part needs entire tensors


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


def every_owner() -> list[Runtime]:
    """Of sharded parameters in this process."""
    runtimes = (reference() for reference in _owners.values())
    return list(dict.fromkeys(runtime for runtime in runtimes if runtime is not None))


def runtimes_of(optimizer: Optimizer) -> list[Runtime]:
    """Of its parameters, in their order: the same on all ranks, for what these do together."""
    owners = (owner(p) for group in optimizer.param_groups for p in group["params"])
    return list(dict.fromkeys(runtime for runtime in owners if runtime is not None))


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
    if _is_inside(optimizer):
        return None
    _refuse_inside_chunks(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    known = _known(optimizer, callable(closure))
    live = [runtime for reference in known.runtimes if (runtime := reference()) is not None]
    for runtime in live:
        runtime.adopt_optimizer(optimizer)
    _note_step(optimizer, known, live)
    if live and callable(closure):  # it brings the last micro-batch: gradients are looked at behind it
        after = functools.partial(_closed, closure, live, optimizer, known)
        if known.owned is not None:  # some look at gradients of the step before first
            known.owned.run(_raw_step(optimizer), in_one=True)
            known.owned.waits_for_closure = True
        return ((args[0], after, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": after})
    _require_gradients(live)
    _note_gradients(known, live)
    Step.running += bool(live)
    try:
        _show_gradients(optimizer, known)
    except BaseException:
        Step.running = max(0, Step.running - 1)
        raise
    return None


def _known(optimizer: Optimizer, closure: bool) -> _Checked:
    """What the check has found, which comes first if this optimizer, or its parameters, are new."""
    subject = _subject(optimizer)
    known = _checked.get(optimizer)
    if known is None or known.subject != subject:
        runtimes, plain, special = _check(optimizer, closure, None if known is None else known.owned)
        references = [weakref.ref(r) for r in runtimes]
        streamed = _streamed(optimizer, runtimes)
        owned = special if isinstance(special, OwnedStep) else None
        muon = special if isinstance(special, MuonStep) else None
        if known is not None and (known.owned is None) != (owned is None):
            _refuse_other_state(optimizer, owned is not None)
        known = _Checked(subject, references, plain, *_identity(optimizer, runtimes), streamed, owned, muon)
        _checked[optimizer] = known
        if owned is not None and not is_compiled_call():
            _guard(type(optimizer).step)
        for holder in runtimes:
            holder.adopt_optimizer(optimizer)
    return known


def _refuse_other_state(optimizer: Optimizer, owned: bool) -> None:
    """States that it made on shards are of no use in steps on entire tensors, nor the other way round."""
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    if any(isinstance(v, torch.Tensor) and v.dim() for state in states for v in state.values()):
        ways = ["element by element, on shards", "on entire tensors, each by its owner"]
        name = type(optimizer).__name__
        raise OptimizerError(
            f"{name} has stepped {ways[not owned]}, and with its settings and parameters of now it must step "
            f"{ways[owned]}, for which its state cannot be used",
            "Give it these settings before its first step, declare one way for all of them "
            f"({name}.{_DECLARATION} = 'owned'), or go on with a new optimizer.",
        )


def _subject(optimizer: Optimizer) -> tuple[Any, ...]:
    """What a check is of: the parameters, and which of the settings are on. Schedules change the others."""
    groups = optimizer.param_groups
    held = tuple(hash(tuple(map(id, group["params"]))) for group in groups)
    if type(optimizer) in _ELEMENT_WISE:
        return held
    return *held, *(tuple(_is_on(group[key]) for key in group if key != "lr") for group in groups)


def _is_on(setting: Any) -> Any:
    """A flag or a word as it is; of a number, whether it is 0."""
    if isinstance(setting, bool | str):
        return setting
    return bool(setting) if isinstance(setting, int | float) else None


def owned_step(optimizer: Optimizer) -> OwnedStep | None:
    """How it steps on entire tensors; None if it does not, or will be refused. All ranks must call it."""
    if not _owners or not hasattr(optimizer, "param_groups"):
        return None
    try:
        return _known(optimizer, closure=False).owned
    except OptimizerError:
        return None  # its first step raises it


def _guard(step: Any) -> None:
    """From now on, what a class's step raises on entire tensors is raised on all ranks.

    Torch's hooks are called around the step, but not if that raises. So the function that they are around is
    replaced, for the call that runs now as well; a version of torch that has it elsewhere stays as it is.
    """
    names = getattr(getattr(step, "__code__", None), "co_freevars", ())
    cell = dict(zip(names, getattr(step, "__closure__", None) or (), strict=True)).get("func")
    inner: Any = getattr(step, "__wrapped__", None)
    if cell is None or inner is None or cell.cell_contents is not inner:
        return  # guarded before

    @functools.wraps(inner)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        known = _checked.get(args[0]) if args else None
        owned = None if known is None else known.owned
        if owned is None:
            return inner(*args, **kwargs)
        owned.inside += 1
        try:
            return inner(*args, **kwargs)
        except Exception as error:
            if owned.inside == 1:
                Step.running = max(0, Step.running - 1)
                if owned.is_shown:
                    owned.fail(error)
            raise
        finally:
            owned.inside -= 1

    cell.cell_contents = guarded


def _is_inside(optimizer: Optimizer) -> bool:
    """Whether its class steps inside the step of a subclass, or it steps inside that of another optimizer on
    the entire tensors that are shown there, or will be when a closure has run."""
    callers = _callers()
    if optimizer in callers:
        return True
    owned = [(outer, known.owned) for outer, known in _checked.items() if known.owned is not None]
    around = [step for outer, step in owned if _is_around(outer, step, optimizer, callers)]
    if not around:
        return False
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(not held.isdisjoint(step.by_parameter) for step in around)


def _is_around(outer: Optimizer, step: OwnedStep, inner: Optimizer, callers: list[Optimizer]) -> bool:
    if step.is_shown and (outer is not inner or step.inside):
        return True
    return step.waits_for_closure and outer in callers


def _callers() -> list[Optimizer]:
    """Optimizers in whose step this one steps, and itself, if its step has called that of a base class: torch
    has put its hooks around the step of each class of which an optimizer was made."""
    found: list[Any] = []
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is _HOOKED_STEP:
            found.append(frame.f_locals.get("self"))
    return found[1:]


def _refuse_inside_chunks(optimizer: Optimizer) -> None:
    """An optimizer that another one calls for each chunk would keep a state of chunks."""
    outer = StreamedStep.under_way
    if outer is not None and outer.holds(p for group in optimizer.param_groups for p in group["params"]):
        raise OptimizerError(
            f"{type(optimizer).__name__} steps inside the step of {outer.name}, which runs on chunks of the "
            "same parameters (offload=, state='8bit')",
            f"Keep it as an attribute of {outer.name}, which then steps on what rests; step one after the "
            "other; or leave out offload= and state=.",
        )


def _wraps_another(optimizer: Optimizer) -> bool:
    """Whether it has an optimizer inside that holds some of its parameters: the step of that one is streamed,
    and what this one does besides is done with values where they rest."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(
        id(p) in held
        for value in vars(optimizer).values()
        for inner in (value if isinstance(value, list | tuple) else [value])
        if isinstance(inner, Optimizer) and inner is not optimizer
        for group in inner.param_groups
        for p in group["params"]
    )


def _streamed(optimizer: Optimizer, runtimes: Iterable[Runtime]) -> StreamedStep | None:
    if _wraps_another(optimizer):
        return None
    streamed = [runtime for runtime in runtimes if any(lane.streams_steps for lane in runtime.lanes)]
    if not streamed:
        return None
    offloads = [runtime.options.offload or Offload() for runtime in streamed]
    if len({(offload.step, offload.overlap) for offload in offloads}) > 1:
        raise OptimizerError(
            f"{type(optimizer).__name__} holds parameters of models that step in different ways",
            "Give these models the same fs.Offload(step=..., overlap=...), or an optimizer each.",
        )
    lanes = [lane for runtime in streamed for lane in runtime.lanes]
    chunk = min(runtime.plan.step_chunk for runtime in streamed)
    room = min(runtime.plan.slab_room for runtime in streamed)
    with_slabs = next((offload for offload in offloads if offload.slabs is not None), offloads[0])
    return StreamedStep(optimizer, lanes, chunk, room, with_slabs)


def streamed_step(optimizer: Optimizer) -> StreamedStep | None:
    """That of its steps; before the first, one that has homes for states which are loaded."""
    known = _checked.get(optimizer)
    if known is not None:
        return known.streamed
    return _streamed(optimizer, runtimes_of(optimizer))


def _raw_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Its step without hooks."""
    step = type(optimizer).step
    return functools.partial(getattr(step, "__wrapped__", step), optimizer)


def _show_gradients(optimizer: Optimizer, known: _Checked, in_one: bool = False) -> None:
    """Steps on what is offloaded run now, and those on all buckets of entire tensors but the last. What
    remains has its gradients as this optimizer needs them."""
    if known.streamed is not None:
        for runtime in (held for reference in known.runtimes if (held := reference()) is not None):
            for lane in runtime.lanes:
                lane.take_assigned()  # a step that is not streamed updates what was assigned
        known.streamed.run(_raw_step(optimizer))
    if known.owned is not None:
        known.owned.run(_raw_step(optimizer), in_one)
    if known.muon is not None:
        known.muon.run()
    if known.plain_gradients:
        _show_plain_gradients(optimizer)


def _identity(
    optimizer: Optimizer, runtimes: Iterable[Runtime]
) -> tuple[list[tuple[int, list[str]]], int, list[tuple[int, torch.Tensor]]]:
    """The groups that ranks compare, a checksum of them, and sharded parameters with a checksum each. Sums of
    these are the same in any order of groups."""
    names = {id(p): lane.layout.pieces[i].name for r in runtimes for p, lane, i in r.places()}
    total, groups, sharded = 0, [], []
    for index, group in enumerate(optimizer.param_groups):
        known = [(names[id(p)], p) for p in group["params"] if id(p) in names]
        if known:
            held = sorted(name for name, _ in known)
            groups.append((index, sorted(key for key in group if key != "lr" and _is_plain(group[key]))))
            total += zlib.crc32("\0".join((type(optimizer).__qualname__, *held)).encode())
            sharded += [(zlib.crc32(name.encode()), p) for name, p in known]
    return groups, total & 0xFFFFFFFF, sharded


def _note_step(optimizer: Optimizer, known: _Checked, runtimes: Iterable[Runtime]) -> None:
    """What the ranks compare at the end of the next backward. Tensors among settings are not read."""
    settings = rates = 0
    for index, keys in known.groups:
        group = optimizer.param_groups[index]
        settings += _checksum([group.get(key) for key in keys])
        rates += _checksum([group.get("lr")])
    for runtime in runtimes:
        runtime.comm.report.note(known.identity, settings, rates)


def _note_gradients(known: _Checked, runtimes: Iterable[Runtime]) -> None:
    """An optimizer passes over parameters without a gradient: it must do so on all ranks, or on none."""
    present = sum(name for name, p in known.sharded if p.grad is not None)
    for runtime in runtimes:
        runtime.comm.report.note_gradients(present)


def _checksum(values: list[Any]) -> int:
    # Something else than a number may be there now, such as a tensor.
    return zlib.crc32(repr([value for value in values if _is_plain(value)]).encode())


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(type(v) in _PLAIN for v in value))


@_uncompiled
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not _is_inside(optimizer):
        _end_step(optimizer)


def _end_step(optimizer: Optimizer) -> None:
    Step.running = max(0, Step.running - 1)
    plain = _plain_gradients.pop(id(optimizer), None)
    if plain is not None:
        plain.restore()
    known = _checked.get(optimizer)
    if known is not None and known.streamed is not None:
        known.streamed.finish()
    if known is not None and known.owned is not None:
        known.owned.waits_for_closure = False
        known.owned.finish()
    if known is not None and known.muon is not None:
        known.muon.finish()


def _show_plain_gradients(optimizer: Optimizer) -> None:
    """Until its step is over."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    _plain_gradients[id(optimizer)] = PlainGradients(held)


def _closed(
    closure: Callable[[], Any], runtimes: list[Runtime], optimizer: Optimizer, known: _Checked
) -> Any:
    running, Step.running = Step.running, 0
    _end_step(optimizer)
    loss = closure()
    _require_gradients(runtimes)
    _note_gradients(known, runtimes)
    Step.running = max(1, running)
    _show_gradients(optimizer, known, in_one=True)
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


def _check(
    optimizer: Optimizer, closure: bool, before: OwnedStep | None
) -> tuple[list[Runtime], bool, OwnedStep | MuonStep | None]:
    """The runtimes whose parameters it holds, whether it needs plain gradients, and entire tensors."""
    held = [(g, p) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
    runtimes = runtimes_of(optimizer)
    if not runtimes:
        return runtimes, False, None
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
    mode = _mode(optimizer, runtimes, closure)
    places = list(_sharded_places(optimizer, runtimes))
    if mode.step == "muon" or any(lane.streams_steps for _, lane, _ in places):
        _refuse_repeated(optimizer, places)
    if mode.step == "element-wise":
        return runtimes, mode.plain_gradients, None
    _refuse_elsewhere(optimizer, [lane for _, lane, _ in places])
    owners = {} if before is None else {id(item.parameter): item.owner for item in before.items}
    limits = [limit for r in runtimes if (limit := r.options.merge_units) is not None]
    most_bytes = min(limits) if limits else None
    if mode.step == "muon":
        return runtimes, False, MuonStep(optimizer, matrices(optimizer, places), most_bytes)
    items, gathered = deal_owners(places, owners), mode.step == "gathered"
    return runtimes, False, OwnedStep(optimizer, items, gathered, mode.bucketed, most_bytes)


def _refuse_repeated(optimizer: Optimizer, places: Iterable[tuple[nn.Parameter, Lane, int]]) -> None:
    """Torch only warns of a parameter that is twice in one group. A step in parts would take it once."""
    counts = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    for parameter, lane, index in places:
        if counts[id(parameter)] > 1:
            raise OptimizerError(
                f"{type(optimizer).__name__} holds parameter {lane.layout.pieces[index].name!r} "
                f"{counts[id(parameter)]} times in one group",
                "Give each parameter once: model.parameters() lists tied weights once.",
            )


@dataclass(frozen=True)
class _Mode:
    """How an optimizer steps."""

    step: str
    plain_gradients: bool = False
    bucketed: bool = True  # the step may run several times, each time on some parameters


def _sharded_places(
    optimizer: Optimizer, runtimes: Iterable[Runtime]
) -> Iterator[tuple[nn.Parameter, Lane, int]]:
    """Its parameters of which this rank has only a part, or not on the compute device, in its own order."""
    placed = {
        id(p): (p, lane, index)
        for runtime in runtimes
        for lane in runtime.lanes
        if not lane.replicated or lane.specs or lane.streams_steps
        for index, p in enumerate(lane.parameters)
    }
    held = dict.fromkeys(id(p) for group in optimizer.param_groups for p in group["params"])
    return (placed[key] for key in held if key in placed)


def _is_elsewhere(optimizer: Optimizer, runtimes: Iterable[Runtime]) -> bool:
    """Whether entire tensors cannot be had: some are tensor-parallel, or offloaded."""
    return any(lane.specs or lane.streams_steps for _, lane, _ in _sharded_places(optimizer, runtimes))


def _refuse_elsewhere(optimizer: Optimizer, lanes: Iterable[Lane]) -> None:
    name = type(optimizer).__name__
    for lane in lanes:
        if lane.specs:
            raise OptimizerError(
                f"{name} steps on entire tensors, and {unit_label(lane.unit)} is tensor-parallel as well",
                "Use an element-wise optimizer such as AdamW beside tensor parallelism.",
            )
        if lane.dtypes.eight_bit_state:
            raise OptimizerError(
                f"{name} steps on entire tensors, and state='8bit' is for element-wise optimizers",
                "Leave out state=, or use an element-wise optimizer such as AdamW.",
            )
        if lane.streams_steps:
            raise OptimizerError(
                f"{name} steps on entire tensors, and values of {unit_label(lane.unit)} are offloaded",
                "Leave out offload=, or use an element-wise optimizer such as AdamW.",
            )


def _mode(optimizer: Optimizer, runtimes: Iterable[Runtime], closure: bool) -> _Mode:
    """As declared, as known of its class, or as a trial shows. One that is right in no mode is refused."""
    placed = {
        id(p): Placed(piece.shape, piece.order, lane.layout.shard_sizes(piece))
        for p, lane, index in _sharded_places(optimizer, runtimes)
        for piece in (lane.layout.pieces[index],)
    }
    if not placed:
        return _Mode("element-wise")
    modules = [module for runtime in runtimes for module in runtime.model.modules()]
    for wrapper in _wrappers(optimizer):
        if _declared(wrapper, ()) is None and all(map(_is_setting, vars(wrapper).values())):
            verdict = try_on_shards(wrapper, placed, closure, modules)
            if verdict.tried and verdict.finding is not None:
                raise _refused(wrapper, verdict.finding, None, placed, in_parts=True)
    elsewhere = _is_elsewhere(optimizer, runtimes)
    in_chunks = any(lane.streams_steps for _, lane, _ in _sharded_places(optimizer, runtimes))
    steps_in_chunks = in_chunks and not _wraps_another(optimizer)
    declared, bucketed = _declared(optimizer, runtimes), not is_compiled_call()
    if declared is not None and getattr(optimizer, _DECLARATION, None) is None and not elsewhere:
        bucketed &= _check_request(optimizer, declared, placed, closure, modules)
    if declared is None and type(optimizer) in _ELEMENT_WISE:
        declared = "element-wise"
    if declared == "element-wise":
        # Of complex gradients torch takes a view of real numbers, which has another shape than the parameter.
        is_complex = any(p.is_complex() for group in optimizer.param_groups for p in group["params"])
        return _Mode(declared, plain_gradients=is_complex or is_compiled_call())
    if declared is not None:
        return _Mode(declared, bucketed=bucketed)
    if is_known_muon(optimizer) and not is_compiled_call():
        return _Mode("muon")
    if type(optimizer) in _OWNED:
        return _Mode("owned", bucketed=not is_compiled_call())
    if type(optimizer) in _GLOBAL:
        raise _refused(optimizer, _GLOBAL[type(optimizer)], None, placed, elsewhere, in_chunks)
    verdict = try_on_shards(optimizer, placed, closure, modules)
    on_shards = _Mode("element-wise", plain_gradients=verdict.plain_gradients or is_compiled_call())
    if verdict.finding is None and steps_in_chunks:
        _check_chunks(optimizer, placed, closure, modules)
    if verdict.finding is None and not (verdict.sums or verdict.in_blocks):
        return on_shards
    if not verdict.tried:
        raise _refused(optimizer, verdict.finding or "", None, placed, elsewhere, in_chunks)
    owned = try_owned(optimizer, placed, closure, modules) if not elsewhere else None
    if owned is not None and owned.finding is None:
        return _Mode("owned", bucketed=owned.bucketed and not is_compiled_call())
    if verdict.sums and steps_in_chunks:
        raise OptimizerError(
            f"{type(optimizer).__name__} takes norms of gradients, and with offload= or state='8bit' it "
            "steps on chunks of them",
            "Leave these options out, or use an element-wise optimizer such as AdamW.",
        )
    if verdict.finding is None:
        # Norms of gradients are right on shards, too, with a sum over ranks for each; and states in blocks.
        return on_shards
    raise _refused(optimizer, verdict.finding, owned, placed, elsewhere, in_chunks)


def _check_chunks(
    optimizer: Optimizer, placed: Mapping[int, Placed], closure: bool, modules: list[nn.Module]
) -> None:
    """An element-wise optimizer may still count calls, say, of which a step in chunks has several."""
    finding = try_in_chunks(optimizer, placed, closure, modules).finding
    if finding is not None:
        name = type(optimizer).__name__
        raise OptimizerError(
            f"{name} would compute something else than one process does with offload= or state='8bit', which "
            f"call its step for one chunk of the parameters after the other: {finding}",
            "Leave these options out, or use one of torch's element-wise optimizers, such as AdamW. If you "
            f"know better, set {name}.{_DECLARATION} = 'element-wise'.",
        )


def _check_request(
    optimizer: Optimizer, step: str, placed: Mapping[int, Placed], closure: bool, modules: list[nn.Module]
) -> bool:
    """A request for all optimizers of a model is refused for one that is known, or shown by a trial, to
    compute something else in this way. Whether it may step in several calls."""
    kind, name = type(optimizer), type(optimizer).__name__
    if kind in _ELEMENT_WISE or (kind in _OWNED and step != "element-wise"):
        return True
    found, verdict = _GLOBAL.get(kind) if step != "gathered" else None, None
    if step == "element-wise":
        found = found or ("it looks at entire tensors" if kind in _OWNED else None)
    elif kind not in _GLOBAL:
        verdict = try_owned(optimizer, placed, closure, modules)
        if verdict.tried and (step == "owned" or verdict.random):
            found = verdict.finding
    if found is None:
        return verdict is None or verdict.bucketed or not verdict.tried
    fits = "owned" if kind in _OWNED else "gathered"
    others = "" if verdict is not None and verdict.random else f"optimizer_step={fits!r}, "
    raise OptimizerError(
        f"{name} with optimizer_step={step!r} would compute something else than one process does: {found}",
        f"Use {others}an element-wise optimizer such as AdamW, or strategy='replicate', under which it is "
        f"right. If you know better, set {name}.{_DECLARATION} = {step!r}.",
    )


def _declared(optimizer: Optimizer, runtimes: Iterable[Runtime]) -> str | None:
    declared = getattr(optimizer, _DECLARATION, None)
    if declared is not None:
        if declared not in OPTIMIZER_STEPS[1:]:
            choices = ", ".join(map(repr, OPTIMIZER_STEPS[1:]))
            raise OptimizerError(
                f"{type(optimizer).__name__}.{_DECLARATION} is {declared!r}", f"Choose one of {choices}."
            )
        return str(declared)
    requests = {runtime.options.optimizer_step for runtime in runtimes} - {"auto"}
    if len(requests) > 1:
        raise OptimizerError(
            f"{type(optimizer).__name__} holds parameters of models with optimizer_step="
            + " and ".join(map(repr, sorted(requests))),
            "Give these models the same optimizer_step, or an optimizer each.",
        )
    return requests.pop() if requests else None


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


def _refused(
    optimizer: Optimizer,
    finding: str,
    of_tensors: Verdict | None,
    placed: Mapping[int, Placed],
    in_parts: bool = False,
    in_chunks: bool = False,
) -> OptimizerError:
    """`finding`: why it is not element-wise; `of_tensors`: why not even each tensor by itself is right. What
    has to step on `in_parts` cannot have entire tensors: a wrapper, or beside offload, say."""
    name, base = type(optimizer).__name__, type(optimizer).__base__
    kind = name if base is None or base is Optimizer else f"{name} (a subclass of {base.__name__})"
    size = sum(prod(place.shape) for place in placed.values()) * 8 / 2**20
    gathers = (
        "optimizer_step='gathered', with which every rank gathers all values and repeats the step (about "
        f"{size:.0f} MiB per rank, and its state in full), or "
    )
    also = "" if of_tensors is None else f"; nor can each tensor step by itself: {of_tensors.finding}"
    if in_parts or (of_tensors is not None and of_tensors.random):
        gathers = ""  # what ranks draw differs
    cut = "stepped on in chunks (offload=, state='8bit')" if in_chunks else "sharded"
    otherwise = "strategy='replicate', under which it is right. "
    if in_chunks:
        otherwise = "leave out offload= and state=. "
    return OptimizerError(
        f"{kind} is not provably element-wise, and its parameters are {cut}: {finding}{also}",
        "Use an element-wise optimizer such as AdamW, "
        + gathers
        + ("or " if not gathers else "")
        + otherwise
        + f"If you know better, set {name}.{_DECLARATION} = 'element-wise'"
        + ("." if in_parts else " or 'owned'."),
    )


@_uncompiled
def _stand_closest(optimizer: Optimizer, *_: Any) -> None:
    """Before a step, and before its own hooks: ours come after all of these, and after the step first.

    A user's hook then sees gradients and parameters as they rest, and what it changes counts. A hook for all
    optimizers could not have that: torch calls these before an optimizer's own, and after its step last.
    """
    if not _owners:
        return
    before = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    after = getattr(optimizer, "_optimizer_step_post_hooks", None)
    if before is None or after is None:
        return  # a wrapper that does not initialise its base class
    if next(reversed(before), None) != _HOOK:
        before.pop(_HOOK, None)
        before[_HOOK] = _before_step
    if next(iter(after), None) != _HOOK:
        others = {key: hook for key, hook in after.items() if key != _HOOK}
        after.clear()
        after.update({_HOOK: _after_step, **others})


register_optimizer_step_pre_hook(_stand_closest)
