"""What a script does while it trains, noted as plain events that `judges` look at afterwards.

While a recorder is active, some functions of torch and of this package are replaced (`patches`); all of them
are put back at its end. Nothing of it is part of the engine, and nothing runs without a recorder.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.amp
import torch.nn.functional as F
import torch.utils.checkpoint as recomputation
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard import api
from fullshard.checkpoint import load as loading
from fullshard.checkpoint import newest
from fullshard.checkpoint import save as saving
from fullshard.comm.plain_group import PlainGroup
from fullshard.doctor import losses, reference
from fullshard.doctor.checkpoints import Overlay
from fullshard.doctor.fingerprints import fingerprint, row_fingerprints
from fullshard.doctor.ties import Ties
from fullshard.doctor.watched import Watched
from fullshard.patches import Patches

_DRAWS = ("rand", "randn", "rand_like", "randn_like", "bernoulli", "normal")
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_OF_RECOMPUTATION = {  # arguments of torch's checkpoint that are not the function's
    *("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"),
}
_SECOND_ORDER = "gradients of steps that take gradients of gradients (create_graph=True)"
_MOST_DRAWS = 100  # per call, or between two


class Enough(BaseException):
    """The script has taken the steps that are looked at. Not an Exception: scripts catch those."""


class Recorder:
    """Records a script from `start` to `stop`. With `compares`, beside an unsharded copy of each model."""

    def __init__(self, steps: int, compares: bool = True, overlay: Path | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self._steps, self._compares = steps, compares
        # By which packages may have imported a function by its name: any, this one, or none.
        self._patches, self._ours, self._patches_of_torch = Patches("*"), Patches("fullshard"), Patches()
        self._overlay = None if overlay is None else Overlay(overlay)
        self._watched: list[Watched] = []
        self._by_module: dict[int, Watched] = {}
        self._group: PlainGroup | None = None
        self._ties = Ties()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._copies: weakref.WeakKeyDictionary[Optimizer, Optimizer | None] = weakref.WeakKeyDictionary()
        self._taken: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._scaled: set[int] = set()  # scalers that have scaled a loss, and not unscaled its gradients yet
        self._scaling: set[int] = set()  # scalers that have scaled a loss since their last update
        self._unscaled: dict[int, int] = {}  # optimizers whose gradients are unscaled, and the scaler
        self._beside: dict[int, tuple[nn.Parameter, str]] = {}  # that losses use beside models, as first seen
        self._differentiating = False
        self._depths: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []
        self._draws = 0
        self.step = 0

    # ---- events

    def note(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, "step": self.step, **fields})

    def start(self) -> None:
        self._patches.replace(clip_grad, "clip_grad_norm_", self._clipping)
        self._patches.replace(clip_grad, "clip_grad_value_", self._clipping_values)
        if hasattr(nn.utils, "clip_grads_with_norm_"):
            self._patches.replace(nn.utils, "clip_grads_with_norm_", self._clipping_with)
        self._patches.replace(torch.autograd, "grad", self._grad)
        self._patches.replace(recomputation, "checkpoint", self._recomputing)
        self._ours.replace(api, "shard_with", self._sharding)
        self._ours.replace(api, "penalty", self._penalising)
        self._ours.replace(saving, "save", self._saving)
        self._ours.replace(loading, "load", self._loading)
        if self._overlay is not None:
            self._ours.replace(newest, "latest", self._overlay.latest)
        replace = self._patches_of_torch.replace
        replace(nn.Module, "__call__", self._calling)
        replace(nn.Module, "register_parameter", self._ties.registering)
        replace(nn.Parameter, "__deepcopy__", self._ties.copying)
        replace(torch.autograd, "backward", self._backward)
        replace(Optimizer, "__init__", self._making_optimizer)
        for name in ("scale", "unscale_", "step", "update"):
            replace(torch.amp.GradScaler, name, getattr(self, f"_scaler_{name.rstrip('_')}"))
        for name in _DRAWS:
            replace(torch, name, self._drawing(name))
        for name in _DROPOUTS:
            replace(F, name, self._dropping)
        replace(LRScheduler, "__init__", self._making_schedule)
        if self._overlay is not None:
            replace(torch, "save", self._overlay.torch_save)
            replace(torch, "load", self._overlay.torch_load)
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        # Before the engine's own: what is offloaded steps there.
        known: Any = getattr(optimizer_module, "_global_optimizer_pre_hooks", None)
        if isinstance(known, OrderedDict):
            known.move_to_end(self._hooks[0].id, last=False)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for patches in (self._patches_of_torch, self._ours, self._patches):
            patches.undo()
        for watched in self._watched:
            watched.forget()

    def note_standing(self) -> None:
        """Where the ranks of each model are, from its flight recorder."""
        for watched in self._watched:
            places = watched.runtime.comm.recorder.places()
            self.note("stood", places=[str(place) for place in places if place is not None])

    # ---- the model

    def _sharding(self, original: Any) -> Any:
        def shard_with(integration: Any, model: nn.Module, *args: Any, **given: Any) -> Any:
            copied = self._copy_of(model)
            untied = self._ties.untied(model)
            sharded = original(integration, model, *args, **given)
            self._watch(sharded, copied, untied)
            return sharded

        return shard_with

    def _copy_of(self, model: Any) -> nn.Module | None:
        if not self._compares or not isinstance(model, nn.Module):
            return None
        try:
            return reference.plain_copy(model)
        except Exception as error:  # noqa: BLE001  the rest is checked without a copy
            self.note("not compared", why=f"the model cannot be copied: {type(error).__name__}: {error}")
            return None

    def _watch(self, model: nn.Module, copied: nn.Module | None, untied: list[tuple[str, str]]) -> None:
        if self._group is None:
            self._group = PlainGroup()
        index = len(self._watched)
        watched = Watched(model, copied, self._group, self.note, index, lambda: self._watched)
        runtime = watched.runtime
        self.note(
            "sharded",
            model=index,
            strategy=runtime.options.strategy,
            units=[unit.name for unit in runtime.units],
            recomputes=bool(runtime.options.checkpoint_activations),
            parameters={p.name: watched.unit_of_parameter(p.name) for _, _, p in watched.values.places},
            trainable=[piece.name for p, _, piece in watched.values.places if p.requires_grad],
            untied=[list(pair) for pair in untied],
            time_first=any(getattr(m, "batch_first", None) is False for m in model.modules()),
            points=watched.points,
            about={
                "options": str(runtime.options),
                "topology": f"{runtime.comm.all_ranks} ranks, shards over {runtime.comm.ranks}, "
                f"{runtime.comm.replicas} replicas, {runtime.options.nodes} nodes, {runtime.comm.device}",
                "plan": str(runtime.plan),
            },
        )
        self._watched.append(watched)
        for module in [model, *(m for unit in runtime.units for m in unit.modules)]:
            self._by_module[id(module)] = watched

    def _calling(self, original: Any) -> Any:
        by_module, computing = self._by_module, reference.computing

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            watched = by_module.get(id(module))
            if watched is None or computing[0] or watched.call is not None or _in_backward():
                return original(module, *args, **kwargs)
            trains = torch.is_grad_enabled() and watched.model.training
            if trains and self.step >= self._steps:
                raise Enough
            if trains:
                watched.note_edits("before a call")
            watched.begin_call(module, args, kwargs)
            self._draws = 0
            try:
                output = original(module, *args, **kwargs)
            except BaseException:
                watched.call = None
                raise
            watched.end_call(output)
            self._draws = 0
            return output

        return __call__

    def _penalising(self, original: Any) -> Any:
        def penalty(model: nn.Module, term: Any) -> torch.Tensor:
            value: torch.Tensor = original(model, term)
            for watched in self._watched:
                if watched.model is model:
                    watched.penalised(value, term)
            return value

        return penalty

    # ---- random numbers

    def _drawing(self, name: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def draw(*args: Any, **kwargs: Any) -> Any:
                drawn = original(*args, **kwargs)
                self._note_draw(name, drawn)
                return drawn

            return draw

        return make

    def _dropping(self, original: Any) -> Any:
        def drop(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            before = values.detach() == 0
            dropped = original(values, *args, **kwargs)
            self._note_draw("dropout", (dropped.detach() == 0) & ~before.to(dropped.device))
            return dropped

        return drop

    def _note_draw(self, name: str, drawn: Any) -> None:
        self._draws += 1
        if reference.computing[0] or _in_backward() or self._draws > _MOST_DRAWS or not self._watched:
            return
        if not isinstance(drawn, torch.Tensor) or not drawn.numel() or drawn.is_meta:
            return
        if name == "dropout" and not bool(drawn.any()):
            return  # in evaluation, or with probability 0
        self.note(
            "draw",
            name=name,
            inside=any(watched.call is not None for watched in self._watched),
            shape=list(drawn.shape),
            print=fingerprint(drawn),
            rows=row_fingerprints(drawn),
        )

    # ---- backward

    def _backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            loss = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
            on_meta = isinstance(loss, torch.Tensor) and loss.is_meta  # a planner's, without values
            if reference.computing[0] or self._differentiating or on_meta or not self._watched:
                return original(tensors, *args, **kwargs)
            outputs = {node for w in self._watched for call in w.calls for node in call.nodes}
            terms = losses.watch(loss, outputs) if isinstance(loss, torch.Tensor) else []
            concerned = [w for w in self._watched if w.calls]
            fresh = [watched.begin_backward() for watched in concerned]
            if isinstance(loss, torch.Tensor):
                self._note_leaves(loss, outputs)
            with self._of_higher_order(concerned, args, kwargs):
                original(tensors, *args, **kwargs)
            is_number = isinstance(loss, torch.Tensor) and loss.numel() == 1
            self.note(
                "backward",
                site=reference.places(),
                loss=float(loss.detach()) if is_number and loss is not None else None,
                terms=[term.data() for term in terms],
                models=[
                    {
                        "model": watched.index,
                        "fresh": begins,
                        "reached": watched.reached(),
                        "how": watched.ways_of_calling(),
                        "rows": watched.rows_in_the_loss(),
                    }
                    for watched, begins in zip(concerned, fresh, strict=True)
                ],
                scaled=bool(self._scaled),
                scale=self._scale,
                postponed=any(w.runtime.reduction.postponing for w in concerned),
                weight=max(w.runtime.reduction.weight for w in concerned or self._watched),
            )
            for watched in concerned:
                watched.end_backward()
            return None

        return backward

    @contextlib.contextmanager
    def _of_higher_order(self, concerned: list[Watched], args: Any, kwargs: Any) -> Iterator[None]:
        """A backward that keeps its own graph, or adds to the gradients of some tensors only (inputs=)."""
        given = dict(zip(("grad_tensors", "retain_graph", "create_graph"), args, strict=False)) | kwargs
        create, chosen = bool(given.get("create_graph")), given.get("inputs")
        forgets = [watched.set_aside() for watched in concerned] if chosen is not None else []
        yield
        if create:
            for watched in concerned:
                watched.goes_beyond_first_order(_SECOND_ORDER)
        for watched, forget in zip(concerned, forgets, strict=False):
            tensors = [chosen] if isinstance(chosen, torch.Tensor) else list(chosen)
            own = {id(p) for p, _, _ in watched.values.places}
            if any(id(t) in own for t in tensors):
                watched.goes_beyond_first_order("gradients of a backward with inputs= that are parameters")
            forget()

    def _grad(self, original: Any) -> Any:
        """torch.autograd.grad leaves the gradients of parameters as they are."""

        def grad(*args: Any, **kwargs: Any) -> Any:
            if reference.computing[0] or self._differentiating or not self._watched:
                return original(*args, **kwargs)
            forgets = [(watched, watched.set_aside()) for watched in self._watched]
            self._differentiating = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._differentiating = False
                got = [watched for watched, forget in forgets if forget()]
            if kwargs.get("create_graph", len(args) > 4 and args[4]):
                for watched in got:
                    watched.goes_beyond_first_order(_SECOND_ORDER)
            return result

        return grad

    def _note_leaves(self, loss: torch.Tensor, outputs: set[Any]) -> None:
        """Parameters that a loss uses, and that are part of no model: a learned temperature, for example."""
        found = losses.leaves_beside(loss, outputs) if outputs else []
        if not all(id(p) in self._beside for p in found):
            inside = {id(p) for watched in self._watched for p in watched.model.parameters()}
            for parameter in found:
                if id(parameter) not in inside:
                    self._beside.setdefault(id(parameter), (parameter, fingerprint(parameter)))

    def _recomputing(self, original: Any) -> Any:
        def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not reference.computing[0]:
                if not any(event["kind"] == "recomputes" for event in self.events):
                    self.note("recomputes")
                return original(function, *args, **kwargs)
            options = (
                "use_reentrant",
                "context_fn",
                "determinism_check",
                "debug",
                "early_stop",
                "preserve_rng_state",
            )
            return function(*args, **{k: v for k, v in kwargs.items() if k not in options})

        return checkpoint

    # ---- scaling, clipping

    _scale = 1.0

    def _scaler_scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled():
                scaled = original(scaler, outputs)
                self._scaled.add(id(scaler))
                self._scaling.add(id(scaler))
                self._unscaled = {o: s for o, s in self._unscaled.items() if s != id(scaler)}
                self._scale = float(scaler.get_scale())
                return scaled
            return original(scaler, outputs)

        return scale

    def _scaler_unscale(self, original: Any) -> Any:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            result = original(scaler, optimizer)
            self._scaled.discard(id(scaler))
            self._unscaled[id(optimizer)] = id(scaler)
            return result

        return unscale_

    def _scaler_step(self, original: Any) -> Any:
        def step(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            self._scaled.discard(id(scaler))
            return result

        return step

    def _scaler_update(self, original: Any) -> Any:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            self._scaling.discard(id(scaler))
            return result

        return update

    def _are_scaled(self, parameters: list[Any]) -> bool:
        """Whether a loss scale is in gradients: unscale_ takes it out of those of one optimizer."""
        if not self._scaling:
            return False
        given = {id(p) for p in parameters}
        holding = [
            optimizer
            for optimizer in self._optimizers
            if any(id(p) in given for group in optimizer.param_groups for p in group["params"])
        ]
        if not holding:
            return bool(self._scaled)
        return any(id(optimizer) not in self._unscaled for optimizer in holding)

    def _clipping(self, original: Any) -> Any:
        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0, **kwargs: Any) -> Any:
            given = _listed(parameters)
            watched = next((w for w in self._watched if self._is_of(w, given)), None)
            expected = (
                None
                if watched is None
                else watched.norm_of([p for p in given if p.grad is not None], float(norm_type))
            )
            norm = original(given, max_norm, norm_type, **kwargs)
            self._note_clip(given, float(norm), float(max_norm), min(float(norm), float(max_norm)))
            if watched is not None and expected is not None:
                apart = abs(float(norm) - expected) / expected if expected else abs(float(norm))
                self.note(
                    "compared",
                    stage="norm",
                    tensor="the norm of all gradients",
                    unit="",
                    apart=apart if apart == apart else 0.0,
                    allowed=watched.exact_tolerance,
                )
            return norm

        return clip_grad_norm_

    def _clipping_with(self, original: Any) -> Any:
        def clip_grads_with_norm_(
            parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
        ) -> Any:
            given = _listed(parameters)
            result = original(given, max_norm, total_norm, *args, **kwargs)
            norm = float(total_norm)
            self._note_clip(given, norm, float(max_norm), min(norm, float(max_norm)))
            return result

        return clip_grads_with_norm_

    def _clipping_values(self, original: Any) -> Any:
        def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
            given = _listed(parameters)
            watched = next((w for w in self._watched if self._is_of(w, given)), None)
            held = [p for p in given if p.grad is not None]
            largest = None if watched is None else watched.norm_of(held, float("inf"))
            result = original(given, clip_value, *args, **kwargs)
            if watched is not None and largest is not None:
                self._note_clip(given, largest, float(clip_value), watched.norm_of(held, 2.0) or 0.0)
            return result

        return clip_grad_value_

    def _note_clip(self, parameters: list[Any], found: float, allowed: float, after: float) -> None:
        own = [watched.index for watched in self._watched if self._is_of(watched, parameters)]
        self.note(
            "clip",
            models=own,
            norm=found,
            max_norm=allowed,
            after=after,
            scaled=self._are_scaled(parameters),
        )

    @staticmethod
    def _is_of(watched: Watched, parameters: list[Any]) -> bool:
        own = {id(p) for p, _, _ in watched.values.places}
        return bool(parameters) and all(id(p) in own for p in parameters)

    # ---- optimizers

    def _making_optimizer(self, original: Any) -> Any:
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if not reference.computing[0]:
                self._optimizers.add(optimizer)

        return __init__

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if reference.computing[0] or not self._watched:
            return None
        self._optimizers.add(optimizer)
        self._depths[optimizer] = self._depths.get(optimizer, 0) + 1
        if self._depths[optimizer] > 1:
            return None  # a step that calls its base class's: one step
        held = [watched for watched in self._watched if watched.holds(optimizer)]
        for watched in held:
            if optimizer not in self._copies:
                self._copies[optimizer] = self._copy_optimizer(optimizer, watched)
            watched.note_edits("before a step")
            watched.begin_step()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            for watched in held:
                watched.read_step()
            return None
        followed = self._closure_followed(closure, held)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": followed}
        return (args[0], followed, *args[2:]), kwargs

    @staticmethod
    def _closure_followed(closure: Callable[..., Any], held: list[Watched]) -> Callable[..., Any]:
        """A step with a closure gets the gradients that the closure makes."""

        @functools.wraps(closure)
        def follow(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            for watched in held:
                watched.read_step()
            return result

        return follow

    def _copy_optimizer(self, optimizer: Optimizer, watched: Watched) -> Optimizer | None:
        """The same optimizer for the copy's parameters, if it has not stepped yet."""
        own = {id(p): piece.name for p, _, piece in watched.values.places}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if watched.reference is None or any(id(p) not in own for p in held):
            return None
        if any(optimizer.state.get(p) for p in held):
            self.note("not compared", why="parameters after steps of an optimizer that had state before")
            return None
        memo: dict[int, Any] = {id(p): watched.reference.parameters[own[id(p)]] for p in held}
        skipped = ("_optimizer_", "_hook", "step")
        try:
            twin: Optimizer = object.__new__(type(optimizer))
            vars(twin).update(
                {k: copy.deepcopy(v, memo) for k, v in vars(optimizer).items() if not k.startswith(skipped)}
            )
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                setattr(twin, name, {})
            twin._patch_step_function()
        except Exception as error:  # noqa: BLE001  an optimizer of any kind: the rest is compared without it
            self.note("not compared", why=f"{type(optimizer).__name__} cannot be copied: {error}")
            return None
        return twin

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if reference.computing[0] or not self._watched:
            return
        self._depths[optimizer] = max(0, self._depths.get(optimizer, 1) - 1)
        if self._depths[optimizer]:
            return
        for watched in self._watched:
            if watched.holds(optimizer):
                self._end_step(watched, optimizer)

    def _end_step(self, watched: Watched, optimizer: Optimizer) -> None:
        twin = self._copies.get(optimizer)
        if twin is not None:
            for group, own in zip(optimizer.param_groups, twin.param_groups, strict=False):
                own |= {key: copy.copy(value) for key, value in group.items() if key != "params"}
        try:
            with reference.running():
                watched.end_step(optimizer, twin)
        except Exception as error:  # noqa: BLE001
            self._copies[optimizer] = None
            self.note(
                "not compared", why=f"a step of {type(optimizer).__name__} on unsharded parameters: {error}"
            )
        self._taken[optimizer] = self._taken.get(optimizer, 0) + 1
        buffers = {
            name: [fingerprint(buffer), type(module).__name__ if module is not None else ""]
            for name, buffer, module in _kept_buffers(watched.model)
        }
        self.note(
            "step",
            model=watched.index,
            optimizer=list(self._taken.keys()).index(optimizer),
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            bases=[_base_rate(group) for group in optimizer.param_groups if "lr" in group],
            copies=watched.state_of_copies(),
            buffers=buffers,
            beside=self._parameters_beside(watched),
            unheld=self._unheld(watched),
        )
        self.step = max(self._taken.values())

    def _parameters_beside(self, watched: Watched) -> dict[str, str]:
        """Trainable parameters that optimizers hold, or the model was given to ignore, and nothing shards."""
        sharded = {id(p) for w in self._watched for p, _, _ in w.values.places}
        ignored = {id(p): name for name, p in watched.model.named_parameters() if id(p) not in sharded}
        held: dict[int, Any] = {
            id(p): p for p in watched.model.parameters() if id(p) in ignored and p.requires_grad
        }
        for optimizer in self._optimizers:
            held |= {
                id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) not in sharded
            }
        for parameter, first in self._beside.values():
            if id(parameter) not in sharded and fingerprint(parameter) != first:  # trained by hand
                held[id(parameter)] = parameter
        return {
            ignored.get(key)
            or self._ties.name_of(p)
            or f"a parameter of shape {tuple(p.shape)}": fingerprint(p)
            for key, p in held.items()
        }

    def _unheld(self, watched: Watched) -> list[str]:
        """Parameters that train and that no optimizer holds."""
        held = {
            id(p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        return [piece.name for p, _, piece in watched.values.places if p.requires_grad and id(p) not in held]

    # ---- checkpoints

    def _saving(self, original: Any) -> Any:
        def save(path: Any, *args: Any, **kwargs: Any) -> Any:
            place = path if self._overlay is None else self._overlay.place(path)
            saved = original(place, *args, **kwargs)
            self.note(
                "saved",
                path=os.path.abspath(os.fspath(path)),
                optimizer=any(map(_has_state, _optimizers_in(args, kwargs))),
            )
            return saved

        return save

    def _making_schedule(self, original: Any) -> Any:
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            self.note("schedule made")
            for owner in type(scheduler).__mro__:  # LambdaLR and others have a method of their own
                if "load_state_dict" in vars(owner):
                    self._patches_of_torch.replace(owner, "load_state_dict", self._restoring_schedule)

        return __init__

    def _restoring_schedule(self, original: Any) -> Any:
        def load_state_dict(scheduler: Any, state: Any) -> Any:
            self.note("schedule restored")
            return original(scheduler, state)

        return load_state_dict

    def _loading(self, original: Any) -> Any:
        def load(path: Any, *args: Any, **kwargs: Any) -> Any:
            place = path if self._overlay is None else self._overlay.place_if_there(path)
            loaded = original(place, *args, **kwargs)
            named = path if self._overlay is None else self._overlay.named(path)
            extra = [str(key) for key in loaded] if isinstance(loaded, Mapping) else []
            given = bool(_optimizers_in(args, kwargs))
            self.note("loaded", path=str(named), extra=extra, optimizer=given)
            return loaded

        return load


def _in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) >= 0


def _listed(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _optimizers_in(args: Any, kwargs: Any) -> list[Optimizer]:
    return [one for one in (*args, *kwargs.values()) if isinstance(one, Optimizer)]


def _has_state(optimizer: Optimizer) -> bool:
    return any(bool(state) for state in optimizer.state.values())


def _base_rate(group: dict[str, Any]) -> float | None:
    """What a schedule starts from, where there is one."""
    base = group.get("max_lr", group.get("initial_lr"))
    return None if base is None else float(base)


def _kept_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor, nn.Module]]:
    """Buffers that a state dict keeps, with their modules."""
    return [
        (f"{prefix}.{name}".lstrip("."), buffer, module)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
