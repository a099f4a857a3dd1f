"""A folder of torch.distributed.checkpoint as a source of `fs.load`: its names, and its rectangles.

Users nest what they save: {"model": ..., "optim": ...}, {"app": {...}}, or the model's state dict alone. So
the model is found by its own names, whatever their prefix, and the optimizer by its `param_groups`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.dcp.archives import ItemFiles, NotPlain, read_value
from fullshard.checkpoint.dcp.format import Chunk, Tiled, read_index
from fullshard.checkpoint.dcp.optimizer import SavedOptimizer
from fullshard.checkpoint.loading.optimizer_state import OptimizerLoad
from fullshard.checkpoint.loading.planning import LoadPlan, listed
from fullshard.checkpoint.loading.reading import DAMAGED, Foreign, Stored
from fullshard.checkpoint.parameters import canonical, modules_with_state, sites, tied_names
from fullshard.errors import CheckpointError, DamagedCheckpoint
from fullshard.plan.layout import Box, Piece, boxes

_RETURNED_BYTES = 2**20  # fs.load returns a tensor of the user's own up to this size
_EXTRA_STATE = "_extra_state"  # torch's name for what a module's get_extra_state() returns
_ROOT = ""
Route = tuple[str | int, ...]
_GROUPS = re.compile(r"((?:[^.]+\.)*?)param_groups(?:\.|$)")


class Tiles(Foreign):
    """Tensors that were saved as rectangles of any layout, read by ranges of elements."""

    def __init__(self, folder: Path) -> None:
        self._files = ItemFiles(folder)
        super().__init__(folder, self._files)
        self._index = read_index(folder)
        named = (_GROUPS.match(name) for name in (*self._index.values, *self._index.tensors))
        self._optimizers = sorted({match[1] for match in named if match is not None})
        self._prefix = ""
        for name, tiled in self._index.tensors.items():  # `fit` and `optimizer_load` rename them
            (self.optimizer if self._is_optimizers(name) else self.model)[name] = tiled

    # ---- elements

    def want(self, stored: Stored, start: int, stop: int) -> None:
        assert isinstance(stored, Tiled)
        for chunk, _, _, _ in self._regions(stored, start, stop):
            self._files.want_chunk(chunk, stored.tensor.dtype)

    def read(self, stored: Stored, start: int, stop: int, out: torch.Tensor) -> None:
        assert isinstance(stored, Tiled)
        for chunk, region, box, at in self._regions(stored, start, stop):
            into = out[at : at + box.num_elements].view(box.sizes)
            for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
                into = into.narrow(dim, offset - box.offsets[dim], size)
            where = self._files.locate(chunk, stored.tensor.dtype)
            low = [r - c for r, c in zip(region.offsets, chunk.box.offsets, strict=True)]
            self._files.read_region(where, low, region.sizes, into)

    def _regions(self, stored: Tiled, start: int, stop: int) -> Iterator[tuple[Chunk, Box, Box, int]]:
        """For elements [start, stop): the chunk, its needed region, the rectangle that contains the region,
        and the index of the rectangle's first element, counted from `start`.
        """
        tensor, at = stored.tensor, 0
        unsharded = Piece(tensor.name, tensor.shape, tuple(range(len(tensor.shape))), 0)
        for box in boxes(unsharded, start, stop):
            covered = 0
            for chunk in stored.chunks:
                region = _common(box, chunk.box)
                if region is not None:
                    covered += region.num_elements
                    yield chunk, region, box, at
            if covered != box.num_elements:
                raise DamagedCheckpoint(
                    f"{str(self.folder)!r} holds {covered} of {box.num_elements} elements of {tensor.name!r} "
                    f"at {box.offsets}: some are missing or duplicated",
                    DAMAGED,
                )
            at += box.num_elements

    # ---- names

    def fingerprint(self) -> str:
        return self._index.digest

    def fit(self, model: nn.Module, names: set[str]) -> None:
        self._prefix = _prefix(str(self.folder), self.model, names)
        self.optimizer = {}
        self.model = {
            self._own_name(n): tiled
            for n, tiled in self.model.items()
            if n.startswith(self._prefix) and _EXTRA_STATE not in n.split(".")
        }

    def optimizer_load(self, runtime: Any, optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        if not self._optimizers:
            return super().optimizer_load(runtime, optimizer, model)
        candidates = [SavedOptimizer(self, self._index, self._files, prefix) for prefix in self._optimizers]
        names = {site.name for site in sites(runtime, model)} | set(tied_names(model))
        best = max(saved.fits(names) for saved in candidates)
        fitting = [saved for saved in candidates if saved.fits(names) == best]
        if len(fitting) > 1:
            raise CheckpointError(
                f"{str(self.folder)!r} holds several optimizers that match: "
                f"{listed([saved.prefix for saved in fitting])}",
                "Load it without the optimizer, or load it with torch.distributed.checkpoint.",
            )
        return OptimizerLoad(fitting[0].resume(runtime, optimizer, model), optimizer, model)

    def others(self, work: LoadPlan, model: nn.Module) -> dict[str, Any]:
        modules = {f"{n}.{_EXTRA_STATE}".lstrip("."): m for n, m in modules_with_state(model)}
        states: dict[str, dict[Route, Any]] = defaultdict(dict)
        extra: dict[Route, Any] = {}
        left: list[str] = []
        for name in (*self._index.values, *self._index.tensors):
            if self._is_optimizers(name) or self._is_models(name):
                continue
            path = self._index.paths.get(name, (name,))
            owner, below = self._module_of(name, path)
            try:
                value = self._value(name, owner in modules)
            except NotPlain:
                left.append(name)
                continue
            if owner in modules:
                states[owner][below] = value
            else:
                extra[path] = value
        if left:
            work.notes.append(f"large tensors or pickled objects that were not read: {listed(left)}")
        for owner, values in states.items():
            work.reads.append(partial(modules[owner].set_extra_state, _nested(values)))
        return dict(_nested(extra)) if extra else {}

    def _module_of(self, name: str, path: Route) -> tuple[str, Route]:
        """For an entry of a module's extra state: its name, and the path inside the state."""
        head, marker, tail = self._own_name(name).partition(_EXTRA_STATE)
        if not marker or not name.startswith(self._prefix) or tail[:1] not in ("", "."):
            return "", path
        at = next((i for i, part in enumerate(path) if str(part).endswith(_EXTRA_STATE)), len(path) - 1)
        return head + marker, path[at + 1 :]

    def _value(self, name: str, any_size: bool) -> Any:
        stored = self._index.tensors.get(name)
        if stored is None:
            return read_value(self._files, name, self._index.values[name])
        if stored.tensor.size_bytes > _RETURNED_BYTES and not any_size:
            raise NotPlain(name)
        self._files.values.charge(stored.tensor.size_bytes)
        self.want(stored, 0, stored.tensor.num_elements)
        return self.read_tensor(stored)

    def _is_models(self, name: str) -> bool:
        return name.startswith(self._prefix) and self._own_name(name) in self.model

    def _own_name(self, name: str) -> str:
        return canonical(name.removeprefix(self._prefix))

    def _is_optimizers(self, name: str) -> bool:
        kinds = ("state.", "param_groups")
        return any(name.startswith(prefix + kind) for prefix in self._optimizers for kind in kinds)


def _common(one: Box, other: Box) -> Box | None:
    """The intersection of two rectangles."""
    offsets, sizes = [], []
    for a, n, b, m in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


def _prefix(folder: str, stored: Iterable[str], names: set[str]) -> str:
    """The prefix of the model's names."""
    count: Counter[str] = Counter()
    for name in stored:
        parts = name.split(".")
        for at in range(len(parts)):
            if canonical(".".join(parts[at:])) in names:
                count["".join(f"{part}." for part in parts[:at])] += 1
    best = max(count.values(), default=0)
    candidates = [prefix for prefix, n in count.items() if n == best]
    likely = [prefix for prefix in candidates if prefix == "" or prefix.split(".")[-2] == "model"]
    if len(candidates) <= 1 or len(likely) == 1:
        return (likely or candidates or [""])[0]
    raise CheckpointError(
        f"{folder!r} holds the model's names several times, with the prefixes {listed(sorted(candidates))}",
        "Save one model, or give the one to load the name 'model'.",
    )


class _Branch(dict[str | int, Any]):
    """A dict or list that contains values; a dict that is itself a value is not one."""


def _nested(values: dict[Route, Any]) -> Any:
    """Rebuild the nested dicts and lists from values by path."""
    root = _Branch()
    for path, value in values.items():
        at = root
        for part in (_ROOT, *path)[:-1]:
            at = at.setdefault(part, _Branch())
            if not isinstance(at, _Branch):
                raise DamagedCheckpoint(f"{path} is nested inside a value", DAMAGED)
        at[(_ROOT, *path)[-1]] = value
    return _with_lists(root[_ROOT])


def _with_lists(value: Any) -> Any:
    if not isinstance(value, _Branch):
        return value
    if set(value) == set(range(len(value))):
        return [_with_lists(value[key]) for key in range(len(value))]
    return {key: _with_lists(v) for key, v in value.items()}
