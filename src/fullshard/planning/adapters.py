"""LoRA and QLoRA: a meta model with low-rank adapters on its Linears and a frozen, perhaps 4-bit, base.

The base has neither gradients nor optimizer state nor fp32 masters; only the adapters train, in fp32. With
nf4 a Linear's weight takes half a byte per element, and its scales are kept by every rank: one byte for each
block of 64 elements, and four bytes for each 256 of those bytes (double quantisation). The head, embeddings
and norms are not quantised. A quantised weight exists in the compute dtype too while it is multiplied with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import OptionError

ALL, ATTENTION = "all-linear", "attention"
BASE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "nf4": None}
BLOCK, NESTED = 64, 256  # elements that share a scale; scales that share a scale of their own
# Names of transformers, and those of the decoder that is planned for a size.
_OWN = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "out",
    "qkv_proj": "joint",
    "c_attn": "joint",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
_IN_ATTENTION = ("attn", "attention")


@dataclass(frozen=True)
class Adapters:
    """A request: the rank of the adapters, the Linears that have them, and how the base is held."""

    rank: int
    targets: str = ALL
    base_dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise OptionError(f"--lora is {self.rank}", "Give the rank of the adapters, for example 16.")
        if self.base_dtype not in BASE_DTYPES:
            raise OptionError(
                f"--base-dtype is {self.base_dtype!r}", f"Choose one of {', '.join(BASE_DTYPES)}."
            )

    def attach(self, model: nn.Module, compute: torch.dtype | None) -> int:
        """Change a meta model in place; returns how many parameters it had."""
        count = sum(parameter.numel() for parameter in model.parameters())
        linears = dict(_linears(model))
        chosen = self._chosen(linears)
        held = BASE_DTYPES[self.base_dtype] or compute or torch.float32
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(held)
        for name, linear in linears.items():
            base = _Quantized(linear) if self.base_dtype == "nf4" else linear
            _replace(model, name, _Adapted(base, *_widths(linear), self.rank) if name in chosen else base)
        return count

    def _chosen(self, linears: dict[str, nn.Module]) -> set[str]:
        if self.targets == ALL:
            return set(linears)
        if self.targets == ATTENTION:
            chosen = {name for name in linears if any(word in name for word in _IN_ATTENTION)}
            if not chosen:
                raise self._nothing(ATTENTION, linears)
            return chosen
        chosen = set()
        for target in filter(None, (word.strip() for word in self.targets.split(","))):
            names = {target, _OWN.get(target, target)}
            found = {name for name in linears if name.rpartition(".")[2] in names or name in names}
            if not found:
                raise self._nothing(target, linears)
            chosen |= found
        if not chosen:
            raise self._nothing(self.targets, linears)
        return chosen

    def _nothing(self, target: str, linears: dict[str, nn.Module]) -> OptionError:
        last = sorted({name.rpartition(".")[2] for name in linears})
        near = get_close_matches(target, last, 1)
        meant = f"Did you mean {near[0]}? " if near else ""
        return OptionError(
            f"the model has no Linear for --lora-targets {target}",
            f"{meant}Choose {ALL}, {ATTENTION}, or from {', '.join(last) or 'none: it has no Linear'}.",
        )


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linears but the head, by name. The head is the last module that maps to the vocabulary."""
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in model.named_modules():
        if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
            _, width = _widths(module)
            if not (width in vocabularies and "." not in name):
                yield name, module


def _widths(linear: nn.Module) -> tuple[int, int]:
    """Of its input and output. The Conv1D of GPT-2 in transformers holds its matrix transposed."""
    weight: Any = linear.weight
    out, into = weight.shape if isinstance(linear, nn.Linear) else weight.shape[::-1]
    return int(into), int(out)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


class _Adapted(nn.Module):
    def __init__(self, base: nn.Module, into: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = base
        with torch.device("meta"):
            self.down = nn.Linear(into, rank, bias=False, dtype=torch.float32)
            self.up = nn.Linear(rank, out, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x)) * 2.0
        return out


class _Quantized(nn.Module):
    """A Linear in nf4: two elements per byte; scales and their scales are buffers."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.into, self.out = _widths(linear)
        blocks = -(-self.into * self.out // BLOCK)
        with torch.device("meta"):
            self.weight = nn.Parameter(
                torch.empty(-(-self.into * self.out // 2), dtype=torch.uint8), requires_grad=False
            )
            self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8))
            self.register_buffer("scales_of_scales", torch.empty(-(-blocks // NESTED)))
        self.bias: Any = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Dequantized.apply(x, self.weight, self.out)  # type: ignore[no-untyped-call, unused-ignore]
        return out if self.bias is None else out + self.bias


class _Dequantized(torch.autograd.Function):
    """A product with a weight that exists in the compute dtype only meanwhile, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape = (out, x.shape[-1])
        return F.linear(x, x.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ gradient.new_empty(ctx.shape), None, None
