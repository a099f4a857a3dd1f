"""A sharded checkpoint as the plain dict that Lightning itself would have saved, in one process."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.format.manifest import SHARED_FILE, rank_file
from fullshard.checkpoint.loading.opening import Checkpoint, open_checkpoint
from fullshard.errors import CheckpointError
from fullshard.lightning.checkpoints import GROUPS, STATE, UNUSED, checkpoint_path, values_of


def read_checkpoint(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
    """Everything in a checkpoint that a FullShardStrategy saved, in the host memory of this process.

    From a Trainer: 'state_dict', 'optimizer_states', 'loops', 'callbacks' and so on. From Fabric: the names
    that were given to fabric.save. Every byte is checked against its checksum. No process group is needed.
    """
    source = open_checkpoint(checkpoint_path(path))
    try:
        extra = _extra(source)
        groups = extra.pop(GROUPS, [])
        values = values_of(extra, source.folder, weights_only)
        state = values.pop(STATE, None)
        model, optimizers = _state_dict(source), _optimizers(source, groups)
        if state is None:
            held = {"optimizer_states": optimizers} if groups or "callbacks" in values else {}
            return {**values, "state_dict": model, **held}
        return {**values, state["model"]: model, **dict(zip(state["optimizers"], optimizers, strict=True))}
    finally:
        source.close()


def read_values(path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
    """A Trainer's checkpoint without weights and optimizer state."""
    source = open_checkpoint(checkpoint_path(path))
    try:
        return values_of(_extra(source), source.folder, weights_only, optional=UNUSED)
    finally:
        source.close()


def consolidate(
    path: str | os.PathLike[str], to: str | os.PathLike[str], *, weights_only: bool | None = None
) -> None:
    """Write a checkpoint as one plain .ckpt file, which Lightning loads without fullshard.

    `MyModule.load_from_checkpoint(to)`, and `Trainer.fit(ckpt_path=to)` with any strategy, our own included.

    weights_only: False also reads objects (among the hyperparameters, for example), which can run code: only
        for a checkpoint that you trust. Otherwise such a checkpoint is refused; the error names the value.
    """
    target = Path(to)
    if os.path.lexists(target):
        raise CheckpointError(f"{str(target)!r} exists; it was left as it is", "Choose another name.")
    checkpoint = read_checkpoint(path, weights_only=weights_only)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        torch.save(checkpoint, partial)
        os.replace(partial, target)  # complete, or not at all
    finally:
        partial.unlink(missing_ok=True)


def _extra(source: Checkpoint) -> dict[str, Any]:
    return {name: source.value(tree, SHARED_FILE) for name, tree in source.manifest.extra.items()}


def _state_dict(source: Checkpoint) -> dict[str, Any]:
    state: dict[str, Any] = {name: source.read_tensor(stored) for name, stored in source.model.items()}
    state |= {other: state[name] for other, name in source.manifest.tied.items()}
    for module, tree in source.manifest.modules.items():
        state[f"{module}._extra_state".lstrip(".")] = source.value(tree, rank_file(0))
    return state


def _optimizers(source: Checkpoint, groups: list[int]) -> list[dict[str, Any]]:
    """State dicts as torch's optimizers have them: parameters are numbers, in the order of the groups."""
    saved: Any = source.manifest.optimizer_state
    dicts, at = [], 0
    for count in groups if saved is not None else ():
        names = [name for group in saved["groups"][at : at + count] for name in group["parameters"]]
        number = {name: i for i, name in enumerate(names)}
        param_groups = [
            {
                **source.value(group["options"], rank_file(0)),
                "params": [number[n] for n in group["parameters"]],
            }
            for group in saved["groups"][at : at + count]
        ]
        state = {
            number[name]: {key: _value(source, f"{name}.{key}", entry) for key, entry in entries.items()}
            for name, entries in saved["state"].items()
            if name in number
        }
        dicts.append({"state": state, "param_groups": param_groups})
        at += count
    return dicts


def _value(source: Checkpoint, name: str, entry: Any) -> Any:
    if entry["kind"] == "value":
        return source.value(entry["value"], rank_file(0))
    if entry["kind"] == "own":
        raise CheckpointError(
            f"optimizer state {name!r} has a form of its own on each rank, and no unsharded value",
            "Read the weights alone, with `fullshard export`.",
        )
    return source.read_tensor(source.optimizer[name])
