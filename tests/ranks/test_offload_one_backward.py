"""`fs.Offload(one_backward=True)`: gradients of one rank and one backward rest as they were computed, in
bf16, and nothing else changes. What bf16 cannot hold is an error."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_offload
import test_offload_use as uses
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import engines
import fullshard as fs
import ranks
from fullshard import offload as offload_option
from fullshard.engine.homes.away_gradients import AwayGradient
from fullshard.engine.runtime import runtime_of
from fullshard.errors import GradientError, OptionError, StateError

HOMES = {
    **test_offload.HOMES,
    "gradients alone": fs.Offload(kinds=("gradients",)),
    "everything on the device": fs.Offload(device="1GiB", chunk=600),
}


def as_computed(offload: Any) -> fs.Offload:
    parsed = offload_option.parse(offload)
    assert parsed is not None
    return dataclasses.replace(parsed, one_backward=True)


def homes(folder: Path) -> dict[str, fs.Offload]:
    disk = fs.Offload(chunk=600, host=20_000, disk=folder)
    return {name: as_computed(offload) for name, offload in {**HOMES, "disk": disk}.items()}


def _homes(folder: Path) -> None:
    for strategy in ("zero3", "zero2", "zero1", "replicate"):
        options: dict[str, Any] = {"strategy": strategy, "precision": "bf16"}
        expected = test_offload.trained(**options)
        for name, offload in homes(folder).items():
            try:
                test_offload.same(test_offload.trained(offload=offload, **options), expected)
            except Exception as error:
                raise AssertionError(f"{strategy}, {name}: {error!r}") from error
        ranks.end_groups_of_models()


def test_training_has_the_bits_of_training_without(tmp_path: Path) -> None:
    ranks.run(_homes, 1, tmp_path, timeout_s=120)


def _accumulated() -> None:
    for strategy in ("zero1", "replicate"):
        options: dict[str, Any] = {"strategy": strategy, "precision": "bf16", "accumulate": 2}
        found = test_offload.trained(offload=as_computed("host"), **options)
        test_offload.same(found, test_offload.trained(**options))


def test_micro_batches_that_wait_for_one_sum_have_the_bits_of_training_without() -> None:
    ranks.run(_accumulated, 1)


def _uses(folder: Path) -> None:
    for turn, name in enumerate(uses.USES):
        options = {"precision": "bf16", "strategy": ("zero3", "replicate")[turn % 2]}
        for offload in (as_computed("host"), as_computed(fs.Offload(kinds=("state",), chunk=300))):
            uses.compare(name, options, [offload], folder)
        ranks.end_groups_of_models()


def test_every_use_of_a_model_leaves_the_same_bits(tmp_path: Path) -> None:
    ranks.run(_uses, 1, tmp_path, timeout_s=120)


def model_with_gradients(strategy: str = "zero3", **given: Any) -> tuple[nn.Module, nn.Parameter]:
    offload = fs.Offload(one_backward=True, **given)
    model = engines.shard_blocks(engines.build(), precision="bf16", offload=offload, strategy=strategy)
    engines.loss_of(model, engines.batch(0, 0)).backward()
    parameter = max(model.parameters(), key=lambda p: p.numel())
    return model, parameter


def _bytes() -> None:
    for given in ({}, {"kinds": ("state",)}):
        model, parameter = model_with_gradients(**given)
        lanes = [lane for lane in runtime_of(model).lanes if lane.gradients is not None]
        assert sum(lane.gradients.flat.nbytes for lane in lanes) == fs.plan(model).gradient_bytes
        assert {lane.gradients.flat.dtype for lane in lanes} == {torch.bfloat16}
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        assert fs.plan(model).gradient_bytes * 2 == fs.plan(model).parameter_bytes


def test_they_take_two_bytes_per_element_and_are_fp32_to_whoever_reads_them() -> None:
    ranks.run(_bytes, 1)


def _comes_and_goes() -> None:
    model = engines.shard_blocks(
        engines.build(), precision="bf16", offload=fs.Offload(one_backward=True, kinds=("state",), chunk=300)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    lanes = runtime_of(model).lanes

    def held() -> list[int]:
        with_gradients = [lane.gradients for lane in lanes if lane.gradients is not None]
        return [gradients.flat.untyped_storage().nbytes() for gradients in with_gradients]

    seen: list[int] = []

    def look(output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: seen.append(sum(map(bool, held()))))

    model.blocks[0].register_forward_hook(lambda _, __, output: look(output))
    for step in range(3):
        loss = engines.loss_of(model, engines.batch(step, 0))
        assert not any(held()), "in backward, activations need it"
        loss.backward()
        assert seen[-1] < len(lanes), "as they are summed"
        assert all(held())
        optimizer.step()
        assert all(held()), "p.grad may be read until zero_grad()"
        optimizer.zero_grad()
        engines.loss_of(model, engines.batch(step, 1))
        assert not any(held())


def test_on_the_device_they_have_memory_from_backward_to_the_next_forward() -> None:
    ranks.run(_comes_and_goes, 1)


def _of_an_input() -> None:
    for given in ({}, {"kinds": ("state",)}):
        model, parameter = model_with_gradients(**given)
        before = [p.grad.clone() for p in model.parameters()]
        x, y = engines.batch(1, 0)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), [x])
        assert gradient.abs().sum() > 0
        assert all(torch.equal(p.grad.clone(), b) for p, b in zip(model.parameters(), before, strict=True))
        with pytest.raises(StateError, match="are there already"):
            engines.loss_of(model, engines.batch(1, 0)).backward()
        assert torch.equal(parameter.grad.clone(), before[0])


def test_the_gradient_of_an_input_is_computed_beside_those_of_parameters() -> None:
    ranks.run(_of_an_input, 1)


def _kept() -> None:
    model, parameter = model_with_gradients(kinds=("state",))
    kept, expected = parameter.grad, parameter.grad.clone()
    model.zero_grad()
    for step in range(2):
        engines.loss_of(model, engines.batch(step + 1, 0)).backward()
        assert torch.equal(kept.clone(), expected)
        assert not torch.equal(parameter.grad.clone(), expected)
        model.zero_grad()


def test_a_gradient_that_user_code_holds_keeps_its_memory() -> None:
    ranks.run(_kept, 1)


def _read() -> None:
    for given in ({}, {"kinds": ("state",)}):
        offload, options = fs.Offload(one_backward=True, **given), {"strategy": "replicate"}
        plain = engines.shard_blocks(engines.build(), precision="bf16", **options)
        model = engines.shard_blocks(engines.build(), precision="bf16", offload=offload, **options)
        for one in (plain, model):
            engines.loss_of(one, engines.batch(0, 0)).backward()
        reads: list[Callable[[torch.Tensor], torch.Tensor]] = [
            torch.Tensor.clone,
            lambda g: g.data * 2,
            lambda g: g.detach().norm(),
            lambda g: g.double(),
            lambda g: g.abs().max(),
            lambda g: torch.zeros_like(g).add_(g),
            lambda g: torch.stack([g, g]).sum(0),
        ]
        for clipped in (False, True):
            if clipped:
                for one in (plain, model):
                    nn.utils.clip_grad_norm_(one.parameters(), 1e-3)
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                for number, read in enumerate(reads):
                    assert torch.equal(read(p.grad), read(q.grad)), (given, clipped, number)


def test_readers_get_the_values_of_a_run_without_also_after_clipping() -> None:
    ranks.run(_read, 1)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda g: g.add_(torch.full_like(g, 0.1)),
    "data": lambda g: g.data.add_(torch.full_like(g, 0.1)),
    "detach": lambda g: g.detach().sub_(0.1),
    "clamp_": lambda g: g.clamp_(-1.1e-5, 1.1e-5),
    "copy_": lambda g: g.copy_(torch.full_like(g, 0.1)),
    "foreach": lambda g: torch._foreach_add_([g], 0.1),
    "out": lambda g: torch.add(g, 0.1, out=g),
    "view": lambda g: g.view(-1).mul_(0.1),
    "flatten": lambda g: g.flatten().mul_(0.1),
    "unsqueeze": lambda g: g.unsqueeze(0).mul_(0.1),
}


def _written() -> None:
    for given in ({}, {"kinds": ("state",)}):
        for name, write in WRITES.items():
            _, parameter = model_with_gradients(**given)
            assert parameter.grad is not None
            before = parameter.grad.clone()
            with pytest.raises(GradientError, match="one_backward=True"):
                write(parameter.grad)
            assert bool((parameter.grad - before).abs().max() == 0), (given, name)
        model, parameter = model_with_gradients(**given)
        assert parameter.grad is not None
        parameter.grad.fill_(0.25)  # bf16 holds this
        assert float(parameter.grad.abs().min()) == 0.25
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        parameter.grad.zero_()
        assert float(parameter.grad.norm()) == 0.0


def test_a_write_that_bf16_cannot_hold_is_an_error_and_changes_nothing() -> None:
    ranks.run(_written, 1)


ALIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": torch.Tensor.detach,
    "data": lambda g: g.data,
    "as_subclass": lambda g: g.as_subclass(torch.Tensor),
    "Variable": torch.autograd.Variable,
    "Tensor": torch.Tensor,
    "operator": torch.ops.aten.detach,
    "overload": torch.ops.aten.alias.default,
    "ellipsis": lambda g: g[...],
    "copy": copy.copy,
}


def _aliases() -> None:
    for strategy, (name, alias) in itertools.product(("zero3", "replicate"), ALIASES.items()):
        model, parameter = model_with_gradients(strategy=strategy)
        assert parameter.grad is not None
        before = parameter.grad.clone()
        other = alias(parameter.grad)
        other.mul_(0.3)
        assert torch.equal(parameter.grad, before * 0.3), (strategy, name)
        assert torch.equal(other, before * 0.3), (strategy, name)
        alias(parameter.grad).requires_grad_()
        assert not parameter.grad.requires_grad, (strategy, name)
        kept = other.clone()
        model.zero_grad()
        engines.loss_of(model, engines.batch(1, 0)).backward()  # into memory that nobody holds
        assert torch.equal(other, kept), (strategy, name)
        assert not torch.equal(parameter.grad, kept), (strategy, name)


def test_what_is_written_into_another_object_for_a_gradient_is_written_into_the_gradient() -> None:
    ranks.run(_aliases, 1)


EXACT: dict[str, Callable[[torch.Tensor], Any]] = {  # bf16 holds a half of each value
    **{name: lambda g, alias=alias: alias(g).mul_(0.5) for name, alias in ALIASES.items()},
    "itself": lambda g: g.mul_(0.5),
    "a list": lambda g: torch._foreach_mul_([g], 0.5),
    "a list of aliases": lambda g: torch._foreach_mul_([g.data], 0.5),
    "copy_": lambda g: g.copy_(g * 0.5),
    "set data": lambda g: setattr(g, "data", g * 0.5),
    "out": lambda g: torch.mul(g, 0.5, out=g),
}


def _unseen() -> None:
    for strategy, (name, write) in itertools.product(("zero3", "replicate"), EXACT.items()):
        _, parameter = model_with_gradients(strategy=strategy)
        assert parameter.grad is not None
        before = parameter.grad.clone()
        assert "Gradient" in repr(parameter.grad)
        with torch._C.DisableTorchFunctionSubclass():
            assert repr(parameter.grad)
            write(parameter.grad)
        assert torch.equal(parameter.grad, before * 0.5), (strategy, name)


def test_what_is_written_counts_where_torch_functions_of_subclasses_are_switched_off() -> None:
    ranks.run(_unseen, 1)


MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda g: g.data_ptr(),
    "untyped_storage": lambda g: g.untyped_storage().fill_(0),
    "storage": lambda g: g.storage(),
    "dlpack": lambda g: torch.from_dlpack(g),
    "share_memory_": lambda g: g.share_memory_(),
    "apply_": lambda g: g.apply_(lambda x: x),
    "map_": lambda g: g.map_(g, lambda x, _: x),
    "set_": lambda g: g.set_(torch.zeros(3)),
    "resize_": lambda g: g.resize_(3),
}


def _without_memory() -> None:
    for offload in (fs.Offload(one_backward=True), fs.Offload(one_backward=True, kinds=("state",))):
        options: dict[str, Any] = {"strategy": "replicate", "precision": "bf16", "offload": offload}
        model = engines.shard_blocks(engines.build(), **options)
        engines.loss_of(model, engines.batch(0, 0)).backward()
        gradient = model.head.weight.grad
        before = gradient.clone()
        assert isinstance(gradient, AwayGradient)
        for name, use in MEMORY.items():
            with pytest.raises(GradientError, match=rf"{name}.*p\.grad\.clone\(\)"):
                use(gradient)
            with torch._C.DisableTorchFunctionSubclass(), pytest.raises(GradientError, match=name):
                use(gradient)
        assert torch.equal(gradient, before)
        assert gradient.tolist() == before.tolist()
        assert np.array_equal(np.asarray(gradient), before.numpy())
        with pytest.raises(ValueError, match="read-only"):
            gradient.numpy()[0] = 1


def test_what_takes_memory_from_a_gradient_is_refused_or_a_copy_that_cannot_be_written() -> None:
    ranks.run(_without_memory, 1)


def _several_written() -> None:
    model, _ = model_with_gradients()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    before = [g.clone() for g in gradients]
    with pytest.raises(GradientError, match="cannot hold"):
        torch._foreach_add_(
            gradients, [g.clone() * (1.0 if i == 0 else 0.3) for i, g in enumerate(gradients)]
        )
    found_inf, third = torch.zeros(()), torch.tensor(1 / 3)
    with pytest.raises(GradientError, match="cannot hold"):
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, third)
    assert all(map(torch.equal, gradients, before))


def test_a_write_into_several_gradients_that_one_cannot_hold_changes_none() -> None:
    ranks.run(_several_written, 1)


def _failed_penalty() -> None:
    model, _ = model_with_gradients()
    model.zero_grad()
    penalty = fs.penalty(model, lambda _, p: p.square())
    with pytest.raises(GradientError, match="cannot hold"):
        (engines.loss_of(model, engines.batch(0, 0)) + penalty).backward()
    model.zero_grad()
    engines.loss_of(model, engines.batch(0, 0)).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    other, _ = model_with_gradients()
    assert all(map(torch.equal, found, [p.grad for p in other.parameters() if p.grad is not None]))


def test_a_penalty_that_they_cannot_hold_does_not_join_a_later_backward() -> None:
    ranks.run(_failed_penalty, 1)


def _second_backward() -> None:
    for strategy in ("zero3", "replicate"):
        offload = fs.Offload(one_backward=True)
        model = engines.shard_blocks(engines.build(), precision="bf16", offload=offload, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        uses.steps(model, optimizer, 0)
        engines.loss_of(model, engines.batch(1, 0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(StateError, match=r"unit .*one_backward=True.*zero_grad"):
            engines.loss_of(model, engines.batch(2, 0)).backward()
        assert bool(norm > 0)
        optimizer.zero_grad()
        uses.steps(model, optimizer, 3)


def test_a_second_backward_into_the_same_gradients_is_an_error_and_training_goes_on() -> None:
    ranks.run(_second_backward, 1)


def _kept_graph() -> None:
    """Two backwards of one forward, each with gradients of its own."""
    found = []
    for offload in (None, fs.Offload(one_backward=True)):
        model = engines.shard_blocks(engines.build(), precision="bf16", offload=offload)
        loss = engines.loss_of(model, engines.batch(0, 0))
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        loss.backward()
        found.append([*first, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert all(map(torch.equal, *found))


def test_a_second_backward_of_a_kept_graph_has_gradients_of_its_own_after_zero_grad() -> None:
    ranks.run(_kept_graph, 1)


class Twice(nn.Module):
    """Two checkpoints, each of which is a backward of its own inside that of a checkpoint around both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = engines.block(), engines.block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.first, x, use_reentrant=True)
        return x + checkpoint(self.second, x, use_reentrant=True)


class Nested(engines.Net):
    again = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in [*self.blocks, *(self.blocks if self.again else [])]:
            x = x + checkpoint(block, x, use_reentrant=True)
        out: torch.Tensor = self.head(x)
        return out


class NestedAgain(Nested):
    again = True


def _nested() -> None:
    for strategy in ("zero3", "zero1", "replicate"):
        found = []
        for offload in (None, fs.Offload(one_backward=True), fs.Offload(one_backward=True, kinds=("state",))):
            options: dict[str, Any] = {"precision": "bf16", "strategy": strategy, "offload": offload}
            model = engines.shard_blocks(engines.build(Nested), **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            norms = []
            for step in range(3):
                uses.backward(model, step)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
            found.append([*norms, *uses.values(model).values()])
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), strategy
        ranks.end_groups_of_models()


def test_parts_of_one_backward_that_bring_gradients_of_different_parameters_are_joined() -> None:
    ranks.run(_nested, 1)


def _nested_sums() -> None:
    offload = fs.Offload(one_backward=True)
    model = engines.shard_blocks(engines.build(NestedAgain), precision="bf16", offload=offload)
    with pytest.raises(StateError, match=r"in several parts.*cannot hold their sum.*use_reentrant=False"):
        uses.backward(model, 0)
    assert all(p.grad is None for p in model.parameters())


def test_parts_of_one_backward_whose_sum_they_cannot_hold_are_an_error_that_says_so() -> None:
    ranks.run(_nested_sums, 1)


def _refused() -> None:
    compute = {"compute": torch.bfloat16}
    cases: dict[str, dict[str, Any]] = {
        "bf16": {"precision": "fp32"},
        "bfloat16": {"precision": "fp16"},
        "another dtype": {"precision": fs.Precision(**compute, wire=torch.float32)},
        "several backwards": {"precision": "bf16", "reduce": "fixed"},
    }
    for text, options in cases.items():
        with pytest.raises(OptionError, match=text):
            fs.shard(engines.build(), offload=fs.Offload(one_backward=True), **options)
    with pytest.raises(OptionError, match="2 ranks"):
        fs.plan(engines.build(), ranks=2, precision="bf16", offload=fs.Offload(one_backward=True))
    with pytest.raises(OptionError, match="one_backward is 1"):
        fs.Offload(one_backward=1)  # type: ignore[arg-type]


def test_what_it_cannot_be_exact_with_is_refused() -> None:
    ranks.run(_refused, 1)


def _on_two_ranks() -> str:
    with pytest.raises(OptionError, match="on 2 ranks, whose gradients are summed in fp32") as raised:
        fs.shard(engines.build(), precision="bf16", offload=fs.Offload(one_backward=True))
    return str(raised.value)


def test_several_ranks_refuse_it_alike() -> None:
    assert len(ranks.run(_on_two_ranks, 2)) == 2
