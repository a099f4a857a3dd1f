"""Classes of transformers that a config.json is planned as, and what their forward is given on meta.

What a class takes follows from the signature of its forward. Labels have the shape that its kind of head has.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fullshard.errors import OptionError

META = torch.device("meta")
SAMPLES = 160_000  # of a recording: ten seconds at 16 kHz
_CHOICES = 2
# In the name of a class: one label for a sequence, an image or a recording.
_ONE_LABEL = ("Classification", "MultipleChoice", "NextSentencePrediction")
_PER_TOKEN = ("TokenClassification", "AudioFrameClassification")
_ITEMS = {"pixel_values": "images", "input_values": "recordings", "input_features": "recordings"}


@dataclass(frozen=True)
class Kind:
    """A config, and how much one rank gets of what its model reads."""

    transformers: Any
    config: Any
    count: int
    length: int

    @property
    def text(self) -> Any:
        return getattr(self.config, "text_config", None) or self.config

    @property
    def vision(self) -> Any:
        return getattr(self.config, "vision_config", None) or self.config


@dataclass(frozen=True)
class Head:
    """A class that transformers builds. `tested`: of a family whose models are known to run on meta."""

    builder: Any
    text_only: bool = False  # of a model of images and text: fine-tuned on text
    tested: bool = False
    without_loss: bool = False  # its own reads values, or it has none

    @property
    def name(self) -> str:
        return str(self.builder.__name__)

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.builder.forward).parameters

    @property
    def reads_tokens(self) -> bool:
        return self._reads == "input_ids"

    @property
    def item(self) -> str:
        return _ITEMS.get(self._reads, "items")

    @property
    def _reads(self) -> str:
        """What its batch is counted in."""
        main = str(getattr(self.builder, "main_input_name", "input_ids"))
        return "input_ids" if "input_ids" in self.takes else main

    def sees(self) -> bool:
        """Whether it is given images. In a language model, where they stand depends on its tokens: it is
        planned on text alone, if it can be."""
        takes = self.takes
        if "pixel_values" not in takes:
            return False
        if takes["pixel_values"].default is inspect.Parameter.empty or "input_ids" not in takes:
            return True
        main = self.builder.main_input_name
        return not self.text_only and ("return_loss" in takes or main == "pixel_values")

    def inputs(self, kind: Kind) -> dict[str, Any]:
        """Of one rank's forward."""
        found: dict[str, Any] = {}
        takes = self.takes
        if "input_ids" in takes:
            shape = (_CHOICES, kind.length) if "MultipleChoice" in self.name else (kind.length,)
            found["input_ids"] = _tokens(kind.count, *shape)
        if self.sees():
            found["pixel_values"] = _images(kind.vision, kind.count)
        if "input_values" in takes:
            found["input_values"] = _waves(kind.config, kind.count)
        if "input_features" in takes and "input_ids" not in takes:
            found["input_features"] = _spectra(kind.config, kind.count)
        decodes = getattr(kind.config, "is_encoder_decoder", False)
        if decodes and "decoder_input_ids" in takes:
            most = getattr(kind.config, "max_target_positions", None) or kind.length
            found["decoder_input_ids"] = _tokens(kind.count, min(kind.length, most))
        if not self.without_loss:
            found |= self._labels(kind, found)
        return found

    def run(self, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
        """The loss, and all that is returned. Without a loss the mean of the output stands for it."""
        out = model(**inputs)
        loss = getattr(out, "loss", None)
        if isinstance(loss, Tensor) and not self.without_loss:
            return (loss if loss.dim() == 0 else loss.float().mean()), out
        if not self.without_loss:
            raise OptionError(f"{self.name} returns no loss", "Give FILE.py:FUNCTION.")
        values = [v for v in tree_leaves(_parts(out)) if isinstance(v, Tensor) and v.requires_grad]
        if not values:
            raise OptionError(f"{self.name} returns nothing that is trained", "Give FILE.py:FUNCTION.")
        return values[0].float().mean(), out

    def _labels(self, kind: Kind, inputs: Mapping[str, Any]) -> dict[str, Any]:
        takes, found = self.takes, dict[str, Any]()
        if "return_loss" in takes:
            found["return_loss"] = True
        if "start_positions" in takes:
            return found | {name: _tokens(kind.count) for name in ("start_positions", "end_positions")}
        if "labels" in takes:
            found["labels"] = self._label(kind, inputs)
        if "next_sentence_label" in takes:
            found["next_sentence_label"] = _tokens(kind.count)
        return found

    def _label(self, kind: Kind, inputs: Mapping[str, Any]) -> Tensor:
        one = any(word in self.name for word in _ONE_LABEL) and not any(w in self.name for w in _PER_TOKEN)
        if one:
            return _class_labels(kind.config, kind.count, is_class="Classification" in self.name)
        if "Segmentation" in self.name and "pixel_values" in inputs:
            return _tokens(kind.count, *inputs["pixel_values"].shape[-2:])
        text = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        return _tokens(kind.count, kind.length) if text is None else _tokens(*text.shape)


def _parts(out: Any) -> Any:
    return tuple(out.values()) if isinstance(out, Mapping) else out


def _tokens(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.long, device=META)


def _class_labels(config: Any, count: int, is_class: bool) -> Tensor:
    """Numbers of classes; of a regression, or of several classes at once, real numbers."""
    how, num = getattr(config, "problem_type", None), getattr(config, "num_labels", 2)
    if is_class and how == "multi_label_classification":
        return torch.empty(count, num, device=META)
    if is_class and (how == "regression" or (how is None and num == 1)):
        return torch.empty(count, device=META) if num == 1 else torch.empty(count, num, device=META)
    return _tokens(count)


def _images(config: Any, count: int) -> Tensor:
    side = getattr(config, "image_size", None) or 224
    height, width = side if isinstance(side, tuple | list) else (side, side)
    return torch.empty(count, getattr(config, "num_channels", 3), height, width, device=META)


def _waves(config: Any, count: int) -> Tensor:
    """Of sound as it is sampled, or as a picture of its frequencies."""
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    return torch.empty(count, *((frames, bins) if bins and frames else (SAMPLES,)), device=META)


def _spectra(config: Any, count: int) -> Tensor:
    bins, frames = getattr(config, "num_mel_bins", 80), getattr(config, "max_source_positions", 1500)
    return torch.empty(count, bins, 2 * frames, device=META)


# ---- which class

_TESTED = (  # by the mapping of transformers that has the class of a config
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)
_OTHERS = ("MODEL_FOR_CTC_MAPPING",)


def families(kind: Kind) -> list[Head]:
    """Classes for this config that train on what such models are trained on, the usual one first."""
    found = []
    for mapping in (*_TESTED, *_OTHERS):
        known = getattr(kind.transformers, mapping, {})
        if type(kind.config) not in known:
            continue
        if mapping.startswith("MODEL_FOR_SEQ_TO_SEQ") and not kind.config.is_encoder_decoder:
            continue
        built = known[type(kind.config)]
        text_only = mapping == "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"
        found.append(Head(built[0] if isinstance(built, tuple) else built, text_only, mapping in _TESTED))
    return found


def ending(name: str) -> str:
    """'ForMaskedLM' of a class's name; '' if it has no such part."""
    return name[name.rfind("For") :] if "For" in name else ""


def named(kind: Kind, name: str) -> Head | None:
    """The class of this name, if transformers has it and it is built from such a config."""
    builder = getattr(kind.transformers, name, None)
    if not (inspect.isclass(builder) and issubclass(builder, nn.Module)):
        return None
    config_class = getattr(builder, "config_class", None)
    fits = inspect.isclass(config_class) and isinstance(kind.config, config_class)
    return Head(builder) if fits else None
