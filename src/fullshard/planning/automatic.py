"""`fs.shard(model, plan=...)`: from the model as it is, and what ranks agree on, to settings.

The model is copied to the meta device, where its parameters take no memory, and one step of the copy is
traced. Where that is not possible (no batch is known, or its forward reads values) computing is estimated
from the shapes of its parameters, and memory is left for activations.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fullshard.errors import FullshardError, OptionError
from fullshard.option_table import TABLE
from fullshard.options import parse
from fullshard.plan.schedule import Call
from fullshard.plan.units import Unit, find_units, looks_up_only
from fullshard.planning.answers import SPARE, Question, step_of
from fullshard.planning.choosing import Disk, Scope, Traced, choose
from fullshard.planning.machines import Machine
from fullshard.planning.needs import Step
from fullshard.planning.request import Planning
from fullshard.planning.settings import BY_NAME, Choice
from fullshard.planning.subjects import Subject, as_units_get, no_searches
from fullshard.planning.tracing import Moment, Trace
from fullshard.planning.work import Work, product

META = torch.device("meta")
UNKNOWN_ACTIVATIONS = 0.4  # of the memory, where they cannot be traced
_CHOSEN = ("strategy", "checkpoint_activations", "offload", "keep_full", "keep_node")


@dataclass(frozen=True)
class Situation:
    """What all ranks agree on: how many, on how many nodes, and the least memory that any has."""

    ranks: int
    node_ranks: int
    device_bytes: int
    host_bytes: int  # of a node
    on_gpu: bool
    disk_bytes: int = 0  # of a node, where a folder was given


def record_of(plan: Any) -> Choice | None:
    """A choice that was made before: as an object, a mapping, or a file. None for a request."""
    choice = getattr(plan, "choice", plan)  # of an fs.plan
    if isinstance(choice, Choice):
        return choice
    if isinstance(plan, Mapping) and "settings" in plan:
        return Choice.from_dict(plan)
    if isinstance(plan, Path) or (isinstance(plan, str) and plan != "auto"):
        return Choice.load(plan)
    return None


def arguments_of(choice: Choice, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `fs.shard`: those that were given besides stay as they are."""
    fixed = fixed_options(given)
    given = {name: value for name, value in given.items() if name != BY_NAME}
    precision = TABLE["precision"].parsed(given.get("precision", TABLE["precision"].default))
    return {**given, **choice.settings.arguments(precision), **fixed}


def fixed_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options that a plan chooses, those that the caller chose; a default only if it was named."""
    named = given.get(BY_NAME, ())
    fixed = {
        name: given[name]
        for name in _CHOSEN
        if name in given and (name in named or given[name] != TABLE[name].default)
    }
    if fixed.get("strategy") == "auto":
        del fixed["strategy"]
    return fixed


def choose_for(
    model: nn.Module, request: Planning, given: Mapping[str, Any], here: Situation, machine: Machine
) -> Choice:
    """The fastest settings that fit this model on these ranks."""
    fixed = fixed_options(given)
    precision = given.get("precision", TABLE["precision"].default)
    recomputes = _recomputes(fixed, here)
    question = Question(
        ranks=here.ranks,
        memory_bytes=2**50,
        precision=precision,
        optimizer=request.optimizer,
        on_gpu=here.on_gpu,
        units=_units(given.get("units")),
    )
    steps, tokens, unknown = _steps(model, request, question, recomputes)
    inner = here.node_ranks if 1 < here.node_ranks < here.ranks and not here.ranks % here.node_ranks else None
    memory = here.device_bytes if request.memory is None else int(request.memory)
    if memory < 2**20:
        raise OptionError(
            f"a plan for {memory} bytes of memory", "Free some, or give Planning(memory='24GiB')."
        )
    host = here.host_bytes if request.host is None else int(request.host)
    disk = None if request.disk is None else Disk(os.fspath(request.disk), here.disk_bytes)
    scope = Scope(
        type(model).__name__,
        here.ranks,
        inner,
        machine,
        memory,
        host,
        disk,
        precision,
        request.optimizer,
        SPARE if unknown is None else UNKNOWN_ACTIVATIONS,
        here.on_gpu,
        (fixed["strategy"],) if "strategy" in fixed else (),
        tuple(steps),
        _offloads(fixed, here, host),
        ("exact", *request.allow),
        not {"keep_full", "keep_node"} & fixed.keys(),
    )
    found = choose(scope, [Traced(steps, None, tokens)])
    if unknown is None:
        return found
    left = f"activations are not known ({unknown}): {UNKNOWN_ACTIVATIONS:.0%} of the memory is left for them"
    return replace(found, why=f"{found.why}; {left}")


def _recomputes(fixed: Mapping[str, Any], here: Situation) -> tuple[Any, ...]:
    if "checkpoint_activations" in fixed:
        return (fixed["checkpoint_activations"],)
    return (False, True, "offload") if here.on_gpu else (False, True)


def _offloads(fixed: Mapping[str, Any], here: Situation, host: int) -> tuple[str | None, ...]:
    if "offload" in fixed:
        given = fixed["offload"]
        return (given,) if isinstance(given, str) else (None,)
    # Ranks that compute on the host have one memory for both.
    return (None, "optimizer", "auto") if here.on_gpu and host >= 2**20 else (None,)


def _units(given: Any) -> Any:
    """A function may know modules by identity, and the copy has others."""
    chosen = TABLE["units"].parsed(given)
    return chosen if isinstance(chosen, tuple) else None


# ---- one step


def _steps(
    model: nn.Module, request: Planning, question: Question, recomputes: tuple[Any, ...]
) -> tuple[dict[Any, Step], int | None, str | None]:
    """Traced by kind of recomputation; the tokens of a step; or estimated, and why."""
    try:
        bare = on_meta(model)
    except Exception as error:
        raise OptionError(
            f"{type(model).__name__} cannot be copied for a plan: {type(error).__name__}: {error}",
            "Give the options themselves, or a recorded plan.",
        ) from error
    batch, tokens = _batch(bare, request)
    if batch is None:
        return {recomputes[0]: _estimated(bare, request, question)}, request.tokens, "no batch was given"
    subject = Subject(type(model).__name__, lambda: on_meta(bare), _Runs(batch), "", "", tokens, "model")
    try:
        steps = {r: step_of(subject, replace(question, recompute=r))[0] for r in recomputes}
    except FullshardError as error:
        if request.batch is not None:
            raise
        return {recomputes[0]: _estimated(bare, request, question)}, request.tokens, error.what
    return steps, tokens, None


class _Runs:
    """The forward of a model on meta, with its batch in the compute dtype, and its loss."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __call__(self, model: nn.Module) -> tuple[Tensor, Any]:
        batch = as_units_get(self._batch, model)
        with no_searches():
            if isinstance(batch, Mapping):
                out = model(**batch)
            else:
                out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
        return _loss(out), out


def _loss(out: Any) -> Tensor:
    named = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    parts = (
        vars(out) if named is None and type(out).__module__ != "builtins" and hasattr(out, "__dict__") else {}
    )
    leaves = [*tree_leaves(out if named is None else named), *parts.values()]
    found = [value for value in leaves if isinstance(value, Tensor) and value.requires_grad]
    if not found:
        raise TypeError(f"a {type(out).__name__} has no tensor to begin a backward from")
    return found[0] if found[0].dim() == 0 else found[0].float().mean()


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers take no memory. Hooks and methods of the original come along."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(META)
    return copy.deepcopy(model, memo).train()


def _batch(model: nn.Module, request: Planning) -> tuple[Any, int | None]:
    """On meta, with how many tokens it has."""
    if request.batch is not None:
        batch = tree_map(lambda v: v.detach().to(META) if isinstance(v, Tensor) else v, request.batch)
        return batch, _tokens(batch)
    config = getattr(model, "config", None)
    if getattr(config, "vocab_size", None) and getattr(model, "main_input_name", "") == "input_ids":
        context = getattr(config, "max_position_embeddings", None) or request.tokens
        length = max(2, min(int(context), request.tokens))
        tokens = torch.empty(1, length, dtype=torch.long, device=META)
        return {"input_ids": tokens, "labels": tokens}, length
    return None, request.tokens


def _tokens(batch: Any) -> int | None:
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, tuple | list)
        else [batch]
    )
    for value in values:
        if isinstance(value, Tensor) and not value.is_floating_point() and value.dim() >= 1:
            return value.numel()
    return None


def _estimated(model: nn.Module, request: Planning, question: Question) -> Step:
    """Each matrix is multiplied with every token once, units in the order of their definition."""
    options = parse(precision=question.precision, units=question.units)
    units = find_units(model, replace(options, on_gpu=question.on_gpu))
    compute = options.precision.compute
    moments = [Moment(Call("forward", 0), 0, 0)]
    work = [_products(unit, request.tokens, compute) for unit in units]
    for index in range(1, len(units)):
        moments += [Moment(Call("forward", index), 0, 0, work[index]), Moment(Call("forward", 0), 0, 0)]
    moments.append(Moment(Call("backward", 0), 0, 0))
    for index in range(len(units) - 1, 0, -1):
        moments.append(Moment(Call("backward", index, True), 0, 0, 2 * work[index]))
    moments.append(Moment(Call("backward", 0, True), 0, 0, 3 * work[0]))
    return Step(units, Trace(moments, 0, 0, 0), question.optimizer, question.on_gpu)


def _products(unit: Unit, tokens: int, compute: torch.dtype | None) -> tuple[Work, ...]:
    if looks_up_only(unit.modules):
        return ()
    return tuple(
        product(tokens, p.shape[0], p[0].numel(), (compute or p.dtype).itemsize)
        for p in (member.parameter for member in unit.members)
        if p.dim() > 1 and p.numel()
    )
