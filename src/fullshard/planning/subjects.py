"""Models to plan, built on meta: a well-known size, or a Hugging Face config.json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

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


def as_units_get(batch: Any, model: nn.Module) -> Any:
    """A batch in the compute dtype of a model, as the engine casts it."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, batch)


def _described(batch: Batch, length: int) -> str:
    return f"{batch.sequences} x {length} tokens per rank"


@cache
def decoder(name: str, shape: Shape, batch: Batch) -> Subject:
    """The same object for the same request: what is traced of it is kept."""
    length = _length(batch, shape.context)
    if not shape.gpt2:
        shape = replace(shape, context=length)  # its table of positions is as long as a sequence

    def run(model: nn.Module) -> tuple[Tensor, Any]:
        out = model(torch.empty(batch.sequences, length + 1, dtype=torch.long, device=META))
        return out if isinstance(out, Tensor) else out[0], out  # a fused one returns the loss alone

    build = partial(_on_meta, partial(Decoder, shape), shape.context, length)
    tokens = batch.sequences * length
    return Subject(name, build, run, _described(batch, length), _OWN_DECODER, tokens)


def hugging_face(name: str, config: dict[str, Any], batch: Batch) -> Subject:
    return _hugging_face(name, json.dumps(config), batch)


@cache
def _hugging_face(name: str, text: str, batch: Batch) -> Subject:
    config = json.loads(text)
    transformers = need_library("transformers", "hf")
    kind = _config(transformers, config)
    family = _family(transformers, kind, config)
    text_config = getattr(kind, "text_config", None) or kind
    positions = getattr(text_config, "max_position_embeddings", None) or getattr(kind, "n_positions", 0) or 0
    context = positions if positions > 0 else 4096  # XLNet's -1: no limit
    length = _length(batch, context)

    def build() -> nn.Module:
        model: nn.Module = getattr(transformers, family.builder).from_config(kind, dtype=torch.float32)
        return model

    def run(model: nn.Module) -> tuple[Tensor, Any]:
        with _no_packed_sequences():
            out = model(**as_units_get(family.inputs(kind, batch.sequences, length), model))
        return out.loss, out

    traced = f"the model that transformers {transformers.__version__} builds"
    built = partial(_on_meta, build, context, length)
    if not family.reads_tokens:
        about = f"{batch.sequences} {family.item} per rank"
        return Subject(name, partial(_on_meta, build, length, length), run, about, traced)
    return Subject(name, built, run, _described(batch, length), traced, batch.sequences * length)


def _tokens(count: int, length: int) -> Tensor:
    return torch.empty(count, length, dtype=torch.long, device=META)


def _text(_kind: Any, count: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(count, length), "labels": _tokens(count, length)}


def _translations(_kind: Any, count: int, length: int) -> dict[str, Tensor]:
    return {name: _tokens(count, length) for name in ("input_ids", "decoder_input_ids", "labels")}


def _images(kind: Any, count: int, _length: int) -> dict[str, Tensor]:
    side = getattr(kind, "image_size", None) or 224
    height, width = side if isinstance(side, tuple | list) else (side, side)
    pixels = torch.empty(count, getattr(kind, "num_channels", 3), height, width, device=META)
    return {"pixel_values": pixels, "labels": torch.empty(count, dtype=torch.long, device=META)}


def _sounds(kind: Any, count: int, length: int) -> dict[str, Tensor]:
    frames = torch.empty(count, kind.num_mel_bins, 2 * kind.max_source_positions, device=META)
    words = _tokens(count, min(length, kind.max_target_positions))
    return {"input_features": frames, "decoder_input_ids": words, "labels": words}


@dataclass(frozen=True)
class _Family:
    """A kind of models that transformers builds, and what it is trained on."""

    mapping: str
    builder: str
    inputs: Callable[[Any, int, int], dict[str, Tensor]]
    word: str = ""  # in the name of an architecture that is of this kind
    item: str = "sequences"
    reads_tokens: bool = True


_SPEECH = "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"
_IMAGES = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", "AutoModelForImageClassification"
_FAMILIES = (
    _Family("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM", _text, "ForMaskedLM"),
    _Family(*_SPEECH, _sounds, item="recordings", reads_tokens=False),
    _Family("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM", _translations),
    _Family("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM", _text),
    _Family("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText", _text),
    _Family("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM", _text),
    _Family(*_IMAGES, _images, item="images", reads_tokens=False),
)


def _family(transformers: Any, kind: Any, config: dict[str, Any]) -> _Family:
    architectures = config.get("architectures") or [""]
    for family in _FAMILIES:
        known = getattr(transformers, family.mapping, {})
        named = any(family.word in str(name) for name in architectures)
        if type(kind) in known and named:
            if family.mapping.startswith("MODEL_FOR_SEQ_TO_SEQ") and not kind.is_encoder_decoder:
                continue
            return family
    raise OptionError(
        f"{config['model_type']!r} is no model of text, images or speech that transformers can train",
        "Give FILE.py:FUNCTION, a function that returns (model, batch).",
    )


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
    kind.use_cache = False
    return kind


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@contextmanager
def _no_packed_sequences() -> Iterator[None]:
    """transformers searches positions for packed sequences and masks for hidden tokens: these have no values.

    A mask of our own would be worse: with one, keys and values are copied for every head that shares them.
    """
    masks = sys.modules.get("transformers.masking_utils")
    answers = {
        "find_packed_sequence_indices": lambda *_: None,
        "fast_all": lambda *_: True,
    }  # nothing is hidden
    before = {name: getattr(masks, name) for name in answers if hasattr(masks, name)}
    if masks is not None:
        vars(masks).update({name: answers[name] for name in before})
    try:
        yield
    finally:
        if masks is not None:
            vars(masks).update(before)


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
