"""An FSDP plugin as arguments of fs.shard, or an error that names the unsupported option."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from fullshard import extras
from fullshard.environment import plan_from_environment
from fullshard.errors import NotSupported, OptionError
from fullshard.hugging_face.shard_options import given_options
from fullshard.plan.units import has_forward
from fullshard.precision import Precision

GIVEN = "_fullshard_given"  # on a plugin: the user's values, before accelerate filled in the others
POLICY_FILLED_IN = "_fullshard_policy_filled_in"  # on a plugin: the policy that accelerate filled in, if any

_STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {"strategy": "zero3"},
    "SHARD_GRAD_OP": {"strategy": "zero2"},
    "NO_SHARD": {"strategy": "replicate"},
    "HYBRID_SHARD": {"strategy": "hybrid"},
    "_HYBRID_SHARD_ZERO2": {"strategy": "hybrid", "keep_full": "all"},
}
_DATA = ("dp_replicate", "dp_shard")  # the axes of a ParallelismConfig that are supported
# torch's own policies take names and sizes, which are other fields of the plugin.
_POLICIES = {
    "transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "size_based_auto_wrap_policy": "SIZE_BASED_WRAP",
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check(accelerator: Any) -> None:
    """Refuse unsupported requests, when the accelerator is made."""
    plugin = accelerator.state.fsdp_plugin
    if plugin.state_dict_type.name == "LOCAL_STATE_DICT":
        raise NotSupported(
            "fsdp state_dict_type LOCAL_STATE_DICT would save parts that fit this number of ranks only",
            "Use SHARDED_STATE_DICT or FULL_STATE_DICT.",
        )
    if accelerator.mixed_precision == "fp8" or accelerator.has_fp8_handler:
        raise NotSupported("mixed_precision 'fp8' with FSDP", "Use 'bf16' or 'fp16'.")
    sizes = getattr(accelerator.parallelism_config, "_sizes", None) or {}
    others = [f"{name}_size={size}" for name, size in sizes.items() if size > 1 and name not in _DATA]
    if others:
        raise NotSupported(
            f"ParallelismConfig with {', '.join(others)}", "Use dp_shard_size and dp_replicate_size alone."
        )
    strategy(accelerator)
    precision(accelerator)


def shard_arguments(accelerator: Any, model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of fs.shard for this model."""
    plugin = accelerator.state.fsdp_plugin
    arguments = {
        **strategy(accelerator),
        "device": accelerator.device,
        "precision": precision(accelerator),
        "units": units(plugin, model),
        "ignore": ignored(plugin, model),
        "checkpoint_activations": _recompute(plugin),
        "offload": "host" if is_offloaded(plugin.cpu_offload) else None,
    }
    if given(plugin, "param_init_fn") is not None:
        arguments["materialize"] = given(plugin, "param_init_fn")
    if arguments["strategy"] == "hybrid":
        arguments["mesh"] = mesh(accelerator)
    requested = plan_from_environment()
    if requested is not None:
        arguments["plan"] = requested
    return arguments | given_options()


def is_offloaded(requested: Any) -> bool:
    """Whether a CPUOffload (version 1) or an OffloadPolicy (version 2) keeps values in host memory."""
    by_policy = any(kind.__name__ == "CPUOffloadPolicy" for kind in type(requested).__mro__)
    return bool(getattr(requested, "offload_params", by_policy))


def _recompute(plugin: Any) -> bool | str:
    recompute = bool(plugin.activation_checkpointing)
    return "offload" if recompute and plugin.activation_checkpointing_offload else recompute


def given(plugin: Any, name: str) -> Any:
    """The user's value of a field, before accelerate filled it in."""
    values = vars(plugin).get(GIVEN)
    return getattr(plugin, name) if values is None else values[name]


def strategy(accelerator: Any) -> dict[str, Any]:
    plugin, replicas = accelerator.state.fsdp_plugin, 1
    if accelerator.parallelism_config is not None:
        replicas = accelerator.parallelism_config.dp_replicate_size
    if plugin.fsdp_version == 1:
        return _STRATEGIES[_strategy_of_version_1(plugin)]
    by_name = given(plugin, "sharding_strategy")
    if by_name is not None:
        raise OptionError(
            f"fsdp version 2 with sharding_strategy={by_name!r}",
            "Give reshard_after_forward, or use version 1.",
        )
    chosen = "FULL_SHARD" if plugin.reshard_after_forward else "SHARD_GRAD_OP"
    if chosen == "FULL_SHARD" and given(plugin, "reshard_after_forward") is None:
        chosen = _launched_strategy("FSDP_SHARDING_STRATEGY") or chosen  # accelerate ignores it
    if replicas > 1:
        chosen = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}.get(chosen, chosen)
    return _STRATEGIES[chosen]


def _launched_strategy(variable: str) -> str | None:
    """The strategy that was given to `accelerate launch` by a flag or its YAML file, by torch's name."""
    value = (_set_by_launcher(variable) or "").upper()
    if value in ("", "TRUE"):  # the launcher's default
        return None
    names = extras.need("accelerate.utils.constants", "hf").FSDP_SHARDING_STRATEGY
    name = "SHARD_GRAD_OP" if value == "FALSE" else names[int(value) - 1] if value.isdigit() else value
    name = {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}.get(name, name)
    if name not in _STRATEGIES:
        raise OptionError(f"{variable} is {value!r}", f"Choose from {', '.join(names)}.")
    return str(name)


def _strategy_of_version_1(plugin: Any) -> str:
    """Two fields give it, and accelerate fills in the first whatever the second is."""
    values = vars(plugin).get(GIVEN)
    first, second = plugin.sharding_strategy, plugin.reshard_after_forward
    if values is None:  # made before `turn_on`: a default looks like a choice
        return str((second if second is not None and first.name == "FULL_SHARD" else first).name)
    if (
        values["sharding_strategy"] is not None
        and values["reshard_after_forward"] is not None
        and first != second
    ):
        raise OptionError(
            f"fsdp sharding_strategy is {first.name} and reshard_after_forward {second.name}",
            "Give one of them.",
        )
    if values["sharding_strategy"] is None and second is None:  # accelerate reads one of the two
        launched = _launched_strategy("FSDP_RESHARD_AFTER_FORWARD")  # and ignores the other
        if launched is not None and first.name not in (launched, "FULL_SHARD"):
            raise OptionError(
                f"accelerate launch got fsdp_sharding_strategy {first.name} and fsdp_reshard_after_forward "
                f"{launched}",
                "Give one of them.",
            )
        return launched or str(first.name)
    chosen = second if values["sharding_strategy"] is None and second is not None else first
    return str(chosen.name)


def mesh(accelerator: Any) -> DeviceMesh | None:
    """Rows are replicas, for ParallelismConfig(dp_replicate_size=...); None makes a node a group."""
    config = accelerator.parallelism_config
    if config is None or config.dp_replicate_size == 1:
        return None
    ranks = torch.arange(accelerator.num_processes).view(config.dp_replicate_size, -1)
    return DeviceMesh(accelerator.device.type, ranks, mesh_dim_names=("replicate", "shard"))


def precision(accelerator: Any) -> Precision:
    """bf16 and fp16 compute on parameters that are gathered in that dtype, not under autocast.

    Autocast would gather in fp32, twice the bytes. Outputs of the model are fp32, as without sharding, so
    that a loss is not rounded. Gradients are summed in fp32 whatever their dtype on the wire.
    """
    plugin, mixed = accelerator.state.fsdp_plugin, accelerator.mixed_precision
    outputs = None if mixed == "no" else torch.float32
    if not _has_policy(plugin):
        return Precision(compute=_DTYPES.get(mixed), outputs=outputs)
    policy = plugin.mixed_precision_policy
    # By default, version 1 casts the root's inputs, and not those of inner units.
    casts = "cast_root_forward_inputs" if plugin.fsdp_version == 1 else "cast_forward_inputs"
    for name, supported in (("keep_low_precision_grads", False), (casts, True)):
        if getattr(policy, name, supported) != supported:
            raise NotSupported(
                f"fsdp mixed_precision_policy with {name}={not supported}",
                f"Leave {name} at {supported}.",
            )
    return Precision(
        compute=policy.param_dtype,
        wire=policy.reduce_dtype,
        outputs=getattr(policy, "output_dtype", None) or outputs,
    )


def _has_policy(plugin: Any) -> bool:
    """Whether the script gave one, to the plugin or to its set_mixed_precision, and not accelerate alone."""
    return plugin.mixed_precision_policy is not vars(plugin).get(POLICY_FILLED_IN)


def cast_buffers(plugin: Any, model: nn.Module) -> None:
    """A policy object of version 1 may give buffers a dtype; a name such as 'bf16' does not."""
    if isinstance(given(plugin, "mixed_precision_policy"), str) or not _has_policy(plugin):
        return
    dtype = getattr(plugin.mixed_precision_policy, "buffer_dtype", None)
    # BatchNorm's kernels need statistics in fp32.
    for module in (m for m in model.modules() if not isinstance(m, _BatchNorm)):
        for name, buffer in module._buffers.items():
            if dtype is not None and buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def units(plugin: Any, model: nn.Module) -> Any:
    """The modules that the wrap policy would wrap. None, where it selects nothing: fs.shard finds them."""
    policy = given(plugin, "auto_wrap_policy")
    if policy is None:
        policy = _set_by_launcher("FSDP_AUTO_WRAP_POLICY")
    policy = _POLICIES.get(getattr(policy, "__name__", ""), policy)
    if policy is None:
        policy = "TRANSFORMER_BASED_WRAP" if _names(plugin) else "SIZE_BASED_WRAP"
    if isinstance(policy, str):
        return _named_units(policy.upper(), plugin, model)
    if not callable(policy):
        raise NotSupported(
            f"fsdp auto_wrap_policy {type(policy).__name__}",
            "Give a function of module, recurse and nonwrapped_numel, or give units= to "
            "fullshard.hugging_face.options.",
        )
    return _by_policy(policy)


def _set_by_launcher(variable: str) -> str | None:
    return extras.need("accelerate.utils", "hf").parse_choice_from_env(variable, "") or None


def _named_units(policy: str, plugin: Any, model: nn.Module) -> Any:
    if policy == "NO_WRAP":
        return _nothing  # the model is one unit
    if policy == "SIZE_BASED_WRAP":
        least = plugin.min_num_params or 0
        return _larger_than(least) if least > 0 else None
    names = _names(plugin)
    if not names:
        return None
    classes = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in names if name not in classes]
    if missing:
        raise OptionError(
            f"fsdp transformer_layer_cls_to_wrap names {', '.join(map(repr, missing))}, and "
            f"{type(model).__name__} has no module of that class",
            f"Its classes are {', '.join(sorted(classes)[:20])}; leave the option out and blocks are found.",
        )
    return tuple(classes[name] for name in names)


def _names(plugin: Any) -> list[str]:
    """Names of the classes to wrap. accelerate looks them up, and splits them, for a policy by name only."""
    names = plugin.transformer_cls_names_to_wrap or _set_by_launcher("FSDP_TRANSFORMER_CLS_TO_WRAP") or []
    return names.split(",") if isinstance(names, str) else list(names)


def _nothing(_: nn.Module) -> bool:
    return False


def _larger_than(least: int) -> Callable[[nn.Module], bool]:
    def is_unit(module: nn.Module) -> bool:
        return has_forward(module) and sum(p.numel() for p in module.parameters()) > least

    return is_unit


def _by_policy(policy: Callable[..., Any]) -> Callable[[nn.Module], bool]:
    def is_unit(module: nn.Module) -> bool:
        size = sum(p.numel() for p in module.parameters())
        return has_forward(module) and bool(policy(module=module, recurse=False, nonwrapped_numel=size))

    return is_unit


def ignored(plugin: Any, model: nn.Module) -> tuple[nn.Module, ...]:
    modules = plugin.ignored_modules
    if not isinstance(modules, str):
        return tuple(modules or ())
    matching = tuple(m for name, m in model.named_modules() if re.fullmatch(modules, name))
    if not matching:
        raise OptionError(f"fsdp ignored_modules {modules!r} matches no module", "Give names that match.")
    return matching
