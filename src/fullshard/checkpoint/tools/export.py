"""`fullshard export`: a checkpoint as a plain model, whatever it was saved with.

Tensors stream through: read from shared files or from parts, each block checked, cast, written. Nothing is
ever whole in memory. The result is a folder for the hub, and a checkpoint without an optimizer: it carries
a manifest, so that it can be verified wherever it is copied to.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fullshard.checkpoint import commit, dcp, files
from fullshard.checkpoint.contents import Held
from fullshard.checkpoint.files import FolderLock, failed, make_parents
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.checksums import BLOCK_BYTES, join
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.manifest import Count, FileRecord, Manifest
from fullshard.checkpoint.opening import Checkpoint, open_checkpoint
from fullshard.checkpoint.reading import Stored
from fullshard.checkpoint.tools.commands import Progress, Report, as_damage, identify, quiet, strangers
from fullshard.checkpoint.tools.wording import as_bytes_text, listed, plural, printable
from fullshard.checkpoint.writing import FILE_BYTES, RankWriter, index_of, plan_files
from fullshard.errors import CheckpointError
from fullshard.version import VERSION

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("safetensors", "dcp")
INDEX_FILE = "model.safetensors.index.json"
# Narrower floats are quantised values with scales elsewhere: a cast would be no conversion of them.
_CAST = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class Wish:
    """What the export is to be: dtype of floating point tensors (None: as stored), format, size of a file."""

    dtype: torch.dtype | None = None
    format: str = "safetensors"
    file_bytes: int = FILE_BYTES


def export(path: Path, to: Path, wish: Wish, progress: Progress = quiet) -> Report:
    """Write the model of a checkpoint to a new folder."""
    subject = identify(path)
    if subject.kind == "root":
        newest = commit.latest(path)
        hint = "" if newest is None else f"; the newest is {str(newest)!r}"
        raise CheckpointError(
            f"{str(path)!r} holds checkpoints and is none itself", f"Name one of them{hint}."
        )
    if subject.kind != "checkpoint":
        raise CheckpointError(
            f"{str(path)!r} is not a complete checkpoint of fullshard", "Export a folder that fs.save wrote."
        )
    target = Path(os.path.abspath(to))
    _check_target(subject.folder, target)
    try:
        source = open_checkpoint(subject.folder)
    except CheckpointError as error:
        raise as_damage(error) from error
    try:
        if wish.format == "dcp":
            return _as_dcp(source, target)
        return _as_safetensors(source, target, wish, progress)
    finally:
        source.close()


def _check_target(folder: Path, target: Path) -> None:
    if not target.name or target.name.startswith("."):
        raise CheckpointError(
            f"cannot export to {str(target)!r}", "Give a folder name that does not begin with a dot."
        )
    if folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise CheckpointError(f"{str(target)!r} lies in the checkpoint itself", "Export elsewhere.")
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{str(target)!r} exists and is not empty; it was left as it is", "Export to a new folder."
        )


# ---- plain safetensors


class _Values:
    """The elements of a stored tensor, as a writer takes them: sliced piece by piece, read when sliced."""

    device = torch.device("meta")  # anywhere but in host memory, so that the writer takes pieces

    def __init__(self, source: Checkpoint, stored: Stored, dtype: torch.dtype, progress: _Progress) -> None:
        self._source, self._stored, self._wanted, self._progress = source, stored, dtype, progress
        self.dtype = stored.tensor.dtype

    def numel(self) -> int:
        return self._stored.tensor.num_elements

    def is_contiguous(self) -> bool:
        return False

    def __getitem__(self, piece: slice) -> torch.Tensor:
        start, stop, _ = piece.indices(self.numel())
        values = torch.empty(stop - start, dtype=self.dtype)
        try:
            self._source.read(self._stored, start, stop, values)
        except CheckpointError as error:
            raise as_damage(error) from error
        self._progress.add(values.numel() * values.element_size())
        if self._wanted == self.dtype:
            return values
        rounded = values.to(self._wanted)
        if not torch.isfinite(rounded).all() and not torch.equal(rounded.isfinite(), values.isfinite()):
            raise CheckpointError(
                f"{self._stored.tensor.name!r} holds values beyond {self._wanted}: they would be infinite",
                "Export as bf16, which has the range of fp32, or without a dtype.",
            )
        return rounded


class _Progress:
    def __init__(self, report: Progress, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, count: int) -> None:
        self._done += count
        self._report(self._done, self._total)


def _as_safetensors(source: Checkpoint, target: Path, wish: Wish, progress: Progress) -> Report:
    staging = _begin(target)
    try:
        written = _write(source, staging, wish, progress)
        _check_target(source.folder, target)  # somebody may have put something there meanwhile
        try:
            files.disk.sync_folder(staging.folder)  # what the manifest names must be there before it is
            files.disk.write_file(staging.folder / manifest.NAME, manifest.to_bytes(written))
            commit.commit(staging)
        except OSError as error:
            raise failed(f"cannot finish {str(target)!r}", error) from error
    except BaseException:
        commit.give_up(staging)
        raise
    return _report(source, target, written)


def _begin(target: Path) -> commit.Staging:
    """A hidden folder beside the target. Unlike a save this puts nothing right that others left there."""
    token = secrets.token_hex(8)
    folder = target.parent / f".{target.name}.saving-{token}"
    try:
        make_parents(files.disk, target.parent)
        files.disk.make_folder(folder)
    except OSError as error:
        raise failed(f"cannot make a folder for {str(target)!r}", error) from error
    return commit.Staging(target, folder, token, FolderLock.take(folder))


def _write(source: Checkpoint, staging: commit.Staging, wish: Wish, progress: Progress) -> Manifest:
    said = source.manifest
    counter = _Progress(progress, sum(stored.tensor.size_bytes for stored in source.model.values()))
    held = [
        _held(source, source.model[name], wish.dtype, counter) for name in sorted(source.model, key=_natural)
    ]
    plans = plan_files("model", [h.tensor for h in held], wish.file_bytes, needs="")
    writer = RankWriter(staging.folder)
    writer.create(plans)
    writer.write_shared(plans, held, "model")
    if len(plans) > 1:
        writer.write_small(INDEX_FILE, index_of(plans))
    for name in _small_files(said):
        try:
            data = source.blocks.bytes(name, 0, said.files[name].size_bytes)
        except CheckpointError as error:
            raise as_damage(error) from error
        writer.write_small(name, _with_dtype(data, wish.dtype) if name == "config.json" else data)
    sizes = writer.written.sizes | {plan.name: plan.size_bytes for plan in plans}
    return Manifest(
        id=staging.token,
        saved_at_ns=time.time_ns(),
        software={"fullshard": VERSION, "torch": torch.__version__},
        layout={"files": "shared", "exported_from": said.id},
        block_bytes=BLOCK_BYTES,
        files={
            name: FileRecord(size, tuple(join(name, [writer.written.pieces[name]], size, BLOCK_BYTES)))
            for name, size in sorted(sizes.items())
        },
        model=Count(len(held), sum(h.tensor.num_elements for h in held)),
        optimizer=Count(),
        tied=said.tied,
        modules=said.modules,
    )


def _held(source: Checkpoint, stored: Stored, dtype: torch.dtype | None, progress: _Progress) -> Held:
    own = stored.tensor.dtype
    wanted = dtype if dtype is not None and own in _CAST else own
    values = cast("torch.Tensor", _Values(source, stored, wanted, progress))
    tensor = Tensor(stored.tensor.name, wanted, stored.tensor.shape)
    return Held(tensor, 0, tensor.num_elements, values)


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Layer 2 before layer 10; the same for parts and shared files, whose own orders differ."""
    texts = re.split(r"(\d+)", name)
    numbers = [text.lstrip("0") for text in texts[1::2]]  # compared by length first, however long they are
    key: list[tuple[int, str]] = [(0, "")] * len(texts)
    key[::2] = [(0, text) for text in texts[::2]]
    key[1::2] = [(len(number), number) for number in numbers]
    return key, name


def _small_files(said: Manifest) -> list[str]:
    return [name for name in said.files if not name.endswith(".safetensors") and name != INDEX_FILE]


def _with_dtype(config: bytes, dtype: torch.dtype | None) -> bytes:
    """transformers loads a model in the dtype that its config names: name the one that is written."""
    if dtype is None:
        return config
    known = {str(one).removeprefix("torch.") for one in _CAST}

    def changed(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        named = {k for k, v in value.items() if k in ("dtype", "torch_dtype") and v in known}
        name = str(dtype).removeprefix("torch.")
        return {k: name if k in named else changed(v) for k, v in value.items()}

    return (json.dumps(changed(json.loads(config)), indent=2, sort_keys=True) + "\n").encode()


def _report(source: Checkpoint, target: Path, written: Manifest) -> Report:
    size = sum(record.size_bytes for record in written.files.values())
    data = {"path": str(target), "format": "safetensors", "bytes": size, "files": sorted(written.files)}
    held = f"{as_bytes_text(size)} in {plural(len(written.files), 'file')}"
    lines = [f"{printable(str(target))}: {plural(written.model.tensors, 'tensor')}, {held}"]
    left = strangers(source.folder, source.manifest)
    if left:
        lines.append(f"  not copied, because the manifest does not vouch for them: {listed(left)}")
    return Report(tuple(lines), data)


# ---- torch.distributed.checkpoint


def _as_dcp(source: Checkpoint, target: Path) -> Report:
    try:
        dcp.write_folder(source, target)
    except CheckpointError as error:  # the system's errors are about the target
        raise (error if isinstance(error.__cause__, OSError) else as_damage(error)) from error
    data = {"path": str(target), "format": "dcp"}
    return Report((f"{printable(str(target))}: a folder of torch.distributed.checkpoint",), data)
