"""What must come out right where FSDP2 does not, behaviour 8: micro-batches and graphs that are no chain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engines
import ranks
import reference
import tables
from engines import (
    STEPS,
    WIDTH,
    HalfUsed,
    Net,
    assert_same,
    batch,
    build,
    expected,
    holds,
    marked,
    my_rank,
    on_both_engines,
    sgd,
)
from reference import Trace


def _first_used_late(engine: str) -> Trace:
    """bf16 compute, fp32 gradient sums, and a parameter that only the second of two micro-batches uses."""
    model = build(HalfUsed)
    if engine == "fullshard":
        model = engines.shard(engine, model, precision="bf16")
    else:
        model = _fsdp2_bf16(model)
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS // 2):
        total = 0.0
        for micro in range(2):
            with _postponed(engine, model, last=micro == 1):
                piece = marked(batch(2 * step + micro, my_rank()), micro == 1)
                loss = torch.nn.functional.cross_entropy(model(piece[0]).float(), piece[1]) / 2
                loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Trace(losses, [0.0] * len(losses), engines.whole(engine, model))


def _postponed(engine: str, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    if engine == "fsdp2":
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()
    import fullshard as fs

    return contextlib.nullcontext() if last else fs.accumulate(model)


def _fsdp2_bf16(model: nn.Module) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.blocks:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


@on_both_engines
def test_parameter_first_used_in_a_later_micro_batch_gets_its_gradient(engine: str) -> None:
    """In fp32 FSDP2 is right; with bf16 compute and fp32 sums its late gradients have another dtype."""

    def check() -> None:
        rows = enumerate(engines.batches())
        pieces = [[marked(piece, index % 2 == 1) for piece in row] for index, row in rows]
        trace = reference.train(build(HalfUsed), pieces, engines.loss_of, sgd, STEPS // 2, accumulate=2)
        combined = reference.combine(ranks.run(_first_used_late, 2, engine))
        expected_trace = Trace(trace.losses, combined.grad_norms, trace.parameters)
        reference.assert_close_trace(combined, expected_trace, rtol=2e-2, atol=1e-2)

    holds(engine, check, "expects uniform gradient dtype")


def _accumulated(engine: str, order: str, postponed: bool) -> Trace:
    model = engines.shard(engine, build())
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(STEPS // 2):
        pieces = [batch(2 * step + micro, my_rank()) for micro in range(2)]
        if order == "one after the other":
            values = []
            for micro, piece in enumerate(pieces):
                with _postponed(engine, model, last=micro == 1 or not postponed):
                    values.append(engines.loss_of(model, piece) / 2)
                    values[-1].backward()
        else:
            values = [engines.loss_of(model, piece) / 2 for piece in pieces]
            for value in values if order == "two forwards, then in order" else reversed(values):
                value.backward()
        losses.append(sum(value.item() for value in values))
        optimizer.step()
        optimizer.zero_grad()
    return Trace(losses, [0.0] * len(losses), engines.whole(engine, model))


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize(
    ("order", "postponed"),
    [
        ("one after the other", False),
        ("one after the other", True),
        ("two forwards, then in order", False),
        ("two forwards, then in reverse", False),
    ],
)
def test_two_micro_batches_count_as_one_batch(engine: str, order: str, postponed: bool) -> None:
    """FSDP2 of torch 2.13 is right here too; both are held to the reference."""
    trace = reference.train(build(), engines.batches(), engines.loss_of, sgd, STEPS // 2, accumulate=2)
    expected_trace = Trace(trace.losses, [0.0] * len(trace.losses), trace.parameters)
    assert_same(ranks.run(_accumulated, 2, engine, order, postponed), expected_trace)


class CalledTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.blocks, self.blocks[0]]:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()  # the reentrant kind does nothing for inputs without a gradient
        for layer in self.blocks:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class ReturnsViewWrittenInto(Net):
    """The caller writes into what a block returned, and that is a view."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            y = layer(x).view(-1, 2, WIDTH // 2).transpose(0, 1)
            y.mul_(0.5)
            x = x + y.transpose(0, 1).reshape(-1, WIDTH)
        out: Tensor = self.head(x)
        return out


GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "module called twice": CalledTwice,
    "activation checkpointing": Checkpointed,
    "activation checkpointing, reentrant": CheckpointedReentrant,
    "output written into": ReturnsViewWrittenInto,
}


def _train_graph(engine: str, name: str, options: dict[str, Any]) -> Trace:
    model = engines.shard(engine, build(GRAPHS[name]), **options)
    return engines.train(engine, model, sgd(model.parameters()))


@pytest.mark.parametrize("engine", engines.ENGINES)
@pytest.mark.parametrize("name", GRAPHS)
def test_graph_that_is_not_a_plain_chain_trains_as_one_process_does(engine: str, name: str) -> None:
    """FSDP2 of torch 2.13 is right here too; both are held to the reference."""
    assert_same(ranks.run(_train_graph, 2, engine, name, {}), expected(GRAPHS[name]))


@tables.in_turn(("name", "strategy"), GRAPHS, ["zero2", "zero1", "replicate"])
def test_graph_that_is_not_a_plain_chain_is_right_under_every_strategy(name: str, strategy: str) -> None:
    assert_same(ranks.run(_train_graph, 2, "fullshard", name, {"strategy": strategy}), expected(GRAPHS[name]))
