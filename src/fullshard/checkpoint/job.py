"""A save under way: its folder, this rank's bytes, what all ranks wrote, the manifest, the name."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint import commit, contents, files
from fullshard.checkpoint.contents import Contents
from fullshard.checkpoint.files import failed
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.checksums import BLOCK_BYTES, join
from fullshard.checkpoint.format.manifest import Count, FileRecord, Manifest
from fullshard.checkpoint.host_copy import HostCopy
from fullshard.checkpoint.trees import SHARED_FILE, Trees, rank_file
from fullshard.checkpoint.writing import FilePlan, RankWriter, Written, index_of
from fullshard.comm.control import ControlGroup
from fullshard.errors import CheckpointError
from fullshard.version import VERSION

_CANNOT_SHARE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE, errno.EIO, errno.ETXTBSY, errno.EBUSY)
_can_share: dict[int, bool] = {}  # by file system: can several ranks write one file?


@dataclass(frozen=True)
class Description:
    """What is written beside the tensors."""

    layout: dict[str, Any]
    small_files: dict[str, bytes]


class Job:
    """A save with all it needs: runs at once, or later in a thread."""

    def __init__(
        self,
        control: ControlGroup,
        target: Path,
        held: Contents,
        values: Trees,
        plans: dict[str, list[FilePlan]],
        description: Description,
        options: tuple[int | None, str],
    ) -> None:
        self._control, self._target, self._held, self._values = control, target, held, values
        self._plans, self._description = plans, description
        self._keep_last, self._files = options

    def copy_to_host(self) -> None:
        """From here on nothing that is written is the model's own memory."""
        if self._control.host_copy is None:
            self._control.host_copy = HostCopy()
        self._control.host_copy.take([*self._held.model, *self._held.optimizer])
        self._held.whole.clear()
        for tensors in (self._values.shared_tensors, self._values.own_tensors):
            tensors.update({name: value.clone() for name, value in tensors.items()})

    def run(self) -> None:
        control = self._control
        staging = control.together(self._begin, "beginning a save")
        try:
            token, folder = control.broadcast_object(
                None if staging is None else (staging.token, staging.folder)
            )  # type: ignore[misc]
            shared = self._may_share(folder)
            writer = RankWriter(folder)
            control.together(lambda: self._create(writer, shared), "making files")
            control.together(lambda: self._write(writer, shared), "writing")
            everyone = control.gather_object((writer.written, self._values.own))
            control.together(lambda: self._finish(staging, everyone, token), "finishing a save")
        except BaseException:
            if staging is not None:
                commit.give_up(staging)
            raise

    def _begin(self) -> commit.Staging | None:
        return commit.begin(self._target) if self._control.is_first else None

    def _may_share(self, folder: Path) -> bool:
        """Whether all ranks may write into one file here: as told, or tried once for each file system."""
        if self._files != "auto" or self._control.ranks == 1:
            return self._files != "parts"
        device = self._control.together(lambda: _device_of(folder), "looking for the folder")
        known = self._control.all_gather_object(_can_share.get(device))
        if None in known:
            probe = folder / "probe"
            self._control.together(lambda: self._make_probe(probe), "making a file")
            tried = self._control.together(lambda: _write_probe(probe, self._control.index), "trying a file")
            worked = self._control.all_gather_object(tried)
            whole = self._control.together(lambda: self._read_probe(probe), "reading a file")
            _can_share[device] = all(worked) and self._control.broadcast_object(whole)
            self._control.together(lambda: self._remove_probe(probe), "removing a file")
            return _can_share[device]
        return all(known)

    def _make_probe(self, probe: Path) -> None:
        if self._control.is_first:
            files.disk.create(probe, self._control.ranks)

    def _read_probe(self, probe: Path) -> bool:
        ranks = self._control.ranks
        return self._control.is_first and probe.read_bytes() == bytes(r % 251 + 1 for r in range(ranks))

    def _remove_probe(self, probe: Path) -> None:
        if self._control.is_first:
            files.disk.remove(probe)

    def _create(self, writer: RankWriter, shared: bool) -> None:
        if self._control.is_first and shared:
            writer.create(plan for plans in self._plans.values() for plan in plans)

    def _write(self, writer: RankWriter, shared: bool) -> None:
        kinds = {"model": self._held.model, "optimizer": self._held.optimizer}
        if shared:
            for kind, held in kinds.items():
                writer.write_shared(self._plans.get(kind, ()), held, kind)
        else:
            writer.write_parts(f"part-{self._control.index:05}.safetensors", kinds)
        writer.write_whole(rank_file(self._control.index), self._values.own_tensors)
        if self._control.is_first:
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
            files.disk.sync_folder(staging.folder)  # the manifest is not there before what it lists
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
        if error.errno in _CANNOT_SHARE:
            return False
        raise failed(f"cannot write {str(probe)!r}", error) from error  # says nothing about sharing
    return True
