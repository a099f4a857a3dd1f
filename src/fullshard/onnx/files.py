"""ONNX files from sharded models, which all ranks export together, and from checkpoints."""

from __future__ import annotations

import copy
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import is_initialized

from fullshard import api
from fullshard.checkpoint.format.budget import read_json
from fullshard.checkpoint.load import load
from fullshard.checkpoint.tools.paths import identify_one
from fullshard.comm.control import ControlGroup, control_group, end_groups
from fullshard.engine.runtime import is_sharded, model_of, runtime_of
from fullshard.environment import launch
from fullshard.errors import CheckpointError, NotSupported, OptionError
from fullshard.extras import need
from fullshard.onnx.writing import Axes, ExportRequest, default_axes, prepare, write
from fullshard.state.plain_copy import unsharded

_HEARTBEAT_S = 60.0


@dataclass(frozen=True)
class Subject:
    """A model whose values are in a checkpoint, and an example batch, by the names of forward's arguments."""

    model: nn.Module
    inputs: Mapping[str, torch.Tensor]


def export(
    model: nn.Module,
    file: str | os.PathLike[str],
    inputs: Mapping[str, torch.Tensor],
    *,
    axes: Axes | None = None,
    check: bool = True,
) -> list[str]:
    """Write a model to an ONNX file, in evaluation mode; if it is sharded, every rank must call this.

    inputs: an example batch, by the names of forward's arguments; the first rank's is used.
    axes: which axes of an input may have any size: {"x": {0: "batch"}}. None: the first axis of every input
        is the batch, and the second axis of a matrix of integers the sequence. {} fixes all sizes.
    check: run the file with onnxruntime, and raise if its results differ from the model's.

    A sharded model is unsharded on every rank for a moment, and on the first rank until the file is written,
    in the dtypes at rest. A file appears only if everything succeeded; existing files are never overwritten.
    Weights of more than 1.5 GiB are in a second file, FILE.data. Returns lines that describe the file.
    """
    model = model_of(model)
    given = {name: value.detach().cpu() for name, value in _checked(inputs).items()}
    request = ExportRequest(
        Path(os.path.abspath(file)), given, default_axes(given) if axes is None else axes, check
    )
    if not is_sharded(model):
        prepare(request)
        return write(_sharing_memory(model), request)
    comm = runtime_of(model).comm
    comm.barrier("export")
    control = control_group(comm)
    control.together(lambda: prepare(request) if control.is_first else None, "preparing an ONNX file")
    with api.full(model, writeback=False):
        if control.is_first:
            return _on_first_rank(control, lambda: write(unsharded(model), request))
    return _on_first_rank(control, list)  # waits, with its memory released


def export_checkpoint(
    checkpoint: Path, file: Path, check: bool = True, subject: Subject | None = None
) -> list[str]:
    """Write the model of a checkpoint to an ONNX file.

    subject: the model that the checkpoint is of. None: the Hugging Face model that its config.json describes,
        with token ids and mask as inputs and logits as output.

    For one process, which holds the unsharded model in fp32. Every byte is checked as in fs.load. Returns
    lines that describe the file.
    """
    if launch().ranks > 1 or is_initialized():
        raise OptionError(
            "a checkpoint is exported by a single process, and this one belongs to a process group",
            "Run `fullshard export` without a launcher, or fullshard.onnx.files.export on the live model.",
        )
    target = Path(os.path.abspath(file))
    prepare(ExportRequest(target, {}, {}, check))
    folder = _folder(Path(checkpoint))
    model = _built(folder) if subject is None else subject.model
    try:
        api.shard(model, strategy="replicate")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the notes are the same
            notes = load(folder, model).notes
        with api.full(model, writeback=False):
            plain = unsharded(model)
            given = _example(plain) if subject is None else dict(subject.inputs)
            lines = write(plain, ExportRequest(target, given, default_axes(given), check))
    finally:
        end_groups()
    return [*lines, *(f"  note: {note}" for note in notes)]


# ---- a live model


def _checked(inputs: Any) -> Mapping[str, torch.Tensor]:
    named = isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs)
    if not named or not inputs or not all(isinstance(value, torch.Tensor) for value in inputs.values()):
        raise OptionError(
            "inputs must be tensors by the names of forward's arguments",
            "Give a dict such as {'input_ids': tensor}.",
        )
    return inputs  # type: ignore[no-any-return]


def _sharing_memory(model: nn.Module) -> nn.Module:
    """A copy that may be changed, with the same parameters if they are on the host."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().cpu(), requires_grad=False) for p in model.parameters()
    }
    return copy.deepcopy(model, memo).cpu()


def _on_first_rank(control: ControlGroup, work: Callable[[], list[str]]) -> list[str]:
    """The first rank works, and the others wait. Regular messages keep their wait from timing out."""
    if not control.is_first:
        while control.broadcast_object(False):
            pass
        return control.share(lambda: ([], []), "writing an ONNX file")[1][0]
    over = threading.Event()
    lines: list[str] = []
    problem: Exception | None = None

    def send_heartbeats() -> None:
        while not over.wait(_HEARTBEAT_S):
            control.broadcast_object(True)

    def finish() -> tuple[list[str], list[str]]:
        if problem is not None:
            raise problem
        return lines, lines

    heartbeats = threading.Thread(target=send_heartbeats, daemon=True)
    heartbeats.start()
    try:
        lines = work()
    except Exception as error:  # noqa: BLE001  raised on all ranks, below
        problem = error
    finally:
        over.set()
        heartbeats.join()
    control.broadcast_object(False)
    return control.share(finish, "writing an ONNX file")[0]


# ---- a checkpoint


def _folder(path: Path) -> Path:
    subject = identify_one(path)
    if subject.kind == "unfinished":
        raise CheckpointError(f"{str(path)!r} is a save that was not finished", "Name a complete one.")
    return subject.folder


def _built(folder: Path) -> Any:
    """The model that config.json describes, in fp32, with values still to be loaded."""
    config = _config(folder)
    transformers = need("transformers", "hf")
    named = config.get("architectures") or [None]
    cls = _class(transformers, str(named[0]))
    if cls is None:
        raise NotSupported(
            f"config.json of {str(folder)!r} names the architecture {named[0]!r}, which transformers "
            f"{transformers.__version__} does not have",
            "Code from a model's folder is not run; export the live model with fullshard.onnx.files.export.",
        )
    if (main_input := cls.main_input_name) != "input_ids":
        raise NotSupported(
            f"{named[0]} takes {main_input}; from a checkpoint only models of token ids are exported",
            "Export the live model with fullshard.onnx.files.export and an example batch.",
        )
    try:
        return cls._from_config(cls.config_class.from_dict(config), dtype=torch.float32)
    except Exception as error:
        raise CheckpointError(
            f"{cls.__name__} cannot be built from config.json of {str(folder)!r}: "
            f"{type(error).__name__}: {error}",
            "Is it complete, and was it written by a similar version of transformers?",
        ) from error


def _class(transformers: Any, name: str) -> Any:
    cls = getattr(transformers, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel) else None


def _config(folder: Path) -> dict[str, Any]:
    remedy = "Save a Hugging Face model, or export the live model with fullshard.onnx.files.export."
    try:
        config = read_json(folder / "config.json")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{str(folder)!r} has no config.json, which describes the model", remedy
        ) from None
    except OSError as error:
        raise CheckpointError(f"config.json of {str(folder)!r} cannot be read: {error}", remedy) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json of {str(folder)!r} describes no model", remedy)
    return config


def _example(model: Any) -> dict[str, torch.Tensor]:
    """Token ids of sizes that are unlikely elsewhere in a model, the first row with padding in front."""
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or 13
    length = max(2, min(13, most - 4))  # some count positions from their padding token
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, max(4, config.vocab_size), (3, length), generator=generator)
    given = {"input_ids": ids}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][0, : length // 3] = 0
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids[:, : max(2, length // 2)].flip(0)
    return given
