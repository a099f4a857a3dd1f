"""Messages between the agents of a run: signed lines of JSON over TCP. Nothing in them is run.

The agents of one run have one key, made of the run's name and of FULLSHARD_RUN_SECRET. Each connection has a
challenge of either side, and each line a number: what was recorded elsewhere or earlier is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import time
from typing import Any

from fullshard.environment import run_secret

Message = dict[str, Any]
_MOST_BYTES = 2**20  # of one line
_SEND_S = 5.0


class Refused(Exception):
    """What arrived is not of this run."""


def key_of(run: str) -> bytes:
    return hashlib.sha256(f"fullshard elastic\0{run}\0{run_secret()}".encode()).digest()


class Link:
    """One connection between two agents. `receive` never blocks."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_S)
        self._socket, self._key = connection, key
        self._challenge, self._of_peer = secrets.token_hex(16), ""
        self._sent = self._received = 0
        self._buffer = b""
        self._held: list[Message] = []  # until the peer's challenge is here
        self.heard_s = time.monotonic()
        self.address = str(connection.getpeername()[0])
        self.own_address = str(connection.getsockname()[0])
        self._write({"challenge": self._challenge})

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def send(self, **message: Any) -> None:
        """Raises OSError where the connection is gone, or the peer reads nothing."""
        if not self._of_peer:
            self._held.append(message)
            return
        text = json.dumps(message)
        self._sent += 1
        self._write({"text": text, "mac": self._mac(self._of_peer, self._sent, text)})

    def receive(self) -> list[Message]:
        """What has arrived. Raises OSError at the end of the connection, and Refused."""
        try:
            data = self._socket.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("closed")
        self.heard_s = time.monotonic()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _MOST_BYTES:
            raise Refused("a line that does not end")
        return [message for line in lines if (message := self._read(line)) is not None]

    def _read(self, line: bytes) -> Message | None:
        try:
            outer = json.loads(line)
            if "challenge" in outer and not self._of_peer:
                self._of_peer = str(outer["challenge"])
                held, self._held = self._held, []
                for message in held:
                    self.send(**message)
                return None
            text, mac = str(outer["text"]), str(outer["mac"])
            self._received += 1
            expected = self._mac(self._challenge, self._received, text)
            if not hmac.compare_digest(mac.encode(), expected.encode()):
                raise Refused("a signature of another run")
            message = json.loads(text)
        except (ValueError, KeyError, TypeError) as error:
            raise Refused("not a message of this version") from error
        return message if isinstance(message, dict) else None

    def _mac(self, challenge: str, number: int, text: str) -> str:
        return hmac.new(self._key, f"{challenge} {number} {text}".encode(), "sha256").hexdigest()

    def _write(self, outer: Message) -> None:
        self._socket.sendall(json.dumps(outer).encode() + b"\n")


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def as_seen_through(link: Link, address: str) -> str:
    """An address that the other side gave: if it is its own host there, it is the other side's host here."""
    return link.address if not address or is_loopback(address) else address


def listen(address: str, port: int) -> socket.socket:
    """Raises OSError where the address is not of this host, or the port is taken."""
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: str, port: int, key: bytes, limit_s: float = 2.0) -> Link:
    connection = socket.create_connection((address, port), timeout=limit_s)
    if connection.getsockname() == connection.getpeername():  # a free port of this host, connected to itself
        connection.close()
        raise ConnectionRefusedError("nobody listens")
    try:
        return Link(connection, key)
    except OSError:
        connection.close()
        raise
