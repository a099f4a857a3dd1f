"""`fs.load`: each rank reads the bytes of its own elements, checks them, and only then changes anything."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import contents, dcp
from fullshard.checkpoint.background import finish_earlier
from fullshard.checkpoint.commit import find, is_checkpoint
from fullshard.checkpoint.hugging_face import folders
from fullshard.checkpoint.opening import Checkpoint, open_checkpoint
from fullshard.checkpoint.optimizer_state import OptimizerLoad
from fullshard.checkpoint.reading import Foreign
from fullshard.checkpoint.resume import Resume
from fullshard.checkpoint.save import agreed, check_model
from fullshard.checkpoint.targets import Work, plan_model
from fullshard.comm.control import ControlGroup, control_group
from fullshard.engine.runtime import Runtime, model_of, runtime_of
from fullshard.errors import CheckpointError, RankMismatch
from fullshard.state.optimizer_state import show_state_shards


class Loaded(dict[str, Any]):
    """What was saved as `extra`. `notes` says what did not go as a plain reader would expect."""

    notes: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> Loaded:
    """Load a checkpoint into a sharded model, and its optimizer. Every rank must call it.

    It may have been saved with any number of ranks, strategy, precision and units. Every byte is checked
    before anything changes; an error leaves model and optimizer as they were. With an optimizer this is a
    resume: random numbers go on where they were, if there are as many ranks.

    `path` may also be a Hugging Face folder, one .safetensors file, or a torch.distributed.checkpoint folder;
    what checksums these have is checked, and there may be none.

    Returns what was saved as `extra`, a dict. Its `.notes` lists what was left as it was, and why; a warning
    says the same.
    strict: every tensor of the model must be there, and no other. False loads what is there.
    """
    model = model_of(model)
    runtime = runtime_of(model)
    runtime.comm.barrier("load")
    control = control_group(runtime.comm)
    control.together(finish_earlier, "finishing the save before this load")
    control.together(lambda: check_model(runtime, model, optimizer, "load"), "checking what to load")
    source = control.together(lambda: _open(Path(path), optimizer is not None), "opening a checkpoint")
    try:
        foreign = isinstance(source, Foreign)
        asked = {"strict": strict, "optimizer": type(optimizer).__name__, "format": type(source).__name__}
        agreed(
            control.all_gather_object(asked | {"path": os.path.abspath(path) if foreign else None}), "load"
        )
        if isinstance(source, Foreign):
            return _load_foreign(control, source, runtime, model, optimizer, strict)
        return _load(control, source, runtime, model, optimizer, strict)
    finally:
        source.close()


def _open(path: Path, optimizer: bool) -> Checkpoint | Foreign:
    if not is_checkpoint(find(path)):
        for here, opens in ((dcp.is_dcp, dcp.open_dcp), (folders.is_model, folders.open_model)):
            if here(path):
                return opens(path)
    return open_checkpoint(path, optimizer)


def _load(
    control: ControlGroup,
    source: Checkpoint,
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> Loaded:
    if len(set(control.all_gather_object(source.manifest.id))) > 1:
        raise RankMismatch(f"ranks opened different checkpoints at {str(source.folder)!r}", "Load one path.")
    resume = Resume(source, runtime, control)
    state = control.together(lambda: _state(resume, optimizer, model), "looking at the optimizer")
    work = Work()

    def plan() -> None:
        plan_model(work, source, runtime, model, source.manifest.tied, strict)
        resume.plan(work)
        if state is not None:
            state.plan(work)
        source.blocks.verify()
        resume.read(model)

    control.together(plan, "checking a checkpoint")
    apply(control, work)
    if state is not None and optimizer is not None:
        state.apply()
        show_state_shards(optimizer)
    control.together(lambda: resume.apply(work, optimizer is not None), "loading")
    return _said(control, Loaded(resume.extra), work.notes)


def _load_foreign(
    control: ControlGroup,
    source: Foreign,
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> Loaded:
    if len(set(control.all_gather_object(source.fingerprint()))) > 1:
        raise RankMismatch(
            f"ranks see different tensors at {str(source.folder)!r}",
            "Give every host a copy of the same files.",
        )
    work = Work()

    def plan() -> Any:
        names = {site.name for site in contents.sites(runtime, model)} | set(contents.buffers(model))
        source.fit(model, names | set(contents.tied_names(model)))
        plan_model(work, source, runtime, model, source.tied, strict)
        state = None if optimizer is None else source.optimizer_load(runtime, optimizer, model)
        if state is not None:
            state.plan(work)
        extra = source.others(work, model)
        source.blocks.verify()
        return state, extra

    state, extra = control.together(plan, "checking a checkpoint")
    apply(control, work)
    if state is not None and optimizer is not None:
        state.apply()
        show_state_shards(optimizer)
    return _said(control, Loaded(extra), work.notes)


def _state(resume: Resume, optimizer: torch.optim.Optimizer | None, model: nn.Module) -> OptimizerLoad | None:
    return None if optimizer is None else OptimizerLoad(resume, optimizer, model)


def apply(control: ControlGroup, work: Work) -> None:
    """Everything was checked: now tensors change."""

    def change() -> None:
        try:
            with torch.no_grad():
                for read in work.reads:
                    read()
        except CheckpointError as error:
            raise CheckpointError(
                f"{error.what}. It was sound a moment ago; the model is partly loaded now",
                "Load another checkpoint before you go on, and have the disk looked at.",
            ) from error

    control.together(change, "loading")


def _said(control: ControlGroup, loaded: Loaded, notes: list[str]) -> Loaded:
    loaded.notes = tuple(notes)
    if notes and control.is_first:
        warnings.warn("; ".join(notes), stacklevel=4)
    return loaded
