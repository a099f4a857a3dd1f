"""A decoder of a given shape, planned on the meta device and simulated with values.

For a plan only the sizes and dtypes of tensors count. So norms and GELU are written out as in transformers,
with their intermediate float32, and the logits are returned with the loss. A shape that is `fused` uses
torch's own kernels for them and returns the loss alone: that is what the simulation measures.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.planning.sizes import Shape


class RMSNorm(nn.Module):
    def __init__(self, width: int, to_the_end: bool) -> None:
        super().__init__()
        self.to_the_end = to_the_end
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.to_the_end:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


def _norm(shape: Shape, width: int) -> nn.Module:
    if shape.gpt2:
        return nn.LayerNorm(width)
    return nn.RMSNorm(width, eps=1e-5) if shape.fused else RMSNorm(width, shape.wide_norms)


def _after(shape: Shape) -> nn.Module:
    """After attention and feed-forward: a second norm, or GPT-2's dropout, which saves its mask."""
    if shape.norms == 4:
        return _norm(shape, shape.width)
    return nn.Dropout(0.1) if shape.gpt2 and not shape.fused else nn.Identity()


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, bias = shape.size_of_head, shape.qkv_bias or shape.gpt2
        self.groups, self.softcap = shape.heads // shape.key_heads, shape.softcap
        self.widths = [shape.heads * self.size, *[shape.key_heads * self.size] * 2]
        self.joint = nn.Linear(shape.width, sum(self.widths), bias=bias) if shape.joint_qkv else None
        if self.joint is None:
            self.query, self.key, self.value = (
                nn.Linear(shape.width, width, bias=bias) for width in self.widths
            )
        self.out = nn.Linear(shape.heads * self.size, shape.width, bias=shape.gpt2)
        self.query_norm = _norm(shape, self.size) if shape.qk_norm else nn.Identity()
        self.key_norm = _norm(shape, self.size) if shape.qk_norm else nn.Identity()

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        if self.joint is None:
            parts = self.query(x), self.key(x), self.value(x)
        else:
            parts = self.joint(x).split(self.widths, -1)
        query, key, value = (part.view(batch, length, -1, self.size) for part in parts)
        query, key = self.query_norm(query).transpose(1, 2), self.key_norm(key).transpose(1, 2)
        value = value.transpose(1, 2)
        if turns is not None:
            query, key = _turned(query, turns), _turned(key, turns)
        if self.softcap:
            mixed = _capped_attention(query, key, value, self.groups)
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.groups > 1
            )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: pairs of channels turned by an angle that grows with the position."""
    cos, sin = turns.to(x.dtype).unbind(0)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _turns(shape: Shape) -> Tensor:
    """Cosines and sines, by position."""
    size = shape.size_of_head
    speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(shape.context), speeds).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def _capped(x: Tensor, most: float) -> Tensor:
    return torch.tanh(x / most) * most


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Keys and values are copied for every head that shares them, and the score matrices are saved."""
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scores = _capped(query @ key.transpose(2, 3) * query.shape[-1] ** -0.5, 50.0)
    scores = scores + torch.full_like(scores[:1, :1], float("-inf")).triu(1)
    return F.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


class Feed(nn.Module):
    """A gated feed-forward, or GPT-2's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gelu = F.gelu if shape.fused else _gelu
        self.gate = None if shape.gpt2 else nn.Linear(shape.width, shape.feed, bias=False)
        self.up = nn.Linear(shape.width, shape.feed, bias=shape.gpt2)
        self.down = nn.Linear(shape.feed, shape.width, bias=shape.gpt2)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            out: Tensor = self.down(self.gelu(self.up(x)))
        else:
            out = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def _gelu(x: Tensor) -> Tensor:
    """GPT-2's own, which is not one kernel."""
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class Experts(nn.Module):
    """Feed-forwards, a few of which each token uses. Tokens are assumed to be spread evenly."""

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
        routed = flat.repeat(self.used, 1)
        if tokens > len(routed):
            routed = F.pad(routed, (0, 0, 0, tokens - len(routed)))
        gate, up = torch.bmm(routed.view(count, -1, flat.shape[1]), self.gate_up.transpose(1, 2)).chunk(2, -1)
        mixed = torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2)).flatten(0, 1)
        mixed = mixed[: len(flat) * self.used] * weights.flatten()[:, None]
        return mixed.view(self.used, *x.shape).sum(0)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.attention = _norm(shape, shape.width), Attention(shape)
        self.before_feed = _norm(shape, shape.width)
        self.feed = Experts(shape) if shape.experts else Feed(shape)
        self.after_attention, self.after_feed = _after(shape), _after(shape)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        x = x + self.after_attention(self.attention(self.before_attention(x), turns))
        out: Tensor = x + self.after_feed(self.feed(self.before_feed(x)))
        return out


class Decoder(nn.Module):
    """From tokens to the loss of predicting each next one; unless `fused`, with the logits."""

    turns: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width) if shape.gpt2 else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape, shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.token.weight
        if not shape.gpt2:
            self.register_buffer("turns", _turns(shape), persistent=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs)
        turns = None
        if self.position is not None:
            x = x + self.position(torch.arange(inputs.shape[1], device=x.device))
        else:
            turns = self.turns[:, : inputs.shape[1]]
            turns = turns if self.shape.fused else turns.to(x.dtype)
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x))
        if self.shape.softcap:
            logits = _capped(logits, 30.0)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        return loss if self.shape.fused else (loss, logits)


def initialize(module: nn.Module) -> None:
    """Initialises a module's own values, for models that are built on meta because they fit on no device."""
    for name, parameter in module.named_parameters(recurse=False):
        fill(name, parameter.data)
    if isinstance(module, Decoder) and not module.shape.gpt2:
        module.turns.copy_(_turns(module.shape))


def fill(name: str, values: Tensor) -> None:
    if values.dim() > 1:
        values.normal_(std=0.02)
    else:
        values.fill_(0.0 if name.endswith("bias") else 1.0)
