"""Well-known decoders by their public dimensions; pure.

The presets of the simulation are other models: one vocabulary for all, so that sizes can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer, as far as its parameters and activations go."""

    layers: int
    width: int
    heads: int
    key_heads: int
    feed: int
    vocabulary: int
    context: int
    head_size: int = 0  # 0: width / heads
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    joint_qkv: bool = False  # queries, keys and values are parts of one product
    qk_norm: bool = False
    norms: int = 2  # per block: before attention and feed-forward, or also after them
    wide_norms: bool = False  # float32 to their end
    experts: int = 0
    experts_used: int = 0  # by a token
    gpt2: bool = False  # LayerNorm, learned positions, biases everywhere, GELU without a gate
    softcap: bool = False  # scores and logits are bounded by a tanh, which no fused attention computes
    fused: bool = False  # torch's own kernels for norms and GELU; else written out, as transformers does

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def num_parameters(self) -> int:
        """Of the model that `decoder` builds; a tied head counts once."""
        norm = self.width * (2 if self.gpt2 else 1)  # LayerNorm has a bias
        tables = self.vocabulary * (1 if self.tied else 2) + (self.context if self.gpt2 else 0)
        block = self.norms * norm + self._attention_parameters + self._feed_parameters
        return tables * self.width + self.layers * block + norm

    @property
    def _attention_parameters(self) -> int:
        out, joint = self.heads * self.size_of_head, (self.heads + 2 * self.key_heads) * self.size_of_head
        biases = (joint if self.qkv_bias or self.gpt2 else 0) + (self.width if self.gpt2 else 0)
        return self.width * (joint + out) + biases + (2 * self.size_of_head if self.qk_norm else 0)

    @property
    def _feed_parameters(self) -> int:
        if self.gpt2:
            return 2 * self.width * self.feed + self.feed + self.width
        gated = 3 * self.width * self.feed
        return self.experts * (gated + self.width) if self.experts else gated


def gpt2(layers: int, width: int, heads: int, vocabulary: int = 50257, context: int = 1024) -> Shape:
    """Of GPT-2's family."""
    return Shape(layers, width, heads, heads, 4 * width, vocabulary, context, tied=True, gpt2=True)


def _llama(layers: int, width: int, heads: int, key_heads: int, feed: int, **more: Any) -> Shape:
    return Shape(layers, width, heads, key_heads, feed, **{"vocabulary": 128256, "context": 8192, **more})


_OLD = {"vocabulary": 32000, "context": 4096}
_QWEN2 = {"vocabulary": 152064, "context": 32768, "qkv_bias": True}
_QWEN2_SMALL = {**_QWEN2, "vocabulary": 151936, "tied": True}
_QWEN3 = {"vocabulary": 151936, "context": 40960, "qk_norm": True, "head_size": 128}
_GEMMA = {"vocabulary": 256000, "context": 8192, "tied": True, "head_size": 256, "wide_norms": True}
_GEMMA2 = {**_GEMMA, "norms": 4, "softcap": True}
_SMOL = {"vocabulary": 49152, "tied": True}

SIZES: dict[str, Shape] = {
    "gpt2": gpt2(12, 768, 12),
    "gpt2-medium": gpt2(24, 1024, 16),
    "gpt2-large": gpt2(36, 1280, 20),
    "gpt2-xl": gpt2(48, 1600, 25),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, **_OLD),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, **_OLD),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, **_OLD),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, context=131072),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, context=131072, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, context=131072, tied=True),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, vocabulary=32000),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, vocabulary=32000, experts=8, experts_used=2),
    "mixtral-8x22b": _llama(56, 6144, 48, 8, 16384, vocabulary=32768, experts=8, experts_used=2),
    "qwen2.5-0.5b": _llama(24, 896, 14, 2, 4864, **_QWEN2_SMALL),
    "qwen2.5-1.5b": _llama(28, 1536, 12, 2, 8960, **_QWEN2_SMALL),
    "qwen2.5-3b": _llama(36, 2048, 16, 2, 11008, **_QWEN2_SMALL),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, **_QWEN2),
    "qwen2.5-14b": _llama(48, 5120, 40, 8, 13824, **_QWEN2),
    "qwen2.5-32b": _llama(64, 5120, 40, 8, 27648, **_QWEN2),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, **_QWEN2),
    "qwen3-0.6b": _llama(28, 1024, 16, 8, 3072, **_QWEN3, tied=True),
    "qwen3-1.7b": _llama(28, 2048, 16, 8, 6144, **_QWEN3, tied=True),
    "qwen3-4b": _llama(36, 2560, 32, 8, 9728, **_QWEN3, tied=True),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12288, **_QWEN3),
    "qwen3-14b": _llama(40, 5120, 40, 8, 17408, **_QWEN3),
    "qwen3-32b": _llama(64, 5120, 64, 8, 25600, **_QWEN3),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 768, **_QWEN3, experts=128, experts_used=8),
    "gemma-2b": _llama(18, 2048, 8, 1, 16384, **_GEMMA),
    "gemma-7b": _llama(28, 3072, 16, 16, 24576, **_GEMMA),
    "gemma-2-2b": _llama(26, 2304, 8, 4, 9216, **_GEMMA2),
    "gemma-2-9b": _llama(42, 3584, 16, 8, 14336, **_GEMMA2),
    "gemma-2-27b": _llama(46, 4608, 32, 16, 36864, **{**_GEMMA2, "head_size": 128}),
    "phi-3-mini": _llama(32, 3072, 32, 32, 8192, vocabulary=32064, context=4096, joint_qkv=True),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, **_SMOL),
    "smollm2-360m": _llama(32, 960, 15, 5, 2560, **_SMOL),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, **_SMOL),
    "tinyllama-1.1b": _llama(22, 2048, 32, 4, 5632, vocabulary=32000, context=2048),
}


def known(name: str) -> Shape | None:
    """A size by its name: 'Llama-3 8B' and 'llama_3_8b' are 'llama-3-8b'."""
    plain = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    plain = plain.replace("llama3", "llama-3").replace("llama-3.1-", "llama-3-").replace("qwen-", "qwen")
    return SIZES.get(plain) or SIZES.get(plain.replace("qwen2-", "qwen2.5-"))
