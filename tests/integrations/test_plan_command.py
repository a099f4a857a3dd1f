"""`fullshard plan`: published sizes, what fits, its advice if nothing does, how far it is from a run."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard as fs
import ranks
from fullshard import extras
from fullshard.errors import OptionError
from fullshard.planning import answers, sizes, subjects, tracing
from fullshard.planning.adapters import Adapters
from fullshard.planning.answers import Answer, Question, answer
from fullshard.planning.decoder import Decoder
from fullshard.planning.needs import OPTIMIZERS
from fullshard.planning.runs import checkpoint_bytes
from fullshard.planning.subjects import Batch, Subject, find
from fullshard.tools import cli

GIB = 2**30
PUBLISHED = {  # parameters, as the models' own pages count them
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-3-mini": 3_821_079_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
}
SHORT = {"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1024}
SHORT |= {"num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 256, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "intermediate_size": 64}
SHAPE = sizes.Shape(3, 256, 8, 2, 512, 1024, 256)
# What transformers builds, and the shape by which a size of that kind is planned.
KINDS: dict[str, tuple[dict[str, Any], sizes.Shape]] = {
    "llama": (SHORT, SHAPE),
    "qwen2": (SHORT, replace(SHAPE, qkv_bias=True)),
    "qwen3": (SHORT | {"tie_word_embeddings": True}, replace(SHAPE, qk_norm=True, tied=True)),
    "gemma": (SHORT, replace(SHAPE, tied=True, wide_norms=True)),
    "gemma2": (SHORT, replace(SHAPE, tied=True, wide_norms=True, norms=4, softcap=True)),
    "phi3": (SHORT | {"pad_token_id": 0}, replace(SHAPE, joint_qkv=True)),
    "mixtral": (SHORT | {"num_local_experts": 4}, replace(SHAPE, experts=4, experts_used=2)),
    "gpt2": (
        {"n_layer": 3, "n_embd": 256, "n_head": 8, "vocab_size": 1024, "n_positions": 256},
        sizes.gpt2(3, 256, 8, 1024, 256),
    ),
}


def main(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["plan", *arguments])
    return code, out.getvalue(), err.getvalue()


def asked(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, err = main(*arguments, "--json")
    assert not err, err
    return code, json.loads(out)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- sizes ------------------------------------------------------------------------------------------------


def test_every_size_has_as_many_parameters_as_was_published() -> None:
    assert {name: shape.num_parameters for name, shape in sizes.SIZES.items()} == PUBLISHED
    for name in ("gpt2", "llama-3.2-1b", "mixtral-8x7b", "qwen3-0.6b", "gemma-2-2b"):
        assert count(find(name, Batch()).build()) == PUBLISHED[name]


@pytest.mark.parametrize("kind", KINDS)
def test_size_is_followed_as_the_model_that_transformers_builds(kind: str) -> None:
    said, shape = KINDS[kind]
    batch = Batch(2, 256)
    theirs = subjects.hugging_face(kind, {"model_type": kind, **said}, batch)
    mine = subjects.decoder(kind, shape, batch)
    assert count(mine.build()) == count(theirs.build())
    for recompute in (False, True):
        question = Question(ranks=64, memory_bytes=2**40, recompute=recompute)
        found, real = answer(mine, question), answer(theirs, question)
        assert found.returned_bytes == real.returned_bytes
        if not recompute:
            assert found.saved_bytes == pytest.approx(real.saved_bytes, rel=0.03)
        more = 0.08 if kind == "mixtral" else 0.01  # how many tokens each expert gets is assumed
        for one, other in zip(found.needs, real.needs, strict=True):
            assert -0.01 < one.peak / other.peak - 1 < more, (recompute, one.strategy)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "gpt2"])
def test_operators_that_are_computed_once_leave_the_plan_as_it_is(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects.decoder(kind, KINDS[kind][1], Batch(2, 64))
    question = Question(memory_bytes=2**40, recompute=True)
    once = answer(subject, question)
    answers._traced.cache_clear()
    monkeypatch.setattr(
        tracing._Operators, "call", lambda _, operator, args, kwargs: operator(*args, **kwargs)
    )
    every_time = answer(subject, question)
    assert once.needs == every_time.needs
    assert once.saved_bytes == every_time.saved_bytes


@pytest.mark.parametrize("name", ["Llama-3-8B", "llama_3_8b", "llama3-8b", "llama-3.1-8b"])
def test_size_is_found_however_people_write_it(name: str) -> None:
    assert sizes.known(name) is sizes.SIZES["llama-3-8b"]


# --- LoRA and QLoRA -----------------------------------------------------------------------------------------


def _lora_bytes(targets: Any) -> dict[str, Any]:
    """What a rank of a real LoRA training holds after a step: peft's adapters, a bf16 base."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(_tiny_llama(), config)
    sharded = fs.shard(model, precision="bf16", merge_units=0)
    optimizer = torch.optim.AdamW([p for p in sharded.parameters() if p.requires_grad])
    tokens = torch.arange(32)[None]
    sharded(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    parameters = list(sharded.parameters())
    kept = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    return {
        "parameters": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": sum(p.numel() * p.grad.element_size() for p in parameters if p.grad is not None),
        "optimizer": sum(value.numel() * value.element_size() for value in kept),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
    }


def _tiny_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )


def _tiny_llama() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(_tiny_config()).to(torch.bfloat16)


def _tiny_need(adapters: Adapters, **more: Any) -> tuple[Answer, Any]:
    subject = subjects.hugging_face("tiny", _tiny_config().to_dict(), Batch(1, 32))
    question = Question(
        memory_bytes=GIB, strategies=("zero3",), on_gpu=False, adapters=adapters, **{"ranks": 2, **more}
    )
    found = answer(subject, question)
    return found, found.needs[0]


@pytest.mark.parametrize(
    ("planned", "real"), [("all-linear", "all-linear"), ("q_proj, v_proj", ["q_proj", "v_proj"])]
)
def test_lora_holds_what_a_real_run_with_peft_holds(planned: str, real: Any) -> None:
    held = ranks.run(_lora_bytes, 2, real, timeout_s=240)
    found, one = _tiny_need(Adapters(4, planned, "bf16"))
    assert found.num_trainable == sum(row["trainable"] for row in held)
    for name, bytes_planned in (
        ("parameters", one.parameters),
        ("gradients", one.gradients),
        ("optimizer", one.optimizer),
    ):
        total = sum(row[name] for row in held)
        assert total <= 2 * bytes_planned <= total * 1.02, name  # lanes are padded to equal intervals


def test_nf4_takes_half_a_byte_and_the_scales_of_its_blocks() -> None:
    """Per element: 1/2, one byte per 64, and four bytes per 64 x 256."""
    config = _tiny_config()
    width, feed, keys = config.hidden_size, config.intermediate_size, 2 * config.hidden_size // 4
    linears = 3 * (2 * width * width + 2 * width * keys + 3 * width * feed)
    rest = 2 * 512 * width + (2 * 3 + 1) * width
    found, one = _tiny_need(Adapters(4, "all-linear", "nf4"), ranks=1)
    plain, _ = _tiny_need(Adapters(4, "all-linear", "bf16"), ranks=1)
    assert found.num_parameters == plain.num_parameters == linears + rest + found.num_trainable
    expected = linears // 2 + 2 * rest + 4 * found.num_trainable
    assert expected <= one.parameters <= 1.02 * expected
    subject = subjects.hugging_face("tiny", config.to_dict(), Batch(1, 32))
    model = subject.build()
    before = sum(buffer.nbytes for buffer in model.buffers())
    Adapters(4, "all-linear", "nf4").attach(model, torch.bfloat16)
    scales = sum(buffer.nbytes for buffer in model.buffers()) - before
    assert linears / 64 + linears / 64 / 256 * 4 <= scales <= linears / 64 + linears / 64 / 256 * 4 + 4 * 21


def test_qlora_of_seventy_billion_fits_where_all_parameters_do_not() -> None:
    said = (
        "llama-3-70b",
        "--ranks",
        "2",
        "--memory",
        "48GiB",
        "--sequence",
        "512",
        "--checkpoint-activations",
    )
    assert asked(*said, "--strategy", "zero3")[0] == 1
    assert asked(*said, "--strategy", "zero3", "--lora", "16")[0] == 1
    code, found = asked(*said, "--strategy", "zero3", "--lora", "16", "--base-dtype", "nf4")
    assert (code, found["advice"], found["best"]) == (0, [], "zero3")
    assert found["lora"] == {"rank": 16, "targets": "all-linear", "base_dtype": "nf4"}
    assert found["trainable_parameters"] == 207_093_760  # 80 x 16 x the widths of seven Linears
    assert found["strategies"]["zero3"]["gradient_bytes"] * 2 >= 4 * 207_093_760


def test_attention_alone_has_fewer_adapters_and_names_of_transformers_are_understood() -> None:
    said = ("smollm2-135m", "--sequence", "64", "--lora", "8", "--strategy", "zero3")
    counts = {
        targets: asked(*said, "--lora-targets", targets)[1]["trainable_parameters"]
        for targets in ("all-linear", "attention", "q_proj,v_proj", "query,value")
    }
    assert counts["all-linear"] > counts["attention"] > counts["q_proj,v_proj"] == counts["query,value"] > 0


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("--lora", "0"), "the rank of the adapters"),
        (("--lora-targets", "attention"), "is for --lora"),
        (("--base-dtype", "nf4"), "is for --lora"),
        (("--lora", "8", "--base-dtype", "int3"), "Choose one of fp32, bf16, fp16, nf4"),
        (("--lora", "8", "--lora-targets", "querry"), "Did you mean query?"),
    ],
)
def test_wrong_request_for_adapters_is_refused(arguments: tuple[str, ...], answer: str) -> None:
    code, _, err = main("smollm2-135m", "--sequence", "64", *arguments)
    assert code == 2
    assert answer in err


# --- what fits --------------------------------------------------------------------------------------------


def test_seventy_billion_on_four_small_cards_is_refused_in_plain_words() -> None:
    code, out, err = main("llama-3-70b", "--ranks", "4", "--memory", "24GiB")
    assert (code, err) == (1, "")
    assert "llama-3-70b does not train on 4 ranks of 24.0 GiB" in out
    assert "It would need more ranks, or offload." in out
    assert "With --offload host and --checkpoint-activations zero3 fits: " in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("zero", "repl"))}
    assert set(rows) == {"replicate", "zero1", "zero2", "zero3"}
    assert {row[9] for row in rows.values()} == {"no"}
    # 16 bytes a parameter, in four parts.
    assert float(rows["zero3"][4]) == pytest.approx(70_553_706_496 * 16 / 4 / GIB, abs=0.1)


def test_fewest_ranks_that_are_named_fit_and_one_less_does_not() -> None:
    said = ("gpt2-medium", "--sequence", "64", "--memory", "3GiB", "--strategy", "zero3")
    code, found = asked(*said, "--ranks", "1")
    assert code == 1
    (line,) = [line for line in found["advice"] if line.startswith("With these options")]
    fewest = int(line.split(" ranks")[0].split()[-1])
    assert fewest > 1
    assert [asked(*said, "--ranks", str(n))[0] for n in (fewest, fewest - 1)] == [0, 1]


def test_recomputation_is_named_where_it_is_what_makes_it_fit() -> None:
    said = ("gpt2", "--ranks", "8", "--batch", "8", "--strategy", "zero3")
    bare, again = (
        asked(*said, *more, "--memory", "1000GB")[1]["strategies"]["zero3"]["peak_bytes"]
        for more in ((), ("--checkpoint-activations",))
    )
    assert again < 0.8 * bare
    between = ("--memory", f"{(bare + again) / 2 / 0.92 / 1e6:.0f}MB")
    code, found = asked(*said, *between)
    assert code == 1
    assert any("With --checkpoint-activations zero3 fits here" in line for line in found["advice"])
    assert asked(*said, *between, "--checkpoint-activations")[0] == 0


def test_inputs_of_blocks_in_host_memory_leave_two_on_the_device() -> None:
    said = ("gpt2", "--ranks", "8", "--batch", "8", "--strategy", "zero3", "--memory", "1000GB")
    kept, moved = (asked(*said, more)[1] for more in ("--checkpoint-activations", "--offload-activations"))
    one = 8 * 1024 * 768 * 2  # batch, context, width, bf16
    assert (kept["host_bytes"], moved["host_bytes"]) == (0, 12 * one)
    saved = kept["strategies"]["zero3"]["peak_bytes"] - moved["strategies"]["zero3"]["peak_bytes"]
    assert 9 * one <= saved <= 12 * one


def test_peak_is_the_sum_of_its_parts_and_fits_by_the_spare_percent() -> None:
    code, found = asked("gpt2", "--ranks", "2", "--sequence", "256", "--memory", "80GiB")
    assert code == 0
    for one in found["strategies"].values():
        rest = one["parameter_bytes"] + one["gradient_bytes"] + one["optimizer_bytes"]
        assert one["rest_bytes"] == rest
        assert one["peak_bytes"] == (
            rest + one["full_bytes"] + one["sending_bytes"] + one["activation_bytes"]
        )
    sent = {name: one["sent_bytes_per_step"] for name, one in found["strategies"].items()}
    assert sent[found["best"]] == min(sent.values())
    peak = found["strategies"]["zero3"]["peak_bytes"]
    only = ("gpt2", "--ranks", "2", "--sequence", "256", "--strategy", "zero3", "--spare", "10")
    assert asked(*only, "--memory", str(peak / 0.9 + 1000))[0] == 0
    assert asked(*only, "--memory", str(peak / 0.9 - 1000))[0] == 1


def test_rest_is_what_the_engine_plans() -> None:
    subject = find("smollm2-135m", Batch(1, 32))
    for strategy in ("replicate", "zero3"):
        planned = fs.plan(subject.build(), ranks=3, strategy=strategy, precision="bf16")
        found = _need(subject, strategy, ranks=3, on_gpu=False)
        assert (found.parameters, found.gradients) == (planned.parameter_bytes, planned.gradient_bytes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_keeps_the_values_that_are_counted_for_it(name: str) -> None:
    kinds: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "fused-adamw": lambda p: torch.optim.AdamW(p, fused=True),
        "rmsprop": torch.optim.RMSprop,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    }
    parameter = nn.Parameter(torch.ones(100))
    parameter.grad = torch.ones(100)
    optimizer = kinds[name]([parameter])
    optimizer.step()
    kept = sum(
        v.numel() for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.dim()
    )
    assert kept == 100 * OPTIMIZERS[name][0]


def test_hybrid_is_counted_by_the_ranks_of_a_node() -> None:
    subject = find("gpt2", Batch(1, 64))
    hybrid = _need(subject, "hybrid", ranks=8, node_ranks=2)
    assert hybrid.rest == _need(subject, "zero3", ranks=2).rest


def test_hybrid_sends_between_nodes_what_a_simulated_cluster_sends() -> None:
    from fullshard.planning.network import Link, Network
    from fullshard.tools.simulation.models import decoder
    from fullshard.tools.simulation.run import Scenario, simulate

    shape = replace(RUN, layers=2)
    network = Network(8, Link(1e12), 4, Link(1e12))
    scenario = Scenario(
        decoder("own", replace(shape, fused=True), 64),
        network,
        torch.device("cpu"),
        strategy="hybrid",
        steps=2,
    )
    figures = simulate(scenario, "fullshard").figures
    assert figures is not None
    planned = _need(
        subjects.decoder("own", shape, Batch(1, 64)), "hybrid", ranks=8, node_ranks=4, on_gpu=False
    )
    assert planned.sent_bytes == pytest.approx(figures.sent_bytes, rel=0.01)


def test_tied_head_is_sent_as_often_as_a_simulated_cluster_sends_it() -> None:
    from fullshard.planning.network import Link, Network
    from fullshard.tools.simulation.models import decoder
    from fullshard.tools.simulation.run import Scenario, simulate

    # Called at both ends of a pass: kept to its second call, and from there to backward.
    shape = replace(RUN, layers=3, vocabulary=20_000, tied=True)
    subject = decoder("tied", replace(shape, fused=True), 16)
    scenario = Scenario(subject, Network(4, Link(1e12)), torch.device("cpu"), steps=1, precision="fp32")
    figures = simulate(scenario, "fullshard").figures
    assert figures is not None
    planned = _need(
        subjects.decoder("tied", shape, Batch(1, 16)), "zero3", ranks=4, on_gpu=False, precision="fp32"
    )
    assert planned.sent_bytes == pytest.approx(figures.sent_bytes, rel=0.001)


def test_accumulation_holds_full_gradients_where_the_strategy_does() -> None:
    subject = find("gpt2", Batch(1, 64))
    for strategy, more in (("zero1", 1), ("zero2", 0)):
        bare, accumulated = (_need(subject, strategy, accumulate=flag) for flag in (False, True))
        assert accumulated.peak - bare.peak == pytest.approx(more * 4 * 124_439_808, rel=0.01, abs=1)


# --- models of other kinds --------------------------------------------------------------------------------


def test_kind_that_is_not_built_here_is_built_by_transformers(tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, ffn_dim=96, vocab_size=128,
        word_embed_proj_dim=64, max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    code, found = asked(str(tmp_path / "config.json"), "--ranks", "2", "--memory", "1GiB", "--sequence", "32")
    assert code == 0
    assert found["parameters"] == count(OPTForCausalLM(config))
    assert found["batch"] == "1 x 32 tokens per rank"
    assert found["strategies"]["zero3"]["activation_bytes"] > 2 * 32 * 64 * 4


def test_config_with_an_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    from transformers import BambaConfig

    BambaConfig(**SHORT | {"num_hidden_layers": 1}, mamba_n_heads=8, mamba_d_head="auto").save_pretrained(
        tmp_path
    )
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert count(find(str(tmp_path), Batch(1, 8)).build()) > 0


def test_experts_are_planned_in_float32_with_twice_the_activations_of_bf16() -> None:
    experts = SHORT | {"model_type": "mixtral", "num_local_experts": 4}
    narrow, wide = (
        answer(
            subjects.hugging_face("experts", experts, Batch(1, 64)), Question(memory_bytes=GIB, precision=p)
        )
        for p in ("bf16", "fp32")
    )
    assert 1.6 < wide.saved_bytes / narrow.saved_bytes < 2.1


@pytest.mark.parametrize("is_shared", [True, False])
def test_scores_count_where_heads_share_keys_in_a_way_that_no_fused_kernel_takes(is_shared: bool) -> None:
    said = {"model_type": "falcon", "num_hidden_layers": 3, "hidden_size": 256, "vocab_size": 1024}
    said |= {"num_attention_heads": 8, "multi_query": is_shared}
    short, long = (
        answer(
            subjects.hugging_face("falcon", said, Batch(1, length)),
            Question(memory_bytes=GIB, precision="fp32"),
        ).saved_bytes
        for length in (256, 512)
    )
    scores = 3 * 8 * (512**2 - 2 * 256**2) * 4  # what does not grow with the length alone
    assert (long - 2 * short) / scores == pytest.approx(1.0 if is_shared else 0.0, abs=0.3)


def test_config_without_transformers_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHORT}))
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, out, err = main(str(tmp_path))
    assert (code, out) == (2, "")
    assert f"Run: {extras.install_command('hf')}" in err


def test_folder_that_is_no_model_hides_no_size_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert asked("gpt2", "--sequence", "64")[1]["parameters"] == PUBLISHED["gpt2"]


# Blocks of 4 MiB: smaller ones would share a unit.
OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

class Looks(Net):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x.sum()

def make():
    return Net(), torch.randn(16, 1024)

class Shows(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(256, 1024))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        seen = self.drop(x.repeat(64, 4) + self.blocks[0][0].bias[0])
        return super().forward(x) + seen.sum() * 0, seen

def looking():
    return Looks(), torch.randn(16, 1024)

def showing():
    return Shows(), torch.randn(16, 1024)

def raising():
    return refused("width")

def refused(name):
    raise ValueError(f"no such\\n{name}")

def needing(width, depth, *, heads=2):
    return Net(), torch.randn(16, width)

def leaving():
    raise SystemExit(3)

def frozen():
    return Net().requires_grad_(False), torch.randn(16, 1024)

def narrow():
    return Net(), torch.randn(16, 512)

class Makes(Net):
    def forward(self, x):
        return super().forward(x + torch.ones(1024))

def elsewhere():
    return Makes(), torch.randn(16, 1024)

class Forgets(Net):
    def forward(self, x):
        return x.sum()

def unrelated():
    return Forgets(), torch.randn(16, 1024)
"""


def _line(text: str) -> int:
    return OWN[: OWN.index(text)].count("\n") + 1


ONE_LAYER = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
ONE_LAYER |= {"vocab_size": 100}


def test_function_of_ones_own_is_planned_with_its_batch(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    said = (f"{tmp_path}/own.py:make", "--ranks", "2", "--precision", "fp32", "--memory", "1GiB")
    code, found = asked(*said)
    assert code == 0
    assert found["parameters"] == 3 * (1024 * 1024 + 1024)
    # The batch; ReLU keeps its output, which is the next Linear's input; square keeps the last.
    assert found["block_activation_bytes"] == 4 * 16 * 1024 * 4
    assert found["returned_bytes"] == 512  # the loss alone
    code, half = asked(*said[:3], "--precision", "bf16", "--memory", "1GiB")
    assert code == 0
    assert half["block_activation_bytes"] == found["block_activation_bytes"] // 2  # its fp32 batch is cast


def test_buffers_masks_of_dropout_and_what_the_model_returns_count(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    more = ("--ranks", "2", "--precision", "fp32", "--memory", "1GiB", "--optimizer", "sgd")
    _, bare = asked(f"{tmp_path}/own.py:make", *more)
    code, found = asked(f"{tmp_path}/own.py:showing", *more)
    assert code == 0
    returned = 4 * (16 * 64) * (64 * 64)
    assert found["returned_bytes"] == returned + 512
    kept = found["block_activation_bytes"] - bare["block_activation_bytes"]
    assert kept == pytest.approx(4 * 256 * 1024 + returned // 4 + returned, abs=4096)
    out = main(f"{tmp_path}/own.py:showing", *more)[1]
    assert "What the model returns besides the loss (0.016) counts" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "fullshard plan --list"),
        (("lama-3-8b",), "Did you mean llama-3-8b?"),
        (("no/such/config.json",), "there is no model"),
        (("{empty}",), "there is no model"),
        (("{text}",), "cannot be read"),
        (("{nameless}",), "names no model_type"),
        (("{unknown}",), "knows no model_type 'frobnicator'"),
        (("{deaf}",), "transformers trains no 'encodec' model on text, images or speech"),
        (
            ("{windowed}",),
            "does not run without values, on which its path depends: RuntimeError: Tensor.item",
        ),
        (("gpt2", "--gpu", "h101"), "Did you mean h100?"),
        (("gpt2", "--train-tokens", "lots"), "300B or 2T"),
        (("gpt2", "--inside", "50GB/s"), "--node-ranks"),
        (("gpt2", "--link", "fast"), "50GB/s"),
        (("gpt2", "--choose", "--allow", "int4"), "int8-across"),
        (("gpt2", "--choose", "--global-batch", "9"), "a multiple of the ranks"),
        (("gpt2", "--allow", "int8"), "Write --choose --allow"),
        (("gpt2", "--smallest-ranks", "--largest-batch"), "Ask one after the other"),
        (("gpt2", "--choose", "--largest-batch"), "--choose tries growing batches"),
        (("gpt2", "--largest-batch", "--batch", "2"), "the batch is what is looked for"),
        (("gpt2", "--largest-batch", "--save", "plan.json"), "--choose --save FILE"),
        (("gpt2", "--largest-batch", "--allow", "int8"), "--choose --allow"),
        (("gpt2", "--smallest-ranks", "--global-batch", "8"), "give --ranks N and --choose"),
        (("gpt2", "--smallest-ranks", "--train-tokens", "2T"), "give --ranks N and --choose"),
        (("gpt2", "--smallest-ranks", "--ranks", "8"), "the number of ranks is what is looked for"),
        (("{own}:make", "--choose", "--save", "{empty}/no/plan.json"), "No such file or directory"),
        (("{own}:make", "--largest-batch"), "returns its own batch"),
        (("{words}",), "the config is refused: "),
        (("{several}",), "knows no model_type ['llama']"),
        (("{quantised}",), "quantization_config"),
        (("{own}:looking",), "does not run without values"),
        (("{own}:raising",), f"fails: ValueError: no such width (own.py, line {_line('raise ValueError')})"),
        (("{own}:needing",), "is called without arguments, and needs width, depth."),
        (("{own}:leaving",), f"fails: SystemExit: 3 (own.py, line {_line('raise SystemExit')})"),
        (("{own}:frozen",), "no parameter of own.py:frozen requires gradients"),
        (("{own}:narrow",), "fails with its batch: RuntimeError"),
        (("{own}:narrow",), "Return a batch with which model(batch) runs."),
        (("{own}:elsewhere",), "makes tensors on another device than its input's"),
        (("{own}:unrelated",), "depends on no parameter that requires gradients"),
        (("{broken}:make",), "cannot be loaded: SyntaxError: '(' was never closed (broken.py, line 2)"),
        (("{importing}:make",), "No module named 'no_such_module' (importing.py, line 1)"),
        (("{empty}/none.py:make",), "there is no file"),
        (("{own}:make", "--batch", "2"), "returns its own batch"),
        (("{own}:nothing",), "cannot be loaded"),
        (("gpt2", "--memory", "lots"), "24GiB"),
        (("gpt2", "--memory", "0GiB"), "24GiB"),
        (("gpt2", "--memory", "24"), "24 bytes of memory"),
        (("{own}:__name__",), "Name a function"),
        (("gpt2", "--ranks", "0"), "at least 1"),
        (("gpt2", "--strategy", "zero4"), "zero3"),
        (("gpt2", "--strategy", "hybrid"), "--node-ranks"),
        (("gpt2", "--node-ranks", "3"), "nodes divide"),
        (("gpt2", "--precision", "int4"), "bf16"),
        (("gpt2", "--optimizer", "muon"), "adamw"),
        (("gpt2", "--sequence", "2048"), "positions for 1024"),
        (("{learned}", "--sequence", "65"), "positions for 64 tokens, not for 65"),
        (("gpt2", "--batch", "0"), "0 sequences. Give at least 1 sequence"),
        (("gpt2", "--batch", "9" * 11), "more elements than torch can count. Give fewer sequences"),
        (("gpt2", "--batch", "9" * 20), "more elements than torch can count. Give fewer sequences"),
        (("{own}",), "names no function. Give"),
        (("gpt2", "--spare", "100"), "percent"),
    ],
)
def test_wrong_request_is_one_line_with_its_remedy(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "own.py").write_text(OWN)
    learned = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": 64}
    texts = {"text": "no json", "nameless": "{}", "unknown": '{"model_type": "frobnicator"}'}
    texts |= {
        "learned": json.dumps(learned),
        "deaf": '{"model_type": "encodec"}',
        "windowed": json.dumps({"model_type": "longformer", **ONE_LAYER, "attention_window": 32}),
        "broken.py": "import torch\ndef make(\n",
        "importing.py": "import no_such_module\n",
        "words": '{"model_type": "llama", "hidden_size": "big"}',
        "several": '{"model_type": ["llama"]}',
        "quantised": '{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    places = {name.removesuffix(".py"): tmp_path / name for name in (*texts, "empty")}
    code, out, err = main(*(one.format(**places, own=tmp_path / "own.py") for one in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("fullshard: ")
    assert err.count("\n") == 1
    assert says in err.replace(f"{tmp_path}/", "")


def test_a_plan_in_a_script_is_refused_by_its_reason() -> None:
    def refusal(model: nn.Module, batch: torch.Tensor) -> str:
        with pytest.raises(OptionError) as caught:
            fs.plan(model, ranks=2, plan=fs.Planning(batch=batch, machine="h100"))
        return str(caught.value)

    frozen = refusal(nn.Linear(8, 8).requires_grad_(False), torch.ones(2, 8))
    assert "no parameter of Linear requires gradients" in frozen
    assert "give the options themselves" in frozen
    wrong = refusal(nn.Sequential(nn.Linear(8, 8)), torch.ones(2, 5))
    assert "the forward of Sequential fails with its batch: RuntimeError" in wrong
    assert "Give fs.Planning(batch=...) what a rank's forward gets" in wrong
    assert "--list" not in frozen + wrong


def test_a_model_of_transformers_without_a_cache_is_traced_in_a_script() -> None:
    """As a Trainer sets it; transformers then looks for packed sequences, which have no values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHORT, use_cache=False))
    choice = fs.plan(model, ranks=2, plan=fs.Planning(machine="h100", memory="8GiB")).choice
    assert choice is not None
    assert choice.tokens == 256
    assert "not known" not in choice.why


def test_list_shows_every_size_with_its_parameters() -> None:
    code, out, _ = main("--list")
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines()[1:]}
    assert code == 0
    assert rows == {name: f"{parameters:,}" for name, parameters in PUBLISHED.items()}


def test_list_as_json_has_the_parameters_of_every_size() -> None:
    code, out, _ = main("--list", "--json")
    assert (code, json.loads(out)) == (0, PUBLISHED)


def test_planning_leaves_torchs_functions_as_they_were() -> None:
    import torch.nn.functional as F

    before = F.scaled_dot_product_attention, F.linear, F.dropout, F.grouped_mm
    subject = find("gpt2", Batch(1, 8))
    with pytest.raises(OptionError, match="fails with its batch: IndexError"):
        answer(replace(subject, run=lambda _: (torch.zeros(1)[5], None)), Question(memory_bytes=GIB))
    assert before == (F.scaled_dot_product_attention, F.linear, F.dropout, F.grouped_mm)


def _need(subject: Subject, strategy: str, **said: Any) -> Any:
    question = Question(**{"memory_bytes": GIB, "strategies": (strategy,), "spare": 0.0, **said})
    found: Answer = answer(subject, question)
    return found.needs[0]


# --- beside a real run ------------------------------------------------------------------------------------

RUN = sizes.Shape(3, 256, 8, 4, 512, 1024, 256)
CASES = [
    ("own", "zero3", "fp32", False),
    ("own", "zero3", "bf16", True),
    ("own", "zero2", "bf16", False),
    ("own", "replicate", "fp32", False),
    ("transformers", "zero3", "bf16", False),
    ("transformers", "zero3", "bf16", True),
]


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "own":
        return Decoder(RUN)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=256, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=512, vocab_size=1024, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _measured(kind: str, strategy: str, precision: str, recompute: bool) -> tuple[int, int]:
    """Bytes at rest, and at the most beside them in a step: every allocation and release that torch makes."""
    from torch.profiler import ProfilerActivity, profile

    model = fs.shard(_model(kind), strategy=strategy, precision=precision, checkpoint_activations=recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, RUN.vocabulary, (2, 129 if kind == "own" else 128))

    def backward() -> None:
        out = model(tokens) if kind == "own" else model(input_ids=tokens, labels=tokens)
        (out[0] if kind == "own" else out.loss).backward()

    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        backward()
    changes = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    lanes = model._fullshard.lanes
    # A model of this size keeps the memory of its full values between steps.
    live = peak = sum(lane.full.untyped_storage().nbytes() for lane in lanes if not lane.permanent)
    for change in sorted(changes, key=lambda e: e.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    rest = sum(t.untyped_storage().nbytes() for lane in lanes for t in (lane.rest, lane.gradients.flat))
    state = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    return rest + sum(v.untyped_storage().nbytes() for v in state), peak


def _beside(cases: list[tuple[str, str, str, bool]]) -> list[tuple[Any, tuple[int, int]]]:
    found = []
    for kind, strategy, precision, recompute in cases:
        said = {"precision": precision, "recompute": recompute, "ranks": 1, "on_gpu": False}
        planned = _need(subjects.decoder("decoder", RUN, Batch(2, 128)), strategy, **said)
        found.append((planned, _measured(kind, strategy, precision, recompute)))
    return found


@pytest.mark.long  # beside other tests, torch's profiler has counted up to 2 MB that are not the step's
def test_plan_is_near_what_a_run_allocates() -> None:
    """A world of one: torch's memory profiler beside gloo's threads has ended a rank with signal 11."""
    (found,) = ranks.run(_beside, 1, CASES, timeout_s=200)
    for case, (planned, (rest, step)) in zip(CASES, found, strict=True):
        assert planned.rest == rest, case
        assert -0.01 < (planned.peak - planned.rest) / step - 1 < 0.05, case


# --- time, and choosing -----------------------------------------------------------------------------------

H100 = ("--gpu", "h100", "--ranks", "16", "--node-ranks", "8", "--link", "12GB/s", "--batch", "1")


def test_the_loss_of_a_function_s_model_may_be_in_a_dict(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN.replace("return x.square().mean()", "return {'loss': x.square().mean()}"))
    assert "'loss'" in own.read_text()
    assert asked(f"{own}:make")[0] == 0


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A model of three blocks."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHORT}))
    return str(tmp_path)


def test_times_follow_from_the_card_and_the_links(small: str) -> None:
    code, fast = asked(small, *H100, "--train-tokens", "300B")
    assert code == 0
    _, slow = asked(small, *H100, "--link", "0.02GB/s")
    assert slow["times"]["zero3"]["step_s"] > 2 * fast["times"]["zero3"]["step_s"]
    run = fast["run"]
    assert run["tokens_per_step"] == 16 * 256
    assert run["train_s"] == pytest.approx(300e9 / run["tokens_s"])
    assert run["checkpoint_bytes"] == 12 * fast["parameters"]
    out = main(small, *H100)[1]
    assert "tokens/s on 16 ranks" in out
    assert "is the fastest of those that fit" in out
    assert "tokens/s" not in main(small, "--ranks", "16")[1]


def _saved_bytes(folder: str) -> int:
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    model = fs.shard(nn.Sequential(*blocks), precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    fs.save(folder, model, optimizer).wait()
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def test_a_saved_checkpoint_has_the_bytes_that_are_planned(tmp_path: Path) -> None:
    num_elements = 6 * (256 * 256 + 256)
    planned = checkpoint_bytes(num_elements, num_elements, OPTIMIZERS["adamw"][0])
    (saved, _) = ranks.run(_saved_bytes, 2, str(tmp_path / "c"))
    assert saved == pytest.approx(planned, rel=0.01)


def test_the_choice_is_written_and_read_again(small: str, tmp_path: Path) -> None:
    from fullshard.planning.settings import Choice

    file = tmp_path / "plan.json"
    code, out, err = main(small, *H100, "--choose", "--save", str(file))
    assert (code, err) == (0, "")
    assert out.startswith("plan: ")
    assert "because" in out
    assert f"plan={str(file)!r}" in out
    choice = Choice.load(file)
    assert Choice.from_dict(choice.to_dict()) == choice
    assert choice.line in out
    _, listed = asked(small, *H100, "--choose")
    assert Choice.from_dict({k: v for k, v in listed.items() if k != "run"}) == choice
    fitting = [one.step_s for one in choice.rejected if one.step_s is not None]
    assert choice.step_s <= 1.02 * min(fitting)
    renamed = tmp_path / "plan.yaml"
    renamed.write_text(file.read_text())
    assert Choice.load(renamed) == choice


def test_what_changes_numbers_is_chosen_only_where_it_is_allowed(small: str) -> None:
    slow = (small, *H100, "--link", "0.02GB/s", "--choose")
    _, exact = asked(*slow)
    _, rounded = asked(*slow, "--allow", "int8-across")
    assert exact["settings"]["wire"] == "exact"
    assert rounded["settings"]["wire"] == "int8-across"
    assert rounded["step_s"] < 0.8 * exact["step_s"]


def test_memory_decides_between_recomputation_and_host_memory(small: str) -> None:
    base = (small, "--gpu", "a10", "--ranks", "1", "--batch", "8", "--spare", "0")
    peaks = [
        asked(*base, *more)[1]["strategies"]["zero2"]["peak_bytes"]
        for more in ((), ("--checkpoint-activations",))
    ]
    assert peaks[0] > peaks[1]
    wide, tight, tighter = (f"{peak}" for peak in (peaks[0] + 1, peaks[1] + 1, peaks[1] - 1))

    def settings(*more: str) -> tuple[Any, Any]:
        found = asked(*base, "--choose", *more)[1]["settings"]
        return found["checkpoint_activations"], found["offload"]

    assert settings("--memory", wide) == (False, None)
    assert settings("--memory", tight) == (True, None)
    code, out, err = main(*base, "--choose", "--memory", tighter)
    assert (code, err) == (1, "")
    assert "on 1 rank of" in out
    assert "With --host-memory SIZE, offload is tried." in out
    assert settings("--memory", tighter, "--host-memory", "64GiB") != (True, None)


@pytest.mark.parametrize("question", ["--choose", "--smallest-ranks", "--largest-batch"])
def test_where_nothing_fits_the_exit_code_is_1_with_json_too(question: str) -> None:
    on = () if question == "--smallest-ranks" else ("--ranks", "2")
    said = ("gpt2", "--sequence", "64", "--memory", "100MiB", *on, "--strategy", "zero3", question)
    code, out, err = main(*said)
    assert (code, err) == (1, "")
    assert "--host-memory" in out
    code, found = asked(*said)
    assert code == 1
    assert found["model"] == "gpt2"
    if question == "--choose":
        assert found["settings"] is None
        assert found["why"].startswith("nothing fits for gpt2 on 2 ranks of 100.0 MiB")
        assert all(one["step_s"] is None for one in found["rejected"])
    elif question == "--smallest-ranks":
        assert (found["smallest_ranks"], found["choice"]) == (None, None)
    else:
        assert set(found["strategies"].values()) == {None}


NODES = ("--sequence", "64", "--checkpoint-activations", "--spare", "0", "--node-ranks", "2")
NODES += ("--strategy", "zero3")
WIDE = {"num_hidden_layers": 12, "hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 1024}
WIDE |= {"intermediate_size": 8192, "max_position_embeddings": 64}


def _between(model: str, number: int) -> str:
    """Memory in which zero3 trains on so many ranks without node copies, and not with them."""
    subject = find(model, Batch(1, 64))
    question = Question(ranks=number, node_ranks=2, memory_bytes=GIB, recompute=True)
    step = answers.step_of(subject, question)[0]
    kept = answers.need_of(step, question, "zero3")
    freed = answers.need_of(step, question, "zero3", lambda options: replace(options, keep_node=0))
    assert freed.peak < 0.97 * kept.peak
    return str((freed.peak + kept.peak) // 2)


def test_what_does_not_fit_for_its_node_copies_is_chosen_without_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **WIDE}))
    model = str(tmp_path)
    memory = ("--memory", _between(model, 6))
    code, table = asked(model, *NODES, *memory, "--ranks", "6")
    assert (code, table["best"]) == (1, None)  # as the engine would do it by default
    advice = " ".join(table["advice"])
    assert "With fs.shard(model, keep_node=0) zero3 fits here: " in advice
    (line,) = [line for line in table["advice"] if line.startswith("With these options")]
    ranks = int(line.split(" ranks")[0].split()[-1])
    assert ranks > 6  # what the table denies is not claimed below it
    codes = [asked(model, *NODES, *memory, "--ranks", str(n))[0] for n in (ranks, ranks - 2)]
    assert codes == [0, 1]
    chosen = (*NODES, *memory, "--gpu", "h100", "--batch", "1")
    code, found = asked(model, *chosen, "--ranks", "6", "--choose")
    assert (code, found["settings"]["strategy"], found["settings"]["keep_node"]) == (0, "zero3", 0)
    _, fewest = asked(model, *chosen, "--smallest-ranks")
    assert fewest["smallest_ranks"] == 6
    assert asked(model, *chosen, "--ranks", "4", "--choose")[0] == 1


@pytest.mark.parametrize(
    ("node", "more"),
    [
        (3, ()),  # of which 8 ranks, the default, are no multiple
        (4, ("--host-memory", "2GiB")),
        (4, ("--strategy", "hybrid", "--strategy", "zero2")),
        (None, ("--strategy", "zero3", "--strategy", "replicate")),
    ],
    ids=str,
)
def test_the_fewest_ranks_are_those_on_which_a_choice_begins_to_fit(
    node: int | None, more: tuple[str, ...]
) -> None:
    said = ("gpt2", "--sequence", "64", "--memory", "1200MiB", "--gpu", "rtx4090", "--batch", "1", *more)

    def on(number: int) -> tuple[str, ...]:
        return () if node is None else ("--node-ranks", str(min(node, number)))

    code, found = asked(*said, *on(2**20), "--smallest-ranks")
    assert code == 0
    fewest = found["smallest_ranks"]
    fewer = fewest - (1 if node is None or fewest <= node else node)
    for number, expected in ((fewest, 0), (fewer, 1)):
        if number:
            assert asked(*said, *on(number), "--ranks", str(number), "--choose")[0] == expected


def test_the_fewest_ranks_do_not_depend_on_the_order_of_strategies() -> None:
    said = ("gpt2", "--sequence", "64", "--memory", "1200MiB", "--gpu", "rtx4090", "--smallest-ranks")
    alone = asked(*said, "--strategy", "zero3")[1]["smallest_ranks"]
    for names in (("zero3", "replicate"), ("replicate", "zero3")):
        given = [word for name in names for word in ("--strategy", name)]
        assert asked(*said, *given)[1]["smallest_ranks"] == alone


def test_how_optimizer_state_rests_counts_in_a_choice_too() -> None:
    said = ("gpt2", "--sequence", "64", "--ranks", "2", "--batch", "1", "--strategy", "zero2", "--choose")
    exact, bits = (asked(*said, *more)[1]["peak_bytes"] for more in ((), ("--state", "8bit")))
    assert bits < exact
    assert "strategy='zero2', state='8bit')" in main(*said, "--state", "8bit")[1]


def test_a_global_batch_is_divided_into_micro_batches(small: str) -> None:
    arguments = (small, "--gpu", "h100", "--ranks", "4", "--sequence", "128", "--choose")
    _, found = asked(*arguments, "--global-batch", "16")
    settings = found["settings"]
    assert settings["micro_batch"] * settings["accumulate"] == 4
    assert found["tokens"] == 4 * 128
    _, grown = asked(*arguments)
    assert grown["settings"]["micro_batch"] > 1


def test_micro_batches_grow_as_long_as_a_larger_one_is_faster_per_token(small: str) -> None:
    base = (small, "--gpu", "h100", "--ranks", "1", "--sequence", "64", "--choose")
    _, grown = asked(*base)
    chosen = grown["settings"]["micro_batch"]
    assert chosen > 32
    _, twice = asked(*base, "--batch", str(2 * chosen))
    assert twice["run"]["tokens_s"] < 1.03 * grown["run"]["tokens_s"]
    _, divided = asked(*base, "--global-batch", str(6 * chosen))  # many small divisors
    settings = divided["settings"]
    assert settings["micro_batch"] * settings["accumulate"] == 6 * chosen
    assert divided["run"]["tokens_s"] > 0.97 * grown["run"]["tokens_s"]


def test_micro_batches_of_images_grow_too(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "vit", "num_hidden_layers": 1, "hidden_size": 64} | HEADS))
    _, found = asked(str(file), "--gpu", "h100", "--ranks", "1", "--choose")
    assert found["settings"]["micro_batch"] > 1
    assert asked(str(file), "--gpu", "h100", "--smallest-ranks")[1]["smallest_ranks"] == 1


def test_the_fewest_ranks_and_the_largest_batch_are_at_the_edge_of_what_fits(small: str) -> None:
    base = (small, "--sequence", "128")
    _, alone = asked(*base, "--ranks", "64", "--checkpoint-activations")
    little = ("--memory", f"{alone['strategies']['zero3']['peak_bytes'] + 2**20}", "--spare", "0")
    _, found = asked(*base, *little, "--gpu", "rtx3090", "--smallest-ranks")
    fewest = found["smallest_ranks"]
    assert 1 < fewest <= 64
    for number, code in ((fewest, 0), (fewest - 1, 1)):
        assert main(*base, *little, "--ranks", str(number), "--checkpoint-activations")[0] == code
    room = ("--memory", "512MiB", "--ranks", "8", "--strategy", "zero3")
    code, most = asked(*base, *room, "--largest-batch")
    batch = most["strategies"]["zero3"]["batch"]
    assert code == 0
    assert batch > 1
    for count, code in ((batch, 0), (batch + 1, 1)):
        assert main(*base, *room, "--batch", str(count))[0] == code


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "num_hidden_layers": 1, "architectures": ["BertForMaskedLM"]},
        {"model_type": "t5", "num_layers": 1},
        {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1},
        {"model_type": "vit", "num_hidden_layers": 1},
        {"model_type": "convnext", "depths": [1, 1, 1, 1]},
        {"model_type": "whisper", "encoder_layers": 1, "decoder_layers": 1},
        {"model_type": "mixtral", **SHORT, "num_local_experts": 4},
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_configs_of_other_kinds_are_planned(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, found = asked(str(tmp_path), "--gpu", "h100", "--batch", "2", "--sequence", "64")
    assert code == 0
    times, parameters = found["times"]["zero3"], found["parameters"]
    assert times["step_s"] >= times["compute_s"] > 0
    if config["model_type"] in ("bert", "t5", "bart"):
        assert times["flop"] == pytest.approx(6 * parameters * 2 * 64, rel=0.4)


@pytest.mark.parametrize(
    ("config", "built"),
    [
        ({"model_type": "clip", "text_config": ONE_LAYER, "vision_config": ONE_LAYER}, "CLIPModel"),
        ({"model_type": "llama", **SHORT}, "LlamaForSequenceClassification"),
        ({"model_type": "llama", **SHORT}, "LlamaForQuestionAnswering"),
        ({"model_type": "llama", **SHORT}, "LlamaModel"),
        ({"model_type": "bert", **ONE_LAYER}, "BertForPreTraining"),
        ({"model_type": "bert", **ONE_LAYER}, "BertForMultipleChoice"),
        ({"model_type": "t5", "num_layers": 1}, "T5EncoderModel"),
        ({"model_type": "vit", "num_hidden_layers": 1}, "ViTModel"),
        ({"model_type": "wav2vec2", "num_hidden_layers": 1}, "Wav2Vec2ForCTC"),
        ({"model_type": "deberta-v2", **ONE_LAYER}, "DebertaV2ForMaskedLM"),
        (
            {"model_type": "xlnet", "n_layer": 1, "d_model": 64, "n_head": 4, "d_inner": 64},
            "XLNetLMHeadModel",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_class_that_a_config_names_is_planned(config: dict[str, Any], built: str, tmp_path: Path) -> None:
    import transformers

    config = config | {"architectures": [built]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, found = asked(str(tmp_path), "--batch", "2", "--sequence", "32", "--strategy", "zero3")
    assert (code, found["note"]) == (0, "")
    assert found["traced"].startswith(f"the {built} that transformers ")
    with torch.device("meta"):
        real = getattr(transformers, built)(transformers.AutoConfig.for_model(**config))
    assert found["parameters"] == count(real)


@pytest.mark.parametrize(
    ("named", "built", "because"),
    [
        ("MyLlama", "LlamaForCausalLM", "has no class MyLlama for it"),
        ("MyLlamaForCausalLM", "LlamaForCausalLM", "has no class MyLlamaForCausalLM for it"),
        ("BertModel", "LlamaForCausalLM", "has no class BertModel for it"),
        (
            "BartForSequenceClassification",
            "BartForConditionalGeneration",
            "cannot be traced on the meta device",
        ),
    ],
)
def test_a_class_that_is_planned_instead_of_the_named_one_is_said(
    named: str, built: str, because: str, tmp_path: Path
) -> None:
    bart = {"model_type": "bart", "encoder_layers": 1, "decoder_layers": 1, "d_model": 64, "vocab_size": 100}
    config = bart if named.startswith("Bart") else {"model_type": "llama", **SHORT}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [named]}))
    said = (str(tmp_path), "--sequence", "32", "--batch", "2", "--strategy", "zero3")
    _, found = asked(*said)
    note = found["note"]
    assert note.startswith(f"The config names {named}, and ")
    assert because in note
    assert note.endswith(f": {built} is planned instead.")
    for more in ((), ("--choose",), ("--smallest-ranks",)):
        assert note in main(*said, *more)[1]
        assert asked(*said, *more)[1]["note"] == note


def test_a_model_of_images_and_text_is_planned_with_both(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "blip"}')
    code, found = asked(str(tmp_path), "--sequence", "32", "--strategy", "zero3")
    assert (code, found["batch"]) == (0, "1 x 32 tokens and an image each per rank")
