"""Trainings with one mistake each, for the doctor: as a function, or `python faulty_trainings.py NAME`."""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fullshard as fs

WIDTH, BATCH, STEPS = 8, 4, 6


class Model(nn.Module):
    def __init__(self, *inner: nn.Module, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *inner) for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def batch(step: int, part: int | None = None, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """One rank's part of a step's data."""
    part = rank() if part is None else part
    dice = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(size, WIDTH, generator=dice)
    return x, x.sum(1, keepdim=True).tanh()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    model = fs.shard(model, **{"merge_units": 0, **options})
    torch.manual_seed(1 + rank())
    return model


def loop(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor] = lambda model, step: F.mse_loss(
        model(batch(step)[0]), batch(step)[1]
    ),
    optimizer: torch.optim.Optimizer | None = None,
    before_step: Callable[[], Any] = lambda: None,
    after_step: Callable[[], Any] = lambda: None,
) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss_of(model, step).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        after_step()


# ---- right


def right() -> None:
    model = sharded(Model())
    loop(model, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def right_accumulation() -> None:
    model = sharded(Model(), strategy="zero2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for step in range(STEPS):
        for part in range(3):
            with fs.accumulate(model) if part < 2 else nullcontext():
                x, y = batch(3 * step + part)
                (F.mse_loss(model(x), y) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def right_uneven_shares(micro: int | None = None, reduce: str = "auto") -> None:
    """Losses that the loop weights: the ranks have different numbers of samples, or of micro-batches."""
    model = sharded(Model(), reduce=reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = batch(0, 0, 40)
    batches = fs.Batches(len(x), 9, micro_batch_size=micro)
    for step, samples in batches.steps(batches):
        for some in [samples] if micro is None else samples:
            F.mse_loss(model(x[some]), y[some]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS - 1:
            break


def right_micro_batches_in_a_fixed_order() -> None:
    right_uneven_shares(3, "fixed")


def right_bf16_recomputed() -> None:
    loop(sharded(Model(nn.Dropout(0.2)), precision="bf16", checkpoint_activations=True))


def right_scaled() -> None:
    model = sharded(Model(), precision="fp16")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        x, y = batch(step)
        scaler.scale(F.mse_loss(model(x).float(), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def right_masked_tokens() -> None:
    """Uneven counts, divided by the count of all ranks."""
    model = sharded(Model())

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        kept = torch.arange(BATCH).view(-1, 1) < 2 + rank()
        total = sum(2 + r for r in range(ranks()))
        return ((model(x) - y).square() * kept).sum() / total * ranks()

    loop(model, loss_of)


class _Counted(Model):
    """As models of transformers: the number of tokens over all ranks is an argument of the forward."""

    def forward(self, x: Tensor, count: Tensor | None = None) -> Tensor:
        output: Tensor = super().forward(x)
        return output if count is None else output * (count / count)


def right_number_beside_samples() -> None:
    model = sharded(_Counted())

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x, torch.tensor(24.0 + step)), y)

    loop(model, loss_of)


def same_samples_beside_a_number() -> None:
    """Most samples of a rank are another's; a number that comes again in every call is no new epoch."""
    model = sharded(_Counted())

    def loss_of(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(2 * BATCH, WIDTH, generator=generator)[rank() : BATCH + rank()]
        return F.mse_loss(model(x, torch.tensor(24.0)), x.mean(1, keepdim=True))

    loop(model, loss_of)


def right_two_losses() -> None:
    """Two backwards per step from two lines, an evaluation between steps, an averaged copy of the weights."""
    model = sharded(Model(), strategy="replicate")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        F.mse_loss(model(x), y).backward()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()


def right_with_a_penalty_and_edits() -> None:
    """A penalty on parameters, weights that are edited between steps, an evaluation after that."""
    model = sharded(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.mse_loss(model(x), y) + 0.1 * model(2 * x).square().mean()
        (loss + 0.01 * fs.penalty(model, lambda _, parameter: parameter.square())).backward()
        optimizer.step()
        optimizer.zero_grad()
        with fs.full(model):
            for parameter in model.parameters():
                parameter.data.mul_(0.999)
        with fs.inference(model):
            model(x)


class Routed(nn.Module):
    """Keeps a loss of its own in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.aux = out.square().mean()
        return out


def right_losses_of_one_graph() -> None:
    """Losses that modules keep, and several backwards through one graph from one line."""
    model = sharded(Model(Routed()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        out = model(x)
        for loss in (F.mse_loss(out, y), model.blocks[0][2].aux):  # type: ignore[index, union-attr]
            loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def right_adversaries() -> None:
    """Two models, whose optimizers step in turn."""
    first, second = sharded(Model()), sharded(Model())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (first, second)]
    for step in range(STEPS):
        x, _ = batch(step)
        made = x * first(x)
        F.softplus(-second(x)).mean().backward()
        F.softplus(second(made.detach())).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        F.softplus(-second(made)).mean().backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


class Located(Model):
    """Gets positions and a constant table beside its data."""

    def forward(self, x: Tensor, positions: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + table[positions])


def right_positions_and_a_table() -> None:
    table = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x, torch.arange(WIDTH).repeat(BATCH, 1), table.expand(3 * WIDTH, -1)[0]), y)

    loop(sharded(Located()), loss_of)


def right_adjacency() -> None:
    """Rows of a constant matrix are no samples."""
    matrix = torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))

    class Joined(Model):
        def forward(self, x: Tensor, matrix: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x @ matrix)

    loop(sharded(Joined()), lambda m, s: F.mse_loss(m(batch(s)[0], matrix), batch(s)[1]))


def right_epochs_of_a_small_dataset() -> None:
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        epoch, place = divmod(step, 2)
        order = torch.randperm(16, generator=torch.Generator().manual_seed(epoch))[rank() :: ranks()]
        x = data[order[place * BATCH : (place + 1) * BATCH]]
        return F.mse_loss(model(x), x.sum(1, keepdim=True).tanh())

    loop(sharded(Model()), loss_of)


def _go_back(loss: Tensor) -> None:
    loss.backward()


def right_adversaries_with_one_way_back() -> None:
    """All losses go back in one line; the second model's gradients are zeroed before its own."""
    first, second = sharded(Model()), sharded(Model())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (first, second)]
    for step in range(STEPS):
        x, _ = batch(step)
        made = x * first(x)
        optimizers[1].zero_grad()
        _go_back(F.softplus(-second(x)).mean())
        _go_back(F.softplus(second(made.detach())).mean())
        optimizers[1].step()
        optimizers[0].zero_grad()
        _go_back(F.softplus(-second(made)).mean())
        optimizers[0].step()


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 1) for name in ("first", "second")})

    def forward(self, x: Tensor, task: str) -> Tensor:
        out: Tensor = self.heads[task](self.body(x).tanh())
        return out


def right_tasks() -> None:
    """Losses of two tasks from one line: their sum is meant."""
    model = sharded(Tasks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for index, task in enumerate(("first", "second")):
            x, y = batch(2 * step + index)
            F.mse_loss(model(x, task), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def right_closure() -> None:
    _with_closure(sharded(Model()), torch.optim.SGD)


def _with_closure(model: nn.Module, kind: type[torch.optim.SGD]) -> None:
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            x, y = batch(step)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


class Sharpness(torch.optim.SGD):
    """Calls its closure twice, the second time at other parameters, and its base class's step."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        ways = [0.05 * p.grad for p in held]
        with torch.no_grad():
            for parameter, way in zip(held, ways, strict=True):
                parameter.add_(way)
            with torch.enable_grad():
                loss = closure()
            for parameter, way in zip(held, ways, strict=True):
                parameter.sub_(way)
        super().step()
        return loss


def right_closure_twice() -> None:
    _with_closure(sharded(Model()), Sharpness)


def right_gradient_penalty() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + slope.square().mean()

    loop(sharded(Model(), strategy="replicate", precision="fp32"), loss_of)


def right_adversarial_inputs() -> None:
    """Gradients with respect to inputs, through the graph of which the loss goes back too."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        x.requires_grad_()
        loss = F.mse_loss(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss + F.mse_loss(model((x + 0.1 * slope.sign()).detach()), y)

    loop(sharded(Model()), loss_of)


def right_with_a_planner() -> None:
    """Something goes back without values between steps."""
    loop(
        sharded(Model()),
        after_step=lambda: torch.ones(3, device="meta", requires_grad=True).sum().backward(),
    )


class OwnDice(nn.Module):
    """Holds generators of Python and numpy, also in an object of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.dice = random.Random(seed)
        self.held = {"numpy": numpy.random.default_rng(seed)}

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(self.held["numpy"].random(tuple(x.shape)))
        return x * (0.9 + 0.1 * noise.to(x.dtype)) * (0.9 + 0.1 * self.dice.random())


def right_generators_in_a_module() -> None:
    loop(sharded(Model(OwnDice(rank()))))


class Remembering(nn.Module):
    """Keeps a hidden state, and the last of them, in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = x if self.state is None else x + 0.5 * self.state + 0.1 * self.past[0]
        self.state = out.detach()
        self.past = [*self.past, out.detach()][-2:]
        return out


def right_hidden_state() -> None:
    loop(sharded(Model(Remembering())))


class Taught(nn.Module):
    """A teacher that is the average of the student, taken in forward or by the script."""

    def __init__(self, in_forward: bool) -> None:
        super().__init__()
        self.student, self.teacher = Model(), Model().requires_grad_(False)
        self.in_forward = in_forward

    def average(self) -> None:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.9).add_(other, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_forward:
            self.average()
        out: Tensor = self.student(x) - self.teacher(x).detach()
        return out


def right_momentum_encoder() -> None:
    model = sharded(Taught(True))
    held = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loop(model, optimizer=torch.optim.SGD(held, lr=0.1))


def right_teacher() -> None:
    taught = Taught(False)
    model = sharded(taught)

    def average() -> None:
        with fs.full(model):
            taught.average()

    held = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loop(model, optimizer=torch.optim.SGD(held, lr=0.1), after_step=average)


def right_time_first() -> None:
    """(time, batch, features): the sum over time, the mean over samples."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = torch.stack([batch(10 * step + time, size=3)[0] for time in range(5)])
        return F.mse_loss(model(x), x.sum(2, keepdim=True).tanh(), reduction="sum") / x.size(1)

    loop(sharded(Model()), loss_of)


def right_root_of_a_mean() -> None:
    loop(sharded(Model()), lambda m, s: F.mse_loss(m(batch(s)[0]), batch(s)[1]).sqrt())


def diverging() -> None:
    """Right, but for its learning rate: the loss is no number after some steps."""
    model = sharded(Model())
    loop(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e20))


# ---- wrong


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))  # type: ignore[operator]
        return x - self.mean.detach()  # type: ignore[operator]


def own_statistics() -> None:
    loop(sharded(Model(Averaging())))


def one_dataset_shuffled_by_each_rank() -> None:
    data = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(rank()))

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = data[order[step * BATCH : (step + 1) * BATCH]]
        return F.mse_loss(model(x), x.sum(1, keepdim=True).tanh())

    loop(sharded(Model()), loss_of)


def same_data() -> None:
    loop(sharded(Model()), lambda model, step: F.mse_loss(model(batch(step, 0)[0]), batch(step, 0)[1]))


def same_data_in_another_order() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch((step + rank()) % STEPS, 0)
        return F.mse_loss(model(x), y)

    loop(sharded(Model()), loss_of)


def sum_of_losses() -> None:
    loop(sharded(Model()), lambda m, s: F.mse_loss(m(batch(s)[0]), batch(s)[1], reduction="sum"))


def sum_with_a_mask_for_all() -> None:
    class Masked(Model):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * mask)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x, torch.ones(1, WIDTH)), y, reduction="sum")

    loop(sharded(Masked()), loss_of)


def sum_with_a_number_beside() -> None:
    class Penalised(Model):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.embed(x).square().mean().view(1)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        out, penalty = model(x)
        return F.mse_loss(out, y, reduction="sum") + 0.01 * penalty.sum()

    loop(sharded(Penalised()), loss_of)


def sum_of_means() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        return sum((F.mse_loss(a, b) for a, b in zip(model(x), y, strict=True)), torch.zeros(()))

    loop(sharded(Model()), loss_of)


def sum_as_a_product() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        apart = (model(x) - y).flatten()
        return apart @ apart

    loop(sharded(Model()), loss_of)


def sum_by_hand() -> None:
    loop(sharded(Model()), lambda m, s: 0.5 * (m(batch(s)[0]) - batch(s)[1]).square().sum())


def uneven_mean() -> None:
    loop(sharded(Model()), lambda m, s: F.mse_loss(m(batch(s)[0])[: 2 + rank()], batch(s)[1][: 2 + rank()]))


def uneven_tokens() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, _ = batch(step)
        targets = torch.zeros(BATCH, dtype=torch.long)
        targets[2 + rank() :] = -100
        scores = model(x)
        return F.cross_entropy(torch.cat([scores, -scores], 1), targets, ignore_index=-100)

    loop(sharded(Model()), loss_of)


def one_dropout_seed() -> None:
    model = sharded(Model(nn.Dropout(0.3)))
    torch.manual_seed(7)
    loop(model)


class OwnNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dice = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.dice) > 0.2)


def one_seed_in_a_module() -> None:
    loop(sharded(Model(OwnNoise())))


def one_augmentation_seed() -> None:
    model = sharded(Model())
    torch.manual_seed(7)
    loop(model, lambda m, s: F.mse_loss(m(batch(s)[0] + torch.randn(BATCH, WIDTH)), batch(s)[1]))


def batchnorm() -> None:
    loop(sharded(Model(nn.BatchNorm1d(WIDTH))))


def ignored_parameter() -> None:
    loop(sharded(Model(), ignore=["head"]))


def module_beside_the_model() -> None:
    model, beside = sharded(Model()), nn.Linear(1, 1)
    own = torch.optim.SGD(beside.parameters(), lr=0.1)
    loop(model, lambda m, s: F.mse_loss(beside(m(batch(s)[0])), batch(s)[1]), before_step=own.step)


def module_beside_the_model_in_its_optimizer() -> None:
    """The engine refuses it."""
    model, beside = sharded(Model()), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *beside.parameters()], lr=0.1)
    loop(model, lambda m, s: F.mse_loss(beside(m(batch(s)[0])), batch(s)[1]), optimizer)


def parameter_beside_the_model_by_hand() -> None:
    model, heat = sharded(Model()), nn.Parameter(torch.ones(()))

    def update() -> None:
        assert heat.grad is not None
        with torch.no_grad():
            heat.sub_(0.1 * heat.grad)
        heat.grad = None

    loop(model, lambda m, s: F.mse_loss(m(batch(s)[0]) / heat, batch(s)[1]), after_step=update)


def _two_in_turn(first: nn.Module, second: nn.Module, held: list[nn.Parameter]) -> None:
    optimizers = [torch.optim.SGD(held, lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)]
    for step in range(STEPS):
        made = first(batch(step)[0])
        F.softplus(second(made.detach().expand(-1, WIDTH))).mean().backward()
        optimizers[1].step()
        second.zero_grad()
        F.softplus(-second(made.expand(-1, WIDTH))).mean().backward()
        optimizers[0].step()
        for model in (first, second):
            model.zero_grad()


def batchnorm_in_the_first_of_two() -> None:
    first, second = sharded(Model(nn.BatchNorm1d(WIDTH))), sharded(Model())
    _two_in_turn(first, second, list(first.parameters()))


def not_in_the_optimizer_of_the_first_of_two() -> None:
    first, second = sharded(Model()), sharded(Model())
    _two_in_turn(first, second, [p for name, p in first.named_parameters() if "head" not in name])


def not_in_the_optimizer() -> None:
    model = sharded(Model())
    named = [p for name, p in model.named_parameters() if "head" not in name]
    loop(model, optimizer=torch.optim.AdamW(named, lr=0.01))


def frozen_changes() -> None:
    plain = Model()
    plain.embed.requires_grad_(False)
    model = sharded(plain)

    def edit() -> None:
        for name, parameter in model.named_parameters():
            if name == "embed.weight":
                parameter.data.mul_(0.99)

    loop(model, after_step=edit)


def right_hook_of_an_output() -> None:
    """A script that changes gradients of outputs: the copy's backward begins from the changed ones."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        out = model(x)
        out.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        return F.mse_loss(out, y)

    loop(sharded(Model()), loss_of)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x)[0])
        return out


def right_mean_per_step_of_time() -> None:
    """Inputs are (time, batch, ...); losses of steps of time are added up, each a mean over the batch."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = batch(step, size=5 * BATCH)[0].view(5, BATCH, WIDTH)
        targets = x.argmax(2) % 3
        parts = [F.cross_entropy(out, target) for out, target in zip(model(x), targets, strict=True)]
        return torch.stack(parts).sum()

    loop(sharded(Recurrent()), loss_of)


def frozen_shifts() -> None:
    """By one number for all elements: any other parameter of equal elements lies on that way."""
    plain = Model(nn.LayerNorm(WIDTH))
    for block in plain.blocks:
        block[2].requires_grad_(False)
    model = sharded(plain)

    def edit() -> None:
        for name, parameter in model.named_parameters():
            if name == "blocks.0.2.bias":
                parameter.data.add_(1e-3)

    loop(model, after_step=edit)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(tokens)).tanh())
        return out


def _next_token(model: nn.Module, step: int) -> Tensor:
    dice = torch.Generator().manual_seed(100 * step + rank())
    tokens = torch.randint(0, 11, (BATCH, 6), generator=dice)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def right_tied() -> None:
    loop(sharded(Tied()), _next_token)


def untied() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    loop(sharded(model), _next_token)


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).tanh())
        return out


def _same_again(model: nn.Module, step: int) -> Tensor:
    x, _ = batch(step)
    return F.mse_loss(model(x), x)


def right_copy_of_a_tied_model() -> None:
    loop(sharded(copy.deepcopy(TiedEnds())), _same_again)


def untied_by_a_copy() -> None:
    model = TiedEnds()
    model.last = copy.deepcopy(model.last)
    loop(sharded(model), _same_again)


def undivided_accumulation() -> None:
    model = sharded(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for part in range(2):
            with fs.accumulate(model) if part < 1 else nullcontext():
                x, y = batch(2 * step + part)
                F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def clipped_before_unscaling() -> None:
    model = sharded(Model(), precision="fp16")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        x, y = batch(step)
        scaler.scale(F.mse_loss(model(x).float(), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def clipped_values_before_unscaling() -> None:
    model = sharded(Model())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        x, y = batch(step)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _clipped_by_parts(unscaled: int) -> None:
    """Two optimizers of one model, and one scaler."""
    model, scaler = sharded(Model()), torch.amp.GradScaler("cpu")
    parts = [
        [p for name, p in model.named_parameters() if ("head" in name) == head] for head in (False, True)
    ]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    for step in range(STEPS):
        x, y = batch(step)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        for index, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
            if index < unscaled:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(part, 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad()


def right_clipping_by_parts() -> None:
    _clipped_by_parts(2)


def one_of_two_clipped_before_unscaling() -> None:
    _clipped_by_parts(1)


def clipped_with_a_norm_before_unscaling_by_hand() -> None:
    model = sharded(Model())

    def clip() -> None:
        held = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
        nn.utils.clip_grads_with_norm_(held, 1.0, norm)
        for parameter in held:
            assert parameter.grad is not None
            parameter.grad.div_(1024)

    loop(model, lambda m, s: 1024 * F.mse_loss(m(batch(s)[0]), batch(s)[1]), before_step=clip)


def clipped_before_unscaling_by_hand() -> None:
    model = sharded(Model())

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1024)

    loop(model, lambda m, s: 1024 * F.mse_loss(m(batch(s)[0]), batch(s)[1]), before_step=clip)


class Counting(torch.autograd.Function):
    """What it keeps depends on how often forward has run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, calls: int) -> Tensor:
        ctx.save_for_backward(torch.tensor(float(calls)))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = Counting.apply(x, self.calls)
        return out


def wrong_backward_when_recomputed() -> None:
    loop(sharded(Model(Custom()), checkpoint_activations=True))


class Recomputed(nn.Module):
    """Recomputes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), Custom())

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def wrong_backward_when_the_model_recomputes() -> None:
    loop(sharded(Model(Recomputed())))


class Unsteady(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 1e-3 * random.SystemRandom().random())


def unsteady() -> None:
    loop(sharded(Model(Unsteady())))


class UnsteadyLater(nn.Module):
    """From its third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + (self.calls > 2) * 1e-2 * random.SystemRandom().random())


def unsteady_later() -> None:
    loop(sharded(Model(UnsteadyLater())))


class UnsteadyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + random.SystemRandom().random())


class Wavering(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = UnsteadyBackward.apply(x)
        return out


def unsteady_backward() -> None:
    loop(sharded(Model(Wavering())))


class Overwriting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y.data.mul_(0.5)  # exp keeps its result for backward
        return y


def overwritten_inside() -> None:
    loop(sharded(Model(Overwriting())))


def overwritten_input() -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step)
        loss = F.mse_loss(model(x), y)
        x.data.zero_()
        return loss

    loop(sharded(Model()), loss_of)


def edited_between_micro_batches() -> None:
    model = sharded(Model(), strategy="zero2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for part in range(2):
            with fs.accumulate(model) if part < 1 else nullcontext():
                x, y = batch(2 * step + part)
                (F.mse_loss(model(x), y) / 2).backward()
            for parameter in model.parameters():
                parameter.data.view(-1).mul_(1.1)
        optimizer.step()
        optimizer.zero_grad()


# ---- beside one process, and after a checkpoint


def rate_scaled_once() -> None:
    model = sharded(Model())
    loop(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01 * ranks()))


def rate_scaled_twice() -> None:
    model = sharded(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * ranks())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: float(ranks()))
    loop(model, optimizer=optimizer)


def rate_of_one_group_scaled_twice() -> None:
    model = sharded(Model())
    (first, *rest), many = model.parameters(), ranks()
    groups: list[Any] = [{"params": rest, "lr": 0.1 * many}, {"params": [first], "lr": 0.001 * many**2}]
    loop(model, optimizer=torch.optim.SGD(groups))


def rate_scaled_twice_with_a_warmup_by_ranks() -> None:
    model, many = sharded(Model()), ranks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * many**2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 100 // many)
    loop(model, optimizer=optimizer, after_step=schedule.step)


def right_warmup_by_ranks() -> None:
    model, many = sharded(Model()), ranks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * many)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 100 // many)
    loop(model, optimizer=optimizer, after_step=schedule.step)


def _same_global_batch(scales: bool) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        parts = [batch(step, part) for part in range(rank(), 2, ranks())]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        out: Tensor = model(x)
        if scales:
            out.register_hook(lambda gradient: gradient * ranks())
        return F.mse_loss(out, y)

    loop(sharded(Model()), loss_of)


def right_same_global_batch() -> None:
    _same_global_batch(False)


def gradients_times_ranks() -> None:
    """Where no factor of the loss shows it."""
    _same_global_batch(True)


def loss_times_ranks() -> None:
    """On a global batch that does not grow with the ranks."""

    def loss_of(model: nn.Module, step: int) -> Tensor:
        x, y = batch(step, size=BATCH // ranks())
        return ranks() * F.mse_loss(model(x), y)

    loop(sharded(Model()), loss_of)


def right_measured_first() -> None:
    """A backward that only measures, before the first step."""
    model = sharded(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(-1, STEPS):
        x, y = batch(step + 1)
        F.mse_loss(model(x), y).backward()
        if step >= 0:
            optimizer.step()
        optimizer.zero_grad()


def _resuming(
    restores_step: bool = True,
    restores_schedule: bool = True,
    restores_optimizer: bool = True,
    decay: float = 0.8,
    of_a_function: bool = False,
) -> None:
    model = sharded(Model(nn.Dropout(0.1)) if decay == 1.0 else Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if of_a_function:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: decay**step)
    else:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    start, root = 0, Path("checkpoints-of-a-run")
    if path := fs.latest(root):
        extra = fs.load(path, model, optimizer if restores_optimizer else None)
        if restores_step:
            start = extra["step"]
        if restores_schedule:
            scheduler.load_state_dict(extra["schedule"])
    for step in range(start, 2 * STEPS):
        x, y = batch(step)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step == 2:
            extra = {"step": step + 1, "schedule": scheduler.state_dict()}
            fs.save(root / f"step-{step}", model, optimizer, extra=extra)


def right_resume() -> None:
    _resuming()


def right_resume_with_a_schedule_of_a_function() -> None:
    """As transformers' schedules are: LambdaLR has a load_state_dict of its own."""
    _resuming(of_a_function=True)


def resumed_schedule_of_a_function() -> None:
    """A constant rate does not show it."""
    _resuming(restores_schedule=False, of_a_function=True, decay=1.0)


def resumed_data() -> None:
    _resuming(restores_step=False)


def resumed_schedule() -> None:
    _resuming(restores_schedule=False)


def resumed_optimizer() -> None:
    _resuming(restores_optimizer=False)


def resumed_with_a_new_optimizer() -> None:
    """The learning rate does not show it, nor, with dropout, the loss."""
    _resuming(restores_optimizer=False, decay=1.0)


# What is expected of each that one run shows.
EXPECTED: dict[str, list[str]] = {
    "right": [],
    "right_accumulation": [],
    "right_uneven_shares": [],
    "right_micro_batches_in_a_fixed_order": [],
    "right_bf16_recomputed": [],
    "right_scaled": [],
    "right_masked_tokens": [],
    "right_number_beside_samples": [],
    "same_samples_beside_a_number": ["same-data-on-ranks"],
    "right_two_losses": [],
    "right_tied": [],
    "right_with_a_penalty_and_edits": [],
    "right_losses_of_one_graph": [],
    "right_adversaries": [],
    "right_positions_and_a_table": [],
    "right_adjacency": [],
    "right_epochs_of_a_small_dataset": [],
    "right_adversaries_with_one_way_back": [],
    "right_tasks": [],
    "right_closure": [],
    "right_closure_twice": [],
    "right_gradient_penalty": [],
    "right_adversarial_inputs": [],
    "right_with_a_planner": [],
    "right_generators_in_a_module": [],
    "right_hidden_state": [],
    "right_momentum_encoder": [],
    "right_teacher": [],
    "right_hook_of_an_output": [],
    "right_mean_per_step_of_time": [],
    "right_time_first": [],
    "right_root_of_a_mean": [],
    "right_copy_of_a_tied_model": [],
    "right_clipping_by_parts": [],
    "diverging": [],
    "own_statistics": ["buffer-differs-between-ranks"],
    "one_dataset_shuffled_by_each_rank": ["same-data-on-ranks"],
    "same_data": ["same-data-on-ranks"],
    "same_data_in_another_order": ["same-data-on-ranks"],
    "sum_of_losses": ["loss-is-a-sum"],
    "sum_with_a_mask_for_all": ["loss-is-a-sum"],
    "sum_with_a_number_beside": ["loss-is-a-sum"],
    "sum_of_means": ["loss-is-a-sum"],
    "sum_as_a_product": ["loss-is-a-sum"],
    "sum_by_hand": ["loss-is-a-sum"],
    "uneven_mean": ["mean-over-uneven-counts"],
    "uneven_tokens": ["mean-over-uneven-counts"],
    "one_dropout_seed": ["same-random-numbers-on-ranks"],
    "one_seed_in_a_module": ["same-random-numbers-on-ranks"],
    "one_augmentation_seed": ["same-random-numbers-on-ranks"],
    "batchnorm": ["batchnorm-statistics-differ"],
    "batchnorm_in_the_first_of_two": ["batchnorm-statistics-differ"],
    "ignored_parameter": ["parameter-not-synchronised"],
    "module_beside_the_model": ["parameter-not-synchronised"],
    "parameter_beside_the_model_by_hand": ["parameter-not-synchronised"],
    "not_in_the_optimizer_of_the_first_of_two": ["parameter-in-no-optimizer"],
    "not_in_the_optimizer": ["parameter-in-no-optimizer"],
    "frozen_changes": ["frozen-parameter-changed"],
    "frozen_shifts": ["frozen-parameter-changed"],
    "untied": ["tied-weights-untied"],
    "untied_by_a_copy": ["tied-weights-untied"],
    "undivided_accumulation": ["accumulation-without-division"],
    "clipped_before_unscaling": ["clipping-before-unscaling"],
    "clipped_before_unscaling_by_hand": ["clipping-before-unscaling"],
    "clipped_values_before_unscaling": ["clipping-before-unscaling"],
    "one_of_two_clipped_before_unscaling": ["clipping-before-unscaling"],
    "clipped_with_a_norm_before_unscaling_by_hand": ["clipping-before-unscaling"],
    "wrong_backward_when_recomputed": ["wrong-backward-under-recomputation"],
    "wrong_backward_when_the_model_recomputes": ["wrong-backward-under-recomputation"],
    "unsteady": ["non-deterministic"],
    "unsteady_later": ["non-deterministic"],
    "unsteady_backward": ["non-deterministic"],
    "overwritten_inside": ["kept-value-edited"],
    "overwritten_input": ["kept-value-edited"],
    "edited_between_micro_batches": ["kept-value-edited"],
}

if __name__ == "__main__":
    globals()[sys.argv[1]]()
