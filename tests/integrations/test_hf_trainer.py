"""Hugging Face Trainer on our engine: the steps of one process, whatever the FSDP settings say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hf_runs
import ranks

V1 = {"version": 1}
STRATEGIES: dict[str, dict[str, Any]] = {
    "zero3": {"fsdp": "full_shard auto_wrap"},
    "zero2": {"fsdp": "shard_grad_op auto_wrap"},
    "hybrid": {"fsdp": "hybrid_shard auto_wrap", "fsdp_config": V1},
    "replicate": {"fsdp": "no_shard", "fsdp_config": V1},
}


def both(tmp_path: Path, configurations: list[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """The same trainings on two ranks and in one process."""
    plain = [
        {k: v for k, v in options.items() if k not in ("fsdp", "fsdp_config")} for options in configurations
    ]
    (alone,) = ranks.run(hf_runs.runs, 1, str(tmp_path / "one"), plain, timeout_s=240)
    first, second = ranks.run(hf_runs.runs, 2, str(tmp_path / "two"), configurations, timeout_s=240)
    assert [row["steps"] for row in first] == [row["steps"] for row in second]
    return first, alone


def test_steps_equal_those_of_one_process_for_every_strategy(tmp_path: Path) -> None:
    common = {"eval_strategy": "steps", "eval_steps": 2}
    ours, plain = both(tmp_path, [options | common for options in STRATEGIES.values()])
    for strategy, mine, theirs in zip(STRATEGIES, ours, plain, strict=True):
        assert mine["strategy"] == strategy
        hf_runs.compare(mine["steps"], theirs["steps"])
        assert mine["eval"] == pytest.approx(theirs["eval"], rel=1e-5)
        assert mine["flos"] == theirs["flos"]
        assert mine["type"] == "FSDP"
        assert theirs["type"] == "NO"
        assert mine["class"] == "LlamaForCausalLM"


def test_accumulation_clipping_schedules_and_checkpointing_leave_the_numbers_alone(tmp_path: Path) -> None:
    accumulating = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.4, "lr_scheduler_type": "cosine"}
    accumulating |= {"warmup_steps": 2, "weight_decay": 0.1}
    recomputed = {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}
    ours, plain = both(
        tmp_path,
        [
            STRATEGIES["zero3"] | accumulating,
            STRATEGIES["zero2"] | accumulating,
            STRATEGIES["replicate"] | accumulating,
            recomputed | accumulating,
            STRATEGIES["zero3"] | {"gradient_checkpointing": True},
            STRATEGIES["zero3"] | accumulating | {"optim": "adafactor"},
            STRATEGIES["zero3"] | {"average_tokens_across_devices": False, "optim": "sgd"},
        ],
    )
    for mine, theirs in zip(ours[:6], plain, strict=False):
        hf_runs.compare(mine["steps"], theirs["steps"])
    # One exchange of gradients a step, where each micro-batch would have made it three.
    assert [row["syncs"] for row in ours] == [4] * 7
    assert [row["checkpointing"] for row in ours] == [False, False, False, True, False, False, False]
    # Without the average over devices the mean of each rank's mean is another loss, and Trainer's own.
    assert abs(ours[6]["steps"][0][0] - plain[6]["steps"][0][0]) > 1e-4


def test_low_precision_computes_narrow_and_stays_close_to_one_process(tmp_path: Path) -> None:
    zero3 = STRATEGIES["zero3"]
    ours, plain = both(tmp_path, [zero3 | {"bf16": True}, zero3 | {"fp16": True}, zero3])
    for mine, theirs in zip(ours, plain, strict=True):
        hf_runs.compare(mine["steps"], theirs["steps"], tolerance=0.03)
    assert [row["compute"] for row in ours] == ["torch.bfloat16", "torch.float16", "None"]
    assert ours[0]["steps"] != ours[2]["steps"]
    assert ours[1]["steps"] != ours[2]["steps"]
    assert [row["scaled"] for row in ours] == [False, True, False]
    assert [row["output"] for row in ours] == ["torch.float32"] * 3


def _replicated(folder: str) -> dict[str, Any]:
    from accelerate.utils import ParallelismConfig

    hf_runs.forget()
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    made = hf_runs.trainer(folder, {**STRATEGIES["zero3"], "parallelism_config": config})
    made.train()
    runtime = made.model.__dict__["_fullshard"]
    return {"steps": hf_runs.steps(made), "ranks": (runtime.options.strategy, runtime.comm.ranks)}


@pytest.mark.long
def test_replicas_of_shards_take_the_steps_of_one_process(tmp_path: Path) -> None:
    (plain,) = ranks.run(hf_runs.runs, 1, str(tmp_path / "one"), [{}], timeout_s=240)
    for found in ranks.run(_replicated, 4, str(tmp_path / "four"), timeout_s=240):
        assert found["ranks"] == ("hybrid", 2)
        hf_runs.compare(found["steps"], plain[0]["steps"])


def _uses(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Evaluation before training, on 7 samples; training on 22; prediction; generation with other lengths."""
    import torch

    hf_runs.forget()
    data = {"train_dataset": hf_runs.samples(22), "eval_dataset": hf_runs.samples(7, seed=4)}
    options = options | {"num_train_epochs": 1, "max_steps": -1}
    made = hf_runs.trainer(folder, copy.deepcopy(options), **data)
    found: dict[str, Any] = {"before": made.evaluate()["eval_loss"]}
    if (
        "fsdp" not in options
    ):  # Trainer does not make a DDP of a model that it has evaluated (transformers 5.22)
        hf_runs.forget()
        made = hf_runs.trainer(folder, options, **data)
    made.train()
    found["steps"] = hf_runs.steps(made)
    predicted = made.predict(hf_runs.samples(5, seed=6))
    found["predicted"] = predicted.predictions.tolist()
    found["metric"] = predicted.metrics["test_loss"]
    prompt = torch.arange(3, 6 + made.args.process_index)[None]
    plain = getattr(made.model, "module", made.model)
    made.model.eval()
    found["generated"] = plain.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4 + 3 * made.args.process_index,
        do_sample=False,
    ).tolist()
    return found


def test_uneven_evaluation_prediction_and_generation_end_on_all_ranks_with_ddps_numbers(
    tmp_path: Path,
) -> None:
    theirs = ranks.run(_uses, 2, str(tmp_path), {}, timeout_s=240)
    ours = ranks.run(_uses, 2, str(tmp_path), STRATEGIES["zero3"], timeout_s=240)
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine["before"] == pytest.approx(plain["before"], rel=1e-5)
        hf_runs.compare(mine["steps"], plain["steps"])
        assert np.allclose(mine["predicted"], plain["predicted"], atol=1e-4)
        assert mine["metric"] == pytest.approx(plain["metric"], rel=1e-5)
        assert mine["generated"] == plain["generated"]
    assert [len(row["generated"][0]) for row in ours] == [7, 11]


def _refused(folder: str) -> dict[str, str]:
    from fullshard.errors import FullshardError

    found = {}
    for what, options in {
        "adafactor": {"optim": "adafactor"},
        "offload and not": {"fsdp": "full_shard offload", "fsdp_config": {"cpu_offload": False}},
        "offload as a word": {"fsdp_config": {"cpu_offload": "false"}},
        "full evaluation": {"bf16_full_eval": True},
        "unread key": {"fsdp_config": {"transformer_layer_class_to_wrap": "LlamaDecoderLayer"}},
        "offload in other words": {"fsdp_config": {"fsdp_offload_params": True}},
        "two strategies": {"fsdp": "shard_grad_op", "fsdp_config": {"reshard_after_forward": True}},
        "another strategy": {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
        "two policies": {"fsdp_config": {"min_num_params": 7, "transformer_layer_cls_to_wrap": ["A"]}},
    }.items():
        hf_runs.forget()
        try:
            made = hf_runs.trainer(folder, {"fsdp": "full_shard", **options})
            made.evaluate() if what == "full evaluation" else made.train()
        except FullshardError as error:
            found[what] = f"{type(error).__name__}: {error}"
    hf_runs.forget()
    made = hf_runs.trainer(folder, {"fsdp": "full_shard", "fsdp_config": {"min_num_params": 7}})
    found["size"] = f"{made.accelerator.state.fsdp_plugin.min_num_params}"
    return found


def test_what_trainer_may_ask_for_and_cannot_have_is_refused_by_name(tmp_path: Path) -> None:
    for found in ranks.run(_refused, 2, str(tmp_path), timeout_s=240):
        assert "adafactor" not in found  # it trains: each tensor steps on its owner
        assert "fsdp is 'offload', and fsdp_config has cpu_offload=False" in found["offload and not"]
        assert "fsdp_config has cpu_offload='false'" in found["offload as a word"]
        assert found["full evaluation"].startswith("NotSupported")
        assert "bf16_full_eval" in found["full evaluation"]
        assert "'transformer_layer_class_to_wrap', which transformers does not read" in found["unread key"]
        assert "Give 'cpu_offload'" in found["offload in other words"]
        assert "fsdp is 'shard_grad_op', and fsdp_config has" in found["two strategies"]
        assert "'sharding_strategy', which transformers does not read" in found["another strategy"]
        assert "both 'min_num_params' and 'transformer_layer_cls_to_wrap'" in found["two policies"]
        assert found["size"] == "7"  # and not left out because no policy was named


def _files_of_older_versions(folder: str) -> list[Any]:
    hf_runs.forget()
    configurations: list[dict[str, Any]] = [
        {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False, "min_num_params": None},
        {"fsdp_sharding_strategy": 1, "fsdp_min_num_params": 0, "xla": False, "limit_all_gathers": True},
        {"reshard_after_forward": 1},
    ]
    return [
        hf_runs.arguments(folder, 2, fsdp="full_shard auto_wrap", fsdp_config=config).fsdp_plugin_args
        for config in configurations
    ]


def test_keys_that_say_again_what_holds_anyway_are_no_reason_to_refuse(tmp_path: Path) -> None:
    for found in ranks.run(_files_of_older_versions, 2, str(tmp_path), timeout_s=120):
        assert [row["reshard_after_forward"] for row in found] == [True, True, True]


def _smaller_batch(folder: str) -> dict[str, Any]:
    import torch
    from transformers import Trainer

    hf_runs.forget()
    made = hf_runs.trainer(folder, {"fsdp": "full_shard", "auto_find_batch_size": True, "batch": 8})
    tried = []

    def compute_loss(model: Any, inputs: Any, **more: Any) -> Any:
        tried.append(len(inputs["input_ids"]))
        loss = Trainer.compute_loss(made, model, inputs, **more)
        if len(inputs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    made.compute_loss = compute_loss
    made.train()
    return {"tried": tried, "steps": hf_runs.steps(made)}


def test_batch_size_is_found_after_running_out_of_memory(tmp_path: Path) -> None:
    (plain,) = ranks.run(hf_runs.runs, 1, str(tmp_path / "one"), [{}], timeout_s=240)
    for found in ranks.run(_smaller_batch, 2, str(tmp_path / "two"), timeout_s=240):
        assert (found["tried"][0], set(found["tried"][-4:])) == (4, {2})
        hf_runs.compare(found["steps"], plain[0]["steps"])
