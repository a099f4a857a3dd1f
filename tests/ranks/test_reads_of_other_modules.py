"""Modules that read parameters of other modules: right whatever the size of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
import ranks
import reference
from cases import Case, refusal
from engines import BLOCKS, WIDTH, batch, build, my_rank


class Holder(nn.Module):
    """Its forward is never called: others compute with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def size(self) -> int:
        return self.weight.numel()

    @property
    def scale(self) -> Tensor:
        return self.weight.norm()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Holder() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.run(x))
        return out


class Shapes(Base):
    def forward(self, x: Tensor) -> Tensor:
        w = self.blocks[1].weight
        assert isinstance(w, nn.Parameter)
        assert w.shape == (WIDTH, WIDTH), w.shape
        assert (w.numel(), w.size(0), w.dim(), len(w), w.ndim) == (WIDTH * WIDTH, WIDTH, 2, WIDTH, 2)
        assert w.dtype == x.dtype
        assert w.device == x.device
        assert next(self.blocks.parameters()).shape == (WIDTH, WIDTH)
        assert sum(p.numel() for p in self.parameters()) == 4 * (WIDTH * WIDTH + WIDTH) + 5 * (WIDTH + 1)
        assert self.blocks[2].size() == WIDTH * WIDTH
        assert dict(self.named_parameters())["blocks.3.bias"].shape == (WIDTH,)
        return super().forward(x) / w.shape[0]


class Values(Base):
    """Without gradients: an element, a norm, a mean over all parameters, a list of strings."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = self.blocks[0].weight[0].sum() + self.blocks[3].scale
            factor = factor + sum(p.abs().mean() for p in self.parameters())
            factor = factor + self.blocks[2].weight.data.max() + self.blocks[1].bias[1].item()
            factor = factor + float(torch.stack([b.weight for b in self.blocks]).var())
        return super().forward(x) * factor


class Penalty(Base):
    """With gradients, computed before the blocks run and added after them."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(block.weight.pow(2).sum() for block in self.blocks)
        return super().forward(x) + 0.01 * penalty


class LatePenalty(Base):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + 0.1 * self.blocks[0].scale + 0.01 * sum(p.norm() for p in self.blocks[2].parameters())


class NeverCalled(Base):
    """The third block is a holder of weights only."""

    def run(self, x: Tensor) -> Tensor:
        for at in (0, 1, 3):
            x = x + torch.tanh(self.blocks[at](x))
        return F.linear(x, self.blocks[2].weight.t(), self.blocks[2].bias)


class Sibling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.other: Any = None

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out if self.other is None else out + x @ self.other().weight


class Siblings(Base):
    """A block computes with the weight of the next one and of the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sibling() for _ in range(4))
        self.blocks[1].other = lambda: self.blocks[2]
        self.blocks[3].other = lambda: self.blocks[0]


class TiedLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(50, WIDTH), nn.Embedding(50, WIDTH)])
        self.blocks = nn.ModuleList(Holder() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x[:, 0].detach().abs() * 1e3).long() % 50
        h = x + self.tables[0](tokens)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return F.linear(h, self.tables[0].weight)[:, :5] + h @ self.tables[1].weight.t()[:, :5]


class HookReads(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_forward_pre_hook(lambda m, args: (args[0] * self.blocks[0].weight.norm(),))
        self.blocks[1].register_forward_hook(lambda m, args, out: out + self.blocks[3].bias.sum())


class Checkpointed(Base):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(self.one, block, x, use_reentrant=False)
        return x

    def one(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + torch.tanh(block(x)) * self.head.weight.norm()


class Returned(Base):
    """A view of another unit's weight leaves the model."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.blocks[1].weight[0], self.blocks[2].weight


def _first(model: nn.Module, piece: cases.Piece, weight: float) -> float:
    out, row, full = model(piece[0])
    loss = (F.cross_entropy(out, piece[1]) + row.sum() + full.pow(2).mean()) * weight
    loss.backward()
    return loss.item()


def _evaluating(model: nn.Module, piece: cases.Piece, weight: float) -> float:
    loss = F.cross_entropy(model(piece[0]), piece[1]) * weight
    with torch.no_grad():
        model(piece[0])
    loss.backward()
    return loss.item()


CASES: dict[str, Case] = {
    "shapes": Case(Shapes),
    "values": Case(Values),
    "penalty": Case(Penalty),
    "late penalty": Case(LatePenalty),
    "never called": Case(NeverCalled),
    "siblings": Case(Siblings),
    "tied logits": Case(TiedLogits),
    "hooks": Case(HookReads),
    "checkpointed": Case(Checkpointed),
    "returned": Case(Returned, _first),
    "evaluation between forward and backward": Case(Penalty, _evaluating),
}


SMALL: dict[str, Any] = {"merge_units": None, "keep_full": None}
OPTIONS: list[dict[str, Any]] = [
    {"strategy": "zero3", "keep_full": 0},
    {"strategy": "zero3"},
    {"strategy": "zero2"},
    {"strategy": "zero1"},
    {"strategy": "replicate"},
    SMALL,
]


def _all(chosen: list[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    found = {}
    for name, at in chosen:
        found[name, at] = cases.on_a_rank(CASES[name], **OPTIONS[at])
        ranks.end_groups_of_models()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "others"),
    [
        pytest.param(1, 0, id="1"),
        pytest.param(2, 1, id="2"),
        pytest.param(3, 0, id="3", marks=pytest.mark.long),
        pytest.param(2, len(OPTIONS) - 1, id="2, every option", marks=pytest.mark.long),
    ],
)
def test_reading_another_modules_parameters_is_as_in_one_process(num_ranks: int, others: int) -> None:
    chosen = cases.in_turn(CASES, len(OPTIONS), 1, others)
    results = ranks.run(_all, num_ranks, chosen, timeout_s=240)
    for name, at in chosen:
        print(name, OPTIONS[at])
        cases.assert_as_in_one_process(CASES[name], [result[name, at] for result in results])


class ReadsInBackward(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.seen.append(self.blocks[0].weight.shape))
            out.register_hook(lambda _: self.seen.append(refusal(lambda: self.blocks[0].weight.norm())))
        return out


class Dtypes(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.dtypes = {p.dtype for p in self.parameters()}
        return super().forward(x)


def _edges() -> dict[str, Any]:
    import copy

    import fullshard as fs

    x = batch(0, my_rank())[0]
    found: dict[str, Any] = {}
    model = fs.shard(build(ReadsInBackward), **(BLOCKS | {"keep_full": 0}))
    model(x).sum().backward()
    found["backward"] = model.seen
    model = fs.shard(build(Dtypes), precision="bf16", **BLOCKS)
    model(x)
    found["dtypes"] = model.dtypes
    model = fs.shard(build(Values), **BLOCKS)
    with fs.inference(model, memory=0):
        found["inference"] = model(x)
    twin = copy.deepcopy(model)
    found["copy"] = twin(x).detach()
    found["original"] = model(x).detach()
    found["at rest"] = [type(p) is nn.Parameter for p in model.parameters()]
    found["count"] = sum(p.numel() for p in model.parameters())
    with fs.full(model):
        found["full"] = model(x).detach()
    kept: list[Any] = []
    model = fs.shard(build(Base), **BLOCKS)
    model.blocks[3].register_forward_pre_hook(lambda m, args: kept.append(model.blocks[0].weight))
    model(x)
    found["kept"] = refusal(lambda: kept[0].norm())
    model.zero_grad()
    model(x).sum().backward()
    found["grad"] = model.blocks[0].weight.grad is not None
    return found


def test_reading_in_backward_inference_copies_and_after_the_pass() -> None:
    for rank, found in enumerate(ranks.run(_edges, 2)):
        shape, refused = found["backward"]
        assert shape == (WIDTH, WIDTH)
        assert refused[0] == "AtRestError"
        assert "blocks.0.weight" in refused[1]
        assert found["dtypes"] == {torch.bfloat16}
        expected = build(Values)(batch(0, rank)[0]).detach()
        for what in ("inference", "copy", "original", "full"):
            reference.assert_close(found[what], expected, what)
        assert all(found["at rest"])
        assert found["count"] < 4 * (WIDTH * WIDTH + WIDTH) + 5 * (WIDTH + 1)
        assert found["kept"][0] == "AtRestError"
        assert found["grad"]


def _compiled() -> list[float]:
    model = cases.sharded(make=Penalty)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    compiled = torch.compile(model, backend="aot_eager")
    losses = []
    for step in range(2):
        x, y = batch(step, my_rank())
        loss = F.cross_entropy(compiled(x), y)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.2 * p.grad
                p.grad = None
    return losses


def test_a_compiled_model_reads_other_modules_parameters_as_in_one_process() -> None:
    found = ranks.run(_compiled, 2, timeout_s=120)
    expected = cases.in_one_process(
        Case(Penalty, optimizer=lambda p: torch.optim.SGD(p, lr=0.2), steps=2)
    ).trace.losses
    assert [sum(both) / 2 for both in zip(*found, strict=True)] == pytest.approx(expected, rel=1e-5)
