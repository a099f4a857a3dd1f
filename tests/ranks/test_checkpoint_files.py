"""Which files a save writes: one set that all ranks share, or a file for each where they cannot."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fullshard as fs
import ranks
from fullshard.checkpoint import files, save
from fullshard.checkpoint.commit import read_manifest
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.saving import job, writing
from fullshard.comm.control import control_group
from reference import bitwise


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(3)))


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with fs.full(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


class Refusing(files.OpenFile):
    """A file system on which a second writer of a file gets an error."""

    def write_at(self, offset: int, data: memoryview) -> None:
        if torch.distributed.get_rank() == 1 and "probe" in self.name:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        super().write_at(offset, data)


class Losing(Refusing):
    """A file system on which a second writer's bytes are lost without a word."""

    def write_at(self, offset: int, data: memoryview) -> None:
        if torch.distributed.get_rank() != 1 or "probe" not in self.name:
            files.OpenFile.write_at(self, offset, data)


class Odd(files.Disk):
    def __init__(self, kind: type[Refusing]) -> None:
        self._kind = kind

    def open(self, path: Path) -> files.OpenFile:
        file = self._kind(path)
        file.name = path.name
        return file


def _save_where_files_cannot_be_shared(folder: str, kind: str) -> dict[str, torch.Tensor]:
    before, files.disk = files.disk, Odd({"refusing": Refusing, "losing": Losing}[kind])
    job._can_share.clear()
    try:
        model = fs.shard(_model(), units=Block)
        fs.save(folder, model)
        fs.save(folder + "-again", model)  # known by now: not tried again
    finally:
        files.disk = before
        job._can_share.clear()
    fresh = fs.shard(_model(1), units=Block)
    fs.load(folder, fresh)
    assert all(bitwise(value, _whole(model)[name]) for name, value in _whole(fresh).items())
    return _whole(model)


def _each_rank_has_a_file(folder: Path) -> None:
    assert read_manifest(folder).layout["files"] == "parts"
    assert {"part-00000.safetensors", "part-00001.safetensors"} <= set(os.listdir(folder))
    assert "model.safetensors" not in os.listdir(folder)


def test_each_rank_writes_a_file_of_its_own_where_a_shared_one_is_refused(tmp_path: Path) -> None:
    ranks.run(_save_where_files_cannot_be_shared, 2, str(tmp_path / "c"), "refusing")
    _each_rank_has_a_file(tmp_path / "c")
    _each_rank_has_a_file(tmp_path / "c-again")


def test_each_rank_writes_a_file_of_its_own_where_bytes_of_a_shared_one_are_lost(tmp_path: Path) -> None:
    ranks.run(_save_where_files_cannot_be_shared, 2, str(tmp_path / "c"), "losing")
    _each_rank_has_a_file(tmp_path / "c")


def _save_shared(folder: str) -> dict[str, torch.Tensor]:
    model = fs.shard(_model(), units=Block)
    fs.save(folder, model)
    return _whole(model)


def test_plain_file_system_gets_one_set_of_files_and_nothing_else(tmp_path: Path) -> None:
    expected = ranks.run(_save_shared, 3, str(tmp_path / "c"))[0]
    assert sorted(os.listdir(tmp_path)) == ["c"]
    assert sorted(os.listdir(tmp_path / "c")) == [manifest.NAME, "model.safetensors"]
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(bitwise(found[name], value) for name, value in expected.items())


def _not_seen(folder: str) -> None:
    model = fs.shard(_model(), units=Block)
    if torch.distributed.get_rank() == 1:
        before = job._device_of

        def elsewhere(path: Path) -> int:
            return before(path / "of another host")

        job._device_of = elsewhere
    job._can_share.clear()
    fs.save(folder, model)


def test_folder_that_a_rank_does_not_see_is_an_error_that_says_so(tmp_path: Path) -> None:
    errors = ranks.run(_not_seen, 2, str(tmp_path / "c"), expect_error=True)
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert error.is_a("CheckpointError")
        assert "does not see" in error.message
        assert "rank 1" in error.message
    assert os.listdir(tmp_path) == []


def _load(folder: str) -> None:
    fs.load(folder, fs.shard(_model(1), units=Block))


def test_checkpoint_without_its_manifest_is_not_taken_for_a_plain_model(tmp_path: Path) -> None:
    ranks.run(_save_shared, 2, str(tmp_path / "c"))
    (tmp_path / "c" / manifest.NAME).unlink()
    for error in ranks.run(_load, 2, str(tmp_path / "c"), expect_error=True).values():
        assert error.is_a("CheckpointError")
        assert manifest.NAME in error.message
    ranks.run(_load, 2, str(tmp_path / "c" / "model.safetensors"))  # asked for by name: as it is


def _several_files(folder: str) -> dict[str, torch.Tensor]:
    writing.FILE_BYTES = 800
    try:
        model = fs.shard(_model(), units=Block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        fs.save(folder, model, optimizer)
        expected = _whole(model)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        fs.load(folder, model, optimizer)
        assert all(bitwise(value, expected[name]) for name, value in _whole(model).items())
        return expected
    finally:
        writing.FILE_BYTES = 5 * 10**9


def test_large_model_lies_in_several_files_none_larger_than_the_limit(tmp_path: Path) -> None:
    expected = ranks.run(_several_files, 2, str(tmp_path / "c"))[0]
    folder = tmp_path / "c"
    names = sorted(p.name for p in folder.glob("model-*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert len(list(folder.glob("optimizer-*.safetensors"))) == len(names)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        tensors = load_file(folder / name)
        assert sum(t.numel() * 4 for t in tensors.values()) <= 800
        assert not found.keys() & tensors.keys()
        found |= tensors
    assert all(bitwise(found[name], value) for name, value in expected.items())


def _buffer_kept(folder: str) -> Any:
    model = fs.shard(_model(), units=Block)
    places = []
    for number in range(2):
        fs.save(f"{folder}-{number}", model, background=True).wait()
        places.append(control_group(model._fullshard.comm).beside_training().host_copy._buffer.data_ptr())
    return places


def test_background_saves_use_one_host_buffer_again(tmp_path: Path) -> None:
    first, second = ranks.run(_buffer_kept, 1, str(tmp_path / "c"))[0]
    assert first == second


def _full_host(folder: str) -> tuple[list[bool], list[str], dict[str, torch.Tensor]]:
    """The second rank's host has room for nothing until the third save."""
    model, ended = fs.shard(_model(), units=Block), []
    with warnings.catch_warnings(record=True) as given, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(save, "free_bytes", lambda device: 64 if torch.distributed.get_rank() == 1 else 2**40)
        for number in range(2):
            saving = fs.save(f"{folder}-{number}", model, background=True)
            ended.append(saving.done() and Path(f"{folder}-{number}").is_dir())
            with torch.no_grad(), fs.full(model):
                for parameter in model.parameters():
                    parameter.zero_()
    saving = fs.save(f"{folder}-2", model, background=True)
    own = saving._thread is not None
    saving.wait()
    ended.append(own)
    return ended, [str(w.message) for w in given if "fs.save" in str(w.message)], _whole(model)


def test_background_save_without_room_for_copies_writes_before_it_returns_and_says_so_once(
    tmp_path: Path,
) -> None:
    of_first, of_second = ranks.run(_full_host, 2, str(tmp_path / "c"))
    assert of_first[0] == of_second[0] == [True, True, True]
    assert len(of_first[1]) == 1
    assert "a copy of what rank 1 saves would need" in of_first[1][0]
    assert of_second[1] == []
    saved = load_file(tmp_path / "c-0" / "model.safetensors")
    assert all(bitwise(saved[name], value) for name, value in _model().named_parameters())
    assert not any(v.any() for v in load_file(tmp_path / "c-1" / "model.safetensors").values())
