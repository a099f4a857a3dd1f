"""Gradients set, kept, postponed, hooked, copied and scaled by the user: as in one process."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import engines
import ranks
import reference
import tables
from cases import ALL, assert_gradients, backward, gradients_of_one_process, sharded, whole_gradients
from engines import batch, build, loss_of, my_rank

WHERE = ("zero3", "zero1", "replicate")

# --- setting p.grad ------------------------------------------------------------------------------------


def _set_some_to_none(strategy: str) -> tuple[dict[str, Tensor | None], bool]:
    """Forget the head's gradient and keep the others; who held it goes on holding what he held."""
    model = sharded(strategy)
    backward(model)
    kept = model.head.weight.grad
    assert kept is not None
    copied = kept.clone()
    model.head.weight.grad = None
    backward(model, 1)
    intact = bool((kept == copied).all())
    return whole_gradients(model), intact


@tables.some("strategy", WHERE, "zero3", "replicate")
def test_gradient_set_to_none_alone_starts_afresh_and_leaves_a_kept_one_intact(strategy: str) -> None:
    plain = gradients_of_one_process()
    plain.head.weight.grad = None
    for rank in range(2):
        (loss_of(plain, batch(1, rank)) / 2).backward()
    for gradients, intact in ranks.run(_set_some_to_none, 2, strategy):
        assert_gradients(gradients, plain)
        assert intact


def _assign(model: nn.Module) -> None:
    model.head.weight.grad = model.head.weight.detach() * 0.1
    model.head.bias.grad = torch.zeros_like(model.head.bias)
    model.blocks[0][0].weight.grad *= 2


def _assigned(strategy: str) -> tuple[float, dict[str, Tensor | None], dict[str, Tensor | None]]:
    model = sharded(strategy)
    backward(model)
    _assign(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    backward(model, 1)
    added = whole_gradients(model)
    model.zero_grad()
    return norm, added, whole_gradients(model)


@tables.some("strategy", WHERE, "zero3", "replicate")
def test_gradient_assigned_by_the_user_is_counted_and_added_to(strategy: str) -> None:
    plain = gradients_of_one_process()
    _assign(plain)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), math.inf).item()
    for rank in range(2):
        (loss_of(plain, batch(1, rank)) / 2).backward()
    for found, added, nothing in ranks.run(_assigned, 2, strategy):
        assert found == pytest.approx(norm, rel=1e-5)
        assert_gradients(added, plain)
        assert set(nothing.values()) == {None}


def _wrong_shape() -> tuple[str, str, str]:
    model = sharded()
    loss = loss_of(model, batch(0, my_rank()))
    # torch itself lets nobody assign another shape, but .data can change under it.
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    model.head.weight.grad.data = torch.zeros(5, 8)
    return cases.refusal(loss.backward)


def test_gradient_of_a_foreign_shape_is_refused_by_name() -> None:
    for kind, message, remedy in ranks.run(_wrong_shape, 2):
        assert kind == "GradientError"
        assert "head.weight" in message
        assert "None" in remedy


def _keep(how: str, strategy: str) -> list[bool]:
    """Gradients of a first loss are kept while those of a second one are computed."""
    keep: dict[str, Callable[[Tensor], Any]] = {
        "reference": lambda g: g,
        "detached": lambda g: g.detach(),
        "view": lambda g: g.view(-1),
        "data": lambda g: g.data,
    }
    model = sharded(strategy)
    backward(model)
    kept = [keep[how](p.grad) for p in model.parameters()]
    copies = [p.grad.clone() for p in model.parameters()]
    for step in (1, 2):
        model.zero_grad()
        backward(model, step)
    return [torch.equal(k.flatten(), c.flatten()) for k, c in zip(kept, copies, strict=True)]


def _keep_all() -> dict[str, list[bool]]:
    return {
        f"{how}, {strategy}": _keep(how, strategy)
        for how in ("reference", "detached", "view", "data")
        for strategy in ("zero3", "replicate")
    }


def test_kept_gradients_are_not_overwritten_by_the_next_backward() -> None:
    for found in ranks.run(_keep_all, 2):
        for how, same in found.items():
            assert all(same), how


def _projected(strategy: str) -> dict[str, Tensor]:
    """PCGrad: two losses' gradients, the second made orthogonal to the first, both applied."""
    model = sharded(strategy)
    return _pcgrad(model, lambda step: backward(model, step))


def _pcgrad(model: nn.Module, backward: Callable[[int], None]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in (0, 2):
        backward(step)
        first = [p.grad for p in model.parameters()]
        optimizer.zero_grad()
        backward(step + 1)
        second = [p.grad for p in model.parameters()]
        for p, a, b in zip(model.parameters(), first, second, strict=True):
            p.grad = a + b - (a * b).sum() / (a * a).sum() * a
        optimizer.step()
        optimizer.zero_grad()
    sharded = "_fullshard" in vars(model)
    return engines.whole("fullshard", model) if sharded else reference.whole_parameters(model)


def _backward_in_one_process(model: nn.Module, step: int) -> None:
    for rank in range(2):
        (loss_of(model, batch(step, rank)) / 2).backward()


@tables.some("strategy", WHERE, "zero3", "replicate")
def test_projected_gradients_of_two_losses_train_as_in_one_process(strategy: str) -> None:
    plain = build()
    expected = _pcgrad(plain, lambda step: _backward_in_one_process(plain, step))
    for found in ranks.run(_projected, 2, strategy):
        for name, value in expected.items():
            reference.assert_close(found[name], value, name, 2e-5, 2e-6)


def _zeroed_in_place(strategy: str) -> dict[str, Tensor | None]:
    model = sharded(strategy)
    backward(model)
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    backward(model, 1)
    return whole_gradients(model)


@tables.some("strategy", WHERE, "zero3", "replicate")
def test_gradients_zeroed_in_place_are_added_to(strategy: str) -> None:
    plain = build()
    _backward_in_one_process(plain, 1)
    for found in ranks.run(_zeroed_in_place, 2, strategy):
        assert_gradients(found, plain)


def _postponed_and_dropped(strategy: str) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    import fullshard as fs

    model = sharded(strategy)
    backward(model, 0)
    with fs.accumulate(model):
        backward(model, 1)
        backward(model, 2)
    backward(model, 3)
    mixed = whole_gradients(model)
    model = sharded(strategy)
    with fs.accumulate(model):
        backward(model, 0)
    model.zero_grad()  # the user thought better of it
    backward(model, 1)
    return mixed, whole_gradients(model)


@tables.some("strategy", ALL, "zero3", "replicate")
def test_zero_grad_drops_postponed_gradients_and_others_add_up(strategy: str) -> None:
    plain = build()
    _backward_in_one_process(plain, 1)
    for mixed, after_drop in ranks.run(_postponed_and_dropped, 2, strategy):
        assert_gradients(mixed, gradients_of_one_process(range(4)))
        assert_gradients(after_drop, plain)


# --- hooks ---------------------------------------------------------------------------------------------


def _hooked(strategy: str) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None], list[Any]]:
    model = build()
    shapes: list[Any] = []

    def double(gradient: Tensor) -> Tensor:
        shapes.append(tuple(gradient.shape))
        return gradient * 2

    first = model.head.weight.register_hook(double)

    engines.shard_blocks(model, strategy=strategy)
    second = model.blocks[1][0].bias.register_hook(double)
    backward(model)
    with_hooks = whole_gradients(model)
    first.remove()
    second.remove()
    late = sharded(strategy)
    handle = late.head.weight.register_hook(double)
    backward(late)
    handle.remove()
    late.zero_grad()
    backward(late)
    return with_hooks, whole_gradients(late), shapes


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_tensor_hooks_see_whole_gradients_and_can_be_removed(strategy: str) -> None:
    plain = gradients_of_one_process()
    plain.head.weight.grad *= 2
    plain.blocks[1][0].bias.grad *= 2
    for with_hooks, without, shapes in ranks.run(_hooked, 2, strategy):
        assert_gradients(with_hooks, plain)
        assert_gradients(without, gradients_of_one_process())
        assert sorted(shapes) == [(5, 8), (5, 8), (13,)]


def _optimizer_in_backward(strategy: str, frozen_first: bool) -> tuple[dict[str, Tensor], int]:
    model = build()
    model.head.weight.requires_grad_(not frozen_first)

    engines.shard_blocks(model, strategy=strategy)
    model.head.weight.requires_grad_(True)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for index in range(3):
        backward(model, index)
    without = sum(p.grad is None for p in model.parameters())
    return engines.whole("fullshard", model), without


@pytest.mark.parametrize(
    ("strategy", "frozen_first"), [("zero3", False), ("replicate", False), ("zero3", True)]
)
def test_optimizer_in_backward_trains_as_in_one_process(strategy: str, frozen_first: bool) -> None:
    plain = build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        _backward_in_one_process(plain, step)
        optimizer.step()
        optimizer.zero_grad()
    for found, without in ranks.run(_optimizer_in_backward, 2, strategy, frozen_first):
        assert without == len(list(plain.parameters()))
        for name, value in reference.whole_parameters(plain).items():
            reference.assert_close(found[name], value, name)


# --- copies --------------------------------------------------------------------------------------------


def _copied(strategy: str) -> list[bool]:
    model = sharded(strategy)
    backward(model)
    gradient = model.head.weight.grad
    copies = [copy.deepcopy(gradient)]
    if strategy == "replicate":
        file = io.BytesIO()
        torch.save(gradient, file)
        file.seek(0)
        copies += [pickle.loads(pickle.dumps(gradient)), torch.load(file)]
    same = [torch.equal(c, gradient) for c in copies]
    apart = [c.data_ptr() != gradient.data_ptr() for c in copies]
    norm = gradient.norm()
    copies[0].zero_()
    return [*same, *apart, torch.equal(gradient.norm(), norm), not isinstance(copies[0].norm(), float)]


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_gradient_can_be_copied_and_where_it_is_complete_saved(strategy: str) -> None:
    assert all(map(all, ranks.run(_copied, 2, strategy)))


# --- loss scaling --------------------------------------------------------------------------------------


def _scaled(strategy: str, fused: bool, clip: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Four steps with the stock scaler; in the second one rank 1 alone has an inf."""
    model = sharded(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales, norms = [], []
    for step in range(4):
        loss = loss_of(model, batch(step, my_rank()))
        if step == 1 and my_rank() == 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return engines.whole("fullshard", model), scales, norms


def _scaled_all() -> list[Any]:
    return [_scaled(*row) for row in SCALED]


SCALED = [
    (strategy, fused, clip)
    for strategy in ("zero3", "replicate")
    for fused, clip in ((False, True), (True, False), (False, False))
]


def _skipping(clip: bool) -> nn.Module:
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-4)
    for step in (0, 2, 3):
        _backward_in_one_process(plain, step)
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return plain


def test_inf_on_one_rank_skips_the_step_on_all_and_halves_the_scale() -> None:
    results = ranks.run(_scaled_all, 2)
    for index, (strategy, fused, clip) in enumerate(SCALED):
        expected = reference.whole_parameters(_skipping(clip))
        for result in results:
            found, scales, norms = result[index]
            assert scales == [256.0, 128.0, 128.0, 256.0]
            assert [math.isfinite(norm) for norm in norms] == ([True, False, True, True] if clip else [])
            for name, value in expected.items():
                what = f"{strategy}, fused={fused}, clip={clip}: {name}"
                reference.assert_close(found[name], value, what, 2e-5, 2e-6)
