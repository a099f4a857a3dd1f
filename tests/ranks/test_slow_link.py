"""A slow link: two ranks, each in a network namespace, whose wire the kernel keeps to 20 Mbit/s; and one that
loses packets.

The numbers must be those of one process however late they come, and the bytes must really have gone over
that wire at that pace. How fast engines are is not tested, only measured (bench/slow_link.py). This file is
also the training script of the ranks.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engines
import namespaces
import reference
import warm

LIMIT_S = 500.0
RATE_BITS_PER_S = 20e6
STRATEGIES = ("zero3", "zero2")
HIDDEN = 3000


class Wide(engines.Net):
    """Enough parameters that a step takes a while on the wire, and next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        width = engines.WIDTH
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, width)) for _ in range(3)
        )


def main(rank: int, address: str, interface: str, folder: str) -> None:
    """Train with each strategy; leave what came out, and what it took, in `folder`, a file a rank."""

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://{address}:29500", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    mine = [engines.batch(step, rank) for step in range(engines.STEPS)]
    for strategy in STRATEGIES:
        model = engines.shard_blocks(engines.build(Wide), strategy=strategy)
        torch.distributed.barrier()
        sent, start = transmitted(interface), time.monotonic()
        trace = reference.train_rank(model, mine, engines.loss_of, reference.adamw, engines.STEPS, clip=0.1)
        torch.distributed.barrier()
        seconds, sent = time.monotonic() - start, transmitted(interface) - sent
        found[strategy] = {"trace": trace, "seconds": seconds, "bytes": sent}
    torch.save(found, Path(folder) / f"rank-{rank}.pt")
    torch.distributed.destroy_process_group()


def transmitted(interface: str) -> int:
    """Bytes that have left through an interface, by the kernel's count, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counts = next(line.partition(":")[2] for line in lines if line.strip().startswith(f"{interface}:"))
    return int(counts.split()[8])


def train_over_slow_link(folder: Path, lossy: bool) -> list[dict[str, Any]]:
    """Every rank's file, after both ended well and in time."""
    with namespaces.connected(2) as nodes:
        namespaces.shape(nodes, RATE_BITS_PER_S, lossy)
        commands = [
            [f"{warm.commands()}/python", __file__, str(rank), nodes[0].address, node.interface, str(folder)]
            for rank, node in enumerate(nodes)
        ]
        with namespaces.running(nodes, commands, folder) as started:
            namespaces.finish(started, folder, LIMIT_S)
        assert not lossy or all(map(namespaces.num_lost, nodes))
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("lossy", [False, True], ids=["slow", "lossy"])
def test_training_over_a_slow_link_has_the_numbers_of_one_process(tmp_path: Path, lossy: bool) -> None:
    try:
        found = train_over_slow_link(tmp_path, lossy)
    except namespaces.Unavailable as error:
        pytest.skip(str(error))
    model = engines.build(Wide)
    parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    expected = reference.train(
        model, engines.batches(2), engines.loss_of, reference.adamw, engines.STEPS, clip=0.1
    )
    for strategy in STRATEGIES:
        trace = reference.combine([rank[strategy]["trace"] for rank in found])
        reference.assert_close_trace(trace, expected, rtol=2e-5, atol=2e-6)
        for rank in found:
            sent_bytes, seconds = rank[strategy]["bytes"], rank[strategy]["seconds"]
            # Half of the parameters, and half of the gradients, went over the wire in every step,
            assert sent_bytes >= engines.STEPS * parameter_bytes
            # and took the time that the wire needs. A tenth is for what may pass at once.
            assert sent_bytes * 8 / seconds <= 1.1 * RATE_BITS_PER_S


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
