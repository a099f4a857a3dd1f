"""Where accelerate and Trainer save and load a sharded model and its optimizer.

One fs.save folder holds both, under the name that they look for: `pytorch_model_fsdp_0`. It appears complete
or not at all, can be read by any number of ranks, and `from_pretrained` loads it. `state_dict_type` makes no
difference here: no rank holds the unsharded model while it saves.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fullshard import extras
from fullshard.checkpoint import dcp
from fullshard.checkpoint.commit import find, is_checkpoint
from fullshard.checkpoint.format.torch_archives import read_file
from fullshard.checkpoint.hugging_face import folders
from fullshard.checkpoint.load import load
from fullshard.checkpoint.loading.opening import open_checkpoint
from fullshard.checkpoint.parameters import canonical
from fullshard.checkpoint.save import save
from fullshard.engine.runtime import is_sharded, runtime_of
from fullshard.errors import CheckpointError, NotSupported
from fullshard.hugging_face.preparing import torch_optimizer, trains
from fullshard.hugging_face.unsharded_state import is_adapter

MODEL_FOLDER = "pytorch_model_fsdp"
_OPTIMIZER_FOLDER = "optimizer"
_POINTER = "saved_with_the_model.json"

_SAVES = "_fullshard_saves"  # on an accelerator


@dataclass(frozen=True)
class SavedModel:
    """A model's last save: with which optimizer, and after how many optimizer steps."""

    folder: Path
    optimizer: Any
    steps: int

    def holds(self, optimizer: Any, parent: Path, steps: int) -> bool:
        """Whether a folder in `parent` has the state of `optimizer` as it is now."""
        return self.optimizer is optimizer and self.folder.parent == parent and self.steps == steps


class Saves:
    """What one accelerator has saved, so that a value which two of its calls save is written once."""

    def __init__(self) -> None:
        self.last: WeakKeyDictionary[nn.Module, SavedModel] = WeakKeyDictionary()
        self.checkpoint: dict[Path, nn.Module] | None = None  # what one_checkpoint has written so far

    @contextmanager
    def one_checkpoint(self) -> Iterator[None]:
        """Inside, a second save of a model to the same folder writes nothing."""
        self.checkpoint = {}
        try:
            yield
        finally:
            self.checkpoint = None


def saves_of(accelerator: Any) -> Saves:
    saves: Saves = vars(accelerator).setdefault(_SAVES, Saves())
    return saves


def save_model(
    accelerator: Any, model: nn.Module, output_dir: str | os.PathLike[str], index: int, adapter_only: bool
) -> Path:
    """The model and the first optimizer that trains it. Every rank must call it."""
    folder, saves = Path(output_dir).absolute() / f"{MODEL_FOLDER}_{index}", saves_of(accelerator)
    if saves.checkpoint is not None and saves.checkpoint.get(folder) is model:
        return folder
    optimizers = [o for o in map(torch_optimizer, accelerator._optimizers) if trains(o, model)]
    optimizer = optimizers[0] if optimizers else None
    # The first rank may be late, because it writes files of its own: fs.save would report a stall.
    accelerator.wait_for_everyone()
    save(folder, model, optimizer, frozen=not (adapter_only and is_adapter(model)))
    saves.last[model] = SavedModel(folder, optimizer, runtime_of(model).steps)
    if saves.checkpoint is not None:
        saves.checkpoint[folder] = model
    return folder


def save_optimizer(
    accelerator: Any, optimizer: Any, model: nn.Module, output_dir: str | os.PathLike[str], index: int
) -> None:
    folder = Path(output_dir).absolute() / f"{_OPTIMIZER_FOLDER}_{index}"
    optimizer = torch_optimizer(optimizer)
    accelerator.wait_for_everyone()
    saved = saves_of(accelerator).last.get(model)
    if saved is None or not saved.holds(optimizer, folder.parent, runtime_of(model).steps):
        save(folder, model, optimizer)
    elif accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)  # Trainer looks for a folder of this name
        (folder / _POINTER).write_text(json.dumps({"folder": saved.folder.name}))
    accelerator.wait_for_everyone()


def load_model(
    accelerator: Any, model: nn.Module, input_dir: str | os.PathLike[str], index: int, adapter_only: bool
) -> Any:
    """From a folder that was written by fullshard, by torch's FSDP, or by Hugging Face."""
    accelerator.wait_for_everyone()
    top = Path(input_dir).absolute()
    folder = top if top.name == f"{MODEL_FOLDER}_{index}" else top / f"{MODEL_FOLDER}_{index}"
    file = top / (f"{MODEL_FOLDER}.bin" if index == 0 else f"{MODEL_FOLDER}_{index}.bin")
    if is_checkpoint(find(folder)):
        _load(folder, model, None, adapter_only)
    elif dcp.is_dcp(folder):
        load(folder, model)
    elif file.is_file():
        model.load_state_dict(read_file(file))
    elif folders.is_model(top):
        load(top, model)
    else:
        raise CheckpointError(
            f"{str(top)!r} holds no model that can be loaded: neither {folder.name!r} nor safetensors files",
            "Resume from a checkpoint that was saved by Trainer or by accelerator.save_state.",
        )
    accelerator.wait_for_everyone()
    return nn.modules.module._IncompatibleKeys([], [])


def load_optimizer(
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    where: tuple[int, bool],
) -> None:
    """`where`: the optimizer's index, and whether only an adapter was saved."""
    index, adapter_only = where
    accelerator.wait_for_everyone()
    folder = Path(input_dir).absolute() / f"{_OPTIMIZER_FOLDER}_{index}"
    if (folder / _POINTER).is_file():
        folder = folder.parent / Path(json.loads((folder / _POINTER).read_text())["folder"]).name
    if not is_checkpoint(find(folder)):
        raise NotSupported(
            f"{str(folder.parent)!r} has no optimizer state that fullshard saved",
            "Resume from a checkpoint of a run on fullshard; from others only the model can be loaded: give "
            "its folder to from_pretrained.",
        )
    _load(folder, model, torch_optimizer(optimizer), adapter_only)
    accelerator.wait_for_everyone()


def _load(folder: Path, model: nn.Module, optimizer: Any, adapter_only: bool) -> None:
    if not (adapter_only and is_adapter(model)):
        load(folder, model, optimizer)
        return
    _require_adapter(folder, model)
    with warnings.catch_warnings():
        # The base model is not in the checkpoint, and is not meant to be.
        warnings.filterwarnings("ignore", "(?s).*not in the checkpoint, left as they were")
        load(folder, model, optimizer, strict=False)


def _require_adapter(folder: Path, model: nn.Module) -> None:
    """What is missing would be left as it is, without an error: no trainable parameter may be missing."""
    source = open_checkpoint(folder, False)
    try:
        stored = set(source.model) | set(source.manifest.tied)
    finally:
        source.close()
    missing = [n for n, p in model.named_parameters() if p.requires_grad and canonical(n) not in stored]
    if missing:
        raise CheckpointError(
            f"{str(folder)!r} has no {missing[0]!r} (and {len(missing) - 1} more), which the model trains",
            "Load a checkpoint of the same adapter.",
        )


# ---- replacements of accelerate's functions; for a model that is not sharded they call the original


def _save_fsdp_model(original: Any) -> Any:
    def save_fsdp_model(
        fsdp_plugin: Any,
        accelerator: Any,
        model: Any,
        output_dir: Any,
        model_index: int = 0,
        adapter_only: bool = False,
        use_dcp: bool = True,
    ) -> None:
        if not is_sharded(model):
            original(fsdp_plugin, accelerator, model, output_dir, model_index, adapter_only, use_dcp)
        else:
            save_model(accelerator, model, output_dir, model_index, adapter_only)

    return save_fsdp_model


def _load_fsdp_model(original: Any) -> Any:
    def load_fsdp_model(
        fsdp_plugin: Any,
        accelerator: Any,
        model: Any,
        input_dir: Any,
        model_index: int = 0,
        adapter_only: bool = False,
        use_dcp: bool = True,
    ) -> Any:
        if not is_sharded(model):
            return original(fsdp_plugin, accelerator, model, input_dir, model_index, adapter_only, use_dcp)
        return load_model(accelerator, model, input_dir, model_index, adapter_only)

    return load_fsdp_model


def _save_fsdp_optimizer(original: Any) -> Any:
    def save_fsdp_optimizer(
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: Any,
        output_dir: Any,
        optimizer_index: int = 0,
        use_dcp: bool = True,
    ) -> None:
        if not is_sharded(model):
            original(fsdp_plugin, accelerator, optimizer, model, output_dir, optimizer_index, use_dcp)
        else:
            save_optimizer(accelerator, optimizer, model, output_dir, optimizer_index)

    return save_fsdp_optimizer


def _load_fsdp_optimizer(original: Any) -> Any:
    def load_fsdp_optimizer(
        fsdp_plugin: Any,
        accelerator: Any,
        optimizer: Any,
        model: Any,
        input_dir: Any,
        optimizer_index: int = 0,
        adapter_only: bool = False,
        use_dcp: bool = True,
    ) -> None:
        if not is_sharded(model):
            args = (fsdp_plugin, accelerator, optimizer, model, input_dir, optimizer_index)
            original(*args, adapter_only, use_dcp)
        else:
            load_optimizer(accelerator, optimizer, model, input_dir, (optimizer_index, adapter_only))

    return load_fsdp_optimizer


def _merged_weights(original: Any) -> Any:
    """Called by `merge_fsdp_weights`. Our files hold unsharded tensors already: they become one file."""

    def merged_weights(checkpoint_dir: Any, save_path: Any, safe_serialization: bool = True) -> Path:
        folder, to = find(Path(checkpoint_dir)), Path(save_path)
        if not is_checkpoint(folder):
            return Path(original(checkpoint_dir, save_path, safe_serialization))
        if folder.resolve() == to.resolve():
            raise CheckpointError(f"{str(to)!r} is the checkpoint itself", "Merge into another folder.")
        source = open_checkpoint(folder)
        try:
            state = {name: source.read_tensor(stored) for name, stored in source.model.items()}
        finally:
            source.close()
        to.mkdir(parents=True, exist_ok=True)
        target = to / ("model.safetensors" if safe_serialization else "pytorch_model.bin")
        if safe_serialization:
            extras.need("safetensors.torch", "hf").save_file(state, target, metadata={"format": "pt"})
        else:
            torch.save(state, target)
        return target

    return merged_weights


FUNCTIONS = {
    "_distributed_checkpoint_to_merged_weights": _merged_weights,
    "save_fsdp_model": _save_fsdp_model,
    "load_fsdp_model": _load_fsdp_model,
    "save_fsdp_optimizer": _save_fsdp_optimizer,
    "load_fsdp_optimizer": _load_fsdp_optimizer,
}
