"""Opens a checkpoint of fullshard: which tensors it holds, and where the elements of each are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint import commit
from fullshard.checkpoint.format.budget import Budget
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.manifest import NAME, Count, Manifest, Part, is_values_file
from fullshard.checkpoint.format.values import decode
from fullshard.checkpoint.loading.reading import DAMAGED, Blocks, Source, Span, Stored, add_unique, tensors_in
from fullshard.errors import CheckpointError, DamagedCheckpoint

_VALUES_FACTOR = 16  # fs.save packs by less
_VALUES_BYTES = 128 * 2**20  # earlier versions packed zeros by more


class Checkpoint(Source):
    """A checkpoint of fullshard: it has a manifest, so every byte of it can be checked."""

    def __init__(
        self, folder: Path, manifest: Manifest, manifest_bytes: int, blocks: Blocks | None = None
    ) -> None:
        super().__init__(folder, blocks or Blocks(folder, manifest.files, manifest.block_bytes))
        self.manifest = manifest
        self._values: dict[str, dict[str, Stored]] = {}
        held = sum(record.size_bytes for name, record in manifest.files.items() if is_values_file(name))
        # Values are packed, and several may refer to the same bytes.
        self._budget = Budget(
            f"the values of {str(folder)!r}", manifest_bytes + held, _VALUES_FACTOR, _VALUES_BYTES
        )

    def values(self, file: str) -> dict[str, Stored]:
        """The large tensors among values, by the path of the value."""
        if file not in self._values:
            self._values[file] = tensors_in(self.blocks, file) if file in self.manifest.files else {}
        return self._values[file]

    def value(self, tree: Any, file: str) -> Any:
        """The value of a tree of the manifest, whose large tensors are in `file`."""

        def stored(name: str) -> torch.Tensor:
            if name not in self.values(file):
                raise DamagedCheckpoint(f"{file!r} does not hold {name[:200]!r}", DAMAGED)
            tensor = self.values(file)[name]
            self._budget.charge(tensor.tensor.size_bytes)
            return self.read_tensor(tensor)

        return decode(tree, stored, self._budget)


def open_checkpoint(path: Path, optimizer: bool = True) -> Checkpoint:
    """Open a checkpoint that `fs.save` wrote. Only the manifest and headers are read.

    Without `optimizer` its files are not opened: they may be damaged or missing.
    """
    folder = commit.find(path)
    if not commit.is_checkpoint(folder):
        raise CheckpointError(f"{str(path)!r} is not a checkpoint: it has no manifest", _hint(path))
    manifest = commit.read_manifest(folder)
    source = Checkpoint(folder, manifest, (folder / NAME).stat().st_size)
    try:
        list_tensors(source, optimizer)
    except BaseException:
        source.close()
        raise
    return source


def list_tensors(source: Checkpoint, optimizer: bool) -> None:
    """Read the headers of all files that are needed, and announce the reads of small ones."""
    manifest = source.manifest
    _find_tensors(source, manifest, ("model", "optimizer") if optimizer else ("model",))
    skipped = [] if optimizer else manifest.files_of("optimizer")
    for file in sorted(set(manifest.files) - set(skipped)):
        size = source.blocks.size(file)  # raises now if it is missing or truncated
        if not file.endswith(".safetensors"):
            source.blocks.want(file, 0, size)


def _hint(path: Path) -> str:
    if not path.exists():
        return "Give the folder that fs.save wrote; fs.latest(root) returns the newest one."
    inside = commit.latest(path) if path.is_dir() else None
    if inside is not None:
        return f"There is one inside: {str(inside)!r}; fs.latest(root) returns the newest."
    return "An unfinished save has none; fs.latest(root) returns the newest complete checkpoint."


def _find_tensors(source: Checkpoint, manifest: Manifest, kinds: Iterable[str]) -> None:
    for kind in kinds:
        into, count = (
            (source.model, manifest.model) if kind == "model" else (source.optimizer, manifest.optimizer)
        )
        for file in manifest.files_of(kind):
            add_unique(into, tensors_in(source.blocks, file), file)
        add_unique(into, _from_parts(source.blocks, manifest, f"{kind}/"), "the parts")
        actual = Count(len(into), sum(stored.tensor.num_elements for stored in into.values()))
        if actual != count:
            raise DamagedCheckpoint(
                f"{str(source.folder)!r} holds {actual.tensors} tensors of {actual.elements} elements for "
                f"the {kind}; the manifest lists {count.tensors} of {count.elements}",
                DAMAGED,
            )


def _from_parts(blocks: Blocks, manifest: Manifest, prefix: str) -> dict[str, Stored]:
    """Tensors whose elements are spread over the files of several ranks."""
    spans: dict[str, list[Span]] = defaultdict(list)
    tensors: dict[str, Tensor] = {}
    for file, parts in manifest.parts.items():
        in_file = tensors_in(blocks, file)
        for part in parts:
            if not part.name.startswith(prefix):
                continue
            name = part.name.removeprefix(prefix)
            tensor = _described(file, part, in_file, name)
            if tensors.setdefault(name, tensor) != tensor:
                raise DamagedCheckpoint(
                    f"{file!r} has another shape or dtype for {name!r} than other files", DAMAGED
                )
            spans[name].append(Span(part.start, part.stop, file, in_file[part.name].spans[0].begin))
    return {name: Stored(tensor, _in_order(name, tensor, spans[name])) for name, tensor in tensors.items()}


def _described(file: str, part: Part, in_file: dict[str, Stored], name: str) -> Tensor:
    stored = in_file.get(part.name)
    if stored is None or stored.tensor.num_elements != part.stop - part.start:
        raise DamagedCheckpoint(
            f"{file!r} does not hold elements {part.start} to {part.stop} of {name!r}", DAMAGED
        )
    return Tensor(name, stored.tensor.dtype, part.shape)


def _in_order(name: str, tensor: Tensor, spans: list[Span]) -> tuple[Span, ...]:
    spans = sorted((span for span in spans if span.start < span.stop), key=lambda span: span.start)
    at = 0
    for span in spans:
        if span.start != at:
            raise DamagedCheckpoint(f"elements of {name!r} from {at} on are missing or duplicated", DAMAGED)
        at = span.stop
    if at != tensor.num_elements:
        raise DamagedCheckpoint(
            f"{name!r} has {tensor.num_elements} elements, of which the files hold {at}", DAMAGED
        )
    return tuple(spans)
