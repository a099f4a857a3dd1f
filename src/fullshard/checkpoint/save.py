"""`fs.save`: every rank writes its own bytes of one set of files; a rename makes the folder a checkpoint."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from fullshard.checkpoint import commit, random_state
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.values import Encoder
from fullshard.checkpoint.saving import contents, extra_values, optimizer_state
from fullshard.checkpoint.saving.background import Saving, finish_earlier
from fullshard.checkpoint.saving.compared import Checksums
from fullshard.checkpoint.saving.contents import Contents
from fullshard.checkpoint.saving.extra_values import ExtraValues
from fullshard.checkpoint.saving.host_copy import HostCopy
from fullshard.checkpoint.saving.job import Description, Job
from fullshard.checkpoint.saving.peer_copies import PeerJob
from fullshard.checkpoint.saving.writing import FilePlan, plan_files
from fullshard.comm.control import ControlGroup, control_group
from fullshard.comm.messages import record
from fullshard.elastic import reports
from fullshard.elastic.keeper_places import own_places
from fullshard.elastic.peer_ring import Spot, ring
from fullshard.engine.lane import disk_homes_of
from fullshard.engine.runtime import Runtime, model_of, runtime_of
from fullshard.environment import free_bytes, host_name
from fullshard.errors import OptionError, RankMismatch, StateError
from fullshard.keywords import checked_keywords

FILES = ("auto", "shared", "parts")


_OTHER_NAMES = {
    **dict.fromkeys(
        (
            "step",
            "epoch",
            "metadata",
            "scheduler",
            "lr_scheduler",
            "state",
            "client_state",
            "extra_state",
            "user",
        ),
        "Write extra={'step': step, ...}: fs.load returns it.",
    ),
    **dict.fromkeys(("async_", "async_save", "asynchronous", "blocking", "wait"), "Write background=True."),
    **dict.fromkeys(
        ("keep", "max_to_keep", "save_total_limit", "total_limit", "limit", "save_top_k"),
        "Write keep_last=N.",
    ),
    **dict.fromkeys(("folder", "directory", "save_dir", "checkpoint_id", "file", "to"), "Write path=..."),
    **dict.fromkeys(
        ("full_state_dict", "state_dict_type", "safe_serialization", "sharded", "format", "parts"),
        "files='shared' or 'parts': either holds every element of the model.",
    ),
    **dict.fromkeys(("max_shard_size", "file_size"), "`fullshard export --file-size` splits files by size."),
    **dict.fromkeys(
        ("replicas", "copies", "in_memory", "memory", "num_peers"), "Write peers=1: copies in peers' memory."
    ),
    **dict.fromkeys(("only_trainable", "trainable_only", "adapter_only"), "Write frozen=False."),
}


@checked_keywords(_OTHER_NAMES)
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
    keep_last: int | None = None,
    dtype: torch.dtype | None = None,
    files: str = "auto",
    frozen: bool = True,
    peers: int = 0,
) -> Saving:
    """Save a sharded model, and its optimizer, to a folder. Every rank must call it.

    The folder holds plain safetensors under the model's own names, which `from_pretrained` loads, and a
    manifest with checksums. It appears complete or not at all; an existing checkpoint is replaced only when
    the new one is complete. Gradients are not saved: save after the optimizer's step.

    extra: plain values that fs.load returns, such as the step or scheduler.state_dict(); they may differ
        between ranks.
    background: return as soon as everything is copied to host memory, and write while training continues.
        `.wait()` of the returned object waits; an error is raised there, or in the next save. Where host
        memory has no room for the copies, write before returning, with a warning.
    keep_last: keep this many of the newest checkpoints in the parent folder, including this one; remove the
        others.
    dtype: of the model's floating-point parameters in the files; None stores them in the dtype at rest.
    files: 'shared' has all ranks write into the same files, 'parts' gives each rank a file of its own, for
        file systems that cannot share; 'auto' tries. `fullshard export` turns parts into a plain model.
    frozen: False leaves out parameters that do not train, such as an adapter's base model. Load such a
        checkpoint with strict=False.
    peers: 0 writes to disk. 1 or more keeps the checkpoint in memory instead, in the run's agents, which
        outlive the ranks: on this rank's host, and on so many other hosts. It takes the place of the one that
        was there; fs.latest and fs.load find it under its path. For runs of `fullshard launch --elastic`;
        always in the background. Save to disk as well, now and then.
    """
    model = model_of(model)
    runtime = runtime_of(model)
    comm = runtime.comm
    comm.barrier("save")
    control = control_group(comm)
    options: dict[str, Any] = {"path": path, "keep_last": keep_last, "dtype": dtype, "files": files}
    options |= {"background": bool(background), "frozen": bool(frozen), "peers": peers}
    # Agreement between ranks delays the training loop in every save: two rounds, no more.
    encoded, requests = control.share(
        lambda: _check_request(runtime, model, optimizer, extra, options), "checking what to save"
    )
    check_same_request([request.options for request in requests], "save")
    beside = control.beside_training() if background or peers else None
    (saved, description), digests = control.share(
        lambda: _collect(runtime, model, optimizer, (dtype, frozen), beside), "collecting what to save"
    )
    differing_keys = saved.compared.differing([of_rank.compared for of_rank in digests])
    optimizer_state.settle(saved, differing_keys)
    values = extra_values.split_by_rank(encoded, [request.extra for request in requests])
    own, first = digests[control.index].replicated, digests[0].replicated
    _add_own_values(runtime, saved, values, {name for name in own if own[name] != first.get(name)})
    plans = _agreed_plans(control, saved, [of_rank.tensors for of_rank in digests])
    target = Path(requests[0].options["path"])
    if not peers and _is_too_large_to_copy(control, digests):
        beside = None
    control = beside or control
    job = (PeerJob if peers else Job)(control, target, saved, values, plans, description, (keep_last, files))
    if isinstance(job, PeerJob):
        _arrange_copies(job, control, [request.spot for request in requests], peers)
    if beside is not None:
        job.copy_to_host()
    saving = Saving(target, job.run, beside is not None)
    if any(request.leaves for request in requests):  # on all ranks alike: the run goes on from this save
        _leave_after(saving)
    return saving


def _leave_after(saving: Saving) -> NoReturn:
    """End this rank of an elastic run: hosts have joined, and it goes on with more ranks."""
    saving.wait()
    report = reports.own()
    if report is not None:
        report.leave()
    raise reports.LeftForRound(0)


def _arrange_copies(job: PeerJob, control: ControlGroup, spots: list[Spot], peers: int) -> None:
    places = own_places()
    assert places is not None  # it was checked with the request
    arranged = ring(spots, peers)
    if arranged.note and control.is_first and arranged.note not in control.notes:
        control.notes.add(arranged.note)
        warnings.warn(arranged.note, stacklevel=4)
    job.keep_in(places, spots, arranged)


@record
@dataclass(frozen=True)
class _Request:
    """The arguments of one rank's fs.save, for comparison between ranks."""

    options: dict[str, Any]
    extra: dict[str, str]  # digests of the user's values
    leaves: bool  # the agent of its host has asked it to leave after a save
    spot: Spot  # where copies in memory are kept


def _check_request(
    runtime: Runtime,
    model: nn.Module,
    optimizer: Any,
    extra: Mapping[str, Any] | None,
    options: dict[str, Any],
) -> tuple[dict[str, tuple[Any, Encoder]], _Request]:
    """Check what may be wrong on one rank alone, before any collective."""
    finish_earlier()
    path, keep_last, dtype, files = (options[name] for name in ("path", "keep_last", "dtype", "files"))
    check_model(runtime, model, optimizer, "save")
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"path is {path!r}", "Give the path of a folder.")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise OptionError(f"keep_last is {keep_last!r}", "Give a number of at least 1, or None to keep all.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"dtype is {dtype!r}", "Give a floating-point torch dtype, or None.")
    if files not in FILES:
        raise OptionError(f"files is {files!r}", f"Choose one of {', '.join(map(repr, FILES))}.")
    spot = _spot_for_copies(options) if options["peers"] != 0 else ("", "")
    encoded = extra_values.encode_extra(extra, len(runtime.comm.world.members))
    options = options | {"path": commit.resolved(path), "optimizer": type(optimizer).__name__}
    digests = {name: extra_values.digest(tree) for name, (tree, _) in encoded.items()}
    report = reports.own()
    return encoded, _Request(options, digests, report is not None and report.asked_to_leave, spot)


def _spot_for_copies(options: dict[str, Any]) -> Spot:
    """This rank's host and keeper, for a save into memory; raises if there can be none."""
    peers = options["peers"]
    if type(peers) is not int or peers < 0:
        raise OptionError(f"peers is {peers!r}", "Give the number of other hosts that hold a copy, or 0.")
    if options["keep_last"] is not None or options["files"] != "auto":
        raise OptionError(
            "keep_last and files are about checkpoints on disk, and peers keeps them in memory",
            "Leave them out: in memory the newest replaces the one before it.",
        )
    places = own_places()
    if places is None:
        raise StateError(
            f"fs.save(peers={peers}) in a run without an agent that could keep copies in its memory",
            "Start it with `fullshard launch --elastic MIN:MAX script.py`, or save to disk, without peers.",
        )
    return host_name(), places.word


def check_model(runtime: Runtime, model: nn.Module, optimizer: Any, verb: str) -> None:
    if runtime.root.modules[0] is not model:
        raise StateError(
            f"fs.{verb} got {type(model).__name__}, a part of a sharded model",
            "Give the model that fs.shard returned.",
        )
    if any(unit.is_unsharded for unit in runtime.units) or runtime.gathering.forward is not None:
        raise StateError(f"fs.{verb} inside fs.full or a forward", "Call it between steps.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer is a {type(optimizer).__name__}", "Give a torch optimizer, or None.")


def check_same_request(requests: list[dict[str, Any]], verb: str) -> None:
    """Raise on every rank if two ranks' requests differ: they would not run the same collectives."""
    for rank, request in enumerate(requests):
        for name, first in requests[0].items():
            if request[name] != first:
                raise RankMismatch(
                    f"fs.{verb} got {name}={request[name]!r} on rank {rank} and {first!r} on rank 0",
                    "Give every rank the same path, optimizer and options.",
                )


@record
@dataclass(frozen=True)
class _Digests:
    """Digests of a rank's list of tensors, and of each value that every rank has in full."""

    tensors: str
    replicated: dict[str, int]
    compared: Checksums
    short_bytes: int  # of host memory, for this rank's copies


def _collect(
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    of_model: tuple[torch.dtype | None, bool],
    beside: ControlGroup | None,
) -> tuple[tuple[Contents, Description], _Digests]:
    _check_disk(runtime)
    (dtype, frozen), inline = of_model, _inline_bytes(runtime)
    saved = Contents(encoder=Encoder(inline, of_optimizer=True), shared=Encoder(inline, of_optimizer=True))
    contents.add_model(saved, runtime, model, dtype, frozen)
    if optimizer is not None:
        optimizer_state.add_optimizer(saved, runtime, model, optimizer)
    tensors = hashlib.sha256(repr(_tensors(saved)).encode()).hexdigest()
    replicated = {name: contents.digest(value) for name, value in saved.replicated.items()}
    short = 0 if beside is None else _short_bytes(beside, saved)
    digests = _Digests(
        tensors, replicated | contents.module_digests(saved), saved.compared.checksums(), short
    )
    return (saved, _describe(runtime, model, dtype, frozen)), digests


def _check_disk(runtime: Runtime) -> None:
    """Bytes that have changed on a disk must not become a checkpoint with checksums that fit them."""
    for lane in runtime.lanes:
        lane.follow_edits()
    for home in disk_homes_of(runtime.lanes):
        home.check()


def _short_bytes(beside: ControlGroup, saved: Contents) -> int:
    """What host memory lacks for copies of everything. A tenth of what is free stays so."""
    copies = beside.host_copy or HostCopy()
    missing = copies.missing_bytes([*saved.model, *saved.optimizer])
    return max(0, missing - free_bytes(torch.device("cpu")) * 9 // 10)


def _is_too_large_to_copy(control: ControlGroup, digests: list[_Digests]) -> bool:
    """The same on all ranks. With values at rest in host memory, copies may take as much again."""
    short = max(of_rank.short_bytes for of_rank in digests)
    if short and control.is_first and "copies" not in control.notes:
        control.notes.add("copies")
        rank = next(rank for rank, of_rank in enumerate(digests) if of_rank.short_bytes == short)
        warnings.warn(
            f"fs.save(background=True) writes before it returns: a copy of what rank {rank} saves would need "
            f"{short / 2**30:.1f} GiB more than its host has free.",
            stacklevel=4,
        )
    return short > 0


def _tensors(saved: Contents) -> dict[str, list[Tensor]]:
    kinds = {"model": saved.model, "optimizer": saved.optimizer}
    return {kind: [s.tensor for s in slices] for kind, slices in kinds.items()}


def _add_own_values(runtime: Runtime, saved: Contents, values: ExtraValues, differing: set[str]) -> None:
    """Add what belongs to this rank alone: its random state, and values that differ from the first rank's."""
    encoder, of_random = _encoder(runtime), _encoder(runtime)
    own = {name: encoder.encode(value, name) for name, value in saved.replicated.items() if name in differing}
    modules = {n: tree for n, tree in saved.modules.items() if contents.module_key(n) in differing}
    values.add_own("values", own, encoder)
    values.add_own("modules", modules)
    values.add_own("optimizer", saved.own, saved.encoder)
    if runtime.comm.world_rank == runtime.comm.world.members[0]:
        values.own_tensors |= saved.shared.tensors
    state = of_random.encode(random_state.capture(runtime.comm.device), "random")
    values.add_own("random", state, of_random)


def _encoder(runtime: Runtime) -> Encoder:
    return Encoder(_inline_bytes(runtime))


def _inline_bytes(runtime: Runtime) -> int:
    return extra_values.inline_bytes(len(runtime.comm.world.members))


def _agreed_plans(control: ControlGroup, saved: Contents, digests: list[str]) -> dict[str, list[FilePlan]]:
    """The files to write. Raises on every rank if the lists of tensors differ."""
    own = _tensors(saved)
    for rank, other in enumerate(control.all_gather_object(own) if len(set(digests)) > 1 else ()):
        for kind in own:
            if other[kind] != own[kind]:
                differing = sorted(t.name for t in set(own[kind]) ^ set(other[kind])) or ["their order"]
                raise RankMismatch(
                    f"the {kind} has other tensors on rank {rank} than on rank {control.index}: "
                    f"{differing[:4]}",
                    "Give every rank the same model and optimizer, after the same steps.",
                )
    return {kind: plan_files(kind, tensors) for kind, tensors in own.items() if tensors}


def _describe(runtime: Runtime, model: nn.Module, dtype: torch.dtype | None, frozen: bool) -> Description:
    layout = {"ranks": len(runtime.comm.world.members), "strategy": runtime.options.strategy}
    # No config for a part of a model: from_pretrained would initialize the rest at random.
    return Description(layout, model_files(model, dtype) if frozen else {})


def model_files(model: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """The files that transformers' save_pretrained writes next to the weights.

    Only for a bare transformers model: inside a wrapper or with an adapter, the names differ from those that
    from_pretrained looks for, and with a config it would initialize the model at random.
    """
    plain = getattr(model, "_orig_mod", model)
    if callable(own := getattr(plain, "files_beside_weights", None)):
        return dict(own())  # a model that provides its own files
    if not hasattr(type(plain), "base_model_prefix") or getattr(plain, "_hf_peft_config_loaded", False):
        return {}
    contents_by_file: dict[str, bytes] = {}
    for attribute, name in (("config", "config.json"), ("generation_config", "generation_config.json")):
        config: Any = copy.deepcopy(getattr(plain, attribute, None))
        if not callable(getattr(config, "to_json_string", None)):
            continue
        if attribute == "config":
            stored = dtype or next((p.dtype for p in plain.parameters() if p.is_floating_point()), None)
            config.architectures = [type(plain).__name__]
            if stored is not None:
                label = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # before transformers 4.56
                setattr(config, label, str(stored).removeprefix("torch."))
        entries = json.loads(config.to_json_string())
        entries.pop("compile_config", None)  # of this run, not of the model
        contents_by_file[name] = (json.dumps(entries, indent=2, sort_keys=True) + "\n").encode()
    return contents_by_file
