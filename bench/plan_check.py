"""The predictions of `fullshard plan` beside what CUDA allocates: a few presets with few layers, one device.

    python bench/plan_check.py                    # a world of one
    python bench/plan_check.py --transformers     # transformers' own models of the same dimensions
    python bench/plan_check.py --ranks 8          # one rank of a simulated cluster
    python bench/plan_check.py --offload host     # values at rest in host memory
    python bench/plan_check.py --device cpu --sizes smollm2-135m --sequence 128   # does it run at all

The measured model is the planner's own decoder with values, or with --transformers the real one; then there
are two predictions, by the size's name and by a config.json. The loop keeps the model's output, as users'
loops do. Predicted and measured are peaks of allocated memory (torch.cuda.max_memory_allocated), everything
at rest included.
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
from fullshard.planning.offloading import Request
from fullshard.planning.sizes import SIZES, Shape
from fullshard.planning.subjects import Batch, Subject, decoder, hugging_face

CASES = [("zero3", False), ("zero3", True), ("zero2", False), ("replicate", False)]


def config(shape: Shape) -> dict[str, Any]:
    """Of Llama's and Qwen3's kind."""
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.size_of_head,
        "intermediate_size": shape.feed,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "use_cache": False,
    }


def transformers_model(shape: Shape) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = AutoConfig.for_model(**config(shape))
    model: nn.Module = AutoModelForCausalLM.from_config(kind, dtype=torch.float32)
    return model


@contextlib.contextmanager
def cluster(count: int, device: torch.device) -> Iterator[None]:
    """One rank of `count`, with a network on which nothing takes time worth naming."""
    if count == 1:
        yield
        return
    from fullshard.planning.network import Link, Network
    from fullshard.tools.simulation.group import Cluster, joined

    with joined(Cluster(Network(count, Link(1e12, 1e-6)), device, 0)):
        yield


def measured(shape: Shape, strategy: str, recompute: bool, said: argparse.Namespace) -> int:
    device = torch.device(said.device)
    with cluster(said.ranks, device), device:
        torch.manual_seed(0)
        table = replace(shape, context=said.sequence)
        model = transformers_model(shape).train() if said.transformers else Decoder(table)
        fs.shard(
            model,
            strategy=strategy,
            precision="bf16",
            checkpoint_activations=recompute,
            offload=said.offload,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        tokens = torch.randint(0, shape.vocabulary, (said.batch, said.sequence + (not said.transformers)))
        out: Any = None
        for step in range(4):
            if step == 2 and device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            out = model(input_ids=tokens, labels=tokens) if said.transformers else model(tokens)
            (out.loss if said.transformers else out[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    del model, optimizer, tokens, out
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return peak


def predicted(subject: Subject, said: argparse.Namespace) -> list[Need]:
    """By case; what needs no recomputation is one trace."""
    found: dict[tuple[str, bool], Need] = {}
    for again in (False, True):
        question = Question(
            ranks=said.ranks,
            memory_bytes=2**50,
            strategies=tuple(strategy for strategy, recompute in CASES if recompute == again),
            recompute=again,
            on_gpu=said.device != "cpu",
            offload=None if said.offload is None else Request(said.offload),
        )
        found |= {(need.strategy, again): need for need in answer(subject, question).needs}
    return [found[case] for case in CASES]


def compare(name: str, said: argparse.Namespace) -> None:
    shape, batch = replace(SIZES[name], layers=said.layers), Batch(said.batch, said.sequence)
    plans = [predicted(decoder(name, shape, batch), said)]
    if said.transformers:
        plans.append(predicted(hugging_face(name, config(shape), batch), said))
    for position, (strategy, recompute) in enumerate(CASES):
        peak = measured(shape, strategy, recompute, said)
        cells = [f"{name:<16}{strategy:<11}{'yes' if recompute else 'no':<7}{peak / 2**20:9.0f}"]
        for plan in plans:
            ratio = f"{plan[position].peak / peak:7.3f}" if peak else "      -"
            cells.append(f"{plan[position].peak / 2**20:11.0f}{ratio}")
        print("".join(cells), "", plans[0][position].moment, flush=True)


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
    parser.add_argument("--offload", choices=["host", "optimizer"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transformers", action="store_true", help="Llama-like sizes only")
    said = parser.parse_args()
    print(
        f"{said.layers} layers, {said.ranks} ranks, {said.batch} x {said.sequence} tokens, bf16, AdamW; MiB"
    )
    by_config = f"{'by config':>11}{'ratio':>7}" if said.transformers else ""
    head = f"{'size':<16}{'strategy':<11}{'again':<7}{'measured':>9}{'by name':>11}{'ratio':>7}{by_config}"
    print(f"{head}  worst moment")
    for name in said.sizes:
        compare(name, said)


if __name__ == "__main__":
    main()
