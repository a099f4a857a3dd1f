"""`fs.load`: each rank reads the bytes of its own elements, checks them, and only then changes anything."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.agreements import Council, council
from fullshard.checkpoint import contents, dcp, hugging_face
from fullshard.checkpoint.background import finish_earlier
from fullshard.checkpoint.commit import find, is_checkpoint
from fullshard.checkpoint.opening import Checkpoint, open_checkpoint
from fullshard.checkpoint.optimizer_state import OptimizerLoad
from fullshard.checkpoint.reading import Foreign, available_bytes
from fullshard.checkpoint.resume import Resume
from fullshard.checkpoint.save import check_model
from fullshard.checkpoint.targets import Work, plan_model
from fullshard.engine import runtime_of
from fullshard.errors import RankMismatch
from fullshard.runtime import Runtime
from fullshard.world import launch


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

    Returns what was saved as `extra`, a dict. Its `.notes` lists what was left as it was, and why; a warning
    says the same.
    strict: every tensor of the model must be there, and no other. False loads what is there.
    """
    runtime = runtime_of(model)
    runtime.comm.meet("load")
    talk = council(runtime.comm)
    finish_earlier(talk)
    talk.together(lambda: check_model(runtime, model, optimizer, "load"), "checking what to load")
    source = talk.together(lambda: _open(Path(path)), "opening a checkpoint")
    try:
        if isinstance(source, Foreign):
            return _load_foreign(talk, source, runtime, model, optimizer, strict)
        return _load(talk, source, runtime, model, optimizer, strict)
    finally:
        source.close()


def _open(path: Path) -> Checkpoint | Foreign:
    if not is_checkpoint(find(path)):
        for here, opens in ((dcp.is_dcp, dcp.open_dcp), (hugging_face.is_model, hugging_face.open_model)):
            if here(path):
                return opens(path)
    return open_checkpoint(path)


def _load(
    talk: Council,
    source: Checkpoint,
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> Loaded:
    if len(set(talk.tell(source.manifest.id))) > 1:
        raise RankMismatch(f"ranks opened different checkpoints at {str(source.folder)!r}", "Load one path.")
    resume = Resume(source, runtime, talk)
    state = talk.together(lambda: _state(resume, optimizer, model), "looking at the optimizer")
    work = Work()

    def plan() -> None:
        plan_model(work, source, runtime, model, source.manifest.tied, strict)
        resume.plan(work)
        if state is not None:
            state.plan(work)
        source.blocks.verify(available_bytes() // (2 * launch().local_ranks))
        resume.read(model)

    talk.together(plan, "checking a checkpoint")
    apply(talk, work)
    if state is not None:
        state.apply()
    talk.together(lambda: resume.apply(work, optimizer is not None), "loading")
    return _said(talk, Loaded(resume.extra), work.notes)


def _load_foreign(
    talk: Council,
    source: Foreign,
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> Loaded:
    work = Work()

    def plan() -> Any:
        names = {site.name for site in contents.sites(runtime, model)} | set(contents.buffers(model))
        source.fit(model, names | set(contents.tied_names(model)))
        plan_model(work, source, runtime, model, source.tied, strict)
        state = None if optimizer is None else source.optimizer_load(runtime, optimizer, model)
        if state is not None:
            state.plan(work)
        source.blocks.verify(0)
        return state

    state = talk.together(plan, "checking a checkpoint")
    apply(talk, work)
    if state is not None:
        state.apply()
    return _said(talk, Loaded(), work.notes)


def _state(resume: Resume, optimizer: torch.optim.Optimizer | None, model: nn.Module) -> OptimizerLoad | None:
    return None if optimizer is None else OptimizerLoad(resume, optimizer, model)


def apply(talk: Council, work: Work) -> None:
    """Everything was checked: now tensors change."""

    def change() -> None:
        with torch.no_grad():
            for read in work.reads:
                read()

    talk.together(change, "loading")


def _said(talk: Council, loaded: Loaded, notes: list[str]) -> Loaded:
    loaded.notes = tuple(notes)
    if notes and talk.is_first:
        warnings.warn("; ".join(notes), stacklevel=4)
    return loaded
