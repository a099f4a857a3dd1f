"""Units that stay full from forward to backward: which, how much they hold, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import engines
import ranks
import reference
import tables

BLOCKS = 6


class Tied(nn.Module):
    """The first unit is called again at the end, as a head tied to its embedding is."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(engines.block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token(x)
        for block in self.blocks:
            x = block(x)
        return self.token(x)


class Looked(nn.Module):
    """Blocks behind an embedding, whose backward does not need its table."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(engines.block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.token((x.sum(-1).abs() * 3).long() % 16)
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {"tied": Tied, "looked": Looked}


def _units(module: nn.Module) -> bool:
    return isinstance(module, type(engines.block()) | nn.Embedding) or (
        isinstance(module, nn.Linear) and module.weight.shape == (8, 8)
    )


def _train(kind: str, said: dict[str, Any], evaluate: bool = False) -> dict[str, Any]:
    import fullshard as fs

    torch.manual_seed(0)
    model = MODELS[kind]()
    top = [model.token, *model.blocks]
    fs.shard(model, units=lambda m: any(m is unit for unit in top), **said)
    runtime = model._fullshard
    begin, sent = runtime.comm.recorder.begin, {}

    def count(channel: str, phase: str, unit: str, step: int) -> int:
        if step == 2:
            sent.setdefault(f"{channel} {phase}", []).append(unit)
        return begin(channel, phase, unit, step)

    runtime.comm.recorder.begin = count
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, held = [], 0
    for step in range(4):
        x = engines.batch(step, engines.my_rank())[0]
        loss = model(x).square().mean()
        held = max(held, sum(lane.full.untyped_storage().nbytes() for lane in runtime.lanes[1:]))
        if evaluate:
            with torch.no_grad():
                model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    left = sum(lane.full.untyped_storage().nbytes() for lane in runtime.lanes)
    with fs.full(model, writeback=False):
        values = [p.detach().clone() for p in model.parameters()]
    size = max(unit.full_bytes for unit in runtime.units)
    return {"losses": losses, "values": values, "sent": sent, "held": held, "left": left, "size": size}


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    values = zip(a["values"], b["values"], strict=True)
    return a["losses"] == b["losses"] and all(reference.bitwise(x, y) for x, y in values)


@tables.in_turn(("kind", "evaluate"), MODELS, [False, True])
def test_what_is_kept_changes_no_bit_and_saves_its_second_gather(kind: str, evaluate: bool) -> None:
    none = ranks.run(_train, 2, kind, {"keep_full": 0}, evaluate, init=True, timeout_s=60)[0]
    size = none["size"]
    for keep, count in ((None, BLOCKS), (size, 1), (3 * size, 3), ("all", BLOCKS)):
        found = ranks.run(_train, 2, kind, {"keep_full": keep}, evaluate, init=True, timeout_s=60)[0]
        assert _same(found, none), keep
        if isinstance(keep, int):  # otherwise a model of this size keeps the memory of its full values
            assert found["left"] == 0, "everything is released after backward"
        if evaluate:
            continue  # the evaluation lets go what was kept
        second = [unit for unit in found["sent"].get("gather backward", []) if unit.startswith("blocks")]
        if kind == "looked":
            assert len(second) == BLOCKS - count, keep
        if isinstance(keep, int):
            assert found["held"] <= keep, "more is held between forward and backward than the budget"


def test_an_embedding_is_not_gathered_for_a_backward_that_does_not_read_it() -> None:
    found = ranks.run(_train, 2, "looked", {"keep_full": 0}, init=True, timeout_s=60)[0]
    assert "token" in found["sent"]["gather forward"]
    assert "token" not in found["sent"]["gather backward"]
    assert "token" in found["sent"]["reduce backward"]


def test_a_small_unit_that_is_called_at_both_ends_is_gathered_once_a_pass() -> None:
    found = ranks.run(_train, 2, "tied", {"keep_full": 0}, init=True, timeout_s=60)[0]
    assert found["sent"]["gather forward"].count("token") == 1


def _gathered_again() -> list[str]:
    """The units of a model that is not small which a step gathers in backward."""
    import fullshard as fs

    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2304, 2304) for _ in range(3)))  # 20 MiB each
    fs.shard(model)
    sent: list[str] = []
    begin = model._fullshard.comm.recorder.begin

    def count(channel: str, phase: str, unit: str, step: int) -> int:
        if (channel, phase) == ("gather", "backward"):
            sent.append(unit)
        return begin(channel, phase, unit, step)

    model._fullshard.comm.recorder.begin = count
    for _ in range(2):
        sent.clear()  # the first step only learns the order
        model(torch.ones(1, 2304)).sum().backward()
    assert not any(lane.full.untyped_storage().nbytes() for lane in model._fullshard.lanes)
    return sent


def test_by_default_the_last_two_units_of_a_large_model_stay_whatever_their_size() -> None:
    assert ranks.run(_gathered_again, 2) == 2 * [["0"]]
