"""`generate` of sharded Hugging Face models: each rank gets what the unsharded model gives in one process."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
from engines import my_rank, shard_blocks

VOCABULARY = 61
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_HEADS = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 32, **_TOKENS}
_LLAMA = {**_HEADS, "num_key_value_heads": 2, "intermediate_size": 56, "num_hidden_layers": 3}
_MIXTRAL = {**_LLAMA, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
_BERT = {**_HEADS, "num_hidden_layers": 2, "intermediate_size": 48, "is_decoder": True}
_T5 = {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**_TOKENS, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", _MIXTRAL),
    "bert": ("BertConfig", "BertLMHeadModel", _BERT),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**_T5, "decoder_start_token_id": 0}),
}
# Rank 0 has few tokens to make behind a long prompt, rank 1 many behind a short one. Passes that only keep
# ranks in step would take rank 0 to position 20 + 16, and there are 32.
PROMPT, NEW = (20, 4), (5, 16)
WAYS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3},
    {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
]


def _build(family: str, **changes: Any) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    config, model, options = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, config)(**(options | changes))).eval()


def _prompt() -> Tensor:
    rank = my_rank()
    return torch.randint(3, VOCABULARY, (2, PROMPT[rank]), generator=torch.Generator().manual_seed(rank))


def _generate(model: Any, rows: int = 2, **options: Any) -> Tensor:
    torch.manual_seed(5 + my_rank())
    found: Tensor = model.generate(_prompt()[:rows], **{"max_new_tokens": NEW[my_rank()], **options})
    return found


def _family(family: str) -> list[bool]:

    model = _build(family)
    plain = copy.deepcopy(model)
    shard_blocks(model)
    same = [torch.equal(_generate(model, **way), _generate(plain, **way)) for way in WAYS]
    # What rank 1 made last but six ends its sequence: it is done before its number of tokens is reached.
    made = _generate(plain, rows=1)
    end = {"eos_token_id": int(made[0, -6]) if my_rank() == 1 else None}
    want, found = _generate(plain, rows=1, **end), _generate(model, rows=1, **end)
    assert (want.shape[1] < made.shape[1]) == (my_rank() == 1)
    return [*same, torch.equal(want, found)]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_generates_what_one_process_does_whatever_its_prompt_length_and_end(family: str) -> None:
    assert ranks.run(_family, 2, family, timeout_s=120) == [[True] * 4] * 2


def _inside(memory: Any) -> list[bool]:
    """Inside fs.inference ranks also call generate different numbers of times."""
    import fullshard as fs

    same: list[bool] = []
    for family in ("llama", "t5"):
        model = _build(family)
        plain = copy.deepcopy(model)
        shard_blocks(model, strategy="zero2" if family == "t5" else "zero3")
        with fs.inference(model, memory=memory):
            same += [
                torch.equal(*(_generate(m, max_new_tokens=new) for m in (model, plain)))
                for new in (3, 6, 9)[: 1 + 2 * my_rank()]
            ]
    return same


@pytest.mark.parametrize("memory", ["all", 0, 40_000])
def test_ranks_may_call_generate_different_numbers_of_times_inside_inference(memory: Any) -> None:
    assert ranks.run(_inside, 2, memory, timeout_s=120) == [[True] * 2, [True] * 6]


def _gathered_units() -> list[list[str]]:
    import fullshard as fs

    model = _build("t5")
    shard_blocks(model)
    gather = model._fullshard.comm.shard_group.gather
    names: list[str] = []

    def count(full: Tensor, own: Tensor, tag: Any) -> Any:
        names.append(tag.unit)
        return gather(full, own, tag)

    model._fullshard.comm.shard_group.gather = count
    found = []
    for memory in ("all", 0):
        names.clear()
        with fs.inference(model, memory=memory):
            _generate(model, max_new_tokens=4)
        found.append(list(names))
    return found


def test_t5_gathers_its_encoder_once_and_not_with_every_token() -> None:
    for kept, gathered in ranks.run(_gathered_units, 2, timeout_s=120):
        assert sorted(set(kept)) == sorted(kept)  # each unit once in all, where everything stays full
        counts = {name: gathered.count(name) for name in gathered if name}
        assert {n for name, n in counts.items() if "encoder" in name.split(".")} == {1}
        assert {n for name, n in counts.items() if "decoder" in name.split(".")} == {4}


def _mark_and_option() -> list[Any]:
    """With what others set to have transformers keep ranks in step by a sum over the world."""
    import fullshard as fs

    model = _build("llama")
    plain = copy.deepcopy(model)
    fs.shard(model)
    model._is_fsdp_managed_module = True
    same = [
        torch.equal(_generate(model, **options), _generate(plain)) for options in ({}, {"synced_gpus": True})
    ]
    same.append(model._is_fsdp_managed_module)
    with fs.inference(model):
        if my_rank() == 0:
            same.append(torch.equal(_generate(model), _generate(plain)))
        same.append(not model._is_fsdp_managed_module)
    twin = copy.deepcopy(model)
    same.append(torch.equal(_generate(twin), _generate(plain)))
    plain_helper, helper = _build("gpt2"), fs.shard(_build("gpt2"))
    found = _generate(model, rows=1, assistant_model=helper)
    same.append(torch.equal(found, _generate(plain, rows=1, assistant_model=plain_helper)))
    with fs.full(model, writeback=False):
        if my_rank() == 1:  # parameters are whole here: nobody is needed
            same.append(torch.equal(_generate(model), _generate(plain)))
    return same


def test_generate_needs_no_word_of_the_rest_of_the_world() -> None:
    assert ranks.run(_mark_and_option, 2, timeout_s=120) == [[True] * 7] * 2


class _Around(nn.Module):
    """Somebody's module around a model that generates."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Any:
        return self.extra(self.inner(x, output_hidden_states=True).hidden_states[-1])


def _around(kind: str) -> list[bool]:
    import fullshard as fs

    model = _build("llama")
    plain = copy.deepcopy(model)
    if kind == "peft":
        import peft

        options = peft.LoraConfig(
            r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        torch.manual_seed(0)
        model, plain = peft.get_peft_model(model, options), None
        plain = copy.deepcopy(model)
        fs.shard(model)
        wholes = [model, plain]
    else:
        model = _Around(model)
        fs.shard(model)
        wholes = [model.inner, plain]
    same = []
    for memory in (None, 0):
        with fs.inference(model, memory=memory):
            same.append(torch.equal(*map(functools.partial(_generate, do_sample=True), wholes)))
    same.append(torch.equal(*map(_generate, wholes)))
    return same


@pytest.mark.parametrize("kind", ["peft", "module"])
def test_a_model_generates_inside_another_that_was_sharded(kind: str) -> None:
    assert ranks.run(_around, 2, kind, timeout_s=120) == [[True] * 3] * 2


def _bf16() -> list[float]:
    import fullshard as fs

    model = _build("llama")
    plain = copy.deepcopy(model).to(torch.bfloat16)
    fs.shard(model, precision="bf16")
    same = [float(torch.equal(_generate(model), _generate(plain)))]
    with fs.inference(model, memory="all") as kept:
        same.append(kept.num_bytes / sum(p.numel() * 2 for p in plain.parameters()))
    return same


def test_a_bf16_model_generates_from_full_values_in_bf16() -> None:
    for same, size in ranks.run(_bf16, 2, timeout_s=120):
        assert same == 1.0
        assert 1.0 <= size < 1.05
