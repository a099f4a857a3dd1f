"""What `optimizer.state_dict()` of a sharded model shows, and what it takes back."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as stock

import fullshard as fs
import ranks
from optimizer_kinds import NestedState


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2, bias=False))


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _reference(steps: int, ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        _step(model, optimizer, torch.cat([_batch(step, rank) for rank in range(ranks)]))
    return model, optimizer


def _sharded(strategy: str = "zero3") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fs.shard(_model(), strategy=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _rank() -> int:
    return torch.distributed.get_rank()


def _values(model: nn.Module) -> list[list[float]]:
    with fs.full(model, writeback=False):
        return [p.detach().flatten().tolist() for p in model.parameters()]


def _refused(state: dict[str, Any]) -> str:
    try:
        torch.save(state, io.BytesIO())
    except fs.FullshardError as error:
        return str(error)
    return ""


def _refusals() -> list[str]:
    model, optimizer = _sharded()
    _step(model, optimizer, _batch(0, _rank()))
    return [_refused(model.state_dict()), _refused(optimizer.state_dict())]


def test_saving_one_ranks_part_of_the_state_as_if_it_were_all_is_refused() -> None:
    for messages in ranks.run(_refusals, 2):
        assert all("of 35 elements" in message for message in messages)


def _through_torchs_functions(strategy: str) -> Any:
    """Full state dicts by torch's functions, into another model, and a step with it."""
    model, optimizer = _sharded(strategy)
    for step in range(2):
        _step(model, optimizer, _batch(step, _rank()))
    full = stock.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = stock.get_state_dict(model, optimizer, options=full)
    kept = bool(weights), bool(state)
    torch.save([weights, state], io.BytesIO())
    other, its = _sharded(strategy)
    options = stock.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    stock.set_model_state_dict(other, weights, options=options)
    stock.set_optimizer_state_dict(other, its, state, options=options)
    _step(other, its, _batch(2, _rank()))
    return kept, _values(other)


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_full_state_dicts_of_torchs_functions_are_full_and_go_on(strategy: str) -> None:
    """In new processes: nothing else of ours is imported that might change torch's functions."""
    expected, _ = _reference(3, 2)
    for rank, (kept, values) in enumerate(ranks.run(_through_torchs_functions, 2, strategy, fresh=True)):
        assert kept == (rank == 0, rank == 0)
        for mine, whole in zip(values, expected.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), whole.detach().flatten(), rtol=2e-5, atol=2e-6)


def _loads_whole(saved: dict[str, Any], weights: dict[str, Any]) -> list[list[float]]:
    model, optimizer = _sharded()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    _step(model, optimizer, _batch(2, _rank()))
    return _values(model)


@pytest.mark.parametrize("world", [1, 3])
def test_state_of_an_unsharded_run_goes_on_sharded(world: int) -> None:
    model, optimizer = _reference(2, world)
    saved, weights = optimizer.state_dict(), model.state_dict()
    expected, _ = _reference(3, world)
    for values in ranks.run(_loads_whole, world, saved, weights):
        for mine, whole in zip(values, expected.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), whole.detach().flatten(), rtol=2e-5, atol=2e-6)


def _saves(folder: Path, strategy: str) -> None:
    model, optimizer = _sharded(strategy)
    for step in range(2):
        _step(model, optimizer, _batch(step, _rank()))
    weights, state = stock.get_state_dict(model, optimizer)
    torch.distributed.checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def _goes_on(folder: Path, strategy: str, ranks_then: int) -> list[list[float]]:
    model, optimizer = _sharded(strategy)
    weights, state = stock.get_state_dict(model, optimizer)
    torch.distributed.checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    stock.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    x = torch.cat([_batch(2, rank) for rank in range(ranks_then)])
    _step(model, optimizer, x)
    return _values(model)


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_stock_checkpoint_functions_move_a_run_to_another_number_of_ranks(
    tmp_path: Path, strategy: str
) -> None:
    ranks.run(_saves, 2, tmp_path / "saved", strategy)
    expected, _ = _reference(3, 2)
    for values in ranks.run(_goes_on, 3, tmp_path / "saved", strategy, 2):
        for mine, whole in zip(values, expected.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(mine), whole.detach().flatten(), rtol=2e-5, atol=2e-6)


def _after_fs_load(folder: Path) -> list[str]:
    model, optimizer = _sharded()
    _step(model, optimizer, _batch(0, _rank()))
    fs.save(folder, model, optimizer)
    model, optimizer = _sharded()
    fs.load(folder, model, optimizer)
    return [type(v).__name__ for v in optimizer.state_dict()["state"][0].values()]


def test_state_shows_its_whole_shape_after_fs_load_too(tmp_path: Path) -> None:
    for kinds in ranks.run(_after_fs_load, 2, tmp_path / "saved"):
        assert kinds.count("StateShard") == 2


def _inside_full() -> tuple[list[str], bool]:
    model, optimizer = _sharded()
    _step(model, optimizer, _batch(0, _rank()))
    with fs.full(model):
        said = optimizer.state_dict()
        kinds = [type(v).__name__ for v in said["state"][0].values()]
        optimizer.load_state_dict(said)
    _step(model, optimizer, _batch(1, _rank()))
    return kinds, all(v.shape == p.shape for p, s in optimizer.state.items() for v in s.values() if v.dim())


def test_state_shows_its_whole_shape_inside_fs_full_too() -> None:
    for kinds, fits in ranks.run(_inside_full, 2):
        assert kinds.count("StateShard") == 2
        assert fits


def _momentum_that_began_as_a_gradient() -> None:
    model = fs.shard(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _step(model, optimizer, _batch(0, _rank()))
    single = _model()
    expected = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    _step(single, expected, torch.cat([_batch(0, 0), _batch(0, 1)]))
    for state, other in zip(
        optimizer.state_dict()["state"].values(), expected.state_dict()["state"].values(), strict=True
    ):
        momentum = state["momentum_buffer"]
        assert type(momentum.to_local()) is torch.Tensor
        torch.testing.assert_close(momentum.full_tensor(), other["momentum_buffer"])


def test_momentum_that_began_as_a_copy_of_a_gradient_has_its_full_value_in_a_state_dict() -> None:
    ranks.run(_momentum_that_began_as_a_gradient, 2)


def _state_in_containers() -> None:
    model, single = fs.shard(_model()), _model()
    optimizer, expected = NestedState(model.parameters(), 0.1), NestedState(single.parameters(), 0.1)
    _step(model, optimizer, _batch(0, _rank()))
    _step(single, expected, torch.cat([_batch(0, 0), _batch(0, 1)]))
    sharded, unsharded = optimizer.state_dict(), copy.deepcopy(expected.state_dict())
    assert "past" in _refused({"state": [state["past"] for state in sharded["state"].values()]})
    for state, other in zip(sharded["state"].values(), unsharded["state"].values(), strict=True):
        assert type(state["past"]) is list
        torch.testing.assert_close(state["past"][0].full_tensor(), other["past"][0])
        assert state["past"][1].shape == other["past"][1].shape
    _step(single, expected, torch.cat([_batch(1, 0), _batch(1, 1)]))
    for loaded in (sharded, unsharded):
        again = fs.shard(_model())
        again.load_state_dict(model.state_dict())
        resumed = NestedState(again.parameters(), 0.1)
        resumed.load_state_dict(loaded)
        _step(again, resumed, _batch(1, _rank()))
        for mine, value in zip(_values(again), single.parameters(), strict=True):
            assert mine == pytest.approx(value.flatten().tolist(), rel=1e-5, abs=1e-6)
    _step(model, optimizer, _batch(1, _rank()))  # the state dict has left the state as it was
    for mine, value in zip(_values(model), single.parameters(), strict=True):
        assert mine == pytest.approx(value.flatten().tolist(), rel=1e-5, abs=1e-6)


def test_state_in_containers_has_its_unsharded_shape_in_a_state_dict_and_is_taken_back() -> None:
    ranks.run(_state_in_containers, 2)


def _loaded_twice(options: dict[str, Any], entire: bool) -> list[bool]:
    """Rolled back twice to one state dict in memory, which the steps in between must leave alone."""
    model = fs.shard(_model(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        _step(model, optimizer, _batch(step, _rank()))
    full = stock.StateDictOptions(full_state_dict=True)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    if entire:
        by_name = stock.get_optimizer_state_dict(model, optimizer, options=full)["state"]
        state["state"] = {i: by_name[name] for i, (name, _) in enumerate(model.named_parameters())}
    counts = [float(of["step"]) for of in state["state"].values()]
    found = []
    for _ in range(3):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        for step in range(2, 4):
            _step(model, optimizer, _batch(step, _rank()))
        found.append(_values(model))
    return [found[0] == found[1] == found[2], counts == [float(of["step"]) for of in state["state"].values()]]


@pytest.mark.parametrize(
    ("options", "entire"),
    [
        ({}, False),
        ({}, True),
        ({"offload": "host"}, False),
        ({"strategy": "replicate", "offload": "host"}, False),
        ({"state": "8bit"}, False),
    ],
)
def test_state_dict_that_was_loaded_may_be_loaded_again(options: dict[str, Any], entire: bool) -> None:
    assert ranks.run(_loaded_twice, 2, options, entire) == [[True, True]] * 2
