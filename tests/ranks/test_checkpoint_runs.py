"""Several runs in one folder, damaged checkpoints that are passed over, and links out of a folder."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import checkpoint_crashes as crashes
import ranks
from fullshard.checkpoint import commit, dcp, ownership
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.hugging_face import folders
from fullshard.checkpoint.loading.opening import open_checkpoint
from fullshard.checkpoint.tools.verifying import verify
from fullshard.errors import CheckpointError


def _names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def _saved(
    root: Path, names: list[str], keep_last: int | None = None, resume: str = "", is_resumed: bool = True
) -> Any:
    """One run: it may resume from a checkpoint, and then saves."""
    import fullshard as fs

    ownership._owner.forget()  # as in a process of its own: the tests' processes are used again
    model, optimizer = crashes.made()
    if resume:
        fs.load(root / resume, model, optimizer if is_resumed else None)
    for name in names:
        number = int(name.rpartition("-")[2])
        crashes.fill(model, optimizer, number)
        fs.save(root / name, model, optimizer, extra={"number": number}, keep_last=keep_last)
    return _names(root)


# --- whose checkpoints keep_last removes ------------------------------------------------------------------


def test_keep_last_of_one_run_leaves_the_checkpoints_of_another(tmp_path: Path) -> None:
    ranks.run(_saved, 2, tmp_path, ["a-1", "a-2"])
    [names] = ranks.run(_saved, 1, tmp_path, ["b-1", "b-2", "b-3"], 1)
    assert names == ["a-1", "a-2", "b-3"]
    # Resumed on other ranks, in a new process, the first run goes on with its own.
    names, _ = ranks.run(_saved, 2, tmp_path, ["a-3", "a-4"], 2, "a-2")
    assert names == ["a-3", "a-4", "b-3"]
    # Initial values are no resume.
    [names] = ranks.run(_saved, 1, tmp_path, ["c-1", "c-2"], 1, "a-4", False)
    assert names == ["a-3", "a-4", "b-3", "c-2"]
    # From an earlier one: what came after it is left alone.
    [names] = ranks.run(_saved, 1, tmp_path, ["a-9"], 1, "a-3")
    assert names == ["a-4", "a-9", "b-3", "c-2"]


def _without_run(folder: Path) -> None:
    saved = commit.read_manifest(folder)
    layout = {k: v for k, v in saved.layout.items() if k not in ("run", "writer")}
    (folder / manifest.NAME).write_bytes(manifest.to_bytes(replace(saved, layout=layout)))


def test_checkpoints_of_earlier_versions_are_taken_over_by_the_run_that_resumes(tmp_path: Path) -> None:
    ranks.run(_saved, 1, tmp_path, ["old-1", "old-2"])
    for name in ("old-1", "old-2"):
        _without_run(tmp_path / name)
    [names] = ranks.run(_saved, 1, tmp_path, ["new-3"], 1)
    assert names == ["new-3", "old-1", "old-2"]
    [names] = ranks.run(_saved, 1, tmp_path, ["old-4"], 1, "old-2")
    assert names == ["new-3", "old-4"]


def _waited(path: Path) -> None:
    until = time.monotonic() + 40
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def _resumed_twice(root: Path, flags: Path) -> Any:
    """Two processes that resumed one run, alive at the same time."""
    import fullshard as fs

    me = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    model, optimizer = crashes.made()
    fs.load(root / "a-1", model, optimizer)
    (flags / f"loaded-{me}").touch()
    _waited(flags / "loaded-1")  # the first removes what the second loads
    if me == 1:
        _waited(flags / "0")
    for number in (2, 3):
        fs.save(root / f"{me}-{number}", model, optimizer, keep_last=1)
    refused = ""
    if me == 1:
        try:
            fs.save(root / "0-3", model, optimizer)
        except CheckpointError as error:
            refused = str(error)
    fs.save(root / f"{me}-3", model, optimizer)  # its own may be replaced
    (flags / str(me)).touch()
    _waited(flags / "1")  # the first lives until the second is done
    return refused, _names(root)


def test_two_processes_of_one_run_neither_remove_nor_replace_each_others_checkpoints(tmp_path: Path) -> None:
    root, flags = tmp_path / "root", tmp_path / "flags"
    flags.mkdir()
    ranks.run(_saved, 1, root, ["a-1"])
    (_, _), (refused, names) = ranks.run(_resumed_twice, 2, root, flags)
    assert names == ["0-3", "1-3"]
    assert "still running" in refused
    assert "process" in refused
    # Both have ended: the lock of a process does not outlive it.
    [names] = ranks.run(_saved, 1, root, ["0-3"])
    assert names == ["0-3", "1-3"]


def _forks(root: Path) -> bool:
    """A worker that was forked does not hold what its parent held."""
    import fullshard as fs
    from fullshard.checkpoint.files import FolderLock

    model, _ = crashes.made()
    fs.save(root / "a-1", model)
    held = FolderLock.is_held(root / "a-1")
    (ready, begun), (go_on, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun, b"x")
        os.read(go_on, 1)
        os._exit(0)
    os.read(ready, 1)
    ownership.let_go(root / "a-1")
    still = FolderLock.is_held(root / "a-1")
    os.write(end, b"x")
    os.waitpid(child, 0)
    return held and not still


def test_locks_end_with_the_process_that_took_them_not_with_its_workers(tmp_path: Path) -> None:
    assert ranks.run(_forks, 1, tmp_path) == [True]


# --- fs.latest(verify=True) -------------------------------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a changed byte": lambda f: _flip(f / "model.safetensors", -3),
    "a changed byte of the optimizer": lambda f: _flip(f / "optimizer.safetensors", -3),
    "cut short": lambda f: os.truncate(f / "optimizer.safetensors", 100),
    "a missing file": lambda f: (f / "model.safetensors").unlink(),
    "a changed manifest": lambda f: _flip(f / manifest.NAME, 200),
    "an empty manifest": lambda f: (f / manifest.NAME).write_bytes(b""),
    "a pipe": lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")),
}


def _latest(root: Path, kinds: list[str]) -> list[Any]:
    import fullshard as fs

    found = []
    for kind in kinds:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                newest = fs.latest(root / kind, verify=True)
            except CheckpointError as error:
                newest = f"{type(error).__name__}: {error.what}"  # type: ignore[assignment]
        found.append((str(newest), [str(one.message) for one in heard]))
    return found


def test_the_newest_checkpoint_that_is_right_is_found_and_the_others_are_named(tmp_path: Path) -> None:
    ranks.run(_saved, 2, tmp_path / "made", ["s-1", "s-2", "s-3"])
    kinds = [*DAMAGE, "nothing", "everything", "empty", "two"]
    for kind in kinds:
        shutil.copytree(tmp_path / "made", tmp_path / kind)
    for kind, damage in DAMAGE.items():
        damage(tmp_path / kind / "s-3")
    for name in ("s-1", "s-2", "s-3"):
        DAMAGE["a changed byte"](tmp_path / "everything" / name)
        shutil.rmtree(tmp_path / "empty" / name)
    DAMAGE["a changed byte"](tmp_path / "two" / "s-3")
    DAMAGE["cut short"](tmp_path / "two" / "s-2")
    before = {kind: _names(tmp_path / kind) for kind in kinds}
    first, second = ranks.run(_latest, 2, tmp_path, kinds, init=True)
    for kind, (newest, heard), (other, _) in zip(kinds, first, second, strict=True):
        assert newest == other, kind
        if kind in DAMAGE:
            assert Path(newest).name == "s-2", (kind, newest)
            assert any("s-3" in text for text in heard), (kind, heard)
    by_kind = dict(zip(kinds, first, strict=True))
    assert Path(by_kind["nothing"][0]).name == "s-3"
    assert by_kind["nothing"][1] == []
    assert by_kind["empty"][0] == "None"
    assert Path(by_kind["two"][0]).name == "s-1"
    assert "DamagedCheckpoint" in by_kind["everything"][0]
    assert {kind: _names(tmp_path / kind) for kind in kinds} == before
    # A run that falls back does not remove what it passed over.
    [names] = ranks.run(_saved, 1, tmp_path / "two", ["s-4"], 1, "s-1")
    assert names == ["s-2", "s-3", "s-4"]


def test_verify_of_a_folder_checks_every_checkpoint_in_it(tmp_path: Path) -> None:
    ranks.run(_saved, 1, tmp_path, ["s-1", "s-2", "s-3"])
    (tmp_path / ".s-4.saving-0123456789abcdef").mkdir()
    report = verify(tmp_path)
    assert not report.damaged
    assert "3 checkpoints, all sound" in report.text()
    _flip(tmp_path / "s-2" / "model.safetensors", -3)
    (tmp_path / "s-1" / manifest.NAME).write_bytes(b"")
    report = verify(tmp_path)
    assert report.damaged
    assert "2 DAMAGED" in report.text()
    by_name = {Path(entry["path"]).name: entry.get("sound") for entry in report.data()["checkpoints"]}
    assert by_name == {"s-1": False, "s-2": False, "s-3": True, ".s-4.saving-0123456789abcdef": None}


# --- links -------------------------------------------------------------------------------------------------


def _moved_out(path: Path, relative: bool) -> None:
    outside = path.parent.parent / "outside"
    outside.mkdir(exist_ok=True)
    path.rename(outside / path.name)
    path.symlink_to(Path("..") / "outside" / path.name if relative else outside / path.name)


def _loads(path: Path, follow_links: bool) -> str:
    import fullshard as fs

    model, optimizer = crashes.made()
    try:
        fs.load(path, model, optimizer, follow_links=follow_links)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("relative", [True, False])
def test_links_out_of_a_checkpoint_are_refused_unless_asked_for(tmp_path: Path, relative: bool) -> None:
    ranks.run(_saved, 1, tmp_path, ["s-1"])
    for name in ("model.safetensors", "optimizer.safetensors", manifest.NAME):
        copy = tmp_path / f"copy-{name}"
        shutil.copytree(tmp_path / "s-1", copy)
        _moved_out(copy / name, relative)
        [refused] = ranks.run(_loads, 1, copy, False)
        assert "leads out of its folder" in refused, name
        assert name in refused
        assert "follow_links" in refused
        assert ranks.run(_loads, 1, copy, True) == [""], name
        with pytest.raises(CheckpointError, match="leads out"):
            verify(copy)
        shutil.rmtree(tmp_path / "outside")
    # A link inside the folder, and a path that is a link itself, are the user's own business.
    inside = tmp_path / "inside"
    shutil.copytree(tmp_path / "s-1", inside)
    (inside / "model.safetensors").rename(inside / "elsewhere.safetensors")
    (inside / "model.safetensors").symlink_to("elsewhere.safetensors")
    (tmp_path / "link").symlink_to(tmp_path / "s-1")
    for path in (inside, tmp_path / "link"):
        assert ranks.run(_loads, 1, path, False) == [""]


def test_latest_does_not_follow_links_out_of_its_folder(tmp_path: Path) -> None:
    import fullshard as fs

    root = tmp_path / "root"
    ranks.run(_saved, 1, root, ["s-1"])
    ranks.run(_saved, 1, tmp_path / "other", ["s-2"])
    (root / "best").symlink_to("s-1")
    (root / "s-2").symlink_to(tmp_path / "other" / "s-2")
    with pytest.warns(UserWarning, match="leads out of its folder"):
        newest = fs.latest(root)
    assert newest is not None
    assert newest.name in ("s-1", "best")
    assert fs.latest(root, follow_links=True) == root / "s-2"


def test_files_of_other_libraries_are_not_read_through_links_out_of_their_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    save_file({"w": torch.ones(2)}, secret)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").symlink_to(secret)
    with pytest.raises(CheckpointError, match="leads out"):
        folders.open_model(model)
    folders.open_model(model / "model.safetensors").close()  # named by the user
    saved = tmp_path / "dcp"
    saved.mkdir()
    (tmp_path / "metadata").write_bytes(b"")
    (saved / ".metadata").symlink_to(tmp_path / "metadata")
    with pytest.raises(CheckpointError, match="leads out"):
        dcp.open_dcp(saved)


def test_snapshots_of_a_hugging_face_cache_are_read(tmp_path: Path) -> None:
    cache = tmp_path / "models--me--mine"
    snapshot = cache / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    save_file({"w": torch.ones(2)}, cache / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/abc"))
    source = folders.open_model(snapshot)
    assert list(source.model) == ["w"]
    source.close()
    (tmp_path / "evil").write_bytes((cache / "blobs" / "abc").read_bytes())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "evil")
    with pytest.raises(CheckpointError, match="leads out"):
        folders.open_model(snapshot)
    with pytest.raises(CheckpointError):
        open_checkpoint(snapshot)
