"""The options of FSDP1 under torch's names, and what each means to the engine.

torch's own enums are accepted by name and its dataclasses by their fields, so a script may go on importing
some of them from torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard.comm.groups import own_rank, rank_count
from fullshard.errors import NotSupported, OptionError
from fullshard.precision import Precision

E = TypeVar("E", bound=Enum)


class ShardingStrategy(Enum):
    """What is sharded at rest."""

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When backward asks for the next unit."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class StateDictType(Enum):
    """What `state_dict()` holds and `load_state_dict()` takes."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """How an optimizer's state dict names its parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


# Not frozen, unlike records of our own: scripts fill torch's in field by field.


@dataclass
class MixedPrecision:
    """Dtypes of parameters, gradients on the wire, and buffers while the model computes."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """offload_params: parameters, gradients and optimizer state rest in host memory."""

    offload_params: bool = False


@dataclass
class StateDictConfig:
    """offload_to_cpu: values come on the host."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """rank0_only: the other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    pass


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """offload_to_cpu: values come on the host."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """rank0_only: the other ranks get an empty dict."""

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """One of the three types, with its two configurations."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings(kind: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
    """A state dict type with configurations that fit it, checked."""
    chosen = by_name(StateDictType, kind, "state_dict_type")
    config_class, optim_class = CONFIGS[chosen]
    return StateDictSettings(
        chosen,
        _fitting(config_class, config, "state_dict_config", chosen),
        _fitting(optim_class, optim_config, "optim_state_dict_config", chosen),
    )


def _fitting(expected: type[Any], config: Any, option: str, chosen: StateDictType) -> Any:
    if config is None:
        return expected()
    if type(config).__name__ != expected.__name__:
        raise OptionError(
            f"{option} is a {type(config).__name__}, which does not go with {chosen.name}",
            f"Give a {expected.__name__}, or None.",
        )
    if getattr(config, "_use_dtensor", False):
        raise NotSupported(
            f"{expected.__name__}(_use_dtensor=True): shards here are intervals of elements, not DTensors",
            "Leave it False: torch.distributed.checkpoint saves and loads our shards as they are.",
        )
    if isinstance(config, expected):
        return replace(config)
    return expected(**{name: getattr(config, name) for name in expected.__dataclass_fields__})


def by_name(kind: type[E], value: Any, option: str) -> E:
    """`value` as a member of our enum; torch's member of the same name counts as ours."""
    if isinstance(value, kind):
        return value
    if isinstance(value, Enum) and type(value).__name__ == kind.__name__ and value.name in kind.__members__:
        return kind[value.name]
    raise OptionError(
        f"{option} is {value!r}",
        f"Choose one of {', '.join(f'{kind.__name__}.{m}' for m in kind.__members__)}.",
    )


# ---- from torch's options to the engine's

_STRATEGIES: dict[ShardingStrategy, dict[str, Any]] = {
    ShardingStrategy.FULL_SHARD: {"strategy": "zero3"},
    ShardingStrategy.SHARD_GRAD_OP: {"strategy": "zero2"},
    ShardingStrategy.NO_SHARD: {"strategy": "replicate"},
    ShardingStrategy.HYBRID_SHARD: {"strategy": "hybrid"},
    # What a node's ranks share stays full from forward to backward: that is keep_full, not another strategy.
    ShardingStrategy._HYBRID_SHARD_ZERO2: {"strategy": "hybrid", "keep_full": "all"},
}
HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def strategy_options(strategy: ShardingStrategy) -> dict[str, Any]:
    return dict(_STRATEGIES[strategy])


def mixed_precision(given: Any) -> MixedPrecision:
    """A MixedPrecision of ours with the same fields; what the engine cannot do is refused here."""
    if given is None:
        return MixedPrecision()
    fields = MixedPrecision.__dataclass_fields__
    if any(not hasattr(given, name) for name in fields):
        raise OptionError(f"mixed_precision is {given!r}", "Give a MixedPrecision.")
    mixed = MixedPrecision(**{name: getattr(given, name) for name in fields})
    if mixed.keep_low_precision_grads:
        raise NotSupported(
            "MixedPrecision(keep_low_precision_grads=True): gradients have the dtype of their parameters",
            "Leave it False.",
        )
    precision(mixed, ())  # a dtype that is none is refused at once, not when the model is first used
    return mixed


def precision(mixed: MixedPrecision, parameters: Iterable[nn.Parameter]) -> Precision:
    """The engine's precision for these parameters.

    Those that have param_dtype already keep it at rest, as in torch: `compute=bf16` would give a bf16 model
    fp32 masters. Gradients are sent in reduce_dtype, though not wider than they were computed, and are summed
    in fp32 at least: a sum in a narrow reduce_dtype, as torch's, would lose bits and save nothing, since here
    each rank's gradient is sent to its owner and summed there.
    """
    floats = {p.dtype for p in parameters if p.dtype.is_floating_point}
    compute, wire = mixed.param_dtype, mixed.reduce_dtype
    wide = torch.float64 if wire == torch.float64 else torch.float32
    if compute is not None and floats == {compute}:
        compute = None
    computed = min((d.itemsize for d in floats), default=4) if compute is None else compute.itemsize
    if wire is not None and wire.is_floating_point and wire.itemsize > computed:
        wire = None
    return Precision(compute=compute, wire=wire, reduce=wide)


def refuse_ignored_classes(mixed: MixedPrecision, module: nn.Module) -> None:
    """Classes kept out of mixed precision: BatchNorm always is, others cannot be."""
    others = tuple(c for c in mixed._module_classes_to_ignore if not issubclass(c, _BatchNorm))
    if mixed.param_dtype is None or not others:
        return
    for name, inside in module.named_modules():
        if isinstance(inside, others) and any(p.is_floating_point() for p in inside.parameters()):
            raise NotSupported(
                f"MixedPrecision(_module_classes_to_ignore=...) names {type(inside).__name__}, and module "
                f"{name!r} is one: of the classes inside a unit only BatchNorm keeps its dtype",
                "Leave it at its default, or wrap these modules by hand without mixed_precision.",
            )


def cpu_offload(given: Any) -> CPUOffload:
    """A CPUOffload of ours with the same field, or for a bool."""
    offload = getattr(given, "offload_params", False if given is None else given)
    if not isinstance(offload, bool):
        raise OptionError(f"cpu_offload is {given!r}", "Give a CPUOffload.")
    return CPUOffload(offload)


def prefetches(given: Any) -> tuple[BackwardPrefetch | None, bool]:
    """torch's value, and whether the engine prefetches.

    BACKWARD_POST guarantees that a unit is freed before the next one gets memory. The engine has no such
    order; it guarantees the same without prefetch.
    """
    if given is None:
        return None, False
    chosen = by_name(BackwardPrefetch, given, "backward_prefetch")
    return chosen, chosen is BackwardPrefetch.BACKWARD_PRE


def mesh_of(group: Any, mesh: Any, strategy: ShardingStrategy) -> DeviceMesh | None:
    """The ranks to shard over; None is all of them."""
    if group is not None and mesh is not None:
        raise OptionError("process_group and device_mesh were both given", "Give one of them.")
    if mesh is not None:
        return _named(mesh) if strategy in HYBRID else mesh
    if group is None:
        return None
    if strategy in HYBRID:
        return _grid(group)
    if isinstance(group, tuple | list):
        raise OptionError(f"process_group is {group!r}", f"One group goes with {strategy.name}.")
    ranks = DeviceMesh.from_group(group, "cpu")  # only its ranks are used
    return None if ranks.mesh.tolist() == list(range(rank_count())) else ranks


def _named(mesh: DeviceMesh) -> DeviceMesh:
    """torch goes by position, replicas first; the engine by name."""
    names = ("replicate", "shard")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        raise OptionError(f"a hybrid strategy got {mesh!r} as its device_mesh", "Give a mesh of two axes.")
    if mesh.mesh_dim_names == names:
        return mesh
    return DeviceMesh.from_group(mesh.get_all_groups(), mesh.device_type, mesh.mesh, mesh_dim_names=names)


def _grid(groups: Any) -> DeviceMesh:
    """(ranks that shard, ranks that replicate) as a mesh, if all ranks can be counted off that way."""
    if not isinstance(groups, tuple | list) or len(groups) != 2:
        raise OptionError(
            f"process_group is {groups!r}", "A hybrid strategy takes (ranks of a node, ranks across nodes)."
        )
    rows, columns = (DeviceMesh.from_group(group, "cpu").mesh.tolist() for group in groups)
    ranks, rank = rank_count(), own_rank()
    if len(rows) * len(columns) == ranks:
        grid = torch.arange(ranks).view(len(columns), len(rows))
        row, column = rank // len(rows), rank % len(rows)
        if grid[row].tolist() == rows and grid[:, column].tolist() == columns:
            names = ("replicate", "shard")
            return DeviceMesh.from_group([groups[1], groups[0]], "cpu", grid, mesh_dim_names=names)
    raise NotSupported(
        f"process_group with ranks {rows} inside and {columns} across, in a world of {ranks}",
        'Pass device_mesh=init_device_mesh(device, (R, S), mesh_dim_names=("replicate", "shard")).',
    )
