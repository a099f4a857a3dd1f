"""Streams by ownership, watched by torch's CUDA sanitizer; 8-bit wires and large Linears on a GPU.

The wire is simulated with torch's own streams, events and copies, so that the sanitizer sees every access.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# A unit per block, of which one stays full: by default a model this small is one unit that stays full.
BLOCKS: dict[str, Any] = {"merge_units": 0, "keep_full": 2**20}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 128), *(Block(128) for _ in range(5)), nn.Linear(128, 64)).cuda()


class WatchedWire:
    """As the simulated wire, made of what the sanitizer can see."""

    def __init__(self, waits: bool) -> None:
        from fullshard.tools.simulation.wire import Traffic

        self.traffic, self.waits = Traffic(), waits
        self.streams: dict[str, Any] = {}

    def carry(self, message: Any, target: torch.Tensor, source: torch.Tensor, own: int | None) -> Any:
        from fullshard.tools.simulation.wire import deliver

        stream = self.streams.setdefault(message.group, torch.cuda.Stream())
        if self.waits:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            deliver(target, source, own)
            done = torch.cuda.Event()
            done.record()
        self.traffic.add(message)
        return done

    def over(self, ticket: Any) -> bool:
        return bool(ticket.query())

    def wait(self, ticket: Any, timeout: timedelta | None) -> None:
        torch.cuda.current_stream().wait_event(ticket)


def _watched(said: dict[str, Any], waits: bool, nodes: int) -> str:
    import torch.cuda._sanitizer as sanitizer

    import fullshard as fs
    from fullshard.planning.network import Link, Network
    from fullshard.tools.simulation.group import Cluster, joined

    sanitizer.enable_cuda_sanitizer()
    network = Network(4, Link(1e12), *((4 // nodes, Link(1e12)) if nodes > 1 else ()))
    cluster = Cluster(network, torch.device("cuda"))
    cluster.wire = WatchedWire(waits)
    try:
        with joined(cluster):
            if said.get("strategy") == "hybrid":
                from torch.distributed.device_mesh import init_device_mesh

                said["mesh"] = init_device_mesh(
                    "cuda", (nodes, 4 // nodes), mesh_dim_names=("replicate", "shard")
                )
            blocks: dict[str, Any] = {"int8 across": {"across": torch.int8}}
            blocks["int8"] = {"gather": torch.int8, "wire": torch.int8}
            if said.get("precision") in blocks:
                said["precision"] = fs.Precision(compute=torch.bfloat16, **blocks[said["precision"]])
            model = fs.shard(_net(), **(BLOCKS | said))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            for _ in range(3):
                tokens = torch.randint(0, 64, (4, 32), device="cuda")
                model(tokens).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            assert cluster.wire.traffic.messages > 20
    except sanitizer.CUDASanitizerErrors as error:
        return "\n".join(map(str, error.errors))
    return "clean"


CASES: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"precision": "bf16"}, 1),
    ({"precision": "bf16", "strategy": "zero2"}, 1),
    ({"precision": "bf16", "keep_full": 0}, 1),
    ({"precision": "bf16", "reduce": "scatter"}, 1),
    ({"precision": "bf16", "strategy": "hybrid"}, 2),
    ({"precision": "bf16", "keep_full": 0}, 2),
    ({"precision": "bf16", "keep_full": 0, "keep_node": 0}, 2),
    ({"precision": "bf16", "strategy": "zero2"}, 2),
    ({"precision": "int8", "keep_full": 0}, 2),
    ({"precision": "int8 across", "keep_full": 0, "keep_node": 0}, 2),
    ({"precision": "int8 across", "strategy": "hybrid"}, 2),
]


@pytest.mark.parametrize(("said", "nodes"), CASES, ids=str)
def test_no_stream_touches_what_another_still_uses(said: dict[str, Any], nodes: int) -> None:
    assert ranks.run(_watched, 1, said, True, nodes, fresh=True, timeout_s=120)[0] == "clean"


def test_the_sanitizer_would_see_a_wire_that_does_not_wait() -> None:
    assert ranks.run(_watched, 1, {}, False, 1, fresh=True, timeout_s=120)[0] != "clean"


def _losses(configurations: list[dict[str, Any]]) -> list[list[float]]:
    import fullshard as fs
    from fullshard.api import shard_with
    from fullshard.policy import Integration, UnitPolicy

    in_place = Integration(policy_of=lambda _: UnitPolicy(direct_bytes=1))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    rank, found = torch.distributed.get_rank(), []
    for said in configurations:
        options = dict(said)
        if isinstance(options.get("precision"), dict):
            options["precision"] = fs.Precision(**options["precision"])
        options = {"strategy": "zero3", "units": None, "ignore": (), **BLOCKS, **options}
        model = shard_with(in_place, _net(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        losses = []
        for step in range(40):
            generator = torch.Generator().manual_seed(2 * (step % 4) + rank)
            tokens = torch.randint(0, 64, (8, 17), generator=generator).cuda()
            out = model(tokens[:, :-1]).float()
            loss = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found.append(losses)
    return found


def test_8_bit_wires_and_direct_gradients_train_two_ranks_on_one_card() -> None:
    bf16 = torch.bfloat16
    configurations = [
        {"precision": "bf16"},
        {"precision": {"compute": bf16, "gather": torch.int8, "wire": torch.int8}},
        {"precision": {"compute": bf16, "wire": torch.int8, "error_feedback": False}},
    ]
    first, *others = ranks.run(_losses, 2, configurations, timeout_s=200)[0]
    assert first[-1] < first[0] - 0.5, "the reference learns"
    for losses in others:
        assert losses[0] == pytest.approx(first[0], rel=2e-2)
        assert losses[-1] == pytest.approx(first[-1], rel=5e-2)


def _losses_on_nodes(configurations: list[dict[str, Any]]) -> list[list[float]]:
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return _losses(configurations)


def test_two_nodes_of_two_ranks_on_one_card_train_alike_whatever_they_keep() -> None:
    across = {"precision": {"compute": torch.bfloat16, "across": torch.int8}}
    configurations: list[dict[str, Any]] = [
        {"precision": "bf16", "keep_full": 0},
        {"precision": "bf16", "keep_full": 0, "keep_node": 0},
        {"precision": "bf16", "strategy": "zero2"},
        {**across, "keep_full": 0},
        {**across, "keep_full": 0, "keep_node": 0},
    ]
    for first, *others in ranks.run(_losses_on_nodes, 4, configurations, timeout_s=300):
        assert first[-1] < first[0] - 0.5, "it learns"
        assert others[0] == others[1] == first
        assert others[2] == others[3]
        assert others[2][-1] == pytest.approx(first[-1], rel=5e-2)
