"""Commands of a test as real processes, without the seconds in which each would import torch.

`commands()` gives a folder to put first in PATH: its `python`, `torchrun` and `fullshard` do what their
namesakes do, but in a process that is forked from one which has imported torch already. It has its own
arguments, environment, folder, standard streams and exit status; signals are passed on to it, and it is
killed with the command that asked for it. What every use of fullshard imports is imported too, as is the
library of `commands(library)`, which saves seconds per process that uses it.

Servers start when they are first needed, one for all processes of a test session (`-n 4` are five of them),
and end with the session. A server that needs more is forked from one that has less, as are the servers of
`ranks`: torch is imported once, and so is each library.

A command that is started in network, mount or host name namespaces (`namespaces`) has its process there too.

Not for tests of process starts or of imports: those use `sys.executable`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn

from warm_client import NUMBER, PASSED_ON, send

# Another second, for whatever is compiled, with any backend. Importing it begins to use a GPU, if there is
# one, which no process that is forked afterwards can use.
_COMPILER = () if Path("/dev/nvidiactl").exists() else ("torch._inductor.compile_fx",)
PRELOADED = (
    *_COMPILER,
    "torch",
    "torch._dynamo",
    "torch._functorch.aot_autograd",  # a second, for optimizers and operators of one's own
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "numpy",
    "typer",
    "rich.console",
    "fullshard.api",
    "fullshard.checkpoint.load",
    "fullshard.checkpoint.save",
    "fullshard.data",
)
TRANSFORMERS = (
    "transformers",
    "transformers.trainer",
    "accelerate",
    "peft",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "t5")),
)
LIBRARIES = {
    "": PRELOADED,
    "transformers": TRANSFORMERS,
    "lightning": ("lightning",),
    "onnx": ("torch.onnx", "onnx", "onnxscript", "onnxruntime"),
}
FORKED_FROM = {"transformers": "", "lightning": "", "onnx": "transformers"}
COMMANDS: dict[str, str] = {
    "python": "",
    "python3": "",
    "torchrun": "-m torch.distributed.run",
    "fullshard": "-m fullshard",
}
CLIENT = Path(__file__).with_name("warm_client.py")
SESSION = "FULLSHARD_TEST_SESSION"  # the environment variable with the folder of its servers
SOURCE = Path(__file__).resolve().parents[2] / "src"
ENVIRONMENT = os.environ | {  # of servers: none of what a test sets
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")])),
}
PEER = struct.Struct("3i")  # process, user and group at the other end of a socket
COMMANDS_SERVER, RANKS_SERVER = "--commands-server", "--ranks-server"  # instead of a program: serve
_kept: list[Any] = []  # as long as this process lives


@functools.cache
def session() -> Path:
    """The folder of the servers. They end when they see the end of `alive`: when the first process ends."""
    if SESSION not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fullshard-tests-")
        os.mkfifo(f"{folder.name}/alive")
        _kept.extend((folder, os.open(f"{folder.name}/alive", os.O_RDWR)))
        os.environ[SESSION] = folder.name
    return Path(os.environ[SESSION])


def alive() -> int:
    """A file descriptor from which nothing can be read until the session ends."""
    return os.open(session() / "alive", os.O_RDONLY | os.O_NONBLOCK)


@contextlib.contextmanager
def starting(name: str) -> Iterator[Path]:
    """The place of a server, which no other process starts meanwhile."""
    with open(session() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield session() / name


@functools.cache
def commands(library: str = "") -> str:
    """The folder of the commands, whose processes have a library imported."""
    with starting(f"commands-{library}") as folder:
        if not folder.exists():
            folder.mkdir()
            _start(folder, library)
    return str(folder)


def _start(folder: Path, library: str) -> None:
    for name, words in COMMANDS.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {CLIENT} {folder}/socket {words} "$@"\n')
        path.chmod(0o755)
    reading, ready = os.pipe()
    if library in FORKED_FROM:
        fork_server(FORKED_FROM[library], [COMMANDS_SERVER, str(folder), library], ready)
    else:
        command = [sys.executable, __file__, str(folder), library]
        stdin = alive()
        _kept.append(
            subprocess.Popen(command, stdin=stdin, stdout=ready, env=ENVIRONMENT, start_new_session=True)
        )
        os.close(stdin)
    os.close(ready)
    with open(reading) as answer:
        assert answer.readline() == "ready\n", f"the server of {library or 'torch'} has not started"


def fork_server(library: str, words: list[str], stdout: int = 1, *listeners: int) -> None:
    """Another server, from that of the library's commands; its standard input is `alive`."""
    address = f"{commands(library)}/socket"
    stdin = alive()
    channel, _ = send(address, words, [stdin, stdout, 2, *listeners], ENVIRONMENT)
    channel.close()
    os.close(stdin)


def environment(variables: dict[str, str]) -> dict[str, str]:
    """The same variables, with the commands first in PATH."""
    return {**variables, "PATH": f"{commands()}:{variables.get('PATH', os.defpath)}"}


@dataclass
class Request:
    """What a process is asked to be."""

    folder: str
    parent: int
    words: list[str]
    variables: dict[str, str]
    streams: list[int]
    namespaces: list[int]  # where the command is: open files, if that is not where the server is

    @staticmethod
    def receive(channel: socket.socket) -> Request:
        length, streams, _, _ = socket.recv_fds(channel, NUMBER.size, 4)
        try:
            body = received(channel, NUMBER.unpack(length)[0])
            folder, parent, count, *rest = body.decode(errors="surrogateescape").split("\0")
            words, variables = rest[: int(count)], dict(v.split("=", 1) for v in rest[int(count) :])
            asked_by, _, _ = PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
            return Request(folder, int(parent), words, variables, streams, namespaces_of(asked_by))
        except BaseException:
            for stream in streams:  # whoever reads the command's output would wait for its end
                os.close(stream)
            raise

    def close(self) -> None:
        for descriptor in (*self.streams, *self.namespaces):
            os.close(descriptor)

    @property
    def is_for_a_server(self) -> bool:
        return self.words[:1] in ([COMMANDS_SERVER], [RANKS_SERVER])

    def take_over(self) -> None:
        """Its standard streams, namespaces, folder and environment are this process's."""
        for number, stream in enumerate(self.streams[:3]):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)))
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "w", closefd=False)), line_buffering=True
        )
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        for namespace in self.namespaces:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
                raise OSError(ctypes.get_errno(), "cannot enter the namespaces of a command")
            os.close(namespace)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.variables)


def received(channel: socket.socket, size: int) -> bytes:
    """All of it. A signal, such as that of a process which has ended, cuts what MSG_WAITALL waits for."""
    body = bytearray()
    while len(body) < size:
        if not (piece := channel.recv(size - len(body))):
            raise ValueError("whoever asked has ended")
        body += piece
    return bytes(body)


def namespaces_of(process: int) -> list[int]:
    """Open files of the namespaces in which a process is and this one is not."""
    found = []
    for kind in ("net", "uts", "mnt"):
        there = f"/proc/{process}/ns/{kind}"
        with contextlib.suppress(OSError):  # it has ended already
            if not os.path.samefile(there, f"/proc/self/ns/{kind}"):
                found.append(os.open(there, os.O_RDONLY))
    return found


class Server:
    """Forks a process per request, and says how it ended."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.running: dict[int, socket.socket] = {}
        self.ended, wake = socket.socketpair()
        wake.setblocking(False)
        self.ended.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> Request | None:
        """Returns a request in each process that is to be one, and None in the server, at the end."""
        selector = selectors.DefaultSelector()
        for source in (self.listener, self.ended, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if selector.get_map().get(key.fd) is not key:
                    continue  # another of these events has ended it
                if key.fileobj is sys.stdin:
                    signal.set_wakeup_fd(-1)
                    self._kill(list(self.running))
                    return None
                if key.fileobj is self.ended:
                    self._answer(selector)
                elif key.fileobj is self.listener:
                    channel = self.listener.accept()[0]
                    try:
                        request = Request.receive(channel)
                    except (OSError, ValueError, struct.error):  # whoever asked has ended
                        channel.close()
                        continue
                    process = os.fork()
                    if process == 0:
                        selector.close()
                        return request
                    request.close()
                    _tell(channel, process)
                    if request.is_for_a_server:  # which ends with the session, as this one does
                        channel.close()
                        continue
                    self.running[process] = channel
                    selector.register(channel, selectors.EVENT_READ)
                else:  # whoever asked has ended
                    self._kill([p for p, channel in self.running.items() if channel is key.fileobj])
                    selector.unregister(key.fileobj)

    def _kill(self, processes: list[int]) -> None:
        for process in processes:
            os.kill(process, signal.SIGKILL)

    def _answer(self, selector: selectors.BaseSelector) -> None:
        self.ended.recv(4096)
        while self.running:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            channel = self.running.pop(process, None)
            if channel is None:  # a server
                continue
            if channel in [key.fileobj for key in selector.get_map().values()]:
                selector.unregister(channel)
                _tell(channel, os.waitstatus_to_exitcode(status))
            channel.close()

    def leave(self) -> None:
        """In a process that serves a request: nothing of the server stays."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for channel in (self.listener, self.ended, self._wake, *self.running.values()):
            channel.close()


def _tell(channel: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # whoever asked has ended
        channel.sendall(NUMBER.pack(number))


def become(request: Request, python: str) -> None:
    """Be that process: returns, or raises, when its program has ended."""
    for number in PASSED_ON:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    request.take_over()
    os.getppid = lambda: request.parent  # that of the command, with which this process is killed
    sys.executable = python  # so that the processes which it starts are of this kind too
    words = request.words
    while words and words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        words = words[1:]
    start, *arguments = words
    paths = [path for path in request.variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path[1:] if path not in paths)]
    if start in ("-m", "-c"):
        sys.path.insert(0, "")
        sys.argv = [start, *arguments[1:]]
        if start == "-m":
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            exec(compile(arguments[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = [start, *arguments]
        sys.path.insert(0, str(Path(start).resolve().parent))
        runpy.run_path(start, run_name="__main__")


def main(folder: str, library: str) -> None:
    """Serve; then be what a request asks for, in each process that is forked."""
    request = _serve(folder, library)
    if request is None:
        leave_at_once()
    if not request.is_for_a_server:
        _run(request, f"{folder}/python")
    kind, *words = request.words
    request.take_over()
    if kind == COMMANDS_SERVER:
        main(*words)
    else:  # multiprocessing's own, which ends with the session too
        path, *modules = words
        with contextlib.suppress(SystemExit):
            forkserver.main(request.streams[3], os.dup(0), modules, sys_path=path.split(os.pathsep))
        leave_at_once()


def _serve(folder: str, library: str) -> Request | None:
    gc.disable()  # imports leave little garbage, and each of them would be searched for it
    for module in LIBRARIES[library]:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    server = Server(f"{folder}/socket")
    os.write(1, b"ready\n")
    request = server.serve()
    if request is not None:
        server.leave()
    return request


def _run(request: Request, python: str) -> NoReturn:
    status = 0
    try:
        become(request, python)
    except SystemExit as ending:
        if not (ending.code is None or isinstance(ending.code, int)):
            raise
        status = ending.code or 0
    end(status)


def leave_at_once() -> NoReturn:
    """A library that was imported before a fork may wait at the end for threads which only its parent had."""
    os._exit(0)


def end(status: int) -> NoReturn:
    """As Python ends a process, but without clearing what the server had imported: 0.4 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if sys.modules["torch.distributed"].is_initialized():
        sys.exit(status)  # groups that nothing has ended: how such a rank ends is what some tests are about
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):  # none, closed, or nobody reads it: Python knows what to do
        sys.exit(status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main(*sys.argv[1:])
