"""Models to simulate: two plain families in several sizes, or a function of the user's that builds one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import OptionError
from fullshard.options import parse
from fullshard.units import find_units


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer. With `feed` of its own it is of the Llama family, else of GPT-2's."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    key_heads: int = 0
    feed: int = 0
    context: int = 1024

    @property
    def llama(self) -> bool:
        return self.feed > 0


PRESETS = {
    "gpt-8m": Shape(8, 256, 4, 8192, context=256),  # for a CPU
    "gpt-124m": Shape(12, 768, 12, 50304),
    "gpt-350m": Shape(24, 1024, 16, 50304),
    "llama-1b": Shape(16, 2048, 32, 32000, key_heads=8, feed=8192, context=4096),
    "llama-8b": Shape(32, 4096, 32, 32000, key_heads=8, feed=14336, context=4096),
    "llama-70b": Shape(80, 8192, 64, 32000, key_heads=8, feed=28672, context=4096),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.size = shape.heads, shape.width // shape.heads
        self.key_heads = shape.key_heads or shape.heads
        bias = not shape.llama
        self.query = nn.Linear(shape.width, shape.width, bias=bias)
        self.key = nn.Linear(shape.width, self.key_heads * self.size, bias=bias)
        self.value = nn.Linear(shape.width, self.key_heads * self.size, bias=bias)
        self.out = nn.Linear(shape.width, shape.width, bias=bias)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key = self.key(x).view(batch, length, self.key_heads, self.size).transpose(1, 2)
        value = self.value(x).view(batch, length, self.key_heads, self.size).transpose(1, 2)
        if turns is not None:
            query, key = turned(query, turns), turned(key, turns)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.key_heads != self.heads
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: pairs of channels turned by an angle that grows with the position."""
    cos, sin = turns.to(x.dtype).unbind(0)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Gelu(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Gated(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.feed, bias=False)
        self.up = nn.Linear(shape.width, shape.feed, bias=False)
        self.down = nn.Linear(shape.feed, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def _norm(shape: Shape) -> nn.Module:
    return nn.RMSNorm(shape.width, eps=1e-5) if shape.llama else nn.LayerNorm(shape.width)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(shape), Attention(shape)
        self.feed_norm = _norm(shape)
        self.feed: nn.Module = Gated(shape) if shape.llama else Gelu(shape)

    def forward(self, x: Tensor, turns: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        out: Tensor = x + self.feed(self.feed_norm(x))
        return out


class Decoder(nn.Module):
    """Tokens in, the loss of the next one out. GPT-2's family ties its head to the embedding."""

    turns: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = None if shape.llama else nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if not shape.llama:
            self.head.weight = self.token.weight
        self.register_buffer("turns", _turns(shape), persistent=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs)
        turns = None
        if self.position is not None:
            x = x + self.position(torch.arange(inputs.shape[1], device=x.device))
        else:
            turns = self.turns[:, : inputs.shape[1]]
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def initialize(module: nn.Module) -> None:
    """A module's own values. A model that is too large to be built whole is built on meta and then filled."""
    for name, parameter in module.named_parameters(recurse=False):
        fill(name, parameter.data)
    if isinstance(module, Decoder):
        module.turns.copy_(_turns(module.shape))


def fill(name: str, values: Tensor) -> None:
    if values.dim() > 1:
        values.normal_(std=0.02)
    else:
        values.fill_(0.0 if name.endswith("bias") else 1.0)


def _turns(shape: Shape) -> Tensor:
    size = shape.width // shape.heads
    speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(shape.context), speeds).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


@dataclass(frozen=True)
class Subject:
    """What is simulated: how to build it, what to feed it, how to get a loss."""

    name: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], Any]
    initialize: Callable[[nn.Module], None] | None = None  # it may be built on meta: this fills a module

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            out = model(**batch)
        else:
            out = model(*batch) if isinstance(batch, tuple) else model(batch)
        loss = getattr(out, "loss", out)
        if isinstance(loss, tuple | list):
            loss = loss[0]
        if not isinstance(loss, Tensor):
            raise OptionError(
                f"{self.name} returned a {type(out).__name__}, which has no loss",
                "Return a tensor, or an object with a .loss.",
            )
        return loss if loss.dim() == 0 else loss.float().mean()


class Training:
    """A model that is trained on one batch, step by step."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], what: Subject, batch: Any) -> None:
        self.model, self.blocks, self._what, self._batch = model, blocks, what, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def __call__(self) -> Tensor:
        loss = self._what.loss(self.model, self._batch)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, outer ones first: fullshard's units, without lone layers."""
    said = parse(strategy="zero3", precision="fp32", units=None, ignore=(), checkpoint_activations=True)
    found = [module for unit in find_units(model, said)[1:] for module in unit.modules]
    return [module for module in found if next(module.children(), None) is not None]


def subject(name: str, layers: int | None, tokens: int) -> Subject:
    """A preset by name, or FILE.py:FUNCTION or package.module:FUNCTION that returns (model, batch)."""
    if tokens < 2 or (layers is not None and layers < 1):
        raise OptionError(f"{layers} layers and {tokens} tokens", "Give at least 1 layer and 2 tokens.")
    if name in PRESETS:
        shape = PRESETS[name]
        return decoder(name, replace(shape, layers=layers or shape.layers), tokens)
    if ":" not in name:
        raise OptionError(
            f"there is no model {name!r}",
            f"Choose one of {', '.join(PRESETS)}, or give FILE.py:FUNCTION, a function that returns "
            "(model, batch).",
        )
    if layers is not None:
        raise OptionError(f"{name!r} decides its own layers", "Leave out --layers.")
    function = _function(name)
    if not callable(function):
        raise OptionError(f"{name!r} is a {type(function).__name__}", "Name a function.")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise OptionError(f"{name!r} returned a {type(made).__name__}", "Return (model, batch).")
    ready, batch = [made[0]], made[1]
    return Subject(
        name, name, lambda: ready.pop() if ready else function()[0], lambda device: _to(batch, device)
    )


def decoder(name: str, shape: Shape, tokens: int) -> Subject:
    length = min(shape.context, tokens)
    batch_size = tokens // length

    def batch(device: torch.device) -> Tensor:
        return torch.randint(0, shape.vocabulary, (batch_size, length + 1), device=device)

    about = f"{name}: {describe(shape)}; {batch_size * length:,} tokens a rank and step"
    return Subject(name, about, lambda: Decoder(shape), batch, initialize)


def describe(shape: Shape) -> str:
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Decoder(shape).parameters())
    shown = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    return f"{shown} parameters, {shape.layers} layers of width {shape.width}"


def _function(name: str) -> Callable[[], Any]:
    place, _, function = name.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        found = getattr(module, function)
    except (ImportError, OSError, AttributeError, AssertionError) as error:
        raise OptionError(f"{name!r} cannot be loaded: {error}", "Give FILE.py:FUNCTION.") from error
    return found  # type: ignore[no-any-return]


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_to(item, device) for item in value)
    return value
