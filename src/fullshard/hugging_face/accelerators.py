"""What accelerate does for FSDP, done by us: state, prepare, accumulation, clipping, state dicts.

Every replacement asks first whether FSDP is on, and otherwise calls the original.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from types import ModuleType
from typing import Any

import torch

from fullshard import extras
from fullshard.api import accumulate
from fullshard.engine.runtime import is_sharded
from fullshard.environment import launch
from fullshard.errors import MissingExtra, NotSupported, OptionError
from fullshard.hugging_face import asked, checkpoints
from fullshard.hugging_face.preparing import engaged, shard_model
from fullshard.hugging_face.seams import replace_function, replace_method
from fullshard.hugging_face.whole_state import whole_state

_AS_VERSION_1 = "_fullshard_as_version_1"
_NO_DEVICE = "There are currently no available devices"


def apply(module: ModuleType) -> None:
    """To accelerate.accelerator, when it has been imported. An untried version is only refused on demand."""
    replace_method(module.AcceleratorState, "__init__", _state_init)
    if not tried("accelerate"):
        return
    replace_method(module.FullyShardedDataParallelPlugin, "__post_init__", _plugin_post_init)
    for name, make in _METHODS.items():
        replace_method(module.Accelerator, name, make)
    module.Accelerator.is_fsdp2 = property(_is_fsdp2)
    utilities = sys.modules[f"{module.__package__}.utils.fsdp_utils"]
    for name, make in checkpoints.FUNCTIONS.items():
        replace_function(utilities, name, make)


def tried(library: str) -> bool:
    try:
        extras.refuse_untried(library)
    except MissingExtra:
        return False
    return True


def _state_init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        plugin = kwargs.get("fsdp_plugin")
        if plugin is None:
            original(self, *args, **kwargs)
            return
        for library in ("accelerate", "transformers", "trl"):
            if library in sys.modules:
                extras.refuse_untried(library)
        state = sys.modules[type(self).__module__]
        fresh, launched = not type(self)._shared_state, launch().ranks
        if launched > 1 and not state.PartialState._shared_state and not torch.accelerator.is_available():
            kwargs["cpu"] = True  # else each rank would be a world of its own
        given = plugin.mixed_precision_policy
        original(self, *args, **kwargs)
        vars(plugin).setdefault(
            asked.POLICY_FILLED_IN, plugin.mixed_precision_policy if given is None else None
        )
        if fresh and self.distributed_type in ("MULTI_CPU", "FSDP"):
            # accelerate leaves CPU ranks out when it looks for FSDP, and would run DDP without a word. They
            # are FSDP already where only the state of the accelerator has been reset.
            self.distributed_type = state.DistributedType.FSDP
            self.fsdp_plugin = plugin
            state.PartialState._shared_state["distributed_type"] = self.distributed_type
        if launched > 1 and self.distributed_type == "NO":
            raise OptionError(
                f"FSDP is asked for on {launched} ranks, and accelerate took each for a world of its own",
                "On ranks without a GPU say TrainingArguments(use_cpu=True) or Accelerator(cpu=True).",
            )

    return __init__


def _plugin_post_init(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        # A copy of a plugin has been here: what it was given first counts.
        vars(self).setdefault(asked.GIVEN, {field.name: getattr(self, field.name) for field in fields(self)})
        try:
            original(self)
        except RuntimeError as error:
            # Of sync_module_states, which asks for a GPU to prepare a function that we have no use for: the
            # first rank's values are broadcast. It is the last thing done for a plugin of version 1.
            if not str(error).startswith(_NO_DEVICE):
                raise

    return __post_init__


def _accelerator_init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not engaged(self):
            return
        asked.check(self)
        if self.mixed_precision == "fp16":
            # The stock scaler is right on our gradients; accelerate's own choice is made for other engines,
            # and on the CPU it has none.
            said = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = torch.amp.GradScaler(self.device.type, **said)
            self.native_amp = True

    return __init__


def _is_fsdp2(self: Any) -> bool:
    return bool(self.state.is_fsdp2) and _AS_VERSION_1 not in vars(self)


def _as_version_1(original: Any) -> Any:
    """A method of Accelerator that takes the way of FSDP version 1, whichever is asked for.

    There `prepare` takes models and optimizers one by one: together, alone or several. The way of version 2
    looks for an optimizer's parameters by address, where our empty shards are alike; and its `load_state`
    fails on a scaler that has been used.
    """

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not engaged(self):
            return original(self, *args, **kwargs)
        vars(self)[_AS_VERSION_1] = True
        try:
            return original(self, *args, **kwargs)
        finally:
            del vars(self)[_AS_VERSION_1]

    return method


def _prepare_model(original: Any) -> Any:
    def prepare_model(
        self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        if not engaged(self) or (evaluation_mode and not is_sharded(model)):
            return original(self, model, device_placement, evaluation_mode)
        shard_model(self, model)
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    return prepare_model


def _no_sync(original: Any) -> Any:
    def no_sync(self: Any, model: Any) -> Any:
        return accumulate(model) if is_sharded(model) else original(self, model)

    return no_sync


def _join_uneven_inputs(original: Any) -> Any:
    def join_uneven_inputs(self: Any, joinables: Any, even_batches: bool | None = None) -> Any:
        if engaged(self) and not (self.even_batches if even_batches is None else even_batches):
            raise NotSupported(
                "join_uneven_inputs with even_batches=False: every rank must take part in every pass",
                "Leave even_batches at True.",
            )
        return original(self, joinables, even_batches)

    return join_uneven_inputs


def _clip_grad_norm(original: Any) -> Any:
    def clip_grad_norm_(self: Any, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if not engaged(self):
            return original(self, parameters, max_norm, norm_type)
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    return clip_grad_norm_


def _clip_grad_value(original: Any) -> Any:
    def clip_grad_value_(self: Any, parameters: Any, clip_value: float) -> Any:
        if not engaged(self):
            return original(self, parameters, clip_value)
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_value_(parameters, clip_value)

    return clip_grad_value_


def _get_state_dict(original: Any) -> Any:
    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        if is_sharded(model):
            return whole_state(model, keep=self.is_main_process)
        if engaged(self):
            return model.state_dict()
        return original(self, model, unwrap)

    return get_state_dict


_METHODS = {
    "__init__": _accelerator_init,
    "prepare": _as_version_1,
    "load_state": _as_version_1,
    "prepare_model": _prepare_model,
    "no_sync": _no_sync,
    "join_uneven_inputs": _join_uneven_inputs,
    "clip_grad_norm_": _clip_grad_norm,
    "clip_grad_value_": _clip_grad_value,
    "get_state_dict": _get_state_dict,
}
