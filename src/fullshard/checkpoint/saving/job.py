"""The steps of a save: create the folder, write this rank's bytes, write the manifest, rename."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint import commit, files, ownership
from fullshard.checkpoint.files import failed
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.checksums import BLOCK_BYTES, join
from fullshard.checkpoint.format.manifest import SHARED_FILE, Count, FileRecord, Manifest, rank_file
from fullshard.checkpoint.saving.contents import Contents, LocalSlice
from fullshard.checkpoint.saving.extra_values import ExtraValues
from fullshard.checkpoint.saving.host_copy import HostCopy
from fullshard.checkpoint.saving.writing import FilePlan, RankWriter, Written, index_of
from fullshard.comm.control import ControlGroup
from fullshard.elastic import reports
from fullshard.errors import CheckpointError
from fullshard.version import VERSION

_CANNOT_SHARE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ESPIPE, errno.EIO, errno.ETXTBSY, errno.EBUSY)
_can_share: dict[int, bool] = {}  # per file system: whether several ranks can write one file


@dataclass(frozen=True)
class Description:
    """The manifest's layout field, and small files to write next to the tensors."""

    layout: dict[str, Any]
    small_files: dict[str, bytes]


class Job:
    """A save with everything it needs; runs at once, or in a background thread."""

    def __init__(
        self,
        control: ControlGroup,
        target: Path,
        contents: Contents,
        values: ExtraValues,
        plans: dict[str, list[FilePlan]],
        description: Description,
        options: tuple[int | None, str],
    ) -> None:
        self._control, self.target, self._contents, self._values = control, target, contents, values
        self._plans, self._description = plans, description
        self._keep_last, self._files = options

    def copy_to_host(self) -> None:
        """Copy everything that is written, so that the model may change."""
        if self._control.host_copy is None:
            self._control.host_copy = HostCopy()
        self._control.host_copy.take([*self._contents.model, *self._contents.optimizer])
        self._contents.replicated.clear()
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
            control.together(lambda: self._create(writer, shared), "creating files")
            control.together(lambda: self._write(writer, shared), "writing")
            results = control.gather_object((writer.written, self._values.own))
            control.together(lambda: self._finish(staging, results, token), "finishing a save")
            if (report := reports.own()) is not None:
                report.saved(str(self.target))
        except BaseException:
            if staging is not None:
                commit.abandon(staging)
            raise

    def _begin(self) -> commit.Staging | None:
        return commit.begin(self.target) if self._control.is_first else None

    def _may_share(self, folder: Path) -> bool:
        """Whether all ranks may write into one file: by option, or by one try per file system."""
        if self._files != "auto" or self._control.ranks == 1:
            return self._files != "parts"
        device = self._control.together(lambda: _device_of(folder), "checking the folder")
        known = self._control.all_gather_object(_can_share.get(device))
        if None in known:
            probe = folder / "probe"
            self._control.together(lambda: self._make_probe(probe), "creating a file")
            tried = self._control.together(lambda: _write_probe(probe, self._control.index), "trying a file")
            worked = self._control.all_gather_object(tried)
            complete = self._control.together(lambda: self._read_probe(probe), "reading a file")
            _can_share[device] = all(worked) and self._control.broadcast_object(complete)
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
        kinds = {"model": self._contents.model, "optimizer": self._contents.optimizer}
        if shared:
            for kind, slices in kinds.items():
                writer.write_shared(self._plans.get(kind, ()), slices, kind)
        else:
            writer.write_parts(f"part-{self._control.index:05}.safetensors", kinds)
        writer.write_tensors(rank_file(self._control.index), self._values.own_tensors)
        if self._control.is_first:
            writer.write_tensors(SHARED_FILE, self._values.shared_tensors)
            for name, data in self._description.small_files.items():
                writer.write_small(name, data)
            plans = self._plans.get("model", [])
            if shared and len(plans) > 1:
                writer.write_small("model.safetensors.index.json", index_of(plans))

    def _finish(
        self, staging: commit.Staging | None, results: list[tuple[Written, Any]] | None, token: str
    ) -> None:
        """On the first rank: check that every byte was written, write the manifest, rename the folder."""
        if staging is None or results is None:
            return
        complete = self._manifest([rank for rank, _ in results], [own for _, own in results], token)
        try:
            files.disk.sync_folder(staging.folder)  # every listed file is on disk before the manifest
            files.disk.write_file(staging.folder / manifest.NAME, manifest.to_bytes(complete))
            commit.commit(staging)
            ownership.wrote(self.target, token)
            ownership.hold(self.target, staging.lock, self._keep_last or 1)
            if self._keep_last is not None:
                commit.retire_older(self.target, self._keep_last)
        except OSError as error:
            raise failed(f"cannot finish checkpoint {str(self.target)!r}", error) from error

    def _manifest(self, written: Sequence[Written], own: list[Any], token: str) -> Manifest:
        sizes = {name: size for rank in written for name, size in rank.sizes.items()}
        parts = {name: tuple(of_file) for rank in written for name, of_file in rank.parts.items()}
        if not parts:
            sizes |= {plan.name: plan.size_bytes for plans in self._plans.values() for plan in plans}
        records = {}
        for name, size in sorted(sizes.items()):
            pieces = [rank.pieces[name] for rank in written if name in rank.pieces]
            records[name] = FileRecord(size, tuple(join(name, pieces, size, BLOCK_BYTES)))
        return Manifest(
            id=token,
            saved_at_ns=ownership.moment_ns(self.target.parent),
            software={"fullshard": VERSION, "torch": torch.__version__},
            layout=self._description.layout
            | {"files": "parts" if parts else "shared"}
            | ownership.description(self.target.parent),
            block_bytes=BLOCK_BYTES,
            files=records,
            model=self._counted("model", self._contents.model, written),
            optimizer=self._counted("optimizer", self._contents.optimizer, written),
            tied=self._contents.tied,
            modules=self._contents.modules,
            optimizer_state=self._contents.optimizer_state,
            extra=self._values.shared,
            ranks=tuple(own),
            parts=parts,
        )

    def _counted(self, kind: str, slices: Sequence[LocalSlice], written: Sequence[Written]) -> Count:
        expected = sum(s.tensor.num_elements for s in slices)
        actual = sum(rank.elements.get(kind, 0) for rank in written)
        if actual != expected:
            raise CheckpointError(
                f"ranks wrote {actual} elements of the {kind}, which has {expected}",
                "This is a bug in fullshard; the save was abandoned. Please report it.",
            )
        return Count(len(slices), expected)


def _device_of(folder: Path) -> int:
    try:
        return folder.stat().st_dev
    except OSError as error:
        raise CheckpointError(
            f"this rank does not see {str(folder)!r}, which the first rank created: {error.strerror}",
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
        raise failed(f"cannot write {str(probe)!r}", error) from error  # not a matter of sharing
    return True
