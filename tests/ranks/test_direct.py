"""Weight gradients of large Linears are written where they are sent from, and are the same numbers."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import engines
import ranks
import tables


class Block(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width, bias=bias), nn.Linear(3 * width, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Block(16, bias=i % 2 == 0) for i in range(3))
        self.head = nn.Linear(16, 8)
        if kind == "frozen":
            self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.kind == "in reentrant segments":
                x = checkpoint(block, checkpoint(block, x, use_reentrant=True), use_reentrant=True)
                continue
            x = block(x)
            if self.kind == "called twice":
                x = block(x)
        return self.head(x)


class Shared(Block):
    """Uses a weight in its Linear and once more by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.up.weight), self.up.weight.t()) * 0.1


KINDS = ("plain", "called twice", "in reentrant segments", "frozen", "shared")


def _net(kind: str) -> Net:
    torch.manual_seed(0)
    net = Net(kind)
    if kind == "shared":
        net.blocks = nn.ModuleList(Shared(16, bias=True) for _ in range(3))
    return net


def _sharded(kind: str, direct_bytes: int, **said: Any) -> Net:
    """Weights of a useful size would be too slow here: an integration may choose from which size on."""
    from fullshard.api import shard_with
    from fullshard.policy import Integration, UnitPolicy

    integration = Integration(policy_of=lambda _: UnitPolicy(direct_bytes=direct_bytes))
    defaults = {"strategy": "zero3", "precision": "fp32", "units": None, "ignore": ()}
    return shard_with(integration, _net(kind), **(defaults | engines.BLOCKS | said))


def _train(kind: str, direct_bytes: int, said: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Trained parameters, and how many gradients were written in place."""
    import fullshard as fs

    written = 0
    model = _sharded(kind, direct_bytes, **said)
    send = model._fullshard.reduction._pack

    def pack(reduction: Any, gradients: Any) -> Any:
        nonlocal written
        views = reduction.send_buffer.views if reduction.send_buffer is not None else [None] * len(gradients)
        there = [(g, v) for g, v in zip(gradients, views, strict=True) if g is not None and v is not None]
        written += sum(g.data_ptr() == v.data_ptr() for g, v in there)
        return send(reduction, gradients)

    model._fullshard.reduction._pack = pack
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 5, 16, generator=generator)
        if step == 2:
            with fs.accumulate(model):
                model(x * 0.5).square().mean().backward()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with fs.full(model, writeback=False):
        return [p.detach().clone() for p in model.parameters()], written


@tables.in_turn(
    ("kind", "said"),
    KINDS,
    [
        {},
        {"strategy": "zero1"},
        {"precision": "bf16"},
        {"checkpoint_activations": True},
        {"strategy": "replicate"},
    ],
    always=1,
)
def test_gradients_written_in_place_are_bitwise_those_that_are_copied(
    kind: str, said: dict[str, Any]
) -> None:
    copied = ranks.run(_train, 2, kind, 2**60, said, init=True, timeout_s=60)[0]
    direct = ranks.run(_train, 2, kind, 1, said, init=True, timeout_s=60)[0]
    assert copied[1] == 0
    assert direct[1] > 0, "nothing was written in place"
    for a, b in zip(copied[0], direct[0], strict=True):
        if kind not in ("plain", "frozen"):  # the order of a sum of two uses
            torch.testing.assert_close(
                a,
                b,
                rtol=2e-2 if said.get("precision") else 1e-5,
                atol=1e-3 if said.get("precision") else 1e-6,
            )
        else:
            assert torch.equal(a, b)


def _special() -> list[bool]:
    import copy

    import fullshard as fs

    model = _sharded("plain", 1, strategy="replicate")
    x = torch.randn(2, 16, requires_grad=True)
    out = model(x).square().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    grad.square().sum().backward()
    plain = _net("plain")
    y = x.detach().clone().requires_grad_()
    (other,) = torch.autograd.grad(plain(y).square().sum(), y, create_graph=True)
    other.square().sum().backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        same = torch.equal(twin(x), model(x))
    with fs.full(model):
        inside = torch.allclose(model(x), plain(x), atol=1e-6)
        batched = torch.func.vmap(model.head)(x)
    return [torch.allclose(x.grad, y.grad, atol=1e-5), same, inside, batched.shape == (2, 8)]


def test_double_backward_copies_and_torch_func_work_beside_it() -> None:
    assert all(ranks.run(_special, 1, timeout_s=60)[0])


def _recomputed(by_us: bool, direct_bytes: int) -> tuple[int, list[torch.Tensor]]:
    """Products of a training step, and gradients, with blocks that are computed again."""
    from torch.utils.flop_counter import FlopCounterMode

    model = _sharded("plain", direct_bytes, checkpoint_activations=by_us)
    if not by_us:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).square().mean().backward()
    return counter.get_total_flops(), [x.grad, *(p.grad.part.clone() for p in model.parameters())]


@pytest.mark.parametrize("by_us", [True, False])
def test_a_recomputed_block_leaves_out_its_last_product(by_us: bool) -> None:
    """Torch's checkpoint stops when all that was saved is there; a Function saves behind its forward."""
    plain, expected = ranks.run(_recomputed, 1, by_us, 2**60, timeout_s=60)[0]
    direct, gradients = ranks.run(_recomputed, 1, by_us, 1, timeout_s=60)[0]
    assert direct == plain
    for a, b in zip(gradients, expected, strict=True):
        assert torch.equal(a, b)


def _inputs_alive(by_us: bool, keep_graph: bool, options: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """As each block's input gets its gradient: of how many blocks, those behind it, the input is alive. And
    whether a second backward of a kept graph has the same gradients, or of one that is not kept fails."""
    model = _sharded("plain", 1, checkpoint_activations=by_us, **options)
    if not by_us:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    inputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def look(_: torch.Tensor, at: int) -> None:
        alive.append(sum(reference() is not None for reference in inputs[at + 1 :]))

    def note(_: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not when it is computed again
            (x,) = args
            x.register_hook(functools.partial(look, at=len(inputs)))
            inputs.append(weakref.ref(x))

    for block in model.blocks:
        block.register_forward_pre_hook(note)
    x = torch.randn(4, 16, requires_grad=True)
    loss = model(x).square().mean()
    (first,) = torch.autograd.grad(loss, x, retain_graph=keep_graph)
    try:
        (second,) = torch.autograd.grad(loss, x)
    except RuntimeError as error:
        return alive, [not keep_graph and "backward through the graph a second time" in str(error)]
    return alive[:3], [keep_graph and torch.equal(first, second)]


@pytest.mark.parametrize("by_us", [True, False])
def test_the_input_of_a_recomputed_block_is_freed_with_its_backward(by_us: bool) -> None:
    for options in ({}, {"precision": "bf16", "offload": "host"}):
        alive, second = ranks.run(_inputs_alive, 1, by_us, False, options, timeout_s=60)[0]
        assert alive == [0, 0, 0], options
        assert second == [True]
        _, second = ranks.run(_inputs_alive, 1, by_us, True, options, timeout_s=60)[0]
        assert second == [True]
