"""Loads values other than the model's tensors: extra values, random state, each rank's own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import random_state
from fullshard.checkpoint.format.manifest import NAME, SHARED_FILE, rank_file
from fullshard.checkpoint.loading.opening import Checkpoint
from fullshard.checkpoint.loading.planning import LoadPlan, listed
from fullshard.checkpoint.loading.reading import DAMAGED
from fullshard.checkpoint.parameters import buffers, modules_with_state, sites
from fullshard.comm.control import ControlGroup
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensor_parallel import put
from fullshard.errors import DamagedCheckpoint

FIRST_FILE = rank_file(0)


def check_fits(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A rank's own value of a tensor; raises unless it can be copied to one of this shape and dtype."""
    fits = isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape)
    if not fits or (value.dtype != dtype and not (value.is_floating_point() and dtype.is_floating_point)):
        raise DamagedCheckpoint(f"{NAME!r} has another shape or dtype for {name!r} than the model", DAMAGED)
    return value  # type: ignore[no-any-return]


class Resume:
    """Reads a checkpoint's values for this rank, and applies them once everything has been checked."""

    def __init__(self, source: Checkpoint, runtime: Runtime, control: ControlGroup) -> None:
        self.source, self.runtime, self.manifest = source, runtime, source.manifest
        self.same_ranks = len(self.manifest.ranks) == control.ranks
        self._own: Mapping[str, Any] = self.manifest.ranks[control.index] if self.same_ranks else {}
        self.own_file = rank_file(control.index)
        self._replicated: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._modules: list[tuple[nn.Module, Any]] = []
        self._random: Any = None
        self._notes: list[str] = []
        self.extra: dict[str, Any] = {}

    def plan(self, work: LoadPlan) -> None:
        """Announce which of the values' tensors will be read."""
        for file in {SHARED_FILE, self.own_file, FIRST_FILE}:
            for stored in self.source.values(file).values():
                self.source.want(stored, 0, stored.tensor.num_elements)
        if self.same_ranks:
            return
        ranks = self.manifest.ranks
        differed = f"differed between the {len(ranks)} ranks that saved"
        own = sorted({name for rank in ranks for name in rank.get("extra", {})})
        if own:
            work.notes.append(f"extra {listed(own)} {differed}: left out")
        values = sorted({n for rank in ranks for kind in ("values", "modules") for n in rank.get(kind, {})})
        if values:
            work.notes.append(f"{listed(values)} {differed}: the first rank's were loaded")

    def decode(self, tree: Any, file: str) -> Any:
        """The value of a tree whose large tensors are in `file`."""
        return self.source.value(tree, file)

    def own_state(self, name: str, interval: list[int]) -> tuple[Any, str] | None:
        """The tree of optimizer state that each rank saved for itself, for these elements, and its file.

        This rank's, if there are as many ranks now; or the first rank's, where every rank has all elements.
        """
        for own, file in ((self._own, self.own_file), (self.manifest.ranks[0], FIRST_FILE)):
            tree = own.get("optimizer", {}).get(name)
            if tree is not None and tree["interval"] == interval:
                return tree["value"], file
        return None

    def own_value(self, name: str) -> Any:
        """This rank's value of a replicated tensor, if it differed from the first rank's; otherwise None."""
        tree = self._own.get("values", {}).get(name)
        return None if tree is None else self.decode(tree, self.own_file)

    def read(self, model: nn.Module) -> None:
        """Read every value, before anything changes."""
        self.extra = {name: self.decode(tree, SHARED_FILE) for name, tree in self.manifest.extra.items()}
        own = self._own.get("extra", {})
        self.extra |= {name: self.decode(tree, self.own_file) for name, tree in own.items()}
        self._random = self.decode(self._own.get("random"), self.own_file)
        self._check_random()
        targets = dict(buffers(model))
        targets |= {site.name: site.parameter for site in sites(self.runtime, model) if site.lane is None}
        for name, target in targets.items():
            value = self.own_value(name)
            if value is not None:
                self._replicated.append((target, check_fits(name, value, target.shape, target.dtype)))
        self._read_modules(dict(modules_with_state(model)))

    def _read_modules(self, modules: dict[str, nn.Module]) -> None:
        trees = {**self.manifest.modules, **self._own.get("modules", {})}
        for name in sorted(modules.keys() & trees.keys()):
            self._modules.append((modules[name], self.decode(trees[name], SHARED_FILE)))
        missing, unused = sorted(modules.keys() - trees.keys()), sorted(trees.keys() - modules.keys())
        if missing:
            self._notes.append(f"extra state of {listed(missing)} is not in the checkpoint: left as it was")
        if unused:
            self._notes.append(f"extra state of {listed(unused)} belongs to no module here: left out")

    def _check_random(self) -> None:
        """Check now what is applied last, so that it cannot fail after the model has changed."""
        if self._random is None:
            return
        try:
            random_state.check(self._random, self.runtime.comm.device)
        except Exception as error:  # generators raise anything for what is not a state of theirs
            raise DamagedCheckpoint(
                f"{NAME!r} has a random state that cannot be restored: {str(error)[:200]}", DAMAGED
            ) from error

    def apply(self, work: LoadPlan, with_random_state: bool) -> None:
        work.notes += self._notes
        with torch.no_grad():
            for target, value in self._replicated:
                put(target, value)
        for module, state in self._modules:
            module.set_extra_state(state)
        if with_random_state and self._random is not None:
            random_state.restore(self._random, self.runtime.comm.device)
        elif with_random_state:
            work.notes.append(
                f"saved on {len(self.manifest.ranks)} ranks: random numbers were left as they are"
            )
