"""`fs.load`: each rank reads and checks the bytes of its own elements before anything changes."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import commit, dcp
from fullshard.checkpoint.commit import is_checkpoint, newest_first
from fullshard.checkpoint.files import following_links
from fullshard.checkpoint.hugging_face import folders
from fullshard.checkpoint.loading.opening import Checkpoint, list_tensors, open_checkpoint
from fullshard.checkpoint.loading.optimizer_state import OptimizerLoad
from fullshard.checkpoint.loading.peer_copies import CopiedCheckpoint, find, open_copied
from fullshard.checkpoint.loading.planning import LoadPlan, plan_model
from fullshard.checkpoint.loading.reading import Foreign
from fullshard.checkpoint.loading.resume import Resume
from fullshard.checkpoint.ownership import resumed
from fullshard.checkpoint.parameters import buffers, sites, tied_names
from fullshard.checkpoint.rollbacks import note_loaded
from fullshard.checkpoint.save import check_model, check_same_request
from fullshard.checkpoint.saving.background import finish_earlier
from fullshard.comm.control import ControlGroup, control_group
from fullshard.elastic import reports
from fullshard.elastic.keeper_places import own_places
from fullshard.engine.lane import disk_homes_of
from fullshard.engine.runtime import Runtime, model_of, runtime_of
from fullshard.errors import CheckpointError, DamagedCheckpoint, RankMismatch
from fullshard.keywords import checked_keywords
from fullshard.state.optimizer_state import show_state_shards


class Loaded(dict[str, Any]):
    """What was saved as `extra`. `notes` lists what was not loaded as one might expect."""

    notes: tuple[str, ...] = ()


_OTHER_NAMES = {
    **dict.fromkeys(("folder", "directory", "load_dir", "checkpoint_id", "tag"), "Write path=..."),
    **dict.fromkeys(
        ("map_location", "device", "dtype"), "Leave it out: values go where the sharded parameters are."
    ),
    **dict.fromkeys(("weights_only", "mmap", "trust"), "Leave it out: nothing that is read can run code."),
    **dict.fromkeys(("verify", "checksum"), "Leave it out: every byte is checked anyway."),
    **dict.fromkeys(
        ("partial", "allow_missing", "ignore_missing", "load_module_strict"), "Write strict=False."
    ),
    **dict.fromkeys(("scheduler", "extra", "step", "state"), "It is in the dict that fs.load returns."),
    **dict.fromkeys(
        ("model_only", "load_optimizer_states", "load_module_only"),
        "Leave out the optimizer to load the model.",
    ),
}


@checked_keywords(_OTHER_NAMES)
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    follow_links: bool = False,
) -> Loaded:
    """Load a checkpoint into a sharded model, and its optimizer. Every rank must call it.

    It may have been saved with any number of ranks, strategy, precision and units. Every byte is checked
    before anything changes; an error leaves model and optimizer as they were. With an optimizer this resumes
    training: on as many ranks as before, random numbers continue where they were.

    `path` may also be a Hugging Face folder, one .safetensors file, or a torch.distributed.checkpoint folder;
    of these, the checksums that they have are checked, if any.

    Returns what was saved as `extra`, a dict. Its `.notes` lists what was left as it was, and why; there is a
    warning with the same text.
    strict: the checkpoint must have every tensor of the model, and no other. False loads what it has.
    follow_links: read files that are links out of the checkpoint's folder. Otherwise they are refused, except
        in a Hugging Face cache, where snapshots link to the files beside them.
    """
    with following_links(follow_links):
        return _load_from(path, model, optimizer, strict)


def _load_from(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None, strict: bool
) -> Loaded:
    model = model_of(model)
    runtime = runtime_of(model)
    runtime.comm.barrier("load")
    control = control_group(runtime.comm)
    opened: list[Checkpoint | Foreign] = []  # on this rank, even if another rank fails to open it
    places = own_places()
    found = None if places is None else find(control, Path(path), places)
    if found is not None:
        opened.append(open_copied(control, Path(path), found))

    def open_source() -> tuple[Checkpoint | Foreign, tuple[dict[str, Any], str]]:
        finish_earlier()
        check_model(runtime, model, optimizer, "load")
        if found is None:
            opened.append(_open(Path(path), optimizer is not None))
        source = opened[0]
        if isinstance(source, CopiedCheckpoint):
            list_tensors(source, optimizer is not None)
        request = {"strict": strict, "optimizer": type(optimizer).__name__, "format": type(source).__name__}
        if isinstance(source, Foreign):
            return source, (request | {"path": os.path.abspath(path)}, source.fingerprint())
        return source, (request, source.manifest.id)

    try:
        source, requests = control.share(open_source, "opening a checkpoint")
        check_same_request([request for request, _ in requests], "load")
        _check_same_source(source, {identity for _, identity in requests})
        if isinstance(source, Foreign):
            loaded = _load_foreign(control, source, runtime, model, optimizer, strict)
            _seal_disk(runtime)
            return loaded
        loaded = _load(control, source, runtime, model, optimizer, strict)
        _seal_disk(runtime)
        note_loaded(source.manifest.saved_at_ns)
        if optimizer is not None and (report := reports.own()) is not None:
            report.loaded(str(source.folder))
        return loaded
    finally:
        for source in opened:
            source.close()


def _seal_disk(runtime: Runtime) -> None:
    """What rests on a disk now is not to change there."""
    for lane in runtime.lanes:
        if lane.disk_homes:
            lane.loaded()
    for home in disk_homes_of(runtime.lanes):
        home.seal()


def _open(path: Path, optimizer: bool) -> Checkpoint | Foreign:
    if not is_checkpoint(commit.find(path)):
        for here, opens in ((dcp.is_dcp, dcp.open_dcp), (folders.is_model, folders.open_model)):
            if here(path):
                return opens(path)
    return open_checkpoint(path, optimizer)


def _check_same_source(source: Checkpoint | Foreign, identities: set[str]) -> None:
    if len(identities) == 1:
        return
    folder = str(source.folder)
    if isinstance(source, Foreign):
        raise RankMismatch(
            f"ranks see different tensors at {folder!r}", "Give every host a copy of the same files."
        )
    raise RankMismatch(f"ranks opened different checkpoints at {folder!r}", "Load one path.")


def _load(
    control: ControlGroup,
    source: Checkpoint,
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> Loaded:
    resume = Resume(source, runtime, control)
    work = LoadPlan()

    def plan() -> OptimizerLoad | None:
        state = None if optimizer is None else OptimizerLoad(resume, optimizer, model)
        plan_model(work, source, runtime, model, source.manifest.tied, strict)
        resume.plan(work)
        if state is not None:
            state.plan(work)
        return state

    def check() -> None:
        source.blocks.verify()
        resume.read(model)

    def plan_and_check() -> OptimizerLoad | None:
        state = plan()
        check()
        return state

    if isinstance(source, CopiedCheckpoint):  # what is announced has to come from other hosts first
        state = control.together(plan, "checking a checkpoint")
        source.blocks.fetch(control)
        control.together(check, "checking a checkpoint")
    else:
        state = control.together(plan_and_check, "checking a checkpoint")
    apply(control, work)
    _apply_optimizer(state, optimizer)
    control.together(lambda: resume.apply(work, optimizer is not None), "loading")
    if optimizer is not None:
        _continue_run(control, source)
    return _with_notes(control, Loaded(resume.extra), work.notes)


def _continue_run(control: ControlGroup, source: Checkpoint) -> None:
    """From now on this is the run that saved the checkpoint: keep_last removes its older ones."""
    if control.is_first:  # the one that removes
        with contextlib.suppress(OSError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged ones, which nobody asked for here
            parent = source.folder.parent
            resumed(source.folder, source.manifest, newest_first(parent) if parent.is_dir() else [])


def _load_foreign(
    control: ControlGroup,
    source: Foreign,
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool,
) -> Loaded:
    work = LoadPlan()

    def plan() -> Any:
        names = {site.name for site in sites(runtime, model)} | set(buffers(model))
        source.fit(model, names | set(tied_names(model)))
        plan_model(work, source, runtime, model, source.tied, strict)
        state = None if optimizer is None else source.optimizer_load(runtime, optimizer, model)
        if state is not None:
            state.plan(work)
        extra = source.others(work, model)
        source.blocks.verify()
        return state, extra

    state, extra = control.together(plan, "checking a checkpoint")
    apply(control, work)
    _apply_optimizer(state, optimizer)
    return _with_notes(control, Loaded(extra), work.notes)


def _apply_optimizer(state: Any, optimizer: torch.optim.Optimizer | None) -> None:
    if state is not None and optimizer is not None:
        state.apply()
        show_state_shards(optimizer)


def apply(control: ControlGroup, work: LoadPlan) -> None:
    """Change the tensors, after everything has been checked."""

    def change() -> None:
        try:
            with torch.no_grad():
                for read in work.reads:
                    read()
        except CheckpointError as error:
            raise DamagedCheckpoint(
                f"{error.what}. It was intact when it was checked; the model is now partly loaded",
                "Load another checkpoint before you continue, and check the disk.",
            ) from error

    control.together(change, "loading")


def _with_notes(control: ControlGroup, loaded: Loaded, notes: list[str]) -> Loaded:
    loaded.notes = tuple(notes)
    if notes and control.is_first:
        warnings.warn("; ".join(notes), stacklevel=4)
    return loaded
