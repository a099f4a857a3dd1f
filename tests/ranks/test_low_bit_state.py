"""Optimizer state that rests in 8-bit blocks: the bits of one process on any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard as fs
import optimizer_kinds
import ranks
from fullshard.engine.runtime import runtime_of
from fullshard.engine.step import low_bit
from fullshard.engine.step.block_state import BlockState
from fullshard.precision import BLOCK, STATE_ROW_BYTES

STEPS = 4
OptimizerFn = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, OptimizerFn] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "own": optimizer_kinds.Signed,
    "state in its constructor": optimizer_kinds.StateInConstructor,
    "no state": lambda p: torch.optim.SGD(p, lr=0.1),
}


class Net(nn.Module):
    """Cut and uncut parameters, tied ones, one in another memory format, without elements or dimensions."""

    def __init__(self, empty: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40, 40 + 30 * i) for i in range(3))
        self.tied = nn.Linear(40, 40, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.conv = nn.Conv2d(8, 12, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(empty, 3))

    def forward(self, x: Tensor) -> Tensor:
        total = self.tied(x).sum() * self.scale + self.nothing.sum() + self.conv(x.view(1, 8, 5, 5)).sum()
        for block in self.blocks:
            total = total + block(x).sum()
        return total


def build(dtype: torch.dtype = torch.float32, empty: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net(empty).to(dtype)


def gradient_of(p: Tensor, shape: tuple[int, ...], name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) * 1000 + step)
    values, scales = (torch.randn(shape, generator=generator) for _ in range(2))
    return (values * scales.mul(2).exp()).to(p.dtype)


SHAPES = {name: tuple(p.shape) for name, p in build().named_parameters()}


def in_memory_order(value: Tensor) -> Tensor:
    return (value.permute(0, 2, 3, 1) if value.dim() == 4 else value).reshape(-1)


def rounded(value: Tensor) -> Tensor:
    """What comes back of a state, block by block of its parameter."""
    flat = in_memory_order(value)
    padded = torch.zeros(-(-len(flat) // BLOCK) * BLOCK, dtype=value.dtype)
    padded[: len(flat)] = flat
    rows = torch.zeros(len(padded) // BLOCK, STATE_ROW_BYTES, dtype=torch.uint8)
    low_bit.encode(padded, rows)
    low_bit.decode(rows, padded)
    back = torch.empty_like(value)
    in_order = back.permute(0, 2, 3, 1) if value.dim() == 4 else back
    in_order.copy_(padded[: len(flat)].view(in_order.shape))
    return back


def reference(
    optimizer_fn: OptimizerFn, steps: int, dtype: torch.dtype = torch.float32, empty: int = 0
) -> dict[str, Tensor]:
    """In one process, without sharding: the optimizer's own steps, and rounding after each."""
    model = build(dtype, empty)
    optimizer = optimizer_fn(model.parameters())
    for p in optimizer.state:  # what a constructor has made
        round_states(optimizer.state[p], p)
    for step in range(steps):
        for name, p in model.named_parameters():
            p.grad = torch.empty_like(p).copy_(gradient_of(p, tuple(p.shape), name, step))
        optimizer.step()
        for p in optimizer.state:
            round_states(optimizer.state[p], p)
    values: dict[str, Tensor] = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            values[f"{name}/{key}"] = torch.as_tensor(value)
    return values


def round_states(state: dict[str, Any], p: Tensor) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == p.shape and value.dim():
            state[key] = rounded(value)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Steps on gradients that are the same on any number of ranks."""
    x = torch.ones(5, 40, dtype=next(model.parameters()).dtype)
    for step in steps:
        model(x).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            shape = p.grad.shape if name == "nothing" else SHAPES[name]
            p.grad.copy_(gradient_of(p, shape, name, step))
        optimizer.step()
        optimizer.zero_grad()


def unsharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    with fs.full(model):
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = [name for name, _ in model.named_parameters()]
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
            assert not isinstance(value, BlockState)
            values[f"{names[index]}/{key}"] = value.clone()
    return values


def shard(model: nn.Module, **options: Any) -> nn.Module:
    return fs.shard(model, **({"units": nn.Linear, "state": "8bit"} | options))


def trained(
    optimizer_fn: OptimizerFn, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, Tensor]:
    model = shard(build(dtype), **options)
    optimizer = optimizer_fn(model.parameters())
    stepped(model, optimizer, range(STEPS))
    return unsharded(model, optimizer)


def _all(names: Iterable[str], variants: list[dict[str, Any]], folder: Path) -> list[dict[str, Tensor]]:
    found = []
    for name in names:
        for options in variants:
            if options.get("offload") == "disk":
                disk = fs.Offload(chunk=600, host=70_000 * (1 + 3 * ("strategy" in options)), disk=folder)
                options = options | {"offload": disk}
            if options.get("strategy") == "hybrid":
                mesh = torch.distributed.init_device_mesh(
                    "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
                )
                options = options | {"mesh": mesh}
            found.append(trained(OPTIMIZERS[name], **options))
        ranks.end_groups_of_models()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor], what: Any) -> None:
    assert one.keys() == other.keys(), what
    for name, value in one.items():
        assert torch.equal(value.reshape(-1), other[name].reshape(-1)), (what, name)


VARIANTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"offload": "disk"}],
    2: [{}, {"strategy": "replicate"}, {"offload": "host"}, {"offload": "disk", "strategy": "replicate"},
        {"offload": fs.Offload(chunk=600, step="host")}, {"dtype": torch.bfloat16},
        {"precision": fs.Precision(gather=torch.int8, wire=torch.int8)}],
    3: [{"strategy": "zero1"}, {"offload": fs.Offload(kinds=("state",), chunk=600)}],
    4: [{"strategy": "zero2", "units": None}, {"strategy": "hybrid"}, {"offload": "optimizer"}],
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_bits_are_those_of_one_process_for_any_ranks_strategy_and_home(
    num_ranks: int, tmp_path: Path
) -> None:
    variants = VARIANTS[num_ranks]
    for found in ranks.run(_all, num_ranks, ["AdamW"], variants, tmp_path):
        for options, values in zip(variants, found, strict=True):
            dtype = options.get("dtype", torch.float32)
            same(reference(OPTIMIZERS["AdamW"], STEPS, dtype), values, (num_ranks, options))


def test_every_element_wise_optimizer_steps_on_state_in_blocks(tmp_path: Path) -> None:
    names = list(OPTIMIZERS)
    for name, found in zip(names, ranks.run(_all, 2, names, [{}], tmp_path)[0], strict=True):
        same(reference(OPTIMIZERS[name], STEPS), found, name)


def test_rounding_to_blocks_is_what_differs_from_exact_state() -> None:
    exact = ranks.run(_all, 1, ["AdamW"], [{"state": "exact"}], Path())[0][0]
    weights = {name for name in exact if name.endswith("weight")}
    in_blocks = reference(OPTIMIZERS["AdamW"], STEPS)
    assert not any(torch.equal(exact[name], in_blocks[name]) for name in weights)
    assert all(float((exact[name] - in_blocks[name]).abs().max()) < 0.05 for name in weights)


# ---- checkpoints: torch.distributed.checkpoint leaves out what has no elements


def _saved(folder: Path, state: str) -> dict[str, Tensor]:
    model = shard(build(empty=1), state=state)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    stepped(model, optimizer, range(2))
    fs.save(folder / state, model, optimizer)
    fs.save(folder / f"{state} behind", model, optimizer, background=True).wait()
    torch.distributed.checkpoint.save(
        {"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder / f"{state} dcp"
    )
    return unsharded(model, optimizer)


def _loaded(folder: Path, name: str, state: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was loaded, and what it becomes."""
    model = shard(build(empty=1), state=state)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    fs.load(folder / name, model, optimizer)
    kinds = {type(v) for s in optimizer.state.values() for k, v in s.items() if k != "step" and v.numel()}
    assert kinds == ({BlockState} if state == "8bit" else {Tensor})  # never all of it in full
    before = unsharded(model, optimizer)
    stepped(model, optimizer, range(2, STEPS))
    return before, unsharded(model, optimizer)


def _from_state_dict(folder: Path) -> list[dict[str, Tensor]]:
    """By optimizer.state_dict() of stock torch: into this run, and into another."""
    found = []
    for again in (False, True):
        model = shard(build(empty=1))
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        stepped(model, optimizer, range(2))
        saved = optimizer.state_dict()
        assert not any(isinstance(v, BlockState) for s in saved["state"].values() for v in s.values())
        if again:
            optimizer = OPTIMIZERS["AdamW"](model.parameters())
        optimizer.load_state_dict(saved)
        stepped(model, optimizer, range(2, STEPS))
        found.append(unsharded(model, optimizer))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for state in ("8bit", "exact"):
        values = ranks.run(_saved, 2, folder, state)[0]
        torch.save(values, folder / f"{state}.pt")
    return folder


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_checkpoint_goes_on_with_the_same_bits_on_any_number_of_ranks(
    num_ranks: int, checkpoints: Path
) -> None:
    saved, expected = torch.load(checkpoints / "8bit.pt"), reference(OPTIMIZERS["AdamW"], STEPS, empty=1)
    for name in ("8bit", "8bit behind", "8bit dcp"):
        before, after = ranks.run(_loaded, num_ranks, checkpoints, name, "8bit")[0]
        same(saved, before, name)
        same(expected, after, name)


def test_exact_state_loads_in_blocks_and_back(checkpoints: Path) -> None:
    for name, state in (("exact", "8bit"), ("8bit", "exact"), ("exact dcp", "8bit")):
        saved = torch.load(checkpoints / f"{name.split()[0]}.pt")
        before, _ = ranks.run(_loaded, 2, checkpoints, name, state)[0]
        expected = dict(saved)
        for key, value in saved.items():
            if state == "8bit" and "/exp" in key:
                expected[key] = rounded(value)
        same(expected, before, name)


def test_a_checkpoint_is_read_by_anything_that_reads_safetensors(checkpoints: Path) -> None:
    from safetensors.torch import load_file

    saved = torch.load(checkpoints / "8bit.pt")
    stored = load_file(checkpoints / "8bit" / "optimizer.safetensors")
    for name, value in stored.items():
        assert torch.equal(value, saved["/".join(name.rsplit(".", 1))]), name


def test_the_optimizers_own_state_dict_loads_with_the_same_bits(tmp_path: Path) -> None:
    for found in ranks.run(_from_state_dict, 2, tmp_path)[0]:
        same(reference(OPTIMIZERS["AdamW"], STEPS, empty=1), found, "state dict")


# ---- what it holds


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def _held(offload: Any) -> tuple[int, int, int, str, int]:
    """Bytes of state at rest, as planned and in fact, of slabs; and of a copy's."""
    model = fs.shard(Wide(), units=nn.Linear, state="8bit", offload=offload)
    optimizer = torch.optim.AdamW(model.parameters())
    most = 0

    def watch(*_: Any) -> None:
        nonlocal most
        shown = [v for s in optimizer.state.values() for v in s.values() if type(v) is Tensor and v.dim()]
        most = max(most, sum(v.nbytes for v in shown))

    step = torch.optim.AdamW.step

    class Watched(torch.optim.AdamW):
        fullshard_step = "element-wise"

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = step.__wrapped__(self, closure)  # type: ignore[attr-defined]
            watch()
            return loss

    optimizer = Watched(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 512)).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    plan = fs.plan(model)
    twin, other = copy.deepcopy((model, optimizer))
    twin(torch.ones(2, 512)).backward()
    other.step()
    copied = [v for s in other.state.values() for v in s.values() if v.dim()]
    assert {type(v) for v in copied} == {BlockState}
    return plan.state_bytes, sum(v.nbytes for v in states), most, str(plan), plan.slab_bytes


@pytest.mark.parametrize("offload", [None, fs.Offload(chunk=70_000)])
def test_no_more_state_is_there_in_full_than_planned(offload: Any) -> None:
    planned, held, most, text, slabs = ranks.run(_held, 2, offload)[0]
    assert held <= planned <= held * 1.01
    chunk = 4 * 2**20 if offload is None else offload.chunk
    elements = 8 * 512 * 513 // 2
    assert 0 < most <= 2 * 4 * min(chunk, elements)
    assert "Adam state 2." in text.replace("  ", " ") or offload is not None
    assert "optimizer step: slabs of" in text
    assert slabs >= most


# ---- what is refused


def _refused() -> list[str]:
    found = []

    def error_of(act: Callable[[], Any]) -> None:
        with pytest.raises(fs.FullshardError) as error:
            act()
        found.append(f"{type(error.value).__name__}: {error.value}")

    class Complex(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(300, dtype=dtype))

    error_of(lambda: fs.shard(build(), state="7bit"))
    error_of(lambda: fs.shard(build(), state=8))
    error_of(lambda: fs.shard(build(), optim_bits=8))
    for dtype in (torch.complex64, torch.float64, torch.float16):
        error_of(lambda dtype=dtype: fs.shard(Complex(dtype), state="8bit"))
    frozen = Complex(torch.float64)
    frozen.weight.requires_grad_(False)
    fs.shard(frozen, state="8bit")
    fs.shard(Complex(torch.float64), state="8bit", ignore=["weight"])
    for strategy in ("zero3", "replicate"):
        model = shard(build(), strategy=strategy)
        model(torch.ones(5, 40)).backward()
        error_of(optimizer_kinds.ByUpdateNorm(model.parameters()).step)
    for options in ({}, {"state": "exact", "offload": "host"}):
        model = shard(build(), **options)
        model(torch.ones(5, 40)).backward()
        error_of(optimizer_kinds.ByGradientNorm(model.parameters()).step)
    return found


def test_what_cannot_rest_in_blocks_is_refused_with_the_remedy() -> None:
    seven, eight, bits, *dtypes, sharded, replicated, norm, norm_offloaded = ranks.run(_refused, 2)[0]
    assert all(error.startswith("OptionError") for error in (seven, eight, bits, *dtypes))
    assert "'7bit'" in seven
    assert "Did you mean '8bit'" in seven
    assert "Did you mean '8bit'" in eight
    assert "state='8bit'" in bits
    for dtype, error in zip(("complex64", "float64", "float16"), dtypes, strict=True):
        assert f"'weight' is {dtype}" in error
        assert "ignore=" in error
    for error in (sharded, replicated, norm, norm_offloaded):
        assert error.startswith("OptimizerError")
        assert "element-wise" in error
    assert "norms of gradients" in norm
    assert "norms of gradients" in norm_offloaded


def _steps_alike() -> None:
    model = shard(build())
    for lane in runtime_of(model).lanes:
        assert lane.layout.interval % BLOCK == 0
        assert all(piece.start % BLOCK == 0 for piece in lane.layout.pieces)
    plain = shard(build(), state="exact")
    assert not any(lane.streams_steps for lane in runtime_of(plain).lanes)


def test_blocks_are_aligned_and_exact_state_is_not_streamed() -> None:
    ranks.run(_steps_alike, 2)


def _tensor_parallel(folder: Path) -> list[list[float]]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for state, resumes in (("exact", False), ("8bit", False), ("8bit", True)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fs.shard(model, mesh=mesh["dp"], state=state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if resumes:
            fs.load(folder, model, optimizer)
        losses = []
        for step in range(2 if resumes else 0, 4):
            loss = model(torch.full((2, 64), step + 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 1 and state == "8bit":
                fs.save(folder, model, optimizer)
        found.append(losses)
    return found


def test_beside_tensor_parallelism_it_trains_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    exact, in_blocks, resumed = ranks.run(_tensor_parallel, 4, tmp_path / "saved")[0]
    assert in_blocks == pytest.approx(exact, rel=0.02)
    assert in_blocks != exact
    assert resumed == in_blocks[2:]
