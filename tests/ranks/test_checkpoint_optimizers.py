"""What an optimizer keeps, its groups, schedulers and scalers: saved, loaded elsewhere, and gone on with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import reference
from engines import build
from painting import (
    WIDTH,
    Optimizer,
    Plain,
    adamw,
    load,
    shard,
    tensors_of,
    whole_state,
)

Make = Callable[[Any], Optimizer]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(
    model: nn.Module, optimizer: Optimizer, steps: Iterable[int], each: Callable[[], Any] | None = None
) -> None:
    """All ranks get the same batch, so that the mean over any number of them is the same gradient."""
    for step in steps:
        model(batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if each is not None:
            each()


# --- optimizers ----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD with momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam with amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "NAdam": ("NAdam", {"lr": 0.01}),
    "RAdam": ("RAdam", {"lr": 0.01}),
    "Adamax": ("Adamax", {"lr": 0.01}),
    "Adadelta": ("Adadelta", {}),
    "ASGD": ("ASGD", {"lr": 0.01, "t0": 1}),
    "Rprop": ("Rprop", {"lr": 0.01}),
}


def of_kind(name: str) -> Make:
    kind, options = OPTIMIZERS[name]
    return lambda parameters: getattr(torch.optim, kind)(parameters, **options)


def _keep(root: Path) -> None:
    """Every optimizer after three steps on one process, and what two more make of it."""
    import fullshard as fs

    for name in OPTIMIZERS:
        model = shard(Plain)
        optimizer = of_kind(name)(model.parameters())
        train(model, optimizer, range(3))
        fs.save(root / name, model, optimizer)
        ranks.end_groups_of_models()


def _go_on(root: Path) -> dict[str, dict[str, Tensor]]:
    """Load every one of them, and two steps more."""
    found = {}
    for name in OPTIMIZERS:
        model = shard(Plain, units=nn.Linear)
        optimizer = of_kind(name)(model.parameters())
        train(model, optimizer, range(90, 91))
        load(root / name, model, optimizer)
        loaded = {f"loaded {k}": v for k, v in whole_state(model, optimizer).items()}
        train(model, optimizer, range(3, 5))
        found[name] = loaded | whole_state(model, optimizer)
        ranks.end_groups_of_models()
    return found


def in_one_process(name: str) -> dict[str, Tensor]:
    """The same five steps with plain torch, and the state after three of them."""
    model = build(Plain)
    optimizer = of_kind(name)(model.parameters())
    train(model, optimizer, range(3))
    found = {f"loaded {k}": v.clone() for k, v in _plain_state(model, optimizer).items()}
    train(model, optimizer, range(3, 5))
    return found | _plain_state(model, optimizer)


def _plain_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    found = {n: v.detach() for n, v in (*model.named_parameters(), *model.named_buffers())}
    for n, p in model.named_parameters():
        found |= {f"{n}.{key}": value for key, value in optimizer.state[p].items()}
    return found


def test_every_elementwise_optimizer_goes_on_elsewhere_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Three steps on two ranks, two more on three, against five in one process, unsharded."""
    ranks.run(_keep, 2, tmp_path, timeout_s=120)
    results = ranks.run(_go_on, 3, tmp_path, timeout_s=120)
    for name in OPTIMIZERS:
        expected = in_one_process(name)
        for rank, found in enumerate(results):
            assert found[name].keys() == expected.keys(), name
            for key, value in expected.items():
                reference.assert_close(found[name][key], value, f"{name}, rank {rank}: {key}", 2e-5, 2e-6)
        stored = tensors_of(tmp_path / name, "optimizer")  # what was loaded is what is in the files
        for key, value in stored.items():
            assert reference.bitwise(results[0][name][f"loaded {key}"], value), f"{name}: {key}"


# --- state that is not cut as its parameter is ---------------------------------------------------------


class Blockwise(torch.optim.Optimizer):
    """Keeps one number for every four elements of what it sees of a parameter, as 8-bit optimizers do."""

    fullshard_step = "element-wise"  # not quite: what it does to a shard is what is saved and loaded here

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                flat = p.detach().abs().reshape(-1)
                flat = nn.functional.pad(flat, (0, -len(flat) % 4))
                largest = flat.view(-1, 4).amax(1) if len(flat) else flat
                before = state.get("absmax", torch.zeros_like(largest))
                state["absmax"] = torch.maximum(before, largest)
                state["counted"] = state.get("counted", 0) + 1
                state["step"] = state.get("step", torch.zeros(1)) + 1  # some keep it so, not as a scalar
                scale = state["absmax"].repeat_interleave(4)[: p.numel()].view(p.shape)
                p.sub_(group["lr"] * p.grad).div_(1 + 0.1 * scale)


def _save_blockwise(root: Path, strategy: str) -> list[bool]:
    """Saved, loaded into a new optimizer on as many ranks, and two steps more on both."""
    import fullshard as fs

    model = shard(Plain, strategy=strategy)
    optimizer = Blockwise(model.parameters())
    train(model, optimizer, range(2))
    fs.save(root / strategy, model, optimizer)
    other = shard(Plain, strategy=strategy)
    again = Blockwise(other.parameters())
    loaded = load(root / strategy, other, again)
    assert loaded.notes == ()
    train(model, optimizer, range(2, 4))
    train(other, again, range(2, 4))
    same = [torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
    pairs = zip(optimizer.state.values(), again.state.values(), strict=True)
    return same + [
        torch.equal(a["absmax"], b["absmax"]) and b["counted"] == b["step"][0] == 4 for a, b in pairs
    ]


def _load_blockwise(path: Path, strategy: str, units: Any) -> tuple[str, bool]:
    model = shard(Plain, strategy=strategy, units=units)
    optimizer = Blockwise(model.parameters())
    train(model, optimizer, range(9, 10))
    before = whole_state(model)
    try:
        load(path, model, optimizer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", all(
            map(torch.equal, whole_state(model).values(), before.values())
        )
    train(model, optimizer, range(2, 4))
    return "", False


def test_state_that_is_not_elementwise_loads_on_the_same_ranks_and_is_refused_on_others(
    tmp_path: Path,
) -> None:
    for strategy in ("zero3", "replicate"):
        for same in ranks.run(_save_blockwise, 2, tmp_path, strategy, timeout_s=60):
            assert all(same), f"{strategy}: {same}"
    cases = [("zero3", 3, "zero3", None), ("zero3", 2, "zero3", nn.Linear), ("zero3", 2, "replicate", None)]
    for saved, count, strategy, units in cases:
        for message, unchanged in ranks.run(
            _load_blockwise, count, tmp_path / saved, strategy, units, timeout_s=60
        ):
            assert message.startswith("CheckpointError: rank"), (saved, count, strategy)
            assert "absmax' is not sharded like its parameter" in message
            assert unchanged
    # Whole on every rank then, whole on every rank now: it is the same state on any number of ranks.
    assert ranks.run(_load_blockwise, 3, tmp_path / "replicate", "replicate", None) == [("", False)] * 3


def _save_factored(root: Path) -> None:
    import fullshard as fs

    model = shard(Plain, strategy="replicate")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    fs.save(root, model, optimizer)


def _go_on_factored(root: Path) -> dict[str, Tensor]:
    model = shard(Plain, strategy="replicate")
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.5)
    load(root, model, optimizer)
    train(model, optimizer, range(2, 4))
    return whole_state(model)


def test_state_of_whole_matrices_loads_on_any_number_of_ranks_that_hold_them_whole(tmp_path: Path) -> None:
    ranks.run(_save_factored, 2, tmp_path / "saved", timeout_s=60)
    model = build(Plain)
    train(model, torch.optim.Adafactor(model.parameters(), lr=0.01), range(4))
    for found in ranks.run(_go_on_factored, 3, tmp_path / "saved", timeout_s=60):
        for name, parameter in model.named_parameters():
            reference.assert_close(found[name], parameter.detach(), name, 2e-5, 2e-6)


# --- groups and their options --------------------------------------------------------------------------


def two_groups(model: nn.Module, lr: float, **options: Any) -> Optimizer:
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0, "lr": 2 * lr}]
    return torch.optim.AdamW(groups, lr=lr, **options)


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _save_groups(root: Path) -> None:
    import fullshard as fs

    model = shard(Plain)
    for name, optimizer in {
        "plain": two_groups(model, 0.01),
        "tensors": two_groups(model, torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.9))),
    }.items():
        train(model, optimizer, range(1))
        optimizer.param_groups[0]["my own"] = {"tag": (1, "x")}
        fs.save(root / name, model, optimizer)
    fs.save(root / "without", model)


def _load_groups(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = shard(Plain)

    def tried(label: str, source: str, optimizer: Optimizer) -> None:
        try:
            loaded = load(root / source, model, optimizer)
        except RuntimeError as error:
            found[label] = str(error)
            return
        train(model, optimizer, range(1))
        found[label] = options_of(optimizer), loaded.notes

    tried(
        "same groups",
        "plain",
        two_groups(model, 0.5, eps=1e-3, foreach=False, capturable=False, amsgrad=False),
    )
    tried("fused", "plain", two_groups(model, 0.5, fused=True))
    tried("one group", "plain", torch.optim.AdamW(model.parameters(), lr=0.5))
    per = [{"params": [p], "weight_decay": 9.0} for p in model.parameters()]
    tried("a group for each", "plain", torch.optim.AdamW(per, lr=0.5))
    tried("by name", "plain", torch.optim.AdamW(list(model.named_parameters())[:1], lr=0.5))
    stranger = nn.Parameter(torch.zeros(3))
    tried("a stranger", "plain", torch.optim.AdamW([*model.parameters(), stranger], lr=0.5))
    tried("saved without", "without", torch.optim.AdamW(model.parameters(), lr=0.5))
    tried("another class", "plain", torch.optim.Adam(model.parameters(), lr=0.5))
    tensors = two_groups(model, torch.tensor(0.5), betas=(torch.tensor(0.1), torch.tensor(0.2)))
    tried("tensors", "tensors", tensors)
    split = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=torch.tensor(0.5))
    tried("tensors, a group for each", "tensors", split)
    found["separate"] = [len({id(g["lr"]) for g in o.param_groups}) for o in (tensors, split)]
    return found


def test_options_of_the_checkpoint_win_and_those_of_the_implementation_do_not(tmp_path: Path) -> None:
    ranks.run(_save_groups, 2, tmp_path, timeout_s=60)
    for found in ranks.run(_load_groups, 3, tmp_path, timeout_s=60):
        options, notes = found["same groups"]
        assert "random numbers" in "; ".join(notes)
        assert [group["lr"] for group in options] == [0.01, 0.02]
        assert [group["weight_decay"] for group in options] == [0.3, 0.0]
        assert options[0]["betas"] == (0.9, 0.999)
        assert options[0]["eps"] == 1e-8
        assert options[0]["my own"] == {"tag": (1, "x")}
        assert options[0]["foreach"] is False
        assert [group["fused"] for group in found["fused"][0]] == [True, True]
        assert [group["lr"] for group in found["a group for each"][0]] == [
            0.01 if n.endswith("weight") else 0.02 for n, _ in Plain().named_parameters()
        ]
        assert "saved groups [0, 1], whose options differ" in found["one group"]
        assert "state of AdamW, and the optimizer here is Adam" in found["another class"]
        assert found["by name"][0][0]["param_names"] == ["blocks.0.up.weight"]
        assert found["by name"][0][0]["lr"] == 0.01
        assert "holds a tensor of shape (3,) that the model does not own" in found["a stranger"]
        assert "was saved without an optimizer" in found["saved without"]
        options, _ = found["tensors"]
        assert [float(group["lr"]) for group in options] == pytest.approx([0.01, 0.02])
        assert all(isinstance(value, Tensor) for value in (options[0]["lr"], *options[0]["betas"]))
        assert found["separate"] == [2, len(list(Plain().parameters()))]  # a scheduler fills them in place


def _never_stepped(root: Path) -> tuple[int, int]:
    """An optimizer that had no state gives none; one that has some loses it."""
    import fullshard as fs

    model = shard(Plain)
    fs.save(root, model, torch.optim.AdamW(model.parameters(), lr=0.125))
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(1))
    had = len(optimizer.state)
    load(root, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.125
    train(model, optimizer, range(1))
    return had, int(next(iter(optimizer.state.values()))["step"])


def test_optimizer_that_never_stepped_loads_as_one(tmp_path: Path) -> None:
    for had, step in ranks.run(_never_stepped, 2, tmp_path / "saved", timeout_s=60):
        assert had > 0
        assert step == 1


# --- schedulers and scalers ----------------------------------------------------------------------------


def by_half(epoch: int) -> float:
    return 1 / (1 + epoch)


class Warming:
    """A schedule with something to remember."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return min(1.0, self.calls / 20)


lrs = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5, 5, 7], 0.5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 8, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=12),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.001, 0.1, 3, cycle_momentum=False),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9, 2.0),
    "LambdaLR": lambda o: lrs.LambdaLR(o, by_half),
    "LambdaLR with an object": lambda o: lrs.LambdaLR(o, Warming()),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, 1.0, 3), lrs.CosineAnnealingLR(o, 6)], [3]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, 2), lrs.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=1),
}
METRICS = [3.0, 2.0, 2.5, 2.6, 2.7, 1.0, 1.5, 1.6, 1.7, 1.8]


def _schedules(root: Path, tensor: bool) -> dict[str, tuple[list[Any], list[Any]]]:
    """Ten steps at once, and four, a checkpoint, and six in another run: learning rates of both."""
    import fullshard as fs

    found = {}
    for name, make in SCHEDULERS.items():
        runs = []
        for interrupted in (False, True):
            model, optimizer, scheduler, seen = *_scheduled(make, tensor), []
            for step in range(10):
                if interrupted and step == 4:
                    fs.save(root / name, model, optimizer, extra={"scheduler": scheduler.state_dict()})
                    model, optimizer, scheduler = _scheduled(make, tensor)
                    scheduler.load_state_dict(load(root / name, model, optimizer)["scheduler"])
                train(model, optimizer, [step])
                metric = [METRICS[step]] if name == "ReduceLROnPlateau" else []
                scheduler.step(*metric)
                seen.append([float(group["lr"]) for group in optimizer.param_groups])
            runs.append((seen, [p.detach().clone() for p in model.parameters()]))
        (all_at_once, values), (in_two, other) = runs
        found[name] = all_at_once, in_two, all(map(torch.equal, values, other))
    return found


def _scheduled(make: Callable[[Optimizer], Any], tensor: bool) -> tuple[nn.Module, Optimizer, Any]:
    model = shard(Plain)
    optimizer = two_groups(model, torch.tensor(0.01) if tensor else 0.01)
    return model, optimizer, make(optimizer)


@pytest.mark.parametrize("tensor", [False, True], ids=["a number", "a tensor"])
def test_every_scheduler_goes_on_from_extra_as_if_nothing_had_happened(tmp_path: Path, tensor: bool) -> None:
    for found in ranks.run(_schedules, 1, tmp_path, tensor, timeout_s=120):
        for name, (at_once, in_two, same) in found.items():
            assert in_two == at_once, name
            assert same, f"{name}: other parameters"
            assert len({rates[0] for rates in at_once}) > 1, f"{name}: the rate never changed"


def _scaler(root: Path) -> tuple[dict[str, Any], dict[str, Any], bool]:
    import fullshard as fs

    model = shard(Plain)
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(3):
        scaler.scale(model(batch(step, 0))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    fs.save(root, model, optimizer, extra={"scaler": scaler.state_dict(), "milestones": Counter({3: 2})})
    extra = load(root, model, optimizer)
    again = torch.amp.GradScaler("cpu")
    again.load_state_dict(extra["scaler"])
    return scaler.state_dict(), again.state_dict(), extra["milestones"] == Counter({3: 2})


def test_grad_scaler_comes_back_from_extra(tmp_path: Path) -> None:
    for before, after, counted in ranks.run(_scaler, 2, tmp_path / "saved", timeout_s=60):
        assert before == after
        assert before["scale"] == 2048.0
        assert counted
