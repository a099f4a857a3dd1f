"""A disk that fails in a step: every rank raises, and model and optimizer are as before it."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import engines
import fullshard as fs
import ranks
import warm
from engines import my_rank
from fullshard.engine.homes import disk, disk_home
from fullshard.engine.homes.disk import DiskBuffers, DiskFolder, DiskValue, Pending
from fullshard.engine.homes.disk_home import DiskHome
from fullshard.engine.homes.transfers import Transfers
from fullshard.errors import OffloadError
from fullshard.plan.homes import DISK_BUFFERS

PRECISIONS = ("fp32", "bf16")


def _new(folder: Path, precision: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    offload = fs.Offload(host=6_000, disk=folder, chunk=300)
    model = engines.shard_blocks(engines.build(), precision=precision, offload=offload)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _backward(model: nn.Module, number: int) -> None:
    engines.loss_of(model, engines.batch(number, my_rank())).backward()


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's: a failing disk must not be read together."""
    states = [v for p in model.parameters() for v in optimizer.state[p].values()]
    return [torch.as_tensor(v).detach().clone() for v in (*model.parameters(), *states)]


def _files(folder: Path) -> list[Path]:
    """Of this rank: those that its process has open."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of another thread, which has closed it meanwhile
            links.append(Path(os.readlink(entry)))
    return sorted(
        path for path in links if path.is_relative_to(folder) and re.fullmatch(r"value-\d+", path.name)
    )


@contextmanager
def _shortened(folder: Path) -> Iterator[None]:
    sizes = [(path, path.stat().st_size, path.read_bytes()) for path in _files(folder)]
    for path, _, _ in sizes:
        os.truncate(path, 0)
    yield
    for path, _, data in sizes:
        with path.open("r+b") as file:
            file.write(data)


@contextmanager
def _changed(folder: Path) -> Iterator[None]:
    """One bit of every page of every file."""
    for _ in range(2):
        for path in _files(folder):
            data = bytearray(path.read_bytes())
            for at in range(0, len(data), 4096):
                data[at] ^= 1
            with path.open("r+b") as file:
                file.write(data)
        if _ == 0:
            yield


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    for path in _files(folder):
        path.unlink()
    yield


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "short read": (_shortened, "bytes too early"),
    "changed bytes": (_changed, "are not those that were written"),
    "disk full": (_full, "File too large"),
    "removed files": (_removed, "it was removed"),
}


def _fail(folder: Path, expected: dict[str, list[torch.Tensor]]) -> None:
    for precision in PRECISIONS:
        for name in FAULTS:
            for first in (True, False):
                _fail_in_step(folder, precision, name, first, expected[f"{precision}, {first}"])
                _collect()  # files of this model are not to go while the next one's are changed


def _fail_in_step(folder: Path, precision: str, name: str, first: bool, expected: list[torch.Tensor]) -> None:
    fault, message = FAULTS[name]
    model, optimizer = _new(folder, precision)
    for number in range(0 if first else 2):
        _backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    _backward(model, 2)
    before = _values(model, optimizer)
    where = f"{name}, {precision}, first step: {first}"
    if my_rank() == 1:
        with fault(folder):
            found = _step_fails(optimizer)
    else:
        found = _step_fails(optimizer)
    assert "rank 1" in found, (where, found)
    assert message in found, (where, found)
    after = _values(model, optimizer)
    assert len(before) == len(after), where
    assert all(map(torch.equal, before, after)), where
    if name != "removed files":
        optimizer.step()
        optimizer.zero_grad()
        with fs.full(model):
            mine = [p.detach().clone() for p in model.parameters()]
        assert all(map(torch.equal, mine, expected)), where


def _collect() -> None:
    for _ in range(3):  # what a cycle held, in which tensors are, is found by the next one
        gc.collect()


def _step_fails(optimizer: torch.optim.Optimizer) -> str:
    with pytest.raises(OffloadError) as caught:
        optimizer.step()
    return str(caught.value)


def _train(folder: Path) -> dict[str, list[torch.Tensor]]:
    found = {}
    for precision in PRECISIONS:
        for first in (True, False):
            model = engines.shard_blocks(engines.build(), precision=precision)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for number in (2,) if first else (0, 1, 2):
                _backward(model, number)
                optimizer.step()
                optimizer.zero_grad()
            with fs.full(model):
                found[f"{precision}, {first}"] = [p.detach().clone() for p in model.parameters()]
    return found


def test_a_fault_of_one_ranks_disk_is_raised_by_all_and_changes_nothing(tmp_path: Path) -> None:
    expected = ranks.run(_train, 2, tmp_path)[0]
    ranks.run(_fail, 2, tmp_path, expected, timeout_s=120)


def _fail_and_go(folder: Path, fault: str) -> None:
    model, optimizer = _new(folder, "fp32")
    _backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    inject, _ = FAULTS[fault]
    if fault != "disk full":
        with inject(folder) if my_rank() == 1 else nullcontext():
            with pytest.raises(OffloadError):
                _backward(model, 1)
            torch.distributed.barrier()
    _backward(model, 1)
    with inject(folder) if my_rank() == 1 else nullcontext():
        _step_fails(optimizer)
        torch.distributed.barrier()


def _files_after_failures(folder: Path) -> list[list[str]]:
    left = []
    for fault in ("short read", "disk full"):
        _fail_and_go(folder, fault)
        _collect()
        torch.distributed.barrier()
        left += [[fault, *map(str, _files(folder))]]
    return left


def test_a_model_whose_disk_has_failed_is_freed_with_its_files(tmp_path: Path) -> None:
    for left in ranks.run(_files_after_failures, 2, tmp_path):
        assert left == [["short read"], ["disk full"]]


def _gather_fails(folder: Path) -> None:
    eight_bit = fs.Precision(gather=torch.int8, wire=torch.int8)
    # Bytes for gradients, shards in bf16, and what 8-bit gradients leave over.
    for precision, host in (("fp32", 3_000), ("bf16", 6_000), (eight_bit, 15_000)):
        offload = fs.Offload(host=host, disk=folder, chunk=300)
        model = engines.shard_blocks(engines.build(), precision=precision, offload=offload)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        _assert_fails(partial(_backward, model, 0), "short read", folder)  # the first forward
        for _ in range(2):
            _backward(model, 0)
            optimizer.step()
            optimizer.zero_grad()
        if precision != "bf16":  # whose shards rest in memory
            _assert_fails(partial(_backward, model, 1), "changed bytes", folder)
            _backward(model, 1)
            optimizer.step()
        for name in ("short read", "removed files"):
            _assert_fails(partial(_enter_full, model), name, folder)


def _assert_fails(read: Callable[[], None], fault: str, folder: Path) -> None:
    inject, message = FAULTS[fault]
    with inject(folder) if my_rank() == 1 else nullcontext():
        with pytest.raises(OffloadError) as caught:
            read()
        torch.distributed.barrier()
    for word in ("rank 1", "unit", "value-", message):
        assert word in str(caught.value), (fault, str(caught.value))


def _enter_full(model: nn.Module) -> None:
    with fs.full(model, writeback=False):
        pass


def test_a_file_that_cannot_be_read_for_a_gather_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    ranks.run(_gather_fails, 2, tmp_path, timeout_s=120)


def _save_fails(folder: Path) -> None:
    model, optimizer = _new(folder / "values", "bf16")
    for number in range(2):
        _backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    for name in ("changed bytes", "short read"):
        for background in (False, True):
            save = partial(fs.save, folder / "checkpoint", model, optimizer, background=background)
            inject, message = FAULTS[name]
            with inject(folder) if my_rank() == 1 else nullcontext():
                torch.distributed.barrier()
                with pytest.raises(OffloadError, match=message) as caught:
                    save()
                torch.distributed.barrier()
            assert "rank 1" in str(caught.value)
            assert not (folder / "checkpoint").exists()
    with torch.no_grad():  # what user code has written has no checksum
        next(iter(model.parameters())).add_(1)
        for state in optimizer.state.values():
            state["exp_avg"].mul_(2)
    before = _values(model, optimizer)
    fs.save(folder / "checkpoint", model, optimizer)
    _backward(model, 2)
    optimizer.step()
    optimizer.zero_grad()
    fs.load(folder / "checkpoint", model, optimizer)
    assert all(map(torch.equal, before, _values(model, optimizer)))
    with _changed(folder / "values") if my_rank() == 1 else nullcontext():
        torch.distributed.barrier()
        with pytest.raises(OffloadError, match="are not those that were written"):
            _backward(model, 2)
        torch.distributed.barrier()
    _backward(model, 2)
    optimizer.step()


def test_values_that_a_disk_has_changed_or_lost_are_neither_saved_nor_used_after_a_load(
    tmp_path: Path,
) -> None:
    ranks.run(_save_fails, 2, tmp_path, timeout_s=120)


def _assigned_and_changed(folder: Path) -> None:
    """By an optimizer without state, so that there are files of masters alone."""
    model, _ = _new(folder / "values", "bf16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 0.5
    _backward(model, 0)
    optimizer.step()
    for path in _files(folder / "values"):
        with (
            mock.patch.dict(globals(), _files=lambda _, path=path: [path]),
            _changed(folder),
            pytest.raises(OffloadError, match="are not those that were written"),
        ):
            fs.save(folder / "checkpoint", model, optimizer)
    fs.save(folder / "checkpoint", model, optimizer)


def test_values_that_were_assigned_on_disk_are_checked_before_they_are_saved(tmp_path: Path) -> None:
    ranks.run(_assigned_and_changed, 1, tmp_path)


def _written_unseen(folder: Path) -> None:
    for written in ("state", "master"):
        model, optimizer = _new(folder, "bf16")
        for number in range(2):
            _backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        _backward(model, 2)
        for parameter in model.parameters():
            value = optimizer.state[parameter]["exp_avg"].data if written == "state" else parameter.data.data
            value.add_(1)
        with pytest.raises(OffloadError, match=r"your code has .* use methods of the parameter"):
            optimizer.step()


def test_writes_on_disk_that_move_no_version_counter_are_an_error_that_names_them(tmp_path: Path) -> None:
    ranks.run(_written_unseen, 1, tmp_path)


def _no_room(folder: Path) -> str:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2**18))
    if my_rank() == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(OffloadError, match="Free space on this disk") as caught:
        fs.shard(model, offload=fs.Offload(host="12MB", disk=folder))
    assert model(torch.zeros(8)).shape == (2**18,)  # as it was
    return str(caught.value)


def test_a_disk_without_room_is_an_error_when_the_model_is_sharded(tmp_path: Path) -> None:
    for message in ranks.run(_no_room, 2, tmp_path, fresh=True):
        assert "rank 1" in message
        assert "cannot be made" in message


def _killed(folder: str) -> None:
    model, optimizer = _new(Path(folder), "fp32")
    engines.loss_of(model, engines.batch(0, 0)).backward()
    optimizer.step()
    print(os.getpid(), flush=True)
    time.sleep(1000)


def _count(folder: Path) -> int:
    model, _ = _new(folder, "fp32")
    found = len(list(folder.iterdir()))
    del model
    return found


def test_what_a_killed_process_has_left_is_removed_by_the_next_one_and_a_living_ones_is_not(
    tmp_path: Path,
) -> None:
    code = "import test_offload_disk as t, sys; t._killed(sys.argv[1])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [f"{warm.commands()}/python", "-c", code, tmp_path], stdout=subprocess.PIPE, env=environment
        )
        for _ in range(2)
    ]
    try:
        pids = [int(process.stdout.readline()) for process in started if process.stdout]
        assert len(list(tmp_path.iterdir())) == 2
        os.kill(pids[0], signal.SIGKILL)
        started[0].wait()
        assert ranks.run(_count, 1, tmp_path) == [2]  # the living one's and its own
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_other_peoples_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("fullshard-offload-0123456789abcdef", "something"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("kept")
    (tmp_path / "fullshard-offload-aaaaaaaaaaaaaaaa").symlink_to(tmp_path / "something")
    os.mkfifo(tmp_path / "fullshard-offload-0123456789abcdef" / "lock")
    ranks.run(_count, 1, tmp_path)
    assert (tmp_path / "something" / "file").exists()
    assert (tmp_path / "fullshard-offload-0123456789abcdef" / "file").exists()


def test_a_process_that_is_killed_while_it_makes_or_removes_its_folder_leaves_nothing_for_ever(
    tmp_path: Path,
) -> None:
    """Before each of the calls that change the folder, in turn."""
    code = """
import fcntl, os, sys
from pathlib import Path
from fullshard.engine.homes.disk import DiskFolder

left = int(sys.argv[2])

def killed_before(call):
    def counted(*args, **options):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*args, **options)
    return counted

for module, name in ((fcntl, "flock"), (os, "unlink"), (os, "rmdir")):
    setattr(module, name, killed_before(getattr(module, name)))
folder = DiskFolder(Path(sys.argv[1]))
for number in range(5):
    folder.new_file().write_bytes(b"value")
"""
    ends = []
    for count in range(12):
        started = [f"{warm.commands()}/python", "-c", code, str(tmp_path), str(count)]
        ends.append(subprocess.run(started, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}))
        folder = DiskFolder(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [folder.path.name], count
        folder._end()
    assert [end.returncode for end in ends][:9] == [9] * 9
    assert ends[-1].returncode == 0


def test_values_are_where_they_were_put_when_the_process_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first", "second", "real"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    Path("link").symlink_to(tmp_path / "real")
    folders = [DiskFolder(Path("inner")), DiskFolder(Path("link"))]
    monkeypatch.chdir(tmp_path / "second")
    (tmp_path / "first" / "link").unlink()
    for folder in folders:
        assert DiskValue(folder.new_file(), 4, torch.float32).tensor().tolist() == [0.0] * 4
        folder._end()
    assert not list((tmp_path / "first" / "inner").iterdir())
    assert not list((tmp_path / "real").iterdir())


def test_a_folder_whose_lock_cannot_be_made_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "_locked", full)
    with pytest.raises(OffloadError, match=r"cannot be used: .*No space left"):
        DiskFolder(tmp_path)
    assert not list(tmp_path.iterdir())


# ---- reads and writes in the background

CHUNK = 2**18
NUM_ELEMENTS = 5 * CHUNK // 4 + 3  # of fp32: five chunks, and bytes that no block of a disk holds alone


@pytest.fixture(params=["disk", "memory"])
def place(request: Any, tmp_path: Path) -> Iterator[Path]:
    """A file system on a disk, and one without."""
    if request.param == "disk":
        yield tmp_path
        return
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    folder = tempfile.mkdtemp(dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)  # what a value that goes meanwhile removes is gone, too


def _has_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def _value(place: Path) -> tuple[DiskValue, torch.Tensor, DiskFolder]:
    folder = DiskFolder(place)
    value = DiskValue(folder.new_file(), NUM_ELEMENTS, torch.float32)
    return value, value.tensor(), folder


def _ranges() -> list[tuple[int, int]]:
    size = 4 * NUM_ELEMENTS
    return [(start, min(CHUNK, size - start)) for start in range(0, size, CHUNK)]


def test_a_range_that_a_step_does_not_write_is_checked_when_it_is_copied_to_the_other_slot(
    place: Path,
) -> None:
    size = 3 * disk.DISK_COPY_BYTES
    folder = DiskFolder(place)
    value = DiskValue(folder.new_file(), size // 4, torch.float32)
    tensor = value.tensor()
    for start, length in ((0, size - 4096), (size - 4096, 4096)):
        value.write(start, memoryview(bytearray(b"a" * length)))
    value.complete()
    value.commit()
    for at in (77, size - 5000):
        value.write(size - 4096, memoryview(bytearray(b"b" * 4096)))
        _flip_byte(value, at)
        with pytest.raises(OffloadError, match="are not those that were written"):
            value.complete()
        value.abandon()
        _flip_byte(value, at)
    value.write(size - 4096, memoryview(bytearray(b"b" * 4096)))
    value.complete()
    value.commit()
    assert bytes(tensor.view(torch.uint8).numpy()) == b"a" * (size - 4096) + b"b" * 4096


def test_a_part_of_a_range_that_was_written_together_is_checked_by_all_of_it(place: Path) -> None:
    value, _tensor, _folder = _value(place)
    value.write(0, memoryview(bytearray(CHUNK)))
    value.complete()
    value.commit()
    part = memoryview(bytearray(4096))
    value.read(8192, part)
    for at in (1, 8192 + 5, CHUNK - 1):
        _flip_byte(value, at)
        with pytest.raises(OffloadError, match="are not those that were written"):
            value.read(8192, part)
        _flip_byte(value, at)
    value.read(8192, part)


def _flip_byte(value: DiskValue, at: int) -> None:
    with value.path.open("r+b") as file:
        file.seek(value._current * value._slot_bytes + at)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _floats(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.float32)


def _add_one(value: DiskValue, buffers: DiskBuffers, skipped: int | None = None) -> None:
    """A step: one range is read ahead, and what is written goes out behind."""
    ranges = [r for i, r in enumerate(_ranges()) if i != skipped]
    ahead: list[tuple[Pending, memoryview]] = []
    for at in range(len(ranges) + 1):
        if at < len(ranges):
            memory = buffers.take()
            ahead.append((value.start_read(ranges[at][0], memory[: ranges[at][1]]), memory))
        if at:
            (start, length), (read, memory) = ranges[at - 1], ahead.pop(0)
            read.wait()
            _floats(memory[:length]).add_(1)
            buffers.give(memory, value.start_write(start, memory[:length]).settle)


def test_what_is_written_in_the_background_is_read_again_and_shown_by_the_tensor(place: Path) -> None:
    value, tensor, _folder = _value(place)
    buffers = DiskBuffers(3, CHUNK)
    expected = torch.randn(NUM_ELEMENTS)
    tensor.copy_(expected)
    for step in range(6):
        _add_one(value, buffers, skipped=None if step < 4 else step - 2)
        assert value._wrote_directly >= _has_direct(place)
        assert torch.equal(tensor, expected)  # and its pages are in memory now
        if step == 3:
            value.complete()
            value.abandon()
            assert torch.equal(tensor, expected)
            continue
        value.complete()
        value.commit()
        part = slice(None) if step < 4 else [i for i in range(NUM_ELEMENTS) if i * 4 // CHUNK != step - 2]
        expected[part] += 1
        assert torch.equal(tensor, expected)
        if step in (1, 4):  # the user writes to it, into both slots in turn
            for values in (tensor, expected):
                values[::1000] = step
            value.forget_checksums()


def test_ranges_that_begin_and_end_inside_blocks_are_written_as_they_are(place: Path) -> None:
    value, tensor, _folder = _value(place)
    generator = torch.Generator().manual_seed(0)
    expected = torch.zeros(NUM_ELEMENTS)
    for _ in range(4):
        cuts = torch.randperm(NUM_ELEMENTS - 1, generator=generator)[:9].add_(1).sort().values.tolist()
        bounds = [0, *cuts, NUM_ELEMENTS]
        buffers = DiskBuffers(4, 4 * NUM_ELEMENTS + 4096)
        for first, last in pairwise(bounds):
            room, skip = buffers.take(), 4 * first % 4096  # blocks lie in memory as they do in the file
            memory = room[skip : skip + 4 * (last - first)]
            ready = threading.Event()
            filled = _floats(memory)
            pending = value.start_write(4 * first, memory, ready.wait)
            filled.copy_(expected[first:last]).add_(first + 1)
            ready.set()
            buffers.give(room, pending.settle)
        assert torch.equal(tensor, expected)
        value.complete()
        assert value._wrote_directly >= _has_direct(place)
        value.commit()
        for first, last in pairwise(bounds):
            expected[first:last] += first + 1
            memory = buffers.take()
            skip = 4 * first % 4096
            value.start_read(4 * first, memory[skip : skip + 4 * (last - first)]).wait()
            assert torch.equal(_floats(memory[skip : skip + 4 * (last - first)]), expected[first:last])
            buffers.give(memory)
        assert torch.equal(tensor, expected)


def _read_all(value: DiskValue) -> None:
    memory = DiskBuffers(1, CHUNK).take()
    for start, length in _ranges():
        value.start_read(start, memory[:length]).wait()


def _write_all(value: DiskValue) -> None:
    buffers = DiskBuffers(2, CHUNK)
    for start, length in _ranges():
        memory = buffers.take()
        buffers.give(memory, value.start_write(start, memory[:length]).settle)
    value.complete()


def _cut(value: DiskValue, _patch: pytest.MonkeyPatch) -> None:
    os.truncate(value.path, value._current * value._slot_bytes + CHUNK + 100)


def _flip(value: DiskValue, _patch: pytest.MonkeyPatch) -> None:
    with value.path.open("r+b") as file:
        file.seek(value._current * value._slot_bytes + 3 * CHUNK + 77)
        file.write(b"?")


def _unlink(value: DiskValue, _patch: pytest.MonkeyPatch) -> None:
    value.path.unlink()


def _fill(_value: DiskValue, patch: pytest.MonkeyPatch) -> None:
    write, count = os.pwritev, iter(range(100))

    def full(descriptor: int, buffers: Any, offset: int) -> int:
        if next(count) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, buffers, offset)

    patch.setattr(os, "pwritev", full)


def _read_at_once(value: DiskValue) -> None:
    value.start_read(100, DiskBuffers(1, 4 * NUM_ELEMENTS).take()[: 4 * NUM_ELEMENTS - 100]).wait()


BACKGROUND: dict[str, tuple[Callable[..., None], Callable[[DiskValue], None], str]] = {
    "short read": (_cut, _read_all, "cannot read .*: it ends .* bytes too early"),
    "changed bytes": (_flip, _read_all, "cannot read .*: bytes 786432 to .* are not those that were written"),
    "changed bytes, other ranges": (_flip, _read_at_once, "bytes 786432 to 1048576 are not those"),
    "file gone, read": (_unlink, _read_all, "cannot use .*: it was removed"),
    "file gone, write": (_unlink, _write_all, "cannot use .*: it was removed"),
    "disk full": (_fill, _write_all, "cannot write .*: No space left on device"),
}


@pytest.mark.parametrize("name", BACKGROUND)
def test_faults_in_the_background_are_raised_where_they_are_waited_for(
    place: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, use, message = BACKGROUND[name]
    value, tensor, _folder = _value(place)
    _add_one(value, DiskBuffers(3, CHUNK))
    value.complete()
    value.commit()
    before = tensor.clone()
    with monkeypatch.context() as patch:
        fault(value, patch)
        with pytest.raises(OffloadError, match=message):
            use(value)
        value.abandon()
    if name in ("disk full", "file gone, read", "file gone, write"):
        assert torch.equal(tensor, before)
    if name == "disk full":  # and then there is room
        _add_one(value, DiskBuffers(3, CHUNK))
        value.complete()
        value.commit()
        assert torch.equal(tensor, before + 1)


def test_a_file_that_was_moved_away_is_not_mistaken_for_the_one_in_its_place(place: Path) -> None:
    value, tensor, folder = _value(place)
    _add_one(value, DiskBuffers(3, CHUNK))
    value.complete()
    value.commit()
    before, away = tensor.clone(), folder.path / "away"
    value.path.rename(away)
    other = b"?" * (2 * value._slot_bytes)
    value.path.write_bytes(other)
    for use in (_read_all, _write_all):
        if _has_direct(place):  # without it, nothing is opened by name
            with pytest.raises(OffloadError, match="another file is in its place"):
                use(value)
        else:
            use(value)
        value.abandon()
    assert value.path.read_bytes() == other
    assert torch.equal(tensor, before)
    away.replace(value.path)
    _add_one(value, DiskBuffers(3, CHUNK))
    value.complete()
    value.commit()
    assert torch.equal(tensor, before + 1)


def test_what_a_step_has_not_written_is_checked_later_too(tmp_path: Path) -> None:
    value, _tensor, _folder = _value(tmp_path)
    for skipped in (1, 4):
        _add_one(value, DiskBuffers(3, CHUNK), skipped)
        value.complete()
        value.commit()
    ends = [start + length for start, length in value.ranges()]
    assert [0, *ends] == [*(start for start, _ in value.ranges()), 4 * NUM_ELEMENTS]
    for at in range(50, 4 * NUM_ELEMENTS, CHUNK // 2):
        with value.path.open("r+b") as file:
            file.seek(value._current * value._slot_bytes + at)
            before = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([before[0] ^ 1]))
            file.flush()
            with pytest.raises(OffloadError, match="are not those that were written"):
                value.read(0, memoryview(bytearray(4 * NUM_ELEMENTS)))
            file.seek(-1, os.SEEK_CUR)
            file.write(before)


def test_direct_io_that_a_file_system_refuses_is_done_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwritev

    def refuse(descriptor: int, buffers: Any, offset: int) -> int:
        if os.O_DIRECT & int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[3], 8):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    value, tensor, _folder = _value(tmp_path)
    for _ in range(2):
        _add_one(value, DiskBuffers(3, CHUNK))
        value.complete()
        value.commit()
    assert torch.equal(tensor, torch.full((NUM_ELEMENTS,), 2.0))


def test_a_value_that_goes_while_it_is_written_keeps_its_file_open_until_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, write = threading.Event(), threading.Event(), os.pwritev

    def slow(descriptor: int, buffers: Any, offset: int) -> int:
        begun.set()
        assert go.wait(60)
        return write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    value, tensor, folder = _value(tmp_path)
    pending = value.start_write(0, DiskBuffers(1, CHUNK).take())
    number = value._file.number
    inode = os.fstat(number).st_ino
    assert begun.wait(60)
    del tensor
    gc.collect()
    assert os.fstat(number).st_ino == inode  # no other file has taken its place
    assert not value.path.exists()
    go.set()
    pending.settle()
    _wait_for(lambda: not _is_open(number, inode))
    del folder


def test_a_fork_that_drops_a_value_leaves_its_parents_file(tmp_path: Path) -> None:
    value, tensor, _folder = _value(tmp_path)
    child = os.fork()
    if not child:
        del tensor
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    _add_one(value, DiskBuffers(3, CHUNK))
    value.complete()
    value.commit()
    assert torch.equal(tensor, torch.ones(NUM_ELEMENTS))


def test_without_threads_or_memory_to_begin_a_read_or_write_nothing_is_taken_and_later_ones_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = DiskHome(Transfers(torch.device("cpu")), tmp_path)
    values = home.zeros(NUM_ELEMENTS, torch.float32)
    staged = torch.ones(1000)
    uses: list[Callable[..., None]] = [home.fetch, home.store]

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for use in uses:
        with monkeypatch.context() as patch:
            patch.setattr(disk.mmap, "mmap", refuse)
            with pytest.raises(OffloadError, match="no memory for buffers"):
                use(values, 0, staged)
            home.abandon()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        disk._threads.cache_clear()
        for use in uses * 2 * DISK_BUFFERS:
            with pytest.raises(OffloadError, match="can't start new thread"):
                use(values, 0, staged)
            home.abandon()
    staged.fill_(1)
    home.store(values, 0, staged)
    home.complete()
    home.commit()
    home.fetch(values, 0, staged.zero_())
    assert torch.equal(staged, torch.ones(1000))
    number = next(iter(home._values.values()))._file.number
    inode = os.fstat(number).st_ino
    del values
    gc.collect()
    _wait_for(lambda: not _is_open(number, inode))  # nobody uses it any more


def test_a_value_that_cannot_be_mapped_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(value: DiskValue, _address: int | None, _slot: int) -> int:
        raise OffloadError(f"{value.path} cannot be mapped")

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(DiskValue, "_map", refuse)
    with pytest.raises(OffloadError, match="cannot be mapped"):
        DiskValue(tmp_path / "value", NUM_ELEMENTS, torch.float32)
    assert not list(tmp_path.iterdir())
    assert sorted(os.listdir("/proc/self/fd")) == before


def _is_open(number: int, inode: int) -> bool:
    try:
        return os.fstat(number).st_ino == inode
    except OSError:
        return False


def _wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def test_buffers_are_aligned_registered_once_and_bounded(tmp_path: Path) -> None:
    registered: list[tuple[int, int]] = []
    buffers = DiskBuffers(2, 5000, lambda address, size: registered.append((address, size)))
    ((address, size),) = registered
    assert (address % 4096, size) == (0, 2 * 8192)
    first, second = buffers.take(), buffers.take()
    assert {ctypes.addressof(ctypes.c_char.from_buffer(b)) for b in (first, second)} == {
        *(address, address + 8192)
    }
    with pytest.raises(AssertionError, match="all buffers are in use"):
        buffers.take()
    value, _tensor, _folder = _value(tmp_path)
    buffers.give(first, value.start_write(0, first).settle)
    assert buffers.take() is first
    value.complete()
    assert bytes(value.path.read_bytes()[value._slot_bytes :][:8192]) == bytes(first)


def test_buffers_are_unlocked_behind_the_last_copy_when_larger_ones_take_their_place(tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []

    def lock(address: int, _: int) -> bool:
        events.append(("locked", address))
        return True

    copied = mock.Mock(synchronize=lambda: events.append(("copied", 0)))
    with (
        mock.patch.object(disk_home, "lock_pages", lock),
        mock.patch.object(disk_home, "unlock_pages", lambda address: events.append(("unlocked", address))),
        mock.patch.object(Transfers, "mark_up", return_value=copied),
    ):
        home = DiskHome(Transfers(torch.device("cpu")), tmp_path)
        home.compute_device = torch.device("cuda")
        values = home.zeros(8192, torch.float32)
        home.fetch(values, 0, torch.empty(1024))
        small = events[0][1]
        assert events == [("locked", small)]
        home.fetch(values, 0, torch.empty(8192))
        large = events[2][1]
        assert events[1:] == [("copied", 0), ("locked", large), ("unlocked", small)]
        del home
        assert events[4:] == [("copied", 0), ("unlocked", large)]


def test_threads_that_wait_for_copies_of_a_gpu_leave_their_cores_to_others(tmp_path: Path) -> None:
    """Torch's events keep a core busy while a thread waits, by default."""
    home = DiskHome(Transfers(torch.device("cpu")), tmp_path)
    values = home.zeros(4096, torch.float32)
    home.transfers._down = stream = mock.Mock()
    with mock.patch.object(torch.cuda, "Event", lambda blocking: ("event", blocking)):
        home.store(values, 0, torch.ones(4096))
    home.complete()
    stream.record_event.assert_called_once_with(("event", True))
    stream.record_event.return_value.synchronize.assert_called_once_with()


def test_more_ranges_than_buffers_are_read_once_each_before_they_are_fetched(tmp_path: Path) -> None:
    home = DiskHome(Transfers(torch.device("cpu")), tmp_path)
    values = home.zeros(4096 * 3 * DISK_BUFFERS, torch.float32)
    values.copy_(torch.arange(len(values)))
    starts = range(0, len(values), 4096)
    ahead = DISK_BUFFERS + DISK_BUFFERS // 2
    for start in starts[:ahead]:
        home.read_ahead(values, start, 4096)
    staged = torch.empty(4096)
    for number, start in enumerate(starts):
        assert (values.data_ptr(), 4 * start, 4 * 4096) in home._ahead
        home.fetch(values, start, staged)
        assert torch.equal(staged, values[start : start + 4096])
        for later in starts[number + ahead : number + ahead + 1]:
            home.read_ahead(values, later, 4096)
        if number == DISK_BUFFERS:  # a step that fails leaves nothing announced
            home.abandon()
            assert not home._ahead
            assert not home._wanted
            for later in starts[number + 1 : number + 1 + ahead]:
                home.read_ahead(values, later, 4096)


def test_checksums_that_take_long_do_not_keep_the_disk_from_other_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write, transferred, crc32 = threading.Event(), os.pwritev, threading.Semaphore(0), disk.crc32

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        transferred.release()
        return write(descriptor, buffers, offset)

    def slow(data: Any, before: int = 0) -> int:
        assert go.wait(60)
        return int(crc32(data, before))

    monkeypatch.setattr(os, "pwritev", counted)
    monkeypatch.setattr(disk, "crc32", slow)
    value, _tensor, _folder = _value(tmp_path)
    buffers = DiskBuffers(5, CHUNK)
    try:
        for start, length in _ranges()[:5]:  # more than four at a time, the cores of a small host
            value.start_write(start, buffers.take()[:length])
        for _ in range(5):
            assert transferred.acquire(timeout=10)
    finally:
        go.set()
    value.complete()


def _with_few_open_files(folder: Path, may_raise: bool) -> Any:
    """Values on disk where only three more files may be open than are."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(int(name) for name in os.listdir("/proc/self/fd")) + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1] if may_raise else soft))
    folder.mkdir()
    held: list[int] = []  # descriptors below the highest may be free
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(3):
        os.close(held.pop())
    try:
        values = [DiskValue(folder / f"{my_rank()}-{number}", 64, torch.float32) for number in range(16)]
        tensors = [value.tensor() for value in values]
        return len(tensors), resource.getrlimit(resource.RLIMIT_NOFILE)[0] > soft
    except OffloadError as error:
        return str(error)
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_more_values_than_open_files_are_allowed_raise_the_limit_or_name_it(tmp_path: Path) -> None:
    """In processes of their own: a limit that was lowered cannot be raised again."""
    assert ranks.run(_with_few_open_files, 1, tmp_path / "a", True, fresh=True) == [(16, True)]
    [message] = ranks.run(_with_few_open_files, 1, tmp_path / "b", False, fresh=True)
    assert "Too many open files" in message
    assert "ulimit -n" in message
