"""Factors that are multiplied into gradients elsewhere than where they were given."""

from __future__ import annotations

import torch

from fullshard.engine.homes.away_gradients import Divisor, multiply

HOST, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_division_on_the_host_has_the_bits_of_one_on_the_device() -> None:
    """CUDA's kernels multiply by the inverse of a number, which they compute in double precision."""
    torch.manual_seed(0)
    values = torch.randn(10_000)
    divided, multiplied = values.clone(), values.clone()
    multiply(divided, Divisor(3), HOST)
    multiply(multiplied, Divisor(3), GPU)
    assert torch.equal(divided, values / 3)
    assert torch.equal(multiplied, values * torch.tensor(1 / 3, dtype=torch.float64).float())
    assert not torch.equal(divided, multiplied)
    multiply(multiplied, Divisor(0), GPU)
    assert multiplied.isinf().all()


def test_a_factor_is_multiplied_in_everywhere() -> None:
    values = torch.randn(100)
    for device in (HOST, GPU):
        scaled = values.clone()
        multiply(scaled, 0.3, device)
        assert torch.equal(scaled, values * 0.3)
