"""`fullshard export`: writes the model of a checkpoint as plain safetensors, or for DCP.

Tensors are streamed: read from shared files or from parts, checked block by block, cast and written, so that
memory stays small. The result is a folder for the hub, and also a checkpoint without an optimizer: it has a
manifest, so that it can be verified wherever it is copied to.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from fullshard.checkpoint import commit, dcp, files
from fullshard.checkpoint.files import failed
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.checksums import BLOCK_BYTES, join
from fullshard.checkpoint.format.headers import Tensor, natural_order
from fullshard.checkpoint.format.manifest import Count, FileRecord, Manifest
from fullshard.checkpoint.loading.opening import Checkpoint, open_checkpoint
from fullshard.checkpoint.loading.planning import listed
from fullshard.checkpoint.loading.reading import Stored
from fullshard.checkpoint.saving.contents import LocalSlice
from fullshard.checkpoint.saving.writing import FILE_BYTES, RankWriter, index_of, plan_files
from fullshard.checkpoint.tools import paths
from fullshard.checkpoint.tools.report import Field, Progress, Report, as_bytes_text, lines, plural, quiet
from fullshard.errors import CheckpointError
from fullshard.version import VERSION

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = ("safetensors", "dcp")
INDEX_FILE = "model.safetensors.index.json"
# Narrower floats are quantized values with separate scales, which a cast would not convert.
_CAST = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class ExportOptions:
    """The dtype of floating-point tensors (None: as stored), the format, and the largest size of a file."""

    dtype: torch.dtype | None = None
    format: str = "safetensors"
    file_bytes: int = FILE_BYTES


def export(path: Path, to: Path, options: ExportOptions, progress: Progress = quiet) -> Report:
    """Write the model of a checkpoint to a new folder."""
    subject = paths.identify_one(path)
    if subject.kind != "checkpoint":
        raise CheckpointError(
            f"{str(path)!r} is not a complete checkpoint of fullshard", "Export a folder that fs.save wrote."
        )
    target = Path(os.path.abspath(to))
    _check_target(subject.folder, target)
    source = open_checkpoint(subject.folder)
    try:
        if options.format == "dcp":
            return _as_dcp(source, target)
        return _as_safetensors(source, target, options, progress)
    finally:
        source.close()


def _check_target(folder: Path, target: Path) -> None:
    if not target.name or target.name.startswith("."):
        raise CheckpointError(
            f"cannot export to {str(target)!r}", "Give a folder name that does not begin with a dot."
        )
    if folder.resolve() in (target.resolve(), *target.resolve().parents):
        raise CheckpointError(f"{str(target)!r} is inside the checkpoint", "Export to another folder.")
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            f"{str(target)!r} exists and is not empty; it was left as it is", "Export to a new folder."
        )


# ---- plain safetensors


class _Values:
    """The elements of a stored tensor in the place of a torch tensor: each slice is read when it is taken."""

    device = torch.device("meta")  # not the host, so that the writer takes slices

    def __init__(self, source: Checkpoint, stored: Stored, dtype: torch.dtype, progress: _Progress) -> None:
        self._source, self._stored, self._target, self._progress = source, stored, dtype, progress
        self.dtype = stored.tensor.dtype

    def numel(self) -> int:
        return self._stored.tensor.num_elements

    def is_contiguous(self) -> bool:
        return False

    def __getitem__(self, piece: slice) -> torch.Tensor:
        start, stop, _ = piece.indices(self.numel())
        values = torch.empty(stop - start, dtype=self.dtype)
        self._source.read(self._stored, start, stop, values)
        self._progress.add(values.numel() * values.element_size())
        if self._target == self.dtype:
            return values
        rounded = values.to(self._target)
        if not torch.isfinite(rounded).all() and not torch.equal(rounded.isfinite(), values.isfinite()):
            raise CheckpointError(
                f"{self._stored.tensor.name!r} holds values beyond {self._target}, which would be infinite",
                "Export as bf16, which has the range of fp32, or without a dtype.",
            )
        return rounded


class _Progress:
    def __init__(self, report: Progress, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, count: int) -> None:
        self._done += count
        self._report(self._done, self._total)


def _as_safetensors(source: Checkpoint, target: Path, options: ExportOptions, progress: Progress) -> Report:
    staging = commit.begin(target, lambda _: _check_target(source.folder, target), clean=False)
    try:
        written = _write(source, staging, options, progress)
        _check_target(source.folder, target)  # it may have been created meanwhile
        try:
            files.disk.sync_folder(staging.folder)  # every listed file is on disk before the manifest
            files.disk.write_file(staging.folder / manifest.NAME, manifest.to_bytes(written))
            commit.commit(staging)
            commit.release(staging)
        except OSError as error:
            raise failed(f"cannot finish {str(target)!r}", error) from error
    except BaseException:
        commit.abandon(staging)
        raise
    return _report(source, target, written)


def _write(
    source: Checkpoint, staging: commit.Staging, options: ExportOptions, progress: Progress
) -> Manifest:
    saved = source.manifest
    counter = _Progress(progress, sum(stored.tensor.size_bytes for stored in source.model.values()))
    names = sorted(source.model, key=natural_order)  # the same for parts and shared files
    slices = [_slice(source, source.model[name], options.dtype, counter) for name in names]
    plans = plan_files("model", [s.tensor for s in slices], options.file_bytes, needs="")
    writer = RankWriter(staging.folder)
    writer.create(plans)
    writer.write_shared(plans, slices, "model")
    if len(plans) > 1:
        writer.write_small(INDEX_FILE, index_of(plans))
    for name in saved.files:
        if name.endswith(".safetensors") or name == INDEX_FILE:
            continue
        data = source.blocks.bytes(name, 0, saved.files[name].size_bytes)
        writer.write_small(name, _with_dtype(data, options.dtype) if name == "config.json" else data)
    sizes = writer.written.sizes | {plan.name: plan.size_bytes for plan in plans}
    return Manifest(
        id=staging.token,
        saved_at_ns=time.time_ns(),
        software={"fullshard": VERSION, "torch": torch.__version__},
        layout={"files": "shared", "exported_from": saved.id},
        block_bytes=BLOCK_BYTES,
        files={
            name: FileRecord(size, tuple(join(name, [writer.written.pieces[name]], size, BLOCK_BYTES)))
            for name, size in sorted(sizes.items())
        },
        model=Count(len(slices), sum(s.tensor.num_elements for s in slices)),
        optimizer=Count(),
        tied=saved.tied,
        modules=saved.modules,
    )


def _slice(source: Checkpoint, stored: Stored, dtype: torch.dtype | None, progress: _Progress) -> LocalSlice:
    own = stored.tensor.dtype
    target = dtype if dtype is not None and own in _CAST else own
    values = cast("torch.Tensor", _Values(source, stored, target, progress))
    tensor = Tensor(stored.tensor.name, target, stored.tensor.shape)
    return LocalSlice(tensor, 0, tensor.num_elements, values)


def _with_dtype(config: bytes, dtype: torch.dtype | None) -> bytes:
    """The config with the new dtype: transformers loads a model in the dtype of its config."""
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
    what = f"{as_bytes_text(size)} in {plural(len(written.files), 'file')}"
    left = paths.not_in_manifest(source.folder, source.manifest)
    note = f"not copied, because they are not in the manifest: {listed(left)}"
    fields = (
        Field("format", "safetensors"),
        Field("bytes", size),
        Field("files", sorted(written.files)),
        Field("not_copied", left, lines([note] if left else [])),
    )
    return Report(str(target), f"{plural(written.model.tensors, 'tensor')}, {what}", fields)


# ---- torch.distributed.checkpoint


def _as_dcp(source: Checkpoint, target: Path) -> Report:
    dcp.write_folder(source, target)
    return Report(str(target), "a folder of torch.distributed.checkpoint", (Field("format", "dcp"),))
