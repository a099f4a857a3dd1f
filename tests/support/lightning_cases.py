"""Lightning modules and runs that the tests of fullshard.lightning share, plain and sharded."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fullshard as fs
from fullshard.lightning import FullShardStrategy

WIDTH = 8
STEPS = 4
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


@dataclass
class Seen:
    """What a run showed, step by step, on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    predicted: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


class Lit(lightning.LightningModule):
    """A regression; its scale is a parameter of the LightningModule itself, used in the step."""

    def __init__(self, lr: float = 0.02, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.net = Net(dropout)
        self.scale = nn.Parameter(torch.ones(3))
        self.seen = Seen()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        difference = self(x) * self.scale.mean() - y
        return (difference.to(torch.promote_types(difference.dtype, torch.float32)) ** 2).mean()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=True)
        self.seen.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.seen.evaluated.append(float(self.trainer.callback_metrics.get("val", torch.nan)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))
        self.seen.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], eps=1e-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Gan(lightning.LightningModule):
    """Two networks, two optimizers, optimized by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        self.critic = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.seen = Seen()

    def training_step(self, batch: Any, index: int) -> None:
        noise, real = batch[0], batch[0] * batch[1]
        of_generator, of_critic = self.optimizers()  # type: ignore[misc]
        with self.toggled_optimizer(of_generator):
            loss = -self.critic(self.generator(noise)).mean()
            of_generator.zero_grad()
            self.manual_backward(loss)
            assert self.seen.losses or all(p.grad is None for p in self.critic.parameters())  # frozen
            self.clip_gradients(of_generator, 0.05, "norm")
            self.seen.norms.append(
                float(nn.utils.get_total_norm([p.grad for p in self.generator.parameters()]))
            )
            of_generator.step()
        with self.toggled_optimizer(of_critic):
            fake = self.critic(self.generator(noise).detach())
            difference = (fake - self.critic(real)).mean() + 0.1 * (self.critic(real) ** 2).mean()
            of_critic.zero_grad()
            self.manual_backward(difference)
            of_critic.step()
        self.seen.losses += [loss.item(), difference.item()]

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.AdamW(self.generator.parameters(), lr=0.02, eps=1e-4),
            torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9),
        )


def batches(
    rank: int, ranks: int, count: int = STEPS, each: int = 4, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of `count` global batches of `each` samples."""
    generator = torch.Generator().manual_seed(seed)
    global_batches = [torch.randn(each, 4, generator=generator) for _ in range(count)]
    return [(x.chunk(ranks)[rank], x.sum(1, keepdim=True).chunk(ranks)[rank]) for x in global_batches]


def loader(items: list[Any]) -> DataLoader[Any]:
    return DataLoader(items, batch_size=None)  # type: ignore[arg-type]


def place() -> tuple[int, int]:
    """(rank, ranks) of this process."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def trainer(strategy: Any = "auto", **options: Any) -> lightning.Trainer:
    """A quiet Trainer on the CPU, with the ranks of this process; each rank's loader gives its own part."""
    defaults = {
        "accelerator": "cpu",
        "devices": place()[1],
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(strategy=strategy, **(defaults | options))


@contextlib.contextmanager
def quietly() -> Any:
    """Without Lightning's advice about workers and logging."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning.*")
        yield


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    inside = fs.full(module, writeback=False) if "_fullshard" in module.__dict__ else contextlib.nullcontext()
    with inside:
        return {name: p.detach().clone() for name, p in module.named_parameters()}


def fitted(
    make: Callable[[], Any], strategy: Any = "auto", micro: int = 1, val: bool = False, **options: Any
) -> Seen:
    """A fit on this rank's part of the same global batches, plain or sharded."""
    rank, ranks = place()
    module = make()
    run = trainer(strategy, **options)
    with quietly():
        run.fit(
            module,
            loader(batches(rank, ranks, STEPS * micro)),
            loader(batches(rank, ranks, 3, seed=5)) if val else None,
        )
    module.seen.weights = whole_weights(module)
    return module.seen  # type: ignore[no-any-return]


def mean(rank_losses: list[list[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rank_losses, strict=True)]


def assert_same_run(ranks: list[Seen], plain: Seen, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Losses averaged over ranks, norms and weights of every rank, equal those of the plain run."""
    tolerance = {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(mean([seen.losses for seen in ranks]), plain.losses, **tolerance)
    for seen in ranks:
        torch.testing.assert_close(seen.norms, plain.norms, **tolerance)
        assert seen.rates == plain.rates
        torch.testing.assert_close(seen.evaluated, plain.evaluated, **tolerance)
        assert seen.weights.keys() == plain.weights.keys()
        for name, value in plain.weights.items():
            torch.testing.assert_close(seen.weights[name], value, **tolerance)


def sharded(**options: Any) -> FullShardStrategy:
    return FullShardStrategy(**options)
