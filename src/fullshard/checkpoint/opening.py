"""From a folder to a Source: which tensors it holds, and where each one's elements are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fullshard.checkpoint import commit
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.manifest import Count, Manifest, Part
from fullshard.checkpoint.reading import Blocks, Source, Span, Stored, add_once, whole_tensors
from fullshard.errors import CheckpointError

_REMEDY = "The checkpoint is damaged; use another one."


class Checkpoint(Source):
    """A checkpoint of our own: it has a manifest, and every byte of it can be checked."""

    manifest: Manifest

    def values(self, file: str) -> dict[str, Stored]:
        """The large tensors among a tree's values, by their path."""
        return whole_tensors(self.blocks, file) if file in self.manifest.files else {}


def open_checkpoint(path: Path, optimizer: bool = True) -> Checkpoint:
    """Open a checkpoint that `fs.save` wrote. Nothing but the manifest and headers is read yet.

    Without `optimizer` its files are not looked at: they may be damaged, or gone.
    """
    folder = commit.find(path)
    if not commit.is_checkpoint(folder):
        raise CheckpointError(f"{str(path)!r} is not a checkpoint: it has no manifest", _hint(path))
    manifest = commit.read_manifest(folder)
    source = Checkpoint(folder, Blocks(folder, manifest.files, manifest.block_bytes))
    source.manifest = manifest
    try:
        _find_tensors(source, manifest, ("model", "optimizer") if optimizer else ("model",))
        passed_over = [] if optimizer else manifest.files_of("optimizer")
        for file in sorted(set(manifest.files) - set(passed_over)):
            size = source.blocks.size(file)  # missing or cut short is found now
            if not file.endswith(".safetensors"):
                source.blocks.want(file, 0, size)
    except BaseException:
        source.close()
        raise
    return source


def _hint(path: Path) -> str:
    if not path.exists():
        return "Give the folder that fs.save wrote; fs.latest(root) finds the newest one."
    inside = commit.latest(path) if path.is_dir() else None
    if inside is not None:
        return f"There is one inside: {str(inside)!r}; fs.latest(root) finds the newest."
    return "A save that was not finished leaves none; fs.latest(root) finds the newest that was."


def _find_tensors(source: Checkpoint, manifest: Manifest, kinds: Iterable[str]) -> None:
    for kind in kinds:
        into, count = (
            (source.model, manifest.model) if kind == "model" else (source.optimizer, manifest.optimizer)
        )
        for file in manifest.files_of(kind):
            add_once(into, whole_tensors(source.blocks, file), file)
        add_once(into, _from_parts(source.blocks, manifest, f"{kind}/"), "the parts")
        found = Count(len(into), sum(stored.tensor.num_elements for stored in into.values()))
        if found != count:
            raise CheckpointError(
                f"{str(source.folder)!r} holds {found.tensors} tensors of {found.elements} elements for the "
                f"{kind}; the manifest says {count.tensors} of {count.elements}",
                _REMEDY,
            )


def _from_parts(blocks: Blocks, manifest: Manifest, prefix: str) -> dict[str, Stored]:
    """Tensors whose elements lie in several ranks' files."""
    spans: dict[str, list[Span]] = defaultdict(list)
    tensors: dict[str, Tensor] = {}
    for file, parts in manifest.parts.items():
        held = whole_tensors(blocks, file)
        for part in parts:
            if not part.name.startswith(prefix):
                continue
            name = part.name.removeprefix(prefix)
            tensor = _described(file, part, held, name)
            if tensors.setdefault(name, tensor) != tensor:
                raise CheckpointError(
                    f"{file!r} says another shape or dtype for {name!r} than others", _REMEDY
                )
            spans[name].append(Span(part.start, part.stop, file, held[part.name].spans[0].begin))
    return {name: Stored(tensor, _in_order(name, tensor, spans[name])) for name, tensor in tensors.items()}


def _described(file: str, part: Part, held: dict[str, Stored], name: str) -> Tensor:
    stored = held.get(part.name)
    if stored is None or stored.tensor.num_elements != part.stop - part.start:
        raise CheckpointError(
            f"{file!r} does not hold elements {part.start} to {part.stop} of {name!r}", _REMEDY
        )
    return Tensor(name, stored.tensor.dtype, part.shape)


def _in_order(name: str, tensor: Tensor, spans: list[Span]) -> tuple[Span, ...]:
    spans = sorted((span for span in spans if span.start < span.stop), key=lambda span: span.start)
    at = 0
    for span in spans:
        if span.start != at:
            raise CheckpointError(f"elements of {name!r} from {at} on are missing or there twice", _REMEDY)
        at = span.stop
    if at != tensor.num_elements:
        raise CheckpointError(
            f"{name!r} has {tensor.num_elements} elements, of which {at} are there", _REMEDY
        )
    return tuple(spans)
