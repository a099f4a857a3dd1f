"""torch's static methods for optimizer state, old and new names."""

# ruff: noqa: ARG004  `group` belongs to torch's signature; the ranks are the model's own

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard.engine.runtime import engine_of
from fullshard.engine.step.optimizers import owned_step
from fullshard.errors import NotSupported, StateError
from fullshard.torch_fsdp import optimizer_dicts, strategies
from fullshard.torch_fsdp.optimizer_dicts import Numbered, Parts, names_in, numbered
from fullshard.torch_fsdp.state_dicts import settings_of
from fullshard.torch_fsdp.strategies import OptimStateKeyType, StateDictType
from fullshard.torch_fsdp.wrapper_requests import begin, wrappers_in

Optimizer = torch.optim.Optimizer


class OptimizerCalls:
    """What `FullyShardedDataParallel` offers for its optimizers.

    `group` is taken and not used: the ranks are the model's own.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: Optimizer, optim_state_dict: dict[str, Any] | None = None, group: Any = None
    ) -> dict[str, Any]:
        """The optimizer's state by parameter names, in the form of the state dict type."""
        settings = settings_of(model)
        config = settings.optim_state_dict_config
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise NotSupported(
                "optim_state_dict under LOCAL_STATE_DICT",
                "Use SHARDED_STATE_DICT with torch.distributed.checkpoint, or FULL_STATE_DICT.",
            )
        own = optim.state_dict() if optim_state_dict is None else optim_state_dict
        full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        first_only = getattr(config, "rank0_only", False)
        how = (full, first_only, config.offload_to_cpu)
        return _taken(_parts(model, optim), numbered(model, optim), own, how)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """This rank's part, for `optim.load_state_dict`."""
        first_only = getattr(settings_of(model).optim_state_dict_config, "rank0_only", False)
        order = numbered(model, optim)
        loaded = optimizer_dicts.to_load(_parts(model, optim), optim_state_dict, order, first_only)
        if not is_named_optimizer:
            loaded = optimizer_dicts.numbers_for_names(loaded, order)
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    # ---- torch's older names

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Unsharded values on the host, on the first rank or on all."""
        order = numbered(model, optim, optim_input)
        return _taken(_parts(model, optim), order, optim.state_dict(), (True, rank0_only, True))

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: Optimizer, group: Any = None) -> dict[str, Any]:
        """Shards that know their global shape."""
        order = numbered(model, optim)
        return _taken(_parts(model, optim), order, optim.state_dict(), (False, False, False))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """This rank's part of unsharded values, which every rank has."""
        order = numbered(model, optim, optim_input)
        return _loaded(full_optim_state_dict, _parts(model, optim), order, False)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The same where only the first rank has them; the others give None."""
        order = numbered(model, optim, optim_input)
        return _loaded(full_optim_state_dict, _parts(model, optim), order, True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """This rank's part of shards."""
        return _loaded(sharded_optim_state_dict, _parts(model, optim), numbered(model, optim), False)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Names for numbers, or numbers for names; `model` may be a plain one."""
        kind = strategies.by_name(OptimStateKeyType, optim_state_key_type, "optim_state_key_type")
        order = numbered(model, optim, optim_input)
        return optimizer_dicts.rekey(optim_state_dict, kind is OptimStateKeyType.PARAM_NAME, order)


def _parts(model: nn.Module, optimizer: Optimizer | None) -> Parts:
    wrappers = wrappers_in(model)
    if not wrappers:
        raise StateError(f"{type(model).__name__} holds no wrapped module", "Wrap the model first.")
    for wrapper in wrappers:
        begin(wrapper)
    engines = {engine: None for w in wrappers if (engine := engine_of(w)) is not None}  # in order
    if len({tuple(engine.comm.members) for engine in engines}) > 1:
        raise NotSupported(
            "optimizer state of a model with parts that are wrapped for different ranks",
            "Take the state of each part with an optimizer of its own.",
        )
    owned = None if optimizer is None else owned_step(optimizer)
    return Parts(list(engines), names_in(model), () if owned is None else owned.by_parameter)


def _taken(
    parts: Parts, order: Numbered, own: dict[str, Any], how: tuple[bool, bool, bool]
) -> dict[str, Any]:
    full, first_only, to_host = how
    state, groups = optimizer_dicts.by_name(own, order)
    if not full:
        return {"state": optimizer_dicts.shards(parts, state, to_host)} | groups
    keep = not first_only or not parts.runtimes or parts.is_first
    unsharded = optimizer_dicts.unsharded(parts, state, keep, to_host)
    return {"state": unsharded} | groups if keep else {}


def _loaded(saved: dict[str, Any] | None, parts: Parts, order: Numbered, first_only: bool) -> dict[str, Any]:
    loaded = optimizer_dicts.to_load(parts, saved, order, first_only)
    return optimizer_dicts.numbers_for_names(loaded, order)
