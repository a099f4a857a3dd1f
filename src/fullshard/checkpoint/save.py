"""`fs.save`: every rank writes its own bytes of one set of files; a rename makes them a checkpoint."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import contents, random_state, trees
from fullshard.checkpoint.background import Saving, finish_earlier
from fullshard.checkpoint.contents import Contents
from fullshard.checkpoint.format.headers import Tensor
from fullshard.checkpoint.format.values import Encoder
from fullshard.checkpoint.job import Description, Job
from fullshard.checkpoint.trees import Trees
from fullshard.checkpoint.writing import FilePlan, plan_files
from fullshard.comm.control import ControlGroup, control_group
from fullshard.engine.runtime import Runtime, model_of, runtime_of
from fullshard.errors import OptionError, RankMismatch, StateError

FILES = ("auto", "shared", "parts")


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
) -> Saving:
    """Save a sharded model, and its optimizer, to a folder. Every rank must call it.

    The folder holds plain safetensors under the model's own names, which `from_pretrained` loads, and a
    manifest with checksums. It appears whole or not at all; one that is there is replaced only when the new
    one is complete. Gradients are not saved: save after the optimizer's step.

    extra: plain values to get back from fs.load, such as the step or scheduler.state_dict(); they may differ
        by rank.
    background: return when everything is copied to host memory, and write while training goes on. `.wait()`
        of what is returned waits; an error is raised there, or in the next save.
    keep_last: keep this many of the newest checkpoints in the parent folder, this one included; remove the
        others.
    dtype: of the model's floating point values in the files; None writes what is at rest.
    files: 'shared' has all ranks write into the same files, 'parts' gives each rank a file of its own, for
        file systems that cannot share; 'auto' tries. `fullshard export` turns parts into a plain model.
    frozen: False leaves out parameters that do not train, such as an adapter's base model. Load it with
        strict=False.
    """
    model = model_of(model)
    runtime = runtime_of(model)
    comm = runtime.comm
    comm.barrier("save")
    control = control_group(comm)
    asked = {"keep_last": keep_last, "dtype": dtype, "files": files, "background": bool(background)}
    asked["frozen"] = bool(frozen)
    # What ranks must agree on before the loop may go on costs time in every save: two rounds, no more.
    encoded, said = control.share(
        lambda: _look(runtime, model, optimizer, extra, asked | {"path": path}), "checking what to save"
    )
    agreed([each.asked for each in said], "save")
    (held, description), sums = control.share(
        lambda: _take(runtime, model, optimizer, (dtype, frozen)), "looking at what to save"
    )
    values = trees.sort_out(encoded, [each.extra for each in said])
    _own_values(runtime, held, values, sums[control.index].whole.items() - sums[0].whole.items())
    plans = _agreed_plans(control, held, [each.tensors for each in sums])
    target = Path(said[0].asked["path"])
    job = Job(control, target, held, values, plans, description, (keep_last, files))
    if background:
        job.copy_to_host()
    return Saving(target, job.run, background)


@dataclass(frozen=True)
class _Asked:
    """What a rank was asked to save, for the others to compare."""

    asked: dict[str, Any]
    extra: dict[str, str]  # digests of the user's values


def _look(
    runtime: Runtime,
    model: nn.Module,
    optimizer: Any,
    extra: Mapping[str, Any] | None,
    asked: dict[str, Any],
) -> tuple[dict[str, tuple[Any, Encoder]], _Asked]:
    """What may be wrong on one rank alone, before ranks do anything together."""
    finish_earlier()
    path, keep_last, dtype, files = (asked[name] for name in ("path", "keep_last", "dtype", "files"))
    check_model(runtime, model, optimizer, "save")
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"path is {path!r}", "Give the path of a folder.")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise OptionError(f"keep_last is {keep_last!r}", "Give a number of at least 1, or None to keep all.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise OptionError(f"dtype is {dtype!r}", "Give a floating point torch dtype, or None.")
    if files not in FILES:
        raise OptionError(f"files is {files!r}", f"Choose one of {', '.join(map(repr, FILES))}.")
    encoded = trees.encode_extra(extra)
    asked |= {"path": _place(path), "optimizer": type(optimizer).__name__}
    return encoded, _Asked(asked, {name: trees.digest(tree) for name, (tree, _) in encoded.items()})


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


def _place(path: str | os.PathLike[str]) -> str:
    """Where to save. A link to a checkpoint stays a link: what it leads to is replaced."""
    found = os.path.abspath(path)
    return os.path.realpath(found) if os.path.islink(found) else found


def agreed(everyone: list[dict[str, Any]], verb: str) -> None:
    """Ranks that ask for different things would part on the way; instead all of them hear of it."""
    for rank, theirs in enumerate(everyone):
        for name, first in everyone[0].items():
            if theirs[name] != first:
                raise RankMismatch(
                    f"fs.{verb} got {name}={theirs[name]!r} on rank {rank} and {first!r} on rank 0",
                    "Give every rank the same path, optimizer and options.",
                )


@dataclass(frozen=True)
class _Sums:
    """What a rank holds, in short: of its list of tensors, and of each value that is whole on every rank."""

    tensors: str
    whole: dict[str, int]


def _take(
    runtime: Runtime,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    of_model: tuple[torch.dtype | None, bool],
) -> tuple[tuple[Contents, Description], _Sums]:
    held, (dtype, frozen) = Contents(), of_model
    contents.take_model(held, runtime, model, dtype, frozen)
    if optimizer is not None:
        contents.take_optimizer(held, runtime, model, optimizer)
    tensors = hashlib.sha256(repr(_tensors(held)).encode()).hexdigest()
    whole = {name: contents.digest(value) for name, value in held.whole.items()}
    sums = _Sums(tensors, whole | contents.module_digests(held))
    return (held, _describe(runtime, model, dtype, frozen)), sums


def _tensors(held: Contents) -> dict[str, list[Tensor]]:
    kinds = {"model": held.model, "optimizer": held.optimizer}
    return {kind: [h.tensor for h in values] for kind, values in kinds.items()}


def _own_values(runtime: Runtime, held: Contents, values: Trees, differing: set[tuple[str, int]]) -> None:
    """What belongs to this rank alone: its random numbers, and whole values that are not the first rank's."""
    encoder, odd = Encoder(), {name for name, _ in differing}
    own = {name: encoder.encode(value, name) for name, value in held.whole.items() if name in odd}
    values.add_own("values", own, encoder)
    values.add_own("modules", {n: tree for n, tree in held.modules.items() if contents.module_key(n) in odd})
    values.add_own("optimizer", held.own, held.encoder)
    values.add_own("random", Encoder().encode(random_state.take(runtime.comm.device), "random"))


def _agreed_plans(control: ControlGroup, held: Contents, sums: list[str]) -> dict[str, list[FilePlan]]:
    """The files, which every rank must see alike."""
    names = _tensors(held)
    for rank, theirs in enumerate(control.all_gather_object(names) if len(set(sums)) > 1 else ()):
        for kind in names:
            if theirs[kind] != names[kind]:
                mine, other = set(names[kind]), set(theirs[kind])
                odd = sorted(t.name for t in mine ^ other) or ["their order"]
                raise RankMismatch(
                    f"rank {rank} holds other tensors for the {kind} than rank {control.index}: {odd[:4]}",
                    "Give every rank the same model and optimizer, after the same steps.",
                )
    return {kind: plan_files(kind, tensors) for kind, tensors in names.items() if tensors}


def _describe(runtime: Runtime, model: nn.Module, dtype: torch.dtype | None, frozen: bool) -> Description:
    layout = {"ranks": len(runtime.comm.world.members), "strategy": runtime.options.strategy}
    # A part of a model is not one: with a config, from_pretrained would fill in the rest at random.
    return Description(layout, model_files(model, dtype) if frozen else {})


def model_files(model: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """The files that transformers keeps beside the weights, as its save_pretrained writes them.

    Only for a model of transformers' own: with anything around it, or an adapter inside, its names are not
    those that from_pretrained looks for, and a config would have it start from random values.
    """
    plain = getattr(model, "_orig_mod", model)
    if callable(own := getattr(plain, "files_beside_weights", None)):
        return dict(own())  # a model that says itself what it is built from again
    if not hasattr(type(plain), "base_model_prefix") or getattr(plain, "_hf_peft_config_loaded", False):
        return {}
    found: dict[str, bytes] = {}
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
        said = json.loads(config.to_json_string())
        said.pop("compile_config", None)  # of this run, not of the model
        found[name] = (json.dumps(said, indent=2, sort_keys=True) + "\n").encode()
    return found
