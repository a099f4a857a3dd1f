"""From a strategy's options to a sharded module, once and for all fits, tests and predictions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import api
from fullshard import options as _options
from fullshard.comm.control import end_groups_at_exit
from fullshard.engine.runtime import engine_of, is_sharded
from fullshard.errors import NotSupported, OptionError, StateError
from fullshard.plan.units import find_units, has_forward
from fullshard.precision import Precision


class ShardOptions(TypedDict, total=False):
    """What `fs.shard` takes, under the same names, and what a strategy needs beside it.

    precision: None follows Lightning's own `precision=`; see `fullshard.lightning.precisions`.
    ranks_inside: for hybrid, how many ranks share one copy; a mesh cannot be made before the processes are.
    weights_only: of checkpoints, where Lightning says nothing: False reads values that could run code.
    """

    strategy: str
    precision: str | Precision | None
    mesh: DeviceMesh | None
    ranks_inside: int | None
    weights_only: bool | None
    units: Any
    checkpoint_activations: bool
    ignore: Any
    initial: str
    materialize: Callable[[nn.Module], Any] | None
    check_gradients: bool
    prefetch: bool
    keep_full: int | str | None
    merge_units: int | None
    reduce: str
    across: str


_BESIDE = ("precision", "ranks_inside", "weights_only")  # not for fs.shard, or in another form
# Of Lightning's own data parallel strategy, which is our base class: these mean something only there.
_NOT_OURS = ("self", "kwargs", "checkpoint_io", "model_averaging_period")


def split(given: dict[str, Any], base: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our options, and those of Lightning's base class. What neither knows is an error, never ignored."""
    signature = inspect.signature(base.__init__)  # type: ignore[misc]
    lightnings = [n for n in signature.parameters if n not in _NOT_OURS and not n.startswith("ddp_")]
    ours = {name: value for name, value in given.items() if name in ShardOptions.__annotations__}
    theirs = {name: value for name, value in given.items() if name not in ours}
    start = theirs.pop("start_method", "popen")
    if start != "popen":
        raise NotSupported(
            f"start_method={start!r}: a process that was {'forked' if start == 'fork' else 'spawned'} would "
            "hand its shards back as if they were the model",
            "Run a script (Lightning starts the other ranks itself), or start it with torchrun.",
        )
    refuse_checkpoint_io(theirs.pop("checkpoint_io", None))
    unknown = sorted(theirs.keys() - set(lightnings))
    if unknown:
        known = ", ".join(dict.fromkeys((*ShardOptions.__annotations__, *lightnings)))
        raise OptionError(f"unknown option {unknown[0]!r} for a FullShardStrategy", f"Choose from: {known}.")
    if ours.get("ranks_inside") is not None:
        _check_ranks_inside(ours)
    return ours, theirs


def _check_ranks_inside(ours: dict[str, Any]) -> None:
    inside = ours["ranks_inside"]
    if type(inside) is not int or inside < 1:
        raise OptionError(f"ranks_inside is {inside!r}", "Give a number of ranks of at least 1.")
    if ours.get("strategy") != "hybrid" or ours.get("mesh") is not None:
        raise OptionError(
            "ranks_inside is for strategy='hybrid' without a mesh", "Leave it out, or leave out the mesh."
        )


def refuse_checkpoint_io(plugin: Any) -> None:
    """Lightning's own plugin for plain files does no harm: we only read and remove such files with it."""
    if plugin is not None and type(plugin).__name__ != "TorchCheckpointIO":
        raise NotSupported(
            f"the CheckpointIO plugin {type(plugin).__name__}: every rank writes its own part of a "
            "checkpoint, and a plugin gets to see one rank's",
            "Leave the plugin out.",
        )


@dataclass(frozen=True)
class Place:
    """Where a module goes: its device, and how many ranks there are."""

    device: torch.device
    ranks: int


def shard_module(module: nn.Module, ours: dict[str, Any], precision: Precision, place: Place) -> None:
    """Shard `module` in place, unless an earlier fit did."""
    runtime = engine_of(module)
    if runtime is not None:
        _refuse_other_options(module, runtime.options, ours, precision)
        return
    options = {name: value for name, value in ours.items() if name not in _BESIDE}
    inside = ours.get("ranks_inside")
    if inside is not None:
        options["mesh"] = _mesh(inside, place)
    if options.get("units") is None and not getattr(module, "automatic_optimization", True):
        options["units"] = _called_alone(module, options, precision)
    api.shard(module, precision=precision, device=place.device, **options)
    end_groups_at_exit()


def _called_alone(module: nn.Module, options: dict[str, Any], precision: Precision) -> Any:
    """Units for manual optimization, whose step calls `self.generator(z)`, not `self(z)`.

    Each part that may be called by itself is a unit beside those that are found anyhow. In the root it would
    be opened layer by layer, and each layer's call would bring all of the root.
    """
    said = _options.parse(
        strategy=options.get("strategy", "zero3"),
        precision=precision,
        units=None,
        ignore=options.get("ignore", ()),
        checkpoint_activations=options.get("checkpoint_activations", False),
    )
    found = {m for unit in find_units(module, said)[1:] for m in unit.modules}
    found |= {part for part in _parts(module) if next(part.parameters(), None) is not None}
    return found.__contains__


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


def _refuse_other_options(module: nn.Module, made: Any, ours: dict[str, Any], precision: Precision) -> None:
    """A module is sharded once; a second Trainer that asks for something else must not get the first's."""
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
    asked = {"strategy": "zero3", "across": "replicate"} | ours | {"precision": precision}
    for name in ("strategy", "across", "precision", "checkpoint_activations", "check_gradients"):
        if name in asked and asked[name] != getattr(made, name):
            raise StateError(
                f"{type(module).__name__} is sharded already with {name}={getattr(made, name)!r}, and this "
                f"strategy asks for {asked[name]!r}",
                "Use the same options, or build the module anew.",
            )
