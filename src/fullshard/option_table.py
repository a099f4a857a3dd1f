"""The options of `fs.shard`, each declared once: default, help, check, and what other libraries call it.

No torch is imported here until a value is checked: the command line prints its help from this table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from fullshard.errors import OptionError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fullshard.offload import Offload
    from fullshard.precision import Precision

Strategy = Literal["replicate", "zero1", "zero2", "zero3", "hybrid"]
CheckpointActivations = bool | Literal["offload"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
INITIAL = ("broadcast", "verify")
REDUCE = ("auto", "exchange", "scatter", "fixed")
OPTIMIZER_STEPS = ("auto", "element-wise", "owned", "gathered")
STATE = ("exact", "8bit")


@dataclass(frozen=True)
class Option:
    """One option: `check` turns a given value into the one that `Options` holds, or raises OptionError.

    Without a check of its own, an option takes one of its choices, or a bool.
    """

    name: str
    default: Any
    help: str
    check: Callable[[Any], Any] | None = None
    choices: tuple[str, ...] = ()
    agreed: bool = True  # must be equal on all ranks; False for objects that ranks cannot compare
    other_names: Mapping[str, str] = field(default_factory=dict)  # in other libraries, and what to write here
    other_values: Mapping[str, str] = field(default_factory=dict)  # the same for values: the choice meant

    def parsed(self, value: Any) -> Any:
        if self.check is not None:
            return self.check(value)
        return self._choice(value) if self.choices else _flag(self.name, value)

    def _choice(self, value: Any) -> str:
        if isinstance(value, str) and value in self.choices:
            return value
        listed = f"Choose one of {', '.join(map(repr, self.choices))}."
        raise OptionError(f"unknown {self.name} {value!r}", f"{self._meant(value)}{listed}")

    def _meant(self, value: Any) -> str:
        plain = str(getattr(value, "name", value)).lower().replace("-", "_")  # a name, a number, or an enum's
        near = self.other_values.get(plain) or next(iter(get_close_matches(plain, self.choices, 1)), None)
        return "" if near is None else f"Did you mean {near!r}? "


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}, which is neither True nor False", "Give a bool.")
    return value


def _precision(value: Any) -> Precision:
    from fullshard.precision import parse

    return parse(value)


def _materialize(value: Any) -> Callable[[nn.Module], Any] | None:
    if value is not None and not callable(value):
        raise OptionError(f"materialize is {value!r}", "Give a function of one module.")
    return value  # type: ignore[no-any-return]


def _budget(name: str, value: Any) -> int | None:
    if value == "all":
        return sys.maxsize
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise OptionError(
        f"{name} is {value!r}", "Give a number of bytes, 'all', 0 for none, or None for the default."
    )


def _checkpoint_activations(value: Any) -> CheckpointActivations:
    if isinstance(value, bool):
        return value
    if value == "offload":
        return "offload"
    raise OptionError(
        f"checkpoint_activations is {value!r}", "Give True, False, or 'offload' for inputs in host memory."
    )


def _offload(value: Any) -> Offload | None:
    from fullshard.offload import parse

    return parse(value)


def _merge_units(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise OptionError(
        f"merge_units is {value!r}",
        "Give a number of bytes, 0 for one unit per block, or None for the default.",
    )


def _device(value: Any) -> torch.device | None:
    import torch

    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or isinstance(value, bool):
        raise OptionError(f"device is {value!r}", "Give 'cpu', 'cuda' or 'cuda:N'.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise OptionError(f"device is {value!r}, and this process sees {count} GPUs", "Choose another.")
    return device


def _plan(value: Any) -> Any:
    """A request or a record; `planning.automatic` reads it."""
    if value is None or isinstance(value, str | Mapping) or hasattr(value, "__fspath__"):
        return value
    if type(value).__name__ in ("Planning", "Choice", "Plan"):
        return value
    raise OptionError(
        f"plan is {value!r}", "Give 'auto', an fs.Planning, a plan with a choice, or the file of one."
    )


def _units(units: Any) -> Any:
    from torch import nn

    if units is None:
        return None
    if isinstance(units, type):
        units = (units,)
    if isinstance(units, list | tuple | set | frozenset):
        bad = [u for u in units if not (isinstance(u, type) and issubclass(u, nn.Module))]
        if bad or not units:
            raise OptionError(
                f"units contains {bad[0]!r}, which is not a module class" if bad else "units is empty",
                "Give module classes, a function of a module that returns a bool, or None to find units.",
            )
        return tuple(units)
    if callable(units):
        return units
    raise OptionError(f"units is {units!r}", "Give module classes, a function of a module, or None.")


def _ignore(ignore: Any) -> tuple[Any, ...]:
    from torch import nn

    kinds = (str, nn.Module, nn.Parameter)
    listed = isinstance(ignore, list | tuple | set | frozenset)
    entries = tuple(ignore) if listed else (ignore,)
    for entry in entries:
        if not isinstance(entry, kinds):
            raise OptionError(f"ignore contains {entry!r}", "Give modules, parameters or names.")
    return entries


def _all(advice: str, *names: str) -> dict[str, str]:
    """The same advice for each name that other libraries have for an option."""
    return dict.fromkeys(names, advice)


TABLE: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            "strategy",
            "zero3",
            "'zero3' (default), 'zero2', 'zero1', 'replicate', or 'hybrid' (shard inside, replicate across).",
            choices=STRATEGIES,
            other_names=_all(
                "Write strategy='zero1', 'zero2' or 'zero3'.",
                "stage",
                "zero",
                "zero_stage",
                "zero_optimization",
            )
            | _all(
                "strategy='zero3', the default, releases parameters after forward; 'zero2' keeps them.",
                *("reshard_after_forward", "reshard_after_backward", "zero3_save_16bit_model"),
            )
            | _all(
                "Write strategy='zero3' for FULL_SHARD, 'zero2' for SHARD_GRAD_OP, 'replicate' for NO_SHARD, "
                "'hybrid' for HYBRID_SHARD.",
                *("sharding_strategy", "fsdp", "sharding", "mode"),
            )
            | _all(
                "Write strategy='hybrid': shards stay inside a node.",
                *("hybrid_shard", "hsdp", "mics_shard_size"),
            ),
            other_values={
                **{str(n): f"zero{n}" for n in (1, 2, 3)},
                **{
                    f"{word}{n}": f"zero{n}"
                    for n in (1, 2, 3)
                    for word in ("stage", "stage_", "zero_", "zero_stage_")
                },
                **dict.fromkeys(("full_shard", "fsdp", "fsdp2", "fully_shard", "full", "shard"), "zero3"),
                **dict.fromkeys(("hybrid_shard", "hsdp"), "hybrid"),
                "shard_grad_op": "zero2",
                "_hybrid_shard_zero2": "hybrid",
                **dict.fromkeys(("no_shard", "ddp", "data_parallel", "zero0", "0", "none"), "replicate"),
            },
        ),
        Option(
            "precision",
            "fp32",
            "'fp32', 'bf16', 'fp16', or an fs.Precision.",
            _precision,
            other_names=_all(
                "Write precision='bf16', 'fp16', or fs.Precision(compute=..., reduce=...).",
                *(
                    "mixed_precision",
                    "mp_policy",
                    "param_dtype",
                    "dtype",
                    "torch_dtype",
                    "compute_dtype",
                    "amp",
                ),
                *("bf16", "fp16", "fp32", "autocast", "reduce_dtype", "buffer_dtype", "output_dtype", "half"),
            )
            | _all(
                "Write precision=fs.Precision(gather=torch.int8) or fs.Precision(wire=torch.int8).",
                *("zero_quantized_weights", "zero_quantized_gradients", "quantize", "compression", "wire"),
                *("gather", "communication_data_type", "comm_dtype"),
            ),
        ),
        Option(
            "units",
            None,
            "None finds them; or module classes; or a function of a module that returns a bool.",
            _units,
            agreed=False,
            other_names=_all(
                "Write units=Block, a class, or a function of a module; None, the default, finds them.",
                *(
                    "auto_wrap_policy",
                    "wrap_policy",
                    "wrap",
                    "auto_wrap",
                    "transformer_layer_cls_to_wrap",
                    "blocks",
                ),
                *("module_classes", "layer_cls", "transformer_layer_cls", "fsdp_wrap_modules", "modules"),
                *("modules_to_shard", "leaf_modules", "min_num_params", "unit"),
            ),
        ),
        Option(
            "checkpoint_activations",
            False,
            "recompute the activations of each block in backward; 'offload' keeps the inputs of blocks in "
            "host memory until then.",
            _checkpoint_activations,
            other_names=_all(
                "Write checkpoint_activations=True.",
                *("activation_checkpointing", "gradient_checkpointing", "checkpoint", "recompute", "remat"),
                *("activation_checkpoint", "ac", "activation_checkpointing_policy"),
            )
            | _all(
                "Write checkpoint_activations='offload'.",
                *("cpu_checkpointing", "activation_offload", "activation_offloading", "offload_activations"),
                *("activations_cpu_offload", "cpu_offload_activations", "activation_checkpointing_offload"),
            ),
        ),
        Option(
            "ignore",
            (),
            "modules, parameters or names that stay as they are on every rank, unsynchronised.",
            _ignore,
            agreed=False,
            other_names=_all(
                "Write ignore=[...]: modules, parameters or names.",
                *(
                    "ignored_params",
                    "ignored_parameters",
                    "ignored_modules",
                    "ignored_states",
                    "exclude",
                    "skip",
                ),
            ),
        ),
        Option(
            "initial",
            "broadcast",
            "'broadcast' gives every rank the first rank's values; 'verify' raises if ranks differ.",
            choices=INITIAL,
            other_names=_all(
                "initial='broadcast', the default, gives every rank the first rank's values.",
                *("sync_module_states", "init_sync", "broadcast_from_rank0", "src_data_rank"),
            ),
        ),
        Option(
            "materialize",
            None,
            "for a meta-device model, a function that initialises one module's own tensors.",
            _materialize,
            agreed=False,
            other_names=_all(
                "Write materialize=function, which initialises one module's own tensors.",
                *("param_init_fn", "init_fn", "init_weights", "remote_device"),
            ),
        ),
        Option(
            "device",
            None,
            "where shards and buffers go, unit by unit, so that no device holds all of a model that was "
            "built on the host: 'cuda' is this rank's GPU. None is where the model is; for a meta model the "
            "GPU.",
            _device,
            agreed=False,
            other_names=_all(
                "Write device='cuda', which is this rank's GPU.",
                *("device_id", "device_ids", "output_device", "device_type", "compute_device"),
            ),
        ),
        Option(
            "offload",
            None,
            "'host' keeps shards, gradients and optimizer state in host memory between their uses; "
            "'optimizer' only what the optimizer alone needs: masters and its state; 'auto' what does not "
            "fit on the device; or an fs.Offload.",
            _offload,
            other_names=_all(
                "Write offload='host', or 'optimizer' for the optimizer's values alone.",
                *("cpu_offload", "offload_policy", "offload_params", "offload_param", "offload_optimizer"),
                *("offload_to_cpu", "cpuoffload", "pin_memory", "offload_optimizer_device"),
            )
            | _all("Write offload=fs.Offload(disk=FOLDER).", "nvme_path", "offload_dir", "offload_folder"),
        ),
        Option(
            "state",
            "exact",
            "'exact' keeps an optimizer's state as the optimizer makes it; '8bit' keeps it in 8-bit blocks "
            "between steps, about a quarter of its bytes. Parameters stay as they are.",
            choices=STATE,
            other_names=_all(
                "Write state='8bit', with any element-wise optimizer.",
                *(
                    "optimizer_state",
                    "state_dtype",
                    "optim_bits",
                    "low_bit_state",
                    "state_bits",
                    "optimizer_bits",
                ),
                *("quantized_state", "eight_bit_optimizer", "optimizer_state_dtype", "moments"),
            ),
            other_values={
                **dict.fromkeys(
                    ("8", "8_bit", "int8", "uint8", "eight_bit", "torch.int8", "q8", "true"), "8bit"
                ),
                **dict.fromkeys(("32", "fp32", "32bit", "full", "none", "false", "float32"), "exact"),
            },
        ),
        Option(
            "check_gradients",
            False,
            "raise on all ranks when a gradient is not finite, naming rank and parameter.",
            other_names=_all(
                "Write check_gradients=True.", "check_nan", "detect_anomaly", "check_for_nan_in_grad"
            ),
        ),
        Option(
            "prefetch",
            True,
            "gather the next unit while this one computes.",
            other_names=_all(
                "prefetch=True is the default: the next unit is gathered while one computes.",
                *("forward_prefetch", "backward_prefetch", "limit_all_gathers", "overlap_comm"),
                *("overlap", "stage3_prefetch_bucket_size"),
            ),
        ),
        Option(
            "keep_full",
            None,
            "bytes of full values that zero3 and hybrid may keep from forward to backward, which saves each "
            "kept unit its second gather; 'all', or 0 for none. None keeps what backward needs first.",
            partial(_budget, "keep_full"),
            other_names=_all(
                "Write keep_full=BYTES or 'all'.", "stage3_max_live_parameters", "max_live_parameters"
            ),
        ),
        Option(
            "keep_node",
            None,
            "bytes of its node's share of values that a rank may keep from forward to backward, where ranks "
            "are on several nodes: backward then gathers inside the node only; 'all', or 0 for none. None "
            "keeps up to half of what the rank holds anyway.",
            partial(_budget, "keep_node"),
            other_names=_all(
                "Write keep_node=BYTES or 'all': it is the default where it costs little.",
                *("zero_hpz_partition_size", "across", "secondary_partition", "hpz", "hierarchical"),
            ),
        ),
        Option(
            "merge_units",
            None,
            "bytes up to which neighbouring small blocks share a unit, and below which a small model is one "
            "unit; 0 keeps one unit per block; None chooses by device. Units that `units` picks are not "
            "merged.",
            _merge_units,
            other_names=_all(
                "Messages are units: merge_units=BYTES merges small ones.",
                *(
                    "bucket_cap_mb",
                    "reduce_bucket_size",
                    "allgather_bucket_size",
                    "stage3_param_persistence_threshold",
                ),
                *("bucket_size", "min_unit_size"),
            ),
        ),
        Option(
            "reduce",
            "auto",
            "'exchange' sends gradients all-to-all and their owners sum them in fp32; 'scatter' sends fp32, "
            "summed on the way by the backend; 'auto' takes the one that sends less between nodes; 'fixed' "
            "sums the micro-batches of fs.Batches in one order: the same bits on any number of ranks.",
            choices=REDUCE,
            other_values=dict.fromkeys(
                ("deterministic", "reproducible", "bitwise", "tree", "fixed_tree", "fixed_order", "exact"),
                "fixed",
            ),
            other_names=_all(
                "reduce='scatter' is a reduce-scatter by the backend; 'exchange' sums in fp32.",
                *("reduce_scatter", "use_multi_rank_bucket_allreduce"),
            ),
        ),
        Option(
            "optimizer_step",
            "auto",
            "'element-wise' steps on shards; 'owned' on entire tensors, each on one rank; 'gathered' on all "
            "of them on every rank; 'auto' finds out whether an optimizer is element-wise or looks at "
            "tensors one by one.",
            choices=OPTIMIZER_STEPS,
            other_names=_all(
                "optimizer_step='auto', the default, runs Muon and others on entire tensors.",
                *("muon", "layer_wise_optimizer", "matrix_optimizer", "dist_optimizer"),
            ),
            other_values={
                **dict.fromkeys(
                    ("elementwise", "element_wise", "sharded", "shards", "local"), "element-wise"
                ),
                **dict.fromkeys(("owner", "layer_wise", "layerwise", "matrix"), "owned"),
                **dict.fromkeys(("replicated", "full", "global", "gather"), "gathered"),
            },
        ),
        Option(
            "plan",
            None,
            "'auto' chooses the fastest settings that fit: strategy, checkpoint_activations, offload, "
            "keep_full and keep_node, unless they are given; an fs.Planning has the batch and the machine to "
            "plan for; a recorded plan, or its file, is used again.",
            _plan,
            agreed=False,
            other_names=_all("Write plan='auto'.", "auto", "autotuning", "autotune", "planner"),
        ),
    )
}

# What other libraries call things: by name, what to write here. Those without an option of ours come last.
OTHER_NAMES: dict[str, str] = {
    **{name: advice for option in TABLE.values() for name, advice in option.other_names.items()},
    **_all(
        "Write mesh=..., a DeviceMesh.", "device_mesh", "process_group", "group", "dp_mesh", "process_groups"
    ),
    **_all(
        "Write mesh=mesh['dp'] for a model that is tensor-parallel already.", "tp_mesh", "tp_size", "tp_plan"
    ),
    **_all(
        "Write mesh=...; ranks are started by torchrun or fullshard launch.",
        "world_size",
        "ranks",
        "num_gpus",
    ),
    **_all(
        "Nodes are those of the launcher, or the rows of a mesh with axes ('node', 'shard').",
        *("nodes", "num_nodes", "nnodes", "node_ranks", "local_world_size", "ranks_per_node", "topology"),
    ),
    **_all(
        "Leave it out: build the optimizer yourself, before or after fs.shard.",
        *("optimizer", "optimizers", "model_parameters", "lr_scheduler", "lr"),
    ),
    **_all(
        "Leave it out: every strategy handles it.",
        *("use_orig_params", "find_unused_parameters", "static_graph", "gradient_as_bucket_view"),
        *("contiguous_gradients", "round_robin_gradients", "shard_placement_fn", "fsdp_version"),
        *("broadcast_buffers", "init_sync_buffers", "reduce_scatter_unused"),
    ),
    **_all(
        "Write `with fs.accumulate(model):` around all micro-batches but the last.",
        "gradient_accumulation_steps",
    ),
    **_all(
        "Call torch.nn.utils.clip_grad_norm_ after backward, as without sharding.",
        *("gradient_clipping", "max_grad_norm", "clip_grad_norm"),
    ),
    **_all("Call block.compile() on the blocks after fs.shard.", "compile", "torch_compile"),
    **_all(
        "fs.shard takes options by name, not a config.", "config", "ds_config", "config_params", "fsdp_config"
    ),
}
