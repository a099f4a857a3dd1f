"""Runs of `fullshard train` on tiny models: their folders and configs, and what came of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

WORDS = ["the", "a", "small", "model", "trains", "reads", "writes", "and", "then", "every", "rank", "holds"]
GPT_MODEL = {"gpt": {"layers": 2, "heads": 2, "width": 16}}
STEPS, LENGTH, BATCH = 6, 16, 8


def write_texts(folder: Path, num_words: int = 900) -> list[Path]:
    """Two files of words, the same every time."""
    dice = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "a.txt", folder / "b.txt"]
    for file in files:
        words = [dice.choice(WORDS) for _ in range(num_words // 2)]
        file.write_text("\n".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9)) + "\n")
    return files


def write_config(folder: Path, **changes: Any) -> Path:
    """A config for a run of a few steps in OUTPUT `run` beside it; a section that is given is merged in."""
    config: dict[str, Any] = {
        "output": "run",
        "model": GPT_MODEL,
        "data": {"train": ["texts"], "validation_fraction": 0.1},
        "training": {
            "steps": STEPS,
            "sequence_length": LENGTH,
            "batch_size": BATCH,
            "learning_rate": 0.01,
            "warmup_steps": 2,
            # Far above Adam's own: where a gradient is zero but for rounding, Adam divides noise by noise.
            "eps": 1e-4,
        },
        "evaluation": {"every": 3, "sequences": 7},
        "checkpoints": {"every": 2, "keep_last": 2},
        "logging": {"tensorboard": False},
        "sample": {"tokens": 5},
        "device": "cpu",
    }
    for name, value in changes.items():
        merges = isinstance(value, dict) and isinstance(config.get(name), dict) and name != "model"
        config[name] = {**config[name], **value} if merges else value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(config: str, overrides: list[str]) -> int:
    """As one rank of those that `ranks.run` has started."""
    from fullshard.training.command import train as run

    return run(Path(config), overrides, None, True)


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    written, _, _ = (run / "metrics.jsonl").read_text().rpartition("\n")  # a run may be writing the next line
    lines = [json.loads(line) for line in written.splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path, kind: str = "train") -> list[float]:
    return [line["loss"] for line in metrics(run, kind)]


def write_tokenizer(folder: Path, texts: list[Path]) -> None:
    """A word tokenizer of transformers' kind, with an end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<end>"])
    inner.train([str(path) for path in texts], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")
    wrapped.save_pretrained(str(folder))


def write_llama(folder: Path, texts: list[Path]) -> None:
    """A tiny random Llama and its tokenizer, as from_pretrained reads them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).save_pretrained(str(folder))
    write_tokenizer(folder, texts)
