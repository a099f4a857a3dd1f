"""Configs of `fullshard train`, texts and tokens: everything that is checked before a rank is started."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fullshard as fs
import training_runs as runs
from fullshard import option_table, precision
from fullshard.errors import MissingExtra, OptionError
from fullshard.tools import cli
from fullshard.training import settings as _settings
from fullshard.training.command import train
from fullshard.training.example import EXAMPLE
from fullshard.training.folder import RunFolder
from fullshard.training.gpt import GPT, GPTConfig, Initialiser, initialise
from fullshard.training.optimizing import learning_rate
from fullshard.training.settings import Settings, Sharding, Training, load
from fullshard.training.texts import Fields, find_files
from fullshard.training.tokenizers import Bytes
from fullshard.training.tokens import IGNORED, Sequences, row_of, split


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs.write_texts(tmp_path / "texts")
    return tmp_path


def refusal(config: Path, overrides: list[str] | None = None, ranks: int = 2) -> str:
    """What `fullshard train` says instead of training."""
    with pytest.raises(OptionError) as caught:
        train(config, overrides or [], ranks, True)
    return f"{caught.value.what} {caught.value.remedy}"


# --- the file ------------------------------------------------------------------------------------------


def _uncommented(example: str) -> str:
    """The example with the keys that are commented out."""
    return re.sub(r"^( *)# ( *\w+:( |$))", r"\1\2", example, flags=re.MULTILINE)


def test_offload_is_a_word_or_a_budget_whose_folder_is_relative_to_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offload(given: Any, overrides: list[str] | None = None) -> Any:
        return load(runs.write_config(folder, sharding={"offload": given}), overrides or []).sharding.offload

    assert [offload(word) for word in (None, "host", "auto")] == [None, "host", "auto"]
    budget = offload({"device": "2KiB", "host": 5000, "disk": "homes", "kinds": ["master", "state"]})
    assert budget == fs.Offload(2048, 5000, folder / "homes", ("master", "state"))
    passed: list[list[str]] = []
    monkeypatch.setattr("fullshard.training.command.train", lambda *given: passed.append(given[1]) or 0)
    forms = "overlap=true,slabs=1GiB,one_backward=false"
    for text in ("optimizer", "none", "device=22GiB,host=90GB,disk=/scratch/a b", "host=4096", forms):
        assert cli.main(["train", str(folder / "config.yaml"), "--offload", text]) == 0
    assert [offload("host", overrides) for overrides in passed] == [
        "optimizer",
        None,
        fs.Offload("22GiB", "90GB", Path("/scratch/a b")),
        fs.Offload(host=4096),
        fs.Offload(overlap=True, slabs="1GiB"),
    ]
    json.dumps(load(folder / "config.yaml", passed[2]).as_dict())


def test_example_names_every_key_and_the_values_shown_are_the_defaults(tmp_path: Path) -> None:
    example = yaml.safe_load(_uncommented(EXAMPLE))
    given = {"model.path", "model.config", "model.weights", "data.validation", "data.prompt"}
    given |= {"data.completion", "data.tokenizer", "data.cache", "training.time_limit_s"}
    given |= {"model.gpt.context", "model.gpt.vocabulary", "training.micro_batch_size"}
    given |= {"training.warmup_steps"}

    def compare(kind: Any, here: dict[str, Any], key: str) -> None:
        hints = typing.get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        assert set(here) | {"batch_tokens"} == set(fields) | {"batch_tokens"}, key
        for name, field in fields.items():
            inner = next(
                (a for a in (hints[name], *typing.get_args(hints[name])) if dataclasses.is_dataclass(a)), None
            )
            dotted = f"{key}.{name}".lstrip(".")
            if inner is not None and here[name] is not None:
                compare(inner, here[name], dotted)
            elif name in here and field.default is not dataclasses.MISSING and dotted not in given:
                default = list(field.default) if isinstance(field.default, tuple) else field.default
                assert here[name] == (32 if dotted == "training.batch_size" else default), dotted

    compare(Settings, example, "")
    (tmp_path / "texts").mkdir()
    (tmp_path / "c.yaml").write_text(EXAMPLE)
    assert load(tmp_path / "c.yaml").model.gpt is not None


def test_choices_are_those_of_the_engine() -> None:
    hints = typing.get_type_hints(Sharding)
    assert typing.get_args(hints["strategy"]) == (*option_table.STRATEGIES, "auto")
    assert set(typing.get_args(hints["precision"])) == set(precision.PRESETS)


def test_paths_are_relative_to_the_file_and_those_of_set_to_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = runs.write_config(folder)
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(config).output == folder / "run"
    changed = load(config, ["output=other", "training.learning_rate=1e-3", "data.train=[x, ../y]"])
    assert changed.output == elsewhere / "other"
    assert changed.data.train == (elsewhere / "x", folder / "y")
    assert changed.training.learning_rate == 1e-3


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda c: c["training"].update(learning_rat=1), "unknown key 'training.learning_rat'"),
    (lambda c: c["training"].update(learning_rat=1), "Did you mean 'learning_rate'?"),
    (lambda c: c.update(modle={}), "Did you mean 'model'?"),
    (lambda c: c["training"].update(steps="many"), "'training.steps'"),
    (lambda c: c["training"].update(steps=1.5), "Give an integer"),
    (lambda c: c["training"].update(steps=True), "'training.steps'"),
    (lambda c: c["training"].update(steps=0), "'training.steps'"),
    (lambda c: c["training"].update(clip="nan"), "'training.clip'"),
    (lambda c: c["training"].update(betas=[0.9]), "'training.betas'"),
    (lambda c: c["training"].update(batch_tokens=64), "'training.batch_tokens'"),
    (lambda c: c["training"].update(schedule="cosin"), "Did you mean 'cosine'?"),
    (lambda c: c.update(sharding={"strategy": "zero4"}), "'sharding.strategy'"),
    (lambda c: c.update(sharding=[1]), "'sharding'"),
    (lambda c: c.update(sharding={"offload": "cpu"}), "Choose one of host, optimizer, auto"),
    (lambda c: c.update(sharding={"offload": True}), "'sharding.offload'"),
    (lambda c: c.update(sharding={"offload": {"nvme_path": "x"}}), "'sharding.offload.nvme_path'"),
    (lambda c: c.update(sharding={"offload": {"device": "much"}}), "Offload.device is 'much'"),
    (lambda c: c.update(sharding={"offload": {"disk": 3}}), "'sharding.offload.disk'"),
    (lambda c: c["data"].update(train=[]), "'data.train'"),
    (lambda c: c["data"].update(train=["texts/*.nothing"]), "no file matches"),
    (lambda c: c["data"].update(train="missing.txt"), "missing.txt"),
    (lambda c: c["data"].update(prompt="question"), "'data.completion'"),
    (lambda c: c["data"].update(validation_fraction=2), "'data.validation_fraction'"),
    (lambda c: c["data"].update(tokenizer="none"), "'data.tokenizer'"),
    (lambda c: c["data"].pop("train"), "'data.train' is missing"),
    (lambda c: c.pop("output"), "'output' is missing"),
    (lambda c: c.update(model={}), "names no model"),
    (lambda c: c["model"].update(path="x"), "'model.gpt' and 'model.path'"),
    (lambda c: c.update(model={"path": "missing"}), "'model.path': there is no"),
    (lambda c: c.update(model={"config": "missing.json"}), "'model.config'"),
    (lambda c: c["model"].update(weights="texts"), "'model.weights'"),
    (lambda c: c["model"]["gpt"].update(heads=3), "'model.gpt'"),
    (lambda c: c["model"]["gpt"].update(vocabulary=100), "257 tokens"),
    (lambda c: c["model"]["gpt"].update(context=8), "'training.sequence_length'"),
    (lambda c: c["model"]["gpt"].update(context=0), "context of a GPT is 0"),
    (lambda c: c.update(seed=1 << 64), "below 2**62"),
    (lambda c: c.update(device="cuda"), "'device' is cuda"),
]


@pytest.mark.parametrize(("change", "expected"), WRONG, ids=[expected for _, expected in WRONG])
def test_wrong_config_is_refused_by_key_and_nothing_is_written(
    folder: Path, change: Callable[[dict[str, Any]], Any], expected: str
) -> None:
    if expected == "'device' is cuda" and torch.cuda.device_count() >= 2:
        pytest.skip("there are GPUs here")
    config = runs.write_config(folder)
    values = yaml.safe_load(config.read_text())
    change(values)
    config.write_text(yaml.safe_dump(values))
    assert expected in refusal(config)
    assert not (folder / "run" / "run.json").exists()


def test_section_that_only_set_names_is_not_blamed_on_the_file(folder: Path) -> None:
    with pytest.raises(OptionError, match="unknown key 'traning' in --set"):
        load(runs.write_config(folder), ["traning.steps=3"])


def test_file_that_is_no_config_is_refused(folder: Path) -> None:
    config = folder / "c.yaml"
    assert "there is no config file" in refusal(config)
    for text, expected in (
        ("", "is empty"),
        ("- a", "holds a list"),
        ("a: [", "line 1 is not YAML"),
        ("seed: 2020-13-45", "month must be in 1..12"),
        ("seed: 1\noutput: x\nseed: 2", "line 3 gives 'seed' a second time"),
        ("training: {steps: 1, steps: 2}", "line 1 gives 'steps' a second time"),
    ):
        config.write_text(text)
        assert expected in refusal(config)
    good = runs.write_config(folder)
    assert "--set got 'steps'" in refusal(good, ["steps"])
    assert "unknown key 'training.stps' in --set" in refusal(good, ["training.stps=3"])
    assert "not a section" in refusal(good, ["output.x=3"])


def test_batch_of_fewer_sequences_than_ranks_is_refused(folder: Path) -> None:
    config = runs.write_config(folder)
    assert "8 sequences, less than one for each of 9 ranks" in refusal(config, ranks=9)


def test_folder_of_somebody_else_is_left_as_it_is(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "thesis.txt").write_text("all of it")
    assert "'output'" in refusal(runs.write_config(folder))
    assert [p.name for p in (folder / "run").iterdir()] == ["thesis.txt"]
    (folder / "file").write_text("x")
    assert "'output'" in refusal(runs.write_config(folder, output="file"))


def test_run_that_never_made_a_step_may_begin_anew_with_other_values(folder: Path) -> None:
    taken = RunFolder(folder / "run")
    taken.begin({"seed": 1}, {})
    taken.begin({"seed": 2}, {})
    assert taken.read("run.json") == {"fullshard": fs.__version__, "fixed": {"seed": 2}}
    taken.metrics.write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(OptionError, match="whose 'seed' is 2, and now it is 3"):
        taken.begin({"seed": 3}, {})


def test_second_run_in_the_same_folder_at_the_same_time_is_refused(folder: Path) -> None:
    from fullshard.training.folder import RunFolder

    first = RunFolder(folder / "run")
    handle = first.lock()
    try:
        assert "another process trains" in refusal(runs.write_config(folder))
    finally:
        import os

        os.close(handle)


def test_data_without_text_or_too_short_is_refused(folder: Path) -> None:
    (folder / "empty.txt").write_text("")
    config = runs.write_config(folder, data={"train": ["empty.txt"]})
    assert "the files of 'data.train' hold no text" in refusal(config)
    (folder / "short.txt").write_text("too short")
    config = runs.write_config(folder, data={"train": ["short.txt"]})
    assert "hold 10 tokens, fewer than one sequence of 16" in refusal(config)
    config = runs.write_config(folder, data={"validation": ["short.txt"]})
    assert "the files of 'data.validation'" in refusal(config)
    assert "leaves nothing" in refusal(runs.write_config(folder, data={"validation_fraction": 1.0}))


def test_model_of_an_unknown_architecture_is_refused_by_its_file(folder: Path) -> None:
    for text, expected in (
        ('{"model_type": "no_such_model"}', "unknown architecture: model_type is 'no_such_model'"),
        ("{}", "model_type is None"),
        ("{", "cannot be read as JSON"),
        ('{"model_type": "vit"}', "does not know as a causal language model"),
    ):
        (folder / "config.json").write_text(text)
        message = refusal(runs.write_config(folder, model={"config": "config.json"}))
        assert expected in message
        assert str(folder / "config.json") in message


def test_missing_tensorboard_is_an_error_that_names_the_extra_and_can_be_switched_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from fullshard.training.preparing import prepare

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    config = runs.write_config(folder, logging={"tensorboard": True})
    with pytest.raises(MissingExtra, match=r"\[train\]"):
        train(config, [], 2, True)
    assert prepare(load(config, ["logging.tensorboard=false"])).train.num_tokens > 0


# --- texts and tokens ----------------------------------------------------------------------------------

PLAIN = Fields("text", None, None)


def test_tokens_are_kept_by_content_and_made_once(folder: Path) -> None:
    files = sorted((folder / "texts").iterdir())
    first = row_of(files, PLAIN, Bytes(), folder / "cache")
    made = (first.folder / "tokens.bin").stat().st_mtime_ns
    moved = [file.rename(folder / f"moved-{file.name}") for file in files]
    assert row_of(moved, PLAIN, Bytes(), folder / "cache") == first
    assert (first.folder / "tokens.bin").stat().st_mtime_ns == made
    moved[0].write_text(moved[0].read_text().replace("the", "thy"))
    assert row_of(moved, PLAIN, Bytes(), folder / "cache").key != first.key
    tokens, learned = first.open()
    assert learned is None
    assert first.num_documents == 2
    assert tokens.tolist().count(256) == 2


def test_files_of_the_run_itself_are_no_texts(folder: Path) -> None:
    output = folder / "run"
    (output / "model").mkdir(parents=True)
    (output / "metrics.jsonl").write_text('{"step": 1}\n')
    (output / "model" / "merges.txt").write_text("a b\n")
    texts = sorted((folder / "texts").iterdir())
    assert find_files([folder], "data.train", output) == texts
    assert find_files([folder / "**" / "*.txt"], "data.train", output) == texts
    named = output / "model" / "merges.txt"
    assert find_files([named], "data.train", output) == [named]


def test_text_that_is_to_be_learned_and_to_validate_with_is_refused(folder: Path) -> None:
    config = runs.write_config(folder, data={"validation": ["texts/b.txt"]})
    message = refusal(config)
    assert str(folder / "texts" / "b.txt") in message
    assert "'data.train' and 'data.validation'" in message


def test_ids_with_gaps_are_below_the_size_of_their_tokenizer(folder: Path) -> None:
    from fullshard.training.tokenizers import HuggingFace

    runs.write_tokenizer(folder / "words", sorted((folder / "texts").iterdir()))
    file = folder / "words" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["rank"] = 70000
    file.write_text(json.dumps(tokenizer))
    tokenizer = HuggingFace(folder / "words", "data.tokenizer")
    assert tokenizer.size == 70001
    tokens, _ = row_of([folder / "texts" / "a.txt"], PLAIN, tokenizer, folder / "cache").open()
    assert tokens.max() == 70000


def test_training_and_validation_sequences_are_apart_and_together_all(folder: Path) -> None:
    row = row_of(sorted((folder / "texts").iterdir()), PLAIN, Bytes(), folder / "cache")
    tokens, _ = row.open()
    train_part, held_out = split(row, 16, 0.1)
    assert held_out is not None
    count = (row.num_tokens - 1) // 16
    assert len(train_part) + len(held_out) == count
    assert len(held_out) == count // 10
    seen = np.concatenate([p.batch(range(len(p)))[0].numpy() for p in (train_part, held_out)])
    assert sorted(map(tuple, seen)) == sorted(map(tuple, np.asarray(tokens)[: count * 16].reshape(count, 16)))
    inputs, targets = train_part.batch([3])
    assert inputs[0, 1:].tolist() == targets[0, :-1].tolist()


def test_prompts_are_no_targets(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"q": "ab", "a": "cde"}\n\n{"q": "f", "a": "g"}\n')
    row = row_of([file], Fields("text", "q", "a"), Bytes(), tmp_path / "cache")
    sequences = Sequences(row, 7, np.arange(1))
    inputs, targets = sequences.batch([0])
    assert bytes(inputs[0, :5].tolist()) == b"abcde"
    assert targets[0].tolist() == [IGNORED, *b"cde", 256, IGNORED, ord("g")]
    assert sequences.count_targets([0]) == 5


def test_field_of_a_jsonl_file_is_its_text(tmp_path: Path) -> None:
    file = tmp_path / "bodies.jsonl"
    file.write_text('{"body": "ab", "id": 1}\n{"body": "\\u00e9"}\n')
    row = row_of([file], Fields("body", None, None), Bytes(), tmp_path / "cache")
    assert row.open()[0].tolist() == [*b"ab", 256, *"\u00e9".encode(), 256]
    assert (row.num_documents, row.masked) == (2, False)


def test_line_that_is_no_json_or_has_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    for line, expected in (
        ("{nothing", "line 2 is not JSON"),
        (json.dumps({"body": "x"}), "line 2 has no text in the field 'text'; it has fields 'body'"),
        (json.dumps([1]), "it has a list"),
        (json.dumps({"text": 3}), "line 2: the field 'text' holds a number, and no text"),
        (json.dumps({"text": None}), "line 2: the field 'text' holds null"),
    ):
        file.write_text(json.dumps({"text": "fine"}) + "\n" + line + "\n")
        with pytest.raises(OptionError, match=expected):
            row_of([file], PLAIN, Bytes(), tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name != ".lock"], "half-made tokens were left"


def test_text_that_is_not_utf8_is_fine_as_bytes_and_an_error_for_a_tokenizer(folder: Path) -> None:
    from fullshard.training.tokenizers import HuggingFace

    runs.write_tokenizer(folder / "words", sorted((folder / "texts").iterdir()))
    tokenizer = HuggingFace(folder / "words", "data.tokenizer")
    assert HuggingFace(folder / "words" / "tokenizer.json", "data.tokenizer").size == tokenizer.size
    file = folder / "latin.txt"
    file.write_bytes("the mod\xe8le\n".encode("latin-1"))
    assert row_of([file], PLAIN, Bytes(), folder / "cache").num_tokens == 12
    with pytest.raises(OptionError, match=r"latin\.txt' is not UTF-8"):
        row_of([file], PLAIN, tokenizer, folder / "cache")
    (folder / "nothing").mkdir()
    with pytest.raises(OptionError, match="holds no tokenizer"):
        HuggingFace(folder / "nothing", "data.tokenizer")


def test_long_plain_file_is_the_same_text_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fullshard.training import texts

    monkeypatch.setattr(texts, "PIECE_BYTES", 10)
    content = b"one\ntwo words\n" + b"x" * 35 + b"\nlast"
    (tmp_path / "long.txt").write_bytes(content)
    found = list(texts.pieces(tmp_path / "long.txt", PLAIN))
    assert b"".join(piece.text for piece in found) == content
    assert len(found) > 2
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]


# --- the model and the learning rate -------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "positions"), [("rms", "rotary"), ("layer", "learned")])
def test_gpt_built_unit_by_unit_is_the_gpt_built_whole_and_looks_only_back(norm: str, positions: str) -> None:
    shape = GPTConfig(num_layers=2, num_heads=2, width=8, context=12, norm=norm, positions=positions)
    whole = GPT(shape)
    initialise(whole, seed=5)
    with torch.device("meta"):
        pieces = GPT(shape)
    fill = Initialiser(pieces, seed=5)
    pieces.to_empty(device="cpu")
    pieces.head.weight = pieces.token.weight
    fill._names = {id(p): name for name, p in pieces.named_parameters()}
    for module in reversed(list(pieces.modules())):
        fill(module)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, pieces.get_parameter(name)), name
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 6] = 99
    before, after = whole(tokens).logits, whole(changed).logits
    assert torch.equal(before[0, :6], after[0, :6])
    assert not torch.equal(before[0, 6:], after[0, 6:])
    swapped = tokens[:, [1, 0, *range(2, 10)]]
    assert not torch.allclose(whole(swapped).logits[0, 9], before[0, 9], atol=1e-7), "positions do not matter"


def test_learning_rate_rises_in_a_line_and_falls_by_its_schedule() -> None:
    training = Training(
        steps=12, warmup_steps=2, learning_rate=1.0, final_learning_rate=0.5, schedule="linear"
    )
    rates = [learning_rate(step, training) for step in range(13)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.75)
    assert rates[12] == 0.5
    constant = dataclasses.replace(training, schedule="constant")
    assert learning_rate(11, constant) == 1.0
    assert "training.steps" in _settings.fixed_values(_with(training))
    assert "training.steps" not in _settings.fixed_values(_with(constant))


def _with(training: Training) -> Settings:
    data = _settings.Data(train=(Path("x"),))
    return Settings(output=Path("run"), model=_settings.Model(), data=data, training=training)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_warm_up_longer_than_the_run_is_refused_with_the_fix(tmp_path: Path, schedule: str) -> None:
    path = runs.write_config(tmp_path, training={"steps": 10, "warmup_steps": 11, "schedule": schedule})
    with pytest.raises(OptionError, match=r"warmup_steps' .* is 11, the run has 10 steps.* at most 10"):
        load(path)
    assert load(path, ["training.warmup_steps=10"]).training.warmup == 10
    with pytest.raises(OptionError, match="the run has 7 steps"):
        load(path, ["training.warmup_steps=10", "training.steps=7"])


def test_the_default_warm_up_fits_into_a_short_run() -> None:
    assert [Training(steps=steps).warmup for steps in (1, 9, 50, 99, 100, 1000)] == [0, 0, 5, 9, 100, 100]
    rates = [learning_rate(step, Training(steps=50)) for step in range(50)]
    assert max(rates) == Training().learning_rate
