"""Models to simulate by name: two plain families in several sizes; pure."""

from __future__ import annotations

from dataclasses import replace

from fullshard.planning.sizes import Shape, gpt2


def gpt(layers: int, width: int, heads: int, vocabulary: int, context: int = 1024) -> Shape:
    """Of GPT-2's family, on torch's own kernels."""
    return replace(gpt2(layers, width, heads, vocabulary, context), fused=True)


# One vocabulary for a family, so that sizes can be compared.
PRESETS = {
    "gpt-8m": gpt(8, 256, 4, 8192, 256),  # for a CPU
    "gpt-124m": gpt(12, 768, 12, 50304),
    "gpt-350m": gpt(24, 1024, 16, 50304),
    "llama-1b": Shape(16, 2048, 32, 8, 8192, 32000, 4096, fused=True),
    "llama-8b": Shape(32, 4096, 32, 8, 14336, 32000, 4096, fused=True),
    "llama-13b": Shape(40, 5120, 40, 40, 13824, 32000, 4096, fused=True),
    "llama-70b": Shape(80, 8192, 64, 8, 28672, 32000, 4096, fused=True),
}


def describe(shape: Shape) -> str:
    count = shape.num_parameters
    shown = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    return f"{shown} parameters, {shape.layers} layers of width {shape.width}"
