"""What is beside the model's tensors: extra values, random numbers, what was each rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import contents, random_state
from fullshard.checkpoint.format.manifest import NAME
from fullshard.checkpoint.format.values import decode
from fullshard.checkpoint.opening import Checkpoint
from fullshard.checkpoint.reading import Stored
from fullshard.checkpoint.targets import Work, copy, listed
from fullshard.checkpoint.trees import SHARED_FILE, rank_file
from fullshard.comm.control import ControlGroup
from fullshard.engine.runtime import Runtime
from fullshard.errors import CheckpointError

FIRST_FILE = rank_file(0)
_DAMAGED = "The checkpoint is damaged; use another one."


def fitting(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A rank's own value of a tensor, which has the shape that the first rank's has, and can be copied."""
    good = isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape)
    if not good or (value.dtype != dtype and not (value.is_floating_point() and dtype.is_floating_point)):
        raise CheckpointError(f"{NAME!r} has another shape or dtype for {name!r} than the model", _DAMAGED)
    return value  # type: ignore[no-any-return]


class Resume:
    """Reads a checkpoint's values for this rank; applies them when everything was checked."""

    def __init__(self, source: Checkpoint, runtime: Runtime, control: ControlGroup) -> None:
        self.source, self.runtime, self.manifest = source, runtime, source.manifest
        self.same_ranks = len(self.manifest.ranks) == control.ranks
        self._own: Mapping[str, Any] = self.manifest.ranks[control.index] if self.same_ranks else {}
        self.own_file = rank_file(control.index)
        self._large: dict[tuple[str, str], Stored] = {}
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._modules: list[tuple[nn.Module, Any]] = []
        self._random: Any = None
        self._notes: list[str] = []
        self.extra: dict[str, Any] = {}

    def plan(self, work: Work) -> None:
        """Say which of the values' tensors will be read."""
        for file in {SHARED_FILE, self.own_file, FIRST_FILE}:
            for name, stored in self.source.values(file).items():
                self._large[file, name] = stored
                self.source.want(stored, 0, stored.tensor.num_elements)
        if self.same_ranks:
            return
        ranks = self.manifest.ranks
        own = sorted({name for rank in ranks for name in rank.get("extra", {})})
        if own:
            work.notes.append(
                f"extra {listed(own)} differed between the {len(ranks)} ranks that saved: left out"
            )
        values = sorted({n for rank in ranks for kind in ("values", "modules") for n in rank.get(kind, {})})
        if values:
            work.notes.append(
                f"{listed(values)} differed between the {len(ranks)} ranks that saved: the first one's taken"
            )

    def decode(self, tree: Any, file: str) -> Any:
        """A value; its large tensors are in `file`."""

        def stored(name: str) -> torch.Tensor:
            if (file, name) not in self._large:
                raise CheckpointError(f"{file!r} does not hold {name!r}", "The checkpoint is damaged.")
            return self.source.read_whole(self._large[file, name])

        return decode(tree, stored)

    def own_state(self, name: str, interval: list[int]) -> tuple[Any, str] | None:
        """The tree of optimizer state that was a rank's own, for these elements, and the file it is in.

        This rank's, if there are as many ranks now, or the first one's: where all elements are on every rank.
        """
        for own, file in ((self._own, self.own_file), (self.manifest.ranks[0], FIRST_FILE)):
            tree = own.get("optimizer", {}).get(name)
            if tree is not None and tree["interval"] == interval:
                return tree["value"], file
        return None

    def own_value(self, name: str) -> Any:
        """A whole value that on this rank was not the first rank's."""
        tree = self._own.get("values", {}).get(name)
        return None if tree is None else self.decode(tree, self.own_file)

    def read(self, model: nn.Module) -> None:
        """Every value, while nothing has changed yet."""
        self.extra = {name: self.decode(tree, SHARED_FILE) for name, tree in self.manifest.extra.items()}
        own = self._own.get("extra", {})
        self.extra |= {name: self.decode(tree, self.own_file) for name, tree in own.items()}
        self._random = self.decode(self._own.get("random"), self.own_file)
        self._check_random()
        targets = dict(contents.buffers(model))
        targets |= {s.name: s.parameter for s in contents.sites(self.runtime, model) if s.lane is None}
        for name, target in targets.items():
            value = self.own_value(name)
            if value is not None:
                self._whole.append((target, fitting(name, value, target.shape, target.dtype)))
        self._read_modules(dict(contents.modules_with_state(model)))

    def _read_modules(self, modules: dict[str, nn.Module]) -> None:
        trees = {**self.manifest.modules, **self._own.get("modules", {})}
        for name in sorted(modules.keys() & trees.keys()):
            self._modules.append((modules[name], self.decode(trees[name], SHARED_FILE)))
        missing, unused = sorted(modules.keys() - trees.keys()), sorted(trees.keys() - modules.keys())
        if missing:
            self._notes.append(f"extra state of {listed(missing)} is not in the checkpoint: left as it was")
        if unused:
            self._notes.append(f"extra state of {listed(unused)} is of no module here: left out")

    def _check_random(self) -> None:
        """Before anything has changed: what is put back last must not be what fails."""
        if self._random is None:
            return
        try:
            random_state.check(self._random, self.runtime.comm.device)
        except Exception as error:  # whatever generators say to what is no state of theirs
            raise CheckpointError(
                f"{NAME!r} has random numbers that cannot be put back: {str(error)[:200]}", _DAMAGED
            ) from error

    def apply(self, work: Work, resumes: bool) -> None:
        work.notes += self._notes
        with torch.no_grad():
            for target, value in self._whole:
                copy(target, value)
        for module, state in self._modules:
            module.set_extra_state(state)
        if resumes and self._random is not None:
            random_state.put_back(self._random, self.runtime.comm.device)
        elif resumes:
            work.notes.append(
                f"saved on {len(self.manifest.ranks)} ranks: random numbers were left as they are"
            )
