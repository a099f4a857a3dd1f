"""The built-in GPT: plain PyTorch that knows nothing of sharding.

    model = GPT(GPTConfig(num_layers=12, num_heads=12, width=768, vocabulary=50257))
    initialise(model, seed=0)

A model that `fullshard train` wrote is read back with

    folder = "runs/gpt/model"
    model = fs.shard(GPT(GPTConfig.read(folder)))
    fs.load(folder, model)
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import CheckpointError, OptionError

FILE = "gpt.json"  # beside the weights: the shape that they are of
NORMS = ("rms", "layer")
POSITIONS = ("rotary", "learned")
_ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. The defaults make about 3.2 million parameters."""

    num_layers: int = 4
    num_heads: int = 4
    width: int = 256
    context: int = 128
    vocabulary: int = 257
    norm: str = "rms"
    positions: str = "rotary"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "width", "context", "vocabulary"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionError(f"{name} of a GPT is {value!r}", "Give an integer of at least 1.")
        for name, known in (("norm", NORMS), ("positions", POSITIONS)):
            if getattr(self, name) not in known:
                raise OptionError(
                    f"{name} of a GPT is {getattr(self, name)!r}", f"Choose one of {', '.join(known)}."
                )
        head_width, rest = divmod(self.width, self.num_heads)
        if rest or (self.positions == "rotary" and head_width % 2):
            what = "an even number of" if self.positions == "rotary" else "equally many"
            raise OptionError(
                f"a GPT of width {self.width} cannot have {self.num_heads} heads",
                f"Give each head {what} channels: the heads must divide the width.",
            )

    @staticmethod
    def read(folder: str | os.PathLike[str]) -> GPTConfig:
        """The shape of the GPT in a folder that fs.save, and so `fullshard train`, wrote."""
        path = Path(folder) / FILE
        try:
            config = json.loads(path.read_text())
            known = {field.name for field in fields(GPTConfig)}
            return GPTConfig(**{name: value for name, value in config.items() if name in known})
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{str(path)!r} does not hold the shape of a GPT: {error}",
                "Give a folder that fs.save or `fullshard train` wrote of a built-in GPT.",
            ) from error

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


class Output(NamedTuple):
    """What a forward returns: scores for the next token, and the loss where targets were given."""

    logits: Tensor
    loss: Tensor | None


def _norm(config: GPTConfig) -> nn.Module:
    return nn.LayerNorm(config.width) if config.norm == "layer" else nn.RMSNorm(config.width, eps=1e-6)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.rotary = config.positions == "rotary"
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        if self.rotary:
            query, key = _turned(query), _turned(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


def _turned(x: Tensor) -> Tensor:
    """Each pair of channels turned by an angle that grows with the position.

    The angles are computed here, in fp32, and not handed from block to block: a sharded block casts what it
    is given to its compute dtype, and bf16 cannot distinguish position 300 from 301.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = _ROTARY_BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * speeds
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Block(nn.Module):
    """Attention, then a feed-forward network, each normalised before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.feed_norm = _norm(config)
        self.feed = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder-only transformer whose head shares the token embedding's weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight
        if not self.head.weight.is_meta:
            initialise(self)

    def files_beside_weights(self) -> dict[str, bytes]:
        """What fs.save writes with the weights, so that the model can be built again."""
        return {FILE: self.config.to_bytes()}

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Output:
        x = self.token(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return Output(logits, None)
        return Output(logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))


class Initialiser:
    """First values of a GPT, module by module, in any order.

    Every parameter's numbers come from the seed and its own name. So they are the same whether the model is
    built on the host or, by `fs.shard(model, materialize=Initialiser(model, seed))`, unit by unit.
    """

    def __init__(self, model: GPT, seed: int) -> None:
        self._seed, self._num_layers = seed, model.config.num_layers
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def __call__(self, module: nn.Module) -> None:
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                self._fill(parameter, self._names[id(parameter)])

    def _fill(self, parameter: Tensor, name: str) -> None:
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        # What is added to the residual stream starts smaller the more layers add to it.
        adds_to_stream = name.endswith(("attention.out.weight", "feed.2.weight"))
        scale = 0.02 * ((2 * self._num_layers) ** -0.5 if adds_to_stream else 1.0)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        dice = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        parameter.copy_(torch.randn(parameter.shape, generator=dice) * scale)


def initialise(model: GPT, seed: int = 0) -> None:
    """Initialise an unsharded GPT."""
    fill = Initialiser(model, seed)
    for module in model.modules():
        fill(module)
