"""Gradients at rest: torch's own functions on `p.grad`, true for all ranks or refused."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cases
import engines
import ranks
import reference
from cases import ALL
from engines import batch, build, loss_of, my_rank

WHERE = ("zero3", "zero1", "replicate")


def _sharded(strategy: str = "zero3", **options: Any) -> nn.Module:
    import fullshard as fs

    return fs.shard(build(), strategy=strategy, **options)


def _backward(model: nn.Module, step: int = 0, factor: float = 1.0) -> None:
    (loss_of(model, batch(step, my_rank())) * factor).backward()


def _in_one_process(steps: range = range(1), num_ranks: int = 2) -> nn.Module:
    model = build()
    for step in steps:
        for rank in range(num_ranks):
            (loss_of(model, batch(step, rank)) / num_ranks).backward()
    return model


def _whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients put together from all ranks, by way of the parameters: p <- p.grad, then fs.full."""
    import fullshard as fs

    none = {name for name, p in model.named_parameters() if p.grad is None}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    with fs.full(model, writeback=False):
        return {n: None if n in none else v for n, v in reference.whole_parameters(model).items()}


def _assert_gradients(found: dict[str, Tensor | None], expected: nn.Module) -> None:
    for name, p in expected.named_parameters():
        value = found[name]
        assert (value is None) == (p.grad is None), name
        if value is not None and p.grad is not None:
            reference.assert_close(value, p.grad, f"gradient of {name}")


# --- norms and clipping --------------------------------------------------------------------------------

ORDERS = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf]


def _clip(strategy: str) -> list[tuple[str, float, dict[str, Tensor | None]]]:
    found = []
    for order in ORDERS[1:]:
        for foreach in (None, True, False):
            model = _sharded(strategy)
            _backward(model)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, order, foreach=foreach)
            found.append((type(norm).__name__, norm.item(), _whole_gradients(model)))
    return found


@pytest.mark.parametrize("strategy", WHERE)
def test_clipping_by_norm_is_that_of_one_process_and_equal_on_all_ranks(strategy: str) -> None:
    first, second = ranks.run(_clip, 2, strategy)
    assert [row[1] for row in first] == [row[1] for row in second]
    for index, row in enumerate(first):
        plain = _in_one_process()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, ORDERS[1:][index // 3])
        assert row[0] == "Tensor"
        assert row[1] == pytest.approx(norm.item(), rel=2e-6)
        _assert_gradients(row[2], plain)


def _total_norms() -> dict[str, Any]:
    model = _sharded()
    _backward(model)
    gradients = [p.grad for p in model.parameters()]
    found: dict[str, Any] = {str(o): nn.utils.get_total_norm(gradients, o).item() for o in ORDERS}
    found["type"] = type(nn.utils.get_total_norm(gradients)).__name__
    found["head"] = nn.utils.clip_grad_norm_(model.head.parameters(), math.inf).item()
    found["one"] = nn.utils.clip_grad_norm_(model.head.bias, math.inf).item()
    model.zero_grad()
    found["none"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    return found


def test_total_norm_of_all_of_some_and_of_no_gradients_is_that_of_one_process() -> None:
    plain = _in_one_process()
    gradients = [p.grad for p in plain.parameters()]
    for found in ranks.run(_total_norms, 2):
        for order in ORDERS:
            expected = nn.utils.get_total_norm(gradients, order).item()
            assert found[str(order)] == pytest.approx(expected, rel=2e-6)
        assert found["type"] == "Tensor"
        assert found["head"] == pytest.approx(
            nn.utils.get_total_norm([p.grad for p in plain.head.parameters()]).item(), rel=2e-6
        )
        assert found["one"] == pytest.approx(plain.head.bias.grad.norm().item(), rel=2e-6)
        assert found["none"] == 0.0


def _norm_under_hybrid() -> tuple[float, dict[str, Tensor | None]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = _sharded("hybrid", mesh=mesh)
    _backward(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return norm.item(), _whole_gradients(model)


def test_norm_under_hybrid_counts_every_element_once() -> None:
    plain = _in_one_process(num_ranks=4)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item()
    results = ranks.run(_norm_under_hybrid, 4, init=True)
    assert len({found for found, _ in results}) == 1
    for found, gradients in results:
        assert found == pytest.approx(norm, rel=2e-6)
        _assert_gradients(gradients, plain)


def _not_finite(strategy: str, value: float) -> list[str]:
    """One bad element, in the last parameter: it lies on the last rank alone."""
    said = []
    for order in (1.0, 2.0, math.inf):
        model = _sharded(strategy)
        _backward(model)
        bias = model.head.bias.grad
        with torch.no_grad():
            if strategy == "replicate" or my_rank() == 1:
                bias.view(-1)[-1:].fill_(value) if strategy == "replicate" else bias.fill_(value)
        try:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
        except RuntimeError as error:
            said.append(str(error))
        else:
            said.append(f"no error, the norm is {norm.item()}")
    return said


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_error_if_nonfinite_is_raised_on_every_rank_where_one_holds_the_bad_element(
    strategy: str, value: float
) -> None:
    for said in ranks.run(_not_finite, 2, strategy, value):
        assert all("is non-finite" in text for text in said), said


def _clip_value(strategy: str) -> list[dict[str, Tensor | None]]:
    found = []
    for foreach in (None, True, False):
        model = _sharded(strategy)
        _backward(model)
        nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=foreach)
        found.append(_whole_gradients(model))
    return found


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_clipping_by_value_is_that_of_one_process(strategy: str) -> None:
    plain = _in_one_process()
    nn.utils.clip_grad_value_(plain.parameters(), 0.05)
    for results in ranks.run(_clip_value, 2, strategy):
        for found in results:
            _assert_gradients(found, plain)


# --- reading p.grad ------------------------------------------------------------------------------------

READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "norm of order 1": lambda g: g.norm(1),
    "largest by inf norm": lambda g: torch.linalg.vector_norm(g, math.inf),
    "norm as a float": lambda g: float(g.norm()),
    "data of a norm": lambda g: g.norm().data,
    "text of a norm": lambda g: float(f"{g.norm():.3f}"),
    "list of norms": lambda g: torch.tensor([g.norm(), g.norm()]).sum(),
    "copy of a norm": lambda g: copy.deepcopy(g.norm()),
    "norm of a copy": lambda g: (g.detach().clone() * 2).norm(),
    "norm in double": lambda g: g.double().norm(),
    "sum of squares": lambda g: (g * g).sum().sqrt(),
    "sum": lambda g: g.sum() + 1,
    "sum of absolutes": lambda g: g.abs().sum(),
    "max": lambda g: g.max(),
    "amax": lambda g: g.abs().amax(),
    "min": lambda g: g.min(),
    "mean of absolutes": lambda g: g.abs().mean(),
    "mean by keyword": lambda g: torch.mean(input=g.abs()),
    "dot": lambda g: g.flatten().dot(g.flatten()),
    "cat": lambda g: torch.cat([g.view(-1), g.flatten()]).norm(),
    "vector": lambda g: nn.utils.parameters_to_vector([g, g]).norm(),
    "finite": lambda g: torch.isfinite(g).all(),
    "any": lambda g: (g > 0.2).any(),
    "count": lambda g: torch.count_nonzero(g),
    "where": lambda g: torch.where(g > 0, g, torch.zeros_like(g)).sum(),
    "equal to itself": lambda g: torch.equal(g, g.clone()),
    "close to itself": lambda g: torch.allclose(g, g.clone()),
    "foreach": lambda g: torch._foreach_mul([g, g], 2.0)[0].norm(),
    "elements over zero": lambda g: g.maximum(torch.zeros(())).sum(),
    "sign": lambda g: g.sign().abs().sum(),
}  # fmt: skip


def _read(strategy: str) -> dict[str, dict[str, float]]:
    model = _sharded(strategy)
    _backward(model)
    return {
        name: {n: float(read(p.grad)) for n, p in model.named_parameters() if "blocks.1" in n or "head" in n}
        for name, read in READS.items()
    }


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_whole_reductions_of_a_gradient_are_those_of_one_process(strategy: str) -> None:
    plain = dict(_in_one_process().named_parameters())
    results = ranks.run(_read, 2, strategy)
    assert results[0] == results[1]
    for name, values in results[0].items():
        for parameter, value in values.items():
            expected = float(READS[name](plain[parameter].grad))
            assert value == pytest.approx(expected, rel=1e-5, abs=1e-6), f"{name} of {parameter}"


def _unequal_on_one_rank() -> list[bool]:
    model = _sharded()
    _backward(model)
    gradient = model.head.weight.grad
    other = gradient.clone()
    if my_rank() == 1:
        other.add_(1.0)
    return [torch.equal(gradient, other), torch.allclose(gradient, other), gradient.equal(other)]


def test_comparison_of_gradients_has_one_answer_on_all_ranks() -> None:
    assert ranks.run(_unequal_on_one_rank, 2) == [[False] * 3] * 2


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "std": lambda g: g.std(),
    "median": lambda g: g.median(),
    "argmax": lambda g: g.argmax(),
    "norm by rows": lambda g: g.norm(dim=-1),
    "sum by rows": lambda g: g.sum(0),
    "mean by rows": lambda g: g.mean(-1),
    "max by rows": lambda g: g.max(0),
    "one element": lambda g: g[0],
    "slice": lambda g: g[:1000],
    "writing an element": lambda g: g.__setitem__(0, 0.0),
    "writing rows": lambda g: g.index_fill_(0, torch.tensor([0]), 0.0),
    "selection": lambda g: g[g > 0],
    "matrix product": lambda g: g @ torch.ones(g.shape[-1], g.shape[-1]),
    "cumsum": lambda g: g.cumsum(0),
    "softmax": lambda g: torch.softmax(g, 0),
    "method softmax": lambda g: g.softmax(0),
    "normalize": lambda g: F.normalize(g, dim=0),
    "triu": lambda g: g.triu() if g.dim() > 1 else g.flip(0),
    "roll": lambda g: g.roll(1),
    "sort": lambda g: g.sort(0),
    "chunks": lambda g: g.chunk(2),
    "rows": lambda g: list(g),
    "histogram": lambda g: torch.histc(g, 4),
    "negative norm": lambda g: g.norm(-1),
    "nuclear norm": lambda g: torch.linalg.matrix_norm(g, "nuc") if g.dim() > 1 else g.norm("nuc"),
}


def _read_wrongly() -> dict[str, list[tuple[str, str]]]:
    from fullshard import FullshardError

    model = _sharded()
    _backward(model)
    before = [p.grad.clone() for p in model.parameters()]
    found: dict[str, list[tuple[str, str]]] = {}
    for name, read in REFUSED.items():
        for parameter in (model.head.weight, model.blocks[0][0].weight, model.head.bias):
            try:
                said = ("nothing", str(read(parameter.grad)))
            except FullshardError as error:
                said = (type(error).__name__, str(error))
            found.setdefault(name, []).append(said)
    found["changed"] = [
        ("changed", "") for p, b in zip(model.parameters(), before, strict=True) if (p.grad != b).any()
    ]
    return found


def test_reduction_that_would_be_true_for_one_rank_alone_is_refused_on_every_rank() -> None:
    for found in ranks.run(_read_wrongly, 2):
        assert found.pop("changed") == []
        for name, said in found.items():
            for kind, message in said:
                assert kind == "GradientError", f"{name}: {message}"


# --- setting p.grad ------------------------------------------------------------------------------------


def _set_some_to_none(strategy: str) -> tuple[dict[str, Tensor | None], bool]:
    """Forget the head's gradient and keep the others; who held it goes on holding what he held."""
    model = _sharded(strategy)
    _backward(model)
    kept = model.head.weight.grad
    assert kept is not None
    copied = kept.clone()
    model.head.weight.grad = None
    _backward(model, 1)
    intact = bool((kept == copied).all())
    return _whole_gradients(model), intact


@pytest.mark.parametrize("strategy", WHERE)
def test_gradient_set_to_none_alone_starts_afresh_and_leaves_a_kept_one_intact(strategy: str) -> None:
    plain = _in_one_process()
    plain.head.weight.grad = None
    for rank in range(2):
        (loss_of(plain, batch(1, rank)) / 2).backward()
    for gradients, intact in ranks.run(_set_some_to_none, 2, strategy):
        _assert_gradients(gradients, plain)
        assert intact


def _assign(model: nn.Module) -> None:
    model.head.weight.grad = model.head.weight.detach() * 0.1
    model.head.bias.grad = torch.zeros_like(model.head.bias)
    model.blocks[0][0].weight.grad *= 2


def _assigned(strategy: str) -> tuple[float, dict[str, Tensor | None], dict[str, Tensor | None]]:
    model = _sharded(strategy)
    _backward(model)
    _assign(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    _backward(model, 1)
    added = _whole_gradients(model)
    model.zero_grad()
    return norm, added, _whole_gradients(model)


@pytest.mark.parametrize("strategy", WHERE)
def test_gradient_assigned_by_the_user_is_counted_and_added_to(strategy: str) -> None:
    plain = _in_one_process()
    _assign(plain)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), math.inf).item()
    for rank in range(2):
        (loss_of(plain, batch(1, rank)) / 2).backward()
    for found, added, nothing in ranks.run(_assigned, 2, strategy):
        assert found == pytest.approx(norm, rel=1e-5)
        _assert_gradients(added, plain)
        assert set(nothing.values()) == {None}


def _wrong_shape() -> tuple[str, str, str]:
    model = _sharded()
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
        "numpy": lambda g: g.numpy(),
    }
    model = _sharded(strategy)
    _backward(model)
    kept = [keep[how](p.grad) for p in model.parameters()]
    copies = [p.grad.clone().flatten().tolist() for p in model.parameters()]
    for step in (1, 2):
        model.zero_grad()
        _backward(model, step)
    return [k.flatten().tolist() == c for k, c in zip(kept, copies, strict=True)]


def _keep_all() -> dict[str, list[bool]]:
    return {
        f"{how}, {strategy}": _keep(how, strategy)
        for how in ("reference", "detached", "view", "numpy")
        for strategy in ("zero3", "replicate")
    }


def test_kept_gradients_are_not_overwritten_by_the_next_backward() -> None:
    for found in ranks.run(_keep_all, 2):
        for how, same in found.items():
            assert all(same), how


def _projected(strategy: str) -> dict[str, Tensor]:
    """PCGrad: two losses' gradients, the second made orthogonal to the first, both applied."""
    model = _sharded(strategy)
    return _pcgrad(model, lambda step: _backward(model, step))


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


@pytest.mark.parametrize("strategy", WHERE)
def test_projected_gradients_of_two_losses_train_as_in_one_process(strategy: str) -> None:
    plain = build()
    expected = _pcgrad(plain, lambda step: _backward_in_one_process(plain, step))
    for found in ranks.run(_projected, 2, strategy):
        for name, value in expected.items():
            reference.assert_close(found[name], value, name, 2e-5, 2e-6)


def _zeroed_in_place(strategy: str) -> dict[str, Tensor | None]:
    model = _sharded(strategy)
    _backward(model)
    model.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    _backward(model, 1)
    return _whole_gradients(model)


@pytest.mark.parametrize("strategy", WHERE)
def test_gradients_zeroed_in_place_are_added_to(strategy: str) -> None:
    plain = build()
    _backward_in_one_process(plain, 1)
    for found in ranks.run(_zeroed_in_place, 2, strategy):
        _assert_gradients(found, plain)


def _postponed_and_dropped(strategy: str) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    import fullshard as fs

    model = _sharded(strategy)
    _backward(model, 0)
    with fs.accumulate(model):
        _backward(model, 1)
        _backward(model, 2)
    _backward(model, 3)
    mixed = _whole_gradients(model)
    model = _sharded(strategy)
    with fs.accumulate(model):
        _backward(model, 0)
    model.zero_grad()  # the user thought better of it
    _backward(model, 1)
    return mixed, _whole_gradients(model)


@pytest.mark.parametrize("strategy", ALL)
def test_zero_grad_drops_postponed_gradients_and_others_add_up(strategy: str) -> None:
    plain = build()
    _backward_in_one_process(plain, 1)
    for mixed, after_drop in ranks.run(_postponed_and_dropped, 2, strategy):
        _assert_gradients(mixed, _in_one_process(range(4)))
        _assert_gradients(after_drop, plain)


# --- hooks ---------------------------------------------------------------------------------------------


def _hooked(strategy: str) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None], list[Any]]:
    model = build()
    shapes: list[Any] = []

    def double(gradient: Tensor) -> Tensor:
        shapes.append(tuple(gradient.shape))
        return gradient * 2

    first = model.head.weight.register_hook(double)
    import fullshard as fs

    fs.shard(model, strategy=strategy)
    second = model.blocks[1][0].bias.register_hook(double)
    _backward(model)
    with_hooks = _whole_gradients(model)
    model = build()
    first.remove()
    second.remove()
    late = _sharded(strategy)
    handle = late.head.weight.register_hook(double)
    _backward(late)
    handle.remove()
    late.zero_grad()
    _backward(late)
    return with_hooks, _whole_gradients(late), shapes


@pytest.mark.parametrize("strategy", ["zero3", "replicate"])
def test_tensor_hooks_see_whole_gradients_and_can_be_removed(strategy: str) -> None:
    plain = _in_one_process()
    plain.head.weight.grad *= 2
    plain.blocks[1][0].bias.grad *= 2
    for with_hooks, without, shapes in ranks.run(_hooked, 2, strategy):
        _assert_gradients(with_hooks, plain)
        _assert_gradients(without, _in_one_process())
        assert sorted(shapes) == [(5, 8), (5, 8), (13,)]


def _optimizer_in_backward(strategy: str, frozen_first: bool) -> tuple[dict[str, Tensor], int]:
    model = build()
    model.head.weight.requires_grad_(not frozen_first)
    import fullshard as fs

    fs.shard(model, strategy=strategy)
    model.head.weight.requires_grad_(True)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for index in range(3):
        _backward(model, index)
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


def _copied() -> list[bool]:
    model = _sharded()
    _backward(model)
    gradient = model.head.weight.grad
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    copies = [copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), torch.load(file)]
    plain = gradient.detach().numpy()
    apart = [c.data_ptr() != gradient.data_ptr() or not c.numel() for c in copies]
    return [bool((c.numpy() == plain).all()) and a for c, a in zip(copies, apart, strict=True)]


def test_gradient_can_be_copied_pickled_and_saved() -> None:
    assert ranks.run(_copied, 2) == [[True] * 3] * 2


# --- loss scaling --------------------------------------------------------------------------------------


def _scaled(strategy: str, fused: bool, clip: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Four steps with the stock scaler; in the second one rank 1 alone has an inf."""
    model = _sharded(strategy)
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
