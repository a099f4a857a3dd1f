"""Two nodes: two `torchrun --nnodes 2` agents that train one model, and get the numbers of one process.

Where the machine lets us (root, iproute2), each node is a network namespace with its own address, hostname
and /dev/shm, joined by a veth pair: nothing but the wire connects them. Elsewhere both agents run on
loopback, and the test says so. This file is also the training script that the agents start.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import engines
import namespaces
import ranks
import reference
import warm
from namespaces import Node

LIMIT_S = 700.0
STRATEGIES = ("zero3", "hybrid", "replicate")


# --- the training script ------------------------------------------------------------------------------


def main(folder: str) -> None:
    """Train with each strategy; leave what came out in `folder`, a file a rank."""

    torch.set_num_threads(1)
    rank, found = engines.my_rank(), {}
    for strategy in STRATEGIES:
        model = engines.shard_blocks(engines.build(), strategy=strategy)
        mine = [engines.batch(step, rank) for step in range(engines.STEPS)]
        trace = reference.train_rank(model, mine, engines.loss_of, reference.adamw, engines.STEPS, clip=0.1)
        comm = model._fullshard.comm
        found[strategy] = {"trace": trace, "shards": comm.ranks, "replicas": comm.replicas}
    found["node"] = {"hostname": os.uname().nodename, "group": os.environ["GROUP_RANK"]}
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


# --- the nodes and the agents ---------------------------------------------------------------------------

LOOPBACK = (Node((), "127.0.0.1", "lo"), Node((), "127.0.0.1", "lo"))


@contextlib.contextmanager
def two_nodes() -> Iterator[Sequence[Node]]:
    """Two namespaces; loopback where they are not to be had."""
    with contextlib.ExitStack() as stack:
        try:
            nodes: Sequence[Node] = stack.enter_context(namespaces.connected(2))
        except namespaces.Unavailable as error:
            print(f"{error}: both nodes on loopback")
            nodes = LOOPBACK
        yield nodes


PLAIN = (sys.executable, "-m", "torch.distributed.run")


def agents(
    nodes: Sequence[Node], per_node: int, folder: Path, torchrun: Sequence[str] = PLAIN
) -> contextlib.AbstractContextManager[list[subprocess.Popen[str]]]:
    """One torchrun agent a node. Whatever they started has ended when this ends."""
    port = ranks.free_port()
    commands = [
        [
            *torchrun, "--nnodes", "2",
            "--nproc-per-node", str(per_node), "--node-rank", str(index), "--local-addr", node.address,
            "--master-addr", nodes[0].address, "--master-port", str(port), __file__, str(folder),
        ]
        for index, node in enumerate(nodes)
    ]  # fmt: skip
    return namespaces.running(nodes, commands, folder)


def run_both(
    nodes: Sequence[Node], per_node: int, folder: Path, torchrun: Sequence[str]
) -> list[dict[str, Any]]:
    """Every rank's file, after both agents ended well and in time."""
    with agents(nodes, per_node, folder, torchrun) as started:
        namespaces.finish(started, folder, LIMIT_S)
    files = [folder / f"rank-{rank}.pt" for rank in range(2 * per_node)]
    return [torch.load(file, weights_only=False) for file in files]


# --- the tests ----------------------------------------------------------------------------------------


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(
    ("make", "per_node"),
    [
        pytest.param(two_nodes, 1, id="1_a_node", marks=pytest.mark.long),
        pytest.param(two_nodes, 2, id="2_a_node"),
        pytest.param(partial(contextlib.nullcontext, LOOPBACK), 1, id="on_loopback"),
    ],
)
def test_two_nodes_train_with_the_numbers_of_one_process(
    make: Any, per_node: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_ranks = 2 * per_node
    with make() as nodes:
        found = run_both(nodes, per_node, tmp_path, [f"{warm.commands()}/torchrun"])
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
    gone = time.monotonic() + 60
    while any(map(_alive, running)) and time.monotonic() < gone:
        time.sleep(0.1)
    assert not list(filter(_alive, running))
    if shutil.which("ip"):
        assert f"fullshard-{os.getpid()}-" not in namespaces.ip("netns", "list")


def _fail_while_both_run(folder: Path, running: list[int]) -> None:
    deadline = time.monotonic() + 120
    with two_nodes() as nodes, agents(nodes, 1, folder) as started:
        while not all(workers := [_workers(agent.pid) for agent in started]):
            assert time.monotonic() < deadline, namespaces.logs(folder)
            time.sleep(0.1)
        running += [*(agent.pid for agent in started), *itertools.chain(*workers)]
        raise KeyError("the test failed here")


def _workers(agent: int) -> list[int]:
    """Not what a node runs before its agent, such as `mount`, which may be gone at the next look."""
    found = []
    for pid in namespaces.below(agent):
        with contextlib.suppress(OSError):
            if b"-u" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


if __name__ == "__main__":
    main(sys.argv[1])
