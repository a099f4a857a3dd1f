"""The config file of a run as frozen dataclasses, and which values may not change in a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fullshard.errors import OptionError
from fullshard.extras import need
from fullshard.offload import Offload
from fullshard.option_table import TABLE, CheckpointActivations, Strategy
from fullshard.training.gpt import GPTConfig
from fullshard.training.schema import Source, apply_override, build


@dataclass(frozen=True)
class GPTSize:
    """The size of a built-in GPT. `context` is the sequence length unless it is given."""

    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int | None = None
    vocabulary: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rotary", "learned"] = "rotary"

    def shape(self, sequence_length: int, num_tokens: int) -> GPTConfig:
        return GPTConfig(
            num_layers=self.layers,
            num_heads=self.heads,
            width=self.width,
            context=sequence_length if self.context is None else self.context,
            vocabulary=num_tokens if self.vocabulary is None else self.vocabulary,
            norm=self.norm,
            positions=self.positions,
        )


@dataclass(frozen=True)
class Model:
    """What is trained: exactly one of `gpt`, `path` and `config`."""

    gpt: GPTSize | None = None
    path: Path | None = None
    config: Path | None = None
    weights: Path | None = None


@dataclass(frozen=True)
class Data:
    """The texts. Files that end in .jsonl hold one JSON object a line; all others are plain text."""

    train: tuple[Path, ...] = field(
        metadata={"purpose": "the files, globs or folders of the text to train on"}
    )
    validation: tuple[Path, ...] = ()
    validation_fraction: float = 0.05
    text: str = "text"
    prompt: str | None = None
    completion: str | None = None
    tokenizer: Path | None = None
    cache: Path | None = None


@dataclass(frozen=True)
class Training:
    """The steps, and how far each goes. Sizes of batches are of all ranks together."""

    steps: int = 1000
    sequence_length: int = 256
    batch_size: int | None = None
    batch_tokens: int | None = None
    micro_batch_size: int | None = None
    learning_rate: float = 3e-4
    final_learning_rate: float = 0.1
    warmup_steps: int | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = 1.0
    time_limit_s: float | None = None

    @property
    def warmup(self) -> int:
        """Steps; by default 100, and a tenth of a run of fewer than 100."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return 100 if self.steps >= 100 else self.steps // 10

    @property
    def sequences(self) -> int:
        """Of one step, all ranks together."""
        if self.batch_tokens is not None:
            return self.batch_tokens // self.sequence_length
        return 32 if self.batch_size is None else self.batch_size


@dataclass(frozen=True)
class Sharding:
    """Options of `fs.shard`."""

    strategy: Literal[Strategy, "auto"] = TABLE["strategy"].default
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    checkpoint_activations: CheckpointActivations = False
    offload: Literal["host", "optimizer", "auto"] | Offload | None = None
    state: Literal["exact", "8bit"] = "exact"


@dataclass(frozen=True)
class Evaluation:
    """How often, and on how many sequences at most, the validation loss is taken. 0 is never."""

    every: int = 100
    sequences: int = 256


@dataclass(frozen=True)
class Checkpoints:
    """How often to save, how many to keep, and the dtype of the final model's files."""

    every: int = 500
    keep_last: int = 2
    model_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


@dataclass(frozen=True)
class WandB:
    """A run of Weights & Biases. Without a name it has that of the output folder; `mode` as WANDB_MODE."""

    project: str = "fullshard"
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None


@dataclass(frozen=True)
class MLflow:
    """A run of MLflow. `tracking_uri` as MLFLOW_TRACKING_URI: a server, a database, or a folder."""

    tracking_uri: str | None = None
    experiment: str = "fullshard"
    name: str | None = None


@dataclass(frozen=True)
class Logging:
    """What is logged during training."""

    every: int = 1
    tensorboard: bool = True
    wandb: WandB | bool | None = None  # True: all by default
    mlflow: MLflow | bool | None = None


@dataclass(frozen=True)
class Sample:
    """The text that the trained model writes at the end. 0 tokens is none."""

    prompt: str = "\n"
    tokens: int = 200
    temperature: float = 0.7


@dataclass(frozen=True)
class Settings:
    """A config file."""

    output: Path = field(metadata={"purpose": "the folder that the run writes to"})
    model: Model = field(metadata={"purpose": "a section with gpt, path or config"})
    data: Data = field(metadata={"purpose": "a section with train, the files to train on"})
    training: Training = Training()
    sharding: Sharding = Sharding()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    logging: Logging = Logging()
    sample: Sample = Sample()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for reports and to be compared with another run's."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


# What decides which numbers a run goes through. A continuation with another value would be neither the old
# run nor a new one. Ranks, strategy, micro-batches, device, logging and the like may change at any time.
# Texts, tokenizer and a model's own config are compared by what is in them (see `preparing`), not by path.
_FIXED = (
    "model.gpt",
    "data.validation_fraction",
    "training.sequence_length",
    "training.sequences",
    "training.learning_rate",
    "training.final_learning_rate",
    "training.warmup",
    "training.schedule",
    "training.weight_decay",
    "training.betas",
    "training.eps",
    "training.clip",
    "sharding.precision",
    "seed",
)


_WRITTEN_AS = {"training.sequences": "training.batch_size", "training.warmup": "training.warmup_steps"}


def fixed_values(settings: Settings) -> dict[str, Any]:
    """By key, the values that must be the same when a run is resumed."""
    values: dict[str, Any] = {}
    for key in _FIXED:
        value: Any = settings
        for name in key.split("."):
            value = getattr(value, name)
        values[_WRITTEN_AS.get(key, key)] = _plain(
            dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        )
    if settings.training.schedule != "constant":
        values["training.steps"] = settings.training.steps
    return values


def load(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """Read a config file, put `--set` values over it, and check every value."""
    config = _read(path)
    for text in overrides:
        apply_override(config, text, _parse_yaml)
    settings = build(Settings, config, Source(str(path), path.resolve().parent))
    _check(settings, str(path))
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OptionError(f"there is no config file {str(path)!r}", "Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the config {str(path)!r}: {error}", "Give a YAML file.") from error
    config = _parse_yaml(text, str(path))
    if not isinstance(config, dict):
        kind = "is empty" if config is None else f"holds a {type(config).__name__}"
        raise OptionError(f"{path} {kind}", "A config is a mapping; `fullshard train --example` prints one.")
    return config


def uses_bytes(settings: Settings) -> bool:
    """Whether the tokens are bytes: by `data.tokenizer: bytes`, or where no tokenizer is given."""
    tokenizer = settings.data.tokenizer
    if tokenizer is None:
        return settings.model.path is None
    return tokenizer.name == "bytes" and not tokenizer.exists()


def _parse_yaml(text: str, name: str) -> Any:
    yaml = need("yaml", "cli")
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        _refuse_repeated(yaml, tree, name, set())
        return yaml.safe_load(text)
    except (ValueError, RecursionError) as error:  # a date that is none, or sections without end
        raise OptionError(f"{name} is not YAML: {error}", "Mend it, or put quotes around a text.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise OptionError(f"{name}{where} is not YAML: {problem}", "Mend it there.") from None


def _refuse_repeated(yaml: Any, node: Any, name: str, seen: set[int]) -> None:
    """A key that is given twice: the library would silently take the last value."""
    if node is None or id(node) in seen:  # a reference may lead back to where it stands
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated(yaml, item, name, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    keys: set[tuple[str, str]] = set()
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if (key.tag, key.value) in keys:
                line = key.start_mark.line + 1
                raise OptionError(f"{name}, line {line} gives {key.value!r} a second time", "Leave one out.")
            keys.add((key.tag, key.value))
        _refuse_repeated(yaml, value, name, seen)


def _check(settings: Settings, file: str) -> None:
    """Checks beyond the types."""
    model, data, training = settings.model, settings.data, settings.training
    kinds = [name for name in ("gpt", "path", "config") if getattr(model, name) is not None]
    if len(kinds) != 1:
        models = " and ".join(f"'model.{kind}'" for kind in kinds) or "no model"
        raise OptionError(
            f"{file} names {models}",
            "Give one of model.gpt (a built-in GPT), model.path (a Hugging Face folder) and model.config.",
        )
    if model.weights is not None and model.path is not None:
        raise OptionError(
            f"{file} gives both 'model.path' and 'model.weights'", "The folder of model.path has the weights."
        )
    if not data.train:
        raise OptionError(f"'data.train' in {file} is empty", "Name files, globs or folders.")
    if (data.prompt is None) != (data.completion is None):
        raise OptionError(
            f"{file} gives one of 'data.prompt' and 'data.completion'", "Give both fields, or neither."
        )
    if training.batch_size is not None and training.batch_tokens is not None:
        raise OptionError(f"{file} gives 'training.batch_size' and 'training.batch_tokens'", "Give one.")
    _check_numbers(settings, file)


def _check_numbers(settings: Settings, file: str) -> None:
    training = settings.training
    positive: dict[str, float | None] = {
        "training.steps": training.steps,
        "training.sequence_length": training.sequence_length,
        "training.batch_size": training.batch_size,
        "training.batch_tokens": training.batch_tokens,
        "training.micro_batch_size": training.micro_batch_size,
        "training.learning_rate": training.learning_rate,
        "training.eps": training.eps,
        "training.clip": training.clip,
        "training.time_limit_s": training.time_limit_s,
        "checkpoints.every": settings.checkpoints.every,
        "checkpoints.keep_last": settings.checkpoints.keep_last,
        "logging.every": settings.logging.every,
        "evaluation.sequences": settings.evaluation.sequences,
        "sample.temperature": settings.sample.temperature,
    }
    for key, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise OptionError(f"{key!r} in {file} is {value!r}", "Give a number above 0.")
    not_negative: dict[str, float] = {
        "training.warmup_steps": training.warmup,
        "training.weight_decay": training.weight_decay,
        "evaluation.every": settings.evaluation.every,
        "sample.tokens": settings.sample.tokens,
        "seed": settings.seed,
    }
    for key, value in not_negative.items():
        if not (value >= 0 and math.isfinite(value)):
            raise OptionError(f"{key!r} in {file} is {value!r}", "Give a number of at least 0.")
    if training.warmup > training.steps:
        raise OptionError(
            f"'training.warmup_steps' in {file} is {training.warmup}, the run has {training.steps} steps: "
            "the learning rate would never reach training.learning_rate",
            f"Give training.warmup_steps of at most {training.steps}, or leave it out for "
            f"{Training(steps=training.steps).warmup}.",
        )
    if settings.seed >= 1 << 62:  # generators take 64 bits, and every rank has a seed of its own
        raise OptionError(f"'seed' in {file} is {settings.seed}", "Give a number below 2**62.")
    for key, value in (
        ("data.validation_fraction", settings.data.validation_fraction),
        ("training.final_learning_rate", training.final_learning_rate),
    ):
        if not 0 <= value <= 1:
            raise OptionError(f"{key!r} in {file} is {value!r}", "Give a part of one, from 0 to 1.")
    if len(training.betas) != 2 or not all(0 <= beta < 1 for beta in training.betas):
        raise OptionError(f"'training.betas' in {file} is {list(training.betas)}", "Give two, from 0 to 1.")
    if training.batch_tokens is not None and training.batch_tokens % training.sequence_length:
        raise OptionError(
            f"'training.batch_tokens' in {file} is {training.batch_tokens}, which is not a multiple of "
            f"sequences of {training.sequence_length}",
            "Give a multiple of training.sequence_length.",
        )


def check_ranks(settings: Settings, ranks: int) -> None:
    """Checks that depend on the number of ranks."""
    sequences = settings.training.sequences
    if sequences < ranks:
        raise OptionError(
            f"'training.batch_size' is {sequences} sequences, less than one for each of {ranks} ranks",
            "Give a larger batch, or fewer ranks.",
        )


def micro_batches(settings: Settings, ranks: int) -> tuple[int, int]:
    """Forwards and backwards of every rank in one step, and the most sequences of one of them."""
    share = -(-settings.training.sequences // ranks)
    count = -(-share // min(settings.training.micro_batch_size or share, share))
    return count, -(-share // count)
