"""Run a function on N real processes, each a rank, and get its value back from each.

    values = ranks.run(fn, 2, "zero3")          # fn("zero3") on two ranks; values[r] is rank r's
    errors = ranks.run(fn, 2, expect_error=True)  # {rank: RankError}; a rank that hung is "Hang"

Every rank sees the environment torchrun would give it and runs on one torch thread. Workers are forked
from a server that has torch imported, and kept warm between runs, because starting two ranks costs 0.6 s.
Test files that import transformers or lightning get workers from a server that has it imported too (4 s of
CPU per rank otherwise). After a run that did not go well everywhere all workers are ended: nobody knows what
state they are in. So they are when a sharded model is left, as one is that keeps a loss: autograd's graph
holds its model, and Python cannot see that. `FULLSHARD_TEST_FRESH=1` gives every run new processes.

A run has a time limit, always. At the limit every rank still running is asked for its stacks (faulthandler
answers a signal even where Python is stuck in a collective), then killed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import warm

__all__ = ["Outcome", "RankError", "RankFailure", "end_groups_of_models", "outcome", "run"]

# What the servers of ranks import, besides what those of commands have imported.
COMMON = ["pytest", "hypothesis"]
ABOUT = dict.fromkeys(("transformers", "accelerate", "peft", "zoo", "hf_runs"), "transformers")
ABOUT |= {"onnxruntime": "onnx"}
ABOUT |= dict.fromkeys(("lightning", "lightning_cases"), "lightning")
GRACE_S = 5.0  # what the others get to come to an end after one rank has failed
ENDING_S = 60.0  # for a process that was killed or has closed its pipe to be gone, on a busy machine
STACKS_S, QUIET_S = 10.0, 0.2  # until a rank begins to write its stacks; without a further one
# A limit ends a hang; it does not measure the machine, which may be several times slower when it is busy.
PATIENCE, SHORT_S = 4, 30.0  # a limit below SHORT_S belongs to a test that expects a hang, and is kept
STACKS_SIGNAL = signal.SIGUSR1
TESTS = Path(__file__).resolve().parents[1]
FOLDERS = [str(TESTS / name) for name in ("support", "pure", "ranks", "faults", "integrations", "gpu")]


class _RankError(NamedTuple):
    type_name: str
    message: str
    traceback: str


class RankError(_RankError):
    """What ended one rank: (type name, message, traceback). A hung rank has type "Hang" and its stacks."""

    bases: tuple[str, ...] = ()

    def is_a(self, name: str) -> bool:
        return name in self.bases


class RankFailure(AssertionError):
    """At least one rank failed. `errors` has each failed rank's RankError."""

    def __init__(self, what: str, errors: dict[int, RankError]) -> None:
        self.errors = errors
        parts = [f"{what}: {len(errors)} rank(s) failed"]
        for rank, error in sorted(errors.items()):
            parts.append(f"--- rank {rank}: {error.type_name}: {error.message}\n{error.traceback}")
        super().__init__("\n".join(parts))


@dataclass
class Outcome:
    """Values of the ranks that returned, errors of those that did not."""

    values: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, RankError] = field(default_factory=dict)

    @property
    def hung(self) -> list[int]:
        return sorted(rank for rank, error in self.errors.items() if error.type_name == "Hang")


def run(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    expect_error: bool = False,
    **options: Any,
) -> Any:
    """`fn(*args)` on `ranks` processes: the list of return values by rank, or RankFailure.

    With `expect_error` the dict of errors by rank comes back instead, and no error at all is a failure.
    """
    grace_s = None if expect_error else GRACE_S
    result = outcome(fn, ranks, *args, timeout_s=timeout_s, grace_s=grace_s, **options)
    if expect_error:
        if not result.errors:
            raise AssertionError(f"{fn.__name__} on {ranks} ranks raised nothing: {result.values!r}")
        return result.errors
    if result.errors:
        raise RankFailure(f"{fn.__name__} on {ranks} ranks", result.errors)
    return [result.values[rank] for rank in range(ranks)]


def outcome(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout_s: float = 60.0,
    grace_s: float | None = None,
    init: bool = False,
    fresh: bool = False,
    library: str | None = None,
) -> Outcome:
    """`fn(*args)` on `ranks` processes, whatever comes of it.

    `init` starts a gloo process group first. With `fresh` a rank's process ends when `fn` returns, as a
    script's would; otherwise it stays for the next run. `library`, which ranks have imported already, is by
    default that of the test file.
    """
    fresh = fresh or bool(os.environ.get("FULLSHARD_TEST_FRESH"))
    if timeout_s >= SHORT_S:
        timeout_s *= PATIENCE
    if fresh:
        _pool.end()
    # A process that ends with its run imports what it needs itself, as a script would.
    if library is None:
        library = "" if fresh else _library(fn.__module__)
    workers = _pool.first(ranks, library)
    port = free_port()
    for rank, worker in enumerate(workers):
        environment = _environment(rank, ranks, port)
        task = _Task(fn.__module__, fn.__qualname__, args, environment, init, fresh)
        worker.pipe.send_bytes(pickle.dumps(task))
    result = _collect(workers, timeout_s, timeout_s if grace_s is None else grace_s)
    if fresh or result.errors or not all(worker.can_serve for worker in workers):
        _pool.end()
    return result


_reserved: deque[socket.socket] = deque()


def free_port() -> int:
    """A port that no other process gets by chance before a rank listens on it.

    The socket stays bound, but does not listen: a store, whose socket may share its port, can still take it.
    """
    while len(_reserved) >= 64:  # of runs that are over
        _reserved.popleft().close()
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _reserved.append(holder)
    return int(holder.getsockname()[1])


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", ""),
        # The host's own name need not resolve in a container; all ranks are here.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def end_groups_of_models() -> None:
    """Between cases of one run: the models so far are done, and the next one takes over their process groups.

    A model has three gloo groups or more, each with threads that wake up a hundred times per second: after a
    hundred models they would take most of the time, and new groups for each take a fifth of its time.
    """
    gc.collect()


# --- the parent's side --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    module: str
    qualname: str
    args: tuple[Any, ...]
    environment: dict[str, str]
    init: bool
    last: bool


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    stacks: Path
    can_serve: bool = True  # nothing of its last run is left

    def read_stacks(self) -> str:
        """The Python stacks of all threads, now. Empty where the process is gone or never got going."""
        before = self.stacks.stat().st_size if self.stacks.exists() else 0
        pid = self.process.pid
        if pid is None or not self.process.is_alive() or not self.stacks.exists():
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
        size, deadline = before, time.monotonic() + STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            if (now := self.stacks.stat().st_size) != size:
                size, deadline = now, time.monotonic() + QUIET_S
        return self.stacks.read_text(errors="replace")[before:]

    def kill(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join(ENDING_S)


@functools.cache
def _library(module: str) -> str:
    """Which of the servers knows the library that a test module imports, at its top or in a function."""
    path = getattr(sys.modules.get(module), "__file__", None)
    imported = re.findall(r"^ *(?:import|from) (\w+)", Path(path).read_text(), re.M) if path else []
    return next((ABOUT[name] for name in imported if name in ABOUT), "")


class _Server(forkserver.ForkServer):
    """Forks ranks for all processes of a test session; the first that needs it starts it."""

    def __init__(self, library: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._library = library

    def ensure_running(self) -> None:
        if self._forkserver_alive_fd is None:
            with warm.starting(f"ranks-{self._library}") as address:
                if not address.exists():
                    self._start(address)
            self._forkserver_address, self._forkserver_alive_fd = str(address), warm.alive()

    def _start(self, address: Path) -> None:
        words = [warm.RANKS_SERVER, os.pathsep.join(sys.path), *COMMON]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(100)
            warm.fork_server(self._library, words, 1, listener.fileno())


@functools.cache
def _server(library: str) -> _Server:
    return _Server(library)


@contextlib.contextmanager
def _forking_from(server: forkserver.ForkServer) -> Iterator[None]:
    """multiprocessing has one server per process; a process is started by this function of it."""
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before


class _Pool:
    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.library = ""
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.count = 0

    def first(self, ranks: int, library: str) -> list[_Worker]:
        if library != self.library or any(not worker.process.is_alive() for worker in self.workers):
            self.end()
        self.library = library
        while len(self.workers) < ranks:
            self.workers.append(self._start())
        return self.workers[:ranks]

    def _start(self) -> _Worker:
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(prefix="fullshard-ranks-")
        context = mp.get_context("forkserver")
        ours, theirs = context.Pipe()
        stacks = Path(self.folder.name) / f"stacks-{self.count}"
        self.count += 1
        with _forking_from(_server(self.library)):
            process = context.Process(target=_serve, args=(theirs, str(stacks)), daemon=True)
            process.start()
        theirs.close()
        return _Worker(process, ours, stacks)

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []


_pool = _Pool()
atexit.register(_pool.end)


def _collect(workers: list[_Worker], timeout_s: float, grace_s: float) -> Outcome:
    result = Outcome()
    pending = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout_s
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            _collect_hung(workers, pending, result, timeout_s)
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pending.pop(pipe)
            _collect_one(workers[rank], rank, result)
        if result.errors:
            deadline = min(deadline, time.monotonic() + grace_s)
    return result


def _collect_one(worker: _Worker, rank: int, result: Outcome) -> None:
    try:
        answer = worker.pipe.recv_bytes()
        worker.can_serve, (kind, payload) = bool(answer[0]), pickle.loads(memoryview(answer)[1:])
    except (EOFError, ConnectionError):
        worker.process.join(ENDING_S)
        code = worker.process.exitcode
        result.errors[rank] = RankError("Exit", f"the process ended with exit code {code}", "")
        return
    if kind == "value":
        result.values[rank] = payload
    else:
        type_name, message, text, bases = payload
        result.errors[rank] = error = RankError(type_name, message, text)
        error.bases = bases


def _collect_hung(
    workers: list[_Worker], pending: dict[Connection, int], result: Outcome, timeout_s: float
) -> None:
    because = "after another rank failed" if result.errors else f"at the limit of {timeout_s:g} s"
    for rank in pending.values():
        result.errors[rank] = RankError("Hang", f"still running {because}", workers[rank].read_stacks())


# --- the worker's side --------------------------------------------------------------------------------


def _serve(pipe: Connection, stacks_path: str) -> None:
    _die_with_parent()
    stacks = open(stacks_path, "w")  # noqa: SIM115 - the signal handler writes into it as long as we live
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    _connect_when_rank_0_listens()
    settings = Settings()
    gc.freeze()  # what the server has imported: 300,000 objects, which a collection need not walk every time
    gc.set_threshold(10_000)  # a twelfth of the time went into looking for garbage
    while True:
        try:
            task: _Task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        os.environ.update(task.environment)
        kind, payload = _answer(task)
        if kind == "value" and not task.last:
            _forget(settings)
        can_serve = not has_models()
        # After an error everything stays as it is until the parent ends us: closing the process group here
        # would end the other ranks' waiting, and hide that they hang.
        with contextlib.suppress(BrokenPipeError):
            pipe.send_bytes(bytes([can_serve]) + payload)
        if task.last and kind == "value":
            return


def _connect_when_rank_0_listens() -> None:
    """A rank that finds no store yet tries again half a second later, and rank 0 is ready in milliseconds."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # there is a function so called
    create = rendezvous._create_c10d_store

    def create_when_ready(hostname: str, port: int, rank: int, *args: Any, **options: Any) -> Any:
        deadline = time.monotonic() + 2.0
        while rank > 0 and not _is_listened_to(port) and time.monotonic() < deadline:
            time.sleep(0.002)
        return create(hostname, port, rank, *args, **options)

    rendezvous._create_c10d_store = create_when_ready


def _is_listened_to(port: int) -> bool:
    """Sockets may share a port in this way as long as none of them listens."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _die_with_parent() -> None:
    # Linux: the fork server ends with the tests, and we with it, even inside a collective that never ends.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


def _answer(task: _Task) -> tuple[str, bytes]:
    import torch

    seed()
    try:
        if task.init:
            torch.distributed.init_process_group("gloo")
            torch.distributed.barrier()  # a rank that has ended already would break others' connecting
        fn: Any = importlib.import_module(task.module)
        for name in task.qualname.split("."):
            fn = getattr(fn, name)
        # Plain pickle, not multiprocessing's: that one would send tensors through shared memory, which is
        # gone when this process is.
        with warnings.catch_warnings():
            return "value", pickle.dumps(("value", fn(*task.args)))
    except BaseException as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        text = traceback.format_exc()
        return "error", pickle.dumps(("error", (type(error).__name__, str(error), text, bases)))


def seed() -> None:
    """Random numbers of a test do not depend on what ran before it in this process."""
    import torch

    torch.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


class Settings:
    """What holds for a whole process, as it was when this was made, so that no test leaves it to the next."""

    def __init__(self) -> None:
        self.folder, self.environment = os.getcwd(), dict(os.environ)
        self.arguments, self.path, self.hook = list(sys.argv), list(sys.path), sys.excepthook
        self.handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore(self) -> None:
        import torch

        os.chdir(self.folder)
        if os.environ != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        sys.argv[:], sys.path[:], sys.excepthook = self.arguments, self.path, self.hook
        for number, handler in self.handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)  # imports the compiler, even to change nothing


_num_modules = 0  # when objects were last frozen


def has_models() -> bool:
    """Is any sharded model left in this process?"""
    shortage = sys.modules.get("fullshard.planning.shortage")  # which knows them all
    return shortage is not None and len(shortage._watched) > 0


def _forget(settings: Settings) -> None:
    """Leave nothing of this run to the next: process group, environment, torch's global settings."""
    import torch

    with contextlib.suppress(Exception):
        if torch.distributed.is_initialized():
            if host_group := sys.modules.get("fullshard.comm.host_group"):
                host_group.forget_first_groups()
            torch.distributed.destroy_process_group()
    # A group whose making failed is counted: the next one would have another name than on the other ranks,
    # which would wait for each other for good.
    torch.distributed.distributed_c10d._world.group_count = 0
    gc.collect()  # now: what still holds a group would keep its threads through the next run, frozen for good
    if has_models():
        gc.collect()  # what an error's frames hold may go in a second round only
    global _num_modules
    if len(sys.modules) > _num_modules:
        gc.freeze()  # garbage is gone: what is left of this run are modules that it imported
        _num_modules = len(sys.modules)
    settings.restore()
