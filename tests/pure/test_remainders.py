"""Masters come back bit by bit from their rounded values and what restores them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fullshard.engine.homes.remainders import bitmap_bytes, join, split


def back(masters: Tensor) -> Tensor:
    compute = masters.to(torch.bfloat16)
    low = torch.full(masters.shape, 77, dtype=torch.int16)
    ties = torch.full((bitmap_bytes(len(masters)),), 77, dtype=torch.uint8)
    split(masters, compute, low, ties)
    out = torch.full_like(masters, torch.nan)
    join(compute, low, ties, out)
    return out


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def test_every_bit_comes_back_of_every_lower_half() -> None:
    """All 65,536 lower halves under upper halves of every kind: even, odd, subnormal, largest, negative."""
    lower = torch.arange(2**16, dtype=torch.int64)
    for upper in (0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x7F7E, 0x8000, 0x8001, 0xBF80, 0xFF7F, 0xC2FD):
        masters = ((upper << 16) + lower).to(torch.int32).view(torch.float32)
        assert torch.equal(bits(back(masters)), bits(masters)), hex(upper)


def test_bits_drawn_at_random_come_back_and_nan_stays_nan() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 7, 8, 9, 2**18 - 1, 2**18 + 3, 600_001):
        masters = torch.randint(-(2**31), 2**31, (count,), generator=generator).int().view(torch.float32)
        out, nan = back(masters), masters.isnan()
        assert torch.equal(out.isnan(), nan)
        assert torch.equal(bits(out)[~nan], bits(masters)[~nan])


def test_weights_that_were_fp16_come_back_although_an_eighth_of_them_are_ties() -> None:
    masters = torch.randn(100_003, generator=torch.Generator().manual_seed(1)).half().float()
    assert ((bits(masters) & 0xFFFF) == 0x8000).float().mean() > 0.05
    assert torch.equal(bits(back(masters)), bits(masters))


def test_infinities_and_zeros_keep_their_sign() -> None:
    masters = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45])
    assert torch.equal(bits(back(masters)), bits(masters))


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    masters, low = torch.zeros(9), torch.zeros(9, dtype=torch.int16)
    with pytest.raises(ValueError, match="do not belong together"):
        split(masters, masters.bfloat16(), low, torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not belong together"):
        join(masters.half(), low, torch.zeros(2, dtype=torch.uint8), masters)
