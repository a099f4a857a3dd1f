"""Checkpoints of Trainer on our engine: resumed exactly, on other ranks too, loaded by from_pretrained."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import hf_runs
import ranks

FULL = {"fsdp": "full_shard auto_wrap"}
SHARDED = FULL | {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "batch": 6}


def _train(folder: str, options: dict[str, Any], resume: Any = None, **more: Any) -> dict[str, Any]:
    """One training, perhaps resumed; logits of what it ends with, and of what from_pretrained makes of it."""
    from transformers import AutoModelForCausalLM

    hf_runs.forget()
    model = hf_runs.causal_lm(attention_dropout=0.1)  # random numbers must go on too
    made = hf_runs.trainer(folder, copy.deepcopy(options), model, **more)
    made.train(resume_from_checkpoint=resume)
    made.save_model(f"{folder}/final")
    made.accelerator.wait_for_everyone()
    ids = hf_runs.samples(2, seed=9)[1]["input_ids"][None]
    with torch.no_grad():
        made.model.eval()
        logits = made.model(input_ids=ids).logits
        loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/final").eval()
        difference = float((loaded(input_ids=ids).logits - logits).abs().max())
    made.accelerator.wait_for_everyone()
    return {
        "steps": hf_runs.steps(made),
        "logits": logits,
        "difference": difference,
        "best": made.state.best_model_checkpoint,
        "evaluation": made.evaluate()["eval_loss"],
    }


@pytest.mark.parametrize(
    "options", [pytest.param(FULL, marks=pytest.mark.long), SHARDED], ids=["full", "sharded"]
)
def test_resumed_training_goes_on_with_the_very_same_numbers(tmp_path: Path, options: dict[str, Any]) -> None:
    uninterrupted = ranks.run(_train, 2, str(tmp_path), options | SAVING, timeout_s=240)[0]
    assert uninterrupted["difference"] == 0.0
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        assert (folder / "pytorch_model_fsdp_0" / "fullshard.json").is_file()
        assert {"config.json", "model.safetensors", "trainer_state.json"} <= set(os.listdir(folder))
    again = ranks.run(
        _train, 2, str(tmp_path), options | SAVING, str(tmp_path / "checkpoint-2"), timeout_s=240
    )[0]
    assert again["steps"] == uninterrupted["steps"]
    assert torch.equal(again["logits"], uninterrupted["logits"])


def _logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    ids = hf_runs.samples(2, seed=9)[1]["input_ids"][None]
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=ids).logits
    return logits


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.long)])
def test_another_number_of_ranks_goes_on_from_a_checkpoint(tmp_path: Path, count: int) -> None:
    uninterrupted = ranks.run(_without_dropout, 2, str(tmp_path), SHARDED | SAVING, timeout_s=240)[0]
    checkpoint = str(tmp_path / "checkpoint-4")
    ours = ranks.run(
        _without_dropout, count, str(tmp_path / "on"), SHARDED | SAVING, checkpoint, timeout_s=240
    )[0]
    hf_runs.compare(ours["steps"], uninterrupted["steps"])
    assert torch.allclose(ours["logits"], uninterrupted["logits"], atol=1e-5)


def _without_dropout(folder: str, options: dict[str, Any], resume: Any = None) -> dict[str, Any]:
    hf_runs.forget()
    made = hf_runs.trainer(folder, copy.deepcopy(options))
    made.train(resume_from_checkpoint=resume)
    with torch.no_grad():
        logits = made.model.eval()(input_ids=hf_runs.samples(2, seed=9)[1]["input_ids"][None]).logits
    return {"steps": hf_runs.steps(made), "logits": logits}


def _as_scripts_do(folder: str, options: dict[str, Any], resume: Any, launched: bool) -> dict[str, Any]:
    """Without `use_cpu`, which scripts for GPUs do not give; launched, or plain `python`."""
    if not launched:
        hf_runs.alone()
    try:
        row = _without_dropout(folder, options | {"use_cpu": False}, resume)
    except Exception as error:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # a rank that has ended already would break others' connecting
        return {"error": f"{type(error).__name__}: {error}"}
    return row


def test_a_checkpoint_resumes_on_one_rank_and_from_one_rank_on_two(tmp_path: Path) -> None:
    """Compared with an uninterrupted run of one process that is not sharded."""
    unsharded = ranks.run(_without_dropout, 1, str(tmp_path / "plain"), SAVING, timeout_s=240)[0]
    ranks.run(_as_scripts_do, 2, str(tmp_path / "two"), SHARDED | SAVING, None, True, timeout_s=240)
    of_two = str(tmp_path / "two" / "checkpoint-2")
    for launched in (True, False):
        one = tmp_path / f"one-{launched}"
        found = ranks.run(_as_scripts_do, 1, str(one), FULL | SAVING, of_two, launched, timeout_s=240)[0]
        hf_runs.compare(found["steps"], unsharded["steps"])
        assert torch.allclose(found["logits"], unsharded["logits"], atol=1e-5)
        assert (one / "checkpoint-4" / "pytorch_model_fsdp_0" / "fullshard.json").is_file()
    of_one = str(tmp_path / "one-False" / "checkpoint-4")
    for row in ranks.run(_as_scripts_do, 2, str(tmp_path), FULL | SAVING, of_one, True, timeout_s=240):
        hf_runs.compare(row["steps"], unsharded["steps"])
        assert torch.allclose(row["logits"], unsharded["logits"], atol=1e-5)
    refused = ranks.run(_as_scripts_do, 1, str(tmp_path), SAVING, of_two, False, timeout_s=240)[0]
    assert "CheckpointError" in refused["error"]
    assert "Resume with --fsdp" in refused["error"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="ranks with devices are data-parallel")
def test_ranks_that_would_all_train_the_same_copy_are_refused(tmp_path: Path) -> None:
    rows = ranks.run(_as_scripts_do, 2, str(tmp_path / "out"), SAVING, None, True, timeout_s=240)
    for rank, row in enumerate(rows):
        assert row["error"].startswith(
            f"OptionError: rank {rank}: 2 ranks were started, FSDP is not requested"
        )
        assert "--fsdp" in row["error"]
    assert not (tmp_path / "out" / "checkpoint-2").exists()


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the first one is the best, and not the one in memory at the end
    "save_total_limit": 1,
}


@pytest.mark.parametrize("options", [FULL, SHARDED], ids=["full", "sharded"])
def test_best_model_is_loaded_at_the_end_and_old_checkpoints_go(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    found = ranks.run(_train, 2, str(tmp_path), options | SAVING | BEST, timeout_s=240)
    assert all(row["best"] == str(tmp_path / "checkpoint-2") for row in found)
    assert all(torch.equal(row["logits"], _logits(tmp_path / "checkpoint-2")) for row in found)
    assert all(row["difference"] == 0.0 for row in found)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]


def _saved_as_in_a_loop(folder: str) -> dict[str, Any]:
    """The last lines of a loop with accelerate, which give save_pretrained no state dict."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    import fullshard as fs

    hf_runs.forget()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = accelerator.unwrap_model(accelerator.prepare(hf_runs.causal_lm()))
    main = accelerator.is_main_process
    model.save_pretrained(f"{folder}/all", is_main_process=main, save_function=accelerator.save)
    model.save_pretrained(save_directory=f"{folder}/named", is_main_process=main)
    model.save_pretrained(f"{folder}/placed", main)
    model.model.save_pretrained(f"{folder}/inner", is_main_process=main)
    with fs.full(model, writeback=False):
        model.save_pretrained(f"{folder}/full")
    try:
        model.save_pretrained(f"{folder}/alone")
    except fs.FullshardError as error:
        return {"error": f"{type(error).__name__}: {error}", "written": os.path.exists(f"{folder}/alone")}
    return {"error": "none"}


def test_save_pretrained_writes_the_whole_model_if_all_ranks_call_it_and_nothing_otherwise(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    for found in ranks.run(_saved_as_in_a_loop, 2, str(tmp_path), timeout_s=120):
        assert found["error"].startswith("StateError")
        assert "is_main_process=accelerator.is_main_process" in found["error"]
        assert not found["written"]
    ids = hf_runs.samples(2, seed=9)[1]["input_ids"][None]
    with torch.no_grad():
        expected = hf_runs.causal_lm().eval()(input_ids=ids).logits
    for folder in ("all", "named", "placed", "full"):
        assert torch.equal(_logits(tmp_path / folder), expected), folder
    inner = load_file(tmp_path / "inner" / "model.safetensors")
    torch.testing.assert_close(inner, dict(hf_runs.causal_lm().model.state_dict()), rtol=0, atol=0)


def _last_checkpoint(folder: str) -> Any:
    hf_runs.forget()
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(folder)


def test_interrupted_save_is_not_taken_for_the_last_checkpoint(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        (tmp_path / f"checkpoint-{step}" / "pytorch_model_fsdp_0").mkdir(parents=True)
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    assert ranks.run(_last_checkpoint, 1, str(tmp_path)) == [str(tmp_path / "checkpoint-10")]
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_st')
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
    assert ranks.run(_last_checkpoint, 1, str(tmp_path)) == [str(tmp_path / "checkpoint-2")]
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    assert ranks.run(_last_checkpoint, 1, str(tmp_path)) == [None]
    other = tmp_path / "other"  # of somebody else: names alone count, as ever
    (other / "checkpoint-7").mkdir(parents=True)
    assert ranks.run(_last_checkpoint, 1, str(other)) == [str(other / "checkpoint-7")]


def _foreign(folder: str) -> dict[str, Any]:
    """The folders that torch's own FSDP leaves: the model can be had from them, the optimizer cannot."""
    import torch.distributed.checkpoint as dcp
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    hf_runs.forget()
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer  # after they were replaced

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    plain = hf_runs.causal_lm(tied=False, seed=3)
    if accelerator.is_main_process:
        torch.save(plain.state_dict(), f"{folder}/pytorch_model_fsdp.bin")
        (Path(folder) / "sharded" / "optimizer_0").mkdir(parents=True)
        plain.save_pretrained(f"{folder}/plain")
    dcp.save({"model": plain.state_dict()}, checkpoint_id=f"{folder}/sharded/pytorch_model_fsdp_0")
    model = hf_runs.causal_lm(tied=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plugin = accelerator.state.fsdp_plugin
    with torch.no_grad():
        expected = plain(input_ids=torch.ones(1, 3, dtype=torch.long)).logits
        found: dict[str, Any] = {}
        for kind in ("", "sharded", "plain"):
            for parameter in model.parameters():
                parameter.zero_()
            load_fsdp_model(plugin, accelerator, model, os.path.join(folder, kind))
            found[kind] = torch.equal(model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits, expected)
    for name, call in {
        "optimizer": lambda: load_fsdp_optimizer(plugin, accelerator, optimizer, model, f"{folder}/sharded"),
        "nothing": lambda: load_fsdp_model(plugin, accelerator, model, f"{folder}/sharded/optimizer_0"),
    }.items():
        try:
            call()
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_model_of_torchs_own_fsdp_is_loaded_and_its_optimizer_refused_by_name(tmp_path: Path) -> None:
    for found in ranks.run(_foreign, 2, str(tmp_path), timeout_s=120):
        assert found[""]
        assert found["sharded"]
        assert found["plain"]
        assert found["optimizer"].startswith("NotSupported")
        assert found["nothing"].startswith("CheckpointError")


def _without_frozen(folder: str) -> dict[str, Any]:
    import warnings

    from safetensors import safe_open

    import fullshard as fs

    model = hf_runs.causal_lm(tied=False)
    model.model.requires_grad_(False)
    fs.shard(model)
    fs.save(folder, model, frozen=False)
    with safe_open(f"{folder}/model.safetensors", "pt") as file:
        found: dict[str, Any] = {"names": list(file.keys()), "files": os.listdir(folder)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    try:
        fs.load(folder, model)
    except fs.FullshardError as error:
        found["strict"] = f"{type(error).__name__}: {error}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank says it aloud
        found["options"] = list(fs.load(folder, model, strict=False).notes)
    with fs.full(model, writeback=False):
        found["head"] = torch.equal(model.lm_head.weight, hf_runs.causal_lm(tied=False).lm_head.weight)
        found["rest"] = bool((model.model.norm.weight == 3.0).all())
    return found


def test_save_without_frozen_parameters_holds_what_trains_and_passes_for_no_model(tmp_path: Path) -> None:
    for found in ranks.run(_without_frozen, 2, str(tmp_path / "saved"), timeout_s=120):
        assert found["names"] == ["lm_head.weight"]
        assert "config.json" not in found["files"]
        assert found["strict"].startswith("CheckpointError")
        assert "left as they were" in found["options"][0]
        assert found["head"]
        assert found["rest"]


def _two_trainers_of_one_model(folder: str) -> dict[str, float]:
    """The first saves the model alone; the second trains it on, and saves everything to the same folder."""
    hf_runs.forget()
    model, other = hf_runs.causal_lm(), hf_runs.causal_lm(seed=1)
    saving = SHARDED | {"max_steps": 1}
    first = hf_runs.trainer(folder, copy.deepcopy(saving), model)
    first.train()
    first.save_model(f"{folder}/last", _internal_call=True)
    beside = hf_runs.trainer(f"{folder}/beside", copy.deepcopy(saving | {"save_strategy": "epoch"}), other)
    beside.train()
    second = hf_runs.trainer(folder, copy.deepcopy(saving), model)
    second.train()
    second.accelerator.save_state(f"{folder}/last")
    difference = {}
    for name, made in (("last", second), ("beside/checkpoint-1", beside)):
        state = made.accelerator.get_state_dict(made.model)
        if state:
            saved = safetensors.torch.load_file(f"{folder}/{name}/pytorch_model_fsdp_0/model.safetensors")
            difference[name] = max(float((saved[key] - state[key]).abs().max()) for key in saved)
    return difference


def test_trainers_in_one_process_do_not_take_each_others_saves_for_their_own(tmp_path: Path) -> None:
    assert ranks.run(_two_trainers_of_one_model, 2, str(tmp_path), timeout_s=240) == [
        {"last": 0.0, "beside/checkpoint-1": 0.0},
        {},
    ]
