"""Models to plan, built on meta: a well-known size, or a Hugging Face config.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fullshard.errors import FullshardError, OptionError
from fullshard.extras import need as need_library
from fullshard.planning.decoder import Decoder
from fullshard.planning.sizes import SIZES, Shape, known
from fullshard.planning.tracing import Run

META = torch.device("meta")
_OWN_DECODER = "a decoder of these dimensions that computes as transformers does"


@dataclass(frozen=True)
class Batch:
    """Of one rank and one micro-batch: sequences, and tokens of each."""

    sequences: int = 1
    length: int | None = None  # None: the model's context, 4096 at most


@dataclass(frozen=True)
class Subject:
    """A model on meta that can be built again, and its forward on a batch of one rank."""

    name: str
    build: Callable[[], nn.Module]
    run: Run
    batch: str
    traced: str  # the model whose step is traced, in words
    tokens: int | None = None  # of one rank and step; None: not known


def find(name: str, batch: Batch) -> Subject:
    """A model by a known name, or by the path of a config.json or its folder."""
    if batch.sequences < 1 or (batch.length is not None and batch.length < 2):
        raise OptionError(
            f"{batch.sequences} sequences of {batch.length} tokens", "Give at least 1 sequence of 2 tokens."
        )
    shape, path = known(name), Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if shape is not None:
            return decoder(name, shape, batch)
        near = get_close_matches(name.lower(), SIZES, 1, 0.5)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise OptionError(
            f"there is no model {name!r}",
            f"{meant}Give a size that `fullshard plan --list` shows, a config.json or its folder, or "
            "FILE.py:FUNCTION.",
        )
    return hugging_face(str(path), _read(file), batch)


def _read(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(), object_hook=_plain)
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{str(file)!r} cannot be read: {error}", "Give a config.json as transformers writes it."
        ) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise OptionError(
            f"{str(file)!r} names no model_type", "Give a config.json as transformers writes it."
        )
    return config


def _plain(entry: dict[str, Any]) -> Any:
    """JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    value = entry.get("__float__")
    return float(value) if isinstance(value, str) and len(entry) == 1 else entry


def _length(batch: Batch, context: int) -> int:
    return batch.length or min(context, 4096)


def _described(batch: Batch, length: int) -> str:
    return f"{batch.sequences} x {length} tokens per rank"


def decoder(name: str, shape: Shape, batch: Batch) -> Subject:
    length = _length(batch, shape.context)
    if not shape.gpt2:
        shape = replace(shape, context=length)  # its table of positions is as long as a sequence

    def run(model: nn.Module) -> tuple[Tensor, Any]:
        out = model(torch.empty(batch.sequences, length + 1, dtype=torch.long, device=META))
        return out[0], out

    build = partial(_on_meta, partial(Decoder, shape), shape.context, length)
    tokens = batch.sequences * length
    return Subject(name, build, run, _described(batch, length), _OWN_DECODER, tokens)


def hugging_face(name: str, config: dict[str, Any], batch: Batch) -> Subject:
    transformers = need_library("transformers", "hf")
    kind = _config(transformers, config)
    positions = getattr(kind, "max_position_embeddings", None) or 0
    context = positions if positions > 0 else 4096  # XLNet's -1: no limit
    length = _length(batch, context)

    def build() -> nn.Module:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.float32)
        return model

    def run(model: nn.Module) -> tuple[Tensor, Any]:
        tokens = torch.empty(batch.sequences, length, dtype=torch.long, device=META)
        with _no_packed_sequences():
            out = model(input_ids=tokens, labels=tokens)
        return out.loss, out

    traced = f"the model that transformers {transformers.__version__} builds"
    built, tokens = partial(_on_meta, build, context, length), batch.sequences * length
    return Subject(name, built, run, _described(batch, length), traced, tokens)


def _config(transformers: Any, config: dict[str, Any]) -> Any:
    model_type, builder = config["model_type"], "Give FILE.py:FUNCTION, a function that builds the model."
    if model_type not in transformers.CONFIG_MAPPING:
        raise OptionError(
            f"transformers {transformers.__version__} knows no model_type {model_type!r}", builder
        )
    if config.get("quantization_config"):
        raise OptionError(
            "the config has a quantization_config, and only unquantized parameters are planned",
            "Leave it out to plan the training of all parameters.",
        )
    try:
        kind = transformers.AutoConfig.for_model(**config)
    except Exception as error:  # each of transformers' checks has its own class
        raise OptionError(f"the config is refused: {_in_one_line(error)}", "Check the config.") from error
    if type(kind) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise OptionError(f"{model_type!r} is no causal language model that transformers can build", builder)
    kind.use_cache = False
    return kind


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def _no_packed_sequences() -> Iterator[None]:
    """Without a mask transformers searches the positions for packed sequences, and these have no values.

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


class _WithoutValues(TorchFunctionMode):
    """Initialisers do nothing: on meta torch computes shapes in Python, which takes most of a build."""

    FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.FILLS and args and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs or {})


def _on_meta(build: Callable[[], nn.Module], context: int, length: int) -> nn.Module:
    try:
        with META, _WithoutValues():
            model = build().train()
    except FullshardError:
        raise
    except Exception as error:  # a config with values that do not go together
        raise OptionError(f"the model cannot be built: {_in_one_line(error)}", "Check the config.") from error
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if length > context and any(context <= rows <= context + 2 for rows in tables):  # OPT has two rows more
        # Learned positions: without values no operator would notice an index past the end.
        raise OptionError(
            f"the model has positions for {context} tokens, not for {length}", "Give a smaller --sequence."
        )
    return model
