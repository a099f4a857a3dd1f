"""What makes Lightning's data parallel strategy for Fabric a sharded one. See `trainer_side` for the base."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from fullshard import api, environment
from fullshard.checkpoint.load import load
from fullshard.comm.control import control_group
from fullshard.engine.runtime import is_sharded, runtime_of
from fullshard.errors import CheckpointError, NotSupported
from fullshard.lightning import checkpoints
from fullshard.lightning.precisions import engine_precision
from fullshard.lightning.sharding import Place, StrategyOptions, refuse_checkpoint_io, shard_module, split

if TYPE_CHECKING:
    from lightning.fabric.strategies.ddp import DDPStrategy as _Base
else:
    _Base = object


class Root(nn.Module):
    """Stands before a sharded module, so that Fabric sends marked methods through its forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class SyncControl:
    """`fabric.no_backward_sync(model)` is fs.accumulate."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        return api.accumulate(inner(module)) if enabled else nullcontext()


def inner(module: Any) -> Any:
    return module.module if isinstance(module, Root) else module


class FabricSide(_Base):
    """Shards each module that is set up, and saves and loads on all ranks together."""

    def __init__(self, **options: Unpack[StrategyOptions]) -> None:
        mro = type(self).__mro__
        self._ours, theirs = split(dict(options), mro[mro.index(FabricSide) + 1])
        super().__init__(**theirs)
        self._backward_sync_control = SyncControl()  # type: ignore[assignment]

    # ---- setting up

    def setup_module(self, module: nn.Module) -> Any:
        refuse_checkpoint_io(self._checkpoint_io)
        environment.fill_in(self.global_rank, self.world_size, self.local_rank, self.num_processes)
        precision = engine_precision(self.precision, self._ours.get("precision"))
        shard_module(module, self._ours, precision, Place(self.root_device, self.world_size))
        return Root(module)

    def module_to_device(self, module: nn.Module) -> None:
        """But for what is on meta: that gets its memory unit by unit, sharded. So does all of a model that
        is set up with `move_to_device=False`."""
        plain = inner(module)
        if not is_sharded(plain):
            plain._apply(lambda t: t if t.is_meta else t.to(self.root_device))  # type: ignore[no-untyped-call, unused-ignore]

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """`fabric.init_module(empty_init=True)` builds on meta: memory comes unit by unit, in setup."""
        if not empty_init:
            return super().module_init_context()
        stack = ExitStack()
        stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    # ---- checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return dict(inner(module).state_dict())

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        inner(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002  the base's name
    ) -> None:
        if storage_options is not None or filter:
            what = "storage_options" if storage_options is not None else "filter"
            raise NotSupported(f"fabric.save with {what}", "Leave it out: all of the model is saved.")
        name, module, optimizers = _parts(state)
        values = {
            key: value.state_dict() if _stateful(value) else value
            for key, value in state.items()
            if key != name and key not in optimizers
        }
        values[checkpoints.STATE] = {"model": name, "optimizers": list(optimizers)}
        checkpoints.save_all(path, module, list(optimizers.values()), values)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        weights_only = self._ours.get("weights_only") if weights_only is None else weights_only
        if isinstance(state, nn.Module):
            self._load_raw(path, inner(state), strict, weights_only)
            return {}
        if not isinstance(state, dict):
            raise NotSupported(
                f"fabric.load with state={type(state).__name__}: shards are read straight into a model",
                "Give a dict with the model in it; fullshard.lightning.read_checkpoint reads it whole.",
            )
        name, module, optimizers = _parts(state)
        control = checkpoints.talk_of(module, "load")
        if control.broadcast_object(Path(path).is_file()):
            values = self._load_plain_file(path, state, strict, weights_only)
        else:
            held = list(optimizers.values())
            values = checkpoints.load_all(path, module, held, strict=strict, weights_only=weights_only)
            said = values.pop(checkpoints.STATE, {})
            _check_names(state, {said.get("model"), *said.get("optimizers", ()), *values}, strict, path)
        for key, value in state.items():
            if key == name or key in optimizers or key not in values:
                continue
            if _stateful(value):
                value.load_state_dict(values.pop(key))
            else:
                state[key] = values.pop(key)
        return values

    def _load_raw(self, path: Any, module: nn.Module, strict: bool, weights_only: bool | None) -> None:
        control = checkpoints.talk_of(module, "load")
        if not control.broadcast_object(Path(path).is_file()) or Path(path).suffix == ".safetensors":
            load(path, module, strict=strict)
            return
        read = control.together(lambda: self._read(path, weights_only), "reading a checkpoint")
        module.load_state_dict(read, strict=strict)

    def _load_plain_file(
        self, path: Any, state: dict[str, Any], strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        name, module, optimizers = _parts(state)
        control = control_group(runtime_of(module).comm)
        values = control.together(lambda: self._read(path, weights_only), "reading a checkpoint")
        _check_names(state, set(values), strict, path)
        module.load_state_dict(values.pop(name), strict=strict)
        for key, optimizer in optimizers.items():
            if key in values:
                checkpoints.load_plain(optimizer, values.pop(key))
        return values

    def _read(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)


def _stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _parts(state: dict[str, Any]) -> tuple[str, nn.Module, dict[str, torch.optim.Optimizer]]:
    """The one sharded model of a state, by its name, and the optimizers."""
    models = {
        key: inner(value)
        for key, value in state.items()
        if isinstance(value, nn.Module) and is_sharded(inner(value))
    }
    if len(models) != 1:
        raise NotSupported(
            f"a checkpoint with {len(models)} sharded models"
            + (f": {', '.join(models)}" if models else " in its state"),
            "Save each model, with its optimizers, to a folder of its own."
            if models
            else "Put the model that fabric.setup returned into the state.",
        )
    ((name, module),) = models.items()
    optimizers = {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}
    return name, module, optimizers


def _check_names(state: dict[str, Any], saved: set[Any], strict: bool, path: Any) -> None:
    missing = sorted(set(state) - saved)
    if strict and missing:
        raise CheckpointError(
            f"{str(path)!r} holds no {missing[0]!r}", "Leave it out of the state, or load with strict=False."
        )
