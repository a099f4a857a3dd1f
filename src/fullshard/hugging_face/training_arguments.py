"""Trainer's arguments: ranks without a GPU use the CPU, and unsupported or unread options are refused."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from fullshard import extras
from fullshard.environment import launch
from fullshard.errors import NotSupported, OptionError
from fullshard.hugging_face.patching import PATCHES

_READ = (
    *("version", "reshard_after_forward", "cpu_offload", "activation_checkpointing", "state_dict_type"),
    *("cpu_ram_efficient_loading", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params"),
    *("forward_prefetch", "backward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers"),
)
_FOR_TPUS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
# accelerate's names of options, which transformers ignores.
_NAMES_HERE = {"offload_params": "cpu_offload", "sharding_strategy": "reshard_after_forward"}
_TRUE, _FALSE = ("true", "1", "yes", "y", "t", "on"), ("false", "0", "no", "n", "f", "off")
# The values of `reshard_after_forward` that mean a strategy; the first strategy is the default.
_SAME = {"full_shard": ("full_shard", "", *_TRUE), "shard_grad_op": ("shard_grad_op", *_FALSE)}


def apply(module: ModuleType) -> None:
    """Patch transformers.training_args, once it has been imported."""
    PATCHES.replace(module.TrainingArguments, "__post_init__", _post_init)
    PATCHES.replace(module.TrainingArguments, "_process_fsdp_args", _process_fsdp_args)


def _post_init(original: Any) -> Any:
    def __post_init__(self: Any) -> None:
        # Without `use_cpu` each rank would be a world of its own, for which Trainer refuses FSDP.
        if self.fsdp and launch().ranks > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        original(self)
        if self.fsdp and launch().ranks == 1 and self.n_gpu > 1:
            self._n_gpu = 1  # one rank, one GPU: Trainer would spread the model over all by nn.DataParallel
        full_eval = next((n for n in ("bf16_full_eval", "fp16_full_eval") if getattr(self, n)), None)
        if self.fsdp and full_eval is not None:
            # Trainer would cast the parameters themselves and lose the precision that they train in.
            raise NotSupported(
                f"TrainingArguments with {full_eval} casts the parameters, which are sharded in their dtype",
                f"Use {full_eval[:4]}=True: evaluation computes in it, too.",
            )

    return __post_init__


def _process_fsdp_args(original: Any) -> Any:
    """transformers reads the keys of `fsdp_config` that it knows, and silently ignores all others."""

    def process_fsdp_args(self: Any) -> Any:
        fsdp = self.fsdp  # the original replaces it
        plugin_arguments = original(self)
        if plugin_arguments is None:
            return plugin_arguments
        config = self.fsdp_config
        _refuse_unread(config)
        _refuse_contradiction(fsdp, config)
        least = int(config["min_num_params"] or 0)
        if least > 0 and "auto_wrap_policy" not in config:
            if config.get("transformer_layer_cls_to_wrap"):
                raise OptionError(
                    "fsdp_config has both 'min_num_params' and 'transformer_layer_cls_to_wrap'",
                    "Give one of them.",
                )
            plugin_arguments |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": least}
        return plugin_arguments

    return process_fsdp_args


def _refuse_unread(config: dict[str, Any]) -> None:
    for key, value in config.items():
        if key == "cpu_offload" and not isinstance(value, bool):
            raise OptionError(f"fsdp_config has cpu_offload={value!r}", "Give true or false.")
        if key in _READ or (key in _FOR_TPUS and not value):
            continue
        if key == "offload_params" and str(value).lower() in _FALSE:
            continue
        if key == "sharding_strategy" and _is_in_force(value, config):
            continue
        if key in _FOR_TPUS:
            raise NotSupported(f"fsdp_config with {key!r}, which is for TPUs", "Leave it out.")
        instead = _NAMES_HERE.get(key)
        raise OptionError(
            f"fsdp_config has {key!r}, which transformers does not read",
            f"Give {instead!r}." if instead is not None else f"Choose from {', '.join(_READ)}.",
        )


def _is_in_force(sharding_strategy: Any, config: dict[str, Any]) -> bool:
    """Files made for older versions name the strategy once more, by name or by number from 1."""
    names = extras.need("accelerate.utils.constants", "hf").FSDP_SHARDING_STRATEGY
    strategy = str(sharding_strategy).lower()
    if strategy.isdigit() and 0 < int(strategy) <= len(names):
        strategy = names[int(strategy) - 1].lower()
    return _agree(strategy, config)


def _agree(strategy: str, config: dict[str, Any]) -> bool:
    return str(config.get("reshard_after_forward", "")).lower() in _SAME.get(strategy, (strategy,))


def _refuse_contradiction(fsdp: Any, config: dict[str, Any]) -> None:
    """transformers ignores `fsdp="shard_grad_op"` where `fsdp_config` has another strategy, and "offload"
    where it has cpu_offload=False."""
    options = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    for option in (str(getattr(option, "value", option)).lower() for option in options):
        key = "cpu_offload" if option == "offload" else "reshard_after_forward"
        agrees = bool(config.get(key)) if option == "offload" else _agree(option, config)
        if option != "auto_wrap" and not agrees:
            raise OptionError(
                f"fsdp is {option!r}, and fsdp_config has {key}={config.get(key)!r}", "Give one of them."
            )
