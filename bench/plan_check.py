"""What `fullshard plan` predicts beside what CUDA allocates: a few presets with few layers, one device.

    python bench/plan_check.py                    # a world of one
    python bench/plan_check.py --ranks 8          # one rank of a simulated cluster
    python bench/plan_check.py --device cpu --sizes smollm2-135m --sequence 128   # does it run at all

The measured model is planning's own decoder with values, or with --transformers the real one. Predicted and
measured are peaks of allocated memory (torch.cuda.max_memory_allocated), everything at rest included.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import fullshard as fs
from fullshard.planning.answers import Question, answer
from fullshard.planning.decoder import Decoder
from fullshard.planning.needs import Need
from fullshard.planning.sizes import SIZES, Shape
from fullshard.planning.subjects import Batch, _decoder

CASES = [("zero3", False), ("zero3", True), ("zero2", False), ("replicate", False)]


def fill(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name == "bias":
            parameter.data.zero_()
        elif parameter.dim() > 1:
            parameter.data.normal_(std=0.02)
        else:
            parameter.data.fill_(1.0)


def transformers_model(shape: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.size_of_head,
        intermediate_size=shape.feed,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@contextlib.contextmanager
def cluster(count: int, device: torch.device) -> Iterator[None]:
    """One rank of `count`, with a network on which nothing takes time worth naming."""
    if count == 1:
        yield
        return
    from fullshard.simulation.group import Cluster, joined
    from fullshard.simulation.network import Link, Network

    with joined(Cluster(Network(count, Link(1e12, 1e-6)), device, 0)):
        yield


def measured(shape: Shape, strategy: str, recompute: bool, said: argparse.Namespace) -> int:
    device = torch.device(said.device)
    with cluster(said.ranks, device), device:
        torch.manual_seed(0)
        model = transformers_model(shape) if said.transformers else Decoder(shape)
        if not said.transformers:
            model.apply(fill)
        fs.shard(model, strategy=strategy, precision="bf16", checkpoint_activations=recompute)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        tokens = torch.randint(0, shape.vocabulary, (said.batch, said.sequence))
        for step in range(4):
            if step == 2 and device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            loss: Any = model(input_ids=tokens, labels=tokens) if said.transformers else model(tokens)
            (loss.loss if said.transformers else loss).backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    del model, optimizer, tokens
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return peak


def predicted(shape: Shape, strategy: str, recompute: bool, said: argparse.Namespace) -> Need:
    question = Question(
        ranks=said.ranks,
        memory_bytes=2**50,
        strategies=(strategy,),
        recompute=recompute,
        on_gpu=said.device != "cpu",
    )
    return answer(_decoder("decoder", shape, Batch(said.batch, said.sequence)), question).needs[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", default=["smollm2-360m", "llama-3.2-1b", "llama-3-8b", "qwen3-4b"]
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transformers", action="store_true", help="Llama-like sizes only")
    said = parser.parse_args()
    print(
        f"{said.layers} layers, {said.ranks} ranks, {said.batch} x {said.sequence} tokens, bf16, AdamW; MiB"
    )
    print(
        f"{'size':<16}{'strategy':<11}{'again':<7}{'predicted':>10}{'measured':>10}{'ratio':>7}  worst moment"
    )
    for name in said.sizes:
        shape = replace(SIZES[name], layers=said.layers)
        for strategy, recompute in CASES:
            planned = predicted(shape, strategy, recompute, said)
            peak = measured(shape, strategy, recompute, said)
            ratio = f"{planned.peak / peak:7.3f}" if peak else "      -"
            row = f"{name:<16}{strategy:<11}{'yes' if recompute else 'no':<7}"
            print(
                f"{row}{planned.peak / 2**20:10.0f}{peak / 2**20:10.0f}{ratio}  {planned.moment}", flush=True
            )


if __name__ == "__main__":
    main()
