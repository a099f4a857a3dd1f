"""A byte-level GPT and its training text: the source of the Python standard library.

Nothing in this file knows about fullshard. It is the plain PyTorch that the other examples shard.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTE_VALUES = 256


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. The defaults make about 3.3 million parameters."""

    num_layers: int = 4
    num_heads: int = 4
    width: int = 256
    context: int = 128
    vocabulary: int = NUM_BYTE_VALUES


class Output(NamedTuple):
    """What a forward returns: scores for the next token, and the loss where targets were given."""

    logits: Tensor
    loss: Tensor | None


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a feed-forward network, each normalised before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_norm = nn.LayerNorm(config.width)
        self.feed = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer whose head shares the token embedding's weight."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream starts smaller the more layers add to it.
                adds_to_stream = name.endswith(("attention.out.weight", "feed.2.weight"))
                scale = (2 * self.config.num_layers) ** -0.5 if adds_to_stream else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Output:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return Output(logits, None)
        return Output(logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()))


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, num_bytes: int, context: int, temperature: float = 0.7
) -> bytes:
    """`prompt` continued by `num_bytes` sampled bytes.

    Under sharding every rank must call this: each forward gathers the layers from all ranks.
    """
    device = next(model.parameters()).device
    dice = torch.Generator().manual_seed(0)
    text = list(prompt)
    for _ in range(num_bytes):
        tokens = torch.tensor([text[-context:]], device=device)
        scores = model(tokens).logits[0, -1].float().cpu()
        chances = torch.softmax(scores / temperature, dim=0)
        text.append(int(torch.multinomial(chances, 1, generator=dice)))
    return bytes(text)


def standard_library_bytes(limit: int) -> Tensor:
    """The first `limit` bytes of the standard library's source, files in sorted order, as a uint8 tensor."""
    text = bytearray()
    for path in _standard_library_files():
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(
            f"no Python source under {sysconfig.get_path('stdlib')}; use a Python with an unzipped library"
        )
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def _standard_library_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # Installed packages and tests differ between machines more than the library itself does.
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts):
            yield path


def sample_batch(text: Tensor, batch_size: int, context: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """`batch_size` random windows of `text`, and the same windows one byte later."""
    starts = torch.randint(len(text) - context - 1, (batch_size,), generator=dice)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
