"""What is planned: a well-known size, or a Hugging Face config.json; built on meta."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import FullshardError, OptionError
from fullshard.extras import need as need_library
from fullshard.planning.decoder import Decoder
from fullshard.planning.sizes import SIZES, Shape, from_config, known

META = torch.device("meta")


@dataclass(frozen=True)
class Batch:
    """Of one rank and one micro-batch: sequences, and tokens of each."""

    sequences: int = 1
    length: int | None = None  # None: the model's context, 4096 at most


@dataclass(frozen=True)
class Subject:
    """A model on meta that can be built again, and its loss on a batch of one rank."""

    name: str
    build: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module], Tensor]
    batch: str


def find(name: str, batch: Batch) -> Subject:
    """A model by a known name, or by the path of a config.json or its folder."""
    if batch.sequences < 1 or (batch.length is not None and batch.length < 2):
        raise OptionError(
            f"{batch.sequences} sequences of {batch.length} tokens", "Give at least 1 sequence of 2 tokens."
        )
    shape, path = known(name), Path(name)
    if shape is not None and not path.exists():
        return _decoder(name, shape, batch)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        near = get_close_matches(name.lower(), SIZES, 1, 0.5)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise OptionError(
            f"there is no model {name!r}",
            f"{meant}Give a size that `fullshard plan --list` shows, a config.json or its folder, or "
            "FILE.py:FUNCTION.",
        )
    config = _read(file)
    shape = from_config(config)
    return _hugging_face(str(path), config, batch) if shape is None else _decoder(str(path), shape, batch)


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{str(file)!r} cannot be read: {error}", "Give a config.json as transformers writes it."
        ) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise OptionError(
            f"{str(file)!r} names no model_type", "Give a config.json as transformers writes it."
        )
    return config


def _length(batch: Batch, context: int) -> int:
    return batch.length or min(context, 4096)


def _said(batch: Batch, length: int) -> str:
    return f"{batch.sequences} x {length} tokens a rank"


def _decoder(name: str, shape: Shape, batch: Batch) -> Subject:
    length = _length(batch, shape.context)
    if length > shape.context and shape.gpt2:
        raise OptionError(
            f"{name} has positions for {shape.context} tokens, not for {length}", "Give a smaller --sequence."
        )

    def loss_of(model: nn.Module) -> Tensor:
        loss: Tensor = model(torch.empty(batch.sequences, length, dtype=torch.long, device=META))
        return loss

    return Subject(name, lambda: _on_meta(lambda: Decoder(shape)), loss_of, _said(batch, length))


def _hugging_face(name: str, config: dict[str, Any], batch: Batch) -> Subject:
    transformers = need_library("transformers", "hf")
    try:
        kind = transformers.AutoConfig.for_model(**config)
        kind.use_cache = False
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"transformers {transformers.__version__} knows no model_type {config['model_type']!r}",
            "Give FILE.py:FUNCTION, a function that builds the model.",
        ) from error
    length = _length(batch, getattr(kind, "max_position_embeddings", None) or 4096)

    def build() -> nn.Module:
        try:
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.float32)
        except ValueError as error:
            raise OptionError(
                f"{config['model_type']!r} is no causal language model that transformers can build: {error}",
                "Give FILE.py:FUNCTION, a function that builds the model.",
            ) from error
        return model

    def loss_of(model: nn.Module) -> Tensor:
        tokens = torch.empty(batch.sequences, length, dtype=torch.long, device=META)
        with _no_packed_sequences():
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    return Subject(name, lambda: _on_meta(build), loss_of, _said(batch, length))


@contextmanager
def _no_packed_sequences() -> Iterator[None]:
    """Without a mask transformers looks into the positions for packed sequences, and these have no values.

    A mask of our own would be worse: with one, keys and values are copied for every head that shares them.
    """
    masks = sys.modules.get("transformers.masking_utils")
    look = getattr(masks, "find_packed_sequence_indices", None)
    if look is not None:
        vars(masks)["find_packed_sequence_indices"] = lambda *_: None
    try:
        yield
    finally:
        if look is not None:
            vars(masks)["find_packed_sequence_indices"] = look


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with META:
            return build().train()
    except FullshardError:
        raise
    except Exception as error:  # a config with values that do not go together
        raise OptionError(
            f"the model cannot be built: {type(error).__name__}: {error}", "Check the config."
        ) from error
