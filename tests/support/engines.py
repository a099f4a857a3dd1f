"""The two engines the behaviours are tried on: ours, which must be right, and FSDP2, which is not.

The rival's half of a test asserts *how* it goes wrong, so that we notice when it changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ranks
import reference
from ranks import RankFailure
from reference import Trace

ENGINES = ("fullshard", "fsdp2")
on_both_engines = pytest.mark.parametrize("engine", ENGINES, ids=["fullshard", "fsdp2_goes_wrong"])

WIDTH = 8
STEPS = 3

# Users' defaults would make one unit of any model as small as those of the tests, and keep its values full
# from forward to backward. These are the same two thresholds at the tests' scale: every block is a unit, the
# last one stays full, the others are gathered again in backward.
BLOCKS: dict[str, Any] = {"merge_units": 0, "keep_full": 1000}

Piece = tuple[Tensor, Tensor]


def my_rank() -> int:
    return int(os.environ["RANK"])


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, WIDTH))


class Net(nn.Module):
    """Three equal blocks and a head, sizes that no rank count divides."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + layer(x)
        out: Tensor = self.head(x)
        return out


def marked(piece: Piece, mark: bool) -> Piece:
    """The same piece with a mark in it that tells the models below to take their other path."""
    x, y = piece
    x = x.clone()
    x[0, 0] = 1.0 if mark else -1.0
    return x, y


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.marked_only = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.always(x)
        if x[0, 0] > 0:
            inner = inner + self.marked_only(x)
        out = x + torch.tanh(inner)
        return torch.cat([x[:, :1], out[:, 1:]], dim=1)  # the mark goes on to the next block


class HalfUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branching() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def build(make: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + 10 * step + rank)
    return torch.randn(6, WIDTH, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def batches(num_ranks: int = 2, steps: int = STEPS) -> list[list[Any]]:
    return [[batch(step, rank) for rank in range(num_ranks)] for step in range(steps)]


def loss_of(model: nn.Module, piece: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(piece[0]), piece[1])


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)


def shard_blocks(model: nn.Module, **options: Any) -> nn.Module:
    """`fs.shard` for a test about several units: a unit per block, as a model of a useful size has them."""
    import fullshard as fs

    return fs.shard(model, **(BLOCKS | options))


def shard(engine: str, model: nn.Module, **options: Any) -> nn.Module:
    """Ours: `shard_blocks(model)`. The rival's: `fully_shard` on each block, then on the root."""
    if engine == "fullshard":
        return shard_blocks(model, **options)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    assert not options, "the rival has no such options"
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in getattr(model, "blocks", ()):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def whole(engine: str, model: nn.Module) -> dict[str, Tensor]:
    if engine == "fullshard":
        import fullshard as fs

        with fs.full(model, writeback=False):
            return reference.whole_parameters(model)
    values = {}
    for name, value in model.state_dict().items():
        values[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return {name: values[name] for name, _ in model.named_parameters()}


Event = Callable[[str], None]


def values(model: nn.Module) -> dict[str, Tensor]:
    """The full parameters of a model that may be sharded by us."""
    return whole("fullshard", model) if hasattr(model, "_fullshard") else reference.whole_parameters(model)


def train(
    engine: str, model: nn.Module, optimizer: torch.optim.Optimizer, at: Event = lambda _: None
) -> Trace:
    """STEPS plain steps on this rank's batches; `at` is called at each point of a step, by its name."""
    losses, norms = [], []
    for step in range(STEPS):
        at("before forward")
        loss = loss_of(model, batch(step, my_rank()))
        at("before backward")
        loss.backward()
        at("before step")
        losses.append(loss.item())
        norms.append(0.0)
        optimizer.step()
        optimizer.zero_grad()
        at("after step")
    return Trace(losses, norms, whole(engine, model))


def expected(make: Callable[[], nn.Module] = Net, seed: int = 0, num_ranks: int = 2) -> Trace:
    """What one process makes of the same batches."""
    model = build(make, seed)
    trace = reference.train(model, batches(num_ranks), loss_of, sgd, STEPS)
    return Trace(trace.losses, [0.0] * STEPS, trace.parameters)


def assert_same(traces: list[Trace], reference_trace: Trace) -> None:
    reference.assert_close_trace(reference.combine(traces), reference_trace, rtol=2e-5, atol=2e-6)


def holds(engine: str, check: Callable[[], None], *wrong: str) -> None:
    """`check` passes for us. The rival fails as one of `wrong`: "differs", "hangs", part of its error."""
    if engine == "fullshard":
        check()
        return
    with pytest.raises(AssertionError) as info:
        check()
    assert any(part in how(info.value) for part in wrong), how(info.value)


def refusals(fn: Callable[..., Any], *args: Any, num_ranks: int = 2, **options: Any) -> list[str]:
    """The messages of the FullshardErrors with which all ranks end; anything else is a failure."""
    errors = ranks.run(fn, num_ranks, *args, expect_error=True, **{"timeout_s": 30.0, **options})
    foreign = {rank: error for rank, error in errors.items() if not error.is_a("FullshardError")}
    if foreign or len(errors) < num_ranks:
        raise RankFailure(f"{fn.__name__}: {len(errors)} of {num_ranks} ranks refused", foreign or errors)
    return [errors[rank].message for rank in range(num_ranks)]


def how(failure: BaseException) -> str:
    if not isinstance(failure, RankFailure):
        return f"differs: {failure}"
    if any(error.type_name == "Hang" for error in failure.errors.values()):
        return f"hangs: {failure}"
    return f"raises: {failure}"
