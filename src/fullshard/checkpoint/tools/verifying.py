"""`fullshard verify`: every byte of every file, against the checksums that the manifest carries.

Where `fs.load` stops at the first damaged block that it needs, this goes on, and says which tensors lie in
what is damaged. Memory is bounded: a few chunks of 16 MiB, whatever the size of the checkpoint.
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

from fullshard.checkpoint.format import headers, manifest
from fullshard.checkpoint.format.checksums import BLOCK_BYTES, checksum
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.manifest import Count, FileRecord, Manifest
from fullshard.checkpoint.opening import Checkpoint, open_checkpoint
from fullshard.checkpoint.reading import CHUNK_BYTES, Blocks, whole_tensors
from fullshard.checkpoint.tools.commands import (
    Damaged,
    Progress,
    Report,
    as_damage,
    folder_files,
    identify,
    open_foreign,
    quiet,
    read_manifest,
    strangers,
)
from fullshard.checkpoint.tools.wording import as_bytes_text, listed, plural, printable
from fullshard.checkpoint.trees import SHARED_FILE, rank_file
from fullshard.errors import CheckpointError

_THREADS = 4  # reading and CRC-32 both let others run; more than the disk can feed is of no use
_IN_FILES = ("$tensor", "$array", "$scalar", "$bytes")
_DIFFERS = "the checksum differs"


@dataclass(frozen=True)
class Damage:
    """Bytes [begin, end) of a file are not those that were written, or cannot be read."""

    file: str
    begin: int
    end: int
    what: str
    tensors: tuple[str, ...] = ()


def verify(path: Path, progress: Progress = quiet) -> Report:
    """Check everything that can be checked at a path."""
    subject = identify(path)
    if subject.kind == "root":
        raise CheckpointError(
            f"{str(path)!r} holds checkpoints and is none itself",
            "Name one of them; fullshard inspect lists them.",
        )
    if subject.kind == "unfinished":
        return _verify_unfinished(subject.folder)
    if subject.kind == "checkpoint":
        return _verify_checkpoint(subject.folder, progress)
    return _verify_foreign(subject.folder, subject.kind)


# ---- a checkpoint of ours


def _verify_checkpoint(folder: Path, progress: Progress) -> Report:
    damage: list[Damage] = []
    try:
        said = read_manifest(folder)
    except Damaged as error:
        said = _unsigned_manifest(folder)
        damage.append(Damage(manifest.NAME, 0, (folder / manifest.NAME).stat().st_size, error.what))
    found, bad_blocks = _damaged_files(folder, said, progress)
    damage += found
    problems = [] if damage else _structure(folder)
    size = sum(record.size_bytes for record in said.files.values())
    blocks = sum(len(record.blocks) for record in said.files.values())
    data = {
        "kind": "checkpoint",
        "path": str(folder),
        "sound": not damage and not problems,
        "files": len(said.files),
        "bytes": size,
        "blocks": blocks,
        "damaged_blocks": bad_blocks,
        "damage": [asdict(one) for one in damage],
        "problems": problems,
        "not_in_manifest": strangers(folder, said),
    }
    return Report(tuple(_lines(data, damage, said.block_bytes)), data, not data["sound"])


def _unsigned_manifest(folder: Path) -> Manifest:
    """What a damaged manifest still says: enough, maybe, to see which files are as it says."""
    with contextlib.suppress(CheckpointError, OSError):
        path = folder / manifest.NAME
        if path.stat().st_size <= manifest.MAX_BYTES:
            return manifest.parse(path.read_bytes())
    return Manifest("", 0, {}, {}, BLOCK_BYTES, {}, Count(), Count())


def _damaged_files(folder: Path, said: Manifest, progress: Progress) -> tuple[list[Damage], int]:
    total, done = sum(record.size_bytes for record in said.files.values()), 0
    damage: list[Damage] = []
    bad_blocks = 0
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for name, record in sorted(said.files.items()):
            bad: dict[int, str] = {}
            try:
                for begin, end, found in _checked(pool, folder / name, record, said.block_bytes):
                    bad |= found
                    done += end - begin
                    progress(done, total)
            except FileNotFoundError:
                damage.append(Damage(name, 0, record.size_bytes, "the file is missing"))
                bad_blocks += len(record.blocks)
                continue
            except OSError as error:
                raise as_damage(_unreadable(folder / name, error)) from error
            bad_blocks += len(bad)
            damage += _of_file(folder / name, record, said.block_bytes, bad)
            damage += _appended(folder / name, record)
    finally:
        pool.shutdown(cancel_futures=True)  # whoever interrupts does not wait for the rest of a terabyte
    return damage, bad_blocks


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    found = CheckpointError(f"cannot read {str(path)!r}: {error.strerror or error}", "Check its rights.")
    found.__cause__ = error
    return found


def _checked(
    pool: ThreadPoolExecutor, path: Path, record: FileRecord, block_bytes: int
) -> Iterator[tuple[int, int, dict[int, str]]]:
    """Chunk by chunk: its bytes, and the blocks of it that are damaged with what is wrong."""
    if path.exists() and not path.is_file():
        raise OSError(None, "it is not a file")  # opening a pipe would wait for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):  # from the disk, not from memory, as far as the system lets us
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        size = max(1, CHUNK_BYTES // block_bytes) * block_bytes
        chunks = [(at, min(at + size, record.size_bytes)) for at in range(0, record.size_bytes, size)]
        check = partial(_bad_blocks, descriptor, record, block_bytes)
        for (begin, end), bad in zip(chunks, pool.map(check, chunks), strict=True):
            yield begin, end, bad
    finally:
        os.close(descriptor)


def _bad_blocks(
    descriptor: int, record: FileRecord, block_bytes: int, chunk: tuple[int, int]
) -> dict[int, str]:
    """Blocks of a chunk that are not as they must be. Where a read fails, each block is read for itself."""
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
    """Bytes of a file; fewer where it ends."""
    out, at = memoryview(bytearray(end - begin)), 0
    while at < len(out):
        count = os.preadv(descriptor, [out[at:]], begin + at)
        if count == 0:
            break
        at += count
    return out[:at]


def _of_file(path: Path, record: FileRecord, block_bytes: int, bad: dict[int, str]) -> list[Damage]:
    """Damaged blocks as ranges of bytes, with the tensors that lie there."""
    if not bad:
        return []
    found = []
    where, remark = _tensors(path, record, block_bytes, bad)
    ordered = enumerate(sorted(bad.items()))
    for (what, _), run in groupby(ordered, key=lambda item: (item[1][1], item[1][0] - item[0])):
        blocks = [block for _, (block, _) in run]
        begin, end = blocks[0] * block_bytes, min((blocks[-1] + 1) * block_bytes, record.size_bytes)
        names = tuple(name for name, low, high in where if low < end and begin < high)
        found.append(Damage(path.name, begin, end, what + remark, names))
    return found


def _tensors(
    path: Path, record: FileRecord, block_bytes: int, bad: dict[int, str]
) -> tuple[list[tuple[str, int, int]], str]:
    """The tensors of a file with their bytes, and what is to be said about a header that is damaged."""
    if path.suffix != ".safetensors":
        return [], ""
    doubtful = False

    def read_at(begin: int, end: int) -> bytes:
        nonlocal doubtful
        doubtful |= any(block in bad for block in range(begin // block_bytes, -(-end // block_bytes)))
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(end - begin)

    try:
        tensors, begins, _ = headers.read(str(path), record.size_bytes, read_at)
    except (CheckpointError, OSError):
        return [], "; the header is damaged, so nothing in the file can be named"
    where = [(name, begins[name], begins[name] + tensor.size_bytes) for name, tensor in tensors.items()]
    return where, "; the header lies there, too, so names may be wrong" if doubtful else ""


def _appended(path: Path, record: FileRecord) -> list[Damage]:
    size = path.stat().st_size
    if size <= record.size_bytes:
        return []
    return [Damage(path.name, record.size_bytes, size, "something was appended to the file")]


# ---- what bytes that are right may still get wrong


def _structure(folder: Path) -> list[str]:
    """Whether everything that the manifest speaks of is in the files."""
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
    said = source.manifest
    trees: list[tuple[str, Any]] = [(SHARED_FILE, dict(said.extra)), (rank_file(0), said.optimizer_state)]
    trees += [(rank_file(index), dict(tree)) for index, tree in enumerate(said.ranks)]
    for file, tree in trees:
        wanted = list(_large(tree))
        held = source.values(file) if wanted else {}
        yield from (f"{file} does not hold {name!r}" for name in wanted if name not in held)


def _large(tree: Any) -> Iterator[str]:
    """Names of the tensors of a tree that are in a file."""
    rest = [tree]
    while rest:
        one = rest.pop()
        if isinstance(one, list):
            rest += one
        elif isinstance(one, dict):
            said = next(iter(one.values()), None)
            if next(iter(one), "") in _IN_FILES and isinstance(said, dict) and "at" in said:
                yield str(said["at"])
            else:
                rest += one.values()


def _missing_state(source: Checkpoint) -> Iterator[str]:
    said = source.manifest.optimizer_state
    state = said.get("state") if isinstance(said, dict) else {}
    for parameter, keys in state.items() if isinstance(state, dict) else ():
        for key, one in keys.items() if isinstance(keys, dict) else ():
            kept = isinstance(one, dict) and one.get("kind") in ("scalar", "elements")
            if kept and f"{parameter}.{key}" not in source.optimizer:
                yield f"optimizer state '{parameter}.{key}' is not in the files"


def _lines(data: dict[str, Any], damage: list[Damage], block_bytes: int) -> list[str]:
    path = printable(data["path"])
    size = f"{as_bytes_text(data['bytes'])} in {plural(data['files'], 'file')}"
    if data["sound"]:
        lines = [f"{path}: sound. {size}, {plural(data['blocks'], 'block')}: all as they were written"]
    else:
        bad = f"{data['damaged_blocks']} of {plural(data['blocks'], 'block')} of {block_bytes} bytes"
        lines = [f"{path}: DAMAGED. {size}; {bad} are not as they were written"]
    for one in damage:
        names = f"; there: {listed(one.tensors)}" if one.tensors else ""
        lines.append(f"  {one.file}, bytes {one.begin} to {one.end}: {printable(one.what)}{names}")
    lines += [f"  {printable(problem)}" for problem in data["problems"]]
    if data["not_in_manifest"]:
        lines.append(f"  not in the manifest, so not checked: {listed(data['not_in_manifest'])}")
    return lines


# ---- without a manifest


def _verify_unfinished(folder: Path) -> Report:
    """A folder that never became a checkpoint: which of its files look whole, for who wants to save them."""
    files = folder_files(folder)
    lines = [f"{printable(str(folder))}: not a checkpoint. The save was not finished: there is no manifest"]
    problems: dict[str, str | None] = {}
    blocks = Blocks(folder, None, 2**20)
    try:
        for name in files:
            problems[name] = None
            if name.endswith(".safetensors"):
                try:
                    whole_tensors(blocks, name)
                except CheckpointError as error:
                    problems[name] = error.what
            lines.append(f"  {name}: {problems[name] or 'its form is right; its values cannot be checked'}")
    finally:
        blocks.close()
    data = {"kind": "unfinished", "path": str(folder), "sound": False, "files": problems}
    return Report(tuple(lines), data, True)


def _verify_foreign(folder: Path, kind: str) -> Report:
    source = open_foreign(folder, kind)
    tensors: list[Tensor] = [stored.tensor for stored in source.model.values()]
    source.close()
    size = sum(tensor.size_bytes for tensor in tensors)
    data = {"kind": kind, "path": str(folder), "sound": True, "checksums": False}
    data |= {"tensors": len(tensors), "bytes": size}
    held = f"{plural(len(tensors), 'tensor')} of {as_bytes_text(size)}"
    line = (
        f"{printable(str(folder))}: its form is right: {held}. It carries no checksums, so values cannot be"
    )
    return Report((f"{line} checked",), data)
