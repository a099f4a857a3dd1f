"""A decoder of a given shape, for the meta device: its parameters, and a forward.

Nobody looks at what it computes: only the sizes and dtypes of tensors count. So norms, rotary positions and
the loss are written out as transformers writes them, with their float32 in the middle.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.planning.sizes import Shape


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, bias = shape.size_of_head, shape.qkv_bias or shape.gpt2
        self.query = nn.Linear(shape.width, shape.heads * self.size, bias=bias)
        self.key = nn.Linear(shape.width, shape.key_heads * self.size, bias=bias)
        self.value = nn.Linear(shape.width, shape.key_heads * self.size, bias=bias)
        self.out = nn.Linear(shape.heads * self.size, shape.width, bias=shape.gpt2)
        self.query_norm = RMSNorm(self.size) if shape.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.size) if shape.qk_norm else nn.Identity()

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.size)) for layer in (self.query, self.key, self.value)
        )
        query, key = self.query_norm(query).transpose(1, 2), self.key_norm(key).transpose(1, 2)
        value = value.transpose(1, 2)
        if turns is not None:
            query, key = _turned(query, turns), _turned(key, turns)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turns[0] + torch.cat((-second, first), -1) * turns[1]


class Feed(nn.Module):
    """A gated feed-forward, or GPT-2's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = None if shape.gpt2 else nn.Linear(shape.width, shape.feed, bias=False)
        self.up = nn.Linear(shape.width, shape.feed, bias=shape.gpt2)
        self.down = nn.Linear(shape.feed, shape.width, bias=shape.gpt2)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            out: Tensor = self.down(_gelu(self.up(x)))
        else:
            out = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def _gelu(x: Tensor) -> Tensor:
    """GPT-2's own, which is not one kernel."""
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class Experts(nn.Module):
    """Feed-forwards of which a token uses a few. Each gets as many as the others, which is the mean."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.used = shape.experts_used
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        # Stacked, as transformers holds them: one parameter for all experts.
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.feed, shape.width))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.width, shape.feed))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, _ = torch.topk(F.softmax(self.router(flat), -1, dtype=torch.float32), self.used, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        count = len(self.gate_up)
        tokens = -(-len(flat) * self.used // count) * count
        routed = flat.repeat(self.used + 1, 1)[:tokens].view(count, -1, flat.shape[1])
        gate, up = torch.bmm(routed, self.gate_up.transpose(1, 2)).chunk(2, -1)
        mixed = torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2)).flatten(0, 1)
        mixed = mixed[: len(flat) * self.used] * weights.flatten()[:, None]
        return mixed.view(self.used, *x.shape).sum(0)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feed = Experts(shape) if shape.experts else Feed(shape)
        self.before_attention, self.before_feed = _norm(shape), _norm(shape)
        self.after_attention = _norm(shape) if shape.norms == 4 else nn.Identity()
        self.after_feed = _norm(shape) if shape.norms == 4 else nn.Identity()

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.after_attention(self.attention(self.before_attention(x), turns))
        out: Tensor = x + self.after_feed(self.feed(self.before_feed(x)))
        return out


def _norm(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.width) if shape.gpt2 else RMSNorm(shape.width)


class Decoder(nn.Module):
    """Tokens in, loss out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width) if shape.gpt2 else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        turns = None
        if self.position is None:
            table = x.new_empty(1, 1, tokens.shape[1], self.shape.size_of_head)
            turns = (table, torch.empty_like(table))
        else:
            x = x + self.position(torch.arange(tokens.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x)).float()
        targets = F.pad(tokens, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def num_parameters(shape: Shape) -> int:
    """Of the whole model; only one block of it is built."""
    with torch.device("meta"):
        none, one = (Decoder(replace(shape, layers=layers)) for layers in (0, 1))
    around, with_block = (sum(p.numel() for p in model.parameters()) for model in (none, one))
    return around + shape.layers * (with_block - around)
