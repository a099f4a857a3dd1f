"""Two nodes: two `torchrun --nnodes 2` agents that train one model, and get the numbers of one process.

Where the machine lets us (root, iproute2), each node is a network namespace with its own address, hostname
and /dev/shm, joined by a veth pair: nothing but the wire connects them. Elsewhere both agents run on
loopback, and the test says so. This file is also the training script that the agents start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import engines
import ranks
import reference

LIMIT_S = 100.0
STRATEGIES = ("zero3", "hybrid", "replicate")


# --- the training script ------------------------------------------------------------------------------


def main(folder: str) -> None:
    """Train with each strategy; leave what came out in `folder`, a file a rank."""
    import fullshard as fs

    torch.set_num_threads(1)
    rank, found = engines.my_rank(), {}
    for strategy in STRATEGIES:
        model = fs.shard(engines.build(), strategy=strategy)
        mine = [engines.batch(step, rank) for step in range(engines.STEPS)]
        trace = reference.train_rank(model, mine, engines.loss_of, reference.adamw, engines.STEPS, clip=0.1)
        comm = model._fullshard.comm
        found[strategy] = {"trace": trace, "shards": comm.ranks, "replicas": comm.replicas}
    found["node"] = {"hostname": os.uname().nodename, "group": os.environ["GROUP_RANK"]}
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


# --- the nodes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """Where an agent runs: what its command begins with, its address, its network interface."""

    enter: tuple[str, ...]
    address: str
    interface: str
    namespace: str | None = None


LOOPBACK = (Node((), "127.0.0.1", "lo"), Node((), "127.0.0.1", "lo"))


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two namespaces joined by a veth pair, deleted at the end; loopback where they are not to be had."""
    names = (f"fullshard-{os.getpid()}-a", f"fullshard-{os.getpid()}-b")
    try:
        try:
            nodes = _joined(names)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no network namespaces here ({error}): both nodes on loopback")
            nodes = LOOPBACK
        yield nodes
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                for pid in _ip("netns", "pids", name).split():
                    _kill(int(pid))
                _ip("netns", "delete", name)


def _joined(names: tuple[str, str]) -> tuple[Node, Node]:
    links = [f"fs{os.getpid()}{side}" for side in "ab"]
    addresses = ["192.0.2.1", "192.0.2.2"]  # set aside for examples: nobody's own network
    for name in names:
        _ip("netns", "add", name)
    _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", links[1], "netns", names[1])
    nodes = []
    for name, link, address in zip(names, links, addresses, strict=True):
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
        _ip("-n", name, "link", "set", link, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        nodes.append(Node(_inside(name, f"node-{name[-1]}"), address, link, name))
        subprocess.run([*nodes[-1].enter, "true"], check=True, capture_output=True, timeout=20)
    return nodes[0], nodes[1]


def _ip(*words: str) -> str:
    program = shutil.which("ip") or "/usr/sbin/ip"
    return subprocess.run([program, *words], check=True, capture_output=True, text=True, timeout=20).stdout


def _inside(namespace: str, hostname: str) -> tuple[str, ...]:
    # A host has its own /dev/shm, where ranks of one host leave their records, and its own name.
    own = f'mount -t tmpfs none /dev/shm && hostname {hostname} && exec "$@"'
    return (shutil.which("ip") or "/usr/sbin/ip", "netns", "exec", namespace,
            "unshare", "--mount", "--uts", "sh", "-c", own, "sh")  # fmt: skip


# --- the agents ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def agents(nodes: Sequence[Node], per_node: int, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """One torchrun agent a node. Whatever they started has ended when this ends."""
    started: list[subprocess.Popen[str]] = []
    port = ranks.free_port()
    try:
        for index, node in enumerate(nodes):
            command = [
                *node.enter, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--nproc-per-node", str(per_node), "--node-rank", str(index), "--local-addr", node.address,
                "--master-addr", nodes[0].address, "--master-port", str(port), __file__, str(folder),
            ]  # fmt: skip
            with open(folder / f"node-{index}.log", "w") as log:
                options = {"env": _environment(node), "stdout": log, "stderr": log}
                started.append(subprocess.Popen(command, text=True, start_new_session=True, **options))
        yield started
    finally:
        for pid in [pid for agent in started for pid in (*_below(agent.pid), agent.pid)]:
            _kill(pid)
        for agent in started:
            agent.wait(10)


def _environment(node: Node) -> dict[str, str]:
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "GLOO_SOCKET_IFNAME": node.interface,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def _below(pid: int) -> list[int]:
    """Children of a process, and theirs. The workers of an agent lead sessions of their own."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [*_below(child), child]
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def run_both(nodes: Sequence[Node], per_node: int, folder: Path) -> list[dict[str, Any]]:
    """Every rank's file, after both agents ended well and in time."""
    deadline = time.monotonic() + LIMIT_S
    with agents(nodes, per_node, folder) as started:
        while any(agent.poll() is None for agent in started):
            failed = any(agent.poll() for agent in started)
            assert not failed and time.monotonic() < deadline, _logs(folder)  # noqa: PT018
            time.sleep(0.1)
        assert [agent.returncode for agent in started] == [0, 0], _logs(folder)
    files = [folder / f"rank-{rank}.pt" for rank in range(2 * per_node)]
    return [torch.load(file, weights_only=False) for file in files]


def _logs(folder: Path) -> str:
    logs = [f"--- {file.name}\n{file.read_text()[-4000:]}" for file in sorted(folder.glob("*.log"))]
    return "an agent failed or did not end in time\n" + "\n".join(logs)


# --- the tests ----------------------------------------------------------------------------------------


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    ("make", "per_node"),
    [(two_nodes, 1), (two_nodes, 2), (partial(contextlib.nullcontext, LOOPBACK), 1)],
    ids=["1_a_node", "2_a_node", "on_loopback"],
)
def test_two_nodes_train_with_the_numbers_of_one_process(
    make: Any, per_node: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_ranks = 2 * per_node
    with make() as nodes:
        found = run_both(nodes, per_node, tmp_path)
        with capsys.disabled():
            where = "two network namespaces" if nodes[0].namespace else "loopback"
            print(f"[two nodes of {per_node}: {where}]", end=" ")
    assert [rank["node"]["group"] for rank in found] == ["0"] * per_node + ["1"] * per_node
    if nodes[0].namespace:
        assert {rank["node"]["hostname"] for rank in found} == {"node-a", "node-b"}
    expected = reference.train(
        engines.build(), engines.batches(num_ranks), engines.loss_of, reference.adamw, engines.STEPS, clip=0.1
    )
    for strategy in STRATEGIES:
        trace = reference.combine([rank[strategy]["trace"] for rank in found])
        reference.assert_close_trace(trace, expected, rtol=2e-5, atol=2e-6)
        sizes = {(rank[strategy]["shards"], rank[strategy]["replicas"]) for rank in found}
        # Hybrid without a mesh shards inside a node and replicates across.
        assert sizes == {(per_node, 2) if strategy == "hybrid" else (num_ranks, 1)}, strategy


def test_nothing_of_the_nodes_is_left_when_a_test_fails(tmp_path: Path) -> None:
    running: list[int] = []
    with pytest.raises(KeyError):
        _fail_while_both_run(tmp_path, running)
    assert len(running) >= 4  # two agents and their workers at the least
    gone = time.monotonic() + 5
    while any(map(_alive, running)) and time.monotonic() < gone:
        time.sleep(0.1)
    assert not list(filter(_alive, running))
    if shutil.which("ip"):
        assert f"fullshard-{os.getpid()}-" not in _ip("netns", "list")


def _fail_while_both_run(folder: Path, running: list[int]) -> None:
    deadline = time.monotonic() + 30
    with two_nodes() as nodes, agents(nodes, 1, folder) as started:
        while not all(_below(agent.pid) for agent in started):
            assert time.monotonic() < deadline, _logs(folder)
            time.sleep(0.1)
        running += [pid for agent in started for pid in (*_below(agent.pid), agent.pid)]
        raise KeyError("the test failed here")


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


if __name__ == "__main__":
    main(sys.argv[1])
