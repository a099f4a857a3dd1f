"""What optimizer state in 8-bit blocks costs: a byte-level GPT on the standard library's source.

    make bench-low-bit    (or: python bench/low_bit_state.py --sizes small --seeds 0 1 --steps 20)

One process trains with `fs.shard(state=...)`, exact and in 8-bit blocks, with AdamW. Every variant of a seed
has the same values at the start and the same batches. Reported: the loss on held-out text, by how much it
exceeds that of exact state, and the time of a step and of its optimizer.
"""

from __future__ import annotations

import time
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

import fullshard as fs
from eight_bit import (
    COMPARED,
    CONTEXT,
    SEQUENCES,
    SIZES,
    Block,
    ByteGPT,
    arguments,
    compared,
    held_out_loss,
    loss_of,
    rate,
    text,
    write,
)
from report import markdown

VARIANTS = ("exact", "8bit")
BETA2 = {"0.999": 0.999, "0.95": 0.95}


class Found(NamedTuple):
    loss: float
    step_ms: float
    optimizer_ms: float
    state_bytes: int


def trained(size: str, seed: int, variant: str, beta2: float, steps: int, data: Tensor) -> Found:
    device, held_out = data.device, len(data) * 9 // 10
    torch.manual_seed(seed)
    model = fs.shard(ByteGPT(*SIZES[size]).to(device), units=Block, state=variant)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, beta2))
    generator = torch.Generator().manual_seed(1000 + seed)
    places = torch.arange(CONTEXT + 1)
    spent: list[tuple[float, float]] = []
    for step in range(steps):
        starts = torch.randint(0, held_out - CONTEXT - 1, (2 * SEQUENCES,), generator=generator)
        batch = data[(starts[:, None] + places).to(device)]
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        begin = _now(device)
        loss_of(model, batch).backward()
        middle = _now(device)
        optimizer.step()
        end = _now(device)
        optimizer.zero_grad()
        spent.append((end - begin, end - middle))
    states = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    times = [1e3 * median(times) for times in zip(*spent[steps // 4 :], strict=True)]
    return Found(held_out_loss(model, data, 8), *times, sum(v.nbytes for v in states))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--beta2", nargs="+", default=["0.999"], choices=list(BETA2))
    args = parser.parse_args()
    data = text(torch.device(args.device))
    found = {
        (size, beta2, variant, seed): trained(size, seed, variant, BETA2[beta2], args.steps, data)
        for size in args.sizes
        for beta2 in args.beta2
        for seed in args.seeds
        for variant in VARIANTS
    }
    rows = []
    for size, beta2, variant in product(args.sizes, args.beta2, VARIANTS):
        exact = [found[size, beta2, "exact", seed].loss for seed in args.seeds]
        each = [found[size, beta2, variant, seed] for seed in args.seeds]
        row = [size, beta2, variant, *compared([one.loss for one in each], exact)]
        row += [f"{median(one.step_ms for one in each):.1f}"]
        row += [f"{median(one.optimizer_ms for one in each):.1f}", f"{each[0].state_bytes / 1e6:.2f}"]
        rows.append(row)
    about = f"{args.steps} steps of AdamW, {len(args.seeds)} seeds, {args.device}"
    values = {" ".join(map(str, key)): one._asdict() for key, one in found.items()}
    heads = ["model", "beta2", "state", *COMPARED, "step, ms", "optimizer, ms", "state, MB"]
    write(args.output, "low_bit_state", about, markdown(heads, rows), values)


if __name__ == "__main__":
    main()
