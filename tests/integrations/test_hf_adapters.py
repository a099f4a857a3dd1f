"""peft adapters and trl's SFTTrainer on our engine: only the adapter trains, and only it is saved."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_runs
import ranks

ZERO3 = {"fsdp": "full_shard auto_wrap"}
SAVING = {"save_strategy": "steps", "save_steps": 2, "batch": 4}
IDS = torch.arange(3, 11)[None]


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def _adapted(folder: str, options: dict[str, Any], resume: Any = None) -> dict[str, Any]:
    from peft import PeftModel, get_peft_model
    from safetensors import safe_open

    from fullshard.errors import FullshardError

    hf_runs.forget()
    made = hf_runs.trainer(folder, copy.deepcopy(options), get_peft_model(hf_runs.causal_lm(), _lora()))
    made.train(resume_from_checkpoint=resume)
    made.save_model(f"{folder}/final")
    with torch.no_grad():
        logits = made.model.eval()(input_ids=IDS).logits
    found = {"steps": hf_runs.steps(made), "logits": logits}
    if "fsdp" not in options:
        return found | {"counts": made.model.get_nb_trainable_parameters()}
    made.accelerator.wait_for_everyone()
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(hf_runs.causal_lm(), f"{folder}/final").eval()
        found["loaded"] = torch.equal(loaded(input_ids=IDS).logits, logits)
        with safe_open(f"{folder}/checkpoint-4/pytorch_model_fsdp_0/model.safetensors", "pt") as file:
            found["names"] = list(file.keys())
    found["files"] = sorted(os.listdir(f"{folder}/checkpoint-4"))
    found["counts"] = made.model.get_nb_trainable_parameters()
    made.model.save_pretrained(f"{folder}/without", is_main_process=made.accelerator.is_main_process)
    made.accelerator.wait_for_everyone()
    with safe_open(f"{folder}/without/adapter_model.safetensors", "pt") as file:
        found["names without"] = list(file.keys())
    try:
        made.model.merge_and_unload()
    except FullshardError as error:
        found["merging"] = f"{type(error).__name__}: {error}"
    try:
        made.model.add_adapter("second", _lora())  # each rank would train it for itself
    except FullshardError as error:
        found["adding"] = f"{type(error).__name__}: {error}"
    state = made.accelerator.get_state_dict(made.model)
    base = {
        name.removeprefix("base_model.model."): value for name, value in state.items() if "lora" not in name
    }
    for name, value in hf_runs.causal_lm().state_dict().items() if base else ():
        assert torch.equal(base.get(name, base.get(name.replace(".weight", ".base_layer.weight"))), value), (
            name
        )
    made.accelerator.wait_for_everyone()
    return found


def test_adapter_trains_as_in_one_process_and_is_saved_without_its_base(tmp_path: Path) -> None:
    (plain,) = ranks.run(_adapted, 1, str(tmp_path / "one"), SAVING, timeout_s=240)
    for name, config in {"2": {}, "1": {"version": 1}}.items():
        options, folder = ZERO3 | {"fsdp_config": config} | SAVING, tmp_path / name
        for found in ranks.run(_adapted, 2, str(folder), options, timeout_s=240):
            hf_runs.compare(found["steps"], plain["steps"])
            assert found["loaded"]
            assert torch.allclose(found["logits"], plain["logits"], atol=1e-5)
            assert {"adapter_config.json", "adapter_model.safetensors"} <= set(found["files"])
            assert not any(file.startswith("model") for file in found["files"])
            assert len(found["names"]) == 8
            assert all("lora_" in name for name in found["names"])
            assert len(found["names without"]) == 8
            assert found["counts"] == plain["counts"]
            assert found["merging"].startswith("NotSupported")
            assert found["adding"].startswith("NotSupported: rank")
    resumed = ranks.run(_adapted, 2, str(folder), options, str(folder / "checkpoint-2"), timeout_s=240)
    assert resumed[0]["steps"] == found["steps"]
    assert torch.equal(resumed[0]["logits"], found["logits"])


def _prompted(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    from peft import PromptTuningConfig, get_peft_model
    from safetensors.torch import load_file

    hf_runs.forget()
    model = hf_runs.causal_lm()
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    made = hf_runs.trainer(folder, copy.deepcopy(options), get_peft_model(model, adapter))
    made.train()
    made.save_model(f"{folder}/final")
    made.accelerator.wait_for_everyone()
    files = [
        f"{folder}/{name}/adapter_model.safetensors" for name in ("checkpoint-2", "checkpoint-4", "final")
    ]
    return {"steps": hf_runs.steps(made), "prompts": [load_file(f)["prompt_embeddings"] for f in files]}


def test_prompt_that_one_rank_computes_while_it_saves_is_the_one_of_one_process(tmp_path: Path) -> None:
    (plain,) = ranks.run(_prompted, 1, str(tmp_path / "one"), SAVING, timeout_s=240)
    for found in ranks.run(_prompted, 2, str(tmp_path / "two"), ZERO3 | SAVING, timeout_s=240):
        hf_runs.compare(found["steps"], plain["steps"])
        for mine, theirs in zip(found["prompts"], plain["prompts"], strict=True):
            assert mine.shape == (3, 16)
            assert torch.allclose(mine, theirs, atol=1e-5)
        assert torch.equal(found["prompts"][1], found["prompts"][2])


def _against_its_base(fsdp: bool, checkpointing: bool) -> list[tuple[float, float]]:
    """As trl's preference losses do: the adapter is off for a pass between a forward and its backward."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from peft import get_peft_model

    hf_runs.forget()
    count = int(os.environ["WORLD_SIZE"])
    if not fsdp:
        hf_runs.alone()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = get_peft_model(hf_runs.causal_lm(), _lora())
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-1, eps=1e-4)
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in hf_runs.samples()]
    loader = torch.utils.data.DataLoader(rows, batch_size=4 // count)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    found = []
    for batch in loader:
        loss = model(**batch).loss
        with torch.no_grad(), model.disable_adapter():
            base = model(**batch).loss
        loss = loss - base
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(accelerator.reduce(loss.detach(), "mean")), float(norm)))
    return found


def test_adapter_that_is_off_between_a_forward_and_its_backward_trains_as_in_one_process() -> None:
    (plain,) = ranks.run(_against_its_base, 1, False, False, timeout_s=240)
    assert all(norm > 1e-2 for _, norm in plain), "nothing trains, so nothing is compared"
    for checkpointing in (False, True):
        for found in ranks.run(_against_its_base, 2, True, checkpointing, timeout_s=240):
            hf_runs.compare(found, plain, 1e-4)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", *(f"w{n}" for n in range(hf_runs.VOCABULARY - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def _fine_tuned(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PrinterCallback
    from trl import SFTConfig, SFTTrainer

    hf_runs.forget()
    count = int(os.environ["WORLD_SIZE"])
    if count == 1:
        hf_runs.alone()
    with_lora = options.pop("lora", False)
    plain = hf_runs.arguments(folder, count, **options)
    keys = (
        "output_dir",
        "per_device_train_batch_size",
        "max_steps",
        "logging_steps",
        "learning_rate",
        "use_cpu",
    )
    keys += ("adam_epsilon", "save_strategy", "report_to", "disable_tqdm")
    hf_runs.forget()
    config = SFTConfig(**{key: getattr(plain, key) for key in keys}, max_length=16, **options)
    texts = [
        " ".join(f"w{int(i) % 40}" for i in row["input_ids"][: 3 + n % 6])
        for n, row in enumerate(hf_runs.samples())
    ]
    made = SFTTrainer(
        model=hf_runs.causal_lm(),
        args=config,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=_tokenizer(),
        peft_config=_lora() if with_lora else None,
    )
    made.remove_callback(PrinterCallback)
    made.train()
    made.save_model(f"{folder}/final")
    made.accelerator.wait_for_everyone()
    found: dict[str, Any] = {"steps": hf_runs.steps(made), "files": sorted(os.listdir(f"{folder}/final"))}
    found["sharded"] = "_fullshard" in made.model.__dict__
    with torch.no_grad():
        logits = made.model.eval()(input_ids=IDS).logits
        if not with_lora:
            loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/final").eval()
            found["loaded"] = torch.allclose(loaded(input_ids=IDS).logits, logits, atol=2e-2)
    return found


WIDE = {"bf16": False}  # trl computes in bf16, and recomputes activations, unless told otherwise


@pytest.mark.parametrize(
    "options",
    [
        WIDE | {"lora": True, "gradient_accumulation_steps": 2},
        pytest.param(WIDE, marks=pytest.mark.long),
        pytest.param({}, marks=pytest.mark.long),
    ],
    ids=["adapter", "whole", "bf16"],
)
def test_sft_trainer_takes_the_steps_of_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    (plain,) = ranks.run(_fine_tuned, 1, str(tmp_path / "one"), dict(options), timeout_s=240)
    for found in ranks.run(_fine_tuned, 2, str(tmp_path / "two"), ZERO3 | options, timeout_s=240):
        assert found["sharded"]
        hf_runs.compare(found["steps"], plain["steps"], 2e-5 if options else 5e-3)
        assert found.get("loaded", True)
        assert ("adapter_model.safetensors" in found["files"]) == ("lora" in options)


def _aligned(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """trl's trainers that hold a second model (DPO) and that generate as they train (GRPO)."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PrinterCallback
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    count = int(os.environ["WORLD_SIZE"])
    if count == 1:
        hf_runs.alone()
    tiny = f"{folder}/tiny{os.environ.get('RANK', '0')}"
    hf_runs.causal_lm().save_pretrained(tiny)  # trl makes the second model from where the first one lay
    words = [[f"w{(7 * n + 3 * i) % 40}" for i in range(6)] for n in range(8)]
    rows = [
        {"prompt": " ".join(w[:3]), "chosen": " ".join(w[3:]), "rejected": " ".join(w[:2])} for w in words
    ]

    def distinct(completions: list[str], **_: Any) -> list[float]:
        return [sum(float(w[1:]) for w in c.split() if w[1:].isdigit()) / 40 for c in completions]

    found = {}
    kinds = {"dpo": (DPOTrainer, DPOConfig, {}, {}), "grpo": (GRPOTrainer, GRPOConfig, {}, {})}
    kinds["dpo"][2].update(max_length=16)
    kinds["grpo"][2].update(num_generations=2, max_completion_length=5, beta=0.1)
    kinds["grpo"][3].update(reward_funcs=distinct)
    for kind, (trainer, config, more, arguments) in kinds.items():
        hf_runs.forget()
        plain = {"output_dir": folder, "per_device_train_batch_size": 4 // count, "max_steps": 2}
        plain |= {"logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True, "adam_epsilon": 1e-4}
        plain |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "bf16": False}
        made = trainer(
            model=AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32),
            args=config(**plain, **more, **options),
            train_dataset=Dataset.from_list(
                rows if kind == "dpo" else [{"prompt": r["prompt"]} for r in rows]
            ),
            processing_class=_tokenizer(),
            **arguments,
        )
        made.remove_callback(PrinterCallback)
        made.train()
        assert ("_fullshard" in made.model.__dict__) == ("fsdp" in options)
        found[kind] = hf_runs.steps(made)
    return found


@pytest.mark.long
def test_dpo_and_grpo_trainers_take_the_steps_of_unsharded_ranks(tmp_path: Path) -> None:
    """What GRPO samples depends on the rank, so it is held against DDP."""
    plain = ranks.run(_aligned, 2, str(tmp_path / "plain"), {}, timeout_s=240)
    for mine, theirs in zip(
        ranks.run(_aligned, 2, str(tmp_path / "ours"), ZERO3, timeout_s=240), plain, strict=True
    ):
        for kind in ("dpo", "grpo"):
            hf_runs.compare(mine[kind], theirs[kind])
