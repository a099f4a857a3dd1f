"""A sharded checkpoint as the plain dict that Lightning itself would have saved, whole, in one process."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.format.manifest import SHARED_FILE, rank_file
from fullshard.checkpoint.format.values import decode
from fullshard.checkpoint.loading.opening import Checkpoint, open_checkpoint
from fullshard.errors import CheckpointError
from fullshard.lightning.checkpoints import GROUPS, STATE, UNUSED, place_of, values_of


def read_checkpoint(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
    """Everything in a checkpoint that a FullShardStrategy saved, in the host memory of this process.

    From a Trainer: 'state_dict', 'optimizer_states', 'loops', 'callbacks' and so on. From Fabric: the names
    that were given to fabric.save. Every byte is checked against its checksum. No process group is needed.
    """
    source = open_checkpoint(place_of(path))
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
    """Of a Trainer's checkpoint what is not weights and not state of optimizers."""
    source = open_checkpoint(place_of(path))
    try:
        return values_of(_extra(source), source.folder, weights_only, may_lack=UNUSED)
    finally:
        source.close()


def consolidate(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> None:
    """Write a checkpoint as one plain .ckpt file, which Lightning loads without fullshard.

    `MyModule.load_from_checkpoint(to)`, and `Trainer.fit(ckpt_path=to)` with any strategy, our own included.
    """
    target = Path(to)
    if os.path.lexists(target):
        raise CheckpointError(f"{str(target)!r} exists; it was left as it is", "Choose another name.")
    whole = read_checkpoint(path, weights_only=False)
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        torch.save(whole, begun)
        os.replace(begun, target)  # whole, or not at all
    finally:
        begun.unlink(missing_ok=True)


def _extra(source: Checkpoint) -> dict[str, Any]:
    return {name: _decode(source, SHARED_FILE, tree) for name, tree in source.manifest.extra.items()}


def _decode(source: Checkpoint, file: str, tree: Any) -> Any:
    large = source.values(file)

    def stored(name: str) -> torch.Tensor:
        return source.read_tensor(large[name])

    return decode(tree, stored)


def _state_dict(source: Checkpoint) -> dict[str, Any]:
    found: dict[str, Any] = {name: source.read_tensor(stored) for name, stored in source.model.items()}
    found |= {other: found[name] for other, name in source.manifest.tied.items()}
    for module, tree in source.manifest.modules.items():
        found[f"{module}._extra_state".lstrip(".")] = _decode(source, rank_file(0), tree)
    return found


def _optimizers(source: Checkpoint, groups: list[int]) -> list[dict[str, Any]]:
    """State dicts as torch's optimizers have them: parameters are numbers, in the order of the groups."""
    said: Any = source.manifest.optimizer_state
    found, at = [], 0
    for count in groups if said is not None else ():
        names = [name for group in said["groups"][at : at + count] for name in group["parameters"]]
        number = {name: i for i, name in enumerate(names)}
        param_groups = [
            {
                **_decode(source, rank_file(0), group["options"]),
                "params": [number[n] for n in group["parameters"]],
            }
            for group in said["groups"][at : at + count]
        ]
        state = {
            number[name]: {key: _value(source, f"{name}.{key}", what) for key, what in held.items()}
            for name, held in said["state"].items()
            if name in number
        }
        found.append({"state": state, "param_groups": param_groups})
        at += count
    return found


def _value(source: Checkpoint, name: str, said: Any) -> Any:
    if said["kind"] == "value":
        return _decode(source, rank_file(0), said["value"])
    if said["kind"] == "own":
        raise CheckpointError(
            f"optimizer state {name!r} is kept in a form of its own on each rank, and has no whole",
            "Read the weights alone, with `fullshard export`.",
        )
    return source.read_tensor(source.optimizer[name])
