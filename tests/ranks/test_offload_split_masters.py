"""Masters that rest in two parts train with the bits of plain ones, and are parameters to their users."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_offload
import test_offload_use as uses
import torch
from torch import Tensor, nn

import engines
import fullshard as fs
import ranks
from engines import my_rank
from fullshard import offload as offload_option
from fullshard.engine.homes.split_masters import SplitParameter
from fullshard.engine.runtime import runtime_of
from fullshard.errors import AtRestError, StateError


def split(offload: Any) -> fs.Offload:
    parsed = offload_option.parse(offload)
    assert parsed is not None
    return dataclasses.replace(parsed, split_masters=True)


def is_split(model: nn.Module) -> list[bool]:
    return [isinstance(p, SplitParameter) for p in model.parameters()]


def _every_home(folder: Path) -> None:
    for turn, strategy in enumerate(("zero3", "replicate", "zero1")):
        options: dict[str, Any] = {"strategy": strategy, "precision": "bf16"}
        expected = test_offload.trained(**options)
        homes = list(test_offload.offloads(folder, torch.distributed.get_world_size()).items())
        for name, offload in homes if turn == 0 else homes[turn::3]:
            try:
                test_offload.same(test_offload.trained(offload=split(offload), **options), expected)
            except Exception as error:
                raise AssertionError(f"{strategy}, {name}: {error!r}") from error
        ranks.end_groups_of_models()


def test_in_every_home_they_have_the_bits_of_a_run_without_offload(tmp_path: Path) -> None:
    ranks.run(_every_home, 2, tmp_path, timeout_s=120)


def _edited_as_lists(offload: Any, edit: Callable[[list[nn.Parameter]], Any]) -> list[Tensor]:
    """Beside frozen parameters, which rest as they are."""
    model = engines.build()
    model.blocks[1].requires_grad_(False)
    model = engines.shard_blocks(model, precision="bf16", offload=offload)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        uses.backward(model, step)
        with torch.no_grad():
            edit(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    loss = engines.loss_of(model, uses.batch(0))
    with torch.no_grad():
        edit([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(StateError):
        loss.backward()
    return list(uses.values(model).values())


def _lists() -> None:
    edits: list[Callable[[list[nn.Parameter]], Any]] = [
        lambda parameters: torch._foreach_mul_(parameters, 0.95),
        lambda parameters: torch._foreach_copy_(parameters, [torch.full(p.shape, 0.01) for p in parameters]),
        lambda parameters: [parameter.mul_(0.95) for parameter in parameters],
    ]
    for number, edit in enumerate(edits):
        expected = _edited_as_lists(None, edit)
        for offload in (split("host"), fs.Offload(split_masters=True, overlap=True, slabs="1MB")):
            found = _edited_as_lists(offload, edit)
            assert all(map(torch.equal, found, expected)), (number, offload)


def test_lists_of_parameters_are_edited_at_once() -> None:
    ranks.run(_lists, 1)


def _step_on_the_host() -> None:
    for overlapped in (
        fs.Offload(step="host", chunk=600),
        fs.Offload(step="host", kinds=("master", "state")),
    ):
        found = [test_offload.trained(precision="bf16", offload=o) for o in (overlapped, split(overlapped))]
        test_offload.same(*found)


def test_a_step_on_the_host_has_the_bits_of_one_on_plain_masters() -> None:
    ranks.run(_step_on_the_host, 2)


def _which() -> dict[str, list[bool]]:
    """By options, which parameters are split."""
    found = {}
    for name, options in {
        "host": {"precision": "bf16", "offload": split("host")},
        "optimizer": {"precision": "bf16", "offload": split("optimizer")},
        "moments": {"precision": "bf16", "offload": split(fs.Offload(kinds=("state",)))},
        "not cast": {"precision": "fp32", "offload": split("host")},
        "fp16": {"precision": "fp16", "offload": split("host")},
        "packed": {
            "precision": fs.Precision(compute=torch.bfloat16, gather=torch.int8),
            "offload": split("host"),
        },
        "not requested": {"precision": "bf16", "offload": "host"},
    }.items():
        model = engines.shard_blocks(engines.build(), **options)
        found[name] = sorted(set(is_split(model)))
        ranks.end_groups_of_models()
    return found


def test_masters_of_bf16_values_on_the_host_are_split_and_no_others() -> None:
    expected = {key: [True] for key in ("host", "optimizer")}
    expected |= {key: [False] for key in ("moments", "not cast", "fp16", "packed", "not requested")}
    assert ranks.run(_which, 2) == [expected, expected]


class Half(engines.Net):
    """Weights that were fp16: an eighth of them lie between two bf16 values."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.half())


# --- uses, with offload and without -------------------------------------------------------------------------


def new(options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = engines.shard_blocks(engines.build(Half), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def from_half_precision(options: dict[str, Any], folder: Path) -> Any:
    model, optimizer = new(options)
    first = uses.values(model)
    uses.steps(model, optimizer, 0, 1)
    return {f"first.{name}": value for name, value in first.items()} | uses.values(model)


def with_an_average_that_is_tried_out(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    parameters = list(model.parameters())
    average = [p.detach().clone() for p in parameters]
    found = {}
    for step in range(3):
        uses.steps(model, optimizer, step)
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 0.3)
        kept = [p.data for p in parameters]
        for parameter, value in zip(parameters, average, strict=True):
            parameter.data = value.clone()
        with torch.no_grad():
            found[f"tried {step}"] = model(engines.batch(9, 0)[0])
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.data = value
    return found | uses.values(model)


def with_writes_into_parts(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    uses.steps(model, optimizer, 0)
    for parameter in model.parameters():
        parameter.data.view(-1)[1:3].mul_(2)
        parameter.data[-1:] += 0.125
        with torch.no_grad():
            parameter.clamp_(-0.4, 0.4)
    uses.steps(model, optimizer, 1)
    return uses.values(model)


def with_gradients_scaled_by_a_norm_of_weights(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    for step in range(2):
        uses.backward(model, step)
        norm = torch.stack([p.detach().norm() for p in model.parameters()])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.numel():
                    parameter.grad.mul_(1 + norm[0].item() * 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return uses.values(model) | {"norm": norm}


def with_penalties_on_weights(options: dict[str, Any], _: Path) -> Any:
    model, optimizer = new(options)
    for step in range(3):
        loss = engines.loss_of(model, engines.batch(step, my_rank()))
        (loss + 0.1 * fs.penalty(model, lambda _, p: p.square() + p.abs())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return uses.values(model)


def with_a_coefficient_that_is_used_again(options: dict[str, Any], _: Path) -> Any:
    """Each gradient is clipped by itself; and `p.grad.data` is set."""
    model, optimizer = new(options)
    coefficient = torch.empty(())
    for step in range(2):
        uses.backward(model, step)
        for number, parameter in enumerate(model.parameters()):
            assert parameter.grad is not None
            torch.div(0.01, parameter.grad.norm().clone(), out=coefficient)
            parameter.grad.mul_(coefficient)
            if number % 2:
                parameter.grad.data = parameter.grad.data * 0.5
        coefficient.fill_(100.0)
        optimizer.step()
        optimizer.zero_grad()
    return uses.values(model)


def with_masters_in_a_state_dict(options: dict[str, Any], folder: Path) -> Any:
    model, optimizer = new(options)
    uses.steps(model, optimizer, 0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    uses.steps(model, optimizer, 1)
    model.load_state_dict(state)
    uses.steps(model, optimizer, 2)
    return uses.values(model)


def with_contents_that_torch_exchanges(options: dict[str, Any], folder: Path) -> Any:
    model, optimizer = new(options)
    uses.steps(model, optimizer, 0)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        uses.steps(model, optimizer, 1)
        with fs.full(model):
            model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for parameter in model.head.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 0.75))
    uses.steps(model, optimizer, 2)
    return uses.values(model)


OWN: dict[str, Callable[..., Any]] = {
    run.__name__: run
    for run in (
        from_half_precision,
        with_an_average_that_is_tried_out,
        with_writes_into_parts,
        with_gradients_scaled_by_a_norm_of_weights,
        with_penalties_on_weights,
        with_a_coefficient_that_is_used_again,
        with_masters_in_a_state_dict,
        with_contents_that_torch_exchanges,
    )
}


@mock.patch.dict(uses.USES, OWN)
def _own_uses(folder: Path) -> None:
    for turn, name in enumerate(OWN):
        options = {"precision": "bf16", "strategy": ("zero3", "replicate", "zero2")[turn % 3]}
        offloads = ["host", fs.Offload(kinds=("master", "state"), chunk=300), fs.Offload(overlap=True)]
        uses.compare(name, options, [*map(split, offloads), "host"], folder)
        ranks.end_groups_of_models()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_whatever_is_done_with_parameters_at_rest_leaves_the_same_bits(
    num_ranks: int, tmp_path: Path
) -> None:
    ranks.run(_own_uses, num_ranks, tmp_path, timeout_s=120)


# --- what a parameter is ------------------------------------------------------------------------------------


def _identity() -> None:
    model, optimizer = uses.new({"precision": "bf16", "offload": split("host")})
    parameters = list(model.parameters())
    seen: list[type] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend({type(p) for p in parameters}))
    stepped: list[Any] = []

    class Watching(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            shown = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            stepped.extend((type(p), type(p.data), p.data_ptr() > 0) for p in shown if p.numel())
            return super().step(closure)  # type: ignore[no-untyped-call]

    uses.steps(model, optimizer, 0)
    uses.steps(model, Watching(parameters, lr=0.1), 1)
    assert set(stepped) == {(nn.Parameter, Tensor, True)}  # an optimizer's own code has plain tensors
    for parameter in parameters:
        assert isinstance(parameter, nn.Parameter)
        assert type(parameter) is SplitParameter
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert list(parameter.__dict__.keys() & {"spare"}) == []
        if parameter.numel():
            with pytest.raises(AtRestError, match="data_ptr"):
                parameter.data_ptr()
    with fs.full(model):
        assert {type(p) for p in parameters} == {nn.Parameter}
        assert all(p.data_ptr() for p in parameters)
        torch.save(parameters[0], "/dev/null")
    with pytest.raises(fs.FullshardError, match=r"Use fs\.save"):
        torch.save(parameters[0], "/dev/null")


def test_parameters_are_the_same_objects_with_memory_wherever_code_needs_it() -> None:
    ranks.run(_identity, 2)


def differentiated_later(model: nn.Module, name: str) -> None:
    """What was computed inside fs.full."""
    parameters = dict(model.named_parameters())
    weight, bias = parameters["head.weight"], parameters["head.bias"]
    with fs.full(model):
        loss = {
            "saved": lambda: weight.square().sum(),
            "not saved": lambda: weight.sum(),
            "given": lambda: (bias * torch.ones_like(bias)).sum(),
            "all": lambda: sum(p.square().sum() for p in parameters.values()),
        }[name]()
    for derive in (
        lambda: torch.autograd.grad(loss, [weight, bias], allow_unused=True, retain_graph=True),
        lambda: torch.autograd.backward(loss, inputs=[weight, bias], retain_graph=True),
        lambda: torch.autograd.backward(loss, retain_graph=True),
    ):
        with pytest.raises(AtRestError, match=r"parameter '.*inside fs\.full.*fs\.penalty"):
            derive()


def _out_of_memory() -> None:
    model = engines.shard_blocks(engines.build())
    weight = dict(model.named_parameters())["head.weight"]
    with fs.full(model):
        squares = weight.square()
    loss = squares.sum() * 1.0

    def fails(_: Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    squares.register_hook(fails)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()


def _later() -> None:
    for offload in (None, "host", split("host")):
        for name in ("saved", "not saved", "given", "all"):
            model, optimizer = uses.new({"precision": "bf16", "offload": offload})
            differentiated_later(model, name)
            model.zero_grad()
            uses.steps(model, optimizer, 0)
        ranks.end_groups_of_models()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_of_parameters_inside_fs_full_that_is_differentiated_later_is_an_error_of_ours(
    num_ranks: int,
) -> None:
    ranks.run(_later, num_ranks)


def _opening_fails() -> None:
    """torch's own weak reference to one parameter: it cannot be shown as a plain one."""
    model, optimizer = uses.new({"precision": "bf16", "offload": split("host")})
    before = uses.values(model)
    weak = torch._C._WeakTensorRef(max(model.parameters(), key=lambda p: p.numel()))
    with pytest.raises(StateError, match="record_shapes=False"), fs.full(model):
        pass
    uses.backward(model, 0)
    model.zero_grad()
    del weak
    found = uses.values(model)
    assert all(torch.equal(found[name], value) for name, value in before.items())
    uses.steps(model, optimizer, 1)


def test_fs_full_that_fails_in_between_leaves_a_model_that_trains() -> None:
    ranks.run(_opening_fails, 2)


def _bytes() -> tuple[int, int, int]:
    model, _ = uses.new({"precision": "bf16", "offload": split("host")})
    resting = fs.plan(model).resting
    assert resting is not None
    lanes = runtime_of(model).lanes
    halves = [lane.rest.split_values for lane in lanes if lane.is_split]  # type: ignore[attr-defined]
    held = sum(each.low.nbytes + each.ties.nbytes for each in halves)
    return held, resting.bytes_at("host", "master"), sum(map(len, halves))


def test_what_restores_masters_takes_17_bits_per_element_as_planned() -> None:
    held, planned, count = ranks.run(_bytes, 1)[0]
    assert held == planned
    assert held == pytest.approx(count * 17 / 8, rel=0.01)


def test_missing_memory_in_backward_is_reported_as_such_beside_what_was_computed_at_rest() -> None:
    ranks.run(_out_of_memory, 1)
