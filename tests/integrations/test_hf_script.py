"""A script as people have it, started by torchrun: one import line makes it ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import hf_runs
import ranks
import warm

TESTS = Path(__file__).parents[1] / "support"
SCRIPT = """
import json
import sys

import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

sys.path.insert(0, {tests!r})
from hf_runs import samples


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained({model!r})
    data = samples()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:5])
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        with open(arguments.output_dir + "/log.json", "w") as file:
            json.dump(trainer.state.log_history, file)


if __name__ == "__main__":
    main()
"""
OPTIONS = [
    *("--max_steps", "4", "--logging_steps", "1", "--learning_rate", "1e-2", "--adam_epsilon", "1e-4"),
    *("--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "2", "--report_to", "none"),
    *("--gradient_accumulation_steps", "2", "--load_best_model_at_end", "--disable_tqdm", "True"),
]


def _save_pretrained(folder: str) -> None:
    hf_runs.quiet()
    hf_runs.causal_lm().save_pretrained(folder)


def test_script_with_one_more_import_trains_under_torchrun_as_it_does_alone(tmp_path: Path) -> None:
    ranks.run(_save_pretrained, 1, str(tmp_path / "model"), timeout_s=120)
    plain, ours = tmp_path / "plain.py", tmp_path / "ours.py"
    text = SCRIPT.format(tests=str(TESTS), model=str(tmp_path / "model"))
    plain.write_text(text)
    ours.write_text("import fullshard.hugging_face\n" + text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    folder = warm.commands("transformers")
    torchrun = [f"{folder}/torchrun", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--log-dir", str(tmp_path / "logs")]
    sharding = ["--fsdp", "full_shard auto_wrap", "--per_device_train_batch_size", "1"]
    alone = ["--per_device_train_batch_size", "2", "--use_cpu"]
    commands = [
        # On ranks without a GPU neither --use_cpu nor anything else is needed.
        [*torchrun, str(ours), *OPTIONS, *sharding, "--output_dir", str(tmp_path / "two")],
        [f"{folder}/python", str(plain), *OPTIONS, *alone, "--output_dir", str(tmp_path / "one")],
    ]
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        for process in running:
            output, _ = process.communicate(timeout=700)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    mine, theirs = (json.loads((tmp_path / name / "log.json").read_text()) for name in ("two", "one"))
    steps = [[(row["loss"], row["grad_norm"]) for row in log if "loss" in row] for log in (mine, theirs)]
    hf_runs.compare(*steps)
    assert (tmp_path / "two" / "checkpoint-4" / "pytorch_model_fsdp_0" / "fullshard.json").is_file()
    assert (tmp_path / "two" / "model.safetensors").is_file()
