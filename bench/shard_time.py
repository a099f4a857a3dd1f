"""CPU seconds of fs.shard and of the first step, by number of units and of tensors, on one rank.

python bench/shard_time.py                      # the table
python bench/shard_time.py --units 500 --profile   # where the time is
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable

import torch
from torch import nn

import fullshard as fs

UNITS = (100, 500, 2_000)
TENSORS = (1_000, 10_000, 30_000, 100_000)
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


class Layer(nn.Module):
    """One layer of many small tensors: scales, experts, adapters."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(tensors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales[0]


def of_units(count: int) -> nn.Module:
    """`count` units of four tensors each."""
    return nn.Sequential(*(Block() for _ in range(count)))


def of_tensors(count: int) -> nn.Module:
    """`count` tensors in 100 units."""
    return nn.Sequential(*(Layer(count // 100) for _ in range(100)))


def measure(model: nn.Module, units: type[nn.Module]) -> tuple[float, float]:
    """CPU seconds of fs.shard and of one forward and backward."""
    started = time.process_time()
    fs.shard(model, units=units)
    sharded = time.process_time()
    model(torch.ones(2, WIDTH)).sum().backward()
    return sharded - started, time.process_time() - sharded


def profiled(work: Callable[[], object]) -> None:
    profile = cProfile.Profile()
    profile.runcall(work)
    stats = pstats.Stats(profile)
    stats.sort_stats("cumulative").print_stats(40)
    stats.sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, nargs="*", default=None)
    parser.add_argument("--tensors", type=int, nargs="*", default=None)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    some = given.units is not None or given.tensors is not None
    cases = [("units", n, of_units, Block) for n in (given.units or () if some else UNITS)]
    cases += [("tensors", n, of_tensors, Layer) for n in (given.tensors or () if some else TENSORS)]
    print(f"{'':>7}  {'':>7}  fs.shard  first step   (CPU seconds)")
    for what, count, build, kind in cases:
        model = build(count)
        if given.profile:
            profiled(lambda model=model, kind=kind: measure(model, kind))
        else:
            shard_s, step_s = measure(model, kind)
            print(f"{count:>7,}  {what:>7}  {shard_s:8.1f}  {step_s:10.1f}", flush=True)


if __name__ == "__main__":
    main()
