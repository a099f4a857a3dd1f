"""On a real GPU: offloaded training has the bits of training without, its copies run beside computing and do
not race, and values are where they should be."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKS: dict[str, Any] = {"merge_units": 0, "keep_full": 2**20}
STEPS = 4
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 128), *(Block(128) for _ in range(4)), nn.Linear(128, 64)).cuda()


def homes(folder: Path) -> dict[str, Any]:
    import fullshard as fs

    return {
        "host": "host",
        "optimizer": "optimizer",
        "small chunks": fs.Offload(chunk=5000),
        "gradients alone": fs.Offload(kinds=("gradients",)),
        "some on the device": fs.Offload(device=2**21, chunk=30_000),
        "disk": fs.Offload(host=3_500_000, disk=folder, chunk=30_000),
        "overlap": fs.Offload(overlap=True, chunk=30_000),
        "overlap, optimizer": fs.Offload(kinds=("master", "state"), overlap=True),
        "overlap, slabs": fs.Offload(kinds=("master", "state"), overlap=True, chunk=30_000, slabs="8MiB"),
        "split masters": fs.Offload(split_masters=True),
        "split masters, optimizer": fs.Offload(kinds=("master", "state"), split_masters=True),
        "overlap, split masters": fs.Offload(split_masters=True, chunk=30_000, overlap=True, slabs="4MiB"),
        "overlap, some on the device": fs.Offload(device=2**21, chunk=30_000, overlap=True),
        "overlap, disk": fs.Offload(host=3_500_000, disk=folder, chunk=30_000, overlap=True),
    }


def trained(make: Make = OPTIMIZERS["fused"], accumulate: int = 1, rank: int = 0, **options: Any) -> Any:
    import fullshard as fs

    model = fs.shard(net(), **(BLOCKS | options))
    optimizer = make(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        for part in range(accumulate):
            torch.manual_seed(100 * step + 10 * part + rank)
            tokens = torch.randint(0, 64, (4, 32), device="cuda")
            with fs.accumulate(model) if part + 1 < accumulate else nullcontext():
                loss = model(tokens).float().square().mean()
                loss.backward()
            losses.append(loss.detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    states = [
        value
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    states = [getattr(v, "full_tensor", lambda v=v: v)().cpu() for v in states]
    with fs.full(model):
        values = [p.detach().cpu().clone() for p in model.parameters()]
    return [torch.stack(losses).cpu(), torch.stack(norms).cpu(), *states, *values]


def same(one: list[torch.Tensor], other: list[torch.Tensor], what: str) -> None:
    assert len(one) == len(other), what
    for index, (a, b) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(a, b), f"{what}: value {index}"


def _compare(rank_options: dict[str, Any], folder: Path, few: bool) -> None:
    rank = int(os.environ["RANK"])
    for precision in ("fp32", "bf16"):
        options = {"precision": precision, "rank": rank} | rank_options
        expected = trained(**options)
        for name, offload in homes(folder).items():
            if not (few and name in ("gradients alone", "small chunks", "split masters")):
                same(trained(offload=offload, **options), expected, f"{options}, {name}")
        gc.collect()


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_one_gpu_has_the_bits_of_a_run_without_offload(strategy: str, tmp_path: Path) -> None:
    ranks.run(_compare, 1, {"strategy": strategy}, tmp_path, False)


def test_two_ranks_have_the_bits_of_a_run_without_offload(tmp_path: Path) -> None:
    ranks.run(_compare, 2, {"accumulate": 2}, tmp_path, True, init=True)


def _optimizers() -> None:
    for name, make in OPTIMIZERS.items():
        expected = trained(make, precision="bf16")
        for offload in ("host", "optimizer"):
            same(trained(make, precision="bf16", offload=offload), expected, f"{name}, {offload}")


def test_every_kind_of_step_has_the_same_bits() -> None:
    ranks.run(_optimizers, 1)


def _places() -> None:
    import fullshard as fs

    model = fs.shard(net(), precision="bf16", offload="host", **BLOCKS)
    optimizer = OPTIMIZERS["fused"](model.parameters())
    tokens = torch.randint(0, 64, (4, 32), device="cuda")
    at_rest = []
    for step in range(4):
        model(tokens).float().square().mean().backward()
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.cuda.set_sync_debug_mode("default")
        optimizer.step()
        for p in model.parameters():
            assert p.device.type == "cpu"
            assert p.is_pinned()
            assert p.grad is not None
            assert p.grad.device.type == "cuda"
            assert all(v.is_pinned() for v in optimizer.state[p].values() if v.dim())
        optimizer.zero_grad()
        torch.cuda.synchronize()
        at_rest.append(torch.cuda.memory_allocated())
    assert at_rest[-1] == at_rest[1]


def test_values_rest_in_page_locked_memory_and_clipping_does_not_wait_for_the_device() -> None:
    ranks.run(_places, 1)


def _loaded() -> None:
    import fullshard as fs

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        torch.manual_seed(seed)
        model(torch.randint(0, 64, (4, 32), device="cuda")).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = fs.shard(net(), offload="host", **BLOCKS)
    optimizer = OPTIMIZERS["fused"](model.parameters())
    step(model, optimizer, 0)
    twin = fs.shard(net(), offload="host", **BLOCKS)
    twins = OPTIMIZERS["fused"](twin.parameters())
    twin.load_state_dict(model.state_dict())
    twins.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's load takes tensors as they are
    step(model, optimizer, 1)
    step(twin, twins, 1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, twins.state[q][key]), key


def test_a_loaded_state_steps_on() -> None:
    ranks.run(_loaded, 1)


def _scaled() -> None:
    import fullshard as fs

    results = []
    for offload in (None, "host", "optimizer"):
        model = fs.shard(net(), precision="fp16", offload=offload, **BLOCKS)
        optimizer = OPTIMIZERS["foreach"](model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**20, growth_interval=2)
        for step in range(5):
            torch.manual_seed(step)
            loss = model(torch.randint(0, 64, (4, 32), device="cuda")).float().square().mean()
            scaler.scale(loss * (1e30 if step == 1 else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([p.detach().cpu() for p in model.parameters()])
    for other in results[1:]:
        same(other, results[0], "scaled")


def test_a_gradient_scaler_skips_the_same_steps() -> None:
    ranks.run(_scaled, 1)


def _watched(offload: str, overlap: bool, split: bool, slabs: str | None) -> str:
    import torch.cuda._sanitizer as sanitizer

    import fullshard as fs

    sanitizer.enable_cuda_sanitizer()
    try:
        kinds = ("master", "state") if offload == "optimizer" else fs.Offload().kinds
        homes = fs.Offload(kinds=kinds, overlap=overlap, chunk=30_000, split_masters=split, slabs=slabs)
        model = fs.shard(net(), precision="bf16", offload=homes, **BLOCKS)
        optimizer = OPTIMIZERS["foreach"](model.parameters())
        for _ in range(4):
            model(torch.randint(0, 64, (4, 32), device="cuda")).float().square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
    except sanitizer.CUDASanitizerErrors as error:
        return str(error)
    return "clean"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("overlap", "slabs"), [(False, None), (True, None), (True, "4MiB")])
@pytest.mark.parametrize("offload", ["host", "optimizer"])
def test_copies_do_not_race_with_computing(
    offload: str, overlap: bool, slabs: str | None, split: bool
) -> None:
    assert ranks.run(_watched, 1, offload, overlap, split, slabs, fresh=True, timeout_s=120) == ["clean"]


def _overlapped(how: str) -> None:
    """What is read right behind a step that goes on is what the step leaves."""
    import fullshard as fs

    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    values = []
    for overlap in (False, True):
        model = fs.shard(copy.deepcopy(nn.Sequential(*layers)).cuda(), offload=fs.Offload(overlap=overlap))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            if how == "zeroed":
                optimizer.zero_grad(set_to_none=False)
            else:
                optimizer.zero_grad()
        if how == "state dict":
            found = list(optimizer.state_dict()["state"].values())
            values.append([v.full_tensor() for state in found for k, v in state.items() if k != "step"])
        else:
            values.append([p.detach().clone() for p in model.parameters()])
    same(*values, how)


@pytest.mark.parametrize("how", ["parameters", "state dict", "zeroed"])
def test_what_is_read_behind_a_step_that_goes_on_is_complete(how: str) -> None:
    ranks.run(_overlapped, 1, how)


def _late(how: str) -> None:
    """The update begins half a second after the step has returned, and is read, or loaded over, before."""
    import fullshard as fs
    from fullshard.engine.runtime import runtime_of

    torch.manual_seed(0)
    made = [nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]) for _ in range(2)]
    on_device = {"device": "1GiB", "one_backward": True}
    values: list[list[torch.Tensor]] = []
    for overlap in (False, True):
        given = on_device if how == "on the device" else {"kinds": ("master", "state")}
        offload = fs.Offload(overlap=overlap, **given)
        options = {"precision": "bf16", "offload": offload} | BLOCKS
        models = [fs.shard(copy.deepcopy(each).cuda(), **options) for each in made]
        optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-2, fused=True)
        transfers = runtime_of(models[0]).lanes[0].homes.transfers
        found: list[torch.Tensor] = []
        before: Any = None
        for step in range(4):
            torch.manual_seed(step)
            models[1](models[0](torch.randn(64, 512, device="cuda"))).float().square().mean().backward()
            if overlap:
                with transfers.beside():
                    torch.cuda._sleep(1_000_000_000)
            optimizer.step()
            optimizer.zero_grad()
            if how == "loaded" and step == 1:
                before = copy.deepcopy(optimizer.state_dict())
            if how == "loaded" and step == 2:
                optimizer.load_state_dict(before)
            if how != "loaded":
                found += [p.detach().clone() for model in reversed(models) for p in model.parameters()]
        values.append(found + [p.detach().clone() for model in models for p in model.parameters()])
    same(*values, how)


@pytest.mark.parametrize("how", ["on the device", "two models", "loaded"])
def test_a_late_update_is_waited_for(how: str) -> None:
    ranks.run(_late, 1, how)


def _used(folder: Path) -> None:
    import test_offload_use as uses

    uses.DEVICE = "cuda"
    # All uses under all offloads run on CPU ranks; here every sharded model locks its host memory.
    for turn, name in enumerate(("edited_in_place", "copied", "state_dicts_taken_and_loaded")):
        options = uses.OPTIONS[turn]
        uses.compare(name, options, uses.offloads(1, options, folder)[turn + 1 :][:1], folder)
    uses._saved(folder)


def test_edits_copies_state_dicts_and_checkpoints_leave_the_same_bits(tmp_path: Path) -> None:
    ranks.run(_used, 1, tmp_path, timeout_s=120)


def _on_the_host(folder: Path) -> None:
    import fullshard as fs

    expected = trained(precision="bf16")
    for given in ({}, {"kinds": ("master", "state")}, {"host": 3_500_000, "disk": folder, "chunk": 30_000}):
        found = trained(precision="bf16", offload=fs.Offload(step="host", **given))
        losses, norms = expected[:2]
        torch.testing.assert_close(found[0], losses, rtol=1e-3, atol=0)
        torch.testing.assert_close(found[1], norms, rtol=1e-2, atol=0)
        for one, other in zip(found[2:], expected[2:], strict=True):
            # Adam may turn the update of an element around whose gradient is almost zero.
            difference = (one - other).abs()
            assert difference.max() < 1e-2
            assert difference.mean() < 1e-4


def test_a_step_on_the_host_agrees_to_rounding(tmp_path: Path) -> None:
    ranks.run(_on_the_host, 1, tmp_path)


def test_masters_are_split_and_joined_by_kernels_with_the_bits_of_a_processor() -> None:
    from fullshard.engine.homes import remainders

    assert remainders._kernels() is not None
    generator = torch.Generator().manual_seed(0)
    for count in (1, 7, 8, 2047, 2048, 2049, 3_000_001):
        masters = torch.randint(-(2**31), 2**31, (count,), generator=generator).int()
        masters[::3] = masters[::3] & ~0xFFFF | 0x8000  # ties
        values = masters.view(torch.float32).nan_to_num_()
        found = []
        for device in ("cpu", "cuda"):
            own = values.to(device)
            compute, low = own.bfloat16(), torch.empty(count, dtype=torch.int16, device=device)
            ties = torch.empty(remainders.bitmap_bytes(count), dtype=torch.uint8, device=device)
            remainders.split(own, compute, low, ties)
            joined = torch.full_like(own, torch.nan)
            remainders.join(compute, low, ties, joined)
            assert torch.equal(joined.view(torch.int32), own.view(torch.int32)), (count, device)
            found.append([part.cpu() for part in (compute, low, ties)])
        same(*found, str(count))


def _read_and_written() -> None:
    """Split masters with their bf16 values on the device, or on the host."""
    import fullshard as fs

    for given in ({}, {"kinds": ("master", "state")}, {"overlap": True}):
        results = []
        for chosen in (None, fs.Offload(split_masters=True, **given)):
            model = fs.shard(net(), precision="bf16", offload=chosen, **BLOCKS)
            optimizer = OPTIMIZERS["fused"](model.parameters())
            for step in range(3):
                torch.manual_seed(step)
                model(torch.randint(0, 64, (4, 32), device="cuda")).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                for p in model.parameters():
                    p.data.view(-1)[3:5].mul_(1.5)
                    with torch.no_grad():
                        p.clamp_(-0.5, 0.5)
            norms = [p.detach().cpu().double().norm() for p in model.parameters()]
            results.append([*norms, *(p.detach().clone().cpu() for p in model.parameters())])
        same(*results, str(given))


def test_split_masters_are_read_and_written_between_steps() -> None:
    ranks.run(_read_and_written, 1)


def _as_computed(strategy: str) -> None:
    import fullshard as fs

    options: dict[str, Any] = {"strategy": strategy, "precision": "bf16"}
    expected = trained(**options)
    cases: dict[str, dict[str, Any]] = {
        "host": {},
        "state alone": {"kinds": ("state",)},
        "on the device": {"device": "1GiB"},
        "some on the device, overlap": {"device": 2**21, "chunk": 30_000, "overlap": True},
        "overlap, state alone": {"kinds": ("state",), "overlap": True},
        "overlap, slabs": {"kinds": ("state",), "chunk": 30_000, "overlap": True, "slabs": "4MiB"},
    }
    for name, given in cases.items():
        offload = fs.Offload(one_backward=True, **given)
        same(trained(offload=offload, **options), expected, f"{strategy}, {name}")
        gc.collect()


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_gradients_that_rest_as_computed_leave_the_same_bits(strategy: str) -> None:
    ranks.run(_as_computed, 1, strategy)


def _not_waiting() -> None:
    """Nothing that rests on the device, and steps there, waits for an update of the rest that goes on."""
    import fullshard as fs
    from fullshard.engine.runtime import runtime_of

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    offload = fs.Offload(device="90MiB", kinds=("state",), overlap=True)
    model = fs.shard(model, offload=offload, **BLOCKS)
    lanes = runtime_of(model).lanes
    assert {lane.homes.state.kind for lane in lanes} == {"device", "host"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x = torch.randn(64, 1024, device="cuda")
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    transfers = lanes[0].homes.transfers
    with transfers.down():
        torch.cuda._sleep(4_000_000_000)  # two seconds: what is stored waits for this
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.current_stream().synchronize()
    assert transfers.pending is not None
    assert not transfers.pending.over()
    torch.cuda.synchronize()


def test_a_step_on_the_device_does_not_wait_for_an_update_that_goes_on() -> None:
    ranks.run(_not_waiting, 1)


def _storing() -> None:
    """What gathers send is on the device: passes need not wait until the rest is back in host memory."""
    import fullshard as fs
    from fullshard.engine.runtime import runtime_of

    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    results = []
    for slabs in (None, "400MiB"):
        offload = None
        if slabs is not None:
            offload = fs.Offload(kinds=("master", "state"), overlap=True, slabs=slabs)
        model = fs.shard(copy.deepcopy(layers).cuda(), precision="bf16", offload=offload, **BLOCKS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        x = torch.randn(64, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        for step in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if offload is None or step != 2:
                continue
            transfers = runtime_of(model).lanes[0].homes.transfers
            torch.cuda.synchronize()
            with transfers.down():
                torch.cuda._sleep(4_000_000_000)  # two seconds: what is stored waits for this
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            torch.cuda.current_stream().synchronize()
            assert transfers.pending is not None
            assert not transfers.pending.over()
            optimizer.step()
            optimizer.zero_grad()
        if offload is None:
            for _ in range(2):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([p.detach().cpu() for p in model.parameters()])
    same(*results, "stored later")


def test_a_forward_does_not_wait_for_what_is_stored_where_slabs_hold_it() -> None:
    ranks.run(_storing, 1)
