"""transformers' Trainer: saved models, checkpoint folders, and counts of parameters."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.engine.runtime import is_sharded
from fullshard.errors import CheckpointError
from fullshard.hugging_face import checkpoints
from fullshard.hugging_face.patching import PATCHES
from fullshard.hugging_face.preparing import count, uses_fsdp
from fullshard.hugging_face.unsharded_state import is_adapter, saved_state

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")  # the name of a Trainer's checkpoint
_STATE = "trainer_state.json"  # the last thing that Trainer writes into one
_CONFIGS = ("config.json", "generation_config.json")


def apply(module: ModuleType) -> None:
    """Patch one of transformers' modules, once it has been imported."""
    if module.__name__ == "transformers.trainer":
        PATCHES.replace(module.Trainer, "save_model", _save_model)
        PATCHES.replace(module.Trainer, "_save_checkpoint", _save_checkpoint)
        PATCHES.replace(module.Trainer, "_load_from_checkpoint", _load_from_checkpoint)
    elif module.__name__ == "transformers.trainer_utils":
        PATCHES.replace(module, "get_last_checkpoint", _get_last_checkpoint)
    else:
        PATCHES.replace(module, "get_model_param_count", _get_model_param_count)


def _save_checkpoint(original: Any) -> Any:
    def save_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer saves the model twice per checkpoint: by itself, and again beside its optimizer."""
        with checkpoints.saves_of(self.accelerator).one_checkpoint():
            return original(self, *args, **kwargs)

    return save_checkpoint


def _load_from_checkpoint(original: Any) -> Any:
    def load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """transformers refuses it too, without the remedy."""
        if not self.is_fsdp_enabled and _has_our_model(Path(resume_from_checkpoint)):
            raise CheckpointError(
                f"{str(resume_from_checkpoint)!r} was saved by sharded ranks, and FSDP is not requested now",
                "Resume with --fsdp, or TrainingArguments(fsdp=True): one rank or plain python is enough. To "
                "use the model alone, give the folder to from_pretrained.",
            )
        original(self, resume_from_checkpoint, model)

    return load_from_checkpoint


def _save_model(original: Any) -> Any:
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not (uses_fsdp(self.accelerator) and is_sharded(self.model)):
            original(self, output_dir, _internal_call)
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        kind = self.accelerator.state.fsdp_plugin.state_dict_type.name
        if _internal_call and kind == "SHARDED_STATE_DICT" and not is_adapter(self.model):
            _save_sharded(self, folder)
        else:
            with saved_state(self.model, keep=self.args.should_save) as state:
                if self.args.should_save:
                    self._save(folder, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    return save_model


def _save_sharded(trainer: Any, folder: str) -> None:
    """A checkpoint whose weights no rank gathers: written once, and linked to where Trainer puts them.

    So `from_pretrained` loads the checkpoint folder, and also the folder inside it.
    """
    saved = checkpoints.save_model(trainer.accelerator, trainer.model, folder, 0, adapter_only=True)
    if not trainer.args.should_save:
        return
    own = {name: value for name, value in vars(trainer.model).items() if name == "save_pretrained"}
    trainer.model.__dict__["save_pretrained"] = _write_nothing  # `_save` then writes all but the weights
    try:
        trainer._save(folder, state_dict={})
    finally:
        del trainer.model.__dict__["save_pretrained"]
        vars(trainer.model).update(own)
    for file in sorted(saved.iterdir()):
        if file.name in _CONFIGS or file.name.startswith("model"):
            _link(file, Path(folder) / file.name)


def _write_nothing(*_: Any, **__: Any) -> None:
    pass


def _link(file: Path, target: Path) -> None:
    """The same bytes under a second name; a copy where the file system has no links."""
    link = target.with_name(f".{target.name}.linking")
    link.unlink(missing_ok=True)
    try:
        os.link(file, link)
    except OSError:
        shutil.copyfile(file, link)
    link.replace(target)


def _get_last_checkpoint(original: Any) -> Any:
    def get_last_checkpoint(folder: Any) -> Any:
        """transformers' own looks at names alone; here a save that was interrupted does not count."""
        newest = original(folder)
        names = [e.name for e in Path(folder).iterdir() if e.is_dir() and _CHECKPOINT.fullmatch(e.name)]
        if newest is None or not any(_has_our_model(Path(folder) / name) for name in names):
            return newest
        for name in sorted(names, key=lambda n: int(n.rpartition("-")[2]), reverse=True):
            if _is_complete(Path(folder) / name):
                return os.path.join(folder, name)
            warnings.warn(f"{name!r} in {str(folder)!r} is skipped: its save was interrupted", stacklevel=2)
        return None

    return get_last_checkpoint


def _has_our_model(folder: Path) -> bool:
    return folder.is_dir() and any(
        checkpoints.MODEL_FOLDER in entry.name for entry in folder.iterdir() if entry.is_dir()
    )


def _is_complete(folder: Path) -> bool:
    try:
        json.loads((folder / _STATE).read_text())
    except (OSError, ValueError):
        return False
    return True


def _get_model_param_count(original: Any) -> Any:
    def get_model_param_count(model: Any, trainable_only: bool = False) -> int:
        if not is_sharded(model):
            return int(original(model, trainable_only))
        return count(model, only_trainable=trainable_only)

    return get_model_param_count
