"""From a strategy's options to a sharded module, once for all fits, tests and predictions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import api, keywords
from fullshard import options as _options
from fullshard.comm.control import end_groups_at_exit
from fullshard.engine.runtime import engine_of, is_sharded
from fullshard.errors import NotSupported, OptionError, StateError
from fullshard.option_table import OTHER_NAMES, TABLE
from fullshard.plan.units import find_units, has_forward
from fullshard.policy import NO_INTEGRATION
from fullshard.precision import Precision


class StrategyOptions(_options.ShardOptions, total=False):
    """Options of `fs.shard` under the same names, and what a strategy needs in addition.

    cpu_offload: Lightning's name for offload='host': True, or torch's CPUOffload(offload_params=True).
    precision: None follows Lightning's own `precision=`; see `fullshard.lightning.precisions`.
    ranks_inside: for hybrid, how many ranks share one copy; a mesh cannot be made before the processes are.
    weights_only: of checkpoints, where Lightning does not specify it: False reads values that could run code.
    """

    cpu_offload: Any
    precision: str | Precision | None
    ranks_inside: int | None
    weights_only: bool | None


_NAMES = tuple(get_type_hints(StrategyOptions))
_NOT_FOR_SHARD = ("precision", "ranks_inside", "weights_only")  # or in another form
# Arguments of the base class, Lightning's own data parallel strategy, that have no meaning here.
_UNUSED_BY_US = ("self", "kwargs", "checkpoint_io", "model_averaging_period")


def split(given: dict[str, Any], base: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of ShardOptions, and those of Lightning's base class. Any other is an error."""
    signature = inspect.signature(base.__init__)  # type: ignore[misc]
    of_base = [n for n in signature.parameters if n not in _UNUSED_BY_US and not n.startswith("ddp_")]
    options = {name: value for name, value in given.items() if name in _NAMES}
    rest = {name: value for name, value in given.items() if name not in options}
    if _is_offloaded(options.pop("cpu_offload", None)):
        if "offload" in options:
            raise OptionError(f"cpu_offload=True and offload={options['offload']!r}", "Give one of them.")
        options["offload"] = "host"
    start = rest.pop("start_method", "popen")
    if start != "popen":
        raise NotSupported(
            f"start_method={start!r}: a process that was {'forked' if start == 'fork' else 'spawned'} would "
            "hand its shards back as if they were the model",
            "Run a script (Lightning starts the other ranks itself), or start it with torchrun.",
        )
    refuse_checkpoint_io(rest.pop("checkpoint_io", None))
    unknown = sorted(rest.keys() - set(of_base))
    if unknown:
        known = dict.fromkeys((*_NAMES, *of_base))
        raise keywords.unknown("FullShardStrategy", unknown[0], known, OTHER_NAMES)
    if options.get("ranks_inside") is not None:
        _check_ranks_inside(options)
    return options, rest


def _is_offloaded(given: Any) -> bool:
    offload = getattr(given, "offload_params", False if given is None else given)
    if not isinstance(offload, bool):
        raise OptionError(f"cpu_offload is {given!r}", "Give True, False or a CPUOffload; or offload='host'.")
    return offload


def _check_ranks_inside(options: dict[str, Any]) -> None:
    inside = options["ranks_inside"]
    if type(inside) is not int or inside < 1:
        raise OptionError(f"ranks_inside is {inside!r}", "Give a number of ranks of at least 1.")
    if options.get("strategy") != "hybrid" or options.get("mesh") is not None:
        raise OptionError(
            "ranks_inside is for strategy='hybrid' without a mesh", "Leave it out, or leave out the mesh."
        )


def refuse_checkpoint_io(plugin: Any) -> None:
    """Lightning's own plugin for plain files is harmless: it only reads and removes such files."""
    if plugin is not None and type(plugin).__name__ != "TorchCheckpointIO":
        raise NotSupported(
            f"the CheckpointIO plugin {type(plugin).__name__}: every rank writes its own part of a "
            "checkpoint, and a plugin sees only one rank's",
            "Leave the plugin out.",
        )


@dataclass(frozen=True)
class Place:
    """Where a module goes: its device, and how many ranks there are."""

    device: torch.device
    ranks: int


def shard_module(module: nn.Module, given: dict[str, Any], precision: Precision, place: Place) -> None:
    """Shard `module` in place, unless an earlier fit did."""
    runtime = engine_of(module)
    if runtime is not None:
        _refuse_other_options(module, runtime.options, given, precision)
        return
    options = {name: value for name, value in given.items() if name not in _NOT_FOR_SHARD}
    inside = given.get("ranks_inside")
    if inside is not None:
        options["mesh"] = _mesh(inside, place)
    if options.get("units") is None and not getattr(module, "automatic_optimization", True):
        options["units"] = _called_alone(module, options, precision)
    api.shard_with(NO_INTEGRATION, module, precision=precision, device=place.device, **options)
    end_groups_at_exit()


def _called_alone(module: nn.Module, options: dict[str, Any], precision: Precision) -> Any:
    """Units for manual optimization, whose step calls `self.generator(z)`, not `self(z)`.

    Each part that may be called by itself is a unit, in addition to those that are found anyway. As a part of
    the root, each call of one of its layers would gather all of the root.
    """
    chosen = {k: v for k, v in options.items() if k in ("strategy", "ignore", "checkpoint_activations")}
    if chosen.get("strategy") == "auto":
        del chosen["strategy"]  # units do not depend on it
    units = find_units(module, _options.parse(precision=precision, **chosen))
    modules = {m for unit in units[1:] for m in unit.modules}
    modules |= {part for part in _parts(module) if next(part.parameters(), None) is not None}
    return modules.__contains__


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module; those of a list or dict of modules instead of itself."""
    for child in module.children():
        if has_forward(child):
            yield child
        else:
            yield from _parts(child)


def _mesh(inside: int, place: Place) -> DeviceMesh:
    if place.ranks % inside:
        raise OptionError(
            f"ranks_inside={inside} does not divide the {place.ranks} ranks", "Choose a number that does."
        )
    shape = (place.ranks // inside, inside)
    return init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _refuse_other_options(module: nn.Module, made: Any, given: dict[str, Any], precision: Precision) -> None:
    """A module is sharded once; a second Trainer with other options must not silently get the first's."""
    new = [
        name
        for name, child in module.named_modules()
        if not is_sharded(child) and next(child.parameters(), None) is not None
    ]
    if new:
        raise StateError(
            f"{new[0]!r} was put into {type(module).__name__} after it had been sharded",
            "In configure_model, return early if the layers are there already.",
        )
    requested = {name: TABLE[name].default for name in ("strategy", "offload")}
    requested |= given | {"precision": precision}
    if requested["strategy"] == "auto" or requested.get("plan") is not None:
        # What a plan chose once is kept.
        requested |= {name: getattr(made, name) for name in ("strategy", "offload", "checkpoint_activations")}
    requested["offload"] = TABLE["offload"].parsed(requested["offload"])
    for name in ("strategy", "precision", "offload", "checkpoint_activations", "check_gradients"):
        if name in requested and requested[name] != getattr(made, name):
            raise StateError(
                f"{type(module).__name__} is sharded already with {name}={getattr(made, name)!r}, and this "
                f"strategy requests {requested[name]!r}",
                "Use the same options, or build the module anew.",
            )
