"""State dicts of an optimizer by parameter names: unsharded values, or shards that know their global shape.

`optimizer.state_dict()` of a sharded model is one rank's part under numbers. `unsharded` gathers the parts,
lane by lane; `to_load` cuts them again, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.parameters import Site, canonical, plain
from fullshard.comm.groups import Comm
from fullshard.engine.lane import Lane
from fullshard.engine.pieces import in_memory_order, piece_view
from fullshard.engine.runtime import Runtime
from fullshard.errors import NotSupported, OptionError, RankMismatch, StateError
from fullshard.state.state_dict import StateShard, shard_of
from fullshard.torch_fsdp.state_dicts import gather_lane, is_first

State = dict[str, dict[str, Any]]  # by parameter's name, then by the optimizer's own key
Group = list[nn.Parameter]


@dataclass(frozen=True)
class Parts:
    """The sharded parts of a model: one engine, or several with no wrapper around them.

    Parameters are looked up by identity: an engine knows them by their names inside its own part.
    """

    runtimes: Sequence[Runtime]
    names: dict[int, str]  # of the model's parameters, by id
    entire: Collection[int] = ()  # ids of those on which the optimizer steps as entire tensors

    @property
    def comm(self) -> Comm:
        return self.runtimes[0].comm

    @property
    def is_first(self) -> bool:
        return is_first(self.runtimes[0])

    @cached_property
    def lanes(self) -> list[Lane]:
        return list(dict.fromkeys(lane for runtime in self.runtimes for _, lane, _ in runtime.places()))

    @cached_property
    def cut(self) -> dict[str, Site]:
        """Parameters of which this rank holds some elements, and of their state, by name."""
        return {
            self.names[id(p)]: Site(self.names[id(p)], p, lane, index)
            for runtime in self.runtimes
            for p, lane, index in runtime.places()
            if not lane.replicated and id(p) in self.names and id(p) not in self.entire
        }


@dataclass(frozen=True)
class Numbered:
    """The parameters of an optimizer in its own order: groups, and each one's name."""

    groups: list[Group]
    names: dict[int, str]  # by id

    @property
    def in_order(self) -> list[nn.Parameter]:
        return [p for group in self.groups for p in group]

    def name(self, parameter: torch.Tensor) -> str:
        name = self.names.get(id(parameter))
        if name is None:
            raise StateError(
                f"the optimizer holds a tensor of shape {tuple(parameter.shape)} that the model does not own",
                "Build it from model.parameters().",
            )
        return name


def names_in(model: nn.Module) -> dict[int, str]:
    return {id(p): canonical(n) for n, p in nn.Module.named_parameters(model)}


def numbered(model: nn.Module, optimizer: torch.optim.Optimizer | None, given: Any = None) -> Numbered:
    """`given` is what the optimizer was built from, in torch's older calls."""
    names = names_in(model)
    if given is not None:
        listed = list(given)
        groups = [list(g["params"]) if isinstance(g, dict) else [g] for g in listed]
        if listed and not isinstance(listed[0], dict):
            groups = [[p for group in groups for p in group]]
    elif optimizer is not None:
        groups = [list(group["params"]) for group in optimizer.param_groups]
    else:
        groups = [list(model.parameters())]
    return Numbered(groups, names)


# ---- taking


def by_name(state_dict: dict[str, Any], order: Numbered) -> tuple[State, dict[str, Any]]:
    """An optimizer's own state dict with names for numbers; values are still this rank's.

    The groups come as a dict with one entry, or empty: torch takes a state dict without them.
    """
    in_order = order.in_order
    given = state_dict.get("param_groups")
    numbers = range(len(in_order)) if given is None else [key for g in given for key in g["params"]]
    if len(numbers) != len(in_order):
        raise StateError(
            f"the state dict has {len(numbers)} parameters and the optimizer {len(in_order)}",
            "Give the state dict of this optimizer.",
        )
    # An optimizer with names for keys sorts them: their order means nothing.
    name = {
        key: canonical(key) if isinstance(key, str) else order.name(p)
        for key, p in zip(numbers, in_order, strict=True)
    }
    state = {name.get(key, key): _own(held) for key, held in state_dict["state"].items()}
    groups = []
    for group in given or ():
        options = {k: deepcopy(v) for k, v in group.items() if k not in ("params", "param_names")}
        groups.append(options | {"params": [name[key] for key in group["params"]]})
    return state, {} if given is None else {"param_groups": groups}


def _own(held: dict[str, Any]) -> dict[str, Any]:
    """Values as the optimizer keeps them; its state dict may show them as StateShards. Those that one rank
    has all elements of stay so: the others know of them by that."""
    shards = {key: value for key, value in held.items() if isinstance(value, StateShard)}
    return held | {key: value.local for key, value in shards.items() if not value.entire}


def unsharded(parts: Parts, state: State, keep: bool, to_host: bool) -> State:
    """Unsharded values on every rank with `keep`; all ranks take part."""
    together: dict[tuple[int, str, torch.dtype], list[Site]] = {}
    result: State = {name: {} for name in state}
    for name, held in state.items():
        for key, value in held.items():
            site = parts.cut.get(name)
            if site is not None and _in_elements(site, key, value):
                position = parts.lanes.index(site.lane)  # type: ignore[arg-type]
                together.setdefault((position, key, plain(value).dtype), []).append(site)
                result[name][key] = None  # its place in the order of keys
            else:
                result[name][key] = _taken(_from_owner(value), to_host)
    _agree(parts, together)
    for (position, key, dtype), members in sorted(together.items(), key=lambda item: str(item[0])):
        lane = parts.lanes[position]
        pieces = {site.index: plain(state[site.name][key]) for site in members}
        values = gather_lane(lane, pieces, dtype)
        for site in members if keep else ():
            value = piece_view(values, lane.layout.pieces[site.index])
            result[site.name][key] = value.cpu() if to_host and not value.is_cpu else value.clone()
    return result if keep else {}


def shards(parts: Parts, state: State, to_host: bool) -> State:
    """Values that know their global shape; torch.distributed.checkpoint saves and loads them."""
    result: State = {name: {} for name in state}
    for name, held in state.items():
        for key, value in held.items():
            site = parts.cut.get(name)
            if site is not None and _in_elements(site, key, value):
                local = plain(value).cpu() if to_host else plain(value)
                assert site.lane is not None
                result[name][key] = shard_of(site.lane, site.index, local, f"{name}.{key}")
            else:
                result[name][key] = _taken(value, to_host)
    return result


def _from_owner(value: Any) -> Any:
    """Entire tensors on all ranks, which take part in the same order: an owner's state dict lists it."""
    if isinstance(value, StateShard):
        return value.full_tensor()
    if isinstance(value, list | tuple):
        return type(value)(map(_from_owner, value))
    return {key: _from_owner(held) for key, held in value.items()} if isinstance(value, dict) else value


def _taken(value: Any, to_host: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    value = value if isinstance(value, StateShard) else plain(value)
    return value.cpu() if to_host and not value.is_cpu else value.clone()


def _in_elements(site: Site, key: str, value: Any) -> bool:
    """The state has one value for each element of its parameter; otherwise it is one number, or refused."""
    if not isinstance(value, torch.Tensor) or key == "step":
        return False
    if value.shape == site.parameter.shape and (value.dim() or not site.parameter.dim()):
        return True
    if value.numel() == 1 and value.dim() == 0:
        return False
    raise NotSupported(
        f"optimizer state {key!r} of {site.name!r} has shape {tuple(value.shape)}, not its parameter's: "
        "it is kept in blocks, say, and cannot be gathered",
        "Use fs.save(path, model, optimizer) and fs.load, on the same number of ranks.",
    )


def _agree(parts: Parts, together: dict[tuple[int, str, torch.dtype], list[Site]]) -> None:
    """Ranks whose optimizers hold different state would wait for each other forever."""
    mine = sorted(f"{key} of {site.name!r}" for (_, key, _), members in together.items() for site in members)
    if not parts.runtimes:
        return
    by_rank, ranks = parts.comm.all_gather_object(mine), parts.comm.members
    for rank, theirs in zip(ranks, by_rank, strict=True):
        strange = sorted(set(theirs) ^ set(by_rank[0]))
        if strange:
            raise RankMismatch(
                f"the optimizers of rank {rank} and rank {ranks[0]} differ: only one has {strange[0]}",
                "Step the optimizer on all ranks.",
            )


# ---- loading


def to_load(parts: Parts, saved: dict[str, Any] | None, order: Numbered, first_only: bool) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes on this rank, still by name; without groups if it has none."""
    names = {order.name(p) for p in order.in_order}
    if first_only and parts.runtimes:
        state, groups = _from_first(parts, saved, names)
    else:
        if not isinstance(saved, dict) or "state" not in saved:
            raise OptionError("the optimizer state dict has no 'state'", "Load a complete one.")
        groups = saved.get("param_groups")
        numbers = _numbers(
            ((n, k, _described(v)[0]) for n, h in saved["state"].items() for k, v in h.items()), parts.cut
        )
        state = {
            name: {
                key: _cut(parts.cut.get(name), (name, key), value, key in numbers)
                for key, value in held.items()
            }
            for name, held in saved["state"].items()
            if _is_loaded(name, names, order)
        }
    if groups is None:
        return {"state": state}
    return {"state": state, "param_groups": [_group(group, groups, order) for group in order.groups]}


def _is_loaded(name: Any, names: set[str], order: Numbered) -> bool:
    if name not in names and name not in order.names.values():
        raise StateError(
            f"the optimizer state dict names {name!r}, which the model has not",
            "Load the state of this model, by the names of its parameters.",
        )
    return name in names


def _group(group: Group, saved: Sequence[dict[str, Any]], order: Numbered) -> dict[str, Any]:
    """A group of this optimizer with the options of the saved one that its parameters were in."""
    names = [order.name(p) for p in group]
    holding = [g for g in saved if not names or set(names) & set(g["params"])]
    if not holding:
        raise StateError(
            f"no group of the saved optimizer holds {names[0]!r}", "Build the optimizer as it was when saved."
        )
    options = [{k: v for k, v in g.items() if k != "params"} for g in holding]
    if any(o != options[0] for o in options[1:]):
        raise StateError(
            f"the group of {names[0]!r} holds parameters of saved groups with different options",
            "Group the parameters as they were when saved.",
        )
    return deepcopy(options[0]) | {"params": names}


def _numbers(rows: Iterable[tuple[str, str, Any]], cut: dict[str, Site]) -> set[str]:
    """Keys under which an optimizer keeps one number, whatever the parameter's shape.

    By key, not by parameter: the state of a parameter without dimensions looks like a number, too.
    """
    keys = {"step"}
    for name, key, described in rows:
        if described is not None and not described[0] and name in cut and cut[name].piece.shape:
            keys.add(key)
    return keys


def _cut(site: Site | None, named: tuple[str, str], value: Any, is_number: bool) -> Any:
    """This rank's part of a value, in the shape of the parameter here."""
    name, key = named
    if not isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
        return deepcopy(value)
    if isinstance(value, StateShard):
        if site is None and value.entire:
            return value.clone()
        if site is not None and site.lane is not None:
            start, stop = site.lane.layout.kept(site.piece, site.lane.comm.rank)
            if (value.start, value.stop) == (start, stop):
                return value.local.clone()
        raise StateError(
            f"optimizer state {key!r} of {name!r} is a shard of another layout", "Load unsharded values."
        )
    if type(value) not in (torch.Tensor, nn.Parameter):
        raise NotSupported(
            f"optimizer state {key!r} of {name!r} is a {type(value).__name__}",
            "Load unsharded tensors, or shards of optim_state_dict, filled by torch.distributed.checkpoint.",
        )
    if site is None or is_number:
        return value.clone()
    assert site.lane is not None
    piece, lane = site.piece, site.lane
    if tuple(value.shape) != piece.shape:
        raise StateError(
            f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)}, not {piece.shape}",
            "Load the state of this model.",
        )
    start, stop = lane.layout.kept(piece, lane.comm.rank)
    return in_memory_order(value, piece)[start:stop].clone().view(lane.shard_views[site.index].shape)


def _from_first(
    parts: Parts, saved: dict[str, Any] | None, loaded: set[str]
) -> tuple[State, list[dict[str, Any]] | None]:
    """The first rank has it all; the others get their parts, one tensor in flight at a time."""
    contents: Any = None
    if parts.is_first:
        assert saved is not None
        rows = [
            (name, key, *_described(v)) for name, held in saved["state"].items() for key, v in held.items()
        ]
        contents = rows, list(saved["state"]), saved.get("param_groups")
    rows, names, groups = parts.comm.all_gather_object(contents)[0]
    state: State = {name: {} for name in names if name in loaded}
    numbers = _numbers((row[:3] for row in rows), parts.cut)
    for name, key, described, value in rows:
        if described is not None:
            shape, dtype = described
            if saved is not None and parts.is_first:
                value = saved["state"][name][key].detach().cpu().contiguous()
            else:
                value = torch.empty(shape, dtype=dtype)
            if value.numel():
                parts.comm.broadcast(value)
        if name in loaded:
            state[name][key] = _cut(parts.cut.get(name), (name, key), value, key in numbers)
    return state, groups


def _described(value: Any) -> tuple[Any, Any]:
    """A tensor by shape and dtype, anything else by itself."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype), None
    return None, value


def numbers_for_names(loaded: dict[str, Any], order: Numbered) -> dict[str, Any]:
    """The same with the numbers that an optimizer's own state dict has."""
    number = {order.name(p): i for i, p in enumerate(order.in_order)}
    result: dict[str, Any] = {"state": {number[n]: held for n, held in loaded["state"].items()}}
    if "param_groups" in loaded:
        groups = loaded["param_groups"]
        result["param_groups"] = [g | {"params": [number[n] for n in g["params"]]} for g in groups]
    return result


def rekey(saved: dict[str, Any], to_names: bool, order: Numbered) -> dict[str, Any]:
    """Names for numbers or numbers for names; nothing else changes."""
    names = [order.name(p) for p in order.in_order]
    have_names = {isinstance(key, str) for key in saved["state"]}
    if len(have_names) > 1:
        raise OptionError(f"names and numbers are mixed: {list(saved['state'])}", "Use one of them.")
    if have_names == {to_names}:
        return saved
    change: dict[Any, Any] = dict(enumerate(names)) if to_names else {n: i for i, n in enumerate(names)}
    groups: Iterable[dict[str, Any]] = deepcopy(saved["param_groups"])
    return {
        "state": {change[key]: value for key, value in saved["state"].items()},
        "param_groups": [g | {"params": sorted(change[key] for key in g["params"])} for g in groups],
    }
