"""Folders that torch.distributed.checkpoint reads: from a sharded model, or from a checkpoint of our own.

Either way everything is a tree with the names that `get_state_dict` users expect; its tensors are leaves that
hand out this rank's rectangles one by one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from fullshard.checkpoint import commit, contents
from fullshard.checkpoint.background import finish_earlier
from fullshard.checkpoint.contents import Site
from fullshard.checkpoint.dcp.folders import Leaf, begin, finish, write
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.values import decode
from fullshard.checkpoint.opening import Checkpoint
from fullshard.checkpoint.reading import CHUNK_BYTES, Stored
from fullshard.checkpoint.save import check_model
from fullshard.checkpoint.trees import SHARED_FILE, rank_file
from fullshard.comm.control import ControlGroup, control_group
from fullshard.engine.pieces import in_memory_order
from fullshard.engine.runtime import Runtime, model_of, runtime_of
from fullshard.errors import CheckpointError, RankMismatch
from fullshard.plan.layout import Box, Piece, boxes
from fullshard.plan.tensor_parallel import uncut
from fullshard.state.state_dict import StateShard

_ITEM_BYTES = 2 * CHUNK_BYTES  # of a stored tensor, read and written as one item


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save to a folder that torch.distributed.checkpoint.load reads, FSDP2 and plain models among its users.

    Every rank must call it. The folder holds {"model": ..., "optim": {"state": ..., "param_groups": ...}} as
    get_state_dict of torch.distributed.checkpoint.state_dict has them, and `extra` beside them, the first
    rank's. It appears whole or not at all. A folder that holds such a checkpoint and nothing else is
    replaced; any other is left as it is, with an error.
    """
    model = model_of(model)
    runtime = runtime_of(model)
    runtime.comm.barrier("save")
    control = control_group(runtime.comm)
    control.together(finish_earlier, "finishing the save before this one")

    def look() -> tuple[dict[str, Any], dict[str, str]]:
        check_model(runtime, model, optimizer, "save")
        return _tree(runtime, model, optimizer, extra), contents.tied_names(model)

    tree, tied = control.together(look, "looking at what to save")
    everyone = control.all_gather_object(os.path.abspath(path))
    if len(set(everyone)) > 1:
        raise RankMismatch(f"ranks save to different folders: {sorted(set(everyone))}", "Give one path.")
    _write_together(control, Path(everyone[0]), tree, tied)
    return Path(everyone[0])


def write_folder(checkpoint: Checkpoint, target: Path) -> None:
    """Write a checkpoint of our own as a folder of torch.distributed.checkpoint, in one process.

    Every byte read is checked. At most about 100 MiB are in memory at once, however large the tensors. What
    differed by rank (random numbers, such values of `extra`) has no place there and is left out.
    """
    tree = _stored_tree(checkpoint)
    staging = begin(target)
    try:
        written = write(staging.folder, 0, tree, True)
        finish(staging, [written], tree, dict(checkpoint.manifest.tied))
    except BaseException:
        commit.give_up(staging)
        raise


def _write_together(control: ControlGroup, target: Path, tree: dict[str, Any], tied: dict[str, str]) -> None:
    staging = control.together(lambda: begin(target) if control.is_first else None, "beginning a save")
    folder: Path = control.broadcast_object(None if staging is None else staging.folder)  # type: ignore[assignment]
    try:
        written = control.together(lambda: write(folder, control.index, tree, control.is_first), "writing")
        everyone = control.gather_object(written)

        def end() -> None:
            if staging is not None and everyone is not None:
                finish(staging, everyone, tree, tied)

        control.together(end, "finishing a save")
    except BaseException:
        if staging is not None:
            commit.give_up(staging)
        raise


# ---- what is written


def _tree(
    runtime: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> dict[str, Any]:
    """Everything, nested as people expect it, with leaves for tensors."""
    state: dict[str, Any] = {}
    for site in contents.sites(runtime, model):
        state[site.name] = _leaf(site, site.parameter)
    state |= {name: uncut(buffer) for name, buffer in contents.buffers(model).items()}
    for name, module in contents.modules_with_state(model):
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
        copy = io.BytesIO()
        try:
            torch.save(value, copy)
            copy.seek(0)
            torch.load(copy, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001  whatever it is, it could not be loaded again
            said = str(error).splitlines()[0][:200]
            raise CheckpointError(
                f"extra[{name!r}] could not be loaded without running code: {said}",
                "Save numbers, strings, lists, dicts and tensors; leave out functions and objects.",
            ) from None
    return extra or {}


def _leaf(site: Site, local: torch.Tensor) -> Leaf | torch.Tensor:
    """`local` has the parameter's shape on this rank: it, or a state of its optimizer."""
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
    known = {id(site.parameter): site for site in contents.sites(runtime, model)}
    groups = []
    state: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        members = [known[id(p)] for p in group["params"] if id(p) in known]
        if len(members) < len(group["params"]):
            raise CheckpointError(
                f"{type(optimizer).__name__} holds tensors that the model does not own",
                "Save the optimizer of this model: build it from model.parameters().",
            )
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append(options | {"params": [site.name for site in members]})
        for site in members:
            held = optimizer.state.get(site.parameter, {})
            state[site.name] = {key: _state_value(site, key, value) for key, value in held.items()}
    return {"state": state, "param_groups": groups}


def _state_value(site: Site, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == site.parameter.shape and (key != "step" or value.dim()):
        return _leaf(site, value)
    if value.dim() == 0:
        return value.detach()
    raise CheckpointError(
        f"optimizer state '{site.name}.{key}' is not cut like its parameter (it is kept in blocks, say), and "
        "torch.distributed.checkpoint has no place for that",
        "Save it with fs.save, or save without the optimizer.",
    )


def _stored_tree(checkpoint: Checkpoint) -> dict[str, Any]:
    """The same of a checkpoint: tensors are read when they are written."""
    said = checkpoint.manifest
    decode_first = _Decoder(checkpoint, rank_file(0))
    decode_shared = _Decoder(checkpoint, SHARED_FILE)
    state: dict[str, Any] = {name: _stored_leaf(checkpoint, s) for name, s in checkpoint.model.items()}
    for name, value in said.modules.items():
        state[f"{name}._extra_state".lstrip(".")] = decode_shared(value)
    tree: dict[str, Any] = {"model": state}
    if said.optimizer_state is not None:
        groups = [
            decode_first(group["options"]) | {"params": list(group["parameters"])}
            for group in said.optimizer_state["groups"]
        ]
        held = {
            name: {key: _stored_state(checkpoint, f"{name}.{key}", s, decode_first) for key, s in by.items()}
            for name, by in said.optimizer_state["state"].items()
        }
        tree["optim"] = {"state": held, "param_groups": groups}
    for name, value in said.extra.items():
        tree[name if name not in tree else f"extra.{name}"] = decode_shared(value)
    return tree


def _stored_state(checkpoint: Checkpoint, name: str, said: dict[str, Any], decoded: _Decoder) -> Any:
    if said.get("kind") == "value":
        return decoded(said["value"])
    if name not in checkpoint.optimizer:
        raise CheckpointError(
            f"optimizer state {name!r} is not cut like its parameter (it is kept in blocks, say), and "
            "torch.distributed.checkpoint has no place for that",
            "Export the model alone.",
        )
    return _stored_leaf(checkpoint, checkpoint.optimizer[name])


class _Decoder:
    """Values of a checkpoint's manifest, whose large tensors are in one file."""

    def __init__(self, checkpoint: Checkpoint, file: str) -> None:
        self._checkpoint, self._stored = checkpoint, checkpoint.values(file)

    def __call__(self, tree: Any) -> Any:
        return decode(tree, lambda name: self._checkpoint.read_whole(self._stored[name]))


def _stored_leaf(checkpoint: Checkpoint, stored: Stored) -> Leaf:
    tensor = stored.tensor
    whole = Piece(tensor.name, tensor.shape, tuple(range(len(tensor.shape))), 0)

    def parts() -> Iterator[tuple[Box, torch.Tensor]]:
        for start, stop in _intervals(tensor):
            values = torch.empty(stop - start, dtype=tensor.dtype)
            checkpoint.read(stored, start, stop, values)
            at = 0
            for box in boxes(whole, start, stop):
                yield box, values[at : at + box.num_elements].view(box.sizes)
                at += box.num_elements

    return Leaf(tensor.shape, tensor.dtype, parts)


def _intervals(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """A tensor in parts of a bearable size, by whole rows where rows are small."""
    step = max(1, _ITEM_BYTES // tensor.dtype.itemsize)
    row = tensor.num_elements // tensor.shape[0] if tensor.num_elements and tensor.shape else 1
    step = step // row * row or step
    for start in range(0, tensor.num_elements, step):
        yield start, min(start + step, tensor.num_elements)
