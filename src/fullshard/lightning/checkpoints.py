"""Checkpoints of Lightning: the folder that fs.save writes, with Lightning's own values in it.

All ranks write, also where Lightning would have only the first one do so. Values that are plain data are kept
as such; others (an object among the hyperparameters, say) are bytes of torch.save, which come back only as
far as torch.load lets them: with `weights_only=False`, or if torch knows their classes to be harmless.
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
from fullshard.checkpoint.format.values import Encoder
from fullshard.checkpoint.load import load
from fullshard.checkpoint.save import save
from fullshard.comm.control import ControlGroup, control_group
from fullshard.engine.runtime import runtime_of
from fullshard.errors import CheckpointError, FullshardError, NotSupported
from fullshard.state.optimizer_state import show_state_shards

VALUES = "lightning"  # the name among fs.save's extra values
ODD = "lightning, pickled"
GROUPS = "lightning, groups"  # how many groups each optimizer has: fs.save sees them as one optimizer
# A fit that resumes does not look at these, and Lightning does not pass weights_only= on to such strategies.
UNUSED = ("hyper_parameters", "hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_type")
STATE = "fabric state"  # which of the names given to fabric.save were the model and its optimizers


def talk_of(module: nn.Module, phase: str) -> ControlGroup:
    """All ranks, if all of them come: a save or load under `if rank == 0` is an error here, not a hang."""
    comm = runtime_of(module).comm
    comm.barrier(phase)
    return control_group(comm)


def place_of(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint goes. Lightning's tuner hides its own behind a dot, which here means: unfinished."""
    found = Path(path)
    return found.with_name(found.name.lstrip(".")) if found.name.startswith(".") else found


def save_all(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    values: Mapping[str, Any],
) -> None:
    """Write a checkpoint on all ranks together. As in Lightning, the first rank's path and values count."""
    control = talk_of(module, "save")

    def encode() -> tuple[Path, dict[str, Any], dict[str, bytes]]:
        plain, odd = _sorted(values) if control.is_first else ({}, {})
        return place_of(path), plain, odd

    place, plain, odd = control.broadcast_object(control.together(encode, "reading Lightning's values"))
    extra: dict[str, Any] = {VALUES: plain, GROUPS: [len(o.param_groups) for o in optimizers]}
    save(place, module, together(optimizers), extra=extra | ({ODD: odd} if odd else {}))


def _sorted(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What can be written as plain data, and the rest as bytes."""
    plain: dict[str, Any] = {}
    odd: dict[str, bytes] = {}
    for name, value in values.items():
        try:
            Encoder().encode(value, name)
            plain[name] = value
        except CheckpointError:
            written = io.BytesIO()
            torch.save(value, written)
            odd[name] = written.getvalue()
    return plain, odd


def load_all(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a checkpoint on all ranks together, and return Lightning's values."""
    control = talk_of(module, "load")
    place = control.broadcast_object(place_of(path))
    several = together(optimizers)
    extra = load(place, module, several, strict=strict)
    hand_back(several, optimizers)
    read = partial(values_of, extra, place, weights_only, may_lack=UNUSED)
    return control.together(read, "reading Lightning's values")


def values_of(
    extra: Mapping[str, Any], place: Path, weights_only: bool | None, may_lack: Sequence[str] = ()
) -> dict[str, Any]:
    """Lightning's values out of fs.load's; of those that `may_lack` what torch.load refuses is left out."""
    if VALUES not in extra:
        raise CheckpointError(
            f"{str(place)!r} was not saved by Lightning: it has weights, and nothing of a Trainer or Fabric",
            "Load it with fs.load into the sharded module, in on_fit_start, say.",
        )
    values = dict(extra[VALUES])
    for name, data in extra.get(ODD, {}).items():
        try:
            values[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except Exception as error:
            if isinstance(error, FullshardError):
                raise
            if name not in may_lack:
                raise not_plain(name, str(place)) from error
    return values


def not_plain(name: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"{name!r} in {where!r} is not plain data, and reading it could run code",
        "If you trust the file, say weights_only=False to the strategy, or to what reads it.",
    )


def load_plain(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """`load_state_dict` of whole values, as a plain checkpoint holds them: each rank keeps its elements."""
    show_state_shards(optimizer)
    optimizer.load_state_dict(saved)


def remove(path: str | os.PathLike[str]) -> bool:
    """Remove a checkpoint of ours, its manifest first. False: it is none."""
    folder = place_of(path)
    if not commit.is_checkpoint(folder):
        return False
    files.remove_tree(files.disk, folder, manifest.NAME)
    return True


# ---- several optimizers as one: fs.save takes one


class Together(torch.optim.Optimizer):
    """Groups and states of several optimizers, to save and load. It steps nothing."""

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
        super().__init__([torch.empty(0)], {})  # what torch keeps beside groups and states
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state = {p: s for optimizer in optimizers for p, s in optimizer.state.items()}  # type: ignore[assignment]


def together(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """None for none, the only one as it is, several under a name that tells them: 'Adam and SGD'."""
    if len(optimizers) < 2:
        return optimizers[0] if optimizers else None
    name = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    kind: type[Together] = type(name, (Together,), {})
    return kind(optimizers)


def hand_back(several: torch.optim.Optimizer | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """After a load: each optimizer gets the state of its own parameters. Groups were its own all along."""
    if not isinstance(several, Together):
        return
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in several.state:
                optimizer.state[parameter] = several.state[parameter]
            else:
                optimizer.state.pop(parameter, None)
