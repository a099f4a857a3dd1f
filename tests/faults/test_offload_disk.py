"""A disk that fails in a step: every rank raises, and model and optimizer are as before it."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engines
import fullshard as fs
import ranks
from engines import my_rank
from fullshard.errors import OffloadError

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
    links = [Path(os.readlink(entry)) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
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
        for name, (fault, message) in FAULTS.items():
            for first in (True, False):
                if first and name == "changed bytes":
                    continue  # the first step has written nothing that it could know again
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
                    assert all(map(torch.equal, mine, expected[f"{precision}, {first}"])), where


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
    print("ready", flush=True)
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
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        assert len(list(tmp_path.iterdir())) == 2
        started[0].kill()
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
