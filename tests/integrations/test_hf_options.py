"""Every FSDP setting is honoured or refused by name; scripts that do not ask for FSDP are left alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_accelerate import Block, Net
from torch import nn

import hf_runs
import ranks
import warm
from fullshard.patches import Patches


def _prepared(plugin: dict[str, Any], launched: dict[str, str] | None = None, **more: Any) -> Any:
    """A model prepared under these settings of the plugin, or the error by which they are refused.

    `launched` is what `accelerate launch` would have set.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from fullshard.errors import FullshardError

    hf_runs.forget()
    os.environ.update(launched or {})
    try:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**plugin), **more)
        torch.manual_seed(0)
        model = Net()
        model.blocks[0].register_buffer("table", torch.ones(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return accelerator.prepare(model, optimizer)[0]
    except FullshardError as error:
        return f"{type(error).__name__}: {error.what}"


def _launched(strategy: str, reshard: str) -> dict[str, str]:
    """`accelerate launch` always sets both, and accelerate reads one of them."""
    return {"FSDP_SHARDING_STRATEGY": strategy, "FSDP_RESHARD_AFTER_FORWARD": reshard}


def _refused() -> dict[str, Any]:
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
    from torch.distributed.fsdp.wrap import CustomPolicy

    v2 = {"fsdp_version": 2}
    return {
        "local state": _prepared({"state_dict_type": "LOCAL_STATE_DICT"}),
        "two strategies": _prepared({"sharding_strategy": "NO_SHARD", "reshard_after_forward": "FULL_SHARD"}),
        "two launched": _prepared({}, _launched("NO_SHARD", "shard_grad_op")),
        "strategy of version 1": _prepared(
            v2 | {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}
        ),
        "class": _prepared(
            {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Blok"]}
        ),
        "policy": _prepared({"auto_wrap_policy": CustomPolicy(lambda _: False)}),
        "ignored": _prepared({"ignored_modules": "nothing.*"}),
        "low gradients": _prepared({"mixed_precision_policy": MixedPrecision(keep_low_precision_grads=True)}),
        "inputs": _prepared(v2 | {"mixed_precision_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}),
    }


def test_settings_that_cannot_be_honoured_are_refused_by_name() -> None:
    expected = {
        "local state": ("NotSupported", "LOCAL_STATE_DICT"),
        "two strategies": ("OptionError", "sharding_strategy is NO_SHARD"),
        "two launched": ("OptionError", "fsdp_sharding_strategy NO_SHARD"),
        "strategy of version 1": ("OptionError", "sharding_strategy='FULL_SHARD'"),
        "class": ("OptionError", "'Blok'"),
        "policy": ("NotSupported", "auto_wrap_policy CustomPolicy"),
        "ignored": ("OptionError", "'nothing.*'"),
        "low gradients": ("NotSupported", "keep_low_precision_grads=True"),
        "inputs": ("NotSupported", "cast_forward_inputs=False"),
    }
    for found in ranks.run(_refused, 1, timeout_s=120):
        assert set(found) == set(expected)
        for what, (kind, words) in expected.items():
            assert isinstance(found[what], str), f"{what} was not refused"
            assert found[what].startswith(f"{kind}:"), found[what]
            assert words in found[what], found[what]


def _said(model: Any) -> dict[str, Any]:
    """What the engine was asked for."""
    if isinstance(model, str):
        return {"error": model}
    runtime = model.__dict__["_fullshard"]
    options = runtime.options
    return {
        "strategy": options.strategy,
        "keep_full": options.keep_full is not None,
        "precision": options.precision,
        "units": [unit.name for unit in runtime.units],
        "checkpointing": options.checkpoint_activations,
        "ignored": len(runtime.ignored),
        "groups": (runtime.comm.ranks, runtime.comm.all_ranks),
        "buffers": {name: value.dtype for name, value in model.named_buffers()},
        "whole": float(sum(p.numel() for p in model.parameters())),
    }


def _honoured() -> dict[str, Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

    import fullshard.hugging_face as door

    narrow = torch.bfloat16
    policy = MixedPrecision(param_dtype=narrow, reduce_dtype=torch.float32, buffer_dtype=narrow)
    named = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    models = {
        "default": _prepared({}),
        "unimportant": _prepared(
            {
                "backward_prefetch": "BACKWARD_POST",
                "forward_prefetch": True,
                "limit_all_gathers": False,
                "use_orig_params": False,
                "sync_module_states": True,
                "cpu_ram_efficient_loading": True,
            }
        ),
        "not sharded": _prepared({"sharding_strategy": "NO_SHARD"}),
        "hybrid, zero2": _prepared({"sharding_strategy": "HYBRID_SHARD_ZERO2"}),
        "named": _prepared(named | {"activation_checkpointing": True}),
        "activations in host memory": _prepared(
            {"fsdp_version": 2, "activation_checkpointing": True, "activation_checkpointing_offload": True}
        ),
        "named beside torch's function": _prepared(
            named | {"auto_wrap_policy": transformer_auto_wrap_policy}
        ),
        "named without a policy": _prepared({"transformer_cls_names_to_wrap": ["Block"]}),
        "named by the launcher": _prepared({}, {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}),
        "zero2 by the launcher": _prepared({}, _launched("FULL_SHARD", "shard_grad_op")),
        "zero2 by the launcher, version 2": _prepared({"fsdp_version": 2}, _launched("2", "true")),
        "not wrapped": _prepared({"auto_wrap_policy": "no_wrap"}),
        "wrapped by policy": _prepared({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}),
        "policy": _prepared({"mixed_precision_policy": policy}),
        "bf16": _prepared({}, mixed_precision="bf16"),
        "policy and bf16": _prepared(
            {
                "fsdp_version": 2,
                "mixed_precision_policy": MixedPrecisionPolicy(narrow, narrow, output_dtype=narrow),
            },
            mixed_precision="bf16",
        ),
        "ignored": _prepared({"ignored_modules": r"blocks\.1"}),
        "mesh": _prepared(
            {"fsdp_version": 2}, parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        ),
    }
    found = {what: _said(model) for what, model in models.items()}
    tensor_parallel = ParallelismConfig(tp_size=2, dp_shard_size=2)
    found["tensor parallel"] = _prepared({"fsdp_version": 2}, parallelism_config=tensor_parallel)
    hf_runs.forget()
    early = FullyShardedDataParallelPlugin(reshard_after_forward="SHARD_GRAD_OP")
    del early.__dict__["_fullshard_given"]  # as one has it that was made before the import
    found["early"] = _said(Accelerator(cpu=True, fsdp_plugin=early).prepare_model(Net()))
    hf_runs.forget()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), mixed_precision="bf16")
    accelerator.state.fsdp_plugin.set_mixed_precision(torch.float16, override=True)
    found["later"] = _said(accelerator.prepare_model(Net()))
    type(accelerator.state)._reset_state()  # as scripts do between two accelerators
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    found["after a reset"] = _said(accelerator.prepare(Net()))
    try:
        with accelerator.join_uneven_inputs([], even_batches=False):
            pass
    except Exception as error:
        found["uneven"] = f"{type(error).__name__}: {error}"
    hf_runs.forget()
    with door.options(units=Block, keep_full="all", strategy="zero2", device="cpu"):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        found["own"] = _said(accelerator.prepare_model(Net()))
    found["after own"] = _said(accelerator.prepare_model(Net()))
    try:
        door.options(unit=Block)
    except Exception as error:
        found["unknown"] = f"{type(error).__name__}: {error}"
    return found


def test_settings_reach_the_engine() -> None:
    import fullshard as fs

    found = ranks.run(_honoured, 4, timeout_s=240)[0]
    refusal = found.pop("tensor parallel")
    assert refusal.startswith("NotSupported: ParallelismConfig with tp_size=2"), refusal
    assert not [row for row in found.values() if "error" in row], found
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    default = found["default"]
    assert (default["strategy"], default["units"][0], default["checkpointing"]) == ("zero3", "", False)
    assert found["unimportant"] == default
    assert found["not sharded"]["strategy"] == "replicate"
    assert found["not sharded"]["whole"] > 3 * default["whole"]
    assert (found["hybrid, zero2"]["strategy"], found["hybrid, zero2"]["keep_full"]) == ("hybrid", True)
    assert (found["named"]["units"], found["named"]["checkpointing"]) == (["", *blocks], True)
    assert found["activations in host memory"]["checkpointing"] == "offload"
    assert (
        found["named without a policy"]["units"] == found["named by the launcher"]["units"] == ["", *blocks]
    )
    for what in ("zero2 by the launcher", "zero2 by the launcher, version 2"):
        assert found[what]["strategy"] == "zero2", what
    assert found["not wrapped"]["units"] == [""]
    assert found["wrapped by policy"]["units"] == ["", *(f"{b}.inner" for b in blocks), "head"]
    narrow, wide = torch.bfloat16, torch.float32
    assert found["policy"]["precision"] == fs.Precision(compute=narrow, wire=wide)
    assert set(found["policy"]["buffers"].values()) == {narrow}
    assert found["bf16"]["precision"] == fs.Precision(compute=narrow, outputs=wide)
    assert set(found["bf16"]["buffers"].values()) == {wide}
    assert found["later"]["precision"].compute == torch.float16
    assert found["policy and bf16"]["precision"] == fs.Precision(compute=narrow, wire=narrow, outputs=narrow)
    assert found["ignored"]["ignored"] == 4
    assert (found["mesh"]["strategy"], found["mesh"]["groups"]) == ("hybrid", (2, 4))
    assert found["early"]["strategy"] == "zero2"
    assert found["after a reset"] == found["after own"]
    assert found["uneven"].startswith("NotSupported")
    assert (found["own"]["units"], found["own"]["strategy"]) == (["", *blocks], "zero2")
    assert found["after own"] == default | {"buffers": {"scale": wide}}
    assert found["unknown"].startswith("OptionError")
    assert "'unit'" in found["unknown"]


def _without_fsdp() -> dict[str, Any]:
    from accelerate import Accelerator

    hf_runs.forget()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    return {"type": accelerator.distributed_type.value, "model": type(model).__name__}


def _with_another_version() -> str:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from fullshard import extras

    hf_runs.forget()
    tried, extras.TRIED["accelerate"] = extras.TRIED["accelerate"], ("0.99",)
    try:
        plain = Accelerator(cpu=True).distributed_type.value
        hf_runs.forget()
        try:
            Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        except extras.MissingExtra as error:
            return f"{plain}: {error}"
        return "not refused"
    finally:
        extras.TRIED["accelerate"] = tried


def test_scripts_without_fsdp_are_left_alone_and_untried_versions_refused_when_it_is_asked_for() -> None:
    for found in ranks.run(_without_fsdp, 2, timeout_s=120):
        assert found == {"type": "MULTI_CPU", "model": "DistributedDataParallel"}
    (message,) = ranks.run(_with_another_version, 1)
    assert message.startswith("MULTI_CPU:")
    assert "accelerate 1." in message
    assert "tested with 0.99.*" in message


BEFORE = (
    "import sys, fullshard.hugging_face as door; door.turn_on(); door.turn_on(); "
    "found = {'accelerate', 'transformers', 'trl', 'peft'} & set(sys.modules); assert not found, found; "
    "import accelerate; import accelerate.utils as u; "
    "from fullshard.hugging_face.patching import PATCHES; ours = PATCHES.is_replacement; "
    "assert ours(u.save_fsdp_model) and ours(accelerate.Accelerator.prepare); "
    "import inspect; assert 'accumulate' in inspect.getsource(accelerate.accelerator)"
)
AFTER = (
    "import transformers.trainer as t, accelerate; import fullshard.hugging_face; "
    "from fullshard.hugging_face.patching import PATCHES; ours = PATCHES.is_replacement; "
    "assert ours(t.save_fsdp_model) and ours(t.get_last_checkpoint); "
    "assert ours(t.Trainer.save_model) and ours(t.TrainingArguments.__post_init__); "
    "assert ours(accelerate.Accelerator.prepare)"
)


@pytest.mark.parametrize("code", [BEFORE, pytest.param(AFTER, marks=pytest.mark.long)], ids=["first", "last"])
def test_turning_on_imports_no_library_and_works_before_and_after_them(code: str) -> None:
    _python(code)


# Every attribute of the libraries' modules, and of the classes in them.
OBJECTS = """
import sys, types
def objects():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("accelerate", "transformers", "trl"):
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, type):
                    found |= {(name, key, inner): v for inner, v in vars(value).items()}
    return found
def different(before, now):
    return {key for key in before.keys() & now.keys() if before[key] is not now[key]}
"""
OFF = f"""{OBJECTS}
import accelerate, transformers.trainer, trl.models.utils
before, finders = objects(), list(sys.meta_path)
import fullshard.hugging_face as door
on = different(before, objects())
assert ("accelerate.accelerator", "Accelerator", "prepare") in on and len(on) > 20, on
door.turn_off()
assert not different(before, objects()), different(before, objects())
assert sys.meta_path == finders
door.turn_on()
assert different(before, objects()) == on
door.turn_off(); door.turn_off()
assert not different(before, objects())
"""
OFF_AFTER_IMPORTS = f"""{OBJECTS}
import fullshard.hugging_face as door
import transformers.trainer, accelerate
from fullshard.hugging_face.patching import PATCHES
replaced = {{key for key, value in objects().items() if PATCHES.is_replacement(value)}}
assert ("transformers.trainer", "get_last_checkpoint") in replaced, replaced
now = objects()
known = {{id(now[key]) for key in replaced}}
door.turn_off()
left = {{key for key, value in objects().items() if id(value) in known}}
assert not left, left
"""


@pytest.mark.parametrize(
    ("code", "library"),
    [(OFF, "transformers"), (OFF_AFTER_IMPORTS, "")],
    ids=["imported before", "imported after"],
)
def test_turning_off_puts_back_the_very_objects_of_the_libraries(code: str, library: str) -> None:
    _python(code, library)


def test_a_patch_that_others_patched_again_is_left_in_place_and_not_applied_twice() -> None:
    class Library:
        def answer(self) -> int:
            return 1

    patches = Patches()

    def plus_one(original: Any) -> Any:
        return lambda self: original(self) + 1

    patches.replace(Library, "answer", plus_one)
    ours = Library.answer
    Library.answer = lambda self: ours(self) * 10  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="Library.answer was replaced once more"):
        patches.undo()
    patches.replace(Library, "answer", plus_one)
    assert Library().answer() == 20


def _python(code: str, library: str = "") -> None:
    """In a process that has imported torch, and `library`, and nothing else."""
    folder = Path(__file__).parents[1] / "support"
    subprocess.run([f"{warm.commands(library)}/python", "-c", code], check=True, timeout=700, cwd=folder)
