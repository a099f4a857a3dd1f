"""Behind `fully_shard`, parameters, gradients and state dict values answer DTensor's questions."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from test_torch_fsdp2 import WORDS, Net, batches, build, by_blocks, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ranks
import reference


def _rank() -> int:
    return int(torch.distributed.get_rank())


def _batch(rank: int, step: int) -> Tensor:
    return batches(4, 4)[step][rank]


def _reference_steps(model: Net, steps: int, world: int) -> dict[str, Tensor]:
    """One process, the mean of the ranks' losses; gradients of the last step, clipped, stay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [loss_of(model, _batch(rank, step)) for rank in range(world)]
        torch.stack(losses).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {"norm": norm, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def _answers(axes: tuple[int, ...]) -> None:
    """Parameters and gradients, on one axis and on two, and on a mesh that nobody gave."""
    from torch.distributed import tensor as tensors
    from torch.distributed.tensor import DTensor, Replicate, Shard

    names = ("replicate", "shard")[-len(axes) :] if axes else ()
    mesh = init_device_mesh("cpu", axes, mesh_dim_names=names) if axes else None
    world = torch.distributed.get_world_size()
    alone = build(tie=False)
    model: Any = by_blocks(build(seed=_rank(), tie=False), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, _batch(_rank(), step)).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    gradients = _reference_steps(alone, 2, world)
    reference.assert_close(norm.full_tensor(), gradients["norm"], "norm", 1e-4, 1e-5)
    expected = (Replicate(), Shard(0))[-max(1, len(axes)) :]
    for name, parameter in model.named_parameters():
        value: Any = parameter
        assert isinstance(value, DTensor), name
        assert isinstance(value, nn.Parameter), name
        assert type(value) is not DTensor, name
        assert value.placements == expected, name
        assert value.device_mesh.ndim == len(expected)
        assert mesh is None or value.device_mesh == mesh
        full = value.full_tensor()
        reference.assert_close(full, alone.get_parameter(name), name, 1e-4, 1e-5)
        assert not isinstance(full, DTensor)
        assert value.to_local().data_ptr() == parameter.data_ptr()
        cut: Any = tensors.distribute_tensor(full, value.device_mesh, value.placements)
        assert isinstance(cut, DTensor)
        assert torch.equal(cut.to_local(), value.to_local())
        assert torch.equal(cut.full_tensor(), full)
        assert torch.equal(value.redistribute(placements=[Replicate()] * len(expected)).to_local(), full)
        gradient: Any = parameter.grad
        assert isinstance(gradient, DTensor), name
        reference.assert_close(gradient.full_tensor(), gradients[name], name, 1e-3, 1e-5)
        assert gradient.placements == expected
    copied = copy.deepcopy(model)
    for ours, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())  # type: ignore[attr-defined]
    model.unshard()
    own = dict(model.named_parameters(recurse=False))
    assert not any(isinstance(p, DTensor) for p in (model.norm.weight, *own.values()))
    assert model.norm.weight.shape == (6,)
    model.reshard()
    assert isinstance(model.norm.weight, DTensor)


def test_parameters_and_gradients_answer_as_dtensors_do() -> None:
    for axes in ((), (2,), (1, 2)):
        ranks.run(_answers, 2, axes, init=True, timeout_s=120)
    ranks.run(_answers, 4, (2, 2), init=True, timeout_s=120)


def _save_full(model: Any, optimizer: torch.optim.Optimizer) -> bytes:
    """A script's own way: full_tensor() of every value, on the first rank's host."""
    from torch.distributed.tensor import DTensor

    def unsharded(values: Any) -> Any:
        return {k: v.full_tensor().cpu() if isinstance(v, DTensor) else v for k, v in values.items()}

    state = optimizer.state_dict()
    held = {
        "model": unsharded(model.state_dict()),
        "state": {key: unsharded(values) for key, values in state["state"].items()},
        "groups": state["param_groups"],
    }
    file = io.BytesIO()
    torch.save(held, file)
    return file.getvalue()


def _load_full(held: Any, model: Any, optimizer_of: Any) -> torch.optim.Optimizer:
    """And back: distribute_tensor with the placements of what is there, then load_state_dict(assign=True)."""
    from torch.distributed.checkpoint.state_dict import _init_optim_state
    from torch.distributed.tensor import DTensor, distribute_tensor

    shown = model.state_dict()
    cut = {
        name: nn.Parameter(distribute_tensor(value, shown[name].device_mesh, shown[name].placements))
        for name, value in held["model"].items()
    }
    model.load_state_dict(cut, assign=True)
    optimizer: torch.optim.Optimizer = optimizer_of(model.parameters())
    _init_optim_state(optimizer)
    state = optimizer.state_dict()["state"]
    for key, values in held["state"].items():
        for name, full in values.items():
            there = state[key][name]
            is_cut = isinstance(there, DTensor)
            state[key][name] = (
                distribute_tensor(full, there.device_mesh, there.placements) if is_cut else full
            )
    optimizer.load_state_dict({"state": state, "param_groups": held["groups"]})
    return optimizer


def _checkpoints() -> None:
    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            loss_of(model, _batch(_rank(), step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    straight = by_blocks(build(tie=False))
    optimizer = optimizer_of(straight.parameters())
    train(straight, optimizer, range(2))
    saved = _save_full(straight, optimizer)
    train(straight, optimizer, range(2, 4))
    expected = {n: p.full_tensor() for n, p in straight.named_parameters()}  # type: ignore[attr-defined]
    for on_meta in (False, True):
        with torch.device("meta" if on_meta else "cpu"):
            model = build(seed=5, tie=False)
        sharded = by_blocks(model)
        held = torch.load(io.BytesIO(saved), weights_only=True)
        assert held["model"]["embed.weight"].shape == (WORDS, 6)
        train_on = _load_full(held, sharded, optimizer_of)
        train(sharded, train_on, range(2, 4))
        for name, parameter in sharded.named_parameters():
            full = parameter.full_tensor()  # type: ignore[attr-defined]
            assert reference.bitwise(full, expected[name]), (on_meta, name)


def test_a_checkpoint_of_full_tensors_resumes_bitwise_through_distribute_tensor() -> None:
    ranks.run(_checkpoints, 2, init=True, timeout_s=120)


def _through_torchs_functions() -> None:
    """The other way of torch's examples, and values that torch itself has cut by rows."""
    from torch.distributed.checkpoint import state_dict as functions
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    model = by_blocks(build(tie=False))
    full = functions.get_model_state_dict(model, options=functions.StateDictOptions(full_state_dict=True))
    assert not any(isinstance(value, DTensor) for value in full.values())
    for on_meta in (False, True):
        for broadcast in (False, True):
            with torch.device("meta" if on_meta else "cpu"):
                other = build(seed=3, tie=False)
            sharded = by_blocks(other)
            options = functions.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            given = dict(full) if _rank() == 0 or not broadcast else {}  # torch writes into it
            functions.set_model_state_dict(sharded, given, options=options)
            _assert_same(sharded, full)
    rows = by_blocks(build(seed=4, tie=False))
    mesh = init_device_mesh("cpu", (2,))
    rows.load_state_dict({name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in full.items()})
    _assert_same(rows, full)
    state = rows.state_dict()
    doubled = {name: value * 2 for name, value in state.items()}
    for value in state.values():
        value.zero_()  # the parameters' memory, as with DTensors
    assert not any(p.full_tensor().any() for p in rows.parameters())  # type: ignore[attr-defined]
    rows.load_state_dict(doubled)
    _assert_same(rows, {name: 2 * value for name, value in full.items()})


def _assert_same(model: nn.Module, full: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        assert reference.bitwise(parameter.full_tensor(), full[name]), name  # type: ignore[attr-defined]


def test_torchs_functions_and_its_own_row_shards_load_into_element_shards() -> None:
    ranks.run(_through_torchs_functions, 2, init=True, timeout_s=120)


def _on_meta() -> None:
    from torch.distributed.tensor import DTensor, Shard

    with torch.device("meta"):
        model = build(tie=False)
    by_blocks(model)
    for parameter in model.parameters():
        value: Any = parameter
        assert isinstance(value, DTensor)
        assert value.is_meta
        assert value.placements == (Shard(0),)
    local = model.state_dict()["embed.weight"].to_local()
    assert local.is_meta
    assert local.shape == ((6, 6), (5, 6))[_rank()]
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    loss_of(model, _batch(_rank(), 0)).backward()
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters())


def test_parameters_on_meta_answer_before_they_have_memory() -> None:
    ranks.run(_on_meta, 2, init=True, timeout_s=120)


def _elsewhere() -> None:
    """Only behind this signature: fs.shard's parameters are no DTensors, and no other code changes."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    import fullshard as fs
    import fullshard.torch_fsdp

    model = fs.shard(build(tie=False))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    assert type(rows) is DTensor
    assert rows.to_local().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]][_rank()]
    assert rows.redistribute(placements=[Replicate()]).to_local().tolist() == list(range(6))
    assert fullshard.torch_fsdp.fully_shard.state(model) is None  # type: ignore[attr-defined]


def test_other_signatures_and_dtensors_of_torch_are_as_they_were() -> None:
    ranks.run(_elsewhere, 2, init=True, timeout_s=120)
