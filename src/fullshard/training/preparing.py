"""All that is done and checked before ranks are started: config, texts, tokens, model, output folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import OptionError
from fullshard.extras import need
from fullshard.training import models
from fullshard.training.folder import RunFolder
from fullshard.training.settings import Settings, fixed_values, uses_bytes
from fullshard.training.texts import Fields, find_files
from fullshard.training.tokenizers import Bytes, HuggingFace, Tokenizer
from fullshard.training.tokens import Row, Sequences, read, row_of, split
from fullshard.training.trackers import need_trackers


@dataclass(frozen=True)
class Prepared:
    """Everything that a rank needs in addition to the settings."""

    tokenizer: Tokenizer
    train: Row
    validation: Row | None
    fixed: Mapping[str, Any]

    def rows(self) -> dict[str, str | None]:
        """For ranks on this machine, so that they need not read the texts again."""
        return {
            "train": str(self.train.folder),
            "validation": None if self.validation is None else str(self.validation.folder),
        }

    def sequences(self, settings: Settings) -> tuple[Sequences, Sequences | None]:
        """Those to train on, and those to validate with."""
        length, fraction = settings.training.sequence_length, settings.data.validation_fraction
        if self.validation is None:
            return split(self.train, length, fraction)
        return split(self.train, length, 0.0)[0], split(self.validation, length, 0.0)[0]


def prepare(settings: Settings, rows: Mapping[str, str | None] | None = None) -> Prepared:
    """Check everything that needs no rank, and tokenize the texts. Nothing of a run changes."""
    folder = RunFolder(settings.output)
    folder.refuse_strangers()
    if settings.logging.tensorboard:
        need_tensorboard()
    need_trackers(settings)
    fingerprint = models.fingerprint(settings)  # first: a missing config is reported before other problems
    tokenizer = make_tokenizer(settings)
    if rows is None:
        train, validation = _rows(settings, tokenizer, settings.data.cache or folder.tokens)
    else:
        train, other = read(Path(str(rows["train"]))), rows["validation"]
        validation = None if other is None else read(Path(other))
    _check_lengths(settings, train, validation)
    fixed = fixed_values(settings) | fingerprint
    fixed["data.tokenizer"] = tokenizer.fingerprint[:24]
    fixed["data.train"] = f"texts of key {train.key}"
    fixed["data.validation"] = None if validation is None else f"texts of key {validation.key}"
    return Prepared(tokenizer, train, validation, fixed)


def need_tensorboard() -> Any:
    """torch's writer, which needs the tensorboard library."""
    need("tensorboard", "train")
    return need("torch.utils.tensorboard", "train").SummaryWriter


def make_tokenizer(settings: Settings) -> Tokenizer:
    if uses_bytes(settings):
        return Bytes()
    tokenizer = settings.data.tokenizer
    if tokenizer is None:
        assert settings.model.path is not None
        return HuggingFace(settings.model.path, "model.path")
    if not tokenizer.exists():
        raise OptionError(
            f"'data.tokenizer': there is no {str(tokenizer)!r}", "Give a folder, a tokenizer.json, or bytes."
        )
    return HuggingFace(tokenizer, "data.tokenizer")


def _rows(settings: Settings, tokenizer: Tokenizer, cache: Path) -> tuple[Row, Row | None]:
    data = settings.data
    fields = Fields(data.text, data.prompt, data.completion)
    train = find_files(data.train, "data.train", settings.output)
    validation = find_files(data.validation, "data.validation", settings.output) if data.validation else []
    if both := set(train) & set(validation):
        raise OptionError(
            f"{str(min(both))!r} is in 'data.train' and 'data.validation'; the loss is to be of other text",
            "Name it in one of them; validation_fraction takes a part of data.train.",
        )
    row = row_of(train, fields, tokenizer, cache)
    return row, row_of(validation, fields, tokenizer, cache) if validation else None


def _check_lengths(settings: Settings, train: Row, validation: Row | None) -> None:
    length = settings.training.sequence_length
    for key, row in (("data.train", train), ("data.validation", validation)):
        if row is None:
            continue
        if row.num_tokens - row.num_documents <= 0:
            raise OptionError(f"the files of {key!r} hold no text", "Name files with text in them.")
        if row.num_tokens <= length:
            raise OptionError(
                f"the files of {key!r} hold {row.num_tokens} tokens, fewer than one sequence of {length} and "
                "the token after it",
                "Give more text, or a smaller training.sequence_length.",
            )
    if validation is None and not len(split(train, length, settings.data.validation_fraction)[0]):
        raise OptionError(
            f"'data.validation_fraction' is {settings.data.validation_fraction}, which leaves nothing of "
            "'data.train' to train on",
            "Give a smaller part, or more text.",
        )


def choose_device(settings: Settings, local_ranks: int) -> torch.device:
    """A GPU for each rank of this machine, or the CPU; requested GPUs must exist."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if settings.device == "cuda" and gpus < local_ranks:
        raise OptionError(
            f"'device' is cuda, and there are {gpus} GPUs here for {local_ranks} ranks",
            "Start fewer ranks, or set device: cpu.",
        )
    return torch.device("cuda" if settings.device != "cpu" and gpus >= local_ranks else "cpu")
