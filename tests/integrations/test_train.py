"""`fullshard train` on two ranks against plain torch in one process, written out here."""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fullshard as fs
import ranks
import reference
import training_runs as runs
from fullshard.errors import GradientError, OptionError
from fullshard.training import command
from fullshard.training.gpt import GPT, GPTConfig, initialise
from fullshard.training.loop import Run
from training_runs import BATCH, LENGTH, STEPS

Loss = Callable[[nn.Module, Tensor], Tensor]


def windows(tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Every sequence and the token after it: those to train on, and every tenth, which is for validation."""
    count = (len(tokens) - 1) // LENGTH
    cut = torch.tensor([tokens[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(count)])
    held_out = torch.tensor([math.floor((i + 1) * 0.1) > math.floor(i * 0.1) for i in range(count)])
    return cut[~held_out], cut[held_out]


def byte_tokens(files: list[Path]) -> list[int]:
    return [token for file in files for token in [*file.read_bytes(), 256]]


def reference_losses(model: nn.Module, data: Tensor, loss_of: Loss) -> tuple[list[float], list[float]]:
    """The loop as anybody would write it, on whole batches: losses and gradient norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-4)

    def factor(step: int) -> float:
        if step < 2:
            return (step + 1) / 2
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    order = fs.Batches(len(data), BATCH, seed=0, rank=0, ranks=1)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(model, data[order.indices(step)])
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses, norms


def gpt_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch[:, :-1], batch[:, 1:]).loss  # type: ignore[no-any-return]


def own_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]


def assert_close(ours: list[float], theirs: list[float]) -> None:
    assert len(ours) == len(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5)


@pytest.fixture(scope="module")
def gpt_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the built-in GPT on two ranks."""
    folder = tmp_path_factory.mktemp("gpt")
    runs.write_texts(folder / "texts")
    config = runs.write_config(folder, logging={"tensorboard": True})
    assert ranks.run(runs.train, 2, str(config), [], timeout_s=120) == [0, 0]
    return folder


def test_gpt_on_two_ranks_has_the_losses_of_plain_torch_in_one_process(gpt_run: Path) -> None:
    data, held_out = windows(byte_tokens(sorted((gpt_run / "texts").iterdir())))
    model = GPT(GPTConfig(num_layers=2, num_heads=2, width=16, context=LENGTH))
    initialise(model, seed=0)
    losses, norms = reference_losses(model, data, gpt_loss)
    assert_close(runs.losses(gpt_run / "run"), losses)
    assert_close([line["gradient_norm"] for line in runs.metrics(gpt_run / "run")], norms)
    chosen = held_out[[i * len(held_out) // 7 for i in range(7)]]
    last = runs.metrics(gpt_run / "run", "validation")[-1]
    assert (last["step"], last["sequences"]) == (STEPS, 7)
    assert_close([last["loss"]], [float(gpt_loss(model, chosen).detach())])
    assert losses[-1] < losses[0] - 0.5, "nothing was learned"


def _trained_weights(folder: str) -> tuple[dict[str, Tensor], list[float]]:
    model = fs.shard(GPT(GPTConfig.read(folder)))
    fs.load(folder, model)
    with fs.full(model, writeback=False):
        return reference.whole_parameters(model), [float(model.token.weight.sum())]


def test_trained_gpt_is_loaded_from_its_folder(gpt_run: Path) -> None:
    data, _ = windows(byte_tokens(sorted((gpt_run / "texts").iterdir())))
    model = GPT(GPTConfig(num_layers=2, num_heads=2, width=16, context=LENGTH))
    initialise(model, seed=0)
    reference_losses(model, data, gpt_loss)
    weights, _ = ranks.run(_trained_weights, 1, str(gpt_run / "run" / "model"))[0]
    assert weights.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (1, ["training.micro_batch_size=2", "sharding.strategy=auto"]),
        (2, ["sharding.strategy=replicate", "sharding.checkpoint_activations=true", "logging.every=4"]),
        (
            3,  # of eight sequences: one of them has nothing to compute in its last pass
            [
                "sharding.strategy=zero2",
                "sharding.checkpoint_activations=offload",
                "training.micro_batch_size=1",
                "sharding.offload=optimizer",
            ],
        ),
    ],
)
def test_losses_do_not_depend_on_ranks_strategy_or_micro_batches(
    gpt_run: Path, num_ranks: int, changes: list[str]
) -> None:
    name = f"run-{num_ranks}"
    changes = [*changes, f"output={gpt_run / name}", "logging.tensorboard=false"]
    ranks.run(runs.train, num_ranks, str(gpt_run / "config.yaml"), changes, timeout_s=120)
    assert_close(runs.losses(gpt_run / name), runs.losses(gpt_run / "run"))
    assert_close(runs.losses(gpt_run / name, "validation"), runs.losses(gpt_run / "run", "validation"))


def test_run_that_is_done_is_not_done_again(gpt_run: Path) -> None:
    before = (gpt_run / "run" / "metrics.jsonl").read_bytes()
    model = (gpt_run / "run" / "model" / "model.safetensors").stat().st_mtime_ns
    ranks.run(runs.train, 1, str(gpt_run / "config.yaml"), [], timeout_s=120)
    summary = json.loads((gpt_run / "run" / "summary.json").read_text())
    assert (summary["ranks"], len(summary["held"])) == (2, 2), (
        "one rank that did nothing is none of the run's"
    )
    assert (gpt_run / "run" / "metrics.jsonl").read_bytes() == before
    assert (gpt_run / "run" / "model" / "model.safetensors").stat().st_mtime_ns == model


def test_tensorboard_has_the_losses_of_the_metrics(gpt_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(gpt_run / "run" / "tensorboard"))
    events.Reload()
    shown = [(e.step, e.value) for e in events.Scalars("loss/train")]
    assert [step for step, _ in shown] == list(range(1, STEPS + 1))
    assert_close([value for _, value in shown], runs.losses(gpt_run / "run"))
    assert [e.step for e in events.Scalars("loss/validation")] == [0, 3, 6]


# --- going on ------------------------------------------------------------------------------------------


def _stopped_after(config: str, overrides: list[str], step: int) -> int:
    """A run that gets SIGTERM after a step."""
    import os
    import signal

    from fullshard.training.loop import Run

    inner = Run._step

    def then_signal(self: Any, at: int) -> None:
        inner(self, at)
        if at + 1 == step and self.rank == 1:  # one rank is told, and all stop
            os.kill(os.getpid(), signal.SIGTERM)

    Run._step = then_signal  # type: ignore[method-assign]
    try:
        return runs.train(config, overrides)
    finally:
        Run._step = inner  # type: ignore[method-assign]


def test_stopped_run_goes_on_with_identical_losses_and_with_rounding_on_other_ranks(gpt_run: Path) -> None:
    uninterrupted = runs.losses(gpt_run / "run")
    folder = gpt_run / "homes"
    budget = f"sharding.offload={{host: 80KiB, disk: {folder}}}"
    for name, ranks_after, exact, offload in (
        ("stopped-2", 2, True, [budget]), ("stopped-1", 1, False, ["sharding.offload=host"]),
    ):  # fmt: skip
        changes = [f"output={gpt_run / name}", "logging.tensorboard=false", "checkpoints.every=100"]
        config = str(gpt_run / "config.yaml")
        codes = ranks.run(_stopped_after, 2, config, changes, 3, timeout_s=120)
        assert codes == [143, 143]
        summary = json.loads((gpt_run / name / "summary.json").read_text())
        assert summary["status"].startswith(f"stopped by SIGTERM after step 3 of {STEPS}")
        assert len(runs.losses(gpt_run / name)) == 3
        assert (gpt_run / name / "report.html").is_file()
        assert not (gpt_run / name / "model").exists()
        ranks.run(runs.train, ranks_after, config, [*changes, *offload], timeout_s=120)
        again = runs.losses(gpt_run / name)
        assert [line["step"] for line in runs.metrics(gpt_run / name)] == list(range(1, STEPS + 1))
        assert again == uninterrupted if exact else again[:3] == uninterrupted[:3]
        assert_close(again, uninterrupted)
        notes = json.loads((gpt_run / name / "summary.json").read_text())["notes"]
        assert any("saved on 2 ranks" in note for note in notes) == (not exact), "dropout would be other"


def test_damaged_checkpoint_is_passed_over_and_named_by_a_run_that_resumes(gpt_run: Path) -> None:
    hurt = gpt_run / "hurt"
    shutil.copytree(gpt_run / "run", hurt)
    damaged = sorted((hurt / "checkpoints").iterdir())
    assert len(damaged) > 1
    _damage(damaged[-1])
    ranks.run(runs.train, 2, str(gpt_run / "config.yaml"), [f"output={hurt}"], timeout_s=120)
    notes = json.loads((hurt / "summary.json").read_text())["notes"]
    assert any(str(damaged[-1]) in note and "passed over" in note for note in notes), notes
    assert_close(runs.losses(hurt), runs.losses(gpt_run / "run"))


def test_run_without_a_checkpoint_that_is_right_does_not_begin_from_scratch(gpt_run: Path) -> None:
    hurt = gpt_run / "hurt-all"
    shutil.copytree(gpt_run / "run", hurt)
    for folder in (hurt / "checkpoints").iterdir():
        _damage(folder)
    error, _ = ranks.run(_refused, 2, str(gpt_run / "config.yaml"), [f"output={hurt}"], timeout_s=120)
    assert "their checksum differs" in error
    assert "move them elsewhere" in error


def _damage(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-9] ^= 255
    file.write_bytes(data)


def test_dropped_out_values_go_on_where_they_were(gpt_run: Path) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 8,
        "vocab_size": 257,
        "n_positions": 32,
    }
    (gpt_run / "gpt2.json").write_text(json.dumps(config | {"resid_pdrop": 0.3, "attn_pdrop": 0.3}))
    found = []
    for name in ("dropout", "dropout-stopped"):
        changes = [f"output={gpt_run / name}", "logging.tensorboard=false", "checkpoints.every=100"]
        changes += ["model.gpt=null", f"model.config={gpt_run / 'gpt2.json'}"]
        config = str(gpt_run / "config.yaml")
        if found:
            ranks.run(_stopped_after, 2, config, changes, 2, timeout_s=120)
        ranks.run(runs.train, 2, config, changes, timeout_s=120)
        found.append(runs.losses(gpt_run / name))
    assert len(found[0]) == STEPS
    assert found[0] == found[1]


def _refused(config: str, overrides: list[str]) -> str:
    from fullshard.errors import FullshardError

    try:
        return f"exit code {runs.train(config, overrides)}"
    except FullshardError as error:
        return f"{type(error).__name__}: {error.what}. {error.remedy}"


def test_run_that_goes_on_with_more_steps_leaves_the_model_of_its_last_step(gpt_run: Path) -> None:
    config, run = str(gpt_run / "config.yaml"), gpt_run / "longer"
    changes = [f"output={run}", "training.schedule=constant", "logging.tensorboard=false"]
    for steps in (2, 4):
        ranks.run(runs.train, 2, config, [*changes, f"training.steps={steps}"], timeout_s=120)
        model, checkpoint = (
            load_file(run / name / "model.safetensors") for name in ("model", f"checkpoints/step-{steps:06}")
        )
        assert model.keys() == checkpoint.keys()
        assert all(torch.equal(model[name], checkpoint[name]) for name in model)


def test_validation_without_a_target_has_no_loss_and_the_run_says_why(gpt_run: Path) -> None:
    pairs = [{"question": "what " * 40, "answer": "this"}]
    for name in ("asked.jsonl", "held-out.jsonl"):
        (gpt_run / name).write_text("\n".join(json.dumps(pair) for pair in pairs))
    changes = [
        f"output={gpt_run / 'asked'}",
        f"data.train={gpt_run / 'asked.jsonl'}",
        "training.steps=1",
        "training.warmup_steps=0",
    ]
    changes += [f"data.validation={gpt_run / 'held-out.jsonl'}", "evaluation.sequences=1"]
    changes += ["data.prompt=question", "data.completion=answer"]
    ranks.run(runs.train, 2, str(gpt_run / "config.yaml"), changes, timeout_s=120)
    assert len(runs.losses(gpt_run / "asked")) == 1
    assert runs.losses(gpt_run / "asked", "validation") == []
    [note] = json.loads((gpt_run / "asked" / "summary.json").read_text())["notes"]
    assert note.startswith("No validation loss: the sequences for it are prompts")


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _train_overflowing(config: str, overrides: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**60))
        runs.train(config, overrides)


def test_metrics_are_json_where_a_norm_is_infinite(gpt_run: Path) -> None:
    changes = [f"output={gpt_run / 'half'}", "sharding.precision=fp16", "training.steps=2"]
    ranks.run(_train_overflowing, 2, str(gpt_run / "config.yaml"), changes, timeout_s=120)
    text = (gpt_run / "half" / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=_no_number) for line in text.splitlines()]
    assert [line["gradient_norm"] for line in lines if line["kind"] == "train"] == [None, None]


def test_gradients_that_are_not_finite_end_a_run_before_they_are_saved() -> None:
    run = object.__new__(Run)
    run.saved, run._scaler = None, torch.amp.GradScaler("cpu", enabled=False)
    run._refuse_not_finite({"step": 3, "loss": 1.0, "gradient_norm": 2.0})
    with pytest.raises(GradientError, match="the gradient norm of step 3 is not finite"):
        run._refuse_not_finite({"step": 3, "loss": 1.0, "gradient_norm": None})
    with pytest.raises(GradientError, match="the loss of step 3 is nan"):
        run._refuse_not_finite({"step": 3, "loss": math.nan, "gradient_norm": 2.0})
    run._scaler = torch.amp.GradScaler("cpu", enabled=True)  # which leaves such a step out
    run._refuse_not_finite({"step": 3, "loss": 1.0, "gradient_norm": None})


def test_run_cannot_go_on_with_what_would_make_it_another_run(gpt_run: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (gpt_run / "run").rglob("*") if p.is_file()}
    wrong = {
        "training.learning_rate": ["training.learning_rate=0.02"],
        "training.steps": ["training.steps=7"],
        "training.batch_size": ["training.batch_size=4"],
        "seed": ["seed=1"],
        "model.gpt": ["model.gpt.width=32"],
        "data.train": [f"data.train={gpt_run / 'texts' / 'a.txt'}"],
        "sharding.precision": ["sharding.precision=bf16"],
    }
    for key, changes in wrong.items():
        with pytest.raises(OptionError, match=re.escape(f"whose {key!r} is")):
            command.train(gpt_run / "config.yaml", changes, 2, True)  # before a rank is started
    known = {p: t for p, t in before.items() if "tokens" not in p.parts}
    assert {p: p.stat().st_mtime_ns for p in known} == known


# --- Hugging Face --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama directory, fine-tuned on two ranks."""
    folder = tmp_path_factory.mktemp("llama")
    files = runs.write_texts(folder / "texts", num_words=2400)
    runs.write_llama(folder / "llama", files)
    config = runs.write_config(folder, model={"path": "llama"})
    assert ranks.run(runs.train, 2, str(config), [], timeout_s=120) == [0, 0]
    return folder


def _word_tokens(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder / "llama"))
    texts = [file.read_text() for file in sorted((folder / "texts").iterdir())]
    return [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]


def test_llama_folder_is_fine_tuned_with_the_losses_of_transformers_in_one_process(llama_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data, _ = windows(_word_tokens(llama_run))
    model = AutoModelForCausalLM.from_pretrained(str(llama_run / "llama"))
    losses, norms = reference_losses(model, data, own_loss)
    assert_close(runs.losses(llama_run / "run"), losses)
    assert_close([line["gradient_norm"] for line in runs.metrics(llama_run / "run")], norms)

    trained = AutoModelForCausalLM.from_pretrained(str(llama_run / "run" / "model"))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), parameter, rtol=1e-3, atol=1e-5)
    newest = fs.latest(llama_run / "run" / "checkpoints")
    assert newest is not None
    AutoModelForCausalLM.from_pretrained(str(newest))
    tokenizer = AutoTokenizer.from_pretrained(str(llama_run / "run" / "model"))
    assert tokenizer.decode(tokenizer("the small model")["input_ids"]) == "the small model"


def test_prompts_are_given_and_only_completions_are_learned(llama_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(llama_run / "llama"))
    pairs = [("the model " * (1 + i % 5), "writes and reads " * (1 + i % 3)) for i in range(200)]
    lines = [json.dumps({"question": q, "answer": a}) for q, a in pairs]
    (llama_run / "pairs.jsonl").write_text("\n".join(lines))
    changes = [f"output={llama_run / 'pairs'}", f"data.train={llama_run / 'pairs.jsonl'}"]
    changes += ["data.prompt=question", "data.completion=answer", "training.micro_batch_size=2"]
    ranks.run(runs.train, 2, str(llama_run / "config.yaml"), changes, timeout_s=120)

    def parts() -> Iterator[tuple[int, bool]]:
        for question, answer in pairs:
            yield from ((t, False) for t in tokenizer(question)["input_ids"])
            yield from ((t, True) for t in [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id])

    row = list(parts())
    tokens, _ = windows([t for t, _ in row])
    labels, _ = windows([t if learned else -100 for t, learned in row])
    model = AutoModelForCausalLM.from_pretrained(str(llama_run / "llama"))
    both = torch.stack([tokens, labels], dim=1)
    losses, _ = reference_losses(model, both, lambda m, b: m(input_ids=b[:, 0], labels=b[:, 1]).loss)
    assert_close(runs.losses(llama_run / "pairs"), losses)


def test_config_json_alone_is_trained_from_scratch_the_same_on_one_and_two_ranks(llama_run: Path) -> None:
    config = llama_run / "llama" / "config.json"
    found = []
    for num_ranks in (1, 2):
        output = llama_run / f"scratch-{num_ranks}"
        changes = [f"output={output}", f"data.tokenizer={llama_run / 'llama'}", "model.path=null"]
        changes += [f"model.config={config}", "checkpoints.model_dtype=bf16", "training.steps=3"]
        ranks.run(runs.train, num_ranks, str(llama_run / "config.yaml"), changes, timeout_s=120)
        found.append(runs.losses(output))
    assert_close(found[0], found[1])
    assert found[0][0] != runs.losses(llama_run / "run")[0], "these are the weights of the folder"
    config = json.loads((llama_run / "scratch-2" / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_weights_of_another_model_are_refused_by_name_and_by_one_rank(llama_run: Path, gpt_run: Path) -> None:
    changes = [f"output={gpt_run / 'other'}", f"model.weights={llama_run / 'run' / 'model'}"]
    error, other = ranks.run(_refused, 2, str(gpt_run / "config.yaml"), changes, timeout_s=120)
    assert error.startswith("CheckpointError"), error
    assert "blocks.0" in error or "token.weight" in error, error
    assert other == "exit code 2", "one rank speaks for all"


def test_weights_of_an_earlier_run_are_what_another_begins_with(gpt_run: Path) -> None:
    changes = [f"output={gpt_run / 'further'}", f"model.weights={gpt_run / 'run' / 'model'}"]
    changes += ["logging.tensorboard=false", "training.steps=1", "training.warmup_steps=0"]
    ranks.run(runs.train, 2, str(gpt_run / "config.yaml"), changes, timeout_s=120)
    begun = runs.losses(gpt_run / "further", "validation")[0]
    assert_close([begun], [runs.losses(gpt_run / "run", "validation")[-1]])


def _gloo_threads_after(config: str) -> int:
    """More than before: of the groups that the run has made."""
    before = _gloo_threads()
    assert runs.train(config, []) == 0
    return _gloo_threads() - before


def _gloo_threads() -> int:
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")


def test_groups_of_a_model_have_ended_with_their_threads_when_a_run_ends(tmp_path: Path) -> None:
    """A thread that lets go of a tensor while Python ends aborts the process. The default group may last."""
    runs.write_texts(tmp_path / "texts")
    config = runs.write_config(tmp_path)
    for more in ranks.run(_gloo_threads_after, 2, str(config), timeout_s=120):
        assert more <= 2
