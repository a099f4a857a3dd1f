"""Loads an optimizer's state by the names of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.format.values import decode, in_order
from fullshard.checkpoint.loading.other_state import OtherState, device_of, moved
from fullshard.checkpoint.loading.planning import LoadPlan, check_shape, listed, shard_reader, tensor_reader
from fullshard.checkpoint.loading.reading import DAMAGED, Stored
from fullshard.checkpoint.loading.resume import FIRST_FILE, Resume, check_fits
from fullshard.checkpoint.nested_state import Place, filled, flattened
from fullshard.checkpoint.parameters import Site, sites, sites_by_group
from fullshard.engine.step.optimizers import owned_step, streamed_step
from fullshard.engine.tensor_parallel import put
from fullshard.errors import CheckpointError, DamagedCheckpoint
from fullshard.state.tensor_subclasses import put_together

# How a step is computed, not what it computes: these options stay those of this run.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class _Loaded:
    """A parameter whose state is loaded, and where to."""

    work: LoadPlan
    group: dict[str, Any]
    site: Site
    state: dict[str, Any]
    is_entire: bool  # this optimizer steps on the entire tensor


class OptimizerLoad:
    """Plans, then applies, the state of a saved optimizer to the optimizer of this run."""

    def __init__(self, resume: Resume, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._resume, self._optimizer = resume, optimizer
        self._saved = _checked(resume, optimizer)
        self._owned = owned_step(optimizer)
        self._decodes: list[
            tuple[dict[str, Any], str, Callable[[], Any]]
        ] = []  # into which state, and as what
        self._by_group = sites_by_group(sites(resume.runtime, model), optimizer)
        self._streamed = streamed_step(optimizer)
        self._state: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._others = OtherState(resume, optimizer, self._saved)

    def plan(self, work: LoadPlan) -> None:
        saved_group = {name: i for i, g in enumerate(self._saved["groups"]) for name in g["parameters"]}
        decoded = [self._decoded(i) for i in range(len(self._saved["groups"]))]
        here: set[str] = set()
        fresh: list[str] = []
        for group, members in zip(self._optimizer.param_groups, self._by_group, strict=True):
            names = [site.name for site in members]
            here |= set(names)
            fresh += [n for n in names if n not in saved_group]
            self._plan_group(group, sorted({saved_group[n] for n in names if n in saved_group}), decoded)
            for site in members:
                self._plan_parameter(work, group, site)
        left = sorted(set(self._saved["state"]) - here)
        if fresh:  # not those that were in a group but never used: they had no state, and get none
            work.notes.append(f"{listed(fresh)} were not in the saved optimizer: their state starts anew")
        if left:
            work.notes.append(
                f"optimizer state of {listed(left)} was left out: they are not in this optimizer"
            )
        self._others.plan(work)

    def apply(self) -> None:
        """Give the optimizer its new options and state, after all reads."""
        for group, options in self._options:
            kept = {k: v for k, v in options.items() if k not in _IMPLEMENTATION}
            group.update({k: _copied_option(v, group.get(k)) for k, v in kept.items()})
        for state, key, decoded in self._decodes:
            state[key] = decoded()
        for parameter, state in self._state:
            if state:
                self._optimizer.state[parameter] = state
            else:
                self._optimizer.state.pop(parameter, None)
        self._others.apply()

    def _decoded(self, index: int) -> dict[str, Any]:
        """The options of a saved group."""
        options = self._resume.decode(self._saved["groups"][index]["options"], FIRST_FILE)
        if not isinstance(options, dict) or not all(type(k) is str and k != "params" for k in options):
            raise DamagedCheckpoint(f"the options of group {index} of the optimizer are malformed", DAMAGED)
        return options

    def _plan_group(self, group: dict[str, Any], saved: list[int], decoded: list[dict[str, Any]]) -> None:
        if not saved:
            return  # parameters that were in no saved group keep this run's options
        first = decoded[saved[0]]
        if any(decoded[i] != first for i in saved[1:]):
            raise CheckpointError(
                f"a group of the optimizer holds parameters of saved groups {saved}, whose options differ",
                "Group parameters as in the run that saved, or load without the optimizer.",
            )
        self._options.append((group, first))

    def _plan_parameter(self, work: LoadPlan, group: dict[str, Any], site: Site) -> None:
        state: dict[str, Any] = {}
        self._state.append((site.parameter, state))
        saved = self._saved["state"].get(site.name, {})
        is_entire = self._is_entire(site, {entry.get("kind") for entry in _single(saved)})
        if is_entire and not self._keeps(site):
            return  # its owner reads it
        loaded = _Loaded(work, group, site, state, is_entire)
        for key, entry in saved.items():
            self._plan_entry(loaded, key, entry)

    def _plan_entry(self, loaded: _Loaded, key: str, entry: dict[str, Any]) -> None:
        work, group, site, state = loaded.work, loaded.group, loaded.site, loaded.state
        name, kind = f"{site.name}.{key}", entry.get("kind")
        if kind == "entire":
            device = self._device(group, site, key, entry | {"kind": "scalar"})
            self._decodes.append((state, key, self._plan_entire(work, entry["value"], device, site)))
        elif kind == "nested":
            self._plan_nested(loaded, key, entry)
        elif kind == "value":
            value = self._resume.decode(entry["value"], FIRST_FILE)
            if "device" in entry:
                device = device_of(entry, site.parameter.device)
                value = moved(value, device, device)
            state[key] = value
        elif kind == "own":
            state[key] = self._own(site, name)
        elif kind == "elements" and loaded.is_entire:
            stored = self._stored(name)
            check_shape(self._resume.source, stored, site.global_shape, name)
            read = self._plan_read(work, stored, site.parameter.device)
            order = entry.get("order")
            self._decodes.append(
                (state, key, read if order is None else lambda: _ordered(name, read(), order))
            )
        elif kind in ("scalar", "elements"):
            self._plan_tensor(work, (site, key, entry), state, self._device(group, site, key, entry))
        else:
            raise DamagedCheckpoint(
                f"optimizer state {name!r} is of the unknown kind {str(kind)[:40]!r}", DAMAGED
            )

    def _plan_nested(self, loaded: _Loaded, key: str, entry: dict[str, Any]) -> None:
        """A container: its tensors are read as states of their own, and then put into their places."""
        leaves: dict[str, Any] = {}
        places: dict[str, Place] = {}
        outline = self._resume.decode(entry["value"], FIRST_FILE)
        for one in entry["tensors"]:
            places[one["key"]] = tuple(self._resume.decode(one["place"], FIRST_FILE))
            self._plan_entry(replace(loaded, state=leaves), one["key"], one["entry"])
        self._decodes.append(
            (loaded.state, key, lambda: filled(outline, {place: leaves[k] for k, place in places.items()}))
        )

    def _is_entire(self, site: Site, kinds: set[Any]) -> bool:
        """Whether this optimizer steps on the entire tensor. Then the saved one must have done so."""
        name, optimizer = site.name, type(self._optimizer).__name__
        replicated = site.lane is None or site.lane.replicated
        owned = self._owned is not None and id(site.parameter) in self._owned.by_parameter
        if "entire" in kinds and site.lane is not None and site.lane.streams_steps:
            raise CheckpointError(
                f"state of {name!r} was saved by an optimizer that steps on entire tensors "
                f"(optimizer_step='owned'), and {optimizer} steps in chunks here (offload=, state='8bit')",
                "Leave out offload= and state=, or load without the optimizer.",
            )
        if "entire" in kinds and not (owned or replicated):
            raise CheckpointError(
                f"state of {name!r} was saved by an optimizer that steps on entire tensors "
                f"(optimizer_step='owned'), and {optimizer} is element-wise here",
                "Shard with optimizer_step='owned', or load without the optimizer.",
            )
        layout = getattr(self._resume.manifest, "layout", {"strategy": "replicate"})
        if owned and kinds & {"elements", "own"} and layout.get("strategy") != "replicate":
            raise CheckpointError(
                f"state of {name!r} was saved by an element-wise optimizer, and {optimizer} steps on entire "
                "tensors here (optimizer_step='owned')",
                "Shard with optimizer_step='element-wise', or load without the optimizer.",
            )
        return owned

    def _keeps(self, site: Site) -> bool:
        return self._owned is not None and self._owned.owns(site.parameter)

    def _stored(self, name: str) -> Stored:
        stored = self._resume.source.optimizer.get(name)
        if stored is None:
            raise DamagedCheckpoint(f"optimizer state {name!r} is not in the files", DAMAGED)
        return stored

    def _plan_read(self, work: LoadPlan, stored: Stored, device: torch.device) -> Callable[[], torch.Tensor]:
        """Read an entire tensor with the others; what returns it then."""
        made: list[torch.Tensor] = []

        def get() -> torch.Tensor:
            made.append(torch.empty(stored.tensor.shape, dtype=stored.tensor.dtype, device=device))
            return made[0]

        tensor_reader(work, self._resume.source, stored.tensor.dtype, get)(stored)
        return lambda: made[0]

    def _plan_entire(self, work: LoadPlan, tree: Any, device: torch.device, site: Site) -> Callable[[], Any]:
        """Read the large tensors of a state's value with the others; what decodes it then."""
        reads = {
            path: self._plan_read(work, self._stored(path), site.parameter.device) for path in _paths(tree)
        }

        def decoded() -> Any:
            value = decode(tree, lambda path: reads[path]())
            return put_together(moved(value, device, site.parameter.device))

        return decoded

    def _plan_tensor(
        self,
        work: LoadPlan,
        what: tuple[Site, str, dict[str, Any]],
        state: dict[str, Any],
        device: torch.device,
    ) -> None:
        site, key, entry = what
        name = f"{site.name}.{key}"
        stored = self._stored(name)
        scalar, shape = entry["kind"] == "scalar", site.global_shape
        order = entry.get("order") if site.is_unsharded else None
        if scalar:
            shape = (1,) * min(len(stored.tensor.shape), 8)  # some optimizers give the number dimensions
        check_shape(self._resume.source, stored, shape, name)
        before: Any = flattened(site.name, self._optimizer.state.get(site.parameter, {})).values.get(key)
        dtype = stored.tensor.dtype if scalar else self._dtype(site, stored, before)

        def get() -> torch.Tensor:
            at_rest = torch.Size(shape) if scalar else site.parameter.shape
            usable = type(before) is torch.Tensor and before.shape == at_rest and order is None
            if usable and before.dtype == dtype and before.device == device and before.is_contiguous():
                state[key] = before
            elif scalar:
                state[key] = torch.empty(shape, dtype=dtype, device=device)
            else:
                like = site.parameter.detach()
                state[key] = torch.empty_like(like, dtype=dtype, device=device)
                if order is not None:
                    state[key] = _ordered(name, state[key], order)
            return state[key]  # type: ignore[no-any-return]

        own = self._resume.own_value(f"optimizer/{name}") if scalar or site.lane is None else None
        if own is not None:
            value = check_fits(name, own, stored.tensor.shape, dtype)
            work.reads.append(lambda: put(get(), value))
        elif scalar or order is not None:
            tensor_reader(work, self._resume.source, dtype, get)(stored)
        else:
            shard_reader(work, self._resume.source, site, dtype, get)(stored)
            # In containers, states stay where the optimizer made them.
            if (
                self._streamed is not None and key in self._saved["state"][site.name]
            ):  # one tensor at a time is there with all its bytes
                work.reads.append(partial(self._put_to_rest, site, key, state))

    def _put_to_rest(self, site: Site, key: str, state: dict[str, Any]) -> None:
        assert self._streamed is not None
        state[key] = self._streamed.put_state(site.parameter, key, state[key])

    def _dtype(self, site: Site, stored: Stored, before: Any) -> torch.dtype:
        """The dtype of a state with its parameter's shape: if it was the parameter's dtype, it still is."""
        saved, kept = self._resume.source.model.get(site.name), stored.tensor.dtype
        dtype = kept
        if isinstance(before, torch.Tensor):
            dtype = before.dtype  # this optimizer's own choice
        elif saved is not None and saved.tensor.dtype == kept:
            dtype = site.parameter.dtype
        return dtype if dtype.is_floating_point and kept.is_floating_point else kept

    def _device(self, group: dict[str, Any], site: Site, key: str, entry: dict[str, Any]) -> torch.device:
        host = entry.get("device") == "host" and entry["kind"] == "scalar"
        if key == "step" and ("capturable" in group or "fused" in group):  # torch's own rule
            host = not (group.get("capturable") or group.get("fused"))
        return torch.device("cpu") if host else site.parameter.device

    def _own(self, site: Site, name: str) -> Any:
        interval = [0, site.piece.num_elements] if self._keeps(site) else site.interval
        tree_and_file = self._resume.own_state(name, interval)
        if tree_and_file is None:
            raise CheckpointError(
                f"optimizer state {name!r} is not sharded like its parameter (it is kept in blocks, say), so "
                "it can be loaded only on the number of ranks, and with the units, that it was saved with",
                "Load with the ranks and options of the run that saved, or load without the optimizer.",
            )
        value, device = self._resume.decode(*tree_and_file), site.parameter.device
        return put_together(moved(value, device, device))


def _copied_option(value: Any, before: Any) -> Any:
    """A copy of an option for one group; a tensor is put on the device of the one that it replaces.

    One saved group may be several groups now, and schedulers change tensors in place.
    """
    if isinstance(value, torch.Tensor):
        return value.to(before.device if isinstance(before, torch.Tensor) else value.device, copy=True)
    if isinstance(value, tuple) and isinstance(before, tuple) and len(value) == len(before):
        return tuple(map(_copied_option, value, before))
    return deepcopy(value)


def _single(entries: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of a parameter's state; instead of containers, those of the tensors inside."""
    for entry in entries.values():
        if entry.get("kind") == "nested":
            yield from (one["entry"] for one in entry["tensors"])
        else:
            yield entry


def _ordered(name: str, value: torch.Tensor, order: Any) -> torch.Tensor:
    try:
        return in_order(value, order)
    except (TypeError, ValueError):
        raise DamagedCheckpoint(f"the order of dimensions of {name!r} is malformed", DAMAGED) from None


def _is_nested(entry: dict[str, Any]) -> bool:
    """Whether the entry of a container is well-formed."""
    tensors = entry.get("tensors")
    return (
        "value" in entry
        and isinstance(tensors, list)
        and all(
            isinstance(one, dict)
            and isinstance(one.get("key"), str)
            and isinstance(one.get("place"), list)
            and isinstance(one.get("entry"), dict)
            for one in tensors
        )
    )


def _paths(tree: Any) -> Iterator[str]:
    """Of the large tensors in a value's tree."""
    if isinstance(tree, list):
        for item in tree:
            yield from _paths(item)
    elif isinstance(tree, dict):
        if "at" in tree and "crc32" in tree and isinstance(tree["at"], str):
            yield tree["at"]
            return
        for item in tree.values():
            yield from _paths(item)


def _checked(resume: Resume, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    saved = resume.manifest.optimizer_state
    folder = str(resume.source.folder)
    if saved is None:
        raise CheckpointError(
            f"{folder!r} was saved without an optimizer",
            "Load it without one, or save it with fs.save(path, model, optimizer).",
        )
    try:
        groups, state, kind = saved["groups"], saved["state"], saved["class"]
        good = all(isinstance(g["parameters"], list) and "options" in g for g in groups)
        good &= all(isinstance(s, dict) for by in state.values() for s in (by, *by.values()))
        entries = [entry for by in state.values() for entry in by.values()]
        good &= all(_is_nested(entry) for entry in entries if entry.get("kind") == "nested")
        good &= all(isinstance(n, str) for g in groups for n in g["parameters"])
    except (KeyError, TypeError, AttributeError):
        good, kind = False, None
    if not good:
        raise DamagedCheckpoint(f"the optimizer's state in {folder!r} is malformed", DAMAGED)
    if kind != type(optimizer).__name__:
        raise CheckpointError(
            f"{folder!r} holds the state of {str(kind)[:100]}, and the optimizer here is "
            f"{type(optimizer).__name__}",
            "Use the same optimizer, or load without one.",
        )
    return saved  # type: ignore[no-any-return]
