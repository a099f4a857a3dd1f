"""From marked modules to one engine: what was asked block by block becomes one call of `fs.shard`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.api import shard_with
from fullshard.comm.groups import rank_count, start
from fullshard.engine.runtime import engine_of
from fullshard.engine.tensors import cast_floats
from fullshard.engine.unit import LiveUnit
from fullshard.errors import ModelError, NotSupported, StateError
from fullshard.policy import Integration, UnitPolicy
from fullshard.precision import Precision
from fullshard.torch_fsdp.initialising import Blanks, Window
from fullshard.torch_fsdp.marks import EMPTY, LIVE, MARKED, Mark, mark_of, marks_in, outermost, own_parameters
from fullshard.torch_fsdp.policies import casts_of, precision_of


def ready(module: nn.Module) -> None:
    """The engine is there and the values are initialised: called before a marked module is used."""
    mark = mark_of(module)
    if mark is None or mark.state == LIVE:
        return
    # The first use may be an evaluation: tensors made in inference mode could never train.
    with torch.inference_mode(False), torch.no_grad():
        if mark.state == MARKED:
            root = outermost(module)
            _refuse_meta(root)
            build(root)
        if mark.window is not None:
            mark.window.end()
    if mark.window is not None:
        for other in list(marks_in(_root(module))):
            other.window = None
            other.become(LIVE)


def ready_unless_meta(module: nn.Module) -> None:
    """For questions that a meta-device model can answer without values, such as its parameters."""
    mark = mark_of(module)
    if mark is not None and mark.state == MARKED and not _on_meta(outermost(module)):
        ready(module)


def _on_meta(root: nn.Module) -> bool:
    return any(p.is_meta for p in own_parameters(root))


def _refuse_meta(root: nn.Module) -> None:
    meta = [name for name, p in nn.Module.named_parameters(root) if p.is_meta]
    if meta:
        raise ModelError(
            "parameters should be materialized from the meta device before training, but these were still on "
            f"meta device: {meta}",
            "Call model.to_empty(device=...) and then initialise them, or load a state dict.",
        )


def build_empty(root: nn.Module, device: torch.device | None) -> None:
    """`to_empty` of a meta-device model: shards with memory, and without values where there were none."""
    blanks = Blanks.of(root)
    build(root, blanks.zero)
    runtime = engine_of(root)
    if runtime is None:
        return
    if device is not None and runtime.comm.device.type != device.type:
        raise NotSupported(
            f"to_empty(device={str(device)!r}) of a model that is sharded on {runtime.comm.device}",
            "Give to_empty the device of the mesh.",
        )
    window = Window(runtime, root, blanks)
    for mark in marks_in(root):
        mark.window = window
        mark.become(EMPTY)


def build(root: nn.Module, materialize: Any = None) -> None:
    """Shard `root` with every marked module inside it as a unit. If it raises, all are marked as before."""
    marks = list(marks_in(root))
    for mark in marks:
        if mark.state != MARKED:
            raise StateError(
                f"a {mark.plain.__name__} inside {type(root).__name__} was used, and so sharded, before "
                f"fully_shard was called on the module around it",
                "Call fully_shard on all modules, inner ones first, before the first of them is used.",
            )
    for mark in marks:
        mark.module.__class__ = mark.plain  # the engine looks at classes, and would see ours
    try:
        start()
        wants = _Wants.of(marks)
        ignored = [p for p in own_parameters(root) if any(p in m.asked.ignored for m in marks)]
        sharded = {id(p) for p in own_parameters(root)} - {id(p) for p in ignored}
        if sharded:
            shard_with(
                Integration(policy_of=wants.units.policy_of, exclusive_optimizers=False),
                root,
                device=_device(root, wants.mesh),
                strategy=wants.strategy,
                across=wants.across,
                mesh=wants.mesh,
                precision=wants.units.precision_of(root) or Precision(),
                units=wants.units,
                ignore=tuple(ignored),
                materialize=materialize,
            )
    except BaseException:
        for mark in marks:
            mark.become(MARKED)
        raise
    for mark in marks:
        mark.become(LIVE)
        _settle(mark)


def _settle(mark: Mark) -> None:
    """What a unit takes from its own mark."""
    unit, casts = unit_of(mark.module), casts_of(mark.asked.policy)
    if unit is None:
        _cast_around(mark.module, *casts)  # nothing to shard here; inputs and outputs are cast all the same
        return
    _change_policy(mark, casts=casts)
    keep_or_release(mark)
    divide(mark)
    fill_unused(mark)
    postpone(mark)
    for args, kwargs in mark.compilations:
        mark.module.compile(*args, **kwargs)
    mark.compilations.clear()


def _cast_around(module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    if inputs is not None:
        module.register_forward_pre_hook(partial(_cast_inputs, inputs), with_kwargs=True)
    if outputs is not None:
        module.register_forward_hook(partial(_cast_output, outputs))


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast_floats(args, dtype), cast_floats(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    return cast_floats(output, dtype)


def keep_or_release(mark: Mark) -> None:
    """`reshard_after_forward` of one unit. What is gathered when follows from it on all ranks alike."""
    unit, runtime = unit_of(mark.module), engine_of(mark.module)
    if unit is None or runtime is None:
        return
    reshards = mark.asked.reshard_after_forward if mark.reshards is None else mark.reshards
    if unit is runtime.root:
        stays_full = False if reshards is True else None  # None, torch's default, keeps the root full
    else:
        together_on_one = reshards is False or (reshards == 1 and reshards is not True)
        stays_full = True if together_on_one else None
    _change_policy(mark, stays_full=stays_full)


def divide(mark: Mark) -> None:
    """`set_gradient_divide_factor` of one unit."""
    if mark.divisor is not None:
        _change_policy(mark, divisor=mark.divisor)


def fill_unused(mark: Mark) -> None:
    """`set_reduce_scatter_unused_params` of one unit: zeros, which weight decay tells from None."""
    _change_policy(mark, zero_unused=mark.zero_unused)


def _change_policy(mark: Mark, **changes: Any) -> None:
    unit, runtime = unit_of(mark.module), engine_of(mark.module)
    if unit is not None and runtime is not None:
        runtime.set_policy(unit, replace(unit.policy, **changes))


def postpone(mark: Mark) -> None:
    """A sum over replicas waits only if all units of the engine may wait: it has one pile for all."""
    runtime = engine_of(mark.module)
    if runtime is not None:
        family = marks_in(runtime.root.modules[0])
        runtime.reduction.postponing = not any(m.syncs and m.sums_replicas for m in family)


def unit_of(module: nn.Module) -> LiveUnit | None:
    """The unit whose forward is this module's."""
    runtime = engine_of(module)
    if runtime is None:
        return None
    return next((unit for unit in runtime.units if module in unit.modules), None)


def units_behind(module: nn.Module) -> list[LiveUnit]:
    """The units that hold what a mark is about; a tied parameter may belong to a unit further out."""
    runtime = engine_of(module)
    if runtime is None:
        return []
    wanted = {id(p) for p in _Units(list(marks_in(module))).parameters(module)}
    return [u for u in runtime.units if any(id(p) in wanted for lane in u.lanes for p in lane.parameters)]


def _root(module: nn.Module) -> nn.Module:
    runtime = engine_of(module)
    return module if runtime is None else runtime.root.modules[0]


class _Units:
    """Which modules are units, and the precision of each; `fs.shard` asks it."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._marks = {mark.module: mark for mark in marks}
        self._nested = set(self._marks)

    def __call__(self, module: nn.Module) -> bool:
        return module in self._nested

    def policy_of(self, module: nn.Module) -> UnitPolicy:
        return UnitPolicy(precision=self.precision_of(module))

    def precision_of(self, module: nn.Module) -> Precision | None:
        mark = self._marks.get(module)
        return None if mark is None else precision_of(mark.asked.policy, self.parameters(module))

    def parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Those that this module's mark is about: not those of marked modules inside it."""
        inner = {
            id(p)
            for m in module.modules()
            if m is not module and m in self._nested
            for p in own_parameters(m)
        }
        return [p for p in own_parameters(module) if id(p) not in inner]


@dataclass(frozen=True)
class _Wants:
    """One answer for the whole engine to what each block asked for."""

    strategy: str
    across: str
    mesh: DeviceMesh | None
    units: _Units

    @staticmethod
    def of(marks: Sequence[Mark]) -> _Wants:
        mesh = _one_mesh(marks)
        units = _Units(marks)
        group = _one_group(marks)
        if mesh is not None and mesh.ndim == 2:
            if group is not None:
                raise NotSupported(
                    f"fully_shard(reshard_after_forward={group}) on a mesh of two axes",
                    "Use True or False there, or a mesh of one axis.",
                )
            return _Wants("hybrid", "replicate", _named(mesh.device_type, mesh.mesh), units)
        if group is None:
            return _Wants("zero3", "replicate", mesh, units)
        ranks = torch.arange(rank_count()) if mesh is None else mesh.mesh
        kind = _default_device().type if mesh is None else mesh.device_type
        return _Wants("hybrid", "shard", _named(kind, ranks.view(-1, group)), units)


def _one_mesh(marks: Sequence[Mark]) -> DeviceMesh | None:
    first = marks[0].asked.mesh
    for mark in marks[1:]:
        if _ranks(mark.asked.mesh) != _ranks(first):
            raise NotSupported(
                f"fully_shard with different meshes in one model: {marks[0].plain.__name__} has {first}, "
                f"{mark.plain.__name__} has {mark.asked.mesh}",
                "Give all modules of a model one mesh.",
            )
    return first


def _ranks(mesh: DeviceMesh | None) -> list[Any]:
    return list(range(rank_count())) if mesh is None else mesh.mesh.tolist()


def _one_group(marks: Sequence[Mark]) -> int | None:
    """The ranks that keep a unit together after forward, where that is neither one nor all."""
    root, *blocks = marks
    size = root.asked.mesh.size(-1) if root.asked.mesh is not None else rank_count()
    asked: dict[int, Mark] = {}
    others: list[Mark] = []
    for mark in marks:
        said = mark.asked.reshard_after_forward
        if isinstance(said, int) and not isinstance(said, bool) and 1 < said < size:
            asked[said] = mark
        elif mark is not root or said is True:
            others.append(mark)
    if not asked:
        return None
    if len(asked) > 1 or (others and blocks):
        what = {f"{m.plain.__name__}: {m.asked.reshard_after_forward}" for m in (*asked.values(), *others)}
        raise NotSupported(
            f"fully_shard with another reshard_after_forward beside a group size: {', '.join(sorted(what))}",
            "Give all modules but the root the same number, or use True and False.",
        )
    return next(iter(asked))


def _named(device_type: str, ranks: torch.Tensor) -> DeviceMesh:
    """Ranks and names: all that the engine reads. No groups: with tensor parallelism on a third axis ranks
    would ask for different ones at once, and wait for each other forever."""
    names = ("replicate", "shard")
    return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def _default_device() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())


def _device(root: nn.Module, mesh: DeviceMesh | None) -> torch.device | None:
    """torch's moves a model to the mesh's device; one that is there stays where it is."""
    device = _default_device()
    if mesh is not None and mesh.device_type != device.type:
        device = torch.device(mesh.device_type)
    tensors = (*own_parameters(root), *root.buffers())
    return device if any(t.device.type not in (device.type, "meta") for t in tensors) else None
