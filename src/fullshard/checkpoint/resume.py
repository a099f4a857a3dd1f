"""What is beside the model's tensors: extra values, random numbers, what was each rank's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullshard.agreements import Council
from fullshard.checkpoint import contents, random_state
from fullshard.checkpoint.opening import Checkpoint
from fullshard.checkpoint.reading import Stored
from fullshard.checkpoint.targets import Work, listed
from fullshard.checkpoint.trees import SHARED_FILE, rank_file
from fullshard.checkpoint.values import decode
from fullshard.errors import CheckpointError
from fullshard.runtime import Runtime

FIRST_FILE = rank_file(0)


class Resume:
    """Reads a checkpoint's values for this rank; applies them when everything was checked."""

    def __init__(self, source: Checkpoint, runtime: Runtime, talk: Council) -> None:
        self.source, self.runtime, self.manifest = source, runtime, source.manifest
        self.same_ranks = len(self.manifest.ranks) == talk.ranks
        self._own: Mapping[str, Any] = self.manifest.ranks[talk.index] if self.same_ranks else {}
        self.own_file = rank_file(talk.index)
        self._large: dict[tuple[str, str], Stored] = {}
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._modules: list[tuple[nn.Module, Any]] = []
        self._random: Any = None
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
        values = sorted({name for rank in ranks for name in rank.get("values", {})})
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

    def own_state(self, name: str) -> Any:
        """The tree of optimizer state that was this rank's own; None if there are other ranks now."""
        return self._own.get("optimizer", {}).get(name)

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
        targets = dict(contents.buffers(model))
        targets |= {s.name: s.parameter for s in contents.sites(self.runtime, model) if s.lane is None}
        for name, target in targets.items():
            value = self.own_value(name)
            if isinstance(value, torch.Tensor) and value.shape == target.shape:
                self._whole.append((target, value))
        trees = self.manifest.modules
        for name, module in contents.modules_with_state(model):
            if name in trees:
                self._modules.append((module, self.decode(trees[name], SHARED_FILE)))

    def apply(self, work: Work, resumes: bool) -> None:
        with torch.no_grad():
            for target, value in self._whole:
                target.detach().copy_(value)
        for module, state in self._modules:
            module.set_extra_state(state)
        if resumes and self._random is not None:
            random_state.put_back(self._random, self.runtime.comm.device)
        elif resumes:
            work.notes.append(
                f"saved on {len(self.manifest.ranks)} ranks: random numbers were left as they are"
            )
