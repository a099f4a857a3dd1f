"""One command of `warm`: asks its server for a process, and is that process to whoever started the command.

Standard library only, and little of it: this is what a command costs.
"""

import contextlib
import os
import signal
import socket
import struct
import sys
from collections.abc import Mapping

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
NUMBER = struct.Struct("!i")


def send(
    address: str, words: list[str], streams: list[int], variables: Mapping[str, str]
) -> tuple[socket.socket, int]:
    """Ask for a process: where its exit status will arrive, and its number."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    environment = [f"{name}={value}" for name, value in variables.items()]
    fields = [os.getcwd(), str(os.getppid()), str(len(words)), *words, *environment]
    body = "\0".join(fields).encode(errors="surrogateescape")
    socket.send_fds(channel, [NUMBER.pack(len(body))], streams)
    channel.sendall(body)
    return channel, NUMBER.unpack(channel.recv(NUMBER.size, socket.MSG_WAITALL))[0]


def ask(address: str, words: list[str]) -> int:
    # The process may run before its number arrives here: a signal meanwhile waits, and is passed on then.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    channel, process = send(address, words, [0, 1, 2], os.environ)
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: pass_on(process, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    answer = channel.recv(NUMBER.size, socket.MSG_WAITALL)
    return int(NUMBER.unpack(answer)[0]) if answer else 70


def pass_on(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is on the way
        os.kill(process, number)


def end(status: int) -> None:
    """As the process has: with its exit status, or by its signal."""
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL's cannot be set
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    end(ask(sys.argv[1], sys.argv[2:]))
