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
from fullshard.planning.failures import Source, in_one_line
from fullshard.planning.heads import Head, Kind, ending, families, named
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
    source: Source = "size"
    note: str = ""  # how what is traced differs from what was asked for


def find(name: str, batch: Batch) -> Subject:
    """A model by a known name, or by the path of a config.json or its folder."""
    if batch.sequences < 1 or (batch.length is not None and batch.length < 2):
        tokens = "" if batch.length is None else f" of {batch.length} tokens"
        raise OptionError(f"{batch.sequences} sequences{tokens}", "Give at least 1 sequence of 2 tokens.")
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
    if file.suffix == ".py":
        raise OptionError(
            f"{name!r} names no function", f"Give {name}:FUNCTION, a function that returns (model, batch)."
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


def _described(batch: Batch, length: int, with_images: bool = False) -> str:
    return f"{batch.sequences} x {length} tokens {'and an image each ' * with_images}per rank"


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
    text_config = getattr(kind, "text_config", None) or kind
    positions = getattr(text_config, "max_position_embeddings", None) or getattr(kind, "n_positions", 0) or 0
    context = positions if positions > 0 else 4096  # XLNet's -1: no limit
    length = _length(batch, context)
    asked = Kind(transformers, kind, batch.sequences, length)
    architectures = config.get("architectures") or []
    head, why = _head(asked, architectures if isinstance(architectures, list) else [architectures])

    def run(model: nn.Module) -> tuple[Tensor, Any]:
        with no_searches():
            return head.run(model, as_units_get(head.inputs(asked), model))

    traced = f"the {head.name} that transformers {transformers.__version__} builds"
    if head.without_loss:
        traced += ", with the mean of its output for the loss"
    built = partial(_on_meta, partial(_built, head, kind), context if head.reads_tokens else length, length)
    note = f"{why}: {head.name} is planned instead." if why else ""
    if not head.reads_tokens:
        about = f"{batch.sequences} {head.item} per rank"
        return Subject(name, built, run, about, traced, source="config", note=note)
    about, tokens = _described(batch, length, head.sees()), batch.sequences * length
    return Subject(name, built, run, about, traced, tokens, "config", note)


def _built(head: Head, kind: Any) -> nn.Module:
    model: nn.Module = head.builder._from_config(kind, dtype=torch.float32)
    return model


def _head(asked: Kind, architectures: list[Any]) -> tuple[Head, str]:
    """The class that the config names, if transformers has it and it runs on meta; else one for its kind of
    model, and why."""
    usual, why = families(asked), ""
    for name in map(str, architectures):
        head = named(asked, name)
        if head is None:
            problem = f"transformers {asked.transformers.__version__} has no class {name} for it"
        else:
            runs, problem = _that_runs(
                asked, next((one for one in usual if one.builder is head.builder), head)
            )
            if runs is not None:
                return runs, ""
            problem = f"a step of that cannot be traced on the meta device ({problem})"
        why = why or f"The config names {name}, and {problem}"
    ends = {ending(str(name)) for name in architectures}
    for head in sorted(usual, key=lambda one: ending(one.name) not in ends):
        runs, problem = _that_runs(asked, head)
        if runs is not None:
            return runs, why
        why = why or f"a step of {head.name} cannot be traced on the meta device ({problem})"
    what = why or f"transformers trains no {asked.config.model_type!r} model on text, images or speech"
    raise OptionError(what, "Give FILE.py:FUNCTION, a function that returns (model, batch).")


def _that_runs(asked: Kind, head: Head) -> tuple[Head | None, str]:
    """This head if its forward runs on meta; else without its loss, which may read values; else why not."""
    if head.tested:
        return head, ""
    problem = ""
    for one in dict.fromkeys((head, replace(head, without_loss=True))):
        try:
            model = _made(partial(_built, one, asked.config))
            with no_searches():
                one.run(model, one.inputs(asked))
        except Exception as error:  # noqa: BLE001  # each class fails in its own way, and another is tried
            problem = problem or in_one_line(error)
        else:
            return one, ""
    return None, problem


def _config(transformers: Any, config: dict[str, Any]) -> Any:
    model_type, builder = config["model_type"], "Give FILE.py:FUNCTION, a function that builds the model."
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
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
        raise OptionError(f"the config is refused: {in_one_line(error)}", "Check the config.") from error
    kind.use_cache = False
    if getattr(kind, "pad_token_id", None) is None and "SequenceClassification" in str(
        config.get("architectures")
    ):
        kind.pad_token_id = 0  # without one, a batch of several sequences is refused
    if hasattr(kind, "apply_spec_augment"):
        kind.apply_spec_augment = False  # writes where a random mask is true
        kind.layerdrop = 0.0  # every layer: some random ones would be left out
    return kind


@contextmanager
def no_searches() -> Iterator[None]:
    """transformers searches positions for packed sequences, masks for hidden tokens and tokens for padding:
    these have no values.

    A mask of our own would be worse: with one, keys and values are copied for every head that shares them.
    """
    masks = sys.modules.get("transformers.masking_utils")
    models = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (masks, "find_packed_sequence_indices", lambda *_, **__: None),
        (masks, "fast_all", lambda *_, **__: True),  # nothing is hidden
        (models, "warn_if_padding_and_no_attention_mask", lambda *_, **__: None),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in answers if hasattr(owner, name)]
    for owner, name, instead in answers:
        if hasattr(owner, name):
            setattr(owner, name, instead)
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


class _WithoutValues(TorchFunctionMode):
    """Initialisers do nothing: on meta torch computes shapes in Python, which takes most of a build."""

    FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.FILLS and args and args[0].is_meta:
            return args[0]
        return func(*args, **kwargs or {})


def _made(build: Callable[[], nn.Module]) -> nn.Module:
    with META, _WithoutValues():
        return build().to(META).train()  # XLNet makes torch.FloatTensors, which are the host's in any case


def _on_meta(build: Callable[[], nn.Module], context: int, length: int) -> nn.Module:
    try:
        model = _made(build)
    except FullshardError:
        raise
    except Exception as error:  # a config with values that do not go together
        raise OptionError(f"the model cannot be built: {in_one_line(error)}", "Check the config.") from error
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if length > context and any(context <= rows <= context + 2 for rows in tables):  # OPT has two rows more
        # Learned positions: without values no operator would notice an index past the end.
        raise OptionError(
            f"the model has positions for {context} tokens, not for {length}", "Give a smaller --sequence."
        )
    return model
