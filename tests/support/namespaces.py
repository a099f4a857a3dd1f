"""Several nodes on one machine: network namespaces joined by a bridge, as slow as one likes.

Each node has its own address, hostname and /dev/shm: nothing but the wire connects them. It takes root and
iproute2; where these are not to be had, `connected` raises Unavailable and says which. Whatever was made or
started here is gone when its `with` ends, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM_LIMIT_S = 120.0


class Unavailable(Exception):
    """This machine cannot have network namespaces, or cannot shape a link."""


@dataclass(frozen=True)
class Node:
    """Where a process runs: what its command begins with, its address, its network interface."""

    enter: tuple[str, ...]
    address: str
    interface: str
    namespace: str | None = None
    holder: int = 0


# --- the nodes ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(count: int) -> Iterator[list[Node]]:
    """Namespaces joined by a bridge; deleted at the end, with every process in them."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    switch, *names = [f"fullshard-{os.getpid()}-{letter}" for letter in "sabcdefgh"[: count + 1]]
    with contextlib.ExitStack() as holders:
        try:
            try:
                nodes = _made(switch, names, holders)
            except (OSError, subprocess.SubprocessError) as error:
                raise Unavailable(f"no network namespaces here: {_because(error)}") from error
            yield nodes
        finally:
            for name in (*names, switch):
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    for pid in ip("netns", "pids", name).split():
                        kill(int(pid))
                    ip("netns", "delete", name)


def _made(switch: str, names: Sequence[str], holders: contextlib.ExitStack) -> list[Node]:
    for name in (switch, *names):
        ip("netns", "add", name)
    ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    ip("-n", switch, "link", "set", "bridge", "up")
    nodes = []
    for index, name in enumerate(names):
        side, link = name[-1], f"fs{os.getpid()}{name[-1]}"
        ip("link", "add", link, "netns", name, "type", "veth", "peer", "name", f"to-{side}", "netns", switch)
        ip("-n", switch, "link", "set", f"to-{side}", "master", "bridge", "up")
        address = f"192.0.2.{index + 1}"  # set aside for examples: nobody's own network
        ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
        ip("-n", name, "link", "set", link, "up")
        ip("-n", name, "link", "set", "lo", "up")
        holder = holders.enter_context(_held(name, f"node-{side}"))
        nodes.append(Node(_inside(holder), address, link, name, holder))
    return nodes


@contextlib.contextmanager
def _held(namespace: str, hostname: str) -> Iterator[int]:
    """A process that keeps what a host has of its own: its /dev/shm, where ranks leave records, its name."""
    own = f"mount -t tmpfs none /dev/shm && hostname {hostname} && echo made && exec sleep infinity"
    command = [_program("ip"), "netns", "exec", namespace, "unshare", "--mount", "--uts", "sh", "-c", own]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            if process.stdout.readline() != "made\n":
                raise OSError(process.stderr.read())
            yield process.pid
        finally:
            process.kill()


def _inside(holder: int) -> tuple[str, ...]:
    spaces = ("--net", "--mount", "--uts", f"--wdns={os.getcwd()}")
    return (_program("nsenter"), "--target", str(holder), *spaces, "--")


def processes(node: Node) -> list[int]:
    """Those in it, other than the one that holds it."""
    assert node.namespace is not None, "loopback is shared by all"
    return [pid for pid in map(int, ip("netns", "pids", node.namespace).split()) if pid != node.holder]


def shared_memory(node: Node) -> list[str]:
    """The files in its /dev/shm."""
    return _run([*node.enter, "find", "/dev/shm", "-mindepth", "1"]).split()


def shape(nodes: Sequence[Node], bits_per_s: float, lossy: bool = False, burst: int = 0) -> None:
    """Let no node send faster than that from now on.

    Half a millisecond's worth may pass at once, or `burst` bytes: with less the kernel's timers cannot keep
    up, with much more small messages would not feel the link. The queue holds 100 ms, so that TCP fills the
    link.

    A lossy link has no queue: what does not pass at once is lost, and TCP sends it again.
    """
    burst = burst or max(32 * 1024, round(bits_per_s / 8 / 2000))
    queue = ["limit", f"{burst}b"] if lossy else ["latency", "100ms"]
    rate = ["rate", f"{round(bits_per_s)}bit", "burst", f"{burst}b", *queue]
    try:
        for node in nodes:
            assert node.namespace is not None, "loopback is not shaped"
            options = ["qdisc", "replace", "dev", node.interface, "root", "tbf", *rate]
            _run([_program("tc"), "-n", node.namespace, *options])
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"cannot shape a link here: {_because(error)}") from error


def num_lost(node: Node) -> int:
    """Packets that a shaped link has dropped."""
    assert node.namespace is not None, "loopback is not shaped"
    shown = _run([_program("tc"), "-n", node.namespace, "-s", "qdisc", "show", "dev", node.interface])
    return sum(map(int, re.findall(r"dropped (\d+)", shown)))


def cut(node: Node) -> None:
    """Take its link down: nothing arrives any more, and nobody is notified of it."""
    assert node.namespace is not None, "loopback is not cut"
    ip("-n", node.namespace, "link", "set", node.interface, "down")


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system of its own for a folder, seen by the nodes that are connected inside."""
    _run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder)])
    try:
        yield
    finally:
        _run(["umount", "--lazy", str(folder)])


def ip(*words: str) -> str:
    return _run([_program("ip"), *words])


def _program(name: str) -> str:
    return shutil.which(name) or f"/usr/sbin/{name}"


def _run(command: Sequence[str]) -> str:
    limit = {"timeout": PROGRAM_LIMIT_S}
    return subprocess.run(command, check=True, capture_output=True, text=True, **limit).stdout


def _because(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} not found (Debian: apt install iproute2)"
    return f"{error} {getattr(error, 'stderr', None) or ''}".strip()


# --- the processes ------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(
    nodes: Sequence[Node], commands: Sequence[Sequence[str]], folder: Path, **variables: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """One command a node, its output in `folder`. Whatever they started has ended when this ends."""
    started: list[subprocess.Popen[str]] = []
    try:
        for index, (node, command) in enumerate(zip(nodes, commands, strict=True)):
            with open(folder / f"node-{index}.log", "w") as log:
                options = {"env": _environment(node) | variables, "stdout": log, "stderr": log}
                process = subprocess.Popen(
                    [*node.enter, *command], text=True, start_new_session=True, **options
                )
            started.append(process)
        yield started
    finally:
        for pid in [pid for process in started for pid in (*below(process.pid), process.pid)]:
            kill(pid)
        for process in started:
            process.wait(60)


def _environment(node: Node) -> dict[str, str]:
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "GLOO_SOCKET_IFNAME": node.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def finish(started: Sequence[subprocess.Popen[str]], folder: Path, limit_s: float) -> None:
    """Wait for all of them; one that fails, or is late, is an error with everybody's last words."""
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in started):
        failed = any(process.poll() for process in started)
        if failed or time.monotonic() > deadline:
            raise AssertionError(logs(folder))
        time.sleep(0.1)
    assert not any(process.returncode for process in started), logs(folder)


def logs(folder: Path) -> str:
    found = [f"--- {file.name}\n{file.read_text()[-4000:]}" for file in sorted(folder.glob("*.log"))]
    return "a process failed or did not end in time\n" + "\n".join(found)


def below(pid: int) -> list[int]:
    """Children of a process, and theirs. The workers of a torchrun agent lead sessions of their own."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [*below(child), child]
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
