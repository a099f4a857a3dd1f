"""One run of Hugging Face's own loops, on however many ranks call it: what the tests of this door compare.

A run asks for FSDP or does not; everything else is the same. With one process and twice the batch, Trainer's
samplers give the same global batches in the same order.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from typing import Any

import torch

VOCABULARY = 48
LENGTH = 10


def quiet() -> None:
    """Progress bars and deprecation notes of the libraries say nothing about us."""
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|accelerate|transformers")


def forget() -> None:
    """accelerate keeps its state for the whole process; a rank that stays warm runs many scripts."""
    from accelerate.state import AcceleratorState, GradientState

    import fullshard.hugging_face
    from fullshard.hugging_face import shard_options

    fullshard.hugging_face.turn_on()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    shard_options._given.clear()
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    quiet()


def alone() -> None:
    """A plain `python script.py`: with a launcher's variables, accelerate would make one rank a DDP."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def causal_lm(tied: bool = True, seed: int = 0, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    return LlamaForCausalLM(config)


def samples(count: int = 24, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Rows with different numbers of labels: a mean over ranks of their means would be another loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: index % 7] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def arguments(folder: Any, ranks: int, **options: Any) -> Any:
    """TrainingArguments for a global batch of 4, or `batch`."""
    from transformers import TrainingArguments

    batch = options.pop("batch", 4)
    base: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch // ranks,
        "per_device_eval_batch_size": batch // ranks,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # see reference.adamw
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
    }
    return TrainingArguments(**{**base, **options})


def trainer(folder: Any, options: dict[str, Any], model: Any = None, **more: Any) -> Any:
    """A Trainer on this rank. Call `forget` before the model is made, if it may read accelerate's state."""
    from transformers import PrinterCallback, Trainer

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 and "fsdp" not in options:
        alone()
    model = causal_lm() if model is None else model
    data = {"train_dataset": samples(), "eval_dataset": samples(8, seed=4)}
    made = Trainer(model=model, args=arguments(folder, ranks, **options), **{**data, **more})
    made.remove_callback(PrinterCallback)
    return made


def steps(made: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    return [(row["loss"], row["grad_norm"]) for row in made.state.log_history if "loss" in row]


def runs(folder: str, configurations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several short trainings, one after the other: their steps, and what the engine says of itself."""
    found = []
    for options in configurations:
        forget()
        made = trainer(folder, copy.deepcopy(options))  # TrainingArguments writes into its fsdp_config
        made.train()
        runtime = made.model.__dict__.get("_fullshard")
        row: dict[str, Any] = {"steps": steps(made), "flos": made.state.total_flos}
        row["type"] = made.accelerator.distributed_type.value
        if "eval_strategy" in options:
            row["eval"] = [r["eval_loss"] for r in made.state.log_history if "eval_loss" in r]
        if runtime is not None:
            row["strategy"] = runtime.options.strategy
            row["syncs"] = runtime.comm.step
            row["units"] = len(runtime.units)
            row["class"] = type(made.model).__name__
            row["homes"] = {lane.home.kind for lane in runtime.lanes}
            row["keep"] = runtime.options.keep_full
            row["compute"] = str(runtime.options.precision.compute)
            row["scaled"] = made.accelerator.scaler is not None
            with torch.no_grad():
                row["output"] = str(made.model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.dtype)
            row["checkpointing"] = runtime.options.checkpoint_activations
        found.append(row)
    return found


def compare(
    ours: list[tuple[float, float]], plain: list[tuple[float, float]], tolerance: float = 2e-5
) -> None:
    assert len(ours) == len(plain) > 0
    for step, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        for what, a, b in zip(("loss", "gradient norm"), mine, theirs, strict=True):
            assert abs(a - b) <= tolerance * max(1.0, abs(b)), f"{what} of step {step}: {a} and {b}"
