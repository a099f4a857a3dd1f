"""Quantised rows say what they were given to half a step, feedback says the rest later, nothing is silent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fullshard.engine import quantize
from fullshard.engine.quantize import BLOCK, add_rows, pack, packed_bytes, unpack

# The same examples every time: a failure in CI is a failure here.
repeatable = settings(deadline=None, max_examples=60, derandomize=True)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TINY = torch.finfo(torch.float32).tiny
# A product with a rounded reciprocal: a value may be this much of a step beyond the middle of two.
HALF = 0.5 + 127 * 2**-22


def _packed(values: Tensor, residual: Tensor | None = None) -> Tensor:
    rows, elements = values.shape
    packed = torch.full((rows, packed_bytes(elements)), 77, dtype=torch.uint8)
    pack(values, packed, residual)
    return packed


def _unpacked(packed: Tensor, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.empty(len(packed), elements, dtype=dtype)
    unpack(packed, out)
    return out


def _scales(packed: Tensor, elements: int) -> Tensor:
    """The scale of every element."""
    scales = packed[:, elements:].view(torch.float32)[:, : elements // BLOCK]
    return scales.repeat_interleave(BLOCK, 1)


def _normal(rows: int, elements: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, elements, generator=torch.Generator().manual_seed(seed))


@st.composite
def rows_of_any_size(draw: st.DrawFn) -> Tensor:
    """Blocks whose sizes differ by up to sixty orders of magnitude, some with many equal values."""
    rows, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    powers = draw(st.lists(st.floats(-30, 30), min_size=rows * blocks, max_size=rows * blocks))
    sizes = torch.tensor([10.0**power for power in powers], dtype=torch.float64)
    values = _normal(rows * blocks, BLOCK, draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        values = (values * 8).round() / 8
    return (values * sizes.unsqueeze(1)).float().view(rows, blocks * BLOCK)


@pytest.mark.parametrize(
    ("elements", "size"), [(0, 0), (256, 272), (1024, 1040), (1280, 1312), (2**30, 2**30 + 2**24)]
)
def test_size_on_the_wire(elements: int, size: int) -> None:
    assert packed_bytes(elements) == size
    assert size % 16 == 0


@pytest.mark.parametrize("elements", [-256, 1, 255, 257])
def test_row_that_does_not_divide_has_no_size(elements: int) -> None:
    with pytest.raises(ValueError, match="blocks of 256"):
        packed_bytes(elements)


@repeatable
@given(values=rows_of_any_size(), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_error_is_at_most_half_a_step(values: Tensor, dtype: torch.dtype) -> None:
    values = values.to(dtype)
    packed = _packed(values)
    error = (_unpacked(packed, values.shape[1]).double() - values.double()).abs()
    scales = _scales(packed, values.shape[1]).double()
    assert bool((error <= scales * HALF).all())
    absmax = values.double().abs().unflatten(1, (-1, BLOCK)).amax(-1)
    step = scales.unflatten(1, (-1, BLOCK))[..., 0]
    torch.testing.assert_close(step, absmax / 127, rtol=2**-16, atol=TINY)


@repeatable
@given(values=rows_of_any_size())
def test_packing_what_was_unpacked_gives_the_same_bytes(values: Tensor) -> None:
    packed = _packed(values)
    assert torch.equal(_packed(_unpacked(packed, values.shape[1])), packed)


@pytest.mark.parametrize("exponent", [-126, -119, 0, 127])
def test_scale_of_every_mantissa(exponent: int) -> None:
    """127 steps never overflow, reach the largest value without a clamp, and give the same scale again."""
    absmax = ((127 + exponent << 23) + torch.arange(2**23, dtype=torch.int32)).view(torch.float32)
    scale = quantize._scale(absmax)
    assert int((scale.view(torch.int32) & 127).max()) == 0
    q = (absmax * (1.0 / scale)).round()
    assert float(q.max()) <= 127
    largest = q * scale
    assert bool(largest.isfinite().all())
    assert torch.equal(largest.double(), q.double() * scale.double()), "a product that is not exact"
    assert torch.equal(quantize._scale(largest), scale)
    if exponent > -119:
        assert float(q.min()) == 127


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_to_even_and_reaches_both_ends(dtype: torch.dtype) -> None:
    values = torch.zeros(1, BLOCK, dtype=dtype)
    values[0, :8] = torch.tensor([127.0, -127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -0.0])
    packed = _packed(values)
    assert packed[0, :8].view(torch.int8).tolist() == [127, -127, 0, 2, 2, 0, -2, 0]
    assert float(packed[0, BLOCK:].view(torch.float32)[0]) == 1.0
    assert packed[0, BLOCK + 4 :].tolist() == [0] * 12, "padding is zeros"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_unpacked_value_is_rounded_once(dtype: torch.dtype) -> None:
    packed = _packed(_normal(3, 5 * BLOCK))
    assert torch.equal(_unpacked(packed, 5 * BLOCK, dtype), _unpacked(packed, 5 * BLOCK).to(dtype))


def test_zeros_stay_zeros() -> None:
    assert not _packed(torch.zeros(2, 3 * BLOCK)).any()
    assert not _packed(-torch.zeros(2, 3 * BLOCK)).any()


@pytest.mark.parametrize("size", [2**-149, 1e-40, TINY / 2, TINY, 3 * TINY, 100 * TINY, 200 * TINY])
def test_denormal_blocks_neither_overflow_nor_vanish_from_the_residual(size: float) -> None:
    values = _normal(1, BLOCK).clamp(-1, 1) * size
    residual = torch.zeros(1, BLOCK)
    packed = _packed(values, residual)
    out = _unpacked(packed, BLOCK)
    assert bool(out.isfinite().all())
    assert torch.equal(out + residual, values)
    assert float(residual.abs().max()) <= max(float(_scales(packed, BLOCK).max()) * HALF, TINY)
    assert torch.equal(_packed(out), packed)


def test_largest_values_stay_finite() -> None:
    values = torch.full((1, BLOCK), torch.finfo(torch.float32).max)
    torch.testing.assert_close(_unpacked(_packed(values), BLOCK), values, rtol=2**-16, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["values", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_that_is_not_finite_is_nan_and_leaves_no_residual(
    bad: float, place: str, dtype: torch.dtype
) -> None:
    values = _normal(2, 3 * BLOCK).to(dtype)
    residual = torch.full((2, 3 * BLOCK), 0.01, dtype=torch.bfloat16)
    clean = _packed(values, residual.clone())
    (values if place == "values" else residual)[1, BLOCK + 7] = bad
    packed = _packed(values, residual)
    out = _unpacked(packed, 3 * BLOCK)
    broken = torch.zeros(2, 3 * BLOCK, dtype=torch.bool)
    broken[1, BLOCK : 2 * BLOCK] = True
    assert torch.equal(out.isnan(), broken)
    assert not residual[broken].any()
    assert bool(residual.isfinite().all())
    assert torch.equal(out[~broken], _unpacked(clean, 3 * BLOCK)[~broken]), "other blocks are as they were"
    assert torch.equal(_packed(out), packed)
    total = torch.empty(3 * BLOCK)
    add_rows(packed, total, 0.5)
    assert torch.equal(total.isnan(), broken[1])


def test_sum_that_overflows_is_not_finite() -> None:
    huge = torch.full((1, BLOCK), 3e38)
    assert bool(_unpacked(_packed(huge, huge.clone()), BLOCK).isnan().all())


@pytest.mark.parametrize(("dtype", "drift"), [(torch.float32, 0.01), (torch.bfloat16, 0.5)])
def test_with_feedback_the_sum_of_what_was_sent_follows_the_sum_of_what_was_meant(
    dtype: torch.dtype, drift: float
) -> None:
    """Within half a step, and what a residual in bf16 forgets."""
    meant = torch.zeros(2, 4 * BLOCK, dtype=torch.float64)
    sent, residual, step = meant.clone(), torch.zeros(2, 4 * BLOCK, dtype=dtype), meant.clone()
    for number in range(100):
        values = _normal(2, 4 * BLOCK, number)
        packed = _packed(values, residual)
        meant += values
        sent += _unpacked(packed, 4 * BLOCK)
        step = torch.maximum(step, _scales(packed, 4 * BLOCK).double())
        assert bool(((sent - meant).abs() <= step * (0.5 + drift)).all())
        torch.testing.assert_close(sent + residual, meant, rtol=0, atol=float(step.max()) * drift)


def test_without_feedback_small_values_beside_a_large_one_are_never_sent() -> None:
    values = torch.full((1, BLOCK), 0.3)
    values[0, 0] = 127.0
    residual = torch.zeros(1, BLOCK)
    without, with_feedback = torch.zeros(1, BLOCK), torch.zeros(1, BLOCK)
    for _ in range(100):
        without += _unpacked(_packed(values), BLOCK)
        with_feedback += _unpacked(_packed(values, residual), BLOCK)
    assert without[0, 1:].tolist() == [0.0] * (BLOCK - 1)
    torch.testing.assert_close(with_feedback, 100 * values, rtol=0, atol=0.51)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 64])
def test_sum_of_rows(rows: int) -> None:
    elements, factor = 5 * BLOCK, 1 / 3
    packed = _packed(_normal(rows, elements) * torch.logspace(-3, 3, rows).unsqueeze(1))
    out = torch.full((elements,), torch.nan)
    add_rows(packed, out, factor)
    each = _unpacked(packed, elements)
    exact = each.double().sum(0) * factor
    bound = each.double().abs().sum(0) * factor * (rows + 2) * 2**-24
    assert bool(((out.double() - exact).abs() <= bound).all())
    total = torch.zeros(elements)
    for row in each:
        total += row
    assert torch.equal(out, total * factor), "added in fp32, from row 0 on"


def test_rows_without_elements_are_left_alone() -> None:
    packed = _packed(torch.empty(3, 0), torch.empty(3, 0))
    assert _unpacked(packed, 0).shape == (3, 0)
    add_rows(packed, torch.empty(0), 1.0)


def test_takes_tensors_of_a_graph() -> None:
    values = _normal(2, BLOCK).requires_grad_()
    residual = torch.zeros(2, BLOCK)
    out = torch.zeros(2, BLOCK, requires_grad=True)
    unpack(_packed(values * 2, residual), out)
    assert not residual.requires_grad
    assert out.is_leaf


GOOD = torch.zeros(2, 512)
WIRE = torch.zeros(2, packed_bytes(512), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("values", "packed", "residual", "told"),
    [
        (GOOD.double(), WIRE, None, "values must be one of .*float64"),
        (GOOD.int(), WIRE, None, "values must be one of"),
        (GOOD[0], WIRE, None, "values must be contiguous, with 2 dimensions"),
        (GOOD[:, ::2], WIRE, None, "values must be contiguous"),
        (GOOD[:, :100].contiguous(), WIRE, None, "100 elements does not divide"),
        (GOOD, WIRE.view(torch.int8), None, "packed must be"),
        (GOOD, WIRE[:1], None, r"shape \(2, 528\).*shape \(1, 528\)"),
        (GOOD, WIRE[:, :520].contiguous(), None, "packed must be"),
        (GOOD, torch.zeros(packed_bytes(512), 2, dtype=torch.uint8).t(), None, "packed must be"),
        (GOOD, torch.zeros(2 * 528 + 4, dtype=torch.uint8)[4:].view(2, 528), None, "multiple of 16 bytes"),
        (GOOD, WIRE.to("meta"), None, "on cpu.*on meta"),
        (GOOD, WIRE, GOOD.half(), "residual must be one of"),
        (GOOD, WIRE, GOOD[:1], "does not match"),
        (GOOD, WIRE, GOOD.to("meta"), "does not match"),
    ],
)
def test_what_does_not_fit_is_refused(
    values: Tensor, packed: Tensor, residual: Tensor | None, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        pack(values, packed, residual)


@pytest.mark.parametrize("out", [GOOD.int(), GOOD[:1], GOOD[0], GOOD.t(), torch.zeros(2, 256)])
def test_unpack_refuses_what_does_not_fit(out: Tensor) -> None:
    with pytest.raises(ValueError, match=r"out must|packed must"):
        unpack(WIRE, out)


@pytest.mark.parametrize("out", [GOOD, GOOD[0].half(), GOOD[0, :256], GOOD.view(-1)[::2], torch.zeros(500)])
def test_add_rows_refuses_what_does_not_fit(out: Tensor) -> None:
    with pytest.raises(ValueError, match=r"out must|packed must|does not divide"):
        add_rows(WIRE, out, 1.0)


@pytest.mark.parametrize("packed", [torch.tensor(1, dtype=torch.uint8), WIRE[0], WIRE.view(1, 2, -1), GOOD])
def test_add_rows_refuses_bytes_that_are_not_rows(packed: Tensor) -> None:
    with pytest.raises(ValueError, match="packed must"):
        add_rows(packed, GOOD[0], 1.0)
