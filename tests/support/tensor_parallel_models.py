"""A small transformer, and the ways in which torch's own tensor parallelism cuts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, debug
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, WIDTH, HIDDEN, HEADS, LENGTH = 12, 8, 12, 2, 6
Batch = tuple[Tensor, Tensor]


def new_mesh(*sizes: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    """A mesh of this run. A warm worker's DTensors remember results on equal meshes of earlier runs, with
    process groups that are no more: they forget them here."""
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        head = WIDTH // HEADS  # not its own number of heads: a rank has a part of them
        q, k, v = (f(x).unflatten(-1, (-1, head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """`scale` stays a plain parameter beside those that are cut."""

    def __init__(self, hidden: int, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(WIDTH), Mlp(WIDTH, hidden)
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.scale * self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(
        self, hidden: int = HIDDEN, vocabulary: int = VOCABULARY, scaled: bool = True, blocks: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden, scaled) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(hidden: int = HIDDEN, vocabulary: int = VOCABULARY, scaled: bool = True) -> Gpt:
    torch.manual_seed(0)
    return Gpt(hidden, vocabulary, scaled)


def batches(steps: int, dp_ranks: int = 2, vocabulary: int = VOCABULARY) -> list[list[Batch]]:
    """batches[step][dp rank]"""
    generator = torch.Generator().manual_seed(1)
    draw = [
        torch.randint(0, vocabulary, (3, LENGTH + 1), generator=generator) for _ in range(steps * dp_ranks)
    ]
    pairs = [(d[:, :-1], d[:, 1:]) for d in draw]
    return [pairs[i : i + dp_ranks] for i in range(0, len(pairs), dp_ranks)]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    tokens, wanted = batch
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def parallel_loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The logits stay cut by the vocabulary; call it, and its backward, inside loss_parallel()."""
    tokens, wanted = batch
    logits = model(tokens)
    assert isinstance(logits, DTensor)
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def columns_and_rows(model: Gpt, mesh: DeviceMesh) -> None:
    """As Megatron cuts it; norms and `scale` stay plain."""
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan[f"blocks.{i}.attention.o"] = RowwiseParallel()
        # Local outputs are taken for even parts by torch: an uneven hidden width needs DTensors in between.
        plan[f"blocks.{i}.mlp.up"] = ColwiseParallel(use_local_output=False)
        plan[f"blocks.{i}.mlp.down"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def mlps_alone(model: Gpt, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {}
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.mlp.up"], plan[f"blocks.{i}.mlp.down"] = ColwiseParallel(), RowwiseParallel()
    parallelize_module(model, mesh, plan)


def by_sequence(model: Gpt, mesh: DeviceMesh) -> None:
    """Between the blocks activations are cut by tokens; gradients of norms are sums over the ranks.

    For a model without `scale`: a plain parameter there would get the gradient of this rank's tokens alone.
    """
    tokens, whole = Shard(1), Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.blocks)):
        plan |= {f"blocks.{i}.{name}": SequenceParallel() for name in ("norm1", "norm2")}
        for name in ("attention", "mlp"):
            plan[f"blocks.{i}.{name}"] = PrepareModuleInput(
                input_layouts=(tokens,), desired_input_layouts=(whole,)
            )
        plan |= {f"blocks.{i}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan[f"blocks.{i}.attention.o"] = RowwiseParallel(output_layouts=tokens)
        plan[f"blocks.{i}.mlp.up"] = ColwiseParallel()
        plan[f"blocks.{i}.mlp.down"] = RowwiseParallel(output_layouts=tokens)
    parallelize_module(model, mesh, plan)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, inside fs.full, as it would be in one process."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for n, p in values.items()}


CUTS: dict[str, Callable[[Gpt, DeviceMesh], None]] = {
    "columns and rows": columns_and_rows,
    "mlps alone": mlps_alone,
    "by sequence": by_sequence,
}
