"""Models of transformers' that `fullshard train` builds unit by unit, and those that it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fullshard as fs
import ranks
import training_runs as runs

GPT2 = {"n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": 96, "n_positions": 32}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 96, "state_size": 4}
GRIFFIN = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "vocab_size": 96,
    "lru_width": 64,
}


@pytest.mark.parametrize(
    ("kind", "block", "sizes"),
    [
        ("gpt2", "GPT2Block", GPT2),  # attention scales down the projection inside it
        ("mamba", "MambaBlock", MAMBA),  # a mixer sets a bias inside it
        ("recurrent_gemma", "RecurrentGemmaDecoderLayer", GRIFFIN),  # and has a table of angles beside
    ],
)
def test_model_built_unit_by_unit_begins_as_wide_as_one_that_its_library_builds(
    kind: str, block: str, sizes: dict[str, Any]
) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    build = transformers.AutoModelForCausalLM.from_config
    expected = build(config, dtype=torch.float32)
    with torch.device("meta"):
        model = build(config, dtype=torch.float32)
    is_unit = [type(m) for m in model.modules() if type(m).__name__ == block]
    fs.shard(model, units=is_unit[:1])
    assert len(fs.plan(model).units) == len(is_unit) + 1, "one unit would not show what lies in several"
    with fs.full(model):
        found = {name: p.detach() for name, p in model.named_parameters()}
        for name, value in expected.named_parameters():
            if value.numel() >= 256 or name.endswith("dt_proj.bias"):
                spread = value.detach().std().item()
                assert found[name].std().item() == pytest.approx(spread, rel=0.2, abs=1e-6), name
        for name, value in expected.named_buffers():
            assert torch.equal(dict(model.named_buffers())[name], value), name


class _Tied(torch.nn.Module):
    """Its head shows the table, of which row 0 stands for padding; its middle knows its weight already."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(64, 16, padding_idx=0)
        self.middle = torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 64, bias=False)
        self.head.weight = self.table.weight


def test_tied_or_known_weight_on_meta_is_not_initialised_again_by_another_module() -> None:
    with torch.device("meta"):
        model = _Tied()
    known = torch.full((16, 16), 3.0)
    model.middle.weight = torch.nn.Parameter(known.clone())
    fs.shard(model)
    with fs.full(model):
        assert model.head.weight is model.table.weight
        assert not model.table.weight[0].any()
        assert model.table.weight.std().item() == pytest.approx(1.0, rel=0.2)  # a Linear's would be 0.14
        assert torch.equal(model.middle.weight, known)


class _Mask(torch.nn.Module):
    """A mask that its `__init__` alone computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4).tril().bool(), persistent=False)
        self.weight = torch.nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)


def test_mask_of_truth_values_that_nothing_initialises_is_an_error() -> None:
    with torch.device("meta"):
        model = _Mask()
    with pytest.raises(fs.errors.ModelError, match="initialises 'mask'"):
        fs.shard(model)


def test_model_without_a_longest_sequence_takes_one_of_any_length(tmp_path: Path) -> None:
    from fullshard.training import models, settings

    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 257}
    (tmp_path / "net.json").write_text(json.dumps({"model_type": "xlnet", **sizes}))
    runs.write_texts(tmp_path / "texts", num_words=60)
    loaded = settings.load(runs.write_config(tmp_path, model={"config": "net.json"}))
    assert models.build(loaded, 257).context is None, "XLNet says -1"


@pytest.fixture(scope="module")
def first_gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first GPT, whose linear layers get values from their `__init__` alone, on two ranks; and of so
    little text that its validation share is no sequence."""
    folder = tmp_path_factory.mktemp("first-gpt")
    runs.write_texts(folder / "texts", num_words=60)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 257, "n_positions": 16}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    (folder / "gpt.json").write_text(json.dumps({"model_type": "openai-gpt", **sizes, **quiet}))
    data = {"train": ["texts"], "validation_fraction": 0.04}
    config = runs.write_config(folder, model={"config": "gpt.json"}, data=data)
    assert ranks.run(
        runs.train, 2, str(config), ["training.steps=1", "training.warmup_steps=0"], timeout_s=120
    ) == [0, 0]
    return folder


def test_model_that_its_init_alone_gives_values_is_built_on_the_host_and_the_run_says_so(
    first_gpt: Path,
) -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    tokens = [t for file in sorted((first_gpt / "texts").iterdir()) for t in [*file.read_bytes(), 256]]
    count = (len(tokens) - 1) // runs.LENGTH
    cut = torch.tensor([tokens[i * runs.LENGTH : (i + 1) * runs.LENGTH + 1] for i in range(count)])
    batch = cut[fs.Batches(count, runs.BATCH, seed=0, rank=0, ranks=1).indices(0)]
    torch.manual_seed(0)
    logits = OpenAIGPTLMHeadModel(OpenAIGPTConfig.from_json_file(str(first_gpt / "gpt.json")))(
        batch[:, :-1]
    ).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert runs.losses(first_gpt / "run") == pytest.approx([loss.item()], rel=2e-5)
    notes = json.loads((first_gpt / "run" / "summary.json").read_text())["notes"]
    assert any("cannot be built unit by unit" in note for note in notes), notes
    assert "cannot be built unit by unit" in (first_gpt / "run" / "report.html").read_text()


def test_texts_too_short_for_their_validation_share_are_said_in_the_report(first_gpt: Path) -> None:
    assert not runs.losses(first_gpt / "run", "validation")
    notes = json.loads((first_gpt / "run" / "summary.json").read_text())["notes"]
    assert any(note.startswith("No validation loss: 0.04 of ") for note in notes), notes
    assert "No validation loss" in (first_gpt / "run" / "report.html").read_text()
