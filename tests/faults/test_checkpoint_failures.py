"""A save or load that cannot succeed says so: one error on every rank, in seconds, and nothing is lost."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import logging
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint_crashes as crashes
import ranks
import warm
from cases import refusal
from engines import my_rank

Refusal = tuple[str, str, str]
LIMIT_S = 60.0
OLD, NEW = 1, 2
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, or become somebody else")


def _meet() -> None:
    import torch.distributed as dist

    if dist.get_world_size() > 1:
        dist.barrier()


def _loads(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> bool:
    """The checkpoint loads, and every value is right."""
    import fullshard as fs

    crashes.forget(model, optimizer)
    fs.load(path, model, optimizer)
    crashes.assert_filled(model, optimizer, number)
    return True


def _assert_named_on_all(found: list[Refusal], culprit: int, *parts: str) -> None:
    """Every rank's error is of one class and names the rank at fault and these parts."""
    assert len({kind for kind, _, _ in found}) == 1, found
    for rank, (_, message, remedy) in enumerate(found):
        assert message.startswith(f"rank {rank}: "), message
        assert f"rank {culprit}" in message, message
        assert remedy, message
        for part in parts:
            assert part in message, message


# --- trouble with the disk of one rank ------------------------------------------------------------------


@contextlib.contextmanager
def _file_size_limit(root: Path) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _somebody_else(root: Path) -> Iterator[None]:
    for folder in (root, *list(root.parents)[:3]):  # pytest's own are closed to others
        folder.chmod(0o755)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def _read_only(root: Path) -> Iterator[None]:
    """The file system is read-only for this thread: it gets mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    private, bind, remount_read_only = 0x44000, 0x1000, 0x1021
    where = os.fsencode(root)

    def done(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    done(libc.unshare(0x20000))
    done(libc.mount(b"none", b"/", None, private, None))
    done(libc.mount(where, where, None, bind, None))
    done(libc.mount(b"none", where, None, remount_read_only, None))
    try:
        yield
    finally:
        done(libc.umount2(where, 2))


def _patched(operation: str) -> Callable[[Path], Any]:
    return lambda root: crashes.using(crashes.failing(operation, errno.ENOSPC))


TROUBLES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "limit on file sizes": (_file_size_limit, "File too large"),
    "no permission": (_somebody_else, "Permission denied"),
    "read-only": (_read_only, "Read-only file system"),
    "disk full when a file is made": (_patched("create"), "No space left on device"),
    "disk full in a write": (_patched("write"), "No space left on device"),
    "disk full in a sync": (_patched("sync"), "No space left on device"),
    "disk full when the folder is named": (_patched("rename"), "No space left on device"),
}


def _in_trouble(root: Path, cases: list[tuple[str, int, str]]) -> list[tuple[Refusal, float, dict[str, Any]]]:
    """For each (trouble, rank that has it, kind of files): the error, how long it took, what was left."""
    import fullshard as fs

    model, optimizer = crashes.made()
    found = []
    for index, (trouble, culprit, kind) in enumerate(cases):
        folder = root / str(index)
        crashes.fill(model, optimizer, OLD)
        fs.save(folder / "old", model, optimizer, files=kind)
        crashes.fill(model, optimizer, NEW)
        before = crashes.contents(folder)
        # As in a process that has not tried yet whether ranks can share a file there.
        importlib.import_module("fullshard.checkpoint.saving.job")._can_share.clear()
        _meet()
        with TROUBLES[trouble][0](folder) if my_rank() == culprit else contextlib.nullcontext():
            began = time.monotonic()
            refused = refusal(
                lambda folder=folder, kind=kind: fs.save(folder / "new", model, optimizer, files=kind)
            )
            took = time.monotonic() - began
        _meet()
        left = {"untouched": crashes.contents(folder) == before, "hidden": crashes.hidden(folder)}
        _meet()
        saved = fs.save(folder / "new", model, optimizer, files=kind).wait()
        left["new"] = _loads(saved, model, optimizer, NEW)
        left["old"] = _loads(folder / "old", model, optimizer, OLD)
        left["in parts"] = (saved / "part-00000.safetensors").exists()
        found.append((refused, took, left))
    return found


def _assert_recovered(cases: list[tuple[str, int, str]], results: list[Any]) -> None:
    for index, (trouble, culprit, kind) in enumerate(cases):
        found = [result[index] for result in results]
        _assert_named_on_all([refused for refused, _, _ in found], culprit, TROUBLES[trouble][1])
        for refused, took, left in found:
            assert refused[0] == "CheckpointError"
            assert took < LIMIT_S, trouble
            expected = {
                "untouched": True,
                "hidden": [],
                "new": True,
                "old": True,
                "in parts": kind == "parts",
            }
            assert left == expected, f"{trouble}, {kind}: {left}"


def test_disk_trouble_of_one_rank_is_raised_by_all_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    cases = [("limit on file sizes", 1, kind) for kind in ("shared", "parts", "auto")]
    cases += [("disk full when a file is made", 0, "shared"), ("disk full when a file is made", 1, "parts")]
    cases += [("disk full in a write", rank, kind) for rank in (0, 1) for kind in ("shared", "auto")]
    cases += [("disk full in a sync", 1, "parts"), ("disk full when the folder is named", 0, "auto")]
    _assert_recovered(cases, ranks.run(_in_trouble, 2, tmp_path, cases))


@needs_root
def test_rank_without_permission_is_named_by_all_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    cases = [("no permission", rank, kind) for rank, kind in ((1, "auto"), (0, "shared"), (1, "parts"))]
    _assert_recovered(cases, ranks.run(_in_trouble, 2, tmp_path, cases))


@needs_root
def test_rank_whose_file_system_is_read_only_is_named_by_all(tmp_path: Path) -> None:
    cases = [("read-only", 1, "auto"), ("read-only", 0, "shared")]
    _assert_recovered(cases, ranks.run(_in_trouble, 2, tmp_path, cases, fresh=True))


@contextlib.contextmanager
def _small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, timeout=30
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def _fills_the_disk(root: Path) -> tuple[Refusal, float, dict[str, Any]]:
    import fullshard as fs

    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    fs.save(root / "last", model, optimizer)
    crashes.fill(model, optimizer, NEW)
    before = crashes.contents(root)
    _meet()
    heavy = torch.ones(2**20 if my_rank() == 1 else 2)  # 4 MiB of values of its own, on rank 1
    began = time.monotonic()
    refused = refusal(lambda: fs.save(root / "last", model, optimizer, extra={"heavy": heavy}))
    took = time.monotonic() - began
    _meet()
    left = {"untouched": crashes.contents(root) == before, "hidden": crashes.hidden(root)}
    left["old"] = _loads(root / "last", model, optimizer, OLD)
    crashes.fill(model, optimizer, NEW)
    left["new"] = _loads(fs.save(root / "last", model, optimizer).wait(), model, optimizer, NEW)
    return refused, took, left


@needs_root
def test_disk_that_is_really_full_is_an_error_on_all_ranks_and_the_old_checkpoint_stays(
    tmp_path: Path,
) -> None:
    with _small_disk(tmp_path / "small", "2m") as root:
        found = ranks.run(_fills_the_disk, 2, root)
    _assert_named_on_all([refused for refused, _, _ in found], 1, "No space left on device")
    for refused, took, left in found:
        assert "Free space" in refused[2]
        assert took < LIMIT_S
        assert left == {"untouched": True, "hidden": [], "old": True, "new": True}


# --- one rank alone calls it ----------------------------------------------------------------------------


def _sleeps(model: nn.Module, over: Path) -> None:
    time.sleep(8.0)


def _sits_in_a_barrier(model: nn.Module, over: Path) -> None:
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):  # when the other process has ended
        dist.barrier()


def _trains(model: nn.Module, over: Path) -> None:
    with contextlib.suppress(RuntimeError):
        model(torch.ones(2, 8)).sum().backward()


def _computes(model: nn.Module, over: Path) -> None:
    until = time.monotonic() + 8.0
    while time.monotonic() < until:  # a third of the time, which counts as computing
        sum(range(100_000))
        time.sleep(0.004)


ELSEWHERE: dict[str, Callable[[nn.Module, Path], None]] = {
    "ends": lambda model, over: None,
    "sleeps": _sleeps,
    "barrier": _sits_in_a_barrier,
    "trains": _trains,
    "computes": _computes,
}
LATE = ("computes", "sleeps")  # and then makes the same call
ALONE = [("save", elsewhere) for elsewhere in ELSEWHERE] + [("load", "barrier"), ("load", "trains")]


def _one_calls(root: Path, ports: list[int]) -> tuple[Refusal | None, float, list[str]]:
    """Pairs of ranks, each pair a run of its own: all that waiting is done at the same time."""
    import fullshard as fs

    pair, me = divmod(my_rank(), 2)
    os.environ.update(RANK=str(me), LOCAL_RANK=str(me), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ["MASTER_PORT"] = str(ports[pair])
    verb, elsewhere = ALONE[pair]
    folder = root / str(pair)
    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    fs.save(folder / "old", model, optimizer)
    if verb == "load":  # a first step is another thing: ranks agree on every gather
        _train(model, optimizer)

    def call() -> Any:
        if verb == "save":
            return fs.save(folder / "new", model, optimizer)
        return fs.load(folder / "old", model, optimizer)

    caller = pair % 2  # the first rank as well as the other
    if me != caller:
        ELSEWHERE[elsewhere](model, folder / "over")
        (folder / "late").touch()
    began = time.monotonic()
    refused = None
    if elsewhere in LATE:
        call()
    elif me == caller:
        refused = refusal(call)
    took = time.monotonic() - began
    if elsewhere in LATE:
        assert (folder / "late").exists(), "the late rank was not waited for"
        _loads(folder / ("new" if verb == "save" else "old"), model, optimizer, OLD)
    (folder / "over").touch()
    return refused, took, crashes.hidden(folder)


def test_save_or_load_on_one_rank_alone_is_an_error_in_seconds_and_a_late_rank_is_waited_for(
    tmp_path: Path,
) -> None:
    ports = [ranks.free_port() for _ in ALONE]
    results = ranks.run(_one_calls, 2 * len(ALONE), tmp_path, ports, fresh=True, timeout_s=90.0)
    for pair, (verb, elsewhere) in enumerate(ALONE):
        caller = pair % 2
        refused, took, left = results[2 * pair + caller]
        if elsewhere in LATE:
            assert refused is None, f"{verb}: the late rank was not waited for: {refused}"
            continue
        assert refused is not None
        kind, message, remedy = refused
        # Both say it: the step that the other goes on with may happen to send as much as the call does.
        assert kind in ("Stalled", "RankMismatch"), f"{verb}, the other {elsewhere}: {message}"
        assert message.startswith(f"rank {caller}: "), message
        assert f"rank {1 - caller}: " in message, f"{verb}, the other {elsewhere}: {message}"
        assert f"({verb}, " in message, f"where the caller is: {message}"
        assert "every rank" in remedy.lower(), remedy
        assert took < LIMIT_S, f"{verb}, the other {elsewhere}: {took:.1f} s: {message}"
        assert left == []


# --- in the background ------------------------------------------------------------------------------------


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8) * (1 + my_rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _trains_on(root: Path) -> dict[str, Any]:
    import fullshard as fs

    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    large = torch.arange(10000.0)  # beside the manifest, in a file
    goes_on = threading.Event()
    with crashes.using(crashes.HookedDisk(lambda *_: goes_on.wait())):
        saving = fs.save(root / "one", model, optimizer, extra={"large": large}, background=True)
        large.zero_()
        steps = 0
        while not saving.done() and steps < 3:
            _train(model, optimizer)
            steps += 1
        under_way = not saving.done()
        goes_on.set()  # however long the steps took
        saving.wait()
    found = {"steps": steps, "under way": under_way, "path": saving.path == root / "one"}
    crashes.forget(model, optimizer)
    found["extra"] = torch.equal(fs.load(root / "one", model, optimizer)["large"], torch.arange(10000.0))
    crashes.assert_filled(model, optimizer, OLD)
    return found


def test_background_save_holds_the_values_of_its_call_while_training_goes_on(tmp_path: Path) -> None:
    for found in ranks.run(_trains_on, 2, tmp_path):
        assert found == {"steps": 3, "under way": True, "path": True, "extra": True}


def _saves_twice(root: Path) -> dict[str, Any]:
    import fullshard as fs

    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    goes_on = threading.Event()
    with crashes.using(crashes.HookedDisk(lambda *_: (goes_on.wait(), time.sleep(0.02)))):
        first = fs.save(root / "one", model, optimizer, background=True)
        crashes.fill(model, optimizer, NEW)
        found = {"under way": not first.done()}
        goes_on.set()
        second = fs.save(root / "two", model, optimizer, background=True)
        found["first is done"] = first.done()
        crashes.fill(model, optimizer, NEW + 1)
        found["loads"] = _loads(root / "two", model, optimizer, NEW)  # which waits for it, too
        found["second is done"] = second.done()
    found["first"] = _loads(root / "one", model, optimizer, OLD)
    return found


def test_second_save_and_a_load_wait_for_a_save_in_the_background(tmp_path: Path) -> None:
    for found in ranks.run(_saves_twice, 2, tmp_path):
        assert all(found.values()), found


class _Heard(logging.Handler):
    """What fullshard logs in this process from now on."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []
        logging.getLogger("fullshard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _fails_in_the_background(root: Path, waiting: tuple[int, ...]) -> dict[str, Any]:
    """Rank 1 cannot write. The ranks in `waiting` call wait(); all call the next save."""
    import fullshard as fs

    heard = _Heard(logging.ERROR)
    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    fs.save(root / "last", model, optimizer)
    crashes.fill(model, optimizer, NEW)
    found: dict[str, Any] = {}
    with crashes.using(crashes.failing("write", errno.ENOSPC) if my_rank() == 1 else crashes.slow(0.0)):
        saving = fs.save(root / "last", model, optimizer, background=True)
        if my_rank() in waiting:
            found["wait"] = refusal(saving.wait)
        while not saving.done():
            time.sleep(0.01)
    began = time.monotonic()
    if len(waiting) < 2:
        found["next"] = refusal(lambda: fs.save(root / "last", model, optimizer))
    found["took"] = time.monotonic() - began
    found["logged"] = heard.messages
    _meet()
    found["hidden"] = crashes.hidden(root)
    _meet()
    found["old"] = _loads(root / "last", model, optimizer, OLD)
    crashes.fill(model, optimizer, NEW)
    found["new"] = _loads(fs.save(root / "last", model, optimizer).wait(), model, optimizer, NEW)
    return found


@pytest.mark.parametrize("waiting", [(0, 1), (), (0,)], ids=["both wait", "nobody waits", "one waits"])
def test_failed_background_save_is_raised_on_all_ranks_in_wait_or_in_the_next_save(
    tmp_path: Path, waiting: tuple[int, ...]
) -> None:
    results = ranks.run(_fails_in_the_background, 2, tmp_path, waiting, timeout_s=30.0)
    for rank, found in enumerate(results):
        raised = [found[key] for key in ("wait", "next") if key in found]
        assert raised
        for kind, message, _ in raised:
            assert kind == "CheckpointError", message
            assert message.startswith(f"rank {rank}: ")
            assert "rank 1" in message, message
            assert "No space left on device" in message, message
        assert found["took"] < LIMIT_S
        assert len(found["logged"]) == 1, found["logged"]
        assert "was not saved" in found["logged"][0]
        assert "No space left on device" in found["logged"][0]
        assert found["hidden"] == []
        assert found["old"]
        assert found["new"]


SCRIPT = """
import sys, threading, time
import torch.distributed as dist
import checkpoint_crashes as crashes
import fullshard as fs

root, ending = sys.argv[1:]
model, optimizer = crashes.made()
crashes.fill(model, optimizer, 1)
goes_on = threading.Event()
slow = crashes.HookedDisk(lambda *_: (goes_on.wait(), time.sleep(0.02)))
crashes.files.disk = crashes.failing("sync", crashes.full) if ending == "fails" else slow
saving = fs.save(root + "/step-1", model, optimizer, background=True)
crashes.fill(model, optimizer, 2)
assert ending == "fails" or not saving.done()
goes_on.set()
if ending == "destroys":
    dist.destroy_process_group()
elif ending == "raises" and dist.get_rank() == 1:
    raise ValueError("on purpose")
"""


def _run_script(folder: Path, ending: str, num_ranks: int = 2) -> list[tuple[int, str]]:
    """The script on that many ranks: exit code and stderr of each."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    port, here = ranks.free_port(), Path(__file__).resolve().parents[1]
    started = []
    try:
        for rank in range(num_ranks):
            environment = os.environ | ranks._environment(rank, num_ranks, port)
            environment |= {
                "PYTHONPATH": f"{here / 'faults'}:{here / 'support'}:{here.parent / 'src'}",
                "OMP_NUM_THREADS": "1",
            }
            command = [f"{warm.commands()}/python", str(script), str(folder / "root"), ending]
            started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]


def _looks_at(root: Path) -> tuple[bool, bool]:
    import fullshard as fs

    model, optimizer = crashes.made()
    found = fs.latest(root)
    return found is not None, found is not None and _loads(found, model, optimizer, OLD)


@pytest.mark.filterwarnings("ignore:.*random numbers were left")
@pytest.mark.parametrize("ending", ["returns", "raises", "destroys"])
def test_background_save_is_completed_when_the_script_ends_at_once(tmp_path: Path, ending: str) -> None:
    results = _run_script(tmp_path, ending)
    [(there, right)] = ranks.run(_looks_at, 1, tmp_path / "root")
    codes = [code for code, _ in results]
    texts = "\n".join(text for _, text in results)
    assert codes == [0, 1 if ending == "raises" else 0], texts
    assert ("on purpose" in texts) == (ending == "raises"), texts
    assert there, texts
    assert right
    assert [p for p in (tmp_path / "root").iterdir() if p.name != "step-1"] == [], texts


def test_background_save_that_fails_while_the_script_ends_is_told_on_stderr_and_by_the_exit_code(
    tmp_path: Path,
) -> None:
    [(code, text)] = _run_script(tmp_path, "fails", 1)
    assert code == 1, text
    assert "step-1 was not saved" in text
    assert "No space left on device" in text
    assert os.listdir(tmp_path / "root") == []


# --- ranks that do not ask for the same -------------------------------------------------------------------


class _Opaque:
    """Cannot be saved."""


def _asks(case: str, root: Path, model: nn.Module, optimizer: Any) -> Any:
    """Rank 1 asks for something else than rank 0."""
    import fullshard as fs

    odd = my_rank() == 1
    path: Any = root / "new"
    options: dict[str, Any] = {}
    if case == "path":
        path = root / f"new-{my_rank()}"
    elif case == "path of no kind":
        path = None if odd else path
    elif case == "optimizer":
        optimizer = None if odd else optimizer
    elif case == "optimizer that has not stepped":
        optimizer = torch.optim.AdamW(model.parameters()) if odd else optimizer
    elif case == "extra":
        options["extra"] = {"thing": _Opaque() if odd else 1}
    elif case == "keep_last":
        options["keep_last"] = 2 if odd else 1
    elif case == "dtype":
        options["dtype"] = torch.bfloat16 if odd else None
    elif case == "files":
        options["files"] = "parts" if odd else "auto"
    elif case == "files that are no kind":
        options["files"] = "none" if odd else "auto"
    elif case == "background":
        options["background"] = odd
    return fs.save(path, model, optimizer, **options).wait()


ASKED = {
    "path": ("RankMismatch", "new-0"),
    "path of no kind": ("OptionError", "None"),
    "optimizer": ("RankMismatch", "optimizer"),
    "optimizer that has not stepped": ("RankMismatch", "optimizer"),
    "extra": ("CheckpointError", "extra['thing']"),
    "keep_last": ("RankMismatch", "keep_last"),
    "dtype": ("RankMismatch", "dtype"),
    "files": ("RankMismatch", "files"),
    "files that are no kind": ("OptionError", "'none'"),
    "background": ("RankMismatch", "background"),
}


def _ask_differently(root: Path) -> dict[str, Any]:
    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    found: dict[str, Any] = {}
    for case in ASKED:
        found[case] = refusal(lambda case=case: _asks(case, root, model, optimizer)), os.listdir(root)
        _meet()
    saved = _asks("", root, model, optimizer)
    return found | {"and afterwards": _loads(saved, model, optimizer, OLD)}


def test_ranks_that_ask_for_different_saves_all_get_the_same_error(tmp_path: Path) -> None:
    results = ranks.run(_ask_differently, 2, tmp_path, timeout_s=30.0)
    for rank, found in enumerate(results):
        assert found.pop("and afterwards")
        for case, ((kind, message, remedy), left) in found.items():
            assert kind == ASKED[case][0], f"{case}: {message}"
            assert ASKED[case][1] in message, f"{case}: {message}"
            assert message.startswith(f"rank {rank}: "), message
            assert "rank 1" in message or "ranks" in message, f"{case}: {message}"
            assert remedy, case
            assert left == [], f"{case} left {left}"


def _load_differently(root: Path) -> dict[str, Any]:
    import fullshard as fs

    model, optimizer = crashes.made()
    for number in (OLD, NEW):
        crashes.fill(model, optimizer, number)
        fs.save(root / f"step-{number}", model, optimizer)
    odd = my_rank() == 1
    crashes.fill(model, optimizer, NEW + 1)
    paths = [root / f"step-{OLD}", root / f"step-{NEW}"]
    found = {
        "path": refusal(lambda: fs.load(paths[my_rank()], model, optimizer)),
        "no such path": refusal(lambda: fs.load(root / "none" if odd else paths[0], model, optimizer)),
        "path of no kind": refusal(lambda: fs.load(None if odd else paths[0], model)),  # type: ignore[arg-type]
        "optimizer": refusal(lambda: fs.load(paths[0], model, None if odd else optimizer)),
        "strict": refusal(lambda: fs.load(paths[0], model, optimizer, strict=odd)),
    }
    crashes.assert_filled(model, optimizer, NEW + 1)  # as they were
    return found | {"and afterwards": _loads(paths[0], model, optimizer, OLD)}


def test_ranks_that_ask_for_different_loads_all_get_the_same_error_and_change_nothing(tmp_path: Path) -> None:
    results = ranks.run(_load_differently, 2, tmp_path, timeout_s=30.0)
    for rank, found in enumerate(results):
        assert found.pop("and afterwards")
        for case, (kind, message, remedy) in found.items():
            expected = {"path of no kind": "CheckpointError", "no such path": "CheckpointError"}
            assert kind == expected.get(case, "RankMismatch"), f"{case}: {message}"
            assert message.startswith(f"rank {rank}: "), message
            assert "rank 1" in message or "ranks" in message, f"{case}: {message}"
            assert remedy, case


# --- what is in the way -----------------------------------------------------------------------------------


def _in_the_way(root: Path) -> dict[str, Any]:
    import fullshard as fs

    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    if my_rank() == 0:
        (root / "thesis").mkdir()
        (root / "thesis" / "chapter").write_text("words")
        (root / "file").write_text("more words")
        (root / "empty").mkdir()
    _meet()
    found: dict[str, Any] = {
        name: refusal(lambda name=name: fs.save(root / name, model, optimizer))
        for name in ("thesis", "file", "file/new", ".hidden")
    }
    _meet()
    found["left"] = crashes.contents(root), sorted(os.listdir(root))
    _meet()
    for name in ("empty", "not/there/yet"):
        saved = fs.save(root / name, model, optimizer).wait()
        found[name] = _loads(saved, model, optimizer, OLD)
    return found


def test_folder_with_other_files_and_a_file_are_refused_and_left_alone(tmp_path: Path) -> None:
    for found in ranks.run(_in_the_way, 2, tmp_path):
        files, names = found["left"]
        assert files == {"thesis/chapter": b"words", "file": b"more words"}
        assert names == ["empty", "file", "thesis"]
        for name in ("thesis", "file"):
            kind, message, remedy = found[name]
            assert kind == "CheckpointError"
            assert "is not a checkpoint" in message
            assert name in message
            assert "remove this one yourself" in remedy
        assert found["file/new"][0] == found[".hidden"][0] == "CheckpointError"
        assert found["empty"]
        assert found["not/there/yet"]


def _with_links(root: Path) -> dict[str, Any]:
    import fullshard as fs

    model, optimizer = crashes.made()
    found: dict[str, Any] = {}
    for number in (1, 2, 3):
        crashes.fill(model, optimizer, number)
        fs.save(root / f"step-{number}", model, optimizer)
    (root / "best").symlink_to("step-1")
    (root / "latest").symlink_to("step-3")
    crashes.fill(model, optimizer, 4)
    fs.save(root / "step-4", model, optimizer, keep_last=3)
    found["kept"] = sorted(os.listdir(root))
    found["loads"] = [_loads(root / f"step-{n}", model, optimizer, n) for n in (2, 3, 4)]
    crashes.fill(model, optimizer, 5)
    fs.save(root / "latest", model, optimizer)
    found["through the link"] = (root / "latest").is_symlink(), _loads(root / "step-3", model, optimizer, 5)
    return found


def test_keep_last_and_saves_treat_links_as_links(tmp_path: Path) -> None:
    [found] = ranks.run(_with_links, 1, tmp_path)
    assert found["kept"] == ["best", "latest", "step-2", "step-3", "step-4"]
    assert all(found["loads"])
    assert found["through the link"] == (True, True)


def _cannot_tidy(root: Path) -> list[str]:
    import fullshard as fs

    heard = _Heard(logging.WARNING)
    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, OLD)
    fs.save(root / "old", model, optimizer)
    fs.save(root / "last", model, optimizer)
    crashes.fill(model, optimizer, NEW)
    with crashes.using(crashes.failing("remove", errno.EACCES)):
        fs.save(root / "last", model, optimizer, keep_last=1)
    assert _loads(root / "last", model, optimizer, NEW)
    crashes.fill(model, optimizer, NEW + 1)
    fs.save(root / "last", model, optimizer)
    assert crashes.hidden(root) == []
    return heard.messages


def test_old_checkpoint_that_cannot_be_removed_is_logged_and_does_not_fail_the_save(tmp_path: Path) -> None:
    [messages] = ranks.run(_cannot_tidy, 1, tmp_path)
    assert len(messages) == 2
    assert all("could not be removed" in message for message in messages)


# --- several runs, one folder -------------------------------------------------------------------------------


def _side_by_side(root: Path, saves: int) -> dict[str, Any]:
    """Ranks 0 and 1 are runs of their own that save into one folder; rank 2 loads what is newest there."""
    import fullshard as fs
    from fullshard.errors import CheckpointError

    me = my_rank()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    model, optimizer = crashes.made()
    counts: dict[str, Any] = {"saved": 0, "loaded": 0, "replaced meanwhile": 0}
    (root.parent / f"ready-{me}").touch()
    while not all((root.parent / f"ready-{run}").exists() for run in range(3)):
        time.sleep(0.01)
    if me < 2:
        heard = _Heard(logging.WARNING)
        for number in range(1, saves + 1):
            crashes.fill(model, optimizer, number)
            name = f"run-{me}" if number % 2 else f"run-{me}-{number % 3}"
            fs.save(root / name, model, optimizer, extra={"number": number}, keep_last=3)
            counts["saved"] += 1
            while number == saves // 2 and not (root.parent / "loaded").exists():
                time.sleep(0.01)  # for a reader that is slower than the saves
        (root.parent / f"over-{me}").touch()
        return counts | {"logged": heard.messages}
    while not all((root.parent / f"over-{run}").exists() for run in (0, 1)):
        if newest := fs.latest(root):
            try:
                number = fs.load(newest, model, optimizer)["number"]
            except CheckpointError:  # replaced or removed while it was read: refused, never wrong
                counts["replaced meanwhile"] += 1
                continue
            crashes.assert_filled(model, optimizer, number)
            counts["loaded"] += 1
            (root.parent / "loaded").touch()
    return counts


def _all_load(root: Path) -> list[int]:
    import fullshard as fs

    model, optimizer = crashes.made()
    crashes.fill(model, optimizer, 100)
    fs.save(root / "tidy", model, optimizer, extra={"number": 100})
    numbers = []
    assert crashes.hidden(root) == []
    for folder in root.iterdir():
        numbers.append(fs.load(folder, model, optimizer)["number"])
        crashes.assert_filled(model, optimizer, numbers[-1])
    return numbers


def test_runs_that_save_into_one_folder_do_not_disturb_each_other_nor_a_reader(tmp_path: Path) -> None:
    found = ranks.run(_side_by_side, 3, tmp_path / "root", 20)
    assert [counts["saved"] for counts in found] == [20, 20, 0]
    assert found[0]["logged"] == found[1]["logged"] == []
    assert found[2]["loaded"] > 0, found
    [numbers] = ranks.run(_all_load, 1, tmp_path / "root")
    assert {20, 100} <= set(numbers)
