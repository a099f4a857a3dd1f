"""Checkpoints of Lightning: the folder that fs.save writes, with Lightning's own values in it.

All ranks write, also where Lightning would write on the first one only. Values that are plain data are kept
as such; others (an object among the hyperparameters, for example) are kept as bytes of torch.save, and are
loaded only with `weights_only=False`, or if the script has declared their classes safe to torch.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import commit, files
from fullshard.checkpoint.format import manifest
from fullshard.checkpoint.format.torch_archives import NotPlain, read_bytes
from fullshard.checkpoint.format.values import Encoder
from fullshard.checkpoint.load import load
from fullshard.checkpoint.save import save
from fullshard.comm.control import ControlGroup, control_group
from fullshard.engine.runtime import runtime_of
from fullshard.engine.step.optimizers import owned_step
from fullshard.errors import CheckpointError, FullshardError, NotSupported
from fullshard.state.optimizer_state import show_state_shards

VALUES = "lightning"  # the name among fs.save's extra values
PICKLED = "lightning, pickled"
GROUPS = "lightning, groups"  # the number of groups of each optimizer: fs.save gets one optimizer
# Not needed to resume a fit, and Lightning does not pass weights_only= to strategies like this one.
UNUSED = ("hyper_parameters", "hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_type")
STATE = "fabric state"  # which of the names given to fabric.save were the model and its optimizers


def joined_control_group(module: nn.Module, phase: str) -> ControlGroup:
    """The control group, once all ranks have called: a save under `if rank == 0` raises and does not hang."""
    comm = runtime_of(module).comm
    comm.barrier(phase)
    return control_group(comm)


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Without a leading dot, which Lightning's tuner uses, and which marks unfinished checkpoints here."""
    given = Path(path)
    return given.with_name(given.name.lstrip(".")) if given.name.startswith(".") else given


def save_all(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    values: Mapping[str, Any],
) -> None:
    """Write a checkpoint on all ranks together. As in Lightning, the first rank's path and values count."""
    control = joined_control_group(module, "save")

    def encode() -> tuple[Path, dict[str, Any], dict[str, bytes]]:
        plain, pickled = _sorted(values) if control.is_first else ({}, {})
        return checkpoint_path(path), plain, pickled

    folder, plain, pickled = control.broadcast_object(control.together(encode, "reading Lightning's values"))
    extra: dict[str, Any] = {VALUES: plain, GROUPS: [len(o.param_groups) for o in optimizers]}
    save(folder, module, combine(optimizers), extra=extra | ({PICKLED: pickled} if pickled else {}))


def _sorted(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Values that can be written as plain data, and the others as bytes."""
    plain: dict[str, Any] = {}
    pickled: dict[str, bytes] = {}
    for name, value in values.items():
        try:
            Encoder().encode(value, name)
            plain[name] = value
        except CheckpointError:
            written = io.BytesIO()
            torch.save(value, written)
            pickled[name] = written.getvalue()
    return plain, pickled


def load_all(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a checkpoint on all ranks together, and return Lightning's values."""
    control = joined_control_group(module, "load")
    folder = control.broadcast_object(checkpoint_path(path))
    combined = combine(optimizers)
    extra = load(folder, module, combined, strict=strict)
    distribute_state(combined, optimizers)
    read = partial(values_of, extra, folder, weights_only, optional=UNUSED)
    return control.together(read, "reading Lightning's values")


def values_of(
    extra: Mapping[str, Any], folder: Path, weights_only: bool | None, optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Lightning's values among fs.load's extra ones, without the `optional` ones that torch.load refuses."""
    if VALUES not in extra:
        raise CheckpointError(
            f"{str(folder)!r} was not saved by Lightning: it has no state of a Trainer or Fabric",
            "Load it with fs.load into the sharded module, for example in on_fit_start.",
        )
    values = dict(extra[VALUES])
    for name, data in extra.get(PICKLED, {}).items():
        try:
            values[name] = _unpickled(name, data, weights_only)
        except Exception as error:
            if isinstance(error, FullshardError):
                raise
            if name not in optional:
                raise not_plain(name, str(folder)) from error
    return values


def _unpickled(name: str, data: bytes, weights_only: bool | None) -> Any:
    """A value that was kept as bytes of torch.save: plain data, or with the user's permission anything."""
    if weights_only is not False:
        try:
            return read_bytes(f"the value {name!r}", data)
        except NotPlain:
            if not torch.serialization.get_safe_globals():  # classes that the script has declared safe
                raise
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only is not False)


def not_plain(name: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{name!r} in {where!r} is not plain data, and reading it could run code",
        "If you trust the file, pass weights_only=False to the strategy, or to the function that reads it.",
    )


def load_plain(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """`load_state_dict` of unsharded values, as in a plain checkpoint: each rank keeps its elements."""
    show_state_shards(optimizer)
    optimizer.load_state_dict(saved)


def remove(path: str | os.PathLike[str]) -> bool:
    """Remove a checkpoint folder, its manifest first. False if it is not one of ours."""
    folder = checkpoint_path(path)
    if not commit.is_checkpoint(folder):
        return False
    files.remove_tree(files.disk, folder, manifest.NAME)
    return True


# ---- several optimizers as one: fs.save takes one


class Combined(torch.optim.Optimizer):
    """Groups and states of several optimizers, to save and load. It has no step."""

    fullshard_step = "element-wise"  # `combine` refuses others

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        seen: dict[int, str] = {}
        for optimizer in optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                other = seen.setdefault(id(parameter), type(optimizer).__name__)
                if any(parameter in o.state for o in optimizers if o is not optimizer):
                    raise NotSupported(
                        f"a checkpoint of two optimizers, {other} and {type(optimizer).__name__}, that hold "
                        f"the same parameter (of shape {tuple(parameter.shape)} here)",
                        "Give each parameter to one optimizer, or save with save_weights_only=True.",
                    )
        super().__init__([torch.empty(0)], {})  # torch's other attributes
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}  # type: ignore[assignment]


def combine(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """None for none, a single one as it is, several under a name such as 'Adam and SGD'."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    name = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    for optimizer in optimizers:
        if owned_step(optimizer) is not None:
            raise NotSupported(
                f"a checkpoint of several optimizers, {name}, of which {type(optimizer).__name__} steps on "
                f"entire tensors",
                "Use one optimizer, or save with save_weights_only=True.",
            )
    kind: type[Combined] = type(name, (Combined,), {})
    return kind(optimizers)


def distribute_state(
    combined: torch.optim.Optimizer | None, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """After a load, give each optimizer the state of its parameters. Groups are shared objects already."""
    if not isinstance(combined, Combined):
        return
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in combined.state:
                optimizer.state[parameter] = combined.state[parameter]
            else:
                optimizer.state.pop(parameter, None)
