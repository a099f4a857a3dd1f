"""Steps on entire tensors beside everything else that a run may ask for: the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import owned_cases
import ranks
from owned_cases import Pair


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2


def _muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02, weight_decay=0.1)


def _adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


KINDS: dict[str, Any] = {"Muon": (_muon, _is_matrix), "Adafactor": (_adafactor, owned_cases.everything)}


def _pair(kind: str, **options: Any) -> Pair:
    make, only = KINDS[kind]
    return Pair(make, only, **options)


def _wires(kind: str, strategy: str) -> list[str]:
    """8-bit gathers and gradients, over nodes and not; values at rest are exact."""
    import fullshard as fs

    options: dict[str, Any] = {"strategy": strategy}
    if strategy in ("nodes", "hybrid"):
        axes = ("node" if strategy == "nodes" else "replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        options["strategy"] = "zero3" if strategy == "nodes" else strategy
    precision = fs.Precision(gather=torch.int8, wire=torch.int8)
    pair = _pair(kind, precision=precision, **options)
    for step in range(2):
        with fs.accumulate(pair.model):
            owned_cases.loss_of(pair.model, step + 7).backward()
        owned_cases.loss_of(pair.reference, step + 7).backward()
        pair.step(step)
    return pair.differing()


def _scaled_fp16(kind: str) -> list[str]:
    pair = _pair(kind, precision="fp16")
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    models = (pair.reference, pair.model)
    for step in range(4):
        for model, scaler in zip(models, scalers, strict=True):
            scaler.scale(owned_cases.loss_of(model, step)).backward()
        if step == 1:
            for model in models:
                model.blocks[0][0].weight.grad.fill_(float("inf"))  # type: ignore[index, union-attr]
        owned_cases.copy_gradients(pair)
        for model, optimizer, scaler in zip(models, pair.optimizers, scalers, strict=True):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    return pair.differing()


def _clipped(kind: str) -> list[str]:
    """By a norm that is a power of two on both sides: each may round another one differently."""
    pair = _pair(kind)
    for step in range(3):
        for model in (pair.reference, pair.model):
            owned_cases.loss_of(model, step).backward()
        owned_cases.copy_gradients(pair)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (pair.reference, pair.model)]
        torch.testing.assert_close(*map(torch.as_tensor, norms))
        owned_cases.copy_gradients(pair)
        for model, optimizer in zip((pair.reference, pair.model), pair.optimizers, strict=True):
            optimizer.step()
            model.zero_grad()
    return pair.differing()


def _unfrozen_later(kind: str) -> list[str]:
    """What was frozen when the model was sharded joins as a group; the rates follow a schedule."""
    pair = _pair(kind)
    schedules: list[Any] = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in pair.optimizers]
    for step in range(4):
        if step == 2:
            for model, optimizer in zip((pair.reference, pair.model), pair.optimizers, strict=True):
                model.frozen.requires_grad_(True)  # type: ignore[operator, union-attr]
                weight: Any = model.frozen.weight  # type: ignore[union-attr]
                rate = optimizer.param_groups[0]["lr"] / 2
                optimizer.add_param_group({"params": [weight], "lr": rate, "initial_lr": rate})
        pair.step(step)
        for schedule in schedules[: 2 if step < 2 else 0]:
            schedule.step()
    return pair.differing()


def _state_dicts(kind: str) -> list[str]:
    """optimizer.state_dict() into another optimizer, as it is and by torch's functions."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    import fullshard as fs

    found = []
    for full in (None, False, True):
        pair = _pair(kind)
        pair.step(0)
        make, only = KINDS[kind]
        fresh = Pair(make, only)
        with fs.full(pair.model), fs.full(fresh.model), torch.no_grad():
            for a, b in zip(fresh.model.parameters(), pair.model.parameters(), strict=True):
                a.copy_(b)
        if full is None:
            fresh.optimizers[1].load_state_dict(pair.optimizers[1].state_dict())
        else:
            options = StateDictOptions(full_state_dict=full)
            state = get_optimizer_state_dict(pair.model, pair.optimizers[1], options=options)
            set_optimizer_state_dict(fresh.model, fresh.optimizers[1], state, options=options)
        pair.model, pair.optimizers[1] = fresh.model, fresh.optimizers[1]
        for step in (1, 2):
            pair.step(step)
        found += [f"{full}: {name}" for name in pair.differing()]
        ranks.end_groups_of_models()
    return found


CASES: list[tuple[str, Callable[..., list[str]], tuple[Any, ...]]] = [
    *((f"wire {s}", _wires, (s,)) for s in ("zero1", "zero2", "zero3", "nodes", "hybrid", "replicate")),
    ("fp16", _scaled_fp16, ()),
    ("clipped", _clipped, ()),
    ("unfrozen", _unfrozen_later, ()),
    ("state dicts", _state_dicts, ()),
]


def _all(names: list[tuple[str, int]]) -> dict[str, list[str]]:
    found = {}
    for kind, number in names:
        name, case, arguments = CASES[number]
        found[f"{kind}: {name}"] = case(kind, *arguments)
        ranks.end_groups_of_models()
    return found


PAIRS = [(kind, number) for kind in KINDS for number in range(len(CASES))]
IN_TURN = [pair for place, pair in enumerate(PAIRS) if (place + place // len(CASES)) % 2]


@pytest.mark.parametrize("pairs", [IN_TURN, pytest.param(PAIRS, marks=pytest.mark.long)], ids=["some", "all"])
def test_wires_scalers_clipping_late_groups_and_state_dicts_leave_the_bits_of_one_process(
    pairs: list[tuple[str, int]],
) -> None:
    for found in ranks.run(_all, 4, pairs, init=True):
        assert [name for name, differing in found.items() if differing] == []
