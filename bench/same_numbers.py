"""Does a change of the code change a number? Records a table of runs, and compares two recordings bit by bit.

    python bench/same_numbers.py record before.json --source /path/to/old/src
    python bench/same_numbers.py record after.json
    python bench/same_numbers.py compare before.json after.json

A row of the table is a model, a strategy, a precision, a number of ranks and what else the run does. Every
row trains for a few steps and notes, on each rank, losses and gradient norms as hexadecimal floats, and at
the end SHA-256 digests of whole parameters, buffers, the state of the random generator and the tensors that
fs.save writes, the optimizer's among them. Only the public face is used, so the inside may move.
`--only TEXT` records the rows whose name contains TEXT, and those whose checkpoints they load. Plans are
recorded as text: a difference there is reported, and is no failure.

Ranks are processes that are started once for each number of ranks and go through all rows of that number,
each with a process group of its own. A row that raises has the error as its result.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

STEPS = 4
CLIP = 0.5
VOCABULARY = 61  # odd, so that cuts fall inside rows
COUNTS = (2, 4, 3, 1)  # in this order; a row may load the checkpoints of rows before it
TIMEOUT_S = 60  # of a collective: only a row that goes wrong on one rank alone needs it
LIMIT_S = 900  # of all rows of one number of ranks
PLAN = "plan"  # keys that begin so may differ

Batch = dict[str, Any]
Notes = dict[str, str]
Result = dict[str, Any]  # {what: its value, or a list of values where ranks differ}

# --- models -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))))


class Gpt(nn.Module):
    """A stack of blocks between an embedding and a head, which may be one."""

    def __init__(
        self,
        width: int = 32,
        blocks: int = 4,
        vocabulary: int = VOCABULARY,
        tied: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Stage(nn.Module):
    """Blocks in a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class Nested(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.stages = nn.ModuleList(Stage(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(x)
        return logits


class Twice(nn.Module):
    """Calls its first block again after the others."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Mixture(nn.Module):
    """Experts of which a batch uses two, and a layer that some batches skip."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.experts = nn.ModuleList(Block(width) for _ in range(4))
        self.optional, self.head = nn.Linear(width, width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, path: int) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.experts[path % 4](x) + self.experts[(path + 1) % 4](x)
        if path % 3:
            x = x + self.optional(x)
        logits: Tensor = self.head(x)
        return logits


class Adapted(nn.Module):
    """A frozen Linear with a trainable low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 8)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return y


def _adapted() -> nn.Module:
    model = Gpt().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


class Convolutions(nn.Module):
    """Convolutions with BatchNorm, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
            for _ in range(3)
        )
        self.head = nn.Linear(12, 5)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = x + layer(x)
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Odd(nn.Module):
    """Parameters of several dtypes, some with fewer elements than there are ranks, one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.narrow = nn.Linear(7, 7, dtype=torch.bfloat16)
        self.unused, self.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y = y + self.narrow(y.to(self.narrow.weight.dtype)).to(y.dtype) + self.empty.sum().to(y.dtype)
        score: Tensor = self.last(y).double() * self.scale
        return score


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))  # with its dropout


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(10_000 + seed)


def _tokens(seed: int) -> Batch:
    return {"tokens": torch.randint(3, VOCABULARY, (2, 9), generator=_generator(seed))}


def _tokens_and_path(seed: int) -> Batch:
    return {**_tokens(seed), "path": seed}


def _tokens_and_labels(seed: int) -> Batch:
    tokens = _tokens(seed)["tokens"]
    return {"input_ids": tokens, "labels": tokens}


def _images(seed: int) -> Batch:
    images = torch.randn(4, 3, 8, 8, generator=_generator(seed))
    return {"images": images.contiguous(memory_format=torch.channels_last)}


def _rows(seed: int) -> Batch:
    return {"x": torch.randn(6, 5, generator=_generator(seed))}


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(**batch)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _image_class(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(**batch).float(), torch.arange(4))


def _mean_square(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = (model(**batch) - 1).square().mean()
    return loss


@dataclass(frozen=True)
class Model:
    """How to build a model, a batch for a seed, the loss, and which units to ask for (None: find them)."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch] = _tokens
    loss: Callable[[nn.Module, Batch], Tensor] = _next_token
    units: Any = None


def _named(*names: str) -> Callable[[nn.Module], bool]:
    return lambda module: type(module).__name__ in names


_WIDE = functools.partial(Gpt, width=160, blocks=6)  # 7 MB: blocks are found, and merged
_LARGE_TIED = functools.partial(Gpt, vocabulary=34_003, width=128, blocks=2, tied=True)  # a unit of its own

MODELS = {
    "gpt": Model(Gpt, units=Block),
    "found": Model(Gpt),
    "wide": Model(_WIDE),
    "tied": Model(functools.partial(Gpt, tied=True), units=Block),
    "large-tied": Model(_LARGE_TIED),
    "dropout": Model(functools.partial(Gpt, dropout=0.2), units=Block),
    "halves": Model(lambda: Gpt().bfloat16(), units=Block),
    "nested": Model(Nested, units=(Stage, Block)),
    "nested-wide": Model(functools.partial(Nested, width=256)),
    "twice": Model(Twice, units=Block),
    "mixture": Model(Mixture, _tokens_and_path, units=Block),
    "mixture-found": Model(Mixture, _tokens_and_path),
    "adapted": Model(_adapted, units=Block),
    "convolutions": Model(Convolutions, _images, _image_class, nn.Sequential),
    "odd": Model(Odd, _rows, _mean_square),
    "llama": Model(_llama, _tokens_and_labels, _own_loss, _named("LlamaDecoderLayer")),
    "llama-meta": Model(
        functools.partial(_on_meta, _llama), _tokens_and_labels, _own_loss, _named("LlamaDecoderLayer")
    ),
    "gpt2": Model(_gpt2, _tokens_and_labels, _own_loss, _named("GPT2Block")),
    "t5": Model(_t5, _tokens_and_labels, _own_loss, _named("T5Block")),
    "wide-meta": Model(functools.partial(_on_meta, _WIDE)),
}

# --- the table ----------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {  # extras that are options of fs.shard
    "recompute": {"checkpoint_activations": True},
    "keep-none": {"keep_full": 0},
    "keep-some": {"keep_full": 40_000},
    "keep-all": {"keep_full": "all"},
    "no-prefetch": {"prefetch": False},
    "scatter": {"reduce": "scatter"},
    "exchange": {"reduce": "exchange"},
    "verify": {"initial": "verify"},
    "check": {"check_gradients": True},
    "ignore": {"ignore": ("norm", "*.norm_mlp.bias")},
}
LOOPS = {  # extras that are something the loop does
    "accumulate": "two micro-batches a step, the first inside fs.accumulate",
    "micro": "two micro-batches a step, and nothing said",
    "evaluate": "a forward without gradients between steps",
    "evaluate-inside": "a forward without gradients between forward and backward",
    "edit": "parameters are changed inside fs.full after the second step",
    "even": "fs.even_batches, where odd ranks have fewer batches",
    "copy": "a deepcopy after the second step, which trains beside the original",
    "inference": "fs.inference between steps",
    "inference-none": "the same, and no memory to keep anything full",
    "generate": "generate between steps",
    "sgd": "SGD with momentum, and a schedule",
    "optimizer-first": "the optimizer is built before fs.shard",
    "overflow": "a loss scale that overflows at first",
    "zeros": "zero_grad keeps gradients, as zeros",
    "alone": "no process group is there before fs.shard",
    "background": "fs.save in the background while a step runs",
    "parts": "fs.save to a file a rank",
    "halved": "fs.save in bf16",
    "fsdp2": "by fullshard.torch_fsdp.fully_shard",
    "fsdp1": "by fullshard.torch_fsdp.FullyShardedDataParallel",
}


@dataclass(frozen=True)
class Row:
    """One run. `loads` is the name of another, whose checkpoint this one goes on from."""

    model: str
    strategy: str
    precision: str
    ranks: int
    extras: tuple[str, ...] = ()
    mesh: tuple[int, int] | None = None
    loads: str = ""

    @property
    def name(self) -> str:
        parts = [self.model, self.strategy, self.precision, f"x{self.ranks}", *self.extras]
        if self.mesh is not None:
            parts.append(f"mesh-{self.mesh[0]}-{self.mesh[1]}")
        return " ".join(parts) + (f" from [{self.loads}]" if self.loads else "")

    @property
    def folder(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]


# Each line: model, strategy, precision, ranks, extras. "zero3-nodes" is on two nodes, or those of the mesh.
_TABLE = """
gpt replicate fp32 1 2 4
gpt zero1 fp32 1 2 3
gpt zero2 fp32 2 4
gpt zero3 fp32 1 2 3 4
gpt zero3 fp32 3 keep-none
gpt hybrid fp32 4
gpt zero3-nodes fp32 4
gpt zero3-nodes fp32 4 keep-none
gpt replicate bf16 2
gpt zero1 bf16 3
gpt zero3 bf16 3 keep-none
gpt hybrid bf16 4 keep-none
gpt zero3 fp16 2
gpt zero1 fp16 3 overflow
gpt replicate fp16 1 overflow
gpt replicate wire8 3
gpt zero2 wire8 4
gpt zero3 wire8 2 keep-none
gpt zero3-nodes wire8 4 keep-none
gpt zero1 gather8 4
gpt zero2 gather8 3
gpt zero3 gather8 2 keep-none
gpt zero3-nodes gather8 4 keep-none
gpt zero3 both8 3 accumulate
gpt zero3 forgetful8 2
gpt zero2 bf16-reduce 2
gpt zero3 fp32-wire 3
gpt replicate fp32 3 scatter
gpt zero1 fp32 2 scatter
gpt zero2 bf16 3 scatter
gpt zero3 fp32 4 scatter keep-none
gpt zero3 bf16 2 scatter
gpt zero3-nodes bf16 4 scatter
found zero3 fp32 3
found zero2 bf16 4
found zero3-nodes wire8 4
wide zero3 fp32 2
wide zero3 bf16 2 keep-none
wide zero2 fp32 3
wide zero3 gather8 2 recompute
tied zero3 fp32 2 keep-none
tied hybrid fp32 4
large-tied zero3 fp32 2
large-tied zero3 bf16 3 keep-none
dropout zero3 fp32 2 recompute
dropout zero3-nodes fp32 4 recompute
halves zero1 bf16 2
nested zero3 fp32 2 keep-none
nested zero2 bf16 3 recompute
nested-wide zero3 fp32 2
twice zero3 fp32 3 keep-none
twice zero3-nodes bf16 4 recompute
mixture zero3 fp32 2 keep-none
mixture zero3 bf16 3
mixture zero1 fp32 3 accumulate
mixture hybrid wire8 4
mixture-found zero2 fp32 2
adapted zero3 fp32 2 keep-none
adapted zero2 bf16 3
adapted zero3-nodes gather8 4
convolutions zero3 fp32 2
convolutions zero1 bf16 3
odd zero3 fp32 4
odd zero1 bf16 3
llama zero3 fp32 2
llama zero3 bf16 3 generate
llama-meta zero3 fp32 2 keep-none
llama-meta zero2 bf16 2
gpt2 zero3 fp32 3 recompute
t5 zero3 fp32 2 keep-none
t5 zero2 bf16 3
wide-meta zero3-nodes fp32 4
gpt zero3 fp32 2 accumulate
gpt zero1 fp32 4 accumulate
gpt replicate wire8 2 accumulate
gpt zero3-nodes fp32 4 accumulate
gpt zero3 bf16 3 micro
gpt zero3 bf16 2 keep-all
gpt zero3 fp32 3 keep-some
gpt zero3 fp32 2 no-prefetch
convolutions zero3 fp32 2 evaluate
gpt zero3 fp32 3 evaluate-inside keep-none
gpt zero3 fp32 2 edit
gpt zero1 bf16 3 edit
gpt zero3 fp32 2 even
gpt zero2 bf16 3 even
gpt hybrid fp32 4 even
gpt zero3 fp32 2 copy
tied zero3-nodes fp32 4 copy
gpt zero3 wire8 2 copy
gpt zero3 bf16 2 inference
gpt zero3 fp32 3 inference-none keep-none
gpt zero3 fp32 2 sgd
gpt zero1 bf16 3 sgd accumulate
gpt zero3 fp32 2 optimizer-first
gpt zero1 fp32 2 zeros
gpt zero2 fp32 2 verify
gpt zero3 fp32 3 check
gpt zero3 fp32 2 ignore
gpt zero3 fp32 1 alone
gpt zero2 bf16 1 alone recompute
gpt zero3 fp32 2 background
gpt zero2 bf16 3 parts
adapted zero3 fp32 2 halved
gpt zero3 fp32 2 fsdp2
gpt zero2 bf16 3 fsdp2 accumulate
gpt zero3 fp32 3 fsdp1
gpt zero2 bf16 2 fsdp1
"""
_MESHES = (
    Row("gpt", "hybrid", "fp32", 2, (), (2, 1)),
    Row("gpt", "zero3-nodes", "both8", 3, ("keep-none",), (1, 3)),
)
_LOADS = (  # a row with fresh values that goes on from another's checkpoint
    ("gpt zero3 fp32 x2", Row("gpt", "zero3", "fp32", 2)),
    ("gpt zero3 fp32 x2", Row("gpt", "zero2", "fp32", 4)),
    ("gpt zero3 fp32 x2", Row("gpt", "zero3", "bf16", 3, ("keep-none",))),
    ("gpt zero3 fp32 x2", Row("gpt", "replicate", "fp32", 1)),
    ("gpt zero3 wire8 x2 keep-none", Row("gpt", "zero3", "wire8", 2, ("keep-none",))),
    ("gpt zero3 fp32 x2 sgd", Row("found", "zero3-nodes", "fp32", 4, ("sgd",))),
    ("gpt zero3-nodes fp32 x4", Row("gpt", "zero1", "fp32", 3)),
    ("gpt hybrid fp32 x4", Row("gpt", "zero3-nodes", "bf16", 4)),
    ("gpt zero2 bf16 x3 parts", Row("found", "zero3", "bf16", 1)),
    ("tied hybrid fp32 x4", Row("tied", "zero3", "fp32", 3)),
    ("dropout zero3 fp32 x2 recompute", Row("dropout", "zero3", "fp32", 2)),
    ("llama zero3 fp32 x2", Row("llama-meta", "zero3", "fp32", 3)),
)


def table() -> list[Row]:
    """All rows, in the order in which they run."""
    rows = [row for line in _TABLE.split("\n") if line for row in _of_line(line)]
    rows += _MESHES
    for source, row in _LOADS:
        rows.append(Row(row.model, row.strategy, row.precision, row.ranks, row.extras, row.mesh, source))
    names = [row.name for row in rows]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    assert all(row.loads in names for row in rows if row.loads)
    return sorted(rows, key=lambda row: COUNTS.index(row.ranks))  # stable: the rest as it is written


def _of_line(line: str) -> Iterator[Row]:
    model, strategy, precision, *rest = line.split()
    extras = tuple(word for word in rest if not word.isdigit())
    unknown = [word for word in extras if word not in OPTIONS and word not in LOOPS]
    assert not unknown, f"{line}: {unknown}"
    for word in rest:
        if word.isdigit():
            yield Row(model, strategy, precision, int(word), extras)


def selected(only: str) -> list[Row]:
    """Rows whose name contains `only`, and rows whose checkpoints those load."""
    rows = table()
    wanted = {row.name for row in rows if only in row.name}
    wanted |= {row.loads for row in rows if row.name in wanted}
    return [row for row in rows if row.name in wanted]


def _precision(name: str) -> Any:
    import fullshard as fs

    half = torch.bfloat16
    return {
        "wire8": fs.Precision(compute=half, wire=torch.int8),
        "gather8": fs.Precision(compute=half, gather=torch.int8),
        "both8": fs.Precision(compute=half, gather=torch.int8, wire=torch.int8),
        "forgetful8": fs.Precision(compute=half, wire=torch.int8, error_feedback=False),
        "bf16-reduce": fs.Precision(compute=half, reduce=half, outputs=torch.float32),
        "fp32-wire": fs.Precision(compute=half, wire=torch.float32),
    }.get(name, name)


# --- one row on one rank ------------------------------------------------------------------------------


def digest(value: Tensor) -> str:
    """SHA-256 of dtype, shape and elements in logical order."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    found = hashlib.sha256(f"{value.dtype} {tuple(value.shape)} ".encode())
    found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return found.hexdigest()


def _hex(value: Any) -> str:
    return float(value).hex()


@dataclass
class Run:
    """A row while it runs on this rank."""

    row: Row
    rank: int
    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    scaler: Any = None
    prefix: str = ""  # of what is noted, for a copy
    notes: Notes = field(default_factory=dict)

    def has(self, extra: str) -> bool:
        return extra in self.row.extras

    def note(self, what: str, value: str) -> None:
        assert self.prefix + what not in self.notes, what
        self.notes[self.prefix + what] = value

    def batch(self, step: int, micro: int = 0) -> Batch:
        return MODELS[self.row.model].batch(97 * step + 13 * self.rank + 5 * micro)

    def loss(self, batch: Batch) -> Tensor:
        return MODELS[self.row.model].loss(self.model, batch)

    def step(self, step: int, first: Batch | None = None) -> None:
        micros = [self.batch(step) if first is None else first]
        if self.has("accumulate") or self.has("micro"):
            micros.append(self.batch(step, micro=1))
        for index, batch in enumerate(micros):
            with self._postponing(index + 1 < len(micros)):
                loss = self.loss(batch) / len(micros)
                if self.has("evaluate-inside"):
                    self._evaluate(f"step {step} inside {index}", self.batch(step, micro=7))
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            self.note(f"step {step} loss {index}", _hex(loss.item()))
        self._update(step)

    def _postponing(self, postpones: bool) -> contextlib.AbstractContextManager[Any]:
        import fullshard as fs

        if not (self.has("accumulate") and postpones) or self.has("fsdp2"):
            if self.has("accumulate") and self.has("fsdp2"):
                self.model.set_requires_gradient_sync(not postpones)  # type: ignore[operator]
            return contextlib.nullcontext()
        return fs.accumulate(self.model)

    def _update(self, step: int) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.has("fsdp1"):
            norm = self.model.clip_grad_norm_(CLIP)  # type: ignore[operator]
        else:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.note(f"step {step} norm", _hex(norm))
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.note(f"step {step} scale", _hex(self.scaler.get_scale()))
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=not self.has("zeros"))

    def _evaluate(self, what: str, batch: Batch) -> None:
        was = self.model.training
        self.model.eval()
        with torch.no_grad():
            self.note(f"{what} evaluation", _hex(self.loss(batch).item()))
        self.model.train(was)

    def between(self, step: int) -> None:
        """What the row does beside training, after a step."""
        import fullshard as fs

        if self.has("evaluate"):
            self._evaluate(f"step {step}", self.batch(step, micro=7))
        if self.has("inference") or self.has("inference-none"):
            with fs.inference(self.model, 0 if self.has("inference-none") else None):
                for count in range(1 + self.rank % 2):
                    self._evaluate(f"step {step} inference {count}", self.batch(step, micro=8 + count))
        if self.has("generate"):
            prompt = self.batch(step)["input_ids"][:1, : 3 + self.rank]
            text = self.model.generate(prompt, max_new_tokens=4, do_sample=False)  # type: ignore[operator]
            self.note(f"step {step} text", str(text.tolist()))
        if self.has("edit") and step == 1:
            with fs.full(self.model):
                for index, parameter in enumerate(self.model.parameters()):
                    with torch.no_grad():
                        parameter.mul_(1 + index / 64)
        if self.has("background") and step == 2:
            fs.save(self.folder / f"{self.row.folder}-early", self.model, self.optimizer, background=True)

    def finish(self) -> None:
        """Everything that is there after the last step."""
        import fullshard as fs

        self.note("random state", digest(torch.get_rng_state()))
        with fs.full(self.model, writeback=False):
            for name, parameter in sorted(self.model.named_parameters()):
                self.note(f"parameter {name}", digest(parameter))
        for name, buffer in sorted(self.model.named_buffers()):
            self.note(f"buffer {name}", digest(buffer))
        options: dict[str, Any] = {}
        if self.has("parts"):
            options["files"] = "parts"
        if self.has("halved"):
            options |= {"dtype": torch.bfloat16, "frozen": False}
        target = self.folder / (self.row.folder + self.prefix.strip())
        fs.save(target, self.model, self.optimizer, extra={"step": STEPS}, **options)
        if self.rank == 0:
            self._note_files("", target)
            if self.has("background"):
                self._note_files("early ", self.folder / f"{self.row.folder}-early")

    def _note_files(self, which: str, folder: Path) -> None:
        from safetensors.torch import load_file

        for file in sorted(folder.glob("*.safetensors")):
            self.note(f"{which}file {file.name}", hashlib.sha256(file.read_bytes()).hexdigest())
            for name, value in sorted(load_file(file).items()):
                self.note(f"{which}saved {file.name} {name}", digest(value))


def _new_optimizer(row: Row, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if "sgd" in row.extras:
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def _options(row: Row) -> dict[str, Any]:
    """Those of fs.shard."""
    options: dict[str, Any] = {
        "strategy": row.strategy.partition("-")[0],
        "precision": _precision(row.precision),
        "units": MODELS[row.model].units,
    }
    for extra in row.extras:
        options |= OPTIONS.get(extra, {})
    if options["strategy"] == "hybrid":
        shape = row.mesh or (2, row.ranks // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    if row.strategy == "zero3-nodes":
        shape = row.mesh or (2, row.ranks // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("node", "shard"))
    return options


def _build(row: Row, rank: int) -> nn.Module:
    """A model in train mode. Ranks start from different values, unless they must not."""
    torch.manual_seed(3 + (0 if "verify" in row.extras else rank))
    model = MODELS[row.model].build().train()
    torch.manual_seed(500 + rank)
    return model


def _start(row: Row, rank: int, folder: Path) -> Run:
    """The sharded model and all that trains it."""
    import fullshard as fs

    model = _build(row, rank)
    plans: Notes = {}
    if "fsdp2" in row.extras:
        _fully_shard(row, model)
    elif "fsdp1" in row.extras:
        model = _wrap(row, model)
    else:
        options = _options(row)
        planned = {
            k: v for k, v in options.items() if k in ("strategy", "precision", "units", "ignore", "keep_full")
        }
        plans[f"{PLAN} before"] = str(fs.plan(model, ranks=row.ranks, **planned))
    early = _new_optimizer(row, model) if "optimizer-first" in row.extras else None
    if plans:
        model = fs.shard(model, **options)
        plans[f"{PLAN} after"] = str(fs.plan(model))
    run = Run(row, rank, folder, model, early or _new_optimizer(row, model), notes=plans)
    if run.has("sgd"):
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)
    if row.precision == "fp16":
        run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (19 if run.has("overflow") else 8))
    return run


def _fully_shard(row: Row, model: nn.Module) -> None:
    from fullshard.torch_fsdp import MixedPrecisionPolicy, fully_shard

    half = torch.bfloat16 if row.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    said = {"mp_policy": policy, "reshard_after_forward": row.strategy == "zero3"}
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **said)
    fully_shard(model, **said)


def _wrap(row: Row, model: nn.Module) -> nn.Module:
    from fullshard.torch_fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from fullshard.torch_fsdp.wrap import transformer_auto_wrap_policy

    half = torch.bfloat16 if row.precision == "bf16" else None
    way = ShardingStrategy.FULL_SHARD if row.strategy == "zero3" else ShardingStrategy.SHARD_GRAD_OP
    wrapped: nn.Module = FullyShardedDataParallel(
        model,
        sharding_strategy=way,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=torch.float32),
        sync_module_states=True,
    )
    return wrapped


def _finish_door(run: Run) -> None:
    """As finish, by torch's own functions for state dicts."""
    run.note("random state", digest(torch.get_rng_state()))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name, value in sorted(get_model_state_dict(run.model, options=whole).items()):
        run.note(f"parameter {name}", digest(value))
    state = get_optimizer_state_dict(run.model, run.optimizer, options=whole).get("state", {})
    for name, held in sorted(state.items()):
        for key, value in sorted(held.items()):
            run.note(f"optimizer {name} {key}", digest(torch.as_tensor(value)))


def run_row(row: Row, rank: int, folder: Path) -> Notes:
    """All that this rank has to say about a row."""
    import fullshard as fs

    run = _start(row, rank, folder)
    first = 0
    if row.loads:
        source = next(each for each in table() if each.name == row.loads).folder
        first = int(fs.load(folder / source, run.model, run.optimizer)["step"])
        run.note("random state after load", digest(torch.get_rng_state()))
    if run.has("even"):
        batches = fs.even_batches([run.batch(step) for step in range(STEPS - rank % 2)], run.model)
        for step, batch in enumerate(batches):
            run.note(f"step {step} repeated", str(batches.repeated))
            run.step(step, batch)
    else:
        half = STEPS // 2 if run.has("copy") else STEPS
        for step in range(first, first + half):
            run.step(step)
            run.between(step)
        if run.has("copy"):
            _train_copy(run, half)
    (_finish_door if run.has("fsdp2") or run.has("fsdp1") else Run.finish)(run)
    return run.notes


def _train_copy(run: Run, first: int) -> None:
    """A copy, made between two steps, and the original take turns."""
    model = copy.deepcopy(run.model)
    twin = Run(run.row, run.rank, run.folder, model, _new_optimizer(run.row, model), prefix="copy ")
    for step in range(first, STEPS):
        twin.step(step + 50)
        run.step(step)
    twin.finish()
    run.notes |= twin.notes


# --- all rows of one number of ranks --------------------------------------------------------------------


def serve(rank: int, ranks: int, port: int, folder: Path, only: str) -> None:
    """A rank's process: every row of this number of ranks, one line of JSON each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    import fullshard as fs

    limit = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=LIMIT_S))
    with open(folder / f"notes-{ranks}-{rank}", "w") as out:
        for index, row in enumerate(r for r in selected(only) if r.ranks == ranks):
            random.seed(0)
            started = time.monotonic()
            if "alone" not in row.extras:
                prefixed = dist.PrefixStore(f"row-{index}", store)
                dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=ranks, timeout=limit)
            try:
                notes = run_row(row, rank, folder)
            except Exception as error:  # noqa: BLE001  it is what this row comes to
                lines = str(error).strip().splitlines() or [""]
                notes = {"error": f"{type(error).__name__}: {lines[0]}"}
            gc.collect()
            gc.freeze()  # modules and what else stays need not be looked at again
            if dist.is_initialized():
                dist.destroy_process_group()
            said = {"row": row.name, "notes": notes, "seconds": time.monotonic() - started}
            print(json.dumps(said), file=out, flush=True)
        print(json.dumps({"source": str(fs.__file__)}), file=out)
    if ranks > 1:  # the store is the first rank's: it stays until all are through
        store.set(f"through-{rank}", "yes")
        store.wait([f"through-{other}" for other in range(ranks)])
        if rank == 0:
            time.sleep(0.5)


def _run_ranks(ranks: int, folder: Path, only: str, environment: dict[str, str]) -> None:
    """Start the ranks, wait for them, and end those that do not come to an end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(ranks):
        said = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "serve", str(rank), str(ranks), str(port), str(folder), only]
        here = environment if ranks == 1 else environment | {k: str(v) for k, v in said.items()}
        processes.append(subprocess.Popen(command, env=here))
    deadline = time.monotonic() + LIMIT_S
    try:
        for rank, process in enumerate(processes):
            code = process.wait(max(1.0, deadline - time.monotonic()))
            if code:
                print(f"rank {rank} of {ranks} ended with exit code {code}", file=sys.stderr)
    except subprocess.TimeoutExpired:
        print(f"{ranks} ranks are not through after {LIMIT_S} s", file=sys.stderr)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _merged(said: Sequence[Notes]) -> Result:
    """One value for all ranks where they agree, or where only the first has one; else a list by rank."""
    merged: Result = {}
    for key in dict.fromkeys(key for notes in said for key in notes):
        values = [notes.get(key) for notes in said]
        found = {value for value in values if value is not None}
        one = len(found) == 1 and (values[0] is not None)
        merged[key] = found.pop() if one else values
    return merged


def record(out: Path, source: Path | None, only: str) -> None:
    """Run the rows and write what they come to."""
    rows, began = selected(only), time.monotonic()
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
    }
    environment["MKL_CBWR"] = "AVX2,STRICT"  # no number depends on where in memory an operand begins
    if source is not None:
        if not (source / "fullshard" / "__init__.py").exists():
            raise SystemExit(f"{source} has no package fullshard")
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(source.resolve()), *([before] if before else [])])
    recording: dict[str, Any] = {"torch": torch.__version__, "sources": [], "seconds": {}, "rows": {}}
    memory = Path("/dev/shm")  # fs.save flushes every file: a disk would take most of the time
    where = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="same-numbers-", dir=where) as name:
        for ranks in COUNTS:
            mine = [row for row in rows if row.ranks == ranks]
            if not mine:
                continue
            start = time.monotonic()
            _run_ranks(ranks, Path(name), only, environment)
            _collect(Path(name), ranks, recording)
            print(f"{len(mine)} rows on {ranks} ranks: {time.monotonic() - start:.0f} s", flush=True)
    out.write_text(json.dumps(recording, indent=1))
    errors = {name: row["error"] for name, row in recording["rows"].items() if "error" in row}
    print(f"{len(recording['rows'])} of {len(rows)} rows in {time.monotonic() - began:.0f} s, from", end=" ")
    print(*recording["sources"])
    for name, error in errors.items():
        print(f"error in {name}: {error}")


def _collect(folder: Path, ranks: int, recording: dict[str, Any]) -> None:
    by_rank = []
    for rank in range(ranks):
        file = folder / f"notes-{ranks}-{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        by_rank.append([json.loads(line) for line in lines])
    for said in zip(*by_rank, strict=False):
        if "source" in said[0]:
            recording["sources"] = sorted({*recording["sources"], *(each["source"] for each in said)})
            continue
        name = said[0]["row"]
        recording["rows"][name] = _merged([each["notes"] for each in said])
        recording["seconds"][name] = round(max(each["seconds"] for each in said), 2)


# --- two recordings -------------------------------------------------------------------------------------


def compare(a: Path, b: Path) -> bool:
    """Print how two recordings differ. True if no number does."""
    first, second = (json.loads(path.read_text()) for path in (a, b))
    for path, recording in ((a, first), (b, second)):
        print(f"{path}: {len(recording['rows'])} rows, torch {recording['torch']},", *recording["sources"])
    left, right = first["rows"], second["rows"]
    wrong, texts = 0, 0
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            wrong += 1
            print(f"{name}: only in {a if name in left else b}")
            continue
        keys = dict.fromkeys([*left[name], *right[name]])
        differing = [key for key in keys if left[name].get(key) != right[name].get(key)]
        numbers = [key for key in differing if not key.startswith(PLAN)]
        if len(numbers) < len(differing):
            texts += 1
            print(f"{name}: plan text differs")
        if numbers:
            wrong += 1
            print(f"{name}: {len(numbers)} of {len(keys)} values differ")
            for key in numbers[:6]:
                print(f"    {key}: {_shown(left[name].get(key))} | {_shown(right[name].get(key))}")
            if len(numbers) > 6:
                print(f"    and {len(numbers) - 6} more")
    errors = sum("error" in row for row in right.values())
    print(f"{wrong} rows differ, {texts} plan texts differ, {errors} rows of {b} are errors")
    return not wrong


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    is_digest = isinstance(value, str) and len(value) == 64 and " " not in value
    return value[:12] + ".." if is_digest else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the table and write what comes of it")
    recording.add_argument("out", type=Path)
    recording.add_argument("--source", type=Path, help="the src folder to take fullshard from")
    recording.add_argument("--only", default="", help="a part of the names of rows")
    comparing = commands.add_parser("compare", help="exit with 1 if a number of two recordings differs")
    comparing.add_argument("a", type=Path)
    comparing.add_argument("b", type=Path)
    commands.add_parser("rows", help="list the table")
    serving = commands.add_parser("serve", help="one rank; record starts these")
    for name, kind in (("rank", int), ("ranks", int), ("port", int), ("folder", Path), ("only", str)):
        serving.add_argument(name, type=kind)
    said = parser.parse_args()
    if said.command == "record":
        record(said.out, said.source, said.only)
    elif said.command == "compare":
        sys.exit(0 if compare(said.a, said.b) else 1)
    elif said.command == "rows":
        print(*(row.name for row in table()), sep="\n")
    else:
        serve(said.rank, said.ranks, said.port, said.folder, said.only)


if __name__ == "__main__":
    main()
