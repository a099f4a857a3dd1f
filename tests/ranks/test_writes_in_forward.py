"""Parameters that a forward writes: the write counts as in one process, or is an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ranks
import reference
from cases import in_turn, refusal, whole
from engines import BLOCKS, WIDTH, batch, build, my_rank

STEPS = 3
STRATEGIES = ("zero3", "zero2", "zero1", "replicate")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.lin(x)))


class Stack(nn.Module):
    layer: Callable[[], nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


# --- writes that are the same on every rank --------------------------------------------------------------


class ClampData(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.lin.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x)


class ClampNoGrad(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.lin.weight.clamp_(-0.2, 0.2)
            self.lin.bias[2] = 0.125
        return super().forward(x)


class AssignData(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.lin.weight.data = F.normalize(self.lin.weight.data, dim=1)
        return super().forward(x)


class AfterUse(Layer):
    """Written after it was used: the next pass sees it."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.lin.bias.data.mul_(0.5)
        return out


class PowerIteration(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            v = F.normalize(self.lin.weight.t() @ self.u, dim=0)
            self.u.copy_(F.normalize(self.lin.weight @ v, dim=0))
        sigma = self.u.detach().clone() @ self.lin.weight @ v
        return x + self.out(torch.tanh(F.linear(x, self.lin.weight / sigma, self.lin.bias)))


class SpectralNorm(Layer):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.spectral_norm(self.lin)


class Counted(Layer):
    """A counter and a moving average of a weight, both kept as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.average = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.average.lerp_(self.lin.weight.detach(), 0.3)
        return super().forward(x) + self.average.mean() / self.count


def _stack(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: type("Stack", (Stack,), {"layer": staticmethod(layer)})()


class Momentum(Stack):
    """A second stack that follows the first: updated by the root, which reads and writes other units."""

    def __init__(self) -> None:
        super().__init__()
        self.followers = nn.ModuleList(Layer() for _ in range(3)).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.blocks.parameters(), self.followers.parameters(), strict=True):
            theirs.mul_(0.9).add_(mine, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.follow()
        y = x
        for block in self.followers:
            y = block(y)
        out: Tensor = super().forward(x + 0.1 * y)
        return out


class MomentumByData(Momentum):
    def follow(self) -> None:
        for mine, theirs in zip(self.blocks.parameters(), self.followers.parameters(), strict=True):
            theirs.data = theirs.data * 0.9 + mine.data * 0.1


class MomentumByCopy(Momentum):
    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.blocks, self.followers, strict=True):
            theirs.lin.weight.copy_(0.9 * theirs.lin.weight + 0.1 * mine.lin.weight)
            torch._foreach_lerp_(list(theirs.out.parameters()), list(mine.out.parameters()), 0.1)


class Hooked(Stack):
    """Written by a pre-hook of a block and by a hook of a leaf inside another."""

    def __init__(self) -> None:
        super().__init__()

        def before(module: Any, args: Any) -> None:
            module.lin.weight.data.clamp_(-0.2, 0.2)

        def after(module: Any, args: Any, output: Any) -> None:
            with torch.no_grad():
                module.bias.mul_(0.5)

        self.blocks[0].register_forward_pre_hook(before)
        self.blocks[1].lin.register_forward_hook(after)


class Neighbour(Stack):
    """A block writes into its predecessor, which is at rest by then."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.blocks[0].lin.bias.data.clamp_(-0.1, 0.1)
        x = self.blocks[2](self.blocks[1](x))
        out: Tensor = self.head(x)
        return out


class TwiceWithWrite(Stack):
    """Called twice in one pass: the second call sees what the first one wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted(), Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x = self.blocks[2](self.blocks[0](x))
        out: Tensor = self.head(x)
        return out


class Checkpointed(Stack):
    """torch's activation checkpointing runs the write twice, in one process as here."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counted() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


SAME: dict[str, Callable[[], nn.Module]] = {
    "clamp of .data": _stack(ClampData),
    "clamp under no_grad": _stack(ClampNoGrad),
    ".data = value": _stack(AssignData),
    "after use": _stack(AfterUse),
    "power iteration": _stack(PowerIteration),
    "spectral_norm": _stack(SpectralNorm),
    "statistics": _stack(Counted),
    "momentum in place": Momentum,
    "momentum by .data =": MomentumByData,
    "momentum by copy_": MomentumByCopy,
    "hooks": Hooked,
    "another unit's": Neighbour,
    "called twice": TwiceWithWrite,
    "checkpointed": Checkpointed,
}


def _train(model: nn.Module, pieces: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """Also an evaluation, in which writes count as well."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.5)
    losses = []
    for step in range(STEPS):
        drawn = [batch(step, piece) for piece in pieces]
        x, y = torch.cat([x for x, _ in drawn]), torch.cat([y for _, y in drawn])
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            with torch.no_grad():
                model(x)
    return losses, {}


OPTIONS: list[dict[str, Any]] = [{"strategy": s, **BLOCKS} for s in STRATEGIES]
OPTIONS += [{}, {"strategy": "replicate"}]


def _write_alike(chosen: list[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    import fullshard as fs

    found = {}
    for name, at in chosen:
        model = fs.shard(build(SAME[name]), **OPTIONS[at])
        losses, _ = _train(model, [my_rank()])
        found[name, at] = losses, whole(model)
        ranks.end_groups_of_models()
    return found


@pytest.mark.parametrize(
    ("num_ranks", "always", "others"),
    [
        pytest.param(1, 0, 1, id="1"),
        pytest.param(2, 1, 1, id="2"),
        pytest.param(3, 1, 0, id="3", marks=pytest.mark.long),
        pytest.param(2, 1, len(OPTIONS) - 1, id="2, every option", marks=pytest.mark.long),
    ],
)
def test_a_write_that_all_ranks_make_counts_as_in_one_process(
    num_ranks: int, always: int, others: int
) -> None:
    chosen = in_turn(SAME, len(OPTIONS), always, others)
    results = ranks.run(_write_alike, num_ranks, chosen, timeout_s=240)
    for name, at in chosen:
        plain = build(SAME[name])
        losses, _ = _train(plain, list(range(num_ranks)))
        found = [result[name, at] for result in results]
        mean = [sum(values) / num_ranks for values in zip(*(f[0] for f in found), strict=True)]
        assert mean == pytest.approx(losses, rel=1e-5), (name, OPTIONS[at])
        for key, value in reference.whole_parameters(plain).items():
            reference.assert_close(found[0][1][key], value, f"{name}, {OPTIONS[at]}: {key}")


# --- writes that differ between ranks, or have no counterpart in one process ------------------------------


class MaxNorm(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Embedding(40, WIDTH, max_norm=0.5))
        self.blocks.append(nn.Embedding(40, WIDTH, max_norm=0.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        tokens = (x.detach()[:, 0].abs() * 1e4).long() % 40
        out: Tensor = self.head(x + self.blocks[3](tokens))
        return out


class BatchStatistics(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


class StatisticsByData(BatchStatistics):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.detach().mean(0)
        return super(BatchStatistics, self).forward(x - self.mean)


class ReplacesParameter(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.lin.weight = nn.Parameter(self.lin.weight.detach() * 0.5)
        return super().forward(x)


class OtherShape(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.lin.bias.data = torch.zeros(3)
        return out


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "max_norm": (MaxNorm, "blocks.3.weight"),
    "statistics of the batch": (_stack(BatchStatistics), "mean"),
    "statistics by .data =": (_stack(StatisticsByData), "mean"),
    "replaced parameter": (_stack(ReplacesParameter), "lin.weight"),
    "other shape": (_stack(OtherShape), "lin.bias"),
}


def _write_differently(strategies: list[str]) -> dict[Any, Any]:
    import fullshard as fs

    found: dict[Any, Any] = {}
    for name, (make, _) in DIFFERENT.items():
        for strategy in strategies:
            for options in ({}, BLOCKS):
                model = fs.shard(build(make), strategy=strategy, **options)
                for grad in (True, False):
                    with torch.set_grad_enabled(grad):
                        key = name, strategy, bool(options), grad
                        found[key] = refusal(lambda model=model: model(batch(0, my_rank())[0]))
    return found


def test_a_write_that_differs_between_ranks_is_an_error_on_all_that_names_the_parameter() -> None:
    first, second = ranks.run(_write_differently, 2, list(STRATEGIES), timeout_s=120)
    for key, (kind, message, remedy) in first.items():
        assert kind in ("StateError", "AtRestError"), key
        assert DIFFERENT[key[0]][1] in message, (key, message)
        assert "fs.full" in remedy or "shape" in remedy, key
        assert second[key][0] == kind, key


def _write_low_precision() -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    for name, make in {"clamp": _stack(ClampData), "follower": MomentumByData}.items():
        model = fs.shard(build(make), precision="bf16", **BLOCKS)
        found[name] = refusal(lambda model=model: model(batch(0, my_rank())[0]))
    # A write that changes nothing is none.
    model = fs.shard(build(_stack(ClampData)), precision="bf16", **BLOCKS)
    with fs.full(model):
        for block in model.blocks:
            block.lin.weight.data.clamp_(-0.1, 0.1)
    model(batch(0, my_rank())[0]).sum().backward()
    # With one unit, and in fp32 inside fs.inference.
    model = fs.shard(build(_stack(Counted)), **BLOCKS)

    def infer() -> None:
        with fs.inference(model):
            model(batch(0, my_rank())[0])

    found["inference"] = refusal(infer)
    model = fs.shard(build(_stack(Counted)), checkpoint_activations=True, **BLOCKS)
    loss = model(batch(0, my_rank())[0]).sum()
    found["recomputed"] = refusal(loss.backward)
    model = fs.shard(build(_stack(ClampData)), checkpoint_activations=True, **BLOCKS)
    model(batch(0, my_rank())[0]).sum().backward()
    model = fs.shard(build(_stack(ClampData)), **BLOCKS)
    model.blocks[1](batch(0, my_rank())[0]).sum().backward()  # a part of the model, called by itself
    found["part"] = float(whole(model)["blocks.1.lin.weight"].abs().max())
    model = fs.shard(build(_stack(BatchStatistics)), **BLOCKS)
    found["part differs"] = refusal(lambda: model.blocks[1](batch(0, my_rank())[0]))
    return found


def test_writes_into_casts_in_inference_and_in_recomputation_are_errors_and_harmless_ones_are_not() -> None:
    for found in ranks.run(_write_low_precision, 2):
        assert found.pop("part") == pytest.approx(0.2)
        assert "bfloat16" in found["clamp"][1]
        assert "inference" in found["inference"][1]
        assert "computed again" in found["recomputed"][1]
        for name, (kind, message, remedy) in found.items():
            assert kind == "StateError", name
            assert "blocks." in message or "followers." in message, name
            assert remedy, name


class OneRankOnly(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if my_rank() == 1:
            self.lin.weight.data.mul_(0.5)
        return super().forward(x)


def _write_on_one_rank() -> None:
    import fullshard as fs

    model = fs.shard(build(_stack(OneRankOnly)), **BLOCKS)
    for step in range(3):
        F.cross_entropy(model(batch(step, my_rank())[0]), batch(step, my_rank())[1]).backward()


def test_a_write_on_one_rank_alone_ends_in_an_error_that_says_what_the_other_waits_for() -> None:
    # Either rank may be the first to see that neither can continue. When its process ends, so does the
    # other's wait; here it stays alive.
    errors = ranks.outcome(_write_on_one_rank, 2, timeout_s=60, grace_s=0.5).errors
    stalled = [error.message for error in errors.values() if error.type_name == "Stalled"]
    assert stalled
    assert all("writes of forward" in message or "written by a forward" in message for message in stalled)


def _write_with_replicas() -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
    )
    model = fs.shard(build(_stack(Counted)), strategy="hybrid", mesh=mesh, **BLOCKS)
    found["losses"], _ = _train(model, [my_rank()])
    found["whole"] = whole(model)
    model = fs.shard(build(_stack(BatchStatistics)), strategy="hybrid", mesh=mesh, **BLOCKS)
    # Ranks of one replica write the same, those of the other do not.
    found["differs"] = refusal(lambda: model(batch(0, my_rank() // 2)[0]))
    return found


def test_replicas_of_a_hybrid_mesh_agree_on_writes_too() -> None:
    results = ranks.run(_write_with_replicas, 4, timeout_s=120)
    plain = build(_stack(Counted))
    _train(plain, [0, 1, 2, 3])
    for found in results:
        for key, value in reference.whole_parameters(plain).items():
            reference.assert_close(found["whole"][key], value, key)
        assert found["differs"][0] == "StateError"
