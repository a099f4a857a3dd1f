"""Writes folders for torch.distributed.checkpoint, from a sharded model or from a checkpoint of fullshard.

Either way, what is written is a tree with the names of `get_state_dict`; its tensors are leaves that yield
this rank's rectangles one at a time.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from fullshard.checkpoint import commit
from fullshard.checkpoint.dcp.folders import Leaf, check_replaceable, finish, write
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.manifest import SHARED_FILE, rank_file
from fullshard.checkpoint.format.torch_archives import read_bytes
from fullshard.checkpoint.loading.opening import Checkpoint
from fullshard.checkpoint.loading.reading import CHUNK_BYTES, Stored
from fullshard.checkpoint.nested_state import flattened
from fullshard.checkpoint.parameters import (
    Site,
    buffers,
    modules_with_state,
    sites,
    sites_by_group,
    tied_names,
)
from fullshard.checkpoint.save import check_model
from fullshard.checkpoint.saving.background import finish_earlier
from fullshard.comm.control import ControlGroup, control_group
from fullshard.engine.pieces import in_memory_order
from fullshard.engine.runtime import Runtime, model_of, runtime_of
from fullshard.engine.tensor_parallel import uncut
from fullshard.errors import CheckpointError, RankMismatch
from fullshard.plan.layout import Box, Piece, boxes
from fullshard.state.optimizer_state import other_entries, other_state
from fullshard.state.state_dict import StateShard

_ITEM_BYTES = 2 * CHUNK_BYTES  # of a stored tensor, per item
_SAVE = "Save it with fs.save, or save without the optimizer."
_EXPORT = "Export the model alone, as safetensors."


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save to a folder that torch.distributed.checkpoint.load reads, for FSDP2 or a plain model, for example.

    Every rank must call it. The folder holds {"model": ..., "optim": {"state": ..., "param_groups": ...}} as
    returned by torch.distributed.checkpoint.state_dict.get_state_dict, and the first rank's `extra` next to
    them. It appears complete or not at all. A folder that holds such a checkpoint and nothing else is
    replaced; any other raises an error and is left as it is.
    """
    model = model_of(model)
    runtime = runtime_of(model)
    runtime.comm.barrier("save")
    control = control_group(runtime.comm)
    control.together(finish_earlier, "finishing the previous save")

    def collect() -> tuple[dict[str, Any], dict[str, str]]:
        check_model(runtime, model, optimizer, "save")
        return _tree(runtime, model, optimizer, extra), tied_names(model)

    tree, tied = control.together(collect, "collecting what to save")
    paths = control.all_gather_object(os.path.abspath(path))
    if len(set(paths)) > 1:
        raise RankMismatch(f"ranks save to different folders: {sorted(set(paths))}", "Give one path.")
    _write_together(control, Path(paths[0]), tree, tied)
    return Path(paths[0])


def write_folder(checkpoint: Checkpoint, target: Path) -> None:
    """Write a checkpoint of fullshard as a folder of torch.distributed.checkpoint, in one process.

    Every byte read is checked. At most about 100 MiB are in memory at a time, however large the tensors.
    Values that differed between ranks (random state, such values of `extra`) are left out.
    """
    tree = _stored_tree(checkpoint)
    staging = commit.begin(target, check_replaceable)
    try:
        written = write(staging.folder, 0, tree, True)
        finish(staging, [written], tree, dict(checkpoint.manifest.tied))
    except BaseException:
        commit.abandon(staging)
        raise


def _write_together(control: ControlGroup, target: Path, tree: dict[str, Any], tied: dict[str, str]) -> None:
    staging = control.together(
        lambda: commit.begin(target, check_replaceable) if control.is_first else None, "beginning a save"
    )
    folder: Path = control.broadcast_object(None if staging is None else staging.folder)  # type: ignore[assignment]
    try:
        written = control.together(lambda: write(folder, control.index, tree, control.is_first), "writing")
        from_all_ranks = control.gather_object(written)

        def end() -> None:
            if staging is not None and from_all_ranks is not None:
                finish(staging, from_all_ranks, tree, tied)

        control.together(end, "finishing a save")
    except BaseException:
        if staging is not None:
            commit.abandon(staging)
        raise


# ---- what is written


def _tree(
    runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> dict[str, Any]:
    """Everything that is saved, nested as get_state_dict nests it, with leaves for tensors."""
    state: dict[str, Any] = {}
    for site in sites(runtime, model):
        state[site.name] = _leaf(site, site.parameter)
    state |= {name: uncut(buffer) for name, buffer in buffers(model).items()}
    for name, module in modules_with_state(model):
        state[f"{name}._extra_state".lstrip(".")] = module.get_extra_state()
    tree: dict[str, Any] = {"model": state}
    if optimizer is not None:
        tree["optim"] = _optimizer_tree(runtime, model, optimizer)
    for name, value in _checked_extra(extra).items():
        if name in tree:
            raise CheckpointError(f"extra has the name {name!r}, which is taken", "Give it another name.")
        tree[name] = value
    return tree


def _checked_extra(extra: Any) -> Mapping[str, Any]:
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(f"extra is a {type(extra).__name__}", "Give a dict of plain values.")
    for name, value in (extra or {}).items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
            read_bytes(f"extra[{name!r}]", file.getvalue())
        except Exception as error:  # noqa: BLE001  whatever it is, it could not be loaded again
            reason = str(error).splitlines()[0][:200]
            raise CheckpointError(
                f"extra[{name!r}] could not be loaded without running code: {reason}",
                "Save numbers, strings, lists, dicts and tensors; leave out functions and objects.",
            ) from None
    return extra or {}


def _leaf(site: Site, local: torch.Tensor) -> Leaf | torch.Tensor:
    """The leaf of a parameter or of a state of its optimizer; `local` has the shard's shape."""
    if site.lane is None:
        return uncut(local).detach()
    lane, piece, comm = site.lane, site.piece, site.lane.comm
    start, stop = lane.layout.written(piece, comm.rank, comm.replica, comm.replicas)
    if lane.replicated:
        flat = in_memory_order(local.detach(), piece)[start:stop]
    else:
        first, _ = lane.layout.kept(piece, comm.rank)
        flat = local.detach().reshape(-1)[start - first : stop - first]
    shard = StateShard.make(site.name, piece, flat, start, stop)

    def parts() -> Iterator[tuple[Box, torch.Tensor]]:
        for chunk in shard.__create_chunk_list__():
            index = MetadataIndex(site.name, chunk.offsets)
            yield Box(tuple(chunk.offsets), tuple(chunk.sizes)), shard.__get_tensor_shard__(index)

    return Leaf(piece.global_shape, local.dtype, parts)


def _optimizer_tree(runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    others = [*other_state(optimizer), *other_entries(optimizer)]
    _refuse_others(type(optimizer).__name__, others, _SAVE)
    groups = []
    state: dict[str, dict[str, Any]] = {}
    by_group = sites_by_group(sites(runtime, model), optimizer)
    for group, members in zip(optimizer.param_groups, by_group, strict=True):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append(options | {"params": [site.name for site in members]})
        for site in members:
            values = optimizer.state.get(site.parameter, {})
            state[site.name] = {key: _state_value(site, key, value) for key, value in values.items()}
    return {"state": state, "param_groups": groups}


def _refuse_others(optimizer: str, keys: list[Any], remedy: str) -> None:
    """get_state_dict has no names for what belongs to no parameter."""
    if keys:
        raise CheckpointError(
            f"{optimizer} keeps {', '.join(map(repr, keys))} beside the state of its parameters, which "
            "torch.distributed.checkpoint does not support",
            remedy,
        )


def _state_value(site: Site, key: str, value: Any) -> Any:
    if flattened(site.name, {key: value}).nested:
        raise CheckpointError(
            f"optimizer state '{site.name}.{key}' is a {type(value).__name__} with tensors in it, which "
            "torch.distributed.checkpoint cannot shard",
            _SAVE,
        )
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == site.parameter.shape and (key != "step" or value.dim()):
        return _leaf(site, value)
    if value.dim() == 0:
        return value.detach()
    raise CheckpointError(
        f"optimizer state '{site.name}.{key}' is not sharded like its parameter (it is kept in blocks, say), "
        "which torch.distributed.checkpoint does not support",
        _SAVE,
    )


def _stored_tree(checkpoint: Checkpoint) -> dict[str, Any]:
    """The same for a checkpoint: tensors are read when they are written."""
    manifest = checkpoint.manifest
    decode_first = partial(checkpoint.value, file=rank_file(0))
    decode_shared = partial(checkpoint.value, file=SHARED_FILE)
    state: dict[str, Any] = {name: _stored_leaf(checkpoint, s) for name, s in checkpoint.model.items()}
    for name, value in manifest.modules.items():
        state[f"{name}._extra_state".lstrip(".")] = decode_shared(value)
    tree: dict[str, Any] = {"model": state}
    if manifest.optimizer_state is not None:
        saved = manifest.optimizer_state
        others = [*saved.get("other_state", ()), *saved.get("state_dict", ())]
        _refuse_others(saved["class"], [decode_shared(entry["key"]) for entry in others], _EXPORT)
        groups = [
            decode_first(group["options"]) | {"params": list(group["parameters"])}
            for group in manifest.optimizer_state["groups"]
        ]
        values = {
            name: {key: _stored_state(checkpoint, f"{name}.{key}", s, decode_first) for key, s in by.items()}
            for name, by in manifest.optimizer_state["state"].items()
        }
        tree["optim"] = {"state": values, "param_groups": groups}
    for name, value in manifest.extra.items():
        tree[name if name not in tree else f"extra.{name}"] = decode_shared(value)
    return tree


def _stored_state(
    checkpoint: Checkpoint, name: str, entry: dict[str, Any], decoded: Callable[[Any], Any]
) -> Any:
    if entry.get("kind") == "value":
        return decoded(entry["value"])
    if name not in checkpoint.optimizer:
        raise CheckpointError(
            f"optimizer state {name!r} is not sharded like its parameter (it is kept in blocks or in a list, "
            "say), which torch.distributed.checkpoint does not support",
            _EXPORT,
        )
    return _stored_leaf(checkpoint, checkpoint.optimizer[name])


def _stored_leaf(checkpoint: Checkpoint, stored: Stored) -> Leaf:
    tensor = stored.tensor
    unsharded = Piece(tensor.name, tensor.shape, tuple(range(len(tensor.shape))), 0)

    def parts() -> Iterator[tuple[Box, torch.Tensor]]:
        for start, stop in _intervals(tensor):
            values = torch.empty(stop - start, dtype=tensor.dtype)
            checkpoint.read(stored, start, stop, values)
            at = 0
            for box in boxes(unsharded, start, stop):
                yield box, values[at : at + box.num_elements].view(box.sizes)
                at += box.num_elements

    return Leaf(tensor.shape, tensor.dtype, parts)


def _intervals(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The intervals of a tensor of at most _ITEM_BYTES, in complete rows where rows are small."""
    step = max(1, _ITEM_BYTES // tensor.dtype.itemsize)
    row = tensor.num_elements // tensor.shape[0] if tensor.num_elements and tensor.shape else 1
    step = step // row * row or step
    for start in range(0, tensor.num_elements, step):
        yield start, min(start + step, tensor.num_elements)
