"""An optimizer's state, put back by the names of its parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint import contents
from fullshard.checkpoint.contents import Site
from fullshard.checkpoint.reading import Stored
from fullshard.checkpoint.resume import FIRST_FILE, Resume, fitting
from fullshard.checkpoint.targets import Work, check_shape, copy, listed, reader, whole_reader
from fullshard.errors import CheckpointError

# How a step is computed, not what: these stay as this run has them.
_IMPLEMENTATION = {"foreach", "fused", "capturable", "differentiable"}
_DAMAGED = "The checkpoint is damaged; use another one."


class OptimizerLoad:
    """Plans, then applies, a saved optimizer to the one of this run."""

    def __init__(self, resume: Resume, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._resume, self._optimizer = resume, optimizer
        self._said = _checked(resume, optimizer)
        self._sites = {id(site.parameter): site for site in contents.sites(resume.runtime, model)}
        self._state: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def plan(self, work: Work) -> None:
        saved_group = {name: i for i, g in enumerate(self._said["groups"]) for name in g["parameters"]}
        decoded = [self._decoded(i) for i in range(len(self._said["groups"]))]
        here: set[str] = set()
        fresh: list[str] = []
        for group in self._optimizer.param_groups:
            members = [self._site(p) for p in group["params"]]
            names = [site.name for site in members]
            here |= set(names)
            fresh += [n for n in names if n not in saved_group]
            self._plan_group(group, sorted({saved_group[n] for n in names if n in saved_group}), decoded)
            for site in members:
                self._plan_parameter(work, group, site)
        left = sorted(set(self._said["state"]) - here)
        if fresh:  # not those that were in a group and never used: they had no state, and have none
            work.notes.append(f"{listed(fresh)} had no optimizer state, not being in it then: it starts anew")
        if left:
            work.notes.append(
                f"optimizer state of {listed(left)} was left out: the optimizer here has them not"
            )

    def apply(self) -> None:
        """After all reads: hand the new state over."""
        for group, options in self._options:
            kept = {k: v for k, v in options.items() if k not in _IMPLEMENTATION}
            group.update({k: _beside(v, group.get(k)) for k, v in kept.items()})
        for parameter, state in self._state:
            if state:
                self._optimizer.state[parameter] = state
            else:
                self._optimizer.state.pop(parameter, None)

    def _site(self, parameter: torch.Tensor) -> Site:
        site = self._sites.get(id(parameter))
        if site is None:
            raise CheckpointError(
                f"{type(self._optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that the "
                "model does not own",
                "Load into the optimizer of this model: build it from model.parameters().",
            )
        return site

    def _decoded(self, index: int) -> dict[str, Any]:
        """The options of a saved group."""
        options = self._resume.decode(self._said["groups"][index]["options"], FIRST_FILE)
        if not isinstance(options, dict) or not all(type(k) is str and k != "params" for k in options):
            raise CheckpointError(f"the options of group {index} of the optimizer are malformed", _DAMAGED)
        return options

    def _plan_group(self, group: dict[str, Any], saved: list[int], decoded: list[dict[str, Any]]) -> None:
        if not saved:
            return  # parameters that were in no group then: this run's own options
        first = decoded[saved[0]]
        if any(decoded[i] != first for i in saved[1:]):
            raise CheckpointError(
                f"a group of the optimizer holds parameters of saved groups {saved}, whose options differ",
                "Group parameters as in the run that saved, or load without the optimizer.",
            )
        self._options.append((group, first))

    def _plan_parameter(self, work: Work, group: dict[str, Any], site: Site) -> None:
        state: dict[str, Any] = {}
        self._state.append((site.parameter, state))
        for key, said in self._said["state"].get(site.name, {}).items():
            name, kind = f"{site.name}.{key}", said.get("kind")
            if kind == "value":
                state[key] = self._resume.decode(said["value"], FIRST_FILE)
            elif kind == "own":
                state[key] = self._own(site, name)
            elif kind in ("scalar", "elements"):
                self._plan_tensor(work, (site, key, kind), state, self._device(group, site, key, said))
            else:
                raise CheckpointError(
                    f"optimizer state {name!r} is of the unknown kind {str(kind)[:40]!r}", _DAMAGED
                )

    def _plan_tensor(
        self, work: Work, what: tuple[Site, str, str], state: dict[str, Any], device: torch.device
    ) -> None:
        site, key, kind = what
        name = f"{site.name}.{key}"
        stored = self._resume.source.optimizer.get(name)
        if stored is None:
            raise CheckpointError(f"optimizer state {name!r} is not in the files", _DAMAGED)
        whole = kind == "scalar"
        shape = tuple(site.parameter.shape) if site.lane is None else site.piece.global_shape
        if whole:
            shape = (1,) * min(len(stored.tensor.shape), 8)  # one number; some keep it in a tensor with dims
        check_shape(self._resume.source, stored, shape, name)
        before = self._optimizer.state.get(site.parameter, {}).get(key)
        dtype = stored.tensor.dtype if whole else self._dtype(site, stored, before)

        def get() -> torch.Tensor:
            at_rest = torch.Size(shape) if whole else site.parameter.shape
            usable = type(before) is torch.Tensor and before.shape == at_rest
            if usable and before.dtype == dtype and before.device == device and before.is_contiguous():
                state[key] = before
            elif whole:
                state[key] = torch.empty(shape, dtype=dtype, device=device)
            else:
                like = site.parameter.detach()
                state[key] = torch.empty_like(like, dtype=dtype, device=device)
            return state[key]  # type: ignore[no-any-return]

        own = self._resume.own_value(f"optimizer/{name}") if whole or site.lane is None else None
        if own is not None:
            value = fitting(name, own, stored.tensor.shape, dtype)
            work.reads.append(lambda: copy(get(), value))
        elif whole:
            whole_reader(work, self._resume.source, dtype, get)(stored)
        else:
            reader(work, self._resume.source, site, dtype, get)(stored)

    def _dtype(self, site: Site, stored: Stored, before: Any) -> torch.dtype:
        """Of a state with its parameter's shape: where it followed the parameter's dtype, it still does."""
        saved, kept = self._resume.source.model.get(site.name), stored.tensor.dtype
        wanted = kept
        if isinstance(before, torch.Tensor):
            wanted = before.dtype  # this optimizer's own choice
        elif saved is not None and saved.tensor.dtype == kept:
            wanted = site.parameter.dtype
        return wanted if wanted.is_floating_point and kept.is_floating_point else kept

    def _device(self, group: dict[str, Any], site: Site, key: str, said: dict[str, Any]) -> torch.device:
        host = said.get("device") == "host" and said["kind"] == "scalar"
        if key == "step" and ("capturable" in group or "fused" in group):  # torch's own rule
            host = not (group.get("capturable") or group.get("fused"))
        return torch.device("cpu") if host else site.parameter.device

    def _own(self, site: Site, name: str) -> Any:
        found = self._resume.own_state(name, contents.interval(site))
        if found is None:
            raise CheckpointError(
                f"optimizer state {name!r} is not cut like its parameter (it is kept in blocks, say), so it "
                "can be loaded only on as many ranks, with the same units, as it was saved on",
                "Load with the ranks and options of the run that saved, or load without the optimizer.",
            )
        value = self._resume.decode(*found)
        return value.to(site.parameter.device) if isinstance(value, torch.Tensor) else value


def _beside(value: Any, before: Any) -> Any:
    """An option of the group's own; a tensor lies where the one before it did.

    Groups that were one may be several now, and schedulers fill tensors in place.
    """
    if isinstance(value, torch.Tensor):
        return value.to(before.device if isinstance(before, torch.Tensor) else value.device, copy=True)
    if isinstance(value, tuple) and isinstance(before, tuple) and len(value) == len(before):
        return tuple(map(_beside, value, before))
    return deepcopy(value)


def _checked(resume: Resume, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    said = resume.manifest.optimizer_state
    folder = str(resume.source.folder)
    if said is None:
        raise CheckpointError(
            f"{folder!r} was saved without an optimizer",
            "Load it without one, or save it with fs.save(path, model, optimizer).",
        )
    try:
        groups, state, kind = said["groups"], said["state"], said["class"]
        good = all(isinstance(g["parameters"], list) and "options" in g for g in groups)
        good &= all(isinstance(s, dict) for by in state.values() for s in (by, *by.values()))
        good &= all(isinstance(n, str) for g in groups for n in g["parameters"])
    except (KeyError, TypeError, AttributeError):
        good, kind = False, None
    if not good:
        raise CheckpointError(f"the optimizer's state in {folder!r} is malformed", _DAMAGED)
    if kind != type(optimizer).__name__:
        raise CheckpointError(
            f"{folder!r} holds the state of {str(kind)[:100]}, and the optimizer here is "
            f"{type(optimizer).__name__}",
            "Use the same optimizer, or load without one.",
        )
    return said  # type: ignore[no-any-return]
