"""The step of torch.optim.Muon on one rank of simulated clusters.

    make bench-muon    (or: python bench/muon.py --model tiny --ranks 2 8 --steps 1)

Nothing but the matrices of a Llama, with gradients set by hand: what is timed is `optimizer.step()`.

    shards      momentum on shards, updates to owners and back in bf16: what fs.shard does with torch's Muon
    owned       the same optimizer on entire tensors: what it does with any other that looks at matrices
    gathered    every rank gathers everything and repeats the step, on fewer layers, times their share
    fsdp2       torch's Muon on FSDP2's DTensors, on fewer layers, times their share, where it runs

The bound is Newton-Schulz of all matrices, measured on this device, divided by the ranks, plus the time that
the links of this rank take for 4 bytes per parameter and rank.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.optim import _muon  # type: ignore[attr-defined, unused-ignore]

import fullshard as fs
from fullshard.planning.network import ACROSS_HOP_S, INSIDE_HOP_S, Link, Network
from fullshard.tools.simulation.group import Cluster, joined
from report import machine, markdown

WAYS = ("shards", "owned", "gathered", "fsdp2")
INSIDE_BYTES_S, ACROSS_BYTES_S, NODE_RANKS = 400e9, 50e9, 8


@dataclass(frozen=True)
class Llama:
    hidden: int
    inner: int
    keys: int
    layers: int

    def shapes(self) -> list[tuple[int, int]]:
        """Of one layer."""
        h, f, k = self.hidden, self.inner, self.keys
        return [(h, h), (k, h), (k, h), (h, h), (f, h), (f, h), (h, f)]

    @property
    def num_elements(self) -> int:
        return self.layers * sum(rows * columns for rows, columns in self.shapes())


MODELS = {
    "tiny": Llama(64, 192, 16, 4),
    "1b": Llama(2048, 8192, 512, 16),
    "8b": Llama(4096, 14336, 1024, 32),
    "70b": Llama(8192, 28672, 1024, 80),
}
FEWER = 4  # layers, for ways that hold everything on one rank


class Layer(nn.Module):
    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(x @ (m.T @ m) if m.shape[1] == x.shape[-1] else x @ (m @ m.T) for m in self.matrices)


class Matrices(nn.Module):
    def __init__(self, model: Llama, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(model.shapes()) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def filled(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02)


def network(ranks: int) -> Network:
    if ranks <= NODE_RANKS:
        return Network(ranks, Link(INSIDE_BYTES_S, INSIDE_HOP_S))
    inside = Link(INSIDE_BYTES_S, INSIDE_HOP_S)
    return Network(ranks, Link(ACROSS_BYTES_S, ACROSS_HOP_S), NODE_RANKS, inside)


@contextmanager
def cluster_of(ranks: int, device: torch.device) -> Iterator[Network]:
    chosen = network(ranks)
    with joined(Cluster(chosen, device, 0)):
        yield chosen
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def timed(step: Callable[[], object], steps: int, device: torch.device) -> float:
    seconds = []
    for _ in range(steps + 1):  # the first one makes the state and the plan
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return median(seconds[1:])


def stepping(model: nn.Module) -> Callable[[], object]:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    return torch.optim.Muon(model.parameters(), lr=1e-3).step


def ours(way: str, llama: Llama, layers: int, device: torch.device) -> Callable[[], object]:
    on_meta = device.type == "cuda"
    with torch.device("meta" if on_meta else device):
        model = Matrices(llama, layers)
    if not on_meta:
        for module in model.modules():
            filled(module)
    option = "auto" if way == "shards" else way
    sharded = fs.shard(
        model,
        units=Layer,
        optimizer_step=option,
        materialize=filled if on_meta else None,
        device=device if on_meta else None,
    )
    return stepping(sharded)


def fsdp2(llama: Llama, layers: int, device: torch.device) -> Callable[[], object]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Matrices(llama, layers).to(device)
    for module in model.modules():
        filled(module)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepping(model)


def products_s(llama: Llama, device: torch.device) -> float:
    """Newton-Schulz of all matrices, on one device."""
    total = 0.0
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    for shape, count in Counter(llama.shapes()).items():
        matrix = torch.randn(shape, device=device, dtype=torch.bfloat16)

        def once(matrix: torch.Tensor = matrix) -> object:
            return _muon._zeropower_via_newtonschulz(matrix.clone(), coefficients, 5, 1e-7)

        once()
        total += count * timed(once, 5, device)
    return llama.layers * total


def exchange_s(llama: Llama, chosen: Network) -> float:
    """4 bytes per parameter and rank, there and back in bf16, over this rank's links."""
    one_way = 2 * llama.num_elements / chosen.ranks
    load = chosen.load("all-to-all", one_way, chosen.placement(list(range(chosen.ranks))))
    return 2 * max(load.inside_s, load.across_s)


def row(way: str, llama: Llama, ranks: int, steps: int, device: torch.device) -> tuple[float | None, str]:
    layers = min(llama.layers, FEWER) if way in ("gathered", "fsdp2") else llama.layers
    note = "" if layers == llama.layers else f"{layers} layers, times {llama.layers / layers:g}"
    with cluster_of(ranks, device):
        try:
            step = fsdp2(llama, layers, device) if way == "fsdp2" else ours(way, llama, layers, device)
            return timed(step, steps, device) * llama.layers / layers, note
        except (fs.FullshardError, RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
            return None, f"does not run: {type(error).__name__}: {str(error).splitlines()[0][:80]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, llama = torch.device(arguments.device), MODELS[arguments.model]
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    products = products_s(llama, device)
    print(machine())
    print(f"\n{arguments.model}: Newton-Schulz of all matrices on one device takes {products * 1e3:.3g} ms\n")
    rows = []
    for ranks in arguments.ranks:
        bound = products / ranks + exchange_s(llama, network(ranks))
        for way in arguments.ways:
            seconds, note = row(way, llama, ranks, arguments.steps, device)
            ratio = None if seconds is None else seconds / bound
            rows.append((ranks, way, None if seconds is None else seconds * 1e3, bound * 1e3, ratio, note))
            print(".", end="", flush=True)
    print("\n")
    print(markdown(["ranks", "step", "ms", "bound, ms", "of the bound", ""], rows))


if __name__ == "__main__":
    main()
