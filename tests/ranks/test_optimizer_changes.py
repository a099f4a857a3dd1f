"""An optimizer that changes between steps, or whose state was loaded, is looked at again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engines
import fullshard as fs
import optimizer_kinds as kinds
import ranks
import reference
from engines import my_rank

STEPS = 4


class Trusting(torch.optim.Optimizer):
    """Element-wise until its group says that norms of parameters count."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "trust": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (p.norm() if group["trust"] else 1.0), alpha=group["lr"])


class KeepingAndTrusting(kinds.Plain):
    """The same with state."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept * p.norm() if group["trust"] else kept


def _flag_set_later(model: nn.Module) -> Callable[[int], Any]:
    optimizer = Trusting(model.parameters())

    def step(number: int) -> None:
        optimizer.param_groups[0]["trust"] = number >= 2
        optimizer.step()
        optimizer.zero_grad()

    return step


def _flag_loaded(model: nn.Module) -> Callable[[int], Any]:
    optimizer = Trusting(model.parameters())

    def step(number: int) -> None:
        if number == 2:
            state = optimizer.state_dict()
            state["param_groups"][0]["trust"] = True
            optimizer.load_state_dict(state)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _parameters_replaced(model: nn.Module) -> Callable[[int], Any]:
    held = [p for p in model.parameters() if p.dim() == 2]
    optimizer = kinds.ByParameterNorm(held[:3])

    def step(number: int) -> None:
        if number == 2:
            optimizer.param_groups[0]["params"] = held[-3:]
        optimizer.step()
        model.zero_grad()

    return step


def _state_loaded_before_the_first_step(model: nn.Module) -> Callable[[int], Any]:
    optimizer = kinds.Plain(model.parameters())

    def step(number: int) -> None:
        nonlocal optimizer
        if number == 2:
            state, optimizer = copy.deepcopy(optimizer.state_dict()), kinds.Plain(model.parameters())
            optimizer.load_state_dict(state)
        optimizer.step()
        optimizer.zero_grad()

    return step


CASES = [_flag_set_later, _flag_loaded, _parameters_replaced, _state_loaded_before_the_first_step]


def _trained(model: nn.Module, case: Any, pieces: list[list[Any]]) -> dict[str, torch.Tensor]:
    step = case(model)
    for number, batch in enumerate(pieces):
        for piece in batch:
            (engines.loss_of(model, piece) / len(batch)).backward()
        step(number)
    return engines.values(model)


def _all() -> list[dict[str, torch.Tensor]]:
    mine = [[engines.batch(step, my_rank())] for step in range(STEPS)]
    return [_trained(engines.shard_blocks(engines.build()), case, mine) for case in CASES]


@pytest.mark.parametrize("count", [2, 3])
def test_what_changes_between_steps_has_the_numbers_of_one_process(count: int) -> None:
    pieces = engines.batches(count, STEPS)
    expected = [_trained(engines.build(), case, pieces) for case in CASES]
    for found in ranks.run(_all, count):
        for case, values, right in zip(CASES, found, expected, strict=True):
            for name, value in right.items():
                reference.assert_close(values[name], value, f"{case.__name__}: {name}", 2e-5, 2e-6)


def _becomes_another_kind() -> str:
    model = engines.shard_blocks(engines.build())
    optimizer = KeepingAndTrusting(model.parameters(), trust=False)
    for number in range(2):
        engines.loss_of(model, engines.batch(number, my_rank())).backward()
        optimizer.param_groups[0]["trust"] = number == 1
        if number:
            with pytest.raises(fs.FullshardError) as raised:
                optimizer.step()
            return str(raised.value)
        optimizer.step()
    return ""


def test_an_optimizer_with_state_of_shards_that_begins_to_look_at_tensors_is_refused() -> None:
    for text in ranks.run(_becomes_another_kind, 2):
        assert "KeepingAndTrusting has stepped element by element" in text
        assert "before its first step" in text


def _beside_a_disk(folder: str) -> list[bool]:
    """Two optimizers over one model, of which one holds nothing that rests on disk."""

    def values(offload: Any) -> dict[str, torch.Tensor]:
        model = engines.shard_blocks(engines.build(), offload=offload)
        held = list(model.parameters())
        optimizers = [torch.optim.AdamW(part, lr=0.01) for part in (held[:2], held[2:])]
        for step in range(2):
            engines.loss_of(model, engines.batch(step, my_rank())).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return engines.values(model)

    plain = values(None)
    mixed = values(fs.Offload(device=0, host=4000, disk=folder))
    return [reference.bitwise(mixed[name], value) for name, value in plain.items()]


def test_an_optimizer_that_holds_nothing_on_disk_steps_beside_one_that_does(tmp_path: Path) -> None:
    for same in ranks.run(_beside_a_disk, 2, str(tmp_path)):
        assert all(same)


def _holds_one_twice(kind: str, options: dict[str, Any]) -> str:
    model = engines.shard_blocks(engines.build(), **options)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    held = [*matrices, matrices[0]]
    optimizer = torch.optim.Muon(held) if kind == "Muon" else torch.optim.AdamW(held)
    engines.loss_of(model, engines.batch(0, my_rank())).backward()
    with pytest.raises(fs.FullshardError) as refused:
        optimizer.step()
    return str(refused.value)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(
    ("kind", "options"), [("AdamW", {"offload": "host"}), ("AdamW", {"state": "8bit"}), ("Muon", {})]
)
def test_parameter_twice_in_one_group_is_refused_by_name_where_steps_run_in_parts(
    kind: str, options: dict[str, Any]
) -> None:
    for message in ranks.run(_holds_one_twice, 2, kind, options):
        assert f"{kind} holds parameter '" in message
        assert "2 times in one group" in message
