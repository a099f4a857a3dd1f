"""`fs.save`: every rank writes its own bytes of one set of files; a rename makes them a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.agreements import Council, council
from fullshard.checkpoint import commit, contents, files, manifest, random_state, trees
from fullshard.checkpoint.background import Saving, finish_earlier
from fullshard.checkpoint.checksums import BLOCK_BYTES, join
from fullshard.checkpoint.contents import Contents
from fullshard.checkpoint.files import failed
from fullshard.checkpoint.manifest import Count, FileRecord, Manifest
from fullshard.checkpoint.trees import SHARED_FILE, Trees, rank_file
from fullshard.checkpoint.values import Encoder
from fullshard.checkpoint.writing import FilePlan, RankWriter, Written, index_of, plan_files
from fullshard.engine import runtime_of
from fullshard.errors import CheckpointError, OptionError, RankMismatch, StateError
from fullshard.runtime import Runtime
from fullshard.version import VERSION

_CANNOT_SHARE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE, errno.EIO, errno.ETXTBSY, errno.EBUSY)
FILES = ("auto", "shared", "parts")
_can_share: dict[int, bool] = {}  # by file system: can several ranks write one file?


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    keep_last: int | None = None,
    dtype: torch.dtype | None = None,
    files: str = "auto",
) -> Saving:
    """Save a sharded model, and its optimizer, to a folder. Every rank must call it.

    The folder holds plain safetensors under the model's own names, which `from_pretrained` loads, and a
    manifest with checksums. It appears whole or not at all; one that is there is replaced only when the new
    one is complete.

    extra: plain values to get back from fs.load, such as the step or scheduler.state_dict(); they may differ
        by rank.
    background: return when everything is copied to host memory, and write while training goes on. `.wait()`
        of what is returned waits; an error is raised there, or in the next save.
    keep_last: keep this many of the newest checkpoints in the parent folder, this one included; remove the
        others.
    dtype: of the model's floating point values in the files; None writes what is at rest.
    files: 'shared' has all ranks write into the same files, 'parts' gives each rank a file of its own, for
        file systems that cannot share; 'auto' tries. `fullshard export` turns parts into a plain model.
    """
    runtime = runtime_of(model)
    comm = runtime.comm
    comm.meet("save")
    talk = council(comm)
    finish_earlier(talk)
    encoded = talk.together(
        lambda: _check(runtime, model, optimizer, extra, (keep_last, dtype, files)), "checking what to save"
    )
    target = Path(_agreed_path(talk, path))
    held = talk.together(lambda: _take(runtime, model, optimizer, dtype), "looking at what to save")
    values = Trees()
    trees.sort_out(talk, encoded, values)
    _own_values(talk, runtime, held, values)
    plans = _agreed_plans(talk, held)
    job = Job(talk, target, held, values, plans, _describe(runtime, model), (keep_last, files))
    if background:
        job.copy_to_host()
    return Saving(target, job.run, background, talk)


def _check(
    runtime: Runtime,
    model: nn.Module,
    optimizer: Any,
    extra: Mapping[str, Any] | None,
    options: tuple[Any, Any, Any],
) -> dict[str, tuple[Any, Encoder]]:
    """What may be wrong on one rank alone, before ranks do anything together."""
    keep_last, dtype, files = options
    check_model(runtime, model, optimizer, "save")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise OptionError(f"keep_last is {keep_last!r}", "Give a number of at least 1, or None to keep all.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"dtype is {dtype!r}", "Give a floating point torch dtype, or None.")
    if files not in FILES:
        raise OptionError(f"files is {files!r}", f"Choose one of {', '.join(map(repr, FILES))}.")
    return trees.encode_extra(extra)


def check_model(runtime: Runtime, model: nn.Module, optimizer: Any, verb: str) -> None:
    if runtime.root.modules[0] is not model:
        raise StateError(
            f"fs.{verb} got {type(model).__name__}, a part of a sharded model",
            "Give the model that fs.shard returned.",
        )
    if any(unit.whole for unit in runtime.units) or runtime.gathering.forward is not None:
        raise StateError(f"fs.{verb} inside fs.full or a forward", "Call it between steps.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer is a {type(optimizer).__name__}", "Give a torch optimizer, or None.")


def _agreed_path(talk: Council, path: str | os.PathLike[str]) -> str:
    everyone = talk.tell(os.path.abspath(path))
    if len(set(everyone)) > 1:
        raise RankMismatch(
            f"ranks save to different folders: {', '.join(map(repr, sorted(set(everyone))))}",
            "Give every rank the same path.",
        )
    return everyone[0]


def _take(
    runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer | None, dtype: torch.dtype | None
) -> Contents:
    held = Contents()
    contents.take_model(held, runtime, model, dtype)
    if optimizer is not None:
        contents.take_optimizer(held, runtime, model, optimizer)
    return held


def _own_values(talk: Council, runtime: Runtime, held: Contents, values: Trees) -> None:
    """What belongs to this rank alone: its random numbers, and whole values that are not the first rank's."""
    first = talk.from_first({name: contents.digest(value) for name, value in held.whole.items()})
    encoder = Encoder()
    values.add_own("values", contents.differing(held, first, encoder), encoder)
    values.add_own("optimizer", held.own, held.encoder)
    values.add_own("random", Encoder().encode(random_state.take(runtime.comm.device), "random"))


def _agreed_plans(talk: Council, held: Contents) -> dict[str, list[FilePlan]]:
    """The files, which every rank must see alike."""
    kinds = {"model": held.model, "optimizer": held.optimizer}
    names = {kind: [h.tensor for h in values] for kind, values in kinds.items()}
    for rank, theirs in enumerate(talk.tell(names)):
        for kind in names:
            if theirs[kind] != names[kind]:
                mine, other = set(names[kind]), set(theirs[kind])
                odd = sorted(t.name for t in mine ^ other) or ["their order"]
                raise RankMismatch(
                    f"rank {rank} holds other tensors for the {kind} than rank {talk.index}: {odd[:4]}",
                    "Give every rank the same model and optimizer, after the same steps.",
                )
    return {kind: plan_files(kind, tensors) for kind, tensors in names.items() if tensors}


@dataclass(frozen=True)
class _Description:
    """What is written beside the tensors."""

    layout: dict[str, Any]
    small_files: dict[str, bytes]


def _describe(runtime: Runtime, model: nn.Module) -> _Description:
    layout = {"ranks": runtime.comm.all_ranks, "strategy": runtime.options.strategy}
    return _Description(layout, model_files(model))


def model_files(model: nn.Module) -> dict[str, bytes]:
    """The files that transformers keeps beside the weights, for a model that has a config."""
    found: dict[str, bytes] = {}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        to_json = getattr(getattr(model, attribute, None), "to_json_string", None)
        if not callable(to_json):
            continue
        config = json.loads(to_json())
        if name == "config.json":
            config["architectures"] = [type(model).__name__]
        found[name] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return found


class Job:
    """A save with all it needs: runs at once, or later in a thread."""

    def __init__(
        self,
        talk: Council,
        target: Path,
        held: Contents,
        values: Trees,
        plans: dict[str, list[FilePlan]],
        description: _Description,
        options: tuple[int | None, str],
    ) -> None:
        self._talk, self._target, self._held, self._values = talk, target, held, values
        self._plans, self._description = plans, description
        self._keep_last, self._files = options

    def copy_to_host(self) -> None:
        """From here on nothing that is written is the model's own memory."""
        copy_held([*self._held.model, *self._held.optimizer])
        self._held.whole.clear()
        for tensors in (self._values.shared_tensors, self._values.own_tensors):
            tensors.update({name: value.clone() for name, value in tensors.items()})

    def run(self) -> None:
        talk = self._talk
        staging = talk.together(self._begin, "beginning a save")
        token, folder = talk.from_first(None if staging is None else (staging.token, staging.folder))  # type: ignore[misc]
        try:
            shared = self._may_share(folder)
            writer = RankWriter(folder)
            talk.together(lambda: self._create(writer, shared), "making files")
            talk.together(lambda: self._write(writer, shared), "writing")
            everyone = talk.to_first((writer.written, self._values.own))
            talk.together(lambda: self._finish(staging, everyone, token), "finishing a save")
        except BaseException:
            if staging is not None:
                commit.give_up(staging)
            raise

    def _begin(self) -> commit.Staging | None:
        return commit.begin(self._target) if self._talk.is_first else None

    def _may_share(self, folder: Path) -> bool:
        """Whether all ranks may write into one file here: as told, or tried once for each file system."""
        if self._files != "auto" or self._talk.ranks == 1:
            return self._files != "parts"
        device = self._talk.together(lambda: _device_of(folder), "looking for the folder")
        known = self._talk.tell(_can_share.get(device))
        if None in known:
            probe = folder / "probe"
            self._talk.together(lambda: self._make_probe(probe), "making a file")
            worked = self._talk.tell(_write_probe(probe, self._talk.index))
            whole = self._talk.from_first(self._talk.is_first and _read_probe(probe, self._talk.ranks))
            _can_share[device] = all(worked) and whole
            self._talk.together(lambda: self._remove_probe(probe), "removing a file")
            return _can_share[device]
        return all(known)

    def _make_probe(self, probe: Path) -> None:
        if self._talk.is_first:
            files.disk.create(probe, self._talk.ranks)

    def _remove_probe(self, probe: Path) -> None:
        if self._talk.is_first:
            files.disk.remove(probe)

    def _create(self, writer: RankWriter, shared: bool) -> None:
        if self._talk.is_first and shared:
            writer.create(plan for plans in self._plans.values() for plan in plans)

    def _write(self, writer: RankWriter, shared: bool) -> None:
        kinds = {"model": self._held.model, "optimizer": self._held.optimizer}
        if shared:
            for kind, held in kinds.items():
                writer.write_shared(self._plans.get(kind, ()), held, kind)
        else:
            writer.write_parts(f"part-{self._talk.index:05}.safetensors", kinds)
        writer.write_whole(rank_file(self._talk.index), self._values.own_tensors)
        if self._talk.is_first:
            writer.write_whole(SHARED_FILE, self._values.shared_tensors)
            for name, data in self._description.small_files.items():
                writer.write_small(name, data)
            plans = self._plans.get("model", [])
            if shared and len(plans) > 1:
                writer.write_small("model.safetensors.index.json", index_of(plans))

    def _finish(
        self, staging: commit.Staging | None, everyone: list[tuple[Written, Any]] | None, token: str
    ) -> None:
        """The first rank: is every byte there? Then the manifest, and the name."""
        if staging is None or everyone is None:
            return
        written = [rank for rank, _ in everyone]
        found = self._manifest(written, [own for _, own in everyone], token)
        try:
            files.disk.write_file(staging.folder / manifest.NAME, manifest.to_bytes(found))
            commit.commit(staging)
            if self._keep_last is not None:
                commit.retire_older(self._target, self._keep_last)
        except OSError as error:
            raise failed(f"cannot finish checkpoint {str(self._target)!r}", error) from error

    def _manifest(self, written: Sequence[Written], own: list[Any], token: str) -> Manifest:
        sizes = {name: size for rank in written for name, size in rank.sizes.items()}
        parts = {name: tuple(found) for rank in written for name, found in rank.parts.items()}
        if not parts:
            sizes |= {plan.name: plan.size_bytes for plans in self._plans.values() for plan in plans}
        records = {}
        for name, size in sorted(sizes.items()):
            pieces = [rank.pieces[name] for rank in written if name in rank.pieces]
            records[name] = FileRecord(size, tuple(join(name, pieces, size, BLOCK_BYTES)))
        return Manifest(
            id=token,
            saved_at_ns=time.time_ns(),
            software={"fullshard": VERSION, "torch": torch.__version__},
            layout=self._description.layout | {"files": "parts" if parts else "shared"},
            block_bytes=BLOCK_BYTES,
            files=records,
            model=self._counted("model", self._held.model, written),
            optimizer=self._counted("optimizer", self._held.optimizer, written),
            tied=self._held.tied,
            modules=self._held.modules,
            optimizer_state=self._held.optimizer_state,
            extra=self._values.shared,
            ranks=tuple(own),
            parts=parts,
        )

    def _counted(self, kind: str, held: Sequence[contents.Held], written: Sequence[Written]) -> Count:
        expected = sum(h.tensor.num_elements for h in held)
        found = sum(rank.elements.get(kind, 0) for rank in written)
        if found != expected:
            raise CheckpointError(
                f"ranks wrote {found} elements of the {kind}; it has {expected}",
                "This is a mistake of fullshard's own; the save was given up. Please report it.",
            )
        return Count(len(held), expected)


def copy_held(held: Sequence[contents.Held]) -> None:
    """Values into host memory of their own."""
    for h in held:
        h.values = h.values.to("cpu", h.tensor.dtype, copy=True)


def _device_of(folder: Path) -> int:
    try:
        return folder.stat().st_dev
    except OSError as error:
        raise CheckpointError(
            f"this rank does not see {str(folder)!r}, which the first rank has made: {error.strerror}",
            "Save to a folder that all hosts share.",
        ) from error


def _write_probe(probe: Path, index: int) -> bool:
    try:
        file = files.disk.open(probe)
        try:
            file.write_at(index, memoryview(bytes([index % 251 + 1])))
            file.sync()
        finally:
            file.close()
    except OSError as error:
        return error.errno not in _CANNOT_SHARE  # any other trouble: writing meets it again, and names it
    return True


def _read_probe(probe: Path, ranks: int) -> bool:
    return probe.read_bytes() == bytes(index % 251 + 1 for index in range(ranks))
