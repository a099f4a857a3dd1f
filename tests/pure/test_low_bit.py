"""Optimizer state in 8-bit blocks: what comes back, and what every value may lose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fullshard as fs
from fullshard.engine.step import low_bit
from fullshard.engine.step.block_state import BlockState
from fullshard.planning.answers import Question
from fullshard.precision import BLOCK, STATE_ROW_BYTES

BLOCKS = 600
DTYPES = [torch.float32, torch.bfloat16]


def wide(seed: int) -> torch.Tensor:
    """Values over many orders of magnitude, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values, scales = (torch.randn(BLOCKS * BLOCK, generator=generator) for _ in range(2))
    return values * scales.mul(3).exp()


KINDS = {
    "signed": wide,
    "second moments": lambda seed: wide(seed).square(),
    "one negative value": lambda seed: torch.where(
        torch.arange(BLOCKS * BLOCK) % BLOCK == 7, -1e-6, wide(seed).abs()
    ),
    "tiny": lambda seed: wide(seed).square() * 1e-25,
}


def encoded(values: torch.Tensor) -> torch.Tensor:
    rows = torch.full((len(values) // BLOCK, STATE_ROW_BYTES), 99, dtype=torch.uint8)
    low_bit.encode(values, rows)
    return rows


def decoded(rows: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.empty(len(rows) * BLOCK, dtype=dtype)
    low_bit.decode(rows, values)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_decoded_is_encoded_as_the_same_bytes(kind: str, dtype: torch.dtype) -> None:
    rows = encoded(KINDS[kind](0).to(dtype))
    again = encoded(decoded(rows, dtype))
    assert torch.equal(rows, again)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_does_not_depend_on_those_beside_it(kind: str) -> None:
    values = KINDS[kind](1)
    one_by_one = torch.cat([encoded(block) for block in values.view(-1, BLOCK)[:20]])
    assert torch.equal(encoded(values)[:20], one_by_one)


def test_the_largest_of_a_block_is_exact_and_others_are_within_a_step() -> None:
    for values in (wide(2), wide(2).square()):
        back = decoded(encoded(values)).view(-1, BLOCK)
        given = values.view(-1, BLOCK)
        largest = given.abs().argmax(1, keepdim=True)
        assert torch.equal(back.gather(1, largest), given.gather(1, largest))
        scale, power, codes = (given.abs().amax(1, keepdim=True), 2, 127)
        if not (given < 0).any():
            power, codes = 4, 255
        roots = [(v.abs() / scale) ** (1 / power) * codes for v in (given, back)]
        assert float((roots[0] - roots[1]).abs().max()) < 1.001
        assert bool((given.sign() * back.sign() >= 0).all())


def test_rounding_is_right_on_average() -> None:
    values = 0.3 + 1e-4 * torch.rand(4000, BLOCK, generator=torch.Generator().manual_seed(0))
    for sign in (1.0, -1.0):
        values[:, 0] = sign
        back = decoded(encoded(values.view(-1))).view(-1, BLOCK)
        assert float(back[:, 1:].std()) > 1e-3  # up and down
        assert float(back[:, 1:].mean()) == pytest.approx(float(values[:, 1:].mean()), rel=1e-4)


def test_a_second_moment_that_is_not_zero_does_not_become_zero() -> None:
    values = torch.tensor([1.0, 1e-12, 0.0, 1e-20]).repeat(BLOCK // 4)
    back = decoded(encoded(values))
    assert bool(((back > 0) == (values > 0)).all())


def test_values_that_are_not_finite_spoil_their_block_alone() -> None:
    values = wide(3)[: 4 * BLOCK].clone()
    values[3], values[BLOCK + 5] = torch.nan, torch.inf
    values[2 * BLOCK : 3 * BLOCK] = 1e-30  # below what is kept
    back = decoded(encoded(values)).view(-1, BLOCK)
    assert not back[:2].isfinite().any()
    assert not back[2].any()
    assert bool(back[3].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_in_blocks_reads_and_writes_as_a_tensor_does(dtype: torch.dtype) -> None:
    count = 3 * BLOCK + 40
    values = wide(4)[:count].to(dtype)
    state = BlockState.make(torch.zeros(4, STATE_ROW_BYTES, dtype=torch.uint8), dtype, (count, 1))
    assert not state.any()
    state.copy_(values[:, None])
    back = state.decoded()
    assert torch.equal(state + 1, back + 1)
    assert torch.equal(state.detach().reshape(-1)[300:700] * 2, back.flatten()[300:700] * 2)
    assert torch.equal(state.to(torch.float64), back.double())
    assert state.nbytes == 4 * STATE_ROW_BYTES
    assert (state.dtype, tuple(state.shape), state.element_size()) == (dtype, (count, 1), dtype.itemsize)
    plain = torch.zeros_like(back)
    plain.copy_(state)
    assert torch.equal(plain, back)
    torch._foreach_mul_([state], 2.0)
    assert torch.equal(state.decoded(), back * 2)  # twice the scale
    state.view(-1)[BLOCK + 3 : BLOCK + 5].zero_()
    changed = state.decoded().flatten()
    assert not changed[BLOCK + 3 : BLOCK + 5].any()
    assert torch.equal(changed[:BLOCK], (back * 2).flatten()[:BLOCK])


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be"):
        low_bit.encode(torch.zeros(BLOCK), torch.zeros(1, BLOCK, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not hold"):
        low_bit.decode(torch.zeros(1, STATE_ROW_BYTES, dtype=torch.uint8), torch.zeros(BLOCK + 1))


def test_the_plan_counts_state_in_blocks_and_the_slabs_of_a_step() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(4)])
    elements = 4 * 4096**2 // 8
    exact, small = (fs.plan(model, ranks=8, units=nn.Linear, state=state) for state in ("exact", "8bit"))
    assert (exact.state_bytes, exact.slab_bytes) == (8 * elements, 0)
    assert small.state_bytes == 2 * elements // BLOCK * STATE_ROW_BYTES
    assert small.slab_bytes == 8 * min(4 * 2**20, elements // 4)  # a chunk is of one unit
    assert small.parameter_bytes == exact.parameter_bytes
    assert "slabs" in str(small)
    offloaded = fs.plan(model, ranks=8, units=nn.Linear, state="8bit", offload="optimizer")
    assert offloaded.resting is not None
    assert offloaded.resting.bytes_at("host", "state") == small.state_bytes
    assert Question(memory_bytes=2**30, state="8bit").options("zero3").state == "8bit"
