"""What gradients in 8-bit blocks between nodes cost: a byte-level GPT on the standard library's source.

    make bench-eight-bit    (or: python bench/eight_bit.py --sizes small --seeds 0 1 --steps 20 --device cpu)

One process computes the gradients of every node in turn, encodes each with the engine's own codec, and steps
on the mean of what was decoded, as the ranks of these nodes would. Every variant of a seed has the same
values at the start and the same batches. Reported: the loss on held-out text, and by how much it exceeds that
of exact gradients.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import report
from fullshard.engine.wire import BlockWire
from fullshard.precision import BLOCK
from report import machine, markdown

CONTEXT, SEQUENCES, NODES = 128, 8, 2
SIZES = {"small": (3, 96), "medium": (6, 256)}  # layers, width
VARIANTS = ("exact", "bf16", "int8", "int8, feedback")
LEARNING_RATE = 2e-3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.first(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class ByteGPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.places.weight)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def text(device: torch.device) -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = bytearray(b"".join(path.read_bytes() for path in files))
    return torch.frombuffer(source, dtype=torch.uint8).to(device).long()


@dataclass
class Sender:
    """What arrives of one node's gradient, by variant."""

    variant: str
    num_elements: int
    device: torch.device

    def __post_init__(self) -> None:
        self._wire = BlockWire()
        self._rows = self._wire.rows(1, self.num_elements, self.device)
        feeds_back = self.variant.endswith("feedback")
        self._residual = torch.zeros(1, self.num_elements, device=self.device) if feeds_back else None

    def __call__(self, gradient: Tensor) -> Tensor:
        if self.variant == "exact":
            return gradient
        if self.variant == "bf16":
            return gradient.bfloat16().float()
        self._wire.encode(gradient[None], self._rows, self._residual)
        arrived = torch.empty_like(gradient)
        self._wire.decode(self._rows, arrived[None])
        return arrived


def rate(step: int, steps: int) -> float:
    return LEARNING_RATE * min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def replayed(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The same work without its host time, on a GPU."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def held_out_loss(model: nn.Module, data: Tensor, batches: int) -> float:
    """On the last tenth of the text: the same places for every model."""
    generator, places = torch.Generator().manual_seed(7), torch.arange(CONTEXT + 1)
    starts = torch.randint(len(data) * 9 // 10, len(data) - CONTEXT - 1, (batches, 64), generator=generator)
    with torch.no_grad():
        losses = [loss_of(model, data[(part[:, None] + places).to(data.device)]) for part in starts]
    return torch.stack(losses).mean().item()


def trained(size: str, seed: int, variant: str, steps: int, data: Tensor) -> float:
    """The loss on held-out text."""
    device, held_out = data.device, len(data) * 9 // 10
    torch.manual_seed(seed)
    model = ByteGPT(*SIZES[size]).to(device)
    parameters = list(model.parameters())
    start = [p.detach().clone() for p in parameters]
    sizes = [p.numel() for p in parameters]
    sizes.append(-sum(sizes) % BLOCK)  # padding
    flat = torch.zeros(sum(sizes), device=device)
    for p, part in zip(parameters, flat.split(sizes), strict=False):
        p.grad = part.view_as(p)
    learning_rate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, capturable=device.type == "cuda")
    senders = [Sender(variant, len(flat), device) for _ in range(NODES)]
    batch = torch.zeros(NODES, SEQUENCES, CONTEXT + 1, dtype=torch.int64, device=device)
    total = torch.zeros_like(flat)

    def one_step() -> None:
        total.zero_()
        for node, sender in enumerate(senders):
            flat.zero_()
            loss_of(model, batch[node]).backward()
            total.add_(sender(flat))
        flat.copy_(total / NODES)
        optimizer.step()

    run = replayed(one_step, device)
    with torch.no_grad():  # as before the steps that were captured
        for p, value in zip(parameters, start, strict=True):
            p.copy_(value)
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
        for sender in senders:
            if sender._residual is not None:
                sender._residual.zero_()
    generator = torch.Generator().manual_seed(1000 + seed)
    places = torch.arange(CONTEXT + 1)
    for step in range(steps):
        starts = torch.randint(0, held_out - CONTEXT - 1, (NODES, SEQUENCES), generator=generator)
        batch.copy_(data[(starts[..., None] + places).to(device)])
        learning_rate.fill_(rate(step, steps))
        run()
    return held_out_loss(model, data, 16)


def arguments(description: str) -> argparse.ArgumentParser:
    """What every measurement of this model has: sizes, seeds, steps, a device and a folder for its report."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=report.OUTPUT)
    return parser


def compared(losses: list[float], exact: list[float]) -> list[str]:
    """Cells: the mean over seeds, by how much that exceeds the exact one's, and the deviation of that."""
    more = [loss - other for loss, other in zip(losses, exact, strict=True)]
    return [f"{mean(losses):.4f}", f"{mean(more):+.4f}", f"{stdev(more) if len(more) > 1 else 0.0:.4f}"]


COMPARED = ["loss", "more than exact", "standard deviation over seeds"]  # their heads


def write(output: Path, name: str, about: str, table: str, values: dict[str, Any]) -> None:
    """Print the table, and keep it with the values of every run."""
    shown = f"{machine()}\n\n{about}\n\n{table}\n"
    print(shown)
    output.mkdir(exist_ok=True, parents=True)
    (output / f"{name}.md").write_text(shown)
    (output / f"{name}.json").write_text(json.dumps(values, indent=1))


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    data = text(torch.device(args.device))
    found = {
        (size, seed, variant): trained(size, seed, variant, args.steps, data)
        for size in args.sizes
        for seed in args.seeds
        for variant in VARIANTS
    }
    rows = []
    for size in args.sizes:
        by_variant = {variant: [found[size, seed, variant] for seed in args.seeds] for variant in VARIANTS}
        rows += [[size, v, *compared(losses, by_variant["exact"])] for v, losses in by_variant.items()]
    about = f"{NODES} nodes, {args.steps} steps, {len(args.seeds)} seeds"
    values = {" ".join(map(str, key)): value for key, value in found.items()}
    table = markdown(["model", "gradients between nodes", *COMPARED], rows)
    write(args.output, "eight_bit", about, table, values)


if __name__ == "__main__":
    main()
