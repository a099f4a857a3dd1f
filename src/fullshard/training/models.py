"""The model that is trained: the built-in GPT, or a causal language model of a local Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.checkpoint.tools.paths import identify
from fullshard.errors import CheckpointError, OptionError
from fullshard.extras import need
from fullshard.training.gpt import GPT, GPTConfig, Initialiser
from fullshard.training.settings import Settings


@dataclass(frozen=True)
class Subject:
    """A model before it is sharded, and how it is used. `weights`: what it is to begin with."""

    model: nn.Module  # on the meta device
    materialize: Callable[[nn.Module], Any] | None
    shape: GPTConfig | None  # None: a model of transformers'
    vocabulary: int
    context: int | None
    weights: Path | None
    num_parameters: int  # counted before it is sharded

    @property
    def name(self) -> str:
        return "built-in GPT" if self.shape is not None else type(self.model).__name__

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """Scores for the token after each one."""
        output = model(tokens) if self.shape is not None else model(input_ids=tokens, use_cache=False)
        return output.logits  # type: ignore[no-any-return]


def build(settings: Settings, num_tokens: int) -> Subject:
    """The model, on the meta device, and every check that needs no rank."""
    with torch.device("meta"):
        subject = _gpt(settings, num_tokens) if settings.model.gpt is not None else _hugging_face(settings)
    length = settings.training.sequence_length
    if subject.vocabulary < num_tokens:
        raise OptionError(
            f"the tokenizer has {num_tokens} tokens and the model {subject.vocabulary}",
            "Give data.tokenizer the model's own, or model.gpt.vocabulary a larger number.",
        )
    if subject.context is not None and length > subject.context:
        raise OptionError(
            f"'training.sequence_length' is {length}, and the model's longest sequence is {subject.context}",
            "Give a smaller one.",
        )
    return subject


def _gpt(settings: Settings, num_tokens: int) -> Subject:
    assert settings.model.gpt is not None
    try:
        shape = settings.model.gpt.shape(settings.training.sequence_length, num_tokens)
    except OptionError as error:
        raise OptionError(f"'model.gpt': {error.what}", error.remedy) from None
    model = GPT(shape)
    fill = Initialiser(model, settings.seed)
    return Subject(model, fill, shape, shape.vocabulary, shape.context, _weights(settings), _count(model))


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _weights(settings: Settings) -> Path | None:
    """The checkpoint to begin with, if it is one."""
    key = "model.path" if settings.model.path is not None else "model.weights"
    path = settings.model.path or settings.model.weights
    if path is None:
        return None
    try:
        kind = identify(path).kind
    except CheckpointError as error:
        raise OptionError(f"{key!r}: {error.what}", error.remedy) from None
    if kind not in ("checkpoint", "model", "dcp"):
        raise OptionError(
            f"{key!r}: {str(path)!r} holds no weights",
            "Give a folder with safetensors files, or one of fs.save.",
        )
    return path


def config_file(settings: Settings) -> Path | None:
    """The config.json of a model of transformers'."""
    path, key = settings.model.config, "model.config"
    if settings.model.path is not None:
        path, key = settings.model.path / "config.json", "model.path"
    if path is not None and path.is_dir():
        path = path / "config.json"
    if path is not None and not path.is_file():
        raise OptionError(f"{key!r}: there is no {str(path)!r}", "Give a local folder or a config.json.")
    return path


def fingerprint(settings: Settings) -> dict[str, str]:
    """Of a model's own config, what must not change while a run goes on."""
    path = config_file(settings)
    if path is None:
        return {}
    key = "model.path" if settings.model.path is not None else "model.config"
    return {key: f"a config.json of SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"}


def _hugging_face(settings: Settings) -> Subject:
    model = _of_config(settings)
    inner = model.config.get_text_config()
    context = getattr(inner, "max_position_embeddings", None) or 0
    context = context if context > 0 else None  # XLNet's -1: no limit
    return Subject(model, None, None, int(inner.vocab_size), context, _weights(settings), _count(model))


def on_host(settings: Settings) -> nn.Module:
    """A model of transformers' with its first values, whole: for those that their `__init__` alone gives."""
    with torch.device("cpu"):
        return _of_config(settings)  # type: ignore[no-any-return]


def _of_config(settings: Settings) -> Any:
    transformers = need("transformers", "hf")
    file = config_file(settings)
    assert file is not None
    config = _read_config(transformers, file)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError:
        raise OptionError(
            f"{str(file)!r} is of a {config.model_type!r} model, which transformers "
            f"{transformers.__version__} does not know as a causal language model",
            "Give a model that writes text, such as one of Llama's kind.",
        ) from None
    generation = file.parent / "generation_config.json"
    if settings.model.path is not None and generation.is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(str(file.parent))
    return model


def _read_config(transformers: Any, file: Path) -> Any:
    try:
        said = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(f"{str(file)!r} cannot be read as JSON: {error}", "Mend it.") from None
    kind = said.get("model_type") if isinstance(said, dict) else None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise OptionError(
            f"{str(file)!r} is of an unknown architecture: model_type is {kind!r}",
            f"transformers {transformers.__version__} does not have it; code from the folder is not run.",
        )
    try:
        return transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except Exception as error:  # whatever that library raises for values that do not fit
        reason = str(error).strip().partition("\n")[0][:200]
        raise OptionError(f"{str(file)!r} cannot be used: {reason}", "Mend it.") from error
