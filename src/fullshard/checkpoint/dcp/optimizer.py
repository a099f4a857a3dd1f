"""An optimizer's state in a torch.distributed.checkpoint folder, in the form that our own manifest has.

    optim.state.layers.0.weight.exp_avg     and     optim.param_groups.0.lr, optim.param_groups.0.params
    the same, with                                  optim.param_groups.layers.0.weight.lr       (flattened)
    optim.state.3.exp_avg                   and     numbers in .params      (a plain optimizer.state_dict())

and, from torch before 2.4, all of `optim.param_groups` as one value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from fullshard.checkpoint.dcp.archives import ItemFiles, NotPlain, read_value
from fullshard.checkpoint.dcp.format import Index
from fullshard.checkpoint.loading.planning import listed
from fullshard.checkpoint.loading.reading import Source
from fullshard.checkpoint.loading.resume import Resume
from fullshard.checkpoint.parameters import canonical, sites, tied_names
from fullshard.engine.runtime import Runtime
from fullshard.errors import CheckpointError

_NAMES = ("params", "param_names")
_SCHEDULERS = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "swa_lr",
    "max_momentum",
    "base_momentum",
}  # of schedulers
_HOW = {"foreach", "fused", "capturable", "differentiable"}  # how a step is computed, not what it computes
_WITHOUT = "Load it without the optimizer."


@dataclass(frozen=True)
class _Group:
    parameters: list[Any]  # names, or numbers
    options: dict[str, Any]


@dataclass(frozen=True)
class _DecodedResume:
    """The part of a Resume that OptimizerLoad uses: all values are decoded, and none is a rank's own."""

    source: Source
    runtime: Runtime
    manifest: Any
    own_file: str = ""

    def decode(self, tree: Any, file: str) -> Any:
        return tree

    def own_state(self, name: str, interval: list[int]) -> None:
        return None

    def own_value(self, name: str) -> None:
        return None


class SavedOptimizer:
    """The entries of one optimizer, which share a prefix."""

    def __init__(self, source: Source, index: Index, files: ItemFiles, prefix: str) -> None:
        self.prefix = prefix
        self._source, self._index, self._files = source, index, files

    def fits(self, names: set[str]) -> int:
        """How many of these names it has state or options for."""
        return sum(_plain_name(n, names) in names for group in self._groups for n in group.parameters)

    def resume(self, runtime: Runtime, optimizer: torch.optim.Optimizer, model: nn.Module) -> Resume:
        """For OptimizerLoad. Adds the optimizer's tensors to the source under our own names."""
        self._check_options(optimizer)
        named = self._named(runtime, optimizer, model)
        shapes = {site.name: site.global_shape for site in sites(runtime, model)}
        state = self._state(named, shapes)
        groups = [
            {"parameters": [named(n) for n in group.parameters], "options": group.options}
            for group in self._groups
        ]
        saved = {"class": type(optimizer).__name__, "groups": groups, "state": state}
        return cast(Resume, _DecodedResume(self._source, runtime, SimpleNamespace(optimizer_state=saved)))

    # ---- groups

    @cached_property
    def _groups(self) -> list[_Group]:
        start = f"{self.prefix}param_groups"
        if start in self._index.values:
            return _from_list(start, self._value(start))
        options = {n.removeprefix(start + "."): self._value(n) for n in self._below(start + ".")}
        nested = "0.params" in options
        groups: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            # A parameter's name may have dots; a group's number and an option's name have none.
            group, _, option = name.partition(".") if nested else name.rpartition(".")
            if "." in option or (nested and not group.isdigit()):
                raise CheckpointError(
                    f"{f'{start}.{name}'!r} is nested deeper than an option of an optimizer", _WITHOUT
                )
            groups.setdefault(group, {})[option] = value
        if nested:
            return _from_list(start, [groups[number] for number in sorted(groups, key=int)])
        return _from_list(start, [options | {"params": [name]} for name, options in groups.items()])

    def _check_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the options are those of another optimizer; the folder does not name its class."""
        saved = {option for group in self._groups for option in group.options}
        here = {option for group in optimizer.param_groups for option in group}
        lacking = sorted(set(optimizer.defaults) - saved - _HOW)
        unknown = sorted(saved - here - _HOW - _SCHEDULERS)
        if lacking and unknown:
            raise CheckpointError(
                f"{str(self._source.folder)!r} holds the state of another optimizer than "
                f"{type(optimizer).__name__}: it has options {listed(unknown)}, and not {listed(lacking)}",
                "Use the same optimizer, or load without one.",
            )

    # ---- names

    def _named(
        self, runtime: Runtime, optimizer: torch.optim.Optimizer, model: nn.Module
    ) -> Callable[[Any], str]:
        """A function from a parameter's name in the folder to its name in the model."""
        tied = tied_names(model)
        numbers = [[n for n in group.parameters if isinstance(n, int)] for group in self._groups]
        if not any(numbers):
            names = {site.name for site in sites(runtime, model)} | set(tied)
            return lambda name: tied.get(_plain_name(name, names), _plain_name(name, names))
        # torch numbers the parameters of an optimizer group by group.
        known = {id(site.parameter): site.name for site in sites(runtime, model)}
        here = [[known.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        theirs, ours = list(map(len, numbers)), list(map(len, here))
        if theirs != ours:
            raise CheckpointError(
                f"{str(self._source.folder)!r} numbers the parameters of its optimizer, in groups of "
                f"{theirs}; this optimizer has groups of {ours}",
                "Group parameters as in the run that saved, or load without the optimizer.",
            )
        by_number = {
            str(number): name
            for group, members in zip(numbers, here, strict=True)
            for number, name in zip(group, members, strict=True)
        }
        return lambda number: by_number.get(str(number), str(number))

    # ---- state

    def _state(
        self, named: Callable[[Any], str], shapes: dict[str, tuple[int, ...]]
    ) -> dict[str, dict[str, Any]]:
        start = f"{self.prefix}state."
        entries: list[tuple[str, str, str]] = []  # name in the folder, parameter, key
        for where in self._below(start):
            name, _, key = where.removeprefix(start).rpartition(".")
            self._check_nesting(where, name, named, shapes)
            entries.append((where, named(name), key))
        tensors = self._index.tensors
        scalars = {"step"} | {
            key
            for where, name, key in entries
            if where in tensors and not tensors[where].tensor.shape and shapes.get(name)
        }
        state: dict[str, dict[str, Any]] = {}
        for where, name, key in entries:
            if where not in tensors:
                entry = (
                    {"kind": "value", "value": self._value(where)} if name in shapes else {"kind": "value"}
                )
            else:
                scalar = key in scalars and not tensors[where].tensor.shape
                entry = {"kind": "scalar" if scalar else "elements", "device": "device"}
                self._source.optimizer[f"{name}.{key}"] = tensors[where]
            state.setdefault(name, {})[key] = entry
        return state

    def _check_nesting(
        self, where: str, name: str, named: Callable[[Any], str], shapes: dict[str, tuple[int, ...]]
    ) -> None:
        parts = name.split(".")
        if named(name) not in shapes and any(
            named(".".join(parts[:at])) in shapes for at in range(1, len(parts))
        ):
            raise CheckpointError(
                f"optimizer state {where!r} is nested in a dict, which fs.load does not support",
                _WITHOUT,
            )

    # ---- entries

    def _below(self, start: str) -> list[str]:
        return [n for n in (*self._index.values, *self._index.tensors) if n.startswith(start)]

    def _value(self, name: str) -> Any:
        stored = self._index.tensors.get(name)
        if stored is not None:  # a learning rate may be a tensor
            self._files.values.charge(stored.tensor.size_bytes)
            self._source.want(stored, 0, stored.tensor.num_elements)
            return self._source.read_tensor(stored)
        try:
            return read_value(self._files, name, self._index.values[name])
        except NotPlain as error:
            raise CheckpointError(
                f"{name!r} in {str(self._source.folder)!r} cannot be read without running code: {error}",
                _WITHOUT,
            ) from None


def _plain_name(name: Any, names: set[str]) -> str:
    plain = canonical(str(name))
    return plain if plain in names else plain.removeprefix("module.")  # the prefix of DistributedDataParallel


def _from_list(where: str, groups: Any) -> list[_Group]:
    result = []
    for group in groups if isinstance(groups, list) else [None]:
        options: Mapping[str, Any] = group if isinstance(group, Mapping) else {}
        params = options.get("params")
        if not isinstance(params, list) or not all(type(n) in (str, int) for n in params):
            raise CheckpointError(f"{where!r} does not name its parameters", _WITHOUT)
        result.append(_Group(params, {k: v for k, v in options.items() if k not in _NAMES}))
    return result
