"""A process that has imported what ranks need, and forks them: python -m fullshard.elastic.nursery ...

A rank that is started again would import torch for seconds. Here it begins with that done. The process has no
threads and never uses a GPU: a device that was opened before a fork is of no use after it. Where an import
has opened one nevertheless, ranks are fresh interpreters.

Ranks end with this process, and this process ends with the agent that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

from fullshard.environment import replace_variables

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_DEVICES = ("/dev/nvidia", "/dev/kfd")


@dataclass(frozen=True)
class Start:
    """One rank that is to be started."""

    place: int
    variables: dict[str, str]
    words: list[str]
    stdout: str  # a file; empty: that of the agent
    stderr: str


class Server:
    """Forks a process per request, and reports how each has ended."""

    def __init__(self, channel: socket.socket, folder: str) -> None:
        self._channel, self._folder = channel, folder
        self._places: dict[int, int] = {}  # of the processes that run
        self._ended, self._wake = socket.socketpair()
        for end in (self._ended, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the agent decides, also where a terminal signals all
        self._buffer = b""

    def serve(self) -> Start | None:
        """Returns a request in each process that is to be a rank, and None in the server, at the end."""
        self._send(ready=True)
        with selectors.DefaultSelector() as selector:
            for source in (self._channel, self._ended):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._ended in ready:
                    self._reap()
                if self._channel in ready:
                    data = self._channel.recv(65536)
                    if not data:
                        return None
                    *lines, self._buffer = (self._buffer + data).split(b"\n")
                    for line in lines:
                        start = self._handle(json.loads(line))
                        if start is not None:
                            return start

    def _handle(self, message: dict[str, Any]) -> Start | None:
        if "signal" in message:
            for process, place in self._places.items():
                if place in message["places"]:
                    _signal(process, message["signal"])
            return None
        start = Start(**message)
        process = os.fork()
        if process == 0:
            return start
        self._places[process] = start.place
        self._send(started=start.place, pid=process)
        return None

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ended.recv(4096)
        while self._places:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            _signal(process, signal.SIGKILL)  # whatever the rank has started and left behind
            place = self._places.pop(process)
            self._send(ended=place, pid=process, code=os.waitstatus_to_exitcode(status))

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the agent is gone, which is seen in `serve`
            self._channel.sendall(json.dumps(message).encode() + b"\n")

    def end(self) -> NoReturn:
        """The agent is gone, or has closed the connection: so go its ranks, and its folder."""
        for process in self._places:
            _signal(process, signal.SIGKILL)
        for process in self._places:
            os.waitpid(process, 0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def leave(self) -> None:
        """In a process that becomes a rank: nothing of the server stays."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        for end in (self._channel, self._ended, self._wake):
            end.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def _signal(process: int, number: int) -> None:
    """To a rank; SIGKILL also to what it has started. Others would end workers of its DataLoader, which it
    may need before it can end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if number == signal.SIGKILL else os.kill)(process, number)


def _end_with_parent(parent: int | None = None) -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        libc = ctypes.CDLL(None)
        libc.prctl(_DIE_WITH_PARENT, int(signal.SIGKILL), 0, 0, 0)
        if parent is not None and libc.getppid() != parent:  # it ended before that call
            os._exit(1)


def _has_opened_a_device() -> bool:
    try:
        files = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")[:-1]]
    except OSError:
        return False
    return any(file.startswith(_DEVICES) for file in files)


def _become(start: Start, target: str, warm: bool) -> None:
    """Be the rank: returns, or raises, when its script has ended."""
    for number, path in ((1, start.stdout), (2, start.stderr)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, number)
            os.close(file)
    replace_variables(start.variables)
    if not warm:
        os.execv(sys.executable, [sys.executable, "-u", "-m", target, *start.words])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # as in a process of its own; Python's and torch's generators see to themselves
    importlib.import_module(target).main(start.words)


def main(folder: str, target: str, modules: list[str]) -> None:
    """Serve the agent at the other end of stdin; then be a rank, in each process that is forked."""
    _end_with_parent()
    gc.disable()
    for module in modules:
        with contextlib.suppress(ImportError):  # the rank itself reports it
            importlib.import_module(module)
    gc.freeze()
    gc.enable()
    warm = not _has_opened_a_device()
    server, parent = Server(socket.socket(fileno=os.dup(0)), folder), os.getpid()
    start = server.serve()
    if start is None:
        server.end()
    os.setsid()
    server.leave()
    _end_with_parent(parent)
    _become(start, target, warm)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
