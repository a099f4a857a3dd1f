"""What `fs.plan` says of an offloaded model is what its ranks hold."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import engines
import fullshard as fs
import ranks
from engines import my_rank
from fullshard.engine.homes.disk_home import DiskHome
from fullshard.engine.homes.split_masters import SplitValues
from fullshard.engine.runtime import runtime_of
from fullshard.engine.step import slabs as step_slabs
from fullshard.plan.homes import DISK_BUFFERS, KINDS, PLACES, slab_bytes
from fullshard.plan.plan import Plan


class Adapted(engines.Net):
    """With a lane that does not train, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.Linear(engines.WIDTH, 150), nn.Linear(150, engines.WIDTH))
        self.blocks[2].requires_grad_(False)


EIGHT_BIT = fs.Precision(compute=torch.bfloat16, gather=torch.int8, wire=torch.int8)
CASES: list[tuple[str, Any]] = [
    ("zero3", "bf16"),
    ("zero3", "fp32"),
    ("zero3", EIGHT_BIT),
    ("replicate", "bf16"),
]


def offloads(folder: Path, copies: int) -> list[Any]:
    host = 32_000 * copies
    disk = [fs.Offload(device, host, folder / str(device), chunk=600) for device in (0, 9_000)]
    split = fs.Offload(split_masters=True)
    more = fs.Offload(9_000, host, folder / "split", chunk=600, split_masters=True)
    return [None, "host", "optimizer", "auto", split, more, *disk]


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], int]:
    """Bytes by home and kind, of the tensors that there are."""
    total = {(place, kind): 0 for place in PLACES for kind in KINDS}
    for lane in runtime_of(model).lanes:
        homes = lane.homes
        cast = lane.dtypes.rest != lane.dtypes.compute
        rest = [lane.rest]
        if isinstance(lane.rest, SplitValues):
            rest = [lane.rest.split_values.low, lane.rest.split_values.ties]
        total[homes.master.kind, "master" if cast else "compute"] += sum(part.nbytes for part in rest)
        if lane.compute_shard is not None:
            total[homes.compute.kind, "compute"] += lane.compute_shard.values.nbytes
        if lane.gradients is not None:
            total[homes.gradients.kind, "gradients"] += lane.gradients.flat.nbytes
        for parameter in lane.parameters:
            values = [v for v in optimizer.state.get(parameter, {}).values() if v.dim()]
            total[homes.state.kind, "state"] += sum(value.nbytes for value in values)
    return total


def disk_buffers(model: nn.Module) -> int:
    """Bytes of the buffers between files and the device that there are after a step."""
    homes = {lane.homes.master for lane in runtime_of(model).lanes if lane.homes.master.kind == "disk"}
    pools = [pool for home in homes if isinstance(home, DiskHome) for pool in home._buffers.values()]
    return DISK_BUFFERS * sum(pool.size_bytes for pool in pools)


def compare(plan: Plan, real: dict[tuple[str, str], int], files: list[int]) -> None:
    resting = plan.resting
    assert resting is not None
    for (place, kind), num_bytes in real.items():
        planned = resting.bytes_at(place, kind)  # type: ignore[arg-type]
        if kind == "state":  # padding has none
            assert num_bytes <= planned <= num_bytes + 8 * padding(plan), (place, kind)
        else:
            assert planned == num_bytes, (place, kind)
    pages = 2 * 4096 * len(files)  # a slot ends with a page
    both_slots = resting.disk_bytes
    assert both_slots - 16 * resting.budget.node_ranks * padding(plan) <= sum(files) <= both_slots + pages


def padding(plan: Plan) -> int:
    return sum(lane.layout.total - lane.layout.num_elements for unit in plan.units for lane in unit.lanes)


def plans_and_tensors(folder: Path, world: int) -> None:
    for number, (strategy, precision) in enumerate(CASES):
        for offload in offloads(folder / str(number), world if strategy == "replicate" else 1):
            options = engines.BLOCKS | {"strategy": strategy, "precision": precision, "offload": offload}
            before = fs.plan(engines.build(Adapted), **options)
            model = fs.shard(engines.build(Adapted), **options)
            planned = fs.plan(model)
            if offload is None:
                assert planned.resting is None
                assert before == planned
                continue
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            engines.loss_of(model, engines.batch(0, my_rank())).backward()
            optimizer.step()
            assert before.resting is not None
            assert planned.resting is not None
            assert before.resting.homes == planned.resting.homes
            assert before.resting.budget.node_ranks == world
            if offload != "auto":  # what is free changes
                assert str(before) == str(planned)
            disk = getattr(offload, "disk", None)
            files = [] if disk is None else [file.stat().st_size for file in Path(disk).glob("*/value-*")]
            compare(planned, held(model, optimizer), files)
            if precision == "bf16":
                assert planned.resting.disk_buffer_bytes == disk_buffers(model)
            with fs.full(model):  # no rank's files go before all have counted
                pass


def test_planned_bytes_per_home_are_those_of_the_tensors_and_files(tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        ranks.run(plans_and_tensors, num_ranks, tmp_path / str(num_ranks), num_ranks)


def slabs_by_step() -> list[tuple[str, int, list[int]]]:
    """Bytes of slabs, as planned and as allocated by each step so far."""
    found = []
    memory = step_slabs.Site.memory
    forms: dict[str, dict[str, Any]] = {
        "complete": {},
        "overlap": {"overlap": True},
        "slabs": {"overlap": True, "slabs": "200kB"},
        "split, as computed": {"split_masters": True, "one_backward": True},
        "on the host": {"device": 20_000, "step": "host"},
    }
    for name, form in forms.items():
        for chunk in (300, 3_000):
            offload = fs.Offload(chunk=chunk, **form)
            model = engines.shard_blocks(engines.build(Adapted), precision="bf16", offload=offload)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            allocated: list[int] = []

            def counted(*args: Any, into: list[int] = allocated) -> torch.Tensor:
                into.append((tensor := memory(*args)).nbytes)
                return tensor

            with mock.patch.object(step_slabs.Site, "memory", counted):
                by_step = []
                for step in range(10):
                    engines.loss_of(model, engines.batch(step, 0)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    by_step.append(sum(allocated))
            found.append((f"{name}, {chunk}", fs.plan(model).slab_bytes, by_step))
    return found


def test_slabs_are_those_of_the_plan_from_the_first_steps_on() -> None:
    for name, planned, by_step in ranks.run(slabs_by_step, 1)[0]:
        assert 0 < by_step[1] == by_step[-1] <= planned, (name, planned, by_step)


def blocks_beside_slabs(folder: Path) -> tuple[int, int]:
    """Bytes of encoded state on its way from and to a disk: planned, and the most at the same time."""
    offload = fs.Offload(host=24_000, disk=folder, chunk=600)
    model = engines.shard_blocks(engines.build(), precision="bf16", state="8bit", offload=offload)
    optimizer = torch.optim.AdamW(model.parameters())
    staging = step_slabs.BlockPlace._staging
    held: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
    most = 0

    def counted(place: step_slabs.BlockPlace) -> torch.Tensor:
        nonlocal most
        rows = staging(place)
        held.add(rows.untyped_storage())
        most = max(most, sum(storage.nbytes() for storage in held))
        return rows

    with mock.patch.object(step_slabs.BlockPlace, "_staging", counted):
        for step in range(3):
            engines.loss_of(model, engines.batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    plan = fs.plan(model)
    assert plan.resting is not None
    lanes, homes = plan.resting.lanes, plan.resting.homes
    slabs = slab_bytes(lanes, homes, plan.resting.chunk, plan.resting.slab_sets)
    return plan.slab_bytes - slabs, most


def test_blocks_on_their_way_between_homes_and_slabs_are_planned_beside_these(tmp_path: Path) -> None:
    planned, most = ranks.run(blocks_beside_slabs, 1, tmp_path)[0]
    assert 0 < most <= planned


def too_small(folder: Path) -> list[str]:
    texts = []
    for offload in (fs.Offload(host=9_000), fs.Offload(host=500, disk=folder)):
        for strategy in ("zero3", "replicate"):
            try:
                engines.shard_blocks(engines.build(), offload=offload, precision="bf16", strategy=strategy)
            except fs.FullshardError as error:
                texts.append(f"{type(error).__name__} {error}")
    return texts


def test_a_budget_that_cannot_be_met_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    by_rank = ranks.run(too_small, 2, tmp_path)
    first = [text.replace("rank 0: ", "") for text in by_rank[0]]
    assert len(first) == 4
    assert first == [text.replace("rank 1: ", "") for text in by_rank[1]]
    for text in first:
        assert text.startswith("OffloadError the 2 ranks of a host need ")
        assert "Any one of these is enough: fs.Offload(host='" in text


def on_hosts_of_different_size() -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = str(2 - my_rank())
    model = engines.shard_blocks(engines.build(), offload=fs.Offload(host=24_000, device=2_000))
    return fs.plan(model).resting


def test_ranks_choose_the_same_homes_where_hosts_have_different_numbers_of_them() -> None:
    one, other = ranks.run(on_hosts_of_different_size, 2)
    assert one == other
    assert one.budget.node_ranks == 2


def test_the_plan_prints_bytes_per_home_per_rank_and_per_host() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    offload = fs.Offload(device="1MiB", host="12MiB", disk="unused")
    plan = fs.plan(model, ranks=4, node_ranks=2, precision="bf16", merge_units=0, offload=offload)
    text = str(plan)
    lines = [line.split() for line in text.splitlines()]
    assert plan.resting is not None
    assert next(line[:3] for line in lines if line and line[0] == "device") == ["device", "1.0", "MiB"]
    assert plan.resting.host_bytes == 2 * plan.resting.bytes_at("host") <= 12 * 2**20
    assert f"{plan.resting.disk_bytes / 2**20:.1f} MiB" in text
    assert "the 2 ranks of a host" in text


def test_a_plan_without_offload_prints_no_homes() -> None:
    text = str(fs.plan(engines.build(), ranks=2))
    assert "home" not in text
    assert "at rest: parameters" in text
