"""Transforms of torch.func over the inputs of a sharded model, and training through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fullshard as fs
import ranks
from cases import refusal

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        out = self.down(torch.tanh(self.up(x)))
        return {"x": x + (out if scale is None else out * scale)}


class Net(nn.Module):
    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=x.mean())["x"]
        if self.reads:
            x = x * self.blocks[0].up.weight.norm()
        out: Tensor = self.head(x)
        return out


def build(reads: bool = False) -> Net:
    torch.manual_seed(3)
    return Net(reads)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=source), torch.randn(4, WIDTH, generator=source)


def _of_value(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    value, tangent = jvp(model, (x,), (v,))
    return ((value - tangent.detach()) ** 2).mean()


def _of_tangent(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    return (jvp(model, (x,), (v,))[1] ** 2).mean()


def _of_both(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    value, tangent = jvp(model, (x,), (v,))
    return ((value - tangent) ** 2).mean()


def _of_vmap(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    return (vmap(model)(torch.stack([x, v])) ** 2).mean()


def _of_jacobian(model: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    return (vmap(jacfwd(model))(x) ** 2).mean()


def _of_a_block(model: Any, x: Tensor, v: Tensor) -> Tensor:
    value, tangent = jvp(model.blocks[1].down, (x.repeat(1, 2),), (v.repeat(1, 2),))
    return ((value - tangent) ** 2).mean() + model(x).pow(2).mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "value": _of_value,
    "tangent": _of_tangent,
    "value and tangent": _of_both,
    "vmap": _of_vmap,
    "jacobian": _of_jacobian,
    "a module inside a block": _of_a_block,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {"strategy": "zero3", "merge_units": 0},
    "zero2": {"strategy": "zero2", "merge_units": 0},
    "merged": {"strategy": "zero3"},
    "recompute": {"strategy": "zero3", "merge_units": 0, "checkpoint_activations": True},
    "replicate": {"strategy": "replicate"},
}


def _train(model: nn.Module, loss_of: Callable[..., Tensor], ranks_of_batch: list[int]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(2):
        losses = [loss_of(model, *batch(step, rank)) for rank in ranks_of_batch]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _values(model: nn.Module) -> dict[str, Tensor]:
    with fs.full(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _sharded(**options: Any) -> Any:
    return fs.shard(build(options.pop("reads", False)), units=[Block], **options)


def _trained() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    for strategy, options in OPTIONS.items():
        for name in LOSSES if strategy == "zero3" else ("value and tangent", "vmap"):
            loss_of = LOSSES[name]
            model = _sharded(**options)
            _train(model, loss_of, [rank])
            found[strategy, name] = _values(model)
    model = _sharded(merge_units=0, reads=True)
    _train(model, _of_both, [rank])
    found["zero3", "reads"] = _values(model)
    return found


def test_training_through_forward_transforms_equals_one_process() -> None:
    torch.set_num_threads(1)
    wanted = {}
    for name, loss_of in (*LOSSES.items(), ("reads", _of_both)):
        alone = build(reads=name == "reads")
        _train(alone, loss_of, [0, 1])
        wanted[name] = {key: p.detach().clone() for key, p in alone.named_parameters()}
    for found in ranks.run(_trained, 2, init=True):
        for (strategy, name), values in found.items():
            for key, value in values.items():
                close = torch.allclose(value, wanted[name][key], atol=2e-5)
                assert close, (strategy, name, key, (value - wanted[name][key]).abs().max())


REVERSE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda m, x: grad(lambda a: m(a).sum())(x),
    "vjp": lambda m, x: vjp(m, x)[1](torch.ones(4, 3))[0],
    "jacrev": lambda m, x: jacrev(lambda a: m(a).sum(0))(x),
    "hessian": lambda m, x: hessian(lambda a: m(a).sum())(x),
    "vmap of grad": lambda m, x: vmap(grad(lambda a: m(a).sum()))(x),
}


def _fails_inside(model: nn.Module, x: Tensor) -> None:
    def fails(a: Tensor) -> Tensor:
        model(a)
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        jvp(fails, (x,), (x,))


def _reverse() -> dict[str, Any]:
    model, x = _sharded(merge_units=0), batch(0, 0)[0]
    found: dict[str, Any] = {"refused": {n: refusal(lambda t=t: t(model, x)) for n, t in REVERSE.items()}}
    _fails_inside(model, x)
    with fs.full(model):
        found["full"] = {name: transform(model, x).detach() for name, transform in REVERSE.items()}
    _train(model, _of_value, [torch.distributed.get_rank()])
    found["trained"] = _values(model)
    with fs.full(model):
        loss = _of_value(model, x, x)
        found["backward"] = refusal(loss.backward)
    return found


def test_reverse_transforms_are_refused_unless_the_model_is_full() -> None:
    alone, x = build(), batch(0, 0)[0]
    wanted = {name: transform(alone, x).detach() for name, transform in REVERSE.items()}
    _train(alone, _of_value, [0, 1])
    for found in ranks.run(_reverse, 2, init=True):
        for name, (kind, message, _) in found["refused"].items():
            assert kind == "NotSupported", name
            assert "torch.func" in message, name
            assert "fs.full" in message, name
        for name, value in found["full"].items():
            assert torch.allclose(value, wanted[name], atol=1e-5), name
        assert "fs.full" in found["backward"][1]
        for name, p in alone.named_parameters():
            assert torch.allclose(found["trained"][name], p, atol=2e-5), name


def _bfloat16() -> Any:
    model = _sharded(merge_units=0, precision=fs.Precision(compute=torch.bfloat16))
    x, v = batch(0, 0)
    value, tangent = jvp(model, (x,), (v,))
    return value.detach().float(), tangent.detach().float(), value.dtype


def test_inputs_are_cast_inside_a_transform() -> None:
    alone = build()
    value, tangent = jvp(alone, *((t,) for t in batch(0, 0)))
    for got_value, got_tangent, _ in ranks.run(_bfloat16, 2, init=True):
        assert torch.allclose(got_value, value, atol=0.05)
        assert torch.allclose(got_tangent, tangent, atol=0.1)
