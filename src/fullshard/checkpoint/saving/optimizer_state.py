"""What an optimizer keeps: groups, state by the names of parameters, and whatever else one process saves.

Every rank lists the same tensors in the same order. Of other values there is one for all ranks, or one for
each: the ranks compare them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.format import headers
from fullshard.checkpoint.format.values import Tree, memory_order
from fullshard.checkpoint.nested_state import FlatState, flattened
from fullshard.checkpoint.parameters import Site, plain, sites, sites_by_group
from fullshard.checkpoint.saving import entire_state
from fullshard.checkpoint.saving.compared import Undecided
from fullshard.checkpoint.saving.contents import Contents, LocalSlice, add_replicated, local_slice
from fullshard.engine.runtime import Runtime
from fullshard.engine.step.block_state import BlockState
from fullshard.engine.step.optimizers import owned_step
from fullshard.errors import CheckpointError
from fullshard.state.optimizer_state import other_entries, other_state, shards_in, tensors_of
from fullshard.state.tensor_subclasses import is_subclass, taken_apart


def add_optimizer(
    contents: Contents, runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Groups and state of an optimizer, by the names of the parameters."""
    known = sites(runtime, model)
    by_group = sites_by_group(known, optimizer)
    with _naming(optimizer):
        _add(contents, runtime, (known, by_group), optimizer)


@contextmanager
def _naming(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Errors about values that cannot be saved name the optimizer."""
    name = type(optimizer).__name__
    try:
        yield
    except CheckpointError as error:
        if name in error.what:
            raise
        raise type(error)(f"the state of {name} cannot be saved: {error.what}", error.remedy) from error


def _add(
    contents: Contents,
    runtime: Runtime,
    places: tuple[list[Site], list[list[Site]]],
    optimizer: torch.optim.Optimizer,
) -> None:
    known, by_group = places
    order = [site for members in by_group for site in members]
    _check_keys(order, optimizer)
    entire: dict[str, dict[str, Tree]] = {}
    owned = owned_step(optimizer)
    if owned is not None:
        dealt = [site for site in order if id(site.parameter) in owned.by_parameter]
        entire, slices = entire_state.collect(dealt, optimizer, owned, runtime.comm)
        contents.optimizer += [LocalSlice(tensor, 0, mine, flat) for tensor, mine, flat in slices]
        order = [site for site in order if id(site.parameter) not in owned.by_parameter]
    position = {id(site.parameter): i for i, site in enumerate(known)}
    order.sort(key=lambda site: position[id(site.parameter)])
    name = type(optimizer).__name__
    contents.optimizer_state = {
        "class": name,
        "groups": [_group(contents, optimizer, i, members) for i, members in enumerate(by_group)],
        "state": _state(contents, runtime, order, optimizer) | entire,
        "other_state": _listed(contents, f"the state of {name} under", other_state(optimizer)),
        "state_dict": _listed(contents, f"what {name}.state_dict() holds under", other_entries(optimizer)),
    }


def _check_keys(order: list[Site], optimizer: torch.optim.Optimizer) -> None:
    for site in order:
        for key in optimizer.state.get(site.parameter, {}):
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps state of {site.name!r} under {key!r}, which is not a "
                    "string",
                    "Use strings as names of optimizer state.",
                )


def _group(contents: Contents, optimizer: torch.optim.Optimizer, index: int, members: list[Site]) -> Tree:
    options = {k: v for k, v in optimizer.param_groups[index].items() if k not in ("params", "param_names")}
    encoded = contents.encoder.encode(options, f"group {index} of the optimizer")
    for option, tree in encoded.items():
        contents.compared.require(f"option {option!r} in group {index} of {type(optimizer).__name__}", tree)
    return {"parameters": [site.name for site in members], "options": encoded}


def _listed(contents: Contents, what: str, values: Mapping[Any, Any]) -> list[Tree]:
    """Values that belong to no parameter, with their keys: one for all ranks."""
    entries: list[Tree] = []
    for key, value in values.items():
        path = f"{what} {key!r}"
        if shards_in(value):
            raise CheckpointError(
                f"{path} has shards of tensors, and fs.save can only store one value for all ranks there",
                "If it is the state of an optimizer inside this one, give fs.save that one, and the rest as "
                "extra=; or save without the optimizer.",
            )
        value = taken_apart(value)
        entry: dict[str, Tree] = {
            "key": contents.shared.encode(key, f"the key of {path}"),
            "value": contents.shared.encode(value, path),
            "device": _device(tensor for _, tensor in tensors_of(value)),
        }
        contents.compared.require(path, entry)
        entries.append(entry)
    return entries


def _state(
    contents: Contents, runtime: Runtime, order: list[Site], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tree]]:
    flat = {site.name: flattened(site.name, optimizer.state.get(site.parameter, {})) for site in order}
    kinds = _kinds(order, flat)
    stored: dict[str, dict[str, Tree]] = {site.name: {} for site in order if flat[site.name].values}
    keys = dict.fromkeys(key for site in order for key in flat[site.name].values)
    for key in keys:  # key by key, so that neighbours in a lane are neighbours in the file
        having = [site for site in order if key in flat[site.name].values]
        for site in having:
            value = flat[site.name].values[key]
            stored[site.name][key] = _add_state(contents, runtime, site, key, value, kinds.get(key))
        what = f"the parameters of which the optimizer {type(optimizer).__name__} has state {key!r}"
        contents.compared.require(what, [site.name for site in having])
    return {
        site.name: _nested(contents, optimizer, site.name, flat[site.name], stored[site.name])
        for site in order
        if optimizer.state.get(site.parameter)
    }


def _nested(
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    name: str,
    flat: FlatState,
    stored: dict[str, Tree],
) -> dict[str, Tree]:
    """Entries of a parameter's state, with those of tensors in containers inside the entries of these."""
    inner = {key for nested in flat.nested.values() for key in nested.keys}
    entries = {key: entry for key, entry in stored.items() if key not in inner}
    for key, nested in flat.nested.items():
        path = f"optimizer state '{name}.{key}'"
        outline = contents.encoder.encode(nested.outline, path)
        tensors = []
        for stored_as, place in nested.keys.items():
            where = contents.encoder.encode(list(place), f"the place of '{name}.{stored_as}'")
            tensors.append({"place": where, "key": stored_as, "entry": stored[stored_as]})
        places = [[one["place"], one["key"]] for one in tensors]
        contents.compared.require(f"state '{name}.{key}' of {type(optimizer).__name__}", [outline, places])
        entries[key] = {"kind": "nested", "value": outline, "tensors": tensors}
    return entries


def _kinds(order: list[Site], flat: dict[str, FlatState]) -> dict[str, str]:
    """Keys that are 'scalar', one number per parameter whatever its shape, or 'own', different on each rank;
    'one' if these are single elements, which may be equal on all of them.

    By key, not by parameter: on a rank with no elements of a parameter, any empty state has its shape.
    """
    kinds = {"step": "scalar"}
    several: set[str] = set()
    for site in order:
        for key, value in flat[site.name].values.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0 and site.parameter.dim() > 0:
                kinds[key] = "scalar"
            elif is_subclass(value):
                kinds[key] = "own"
            elif isinstance(value, torch.Tensor) and value.shape != site.parameter.shape:
                kinds.setdefault(key, "own")
            if isinstance(value, torch.Tensor) and (value.numel() != 1 or is_subclass(value)):
                several.add(key)
    return {key: "one" if kind == "own" and key not in several else kind for key, kind in kinds.items()}


def _add_state(
    contents: Contents, runtime: Runtime, site: Site, key: str, value: Any, kind: str | None
) -> dict[str, Tree]:
    name = f"{site.name}.{key}"
    if not isinstance(value, torch.Tensor):
        tree = contents.encoder.encode(value, f"optimizer state {name!r}")
        return _undecided(contents, key, Undecided(name, site.interval, tree, "", {}))
    if not isinstance(value, BlockState) and not is_subclass(value):  # decoded when they are written
        value = plain(value)
    headers.check_dtype(name, value.dtype)
    device = _device([value])
    if kind == "scalar" and value.numel() == 1:
        add_replicated(contents.optimizer, contents, name, value, runtime, value.dtype)
        return {"kind": "scalar", "device": device}
    if kind == "one":
        tree = contents.encoder.encode(plain(value), name)
        return _undecided(contents, key, Undecided(name, site.interval, tree, device, {}))
    if kind == "own" or value.shape != site.parameter.shape:
        tree = contents.encoder.encode(taken_apart(value), name)
        contents.own[name] = {"interval": site.interval, "value": tree}
        return {"kind": "own", "device": device}
    if site.lane is None:
        add_replicated(contents.optimizer, contents, name, value, runtime, value.dtype)
    else:
        part = local_slice(site, value)
        part.tensor = replace(part.tensor, name=name)
        contents.optimizer.append(part)
    return {"kind": "elements", "device": device} | _order(site, value)


def _order(site: Site, value: torch.Tensor) -> dict[str, Tree]:
    """In which order the dimensions of an unsharded state are in memory, if that is not its parameter's."""
    order = memory_order(value)
    if not site.is_unsharded or order == memory_order(site.parameter):
        return {}
    return {"order": list(order or range(value.dim()))}


def _undecided(contents: Contents, key: str, one: Undecided) -> dict[str, Tree]:
    contents.compared.by_key[key].append(one)
    return one.entry


def settle(contents: Contents, differing: set[str]) -> None:
    """Decide how undecided states are stored: those under the keys that differ between ranks by each rank."""
    for key, states in contents.compared.by_key.items():
        for one in states:
            device = {"device": one.device} if one.device else {}
            if key in differing:
                contents.own[one.name] = {"interval": one.interval, "value": one.tree}
                one.entry.update({"kind": "own"} | device)
            else:
                one.entry.update({"kind": "value", "value": one.tree} | device)


def _device(tensors: Iterable[torch.Tensor]) -> str:
    return "host" if all(tensor.device.type == "cpu" for tensor in tensors) else "device"
