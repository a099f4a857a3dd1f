"""`fullshard verify`: checks every byte of every file against the checksums in the manifest.

Where `fs.load` stops at the first damaged block that it needs, this continues, and names the tensors in every
damaged place. Memory is bounded: a few chunks of 16 MiB, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from fullshard.checkpoint import commit
from fullshard.checkpoint.files import open_to_read, opened, unreadable
from fullshard.checkpoint.format import headers, manifest
from fullshard.checkpoint.format.checksums import BLOCK_BYTES, checksum
from fullshard.checkpoint.format.manifest import SHARED_FILE, Count, FileRecord, Manifest, rank_file
from fullshard.checkpoint.loading.opening import Checkpoint, open_checkpoint
from fullshard.checkpoint.loading.planning import listed
from fullshard.checkpoint.loading.reading import CHUNK_BYTES, Blocks, tensors_in
from fullshard.checkpoint.tools import paths
from fullshard.checkpoint.tools.report import Field, Progress, Report, as_bytes_text, lines, plural, quiet
from fullshard.errors import CheckpointError, DamagedCheckpoint

_THREADS = 4  # reading and CRC-32 both release the GIL; more threads than the disk can feed are useless
_IN_FILES = ("$tensor", "$array", "$scalar", "$bytes")
_DIFFERS = "the checksum differs"


@dataclass(frozen=True)
class Damage:
    """Bytes [begin, end) of a file, which are not those that were written, or cannot be read."""

    file: str
    begin: int
    end: int
    what: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f"; there: {listed(self.tensors)}" if self.tensors else ""
        return f"{self.file}, bytes {self.begin} to {self.end}: {self.what}{names}"


def verify(path: Path, progress: Progress = quiet) -> Report:
    """Check everything that can be checked at a path; in a folder of checkpoints, each of them."""
    subject = paths.identify(path)
    if subject.kind == "root":
        return _verify_root(subject.folder, progress)
    if subject.kind == "unfinished":
        return _verify_unfinished(subject.folder)
    if subject.kind == "checkpoint":
        return _verify_checkpoint(subject.folder, progress)
    return _verify_foreign(subject)


def first_problem(folder: Path, index: int = 0, count: int = 1) -> str:
    """What is wrong with a checkpoint, or ''. If `count` ranks share the work, this one checks a part."""
    saved = commit.read_manifest(folder)
    damage, _ = _damaged_files(folder, saved, quiet, (index, count))
    problems = _structure_problems(folder) if not damage and index == 0 else []
    return next(iter([*map(str, damage), *problems]), "")


# ---- a folder of checkpoints


def _verify_root(root: Path, progress: Progress) -> Report:
    hidden = {folder for folder, _, _ in paths.hidden_folders(root)}
    texts, entries, damaged = [], [], 0
    for folder in paths.checkpoints_in(root):
        if folder in hidden and not paths.has_manifest(folder):  # perhaps it is being written right now
            texts.append(f"{folder.name}: not finished: a save in progress, or one that was interrupted")
            entries.append({"path": str(folder), "kind": "unfinished"})
            continue
        report = _one_of_many(folder, progress)
        texts.append(f"{folder.name}: {report.headline}")
        texts += [f"  {row[-1]}" for field in report.fields for row in field.rows if report.damaged]
        entries.append(report.data())
        damaged += report.damaged
    count = sum(entry["kind"] == "checkpoint" for entry in entries)
    headline = f"{plural(count, 'checkpoint')}, {f'{damaged} DAMAGED' if damaged else 'all sound'}"
    fields = Field("kind", "root"), Field("sound", not damaged), Field("checkpoints", entries, lines(texts))
    return Report(str(root), headline, fields, bool(damaged))


def _one_of_many(folder: Path, progress: Progress) -> Report:
    """One that cannot be read does not keep the others from being checked."""
    try:
        return _verify_checkpoint(folder, progress)
    except CheckpointError as error:
        fields = Field("kind", "checkpoint"), Field("sound", False), Field("problems", [error.what])
        return Report(str(folder), f"DAMAGED. {error.what}", fields, True)


# ---- a checkpoint of fullshard


def _verify_checkpoint(folder: Path, progress: Progress) -> Report:
    damage: list[Damage] = []
    try:
        saved = commit.read_manifest(folder)
    except DamagedCheckpoint as error:
        saved = _unsigned_manifest(folder)
        damage.append(Damage(manifest.NAME, 0, (folder / manifest.NAME).stat().st_size, error.what))
    in_files, bad_blocks = _damaged_files(folder, saved, progress)
    damage += in_files
    problems = [] if damage else _structure_problems(folder)
    return _report(folder, saved, damage, bad_blocks, problems)


def _report(
    folder: Path, saved: Manifest, damage: list[Damage], bad_blocks: int, problems: list[str]
) -> Report:
    sound = not damage and not problems
    size = sum(record.size_bytes for record in saved.files.values())
    blocks = sum(len(record.blocks) for record in saved.files.values())
    unlisted = paths.not_in_manifest(folder, saved)
    note = f"not in the manifest, so not checked: {listed(unlisted)}"
    what = f"{as_bytes_text(size)} in {plural(len(saved.files), 'file')}"
    headline = f"sound. {what}, {plural(blocks, 'block')}: all as they were written"
    if not sound:
        bad = f"{bad_blocks} of {plural(blocks, 'block')} of {saved.block_bytes} bytes"
        headline = f"DAMAGED. {what}; {bad} are not as they were written"
    fields = (
        Field("kind", "checkpoint"),
        Field("sound", sound),
        Field("files", len(saved.files)),
        Field("bytes", size),
        Field("blocks", blocks),
        Field("damaged_blocks", bad_blocks),
        Field("damage", [asdict(one) for one in damage], lines(map(str, damage))),
        Field("problems", problems, lines(problems)),
        Field("not_in_manifest", unlisted, lines([note] if unlisted else [])),
    )
    return Report(str(folder), headline, fields, not sound)


def _unsigned_manifest(folder: Path) -> Manifest:
    """A manifest with a wrong checksum, which may still list the files; or an empty one."""
    with contextlib.suppress(CheckpointError, OSError):
        path = folder / manifest.NAME
        if path.stat().st_size <= manifest.MAX_BYTES:
            with opened(path) as file:
                return manifest.parse(file.read())
    return Manifest("", 0, {}, {}, BLOCK_BYTES, {}, Count(), Count())


def _damaged_files(
    folder: Path, saved: Manifest, progress: Progress, share: tuple[int, int] = (0, 1)
) -> tuple[list[Damage], int]:
    """The damage in every `count`-th chunk, from the `index`-th on, where share = (index, count)."""
    total, done = sum(record.size_bytes for record in saved.files.values()), 0
    damage: list[Damage] = []
    bad_blocks = 0
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for name, record in sorted(saved.files.items()):
            bad: dict[int, str] = {}
            try:
                for begin, end, in_chunk in _checked(pool, folder / name, record, saved.block_bytes, share):
                    bad |= in_chunk
                    done += end - begin
                    progress(done, total)
            except FileNotFoundError:
                damage.append(Damage(name, 0, record.size_bytes, "the file is missing"))
                bad_blocks += len(record.blocks)
                continue
            except OSError as error:
                raise unreadable(repr(str(folder / name)), error) from error
            bad_blocks += len(bad)
            damage += _of_file(folder / name, record, saved.block_bytes, bad)
            damage += _appended(folder / name, record)
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the remaining chunks
    return damage, bad_blocks


def _checked(
    pool: ThreadPoolExecutor, path: Path, record: FileRecord, block_bytes: int, share: tuple[int, int]
) -> Iterator[tuple[int, int, dict[int, str]]]:
    """For each chunk: its first and last byte, and what is wrong with its damaged blocks."""
    descriptor = open_to_read(path)
    try:
        if hasattr(os, "posix_fadvise"):  # read from the disk, not from the cache, where possible
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size = max(1, CHUNK_BYTES // block_bytes) * block_bytes
        chunks = [(at, min(at + size, record.size_bytes)) for at in range(0, record.size_bytes, size)]
        chunks = chunks[share[0] :: share[1]]
        check = partial(_bad_blocks, descriptor, record, block_bytes)
        for (begin, end), bad in zip(chunks, pool.map(check, chunks), strict=True):
            yield begin, end, bad
    finally:
        os.close(descriptor)


def _bad_blocks(
    descriptor: int, record: FileRecord, block_bytes: int, chunk: tuple[int, int]
) -> dict[int, str]:
    """The damaged blocks of a chunk. If reading the chunk fails, each block is read on its own."""
    bad: dict[int, str] = {}
    begin, end = chunk
    try:
        data: memoryview | None = _read(descriptor, begin, end)
    except OSError:
        data = None
    for at in range(begin, end, block_bytes):
        stop = min(at + block_bytes, end)
        try:
            block = _read(descriptor, at, stop) if data is None else data[at - begin : stop - begin]
        except OSError as error:
            bad[at // block_bytes] = f"it cannot be read ({error.strerror or error})"
            continue
        if len(block) < stop - at:
            bad[at // block_bytes] = "the file was cut short"
        elif checksum(block) != record.blocks[at // block_bytes]:
            bad[at // block_bytes] = _DIFFERS
    return bad


def _read(descriptor: int, begin: int, end: int) -> memoryview:
    """Bytes of a file; fewer at its end."""
    out, at = memoryview(bytearray(end - begin)), 0
    while at < len(out):
        count = os.preadv(descriptor, [out[at:]], begin + at)
        if count == 0:
            break
        at += count
    return out[:at]


def _of_file(path: Path, record: FileRecord, block_bytes: int, bad: dict[int, str]) -> list[Damage]:
    """Damaged blocks as ranges of bytes, with the tensors in them."""
    if not bad:
        return []
    damage = []
    where, remark = _tensors(path, record, block_bytes, bad)
    ordered = enumerate(sorted(bad.items()))
    for (what, _), run in groupby(ordered, key=lambda item: (item[1][1], item[1][0] - item[0])):
        blocks = [block for _, (block, _) in run]
        begin, end = blocks[0] * block_bytes, min((blocks[-1] + 1) * block_bytes, record.size_bytes)
        names = tuple(name for name, low, high in where if low < end and begin < high)
        damage.append(Damage(path.name, begin, end, what + remark, names))
    return damage


def _tensors(
    path: Path, record: FileRecord, block_bytes: int, bad: dict[int, str]
) -> tuple[list[tuple[str, int, int]], str]:
    """The tensors of a file with their bytes, and a remark if the header is damaged."""
    if path.suffix != ".safetensors":
        return [], ""
    doubtful = False

    def read_at(begin: int, end: int) -> bytes:
        nonlocal doubtful
        doubtful |= any(block in bad for block in range(begin // block_bytes, -(-end // block_bytes)))
        with opened(path) as file:
            file.seek(begin)
            return file.read(end - begin)

    try:
        tensors, begins, _ = headers.read(str(path), record.size_bytes, read_at)
    except (CheckpointError, OSError):
        return [], "; the header is damaged, so the tensors in the file are unknown"
    where = [(name, begins[name], begins[name] + tensor.size_bytes) for name, tensor in tensors.items()]
    return where, "; the header is there as well, so names may be wrong" if doubtful else ""


def _appended(path: Path, record: FileRecord) -> list[Damage]:
    size = path.stat().st_size
    if size <= record.size_bytes:
        return []
    return [Damage(path.name, record.size_bytes, size, "something was appended to the file")]


# ---- consistency of files and manifest


def _structure_problems(folder: Path) -> list[str]:
    """What the manifest refers to and the files do not hold."""
    try:
        source = open_checkpoint(folder)
    except CheckpointError as error:
        return [error.what]
    try:
        return [*_missing_values(source), *_missing_state(source)]
    except CheckpointError as error:
        return [error.what]
    finally:
        source.close()


def _missing_values(source: Checkpoint) -> Iterator[str]:
    saved = source.manifest
    trees: list[tuple[str, Any]] = [(SHARED_FILE, dict(saved.extra)), (rank_file(0), saved.optimizer_state)]
    trees += [(rank_file(index), dict(tree)) for index, tree in enumerate(saved.ranks)]
    for file, tree in trees:
        expected = list(_large_tensors(tree))
        stored: set[str] = set(source.values(file)) if expected else set()
        if tree is saved.optimizer_state:
            stored |= set(source.optimizer)  # where state of entire tensors is
        yield from (f"{file} does not hold {name!r}" for name in expected if name not in stored)


def _large_tensors(tree: Any) -> Iterator[str]:
    """The names of a tree's tensors that are stored in a file."""
    rest = [tree]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest += one
        elif isinstance(one, dict):
            entry = next(iter(one.values()), None)
            if next(iter(one), "") in _IN_FILES and isinstance(entry, dict) and "at" in entry:
                yield str(entry["at"])
            else:
                rest += one.values()


def _missing_state(source: Checkpoint) -> Iterator[str]:
    saved = source.manifest.optimizer_state
    state = saved.get("state") if isinstance(saved, dict) else {}
    for parameter, keys in state.items() if isinstance(state, dict) else ():
        for key, one in _single_entries(keys):
            kept = isinstance(one, dict) and one.get("kind") in ("scalar", "elements")
            if kept and f"{parameter}.{key}" not in source.optimizer:
                yield f"optimizer state '{parameter}.{key}' is not in the files"


def _single_entries(keys: Any) -> Iterator[tuple[Any, Any]]:
    """The entries of a parameter's state, and those of tensors in containers."""
    for key, one in keys.items() if isinstance(keys, dict) else ():
        yield key, one
        tensors = one.get("tensors") if isinstance(one, dict) else None
        for inner in tensors if isinstance(tensors, list) else ():
            if isinstance(inner, dict):
                yield inner.get("key"), inner.get("entry")


# ---- without a manifest


def _verify_unfinished(folder: Path) -> Report:
    """For a save that was not finished: which of its files are well-formed, so that they can be rescued."""
    problems: dict[str, str | None] = dict.fromkeys(paths.folder_files(folder))
    blocks = Blocks(folder, None, 2**20)
    try:
        for name in problems:
            if name.endswith(".safetensors"):
                try:
                    tensors_in(blocks, name)
                except CheckpointError as error:
                    problems[name] = error.what
    finally:
        blocks.close()
    well_formed = "it is well-formed; its values cannot be checked"
    rows = lines(f"{name}: {problem or well_formed}" for name, problem in problems.items())
    fields = Field("kind", "unfinished"), Field("sound", False), Field("files", problems, rows)
    return Report(
        str(folder), "not a checkpoint. The save was not finished: there is no manifest", fields, True
    )


def _verify_foreign(subject: paths.Subject) -> Report:
    source = paths.open_foreign(subject)
    source.close()
    tensors = [stored.tensor for stored in (*source.model.values(), *source.optimizer.values())]
    size = sum(tensor.size_bytes for tensor in tensors)
    what = f"{plural(len(tensors), 'tensor')} of {as_bytes_text(size)}"
    fields = (
        Field("kind", subject.kind),
        Field("sound", True),
        Field("checksums", False),
        Field("tensors", len(tensors)),
        Field("bytes", size),
    )
    headline = f"well-formed: {what}. It has no checksums, so values cannot be checked"
    return Report(str(subject.folder), headline, fields)
