"""`checkpoint_activations="offload"`: block inputs wait in host memory, and no number changes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard as fs
import ranks

WIDTH = 32
SHAPE = (64, 128, WIDTH)  # 1 MiB in fp32, the least that moves


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(drop))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Stack(nn.Module):
    def __init__(self, drop: float = 0.0, blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block(drop) for _ in range(blocks))

    def block(self, drop: float) -> nn.Module:
        return Block(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class WithMemory(nn.Module):
    """By position, by keyword, in a dict; a mask that trains nothing; two results."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor, *, memory: Tensor, more: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.mix(torch.cat([x, memory], -1)) * more["mask"]
        return self.inner(x), {"residual": more["residual"] + x}


class Decoder(nn.Module):
    """Every block gets the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.embed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(WithMemory() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory, residual = self.encode(x).tanh(), self.embed(x)
        more, y = {"mask": (x > -1).long(), "residual": residual}, x
        for block in self.blocks:
            y, out = block(y, memory=memory, more=more)
            more = {**more, **out}
        return y + more["residual"]


class Nested(Stack):
    """Blocks of blocks."""

    def block(self, drop: float) -> nn.Module:
        return Outer(drop)


class Outer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Block(drop), Block(drop)])
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return torch.sin(self.own(x))


class Views(Stack):
    """Inputs that are transposed, permuted, in the middle of a larger tensor, with gaps, or expanded."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.blocks[0](x.transpose(0, 1))
        x = self.blocks[1](torch.cat([x[:1], x])[1:])
        x = self.blocks[2](torch.cat([x, x])[::2])
        x = self.blocks[3](x.permute(1, 0, 2))
        return self.blocks[4](x.mean(0, keepdim=True).expand(2 * len(x), -1, -1))


class Twice(Stack):
    """Every block is called twice, with the same input."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) + block(x).sin()
        return x


def _plain(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    return [loss]


def _input_gradient(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    blocks: Any = model.blocks
    loss = model(x).square().mean() + blocks[0](x).mean()
    loss.backward()
    assert x.grad is not None
    return [loss, x.grad]


def _two_forwards(model: nn.Module, x: Tensor) -> list[Tensor]:
    first, second = model(x).square().mean(), model(x * 0.5).abs().mean()
    (first * second + second).backward()
    return [first, second]


def _graph_kept(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    (before,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert x.grad is not None
    return [loss, before, x.grad]


def _evaluated_between(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x).square().mean()
    with torch.no_grad():
        seen = model(x)
    loss.backward()
    model(x).sum()  # and one without backward
    return [loss, seen]


def _autocast(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.cat([x, x])).float().square().mean()
    loss.backward()
    return [loss]


def _penalty_of_input(model: nn.Module, x: Tensor) -> list[Tensor]:
    """In which order blocks run backward is autograd's to choose."""
    blocks: Any = model.blocks
    y = model.get_submodule("first")(x)
    outs = [block(y) for block in blocks]
    loss = sum((-1) ** i * out.square().mean() for i, out in enumerate(outs)) + outs[0].mean()
    loss.backward()
    return [loss]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], list[Tensor]]]] = {
    "one after another": (Stack, _plain),
    "dropout": (lambda: Stack(0.3), _plain),
    "shared and by keyword": (Decoder, _plain),
    "nested, with dropout": (lambda: Nested(0.2, 3), _plain),
    "views": (Views, _plain),
    "called twice": (Twice, _plain),
    "gradient of the input": (Stack, _input_gradient),
    "two forwards": (Stack, _two_forwards),
    "graph kept": (Stack, _graph_kept),
    "graph kept, nested": (lambda: Nested(0.2, 2), _graph_kept),
    "evaluated between": (Stack, _evaluated_between),
    "autocast": (Stack, _autocast),
    "side by side": (Stack, _penalty_of_input),
}
# Units are gathered again in these, and nodes of the graph run in other orders.
ON_TWO = ["nested, with dropout", "called twice", "two forwards", "graph kept", "side by side"]
BLOCKS = {"units": (Block, Outer, WithMemory), "merge_units": 0, "keep_full": 0}


def _train(case: str, model: nn.Module, after_step: Callable[[], Any] = int) -> list[Tensor]:
    """What each of two steps returns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    found: list[Tensor] = []
    for _ in range(2):
        values = CASES[case][1](model, torch.randn(SHAPE, generator=generator))
        found += [value.detach().clone() for value in values]
        optimizer.step()
        optimizer.zero_grad()
        del values
        after_step()
    return found


def _values(model: nn.Module) -> list[Tensor]:
    with fs.full(model, writeback=False):
        return [value.detach().clone() for value in model.parameters()]


def _build(case: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[case][0]()


def _buffers(model: nn.Module) -> Any:
    keeper = next(m.forward.keeper for m in model.modules() if hasattr(m.forward, "keeper"))
    return keeper.link.buffers


def _note(seen: list[tuple[int, int]], buffers: Any) -> None:
    seen.append((len(buffers._free), buffers.allocations))


def _cases(cases: list[str]) -> list[str]:
    """On every rank the same batch: the mean over ranks is exact, and one process gets the same numbers."""
    wrong = []
    for case in cases:
        reference = _build(case)
        expected = [*_train(case, reference), *(p.detach() for p in reference.parameters())]
        model = fs.shard(_build(case), checkpoint_activations="offload", **BLOCKS)
        seen: list[tuple[int, int]] = []
        found = [*_train(case, model, partial(_note, seen, _buffers(model))), *_values(model)]
        if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
            wrong.append(case)
        free, allocated = seen[0]
        if not allocated or free != allocated or seen[1] != seen[0]:
            wrong.append(f"{case}: free and allocated buffers after each step: {seen}")
    return wrong


def test_every_way_to_call_blocks_gives_the_numbers_of_one_process_and_uses_buffers_again() -> None:
    assert ranks.run(_cases, 2, ON_TWO, timeout_s=300) == [[], []]
    assert ranks.run(_cases, 1, [case for case in CASES if case not in ON_TWO], timeout_s=300) == [[]]


def _strategies() -> list[str]:
    wrong = []
    for options in (
        {"strategy": "zero2"},
        {"strategy": "zero1"},
        {"strategy": "replicate"},
        {"strategy": "zero3", "precision": "bf16"},
        {
            "strategy": "hybrid",
            "mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")),
        },
        {"strategy": "zero3", "offload": "host"},
    ):
        batch = SHAPE[0] * (2 if "precision" in options else 1)  # 1 MiB in bf16 too
        found = []
        for mode in (True, "offload"):
            torch.manual_seed(0)
            model = fs.shard(Stack(0.3, blocks=4), checkpoint_activations=mode, **(BLOCKS | options))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            torch.manual_seed(torch.distributed.get_rank())
            with fs.accumulate(model):
                model(torch.randn(batch, *SHAPE[1:])).square().mean().backward()
            model(torch.randn(batch, *SHAPE[1:])).square().mean().backward()
            optimizer.step()
            found.append(_values(model))
        if not _buffers(model).allocations or not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
            wrong.append(str(options))
    return wrong


def test_strategies_precisions_and_accumulation_change_nothing() -> None:
    assert ranks.run(_strategies, 2, timeout_s=300) == [[], []]


class AddsToItsInput(Block):
    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        for other in more.values():
            other.add_(1)
        return super().forward(x)


class Changing(Stack):
    """Something is written to after a block got it."""

    def __init__(self, how: str) -> None:
        super().__init__(blocks=4)
        self.how = how

    def block(self, drop: float) -> nn.Module:
        return AddsToItsInput(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()
        for number, block in enumerate(self.blocks):
            if self.how == "by the block" and number == 1:
                x = block(x * 1, more=x)
            else:
                y = block(x=x) if self.how == "by keyword" else block(x)
                if number == 1 and self.how != "a view":
                    with torch.no_grad():
                        x.add_(1)
                if number == 1 and self.how == "a view":
                    with torch.no_grad():
                        x.view(-1)[:3].mul_(2)
                x = y
        return x


def _changed() -> dict[str, Any]:
    found = {}
    for how in ("by position", "by keyword", "by the block", "a view"):
        for mode in (True, "offload"):
            torch.manual_seed(0)
            model = fs.shard(
                Changing(how), checkpoint_activations=mode, **(BLOCKS | {"units": AddsToItsInput})
            )
            try:
                model(torch.randn(SHAPE)).sum().backward()
                found[f"{how}, {mode}"] = "no error"
            except fs.FullshardError as error:
                found[f"{how}, {mode}"] = str(error)
    return found


def test_an_input_that_is_written_to_before_backward_is_an_error_that_names_the_block() -> None:
    for found in ranks.run(_changed, 1, timeout_s=120):
        for case, text in found.items():
            assert "blocks.1" in text, (case, text)
            assert "modified in place" in text, (case, text)


class Failing(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("on purpose")
        return super().forward(x)


class Fails(Stack):
    def block(self, drop: float) -> nn.Module:
        return Failing(drop)


def _interrupted() -> dict[str, Any]:
    torch.manual_seed(0)
    reference = Fails()
    model = fs.shard(
        copy.deepcopy(reference), checkpoint_activations="offload", **(BLOCKS | {"units": Failing})
    )
    buffers, blocks = _buffers(model), list(model.get_submodule("blocks"))
    x = torch.randn(SHAPE)
    model(x).square().mean().backward()
    model.zero_grad()
    before = buffers.allocations
    blocks[3].fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(x)
    gc.collect()
    found: dict[str, Any] = {"back": len(buffers._free) == before}
    blocks[3].fails = False
    twin = copy.deepcopy(model)
    found["a copy has its own"] = _buffers(twin) is not buffers
    for each in (reference, model, twin):
        for size in (SHAPE[0], SHAPE[0] // 2, SHAPE[0] + 8):  # shorter ones fit, longer ones replace
            each(x[:1].expand(size, -1, -1)).square().mean().backward()
    found["no more than before"] = (len(buffers._free), buffers.allocations) == (before, 2 * before)
    for each in (reference, model, twin):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    expected = [p.detach() for p in reference.parameters()]
    found["same"] = all(map(torch.equal, _values(model), expected))
    found["same in a copy"] = all(map(torch.equal, _values(twin), expected))
    return found


def test_buffers_come_back_after_an_exception_and_are_replaced_by_larger_ones() -> None:
    for found in ranks.run(_interrupted, 1, timeout_s=120):
        assert all(found.values()), found
