"""A crash at any instant leaves a checkpoint that loads and is right: the old one or the new one, whole.

Two ways to crash. Real processes are killed at random instants of real saves. And each operation of a save on
disk is written down, the folder is built anew as each prefix of them would have left it, or as a power cut
would have, and what is found there is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import checkpoint_crashes as crashes
import ranks
from checkpoint_crashes import Recorder, Step, Tree, after_crash, after_power_cut
from engines import my_rank

OLD, NEW, NEXT = 1, 2, 3  # a checkpoint's number says which values it must hold


# --- killed ---------------------------------------------------------------------------------------------

WIDTH, BLOCKS = 512, 8  # 8.4 MB of parameters, 25 MB with the optimizer's state: mostly writing
SLOW_S = 0.004  # before each operation on disk, so that kills fall into all of them
LATEST = 1.15  # of the time of the save before it, which had nothing to replace and nothing to remove
ENDS_S = 30.0  # what the ranks that were not killed get to end by themselves


@dataclass(frozen=True)
class Trial:
    """One save that is interrupted, drawn from a seed."""

    seed: int
    victims: tuple[int, ...]
    moment: float  # of the time that a save takes
    overwrites: bool
    keep_last: int | None
    background: bool
    files: str
    can_exchange: bool
    load_ranks: int

    @classmethod
    def draw(cls, seed: int) -> Trial:
        chance = random.Random(seed)
        # A launcher that sees one rank die kills the others: often all go at once. If only the second rank
        # dies, the first cleans up, and nothing torn is left to be found.
        victims = chance.choice(((0,), (0,), (1,), (0, 1), (0, 1)))
        return cls(
            seed,
            victims,
            LATEST * chance.random(),
            overwrites=chance.random() < 0.5,
            keep_last=chance.choice((None, None, 1, 2)),
            background=chance.random() < 0.4,
            files=chance.choice(("shared", "shared", "parts")),
            can_exchange=chance.random() < 0.6,
            load_ranks=3 if seed % 10 == 0 else 1,
        )

    def name(self, number: int) -> str:
        return "last" if self.overwrites and number != NEXT else f"step-{number}"


def _saves_until_killed(folder: Path, trial: Trial) -> str:
    import torch.distributed as dist

    import fullshard as fs

    model, optimizer = crashes.made(WIDTH, BLOCKS)
    with crashes.using(crashes.slow(SLOW_S, trial.can_exchange)):
        crashes.fill(model, optimizer, OLD)
        began = time.monotonic()
        root = folder / "root"
        fs.save(root / trial.name(OLD), model, optimizer, extra={"number": OLD}, files=trial.files)
        took = time.monotonic() - began
        crashes.fill(model, optimizer, NEW)
        dist.barrier()
        said = folder / f"rank-{my_rank()}"
        said.with_suffix(".new").write_text(json.dumps([os.getpid(), took]))
        said.with_suffix(".new").rename(said)
        saving = fs.save(
            root / trial.name(NEW),
            model,
            optimizer,
            extra={"number": NEW},
            files=trial.files,
            keep_last=trial.keep_last,
            background=trial.background,
        )
        saving.wait()
    return "saved"


class Killer(threading.Thread):
    """Waits until both ranks are about to save, then kills as the trial says."""

    def __init__(self, folder: Path, trial: Trial) -> None:
        super().__init__(daemon=True)
        self._folder, self._trial = folder, trial
        self.over = threading.Event()
        self.killed_at = 0.0

    def run(self) -> None:
        said = [self._folder / f"rank-{rank}" for rank in (0, 1)]
        while not all(path.exists() for path in said):
            if self.over.wait(0.001):
                return
        found = [json.loads(path.read_text()) for path in said]
        if self.over.wait(self._trial.moment * found[0][1]):
            return
        self.killed_at = time.monotonic()
        for victim in self._trial.victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[victim][0], signal.SIGKILL)


def _loads_what_was_left(root: Path, allowed: tuple[int, ...]) -> int:
    """The newest checkpoint loads and is right; then a save works and tidies up. Its number."""
    import fullshard as fs

    if os.environ["WORLD_SIZE"] == "1":
        del os.environ["RANK"], os.environ["WORLD_SIZE"]  # then there is no port that somebody could take
    model, optimizer = crashes.made(WIDTH, BLOCKS)
    number = _sound(root, model, optimizer, allowed)
    crashes.fill(model, optimizer, NEXT)
    fs.save(root / f"step-{NEXT}", model, optimizer, extra={"number": NEXT})
    assert crashes.hidden(root) == []
    assert _sound(root, model, optimizer, (NEXT,)) == NEXT
    return number


def _sound(root: Path, model: Any, optimizer: Any, allowed: tuple[int, ...]) -> int:
    """What fs.latest finds is one of these checkpoints in every bit."""
    import fullshard as fs
    from fullshard.checkpoint import commit

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random numbers were left")  # other ranks than saved
        warnings.filterwarnings("error", message=".*is skipped")
        newest = fs.latest(root)
        assert newest is not None, f"no checkpoint in {root}: {os.listdir(root)}"
        crashes.forget(model, optimizer)
        number = fs.load(newest, model, optimizer)["number"]
    assert number in allowed, f"{newest} is checkpoint {number}; expected one of {allowed}"
    crashes.assert_filled(model, optimizer, number)
    crashes.assert_plain_files(commit.find(newest), number)
    return int(number)


@dataclass(frozen=True)
class Result:
    number: int
    torn: bool
    ended_after_s: float


def _run(trial: Trial, folder: Path) -> Result:
    folder.mkdir()
    root, killer = folder / "root", Killer(folder, trial)
    killer.start()
    try:
        result = ranks.outcome(_saves_until_killed, 2, folder, trial, timeout_s=60.0)
        ended = time.monotonic()
    finally:
        killer.over.set()
        killer.join()
    if any(error.type_name == "DistNetworkError" for error in result.errors.values()):
        shutil.rmtree(folder)  # another process took the port before the ranks did; rare, but so many times
        return _run(trial, folder)
    for rank, error in result.errors.items():
        if rank in trial.victims and error.type_name == "Exit":
            assert "-9" in error.message, error
        else:
            assert error.is_a("FullshardError"), f"rank {rank} of {trial}: {error}\n{error.traceback}"
    if killer.killed_at:
        assert ended - killer.killed_at < ENDS_S
    torn = any(".saving-" in name for name in crashes.hidden(root))
    crashes.age(root)
    # Once it has returned on a rank it is there for good.
    allowed = (NEW,) if "saved" in result.values.values() else (OLD, NEW)
    numbers = ranks.run(_loads_what_was_left, trial.load_ranks, root, allowed)
    shutil.rmtree(folder)
    return Result(numbers[0], torn, ended - killer.killed_at if killer.killed_at else 0.0)


def _campaign(seeds: range, folder: Path) -> list[Result]:
    results = []
    for seed in seeds:
        trial = Trial.draw(seed)
        try:
            results.append(_run(trial, folder / str(seed)))
        except AssertionError as error:
            raise AssertionError(f"{trial}: {error}") from error
    return results


def _torn(results: list[Result]) -> int:
    torn = sum(result.torn for result in results)
    slowest = max(result.ended_after_s for result in results)
    old = sum(result.number == OLD for result in results)
    print(
        f"{len(results)} kills: {torn} left a torn folder, {old} times the old checkpoint was the newest; "
        f"the others ended within {slowest:.1f} s"
    )
    return torn


@pytest.mark.long
def test_save_killed_at_a_random_instant_leaves_the_newest_checkpoint_whole(tmp_path: Path) -> None:
    assert _torn(_campaign(range(1, 5), tmp_path)) > 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_saves_killed_at_random_instants_leave_the_newest_checkpoint_whole(
    tmp_path: Path,
) -> None:
    assert _torn(_campaign(range(1000, 1200), tmp_path)) >= 100


def _killed_in_a_write(root: Path, victim: int) -> None:
    import fullshard as fs

    model, optimizer = crashes.made(width=16, blocks=4)
    crashes.fill(model, optimizer, NEW)

    def hook(operation: str, path: Path) -> None:
        if my_rank() == victim and operation == "write":
            os.kill(os.getpid(), signal.SIGKILL)

    with crashes.using(crashes.HookedDisk(hook)):
        fs.save(root / "new", model, optimizer, files="shared")


def test_every_rank_hears_of_a_killed_one_although_its_neighbours_live_on(tmp_path: Path) -> None:
    # A rank that has got its error stays, as one would that handles it: its connections stay open, too.
    result = ranks.outcome(_killed_in_a_write, 4, tmp_path, 2, timeout_s=ENDS_S)
    assert result.errors.pop(2).type_name == "Exit"
    assert sorted(result.errors) == [0, 1, 3]
    for rank, error in result.errors.items():
        assert error.type_name == "Stalled", f"rank {rank}: {error}"
        assert "rank 2: process has exited" in error.message, error.message


def _dies_after_the_commit(root: Path) -> None:
    """The second rank is killed when the first has given the checkpoint its name."""
    import torch.distributed as dist

    import fullshard as fs
    from fullshard.comm.recorder_files import start_time

    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    fs.save(root / "last", model, optimizer, extra={"number": OLD})
    crashes.fill(model, optimizer, NEW)
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())

    def hook(operation: str, path: Path) -> None:
        if operation == "sync_folder" and path == root:
            with contextlib.suppress(ProcessLookupError):  # it was killed in an earlier call
                os.kill(processes[1], signal.SIGKILL)
            while start_time(processes[1]) is not None:  # until it is gone
                time.sleep(0.01)

    with crashes.using(crashes.HookedDisk(hook)):
        fs.save(root / "last", model, optimizer, extra={"number": NEW})


def _look_at(root: Path) -> int:
    return _sound(root, *crashes.made(), (OLD, NEW))


@pytest.mark.filterwarnings("ignore:.*random numbers were left")
def test_rank_that_dies_after_the_commit_does_not_undo_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    result = ranks.outcome(_dies_after_the_commit, 2, root, timeout_s=ENDS_S)
    assert result.errors[1].type_name == "Exit"
    assert result.errors[0].type_name == "Stalled", result.errors[0]
    assert ranks.run(_look_at, 1, root) == [NEW]
    assert os.listdir(root) == ["last"]


def _saved(root: Path, name: str) -> None:
    import fullshard as fs

    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    fs.save(root / name, model, optimizer, extra={"number": OLD})


HIDDEN = ".step-1.saving-0123456789abcdef"


def test_folder_whose_manifest_was_only_begun_is_never_given_a_name(tmp_path: Path) -> None:
    import fullshard as fs
    from fullshard.checkpoint import commit

    ranks.run(_saved, 1, tmp_path, "step-1", fresh=True)  # it holds its newest checkpoint while it lives
    whole = (tmp_path / "step-1" / "fullshard.json").read_bytes()
    (tmp_path / "step-1").rename(tmp_path / HIDDEN)
    for written in (0, 1, len(whole) // 2, len(whole) - 1):
        (tmp_path / HIDDEN / "fullshard.json").write_bytes(whole[:written])
        assert fs.latest(tmp_path) is None
        assert commit.find(tmp_path / "step-1") == tmp_path / "step-1"
    commit.clean_up(tmp_path)
    assert os.listdir(tmp_path) == []


def test_checkpoint_under_a_hidden_name_is_found_by_its_own_and_given_it_by_the_next_save(
    tmp_path: Path,
) -> None:
    import fullshard as fs
    from fullshard.checkpoint import commit

    ranks.run(_saved, 1, tmp_path, "step-1", fresh=True)  # it holds its newest checkpoint while it lives
    (tmp_path / "step-1").rename(tmp_path / HIDDEN)
    assert fs.latest(tmp_path) == tmp_path / "step-1"
    assert ranks.run(_look_at, 1, tmp_path) == [OLD]
    (tmp_path / "step-1").mkdir()  # somebody has put something else there
    (tmp_path / "step-1" / "notes").touch()
    commit.clean_up(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [HIDDEN, "step-1"]
    shutil.rmtree(tmp_path / "step-1")
    commit.clean_up(tmp_path)
    assert os.listdir(tmp_path) == ["step-1"]


# --- stopped after every operation ------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """What is in the folder before, and the save that is interrupted."""

    before: tuple[str, ...]  # names of checkpoints that are there, saved in this order
    name: str
    ranks: int = 1
    keep_last: int | None = None
    files: str = "shared"
    can_exchange: bool = True

    def number(self, name: str) -> int:
        """The last one before is OLD; those before it have lower odd numbers."""
        return OLD - (len(self.before) - 1 - self.before.index(name)) * 2


SCENES = {
    "first save of all": Scene((), "step-2"),
    "new name": Scene(("step-1",), "step-2"),
    "same name": Scene(("last",), "last"),
    "same name, file system that cannot exchange": Scene(("last",), "last", can_exchange=False),
    "older ones are removed": Scene(("step-0", "step-1"), "step-2", keep_last=1),
    "older ones are removed, same name": Scene(("step-0", "last"), "last", keep_last=1, can_exchange=False),
    "two ranks, shared files": Scene(("last",), "last", ranks=2),
    "two ranks, parts": Scene(("step-1",), "step-2", ranks=2, keep_last=1, files="parts"),
}
ROOT = "runs/a"  # in the watched folder; the first save of all has to make both


def _recorded(base: Path, scene: Scene) -> tuple[Tree, list[Step]]:
    """What was there, and what this rank did in the save."""
    import torch.distributed as dist

    import fullshard as fs

    model, optimizer = crashes.made()
    root = base / ROOT
    for name in scene.before:
        number = scene.number(name)
        crashes.fill(model, optimizer, number)
        fs.save(root / name, model, optimizer, extra={"number": number}, files=scene.files)
    before, recorder = Tree.read(base), Recorder(base, scene.can_exchange)
    crashes.fill(model, optimizer, NEW)
    if scene.ranks > 1:
        dist.barrier()
    with crashes.using(recorder):
        fs.save(
            root / scene.name,
            model,
            optimizer,
            extra={"number": NEW},
            files=scene.files,
            keep_last=scene.keep_last,
        )
    return before, recorder.log


def _record(scene: Scene, folder: Path) -> tuple[Tree, list[Step]]:
    base = folder / "recorded"
    base.mkdir()
    found = ranks.run(_recorded, scene.ranks, base, scene)
    log = crashes.merged([steps for _, steps in found])
    before = found[0][0]
    assert after_crash(before, log).digest() == Tree.read(base).digest(), "the log is not all that was done"
    return before, log


def _committed_at(scene: Scene, log: list[Step]) -> int:
    """How many operations it takes until the new checkpoint must survive anything."""
    target = f"{ROOT}/{scene.name}"
    named = next(i for i, s in enumerate(log) if s.other == target)
    return 1 + next(i for i, s in enumerate(log) if i > named and (s.kind, s.path) == ("sync_folder", ROOT))


class Replay:
    """On one rank: builds folders as crashes leave them, and looks whether they are sound."""

    def __init__(self, folder: Path, scene: Scene) -> None:
        self._folder, self._scene = folder, scene
        self._model, self._optimizer = crashes.made()
        self._seen: set[Any] = set()
        self.checked = 0

    @contextlib.contextmanager
    def built(self, tree: Tree) -> Iterator[Path]:
        base = self._folder / "built"
        tree.write(base)
        try:
            yield base / ROOT
        finally:
            shutil.rmtree(base)

    def is_new(self, tree: Tree, *about: Any) -> bool:
        key = (tree.digest(), *about)
        if key in self._seen:
            return False
        self._seen.add(key)
        self.checked += 1
        return True

    def check(self, tree: Tree, must_be_new: bool, what: str) -> None:
        if self.is_new(tree, must_be_new):
            with self.built(tree) as root:
                try:
                    self._look(root, must_be_new)
                except BaseException as error:
                    found = {p.name: sorted(os.listdir(p)) for p in root.iterdir()} if root.is_dir() else None
                    raise AssertionError(f"{what}: {error}; found {found}") from error

    def _look(self, root: Path, must_be_new: bool) -> None:
        import fullshard as fs

        scene = self._scene
        if not scene.before and not must_be_new and fs.latest(root) is None:
            visible = [p for p in root.iterdir() if not p.name.startswith(".")] if root.is_dir() else []
            assert not visible, f"{visible} are there, but not found"
            return
        allowed = (NEW,) if must_be_new else (OLD, NEW)
        _sound(root, self._model, self._optimizer, allowed)
        for name in scene.before:  # by its name, wherever a crash has left it
            if name != scene.name and scene.keep_last is None:
                self._load(root / name, scene.number(name))
        for folder in root.iterdir():
            if not folder.name.startswith("."):
                number = NEW if folder.name == scene.name else scene.number(folder.name)
                self._load(folder, *({number, OLD} if folder.name in scene.before else {number}))

    def _load(self, path: Path, *numbers: int) -> None:
        import fullshard as fs

        crashes.forget(self._model, self._optimizer)
        number = fs.load(path, self._model, self._optimizer)["number"]
        assert number in numbers, f"{path.name} is checkpoint {number}; expected {numbers}"
        crashes.assert_filled(self._model, self._optimizer, number)

    def check_recovery(self, tree: Tree, must_be_new: bool, what: str, cuts: int) -> None:
        """The next save puts things right; it may crash as well, after any of its operations."""
        from fullshard.checkpoint import commit

        if not self.is_new(tree, "recovery"):
            return
        with self.built(tree) as root:
            if not root.is_dir():
                return
            crashes.age(root)
            recorder = Recorder(root.parent.parent)
            with crashes.using(recorder):
                commit.clean_up(root)
            assert crashes.hidden(root) == [], what
            self._look(root, must_be_new)
            self._save_on(root)
        for count in range(len(recorder.log) + 1):
            again = f"{what}, then after operation {count} of the next save's {len(recorder.log)}"
            self.check(after_crash(tree, recorder.log[:count]), must_be_new, again)
            for seed in range(cuts):
                self.check(after_power_cut(tree, recorder.log[:count], seed), must_be_new, f"{again}, {seed}")

    def _save_on(self, root: Path) -> None:
        import fullshard as fs

        crashes.fill(self._model, self._optimizer, NEXT)
        fs.save(root / self._scene.name, self._model, self._optimizer, extra={"number": NEXT})
        _sound(root, self._model, self._optimizer, (NEXT,))


def _replayed(folder: Path, scene: Scene, before: Tree, log: list[Step], cuts: int) -> int:
    replay, committed = Replay(folder, scene), _committed_at(scene, log)
    manifest = next(i for i, s in enumerate(log) if s.kind == "create" and s.path.endswith("/fullshard.json"))
    for count in range(len(log) + 1):
        # Where one operation decides, most of what could be lost matters: look there more often.
        decisive = manifest < count <= committed
        done, last = log[:count], f" ({log[count - 1].kind} {log[count - 1].path})" if count else ""
        what = f"after operation {count} of {len(log)}{last}"
        replay.check(after_crash(before, done), count >= committed, f"killed {what}")
        replay.check_recovery(after_crash(before, done), count >= committed, f"killed {what}", min(2, cuts))
        for seed in range(cuts * 8 if decisive else cuts):
            tree = after_power_cut(before, done, 1000 * count + seed)
            replay.check(tree, count >= committed, f"power cut {seed} {what}")
            if seed == 0:
                replay.check_recovery(tree, count >= committed, f"power cut {seed} {what}", min(2, cuts))
    return replay.checked


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_save_stopped_after_any_operation_leaves_the_old_or_the_new_checkpoint(
    scene: Scene, tmp_path: Path
) -> None:
    before, log = _record(scene, tmp_path)
    [checked] = ranks.run(_replayed, 1, tmp_path, scene, before, log, 1, timeout_s=120.0)
    print(f"{len(log)} operations, {checked} different folders")
    assert checked > len(log) / 2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_power_cut_in_any_of_many_ways_leaves_the_old_or_the_new_checkpoint(
    scene: Scene, tmp_path: Path
) -> None:
    before, log = _record(scene, tmp_path)
    [checked] = ranks.run(_replayed, 1, tmp_path, scene, before, log, 60, timeout_s=1500.0)
    assert checked > len(log)
