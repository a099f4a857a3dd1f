"""Hybrid with optimizer state sharded across nodes: one process's numbers, gathers between nodes once."""

from __future__ import annotations

from typing import Any

import torch

import engines
import ranks
import reference
import tables


def _train(said: dict[str, Any], nodes: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (nodes, world // nodes), mesh_dim_names=("replicate", "shard"))
    model = engines.shard_blocks(engines.build(), strategy="hybrid", mesh=mesh, **said)
    rank = engines.my_rank()
    mine = [engines.batch(step, rank) for step in range(engines.STEPS)]
    sent: dict[str, int] = {}
    begin = model._fullshard.comm.recorder.begin

    def count(channel: str, phase: str, unit: str, step: int) -> int:
        if step == 1:
            sent[f"{channel}, {phase}"] = sent.get(f"{channel}, {phase}", 0) + 1
        return begin(channel, phase, unit, step)

    model._fullshard.comm.recorder.begin = count
    trace = reference.train_rank(model, mine, engines.loss_of, reference.adamw, engines.STEPS, clip=0.1)
    kept = sum(p.numel() for p in model.parameters())
    return {"trace": trace, "sent": sent, "kept": kept, "units": len(model._fullshard.units)}


CASES: list[dict[str, Any]] = [
    {},
    {"keep_full": 0},
    {"reduce": "scatter"},
    {"prefetch": False},
    {"checkpoint_activations": True},
]


@tables.in_turn(("said", "shape"), CASES, [(4, 2), (3, 3), (6, 3)])
def test_sharding_across_nodes_trains_as_one_process_does(
    said: dict[str, Any], shape: tuple[int, int]
) -> None:
    world, nodes = shape
    expected = reference.train(
        engines.build(), engines.batches(world), engines.loss_of, reference.adamw, engines.STEPS, clip=0.1
    )
    found = ranks.run(_train, world, {**said, "across": "shard"}, nodes, init=True, timeout_s=90)
    trace = reference.combine([rank["trace"] for rank in found])
    reference.assert_close_trace(trace, expected, rtol=2e-5, atol=2e-6)


def test_a_step_gathers_between_nodes_once_and_every_rank_keeps_its_own_part() -> None:
    found = ranks.run(_train, 4, {"across": "shard", "keep_full": 0}, 2, init=True, timeout_s=90)
    whole = sum(p.numel() for p in engines.build().parameters())
    assert sum(rank["kept"] for rank in found) == whole, "each element lies on one rank"
    for rank in found:
        units, sent = rank["units"], rank["sent"]
        assert sent["gather across, forward"] == units
        assert "gather across, backward" not in sent
        assert sent["gather, forward"] == units
        assert sent["gather, backward"] == units - 1  # the root stays full
        # Two more say who was used and add up the gradients' norm.
        assert sent["reduce, backward"] - 2 == sent["reduce across, backward"] == units


def _refused() -> str:
    import fullshard as fs

    try:
        fs.shard(engines.build(), strategy="zero3", across="shard")
    except fs.FullshardError as error:
        return str(error)
    return ""


def test_across_belongs_to_hybrid() -> None:
    assert all("hybrid" in said for said in ranks.run(_refused, 2, init=True, timeout_s=60))
