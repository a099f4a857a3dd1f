"""What the tests of crashes and failures share: models whose values are known, disks that are slow, or fail,
or write down what they are told, and a file system in memory that forgets what was not synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import reference
from fullshard.checkpoint import files
from fullshard.checkpoint.files import Disk, OpenFile

# --- models whose values are known ----------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks of one Linear each, a head, and a buffer."""

    def __init__(self, width: int = 8, blocks: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: Tensor = self.head(x)
        return out


def made(width: int = 8, blocks: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On a rank: a sharded model and its optimizer, without values worth anything yet."""
    import fullshard as fs

    model = fs.shard(Stack(width, blocks))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def known(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The value that a tensor has in checkpoint `seed`, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(*shape, generator=generator)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Give every value of the model and its optimizer the one it has in checkpoint `seed`."""
    import fullshard as fs

    with fs.full(model), torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(known(name, p.shape, seed))
    for name, buffer in model.named_buffers():
        buffer.copy_(known(name, buffer.shape, seed))
    for p in model.parameters():
        # Powers of two times the parameter: exact, so they are known without knowing how ranks cut it.
        optimizer.state[p] = {
            "step": torch.tensor(float(seed)),
            "exp_avg": p.detach() * 2,
            "exp_avg_sq": p.detach() * 4,
        }


def forget(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Values that no checkpoint has, so that a load that left one alone is seen."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.detach().fill_(float("nan"))
    optimizer.state.clear()


def assert_filled(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Every value is bit by bit the one of checkpoint `seed`."""
    import fullshard as fs

    for name, p in model.named_parameters():
        state = optimizer.state[p]
        assert state["step"].item() == seed, f"step of {name} is {state['step']}, not {seed}"
        for key, factor in (("exp_avg", 2), ("exp_avg_sq", 4)):
            assert reference.bitwise(state[key], p.detach() * factor), f"{key} of {name}, checkpoint {seed}"
    with fs.full(model, writeback=False):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert reference.bitwise(tensor.detach(), known(name, tensor.shape, seed)), (
                f"{name} is not that of checkpoint {seed}"
            )


def assert_plain_files(folder: Path, seed: int) -> None:
    """The same, read with nothing of ours: the files as the safetensors library sees them."""
    from safetensors.torch import load_file

    if not (folder / "model.safetensors").exists():
        return  # in parts, which are ours alone to put together
    for name, value in load_file(folder / "model.safetensors").items():
        assert reference.bitwise(value, known(name, value.shape, seed)), f"{name} in {folder}"
    for name, value in load_file(folder / "optimizer.safetensors").items():
        parameter, _, key = name.rpartition(".")
        expected = torch.tensor(float(seed))
        if key != "step":
            expected = known(parameter, value.shape, seed) * (2 if key == "exp_avg" else 4)
        assert reference.bitwise(value, expected), f"{name} in {folder}"


def hidden(root: Path) -> list[str]:
    """What a save that did not end left behind, and what was about to be removed."""
    return sorted(p.name for p in root.iterdir() if p.name.startswith(".")) if root.is_dir() else []


def age(root: Path) -> None:
    """Make empty folders old: the next save leaves one alone that may have been made a moment ago."""
    for folder in root.iterdir():
        if folder.is_dir() and not any(folder.iterdir()):
            os.utime(folder, (1, 1))


def contents(root: Path) -> dict[str, bytes]:
    """Every file below a folder, with its bytes."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


# --- disks ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def using(disk: Disk) -> Iterator[None]:
    before, files.disk = files.disk, disk
    try:
        yield
    finally:
        files.disk = before


class HookedFile(OpenFile):
    """Tells its disk before each operation."""

    def __init__(self, path: Path, hook: Callable[[str, Path], None]) -> None:
        super().__init__(path)
        self._path, self._hook = path, hook

    def write_at(self, offset: int, data: memoryview) -> None:
        self._hook("write", self._path)
        super().write_at(offset, data)

    def sync(self) -> None:
        self._hook("sync", self._path)
        super().sync()


class HookedDisk(Disk):
    """Calls `hook(operation, path)` before each operation; it may wait, or raise."""

    def __init__(self, hook: Callable[[str, Path], None], can_exchange: bool = True) -> None:
        self._hook, self._can_exchange = hook, can_exchange

    def make_folder(self, path: Path) -> None:
        self._hook("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path, size_bytes: int) -> None:
        self._hook("create", path)
        super().create(path, size_bytes)

    def open(self, path: Path) -> OpenFile:
        return HookedFile(path, self._hook)

    def sync_folder(self, path: Path) -> None:
        self._hook("sync_folder", path)
        super().sync_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self._hook("rename", old)
        super().rename(old, new)

    def exchange(self, one: Path, other: Path) -> bool:
        self._hook("exchange", one)
        return self._can_exchange and super().exchange(one, other)

    def remove(self, path: Path) -> None:
        self._hook("remove", path)
        super().remove(path)

    def remove_folder(self, path: Path) -> None:
        self._hook("remove_folder", path)
        super().remove_folder(path)


def slow(seconds: float, can_exchange: bool = True) -> HookedDisk:
    return HookedDisk(lambda *_: time.sleep(seconds), can_exchange)


def failing(operation: str, number: int, name: str = "") -> HookedDisk:
    """Fails with that error number in that operation on paths that hold `name`."""

    def hook(what: str, path: Path) -> None:
        if what == operation and name in str(path):
            raise OSError(number, os.strerror(number), str(path))

    return HookedDisk(hook)


full = errno.ENOSPC


# --- a log of what a save did on disk ---------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One operation. Paths are relative to the folder that is watched."""

    kind: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""
    size_bytes: int = 0
    at_ns: int = 0


class _RecordedFile(OpenFile):
    def __init__(self, path: Path, note: Callable[..., None]) -> None:
        super().__init__(path)
        self._path, self._note = path, note

    def write_at(self, offset: int, data: memoryview) -> None:
        super().write_at(offset, data)
        self._note("write", self._path, offset=offset, data=bytes(data))

    def sync(self) -> None:
        began_ns = time.monotonic_ns()  # what another rank writes meanwhile is not covered
        super().sync()
        self._note("sync", self._path, at_ns=began_ns)


class Recorder(Disk):
    """Does everything, and writes it down."""

    def __init__(self, base: Path, can_exchange: bool = True) -> None:
        self._base, self._can_exchange = base, can_exchange
        self.log: list[Step] = []

    def _note(self, kind: str, path: Path, other: Path | None = None, **rest: Any) -> None:
        rest = {"at_ns": time.monotonic_ns()} | rest
        to = "" if other is None else str(other.relative_to(self._base))
        self.log.append(Step(kind, str(path.relative_to(self._base)), to, **rest))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._note("make_folder", path)

    def create(self, path: Path, size_bytes: int) -> None:
        super().create(path, size_bytes)
        self._note("create", path, size_bytes=size_bytes)

    def open(self, path: Path) -> OpenFile:
        return _RecordedFile(path, self._note)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._note("sync_folder", path)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._note("rename", old, new)

    def exchange(self, one: Path, other: Path) -> bool:
        done = self._can_exchange and super().exchange(one, other)
        if done:
            self._note("exchange", one, other)
        return done

    def remove(self, path: Path) -> None:
        super().remove(path)
        self._note("remove", path)

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self._note("remove_folder", path)


def merged(logs: Sequence[Sequence[Step]]) -> list[Step]:
    """The operations of several ranks as they happened."""
    return sorted((step for log in logs for step in log), key=lambda step: step.at_ns)


# --- a file system that forgets -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """What one operation does to folders (all of it or nothing), or to the bytes of one file."""

    entries: tuple[tuple[int, str, int | None], ...] = ()  # folder, name, what it leads to from now on
    file: int = -1
    offset: int = 0
    data: bytes = b""
    size_bytes: int = -1
    touches: frozenset[Any] = frozenset()

    @property
    def folder(self) -> int:
        return self.entries[0][0] if self.entries else -1


@dataclass
class Tree:
    """Folders and files by number; 0 is the watched folder."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    data: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, base: Path) -> Tree:
        tree = cls()

        def take(folder: Path, number: int) -> None:
            for entry in sorted(folder.iterdir()):
                new = len(tree.folders) + len(tree.data)
                tree.folders[number][entry.name] = new
                if entry.is_dir():
                    tree.folders[new] = {}
                    take(entry, new)
                else:
                    tree.data[new] = entry.read_bytes()

        take(base, 0)
        return tree

    def write(self, base: Path) -> None:
        """Make it a real folder, which must not be there yet."""

        def put(folder: Path, number: int) -> None:
            folder.mkdir()
            for name, target in self.folders[number].items():
                if target in self.folders:
                    put(folder / name, target)
                else:
                    (folder / name).write_bytes(self.data[target])

        put(base, 0)

    def digest(self, number: int = 0) -> Any:
        """Equal for trees that look the same."""
        found = []
        for name, target in sorted(self.folders[number].items()):
            inside = self.digest(target) if target in self.folders else zlib.crc32(self.data[target])
            found.append((name, inside))
        return tuple(found)

    def copy(self) -> Tree:
        return Tree({n: dict(entries) for n, entries in self.folders.items()}, dict(self.data))

    def _find(self, path: str) -> int:
        number = 0
        for name in Path(path).parts:
            number = self.folders[number][name]
        return number

    def _place(self, path: str) -> tuple[int, str]:
        return self._find(str(Path(path).parent)), Path(path).name

    def apply(self, change: _Change) -> None:
        for folder, name, target in change.entries:
            if target is None:
                self.folders[folder].pop(name, None)
            else:
                self.folders[folder][name] = target
        if change.file >= 0:
            old = self.data[change.file]
            if change.size_bytes >= 0:
                old = old[: change.size_bytes].ljust(change.size_bytes, b"\0")
            end = change.offset + len(change.data)
            old = old.ljust(end, b"\0") if change.data else old
            self.data[change.file] = old[: change.offset] + change.data + old[end:]

    def changes(self, step: Step) -> list[_Change]:
        """What a step does, in numbers; files and folders that it makes are there from now on, unlinked."""
        if step.kind in ("make_folder", "create"):
            folder, name = self._place(step.path)
            new = len(self.folders) + len(self.data)
            made = _Change(((folder, name, new),), touches=frozenset({(folder, name), new}))
            if step.kind == "make_folder":
                self.folders[new] = {}
                return [made]
            self.data[new] = b""
            return [made, _Change(file=new, size_bytes=step.size_bytes)]
        if step.kind == "write":
            return [_Change(file=self._find(step.path), offset=step.offset, data=step.data)]
        folder, name = self._place(step.path)
        one = self._find(step.path)
        if step.kind in ("remove", "remove_folder"):
            return [_Change(((folder, name, None),), touches=frozenset({(folder, name), one}))]
        to, new_name = self._place(step.other)
        touches = {(folder, name), (to, new_name), one}
        if step.kind == "rename":
            return [_Change(((folder, name, None), (to, new_name, one)), touches=frozenset(touches))]
        two = self._find(step.other)
        return [_Change(((folder, name, two), (to, new_name, one)), touches=frozenset({*touches, two}))]


def after_crash(before: Tree, log: Sequence[Step]) -> Tree:
    """The process was killed after these operations: all that it did is there."""
    tree = before.copy()
    for step in log:
        if not step.kind.startswith("sync"):
            for change in tree.changes(step):
                tree.apply(change)
    return tree


def after_power_cut(before: Tree, log: Sequence[Step], seed: int) -> Tree:
    """The power went after these operations: of what was not synced, some is there and some is not.

    An operation on a folder is there whole or not at all; without it nothing later is there that had to do
    with the same name or the same file. Bytes may be lost in any subset, and a write may be cut in two.
    """
    chance = random.Random(seed)
    live, waiting = before.copy(), list[_Change]()
    disk = before.copy()
    for step in log:
        if step.kind == "sync":
            number = live._find(step.path)
            waiting = _settled(disk, waiting, lambda c, number=number: c.file == number)
        elif step.kind == "sync_folder":
            number = live._find(step.path)
            waiting = _settled(disk, waiting, lambda c, number=number: c.folder == number)
        else:
            for change in live.changes(step):
                live.apply(change)
                waiting.append(change)
            for number in live.folders.keys() - disk.folders.keys():
                disk.folders[number] = {}
            for number in live.data.keys() - disk.data.keys():
                disk.data[number] = b""
    share, lost = chance.choice((0.0, 0.2, 0.5, 0.8, 1.0)), set[Any]()
    for change in waiting:
        kept = chance.random() < share
        if change.entries and (not kept or lost & change.touches):
            lost |= change.touches
        elif kept:
            cut = len(change.data) // 2 if chance.random() < 0.2 else len(change.data)
            disk.apply(replace(change, data=change.data[:cut]))
    return disk


def _settled(disk: Tree, waiting: list[_Change], covered: Callable[[_Change], bool]) -> list[_Change]:
    for change in waiting:
        if covered(change):
            disk.apply(change)
    return [change for change in waiting if not covered(change)]
