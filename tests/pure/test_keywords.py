"""An unknown keyword of a public function is our error, with what was meant; signatures stay as written."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pickle
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard as fs
from fullshard import torch_fsdp
from fullshard.errors import OptionError
from fullshard.option_table import OTHER_NAMES, TABLE
from fullshard.options import parse

FUNCTIONS = [name for name in fs.__all__ if name not in ("__version__", "FullshardError")]
MODEL = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_names_the_option_that_it_does_not_have(name: str) -> None:
    with pytest.raises(
        OptionError, match=rf"fs\.{name} has no option 'frobnicate'\. (Options are|It has no)"
    ):
        getattr(fs, name)(MODEL, frobnicate=1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_misspelt_option_is_answered_with_its_name(name: str) -> None:
    function = getattr(fs, name)
    for option in inspect.signature(function).parameters:
        wrong = option + option[-1]
        with pytest.raises(OptionError, match=rf"'{wrong}'\. Did you mean '{option}'\?"):
            function(**{wrong: 1})


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("cpu_offload", "offload='host'"),
        ("offload_policy", "offload='host'"),
        ("cpu_offloading", "offload='host'"),
        ("nvme_path", "fs.Offload(disk=FOLDER)"),
        ("reshard_after_forward", "'zero2' keeps them"),
        ("sharding_strategy", "'zero2' for SHARD_GRAD_OP"),
        ("stage", "strategy='zero1', 'zero2' or 'zero3'"),
        ("zero_stage", "strategy='zero1', 'zero2' or 'zero3'"),
        ("mixed_precision", "precision='bf16'"),
        ("mp_policy", "precision='bf16'"),
        ("torch_dtype", "precision='bf16'"),
        ("auto_wrap_policy", "units=Block"),
        ("ignored_modules", "ignore="),
        ("ignored_params", "ignore="),
        ("device_mesh", "mesh="),
        ("process_group", "mesh="),
        ("device_id", "device='cuda'"),
        ("backward_prefetch", "prefetch=True is the default"),
        ("sync_module_states", "initial='broadcast'"),
        ("param_init_fn", "materialize="),
        ("activation_checkpointing", "checkpoint_activations=True"),
        ("gradient-checkpointing", "checkpoint_activations=True"),
        ("cpu_checkpointing", "checkpoint_activations='offload'"),
        ("reduce_bucket_size", "merge_units=BYTES"),
        ("zero_quantized_gradients", "fs.Precision(wire=torch.int8)"),
        ("use_orig_params", "Leave it out"),
        ("optimizer", "build the optimizer yourself"),
        ("gradient_accumulation_steps", "fs.accumulate"),
        ("max_grad_norm", "clip_grad_norm_"),
        ("config", "takes options by name"),
        ("STRATEGY", "Did you mean 'strategy'?"),
    ],
)
def test_a_word_of_another_library_is_answered_with_ours(given: str, answer: str) -> None:
    for call in (lambda: fs.shard(MODEL, **{given: 1}), lambda: parse(**{given: 1})):
        with pytest.raises(OptionError) as raised:
            call()
        assert answer in str(raised.value)


def test_no_word_of_another_library_is_one_of_our_options() -> None:
    assert not set(OTHER_NAMES) & {*TABLE, "mesh"}
    assert all(advice.endswith(".") for advice in OTHER_NAMES.values())


def test_arguments_of_torch_are_all_known() -> None:
    """Of both of torch's own interfaces, as our doors have them."""
    for door in (torch_fsdp.fully_shard, torch_fsdp.FullyShardedDataParallel):
        for name in set(inspect.signature(door).parameters) - {"module", "mesh", "dp_mesh_dims"}:
            with pytest.raises(OptionError) as raised:
                fs.shard(MODEL, **{name: None})
            assert name in OTHER_NAMES, name
            assert OTHER_NAMES[name] in str(raised.value)


@pytest.mark.parametrize(
    ("function", "given", "answer"),
    [
        ("save", "step", "extra={'step'"),
        ("save", "scheduler", "extra="),
        ("save", "save_total_limit", "keep_last=N"),
        ("save", "async_save", "background=True"),
        ("save", "directory", "path="),
        ("load", "map_location", "where the sharded parameters are"),
        ("load", "weights_only", "nothing that is read can run code"),
        ("load", "load_dir", "path="),
        ("latest", "path", "root="),
        ("plan", "world_size", "ranks=N"),
        ("plan", "batch", "fullshard plan"),
        ("full", "rank0_only", "writeback=False"),
        ("inference", "budget", "memory=BYTES"),
        ("accumulate", "steps", "all micro-batches but the last"),
        ("even_batches", "loader", "batches=loader"),
        ("Batches", "num_replicas", "ranks=N"),
        ("Batches", "global_batch_size", "batch_size="),
        ("Batches", "dataset", "num_samples=len(dataset)"),
        ("Precision", "param_dtype", "compute=torch.bfloat16"),
        ("Precision", "reduce_dtype", "reduce=torch.float32"),
        ("Precision", "buffer_dtype", "Leave it out"),
    ],
)
def test_other_functions_know_the_words_of_other_libraries(function: str, given: str, answer: str) -> None:
    with pytest.raises(OptionError) as raised:
        getattr(fs, function)(**{given: 1})
    assert answer in str(raised.value)


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("strategy", 3, "zero3"),
        ("strategy", "stage2", "zero2"),
        ("strategy", "zero-3", "zero3"),
        ("strategy", "FULL_SHARD", "zero3"),
        ("strategy", torch_fsdp.ShardingStrategy.SHARD_GRAD_OP, "zero2"),
        ("strategy", "ddp", "replicate"),
        ("strategy", "hybrd", "hybrid"),
        ("initial", "brodcast", "broadcast"),
        ("precision", torch.bfloat16, "bf16"),
        ("precision", "bf16-mixed", "bf16"),
        ("precision", 16, "fp16"),
        ("precision", "float32", "fp32"),
    ],
)
def test_a_value_of_another_library_is_answered_with_ours(option: str, value: Any, meant: str) -> None:
    with pytest.raises(OptionError, match=rf"unknown {option} .*Did you mean '{meant}'\?"):
        parse(**{option: value})


def test_options_by_position_are_refused_with_their_names() -> None:
    with pytest.raises(OptionError, match=r"got 2 positional arguments, and takes 'model'.*strategy=\.\.\."):
        fs.shard(MODEL, "zero2")  # type: ignore[misc]
    with pytest.raises(OptionError, match=r"fs\.Batches got 3 positional"):
        fs.Batches(100, 10, 0)  # type: ignore[misc]


def test_doors_answer_in_the_same_way() -> None:
    from fullshard.hugging_face.shard_options import options

    with pytest.raises(OptionError, match=r"has no option 'cpu_offload'. Write offload='host'"):
        options(cpu_offload=True)
    with pytest.raises(OptionError, match=r"fully_shard has no option 'reshard_after_fwd'\. Did you mean"):
        torch_fsdp.fully_shard(MODEL, reshard_after_fwd=True)  # type: ignore[call-arg]
    with pytest.raises(
        OptionError, match=r"has no option 'auto_wrap_polcy'\. Did you mean 'auto_wrap_policy'"
    ):
        torch_fsdp.FullyShardedDataParallel(MODEL, auto_wrap_polcy=None)  # type: ignore[call-arg]


def test_signatures_and_types_are_those_that_are_written() -> None:
    for name in FUNCTIONS:
        signature = inspect.signature(getattr(fs, name))
        assert not any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()), name
    assert typing.get_type_hints(fs.save)["optimizer"] == torch.optim.Optimizer | None
    assert "Shard `model` in place" in (fs.shard.__doc__ or "")
    precision = fs.Precision(torch.bfloat16, wire=torch.int8)
    assert pickle.loads(pickle.dumps(precision)) == precision
    assert dataclasses.replace(precision, wire=None) == fs.Precision(torch.bfloat16)


# --- names of the package that are imported when they are first used --------------------------------------


def test_type_checkers_see_every_public_name_where_it_is_defined() -> None:
    tree = ast.parse(Path(fs.__file__).read_text())
    branch = next(node for node in tree.body if isinstance(node, ast.If))
    read = {alias.name: node.module for node in branch.body for alias in node.names}  # type: ignore[attr-defined]
    assert read == vars(fs)["_homes"]
    assert sorted([*read, "__version__"]) == sorted(fs.__all__)
    for name, home in read.items():
        assert getattr(fs, name) is getattr(sys.modules[home], name)


def test_importing_the_package_loads_no_torch_and_keeps_every_way_of_reaching_a_name() -> None:
    code = """
import sys
import fullshard as fs
assert "torch" not in sys.modules and fs.__version__ and "shard" in dir(fs)
assert issubclass(fs.errors.OptionError, fs.FullshardError) and "torch" not in sys.modules
from fullshard.plan.units import find_units  # a folder of the same name as a function
assert callable(fs.plan) and fs.plan.__module__ == "fullshard.api"
import fullshard.plan.layout
assert callable(fullshard.plan)
from fullshard import Batches, shard
from fullshard import *
assert shard is fs.shard and plan is fs.plan
from fullshard import integrations
assert integrations._libraries, "libraries of models are registered with the function that needs them"
try:
    fs.shrad
except AttributeError as error:
    assert "shrad" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=700)
