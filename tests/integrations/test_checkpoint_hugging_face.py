"""Checkpoints that transformers reads, and directories of transformers' that we read into shards."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import engines
import ranks
import reference
import zoo

# --- the models ----------------------------------------------------------------------------------------

FAMILIES = ("gpt2_tied", "llama", "qwen3_tied", "mixtral_11", "t5", "bert", "clip", "resnet_batchnorm")
AUTO = {"t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM", "clip": "AutoModel"}
AUTO |= {"resnet_batchnorm": "AutoModelForImageClassification"}
SMALL_FILE_BYTES = 30_000  # every family is cut into several files by it


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": zoo.VOCABULARY, "hidden_size": zoo.WIDTH, "intermediate_size": 40, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, use_cache=False, tie_word_embeddings=True))


def _mixtral_11() -> nn.Module:
    """More than ten experts: expert 10 comes before expert 2 in the order of the alphabet."""
    from transformers import MixtralForCausalLM

    config = zoo.build(zoo.FAMILIES["mixtral"]).config
    config.num_local_experts = 11
    return MixtralForCausalLM(config)


def _gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {"vocab_size": zoo.VOCABULARY, "hidden_size": zoo.WIDTH, "intermediate_size": 40}
    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _BART_SIDE.items()}
    return BartForConditionalGeneration(BartConfig(vocab_size=zoo.VOCABULARY, d_model=zoo.WIDTH, **sides))


_BART_SIDE = {"layers": 1, "attention_heads": 4, "ffn_dim": 40}


class _Scored(nn.Module):
    """A model of the user's own around one of transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = zoo.build(zoo.FAMILIES["gpt2_tied"]).transformer
        self.score = nn.Linear(zoo.WIDTH, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"score": self.score(self.backbone(input_ids)[0])}


def _lora_head() -> nn.Module:
    """peft trains a copy of the head, beside the adapters."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return get_peft_model(zoo.build(zoo.FAMILIES["llama"]), config)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "qwen3_tied": _qwen3,
    "mixtral_11": _mixtral_11,
    "gpt_neox": _gpt_neox,
    "bart": _bart,
    "scored": _Scored,
    "lora_head": _lora_head,
    "gpt2_base": lambda: zoo.build(zoo.FAMILIES["gpt2_tied"]).transformer,
    "llama_base": lambda: zoo.build(zoo.FAMILIES["llama"]).model,
}
BUILDS |= {name: family.build for name, family in zoo.FAMILIES.items()}


def build(name: str, seed: int = 0) -> Any:
    """A model whose every value is random, so that none is right by being left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BUILDS[name]().eval()
        with torch.no_grad():
            for value in [*model.parameters(), *contents_buffers(model)]:
                value.copy_(torch.rand_like(value) * 0.2 + (0.9 if value.dim() < 2 else -0.1))
        return model


def contents_buffers(model: nn.Module) -> list[Tensor]:
    """Buffers that are saved and are no counters."""
    state = model.state_dict(keep_vars=True).values()
    return [v for v in state if not isinstance(v, nn.Parameter) and v.is_floating_point()]


def outputs(name: str, model: nn.Module) -> dict[str, Tensor]:
    """What the model gives for one batch."""
    family = zoo.FAMILIES.get(name)
    batch = family.batch(0) if family else zoo.FAMILIES["llama"].batch(0)
    if name.endswith("_base"):
        batch = {"input_ids": batch["input_ids"]}
    with torch.no_grad():
        found = model(**batch)
    return {key: v.detach().clone() for key, v in dict(found).items() if isinstance(v, Tensor)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return bool(a) and a.keys() == b.keys() and all(reference.bitwise(a[k], b[k]) for k in a)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Everything in a model's files, read by the safetensors library."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


# --- saved by ranks, loaded by transformers ------------------------------------------------------------


def _save_families(root: str, file_bytes: int) -> None:
    import fullshard as fs
    from fullshard.checkpoint.saving import writing

    before = writing.FILE_BYTES
    writing.FILE_BYTES = file_bytes
    try:
        for name in FAMILIES:
            fs.save(Path(root) / name, fs.shard(build(name)))
    finally:
        writing.FILE_BYTES = before


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Every family, saved by two ranks in one file, and by three ranks in several."""
    folders = {n: tmp_path_factory.mktemp(f"by-{n}") for n in (2, 3)}
    ranks.run(_save_families, 2, str(folders[2]), 10**9, timeout_s=120)
    ranks.run(_save_families, 3, str(folders[3]), SMALL_FILE_BYTES, timeout_s=120)
    return folders


@contextmanager
def complaints() -> Iterator[list[str]]:
    """What transformers logs as a warning, or worse."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_from_pretrained_loads_what_ranks_saved(name: str, num_ranks: int, saved: dict[int, Path]) -> None:
    import transformers

    folder = saved[num_ranks] / name
    assert (len(list(folder.glob("model*.safetensors"))) > 1) == (num_ranks == 3)
    auto = getattr(transformers, AUTO.get(name, "AutoModelForCausalLM"))
    with complaints() as said:
        model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert not said
    plain = build(name)
    assert type(model) is type(plain)
    assert same(outputs(name, model.eval()), outputs(name, plain))
    ours, theirs = model.state_dict(), plain.state_dict()
    assert same(ours, theirs)


@pytest.mark.parametrize("name", FAMILIES)
def test_config_is_byte_for_byte_the_one_of_save_pretrained(
    name: str, saved: dict[int, Path], tmp_path: Path
) -> None:
    build(name).save_pretrained(tmp_path)
    for file in ("config.json", "generation_config.json"):
        theirs = tmp_path / file
        for folder in (saved[2] / name, saved[3] / name):
            assert (folder / file).exists() == theirs.exists(), file
            if theirs.exists():
                assert (folder / file).read_bytes() == theirs.read_bytes(), file


def test_index_says_where_every_tensor_is(saved: dict[int, Path]) -> None:
    for name in FAMILIES:
        folder = saved[3] / name
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        where = {
            key: file.name
            for file in folder.glob("model-*.safetensors")
            for key in safetensors.torch.load_file(file)
        }
        assert index["weight_map"] == where
        size = sum(value.nbytes for value in tensors_of(folder).values())
        assert index["metadata"]["total_size"] == size


def test_names_are_those_of_save_pretrained_without_its_conversion(
    saved: dict[int, Path], tmp_path: Path
) -> None:
    for name in FAMILIES:
        build(name).save_pretrained(tmp_path / name, save_original_format=False)
        assert same(tensors_of(saved[2] / name), tensors_of(tmp_path / name)), name


def _train_and_save(root: str) -> dict[str, Tensor]:
    """Two steps computed in bf16; the masters are fp32."""
    import fullshard as fs

    family = zoo.FAMILIES["llama"]
    model = fs.shard(build("llama").train(), precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        family.loss(model, family.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    fs.save(Path(root) / "as_it_is", model, optimizer)
    fs.save(Path(root) / "rounded", model, optimizer, dtype=torch.bfloat16)
    with fs.full(model, writeback=False):
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_training_in_bf16_is_saved_as_fp32_masters_or_rounded_on_request(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    masters = ranks.run(_train_and_save, 2, str(tmp_path))[0]
    assert not same(masters, build("llama").state_dict())
    rounded = {name: value.bfloat16() for name, value in masters.items()}
    assert any((masters[name] != rounded[name].float()).any() for name in masters)
    for folder, values, dtype in (("as_it_is", masters, "float32"), ("rounded", rounded, "bfloat16")):
        assert same(tensors_of(tmp_path / folder), values)
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == dtype
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert same(model.state_dict(), values)
        assert model.dtype == getattr(torch, dtype)


# --- written by transformers, loaded by ranks ----------------------------------------------------------

Case = tuple[str, str, dict[str, Any]]  # the model's name, the path to load, options


def _load_each(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Each case on a model with other values: outputs, notes, warnings; or the error, and what it changed."""
    import fullshard as fs

    return {label: _load_one(fs, *case) for label, case in cases.items()}


def _load_one(fs: Any, name: str, path: str, said: dict[str, Any]) -> dict[str, Any]:
    if said.get("meta"):
        with torch.device("meta"):
            model = BUILDS[name]().eval()
    else:
        model = build(name, seed=1)
    model.to(said.get("dtype", torch.float32))
    said.get("prepare", lambda _: None)(model)
    model = engines.shard_blocks(model, **said.get("shard", {}))
    before = {key: value.clone() for key, value in _resting(model).items()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if said.get("optimizer") else None
            loaded = fs.load(path, model, optimizer, strict=said.get("strict", True))
        except fs.FullshardError as error:
            return {"error": (type(error).__name__, str(error)), "unchanged": same(before, _resting(model))}
    found = {"notes": loaded.notes, "warned": [str(w.message) for w in warned if w.category is UserWarning]}
    if said.get("values"):
        with fs.full(model, writeback=False):
            return found | {"outputs": {key: value.clone() for key, value in model.state_dict().items()}}
    return found | {"outputs": outputs(name, model)}


def _resting(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def load_each(cases: dict[str, Case], num_ranks: int = 2) -> list[dict[str, Any]]:
    return ranks.run(_load_each, num_ranks, cases, timeout_s=120)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family as save_pretrained writes it: in one file, and cut into several."""
    root = tmp_path_factory.mktemp("pretrained")
    for name in (*FAMILIES, "gpt_neox", "vit"):
        build(name).save_pretrained(root / name)
        build(name).save_pretrained(root / f"{name}-cut", max_shard_size=SMALL_FILE_BYTES)
        assert (root / f"{name}-cut" / "model.safetensors.index.json").exists()
    return root


@pytest.mark.parametrize(("num_ranks", "files"), [(2, ""), (3, "-cut")], ids=["one_file", "several_files"])
def test_ranks_load_what_save_pretrained_wrote(num_ranks: int, files: str, pretrained: Path) -> None:
    names = (*FAMILIES, "gpt_neox", "vit")
    cases: dict[str, Case] = {name: (name, str(pretrained / f"{name}{files}"), {}) for name in names}
    found = load_each(cases, num_ranks)
    for name in names:
        plain = type(build(name)).from_pretrained(pretrained / f"{name}{files}").eval()
        for rank, result in enumerate(each[name] for each in found):
            assert result.get("error") is None, (rank, name, result)
            assert (result["notes"], result["warned"]) == ((), []), name
            assert same(result["outputs"], outputs(name, plain)), (rank, name)


def test_models_built_on_the_meta_device_get_all_values(pretrained: Path) -> None:
    names = [name for name in FAMILIES if name != "clip"]  # nothing initialises its logit_scale on meta
    cases: dict[str, Case] = {name: (name, str(pretrained / name), {"meta": True}) for name in names}
    for found in load_each(cases):
        for name, result in found.items():
            assert result.get("error") is None, result
            assert same(result["outputs"], outputs(name, build(name))), name


def _count_bytes(path: str) -> tuple[int, int]:
    """Bytes that this rank reads from the files of a model, and bytes of its shards."""
    import fullshard as fs

    model = fs.shard(build("llama", seed=1))
    plain, count = os.preadv, 0

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal count
        got = plain(descriptor, buffers, offset)
        count += got
        return got

    os.preadv = counted
    try:
        fs.load(path, model)
    finally:
        os.preadv = plain
    return count, sum(p.nbytes for p in model.parameters())


def test_every_rank_reads_its_own_bytes_and_the_headers_alone(pretrained: Path) -> None:
    for label in ("llama", "llama-cut"):
        files = list((pretrained / label).glob("*.safetensors"))
        headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
        for read, kept in ranks.run(_count_bytes, 3, str(pretrained / label)):
            assert 0 < kept < read == kept + headers


# --- names ---------------------------------------------------------------------------------------------


def _rename(folder: Path, new: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy of a model's directory with other tensors in it."""
    shutil.copytree(folder, new)
    value = change(safetensors.torch.load_file(new / "model.safetensors"))
    safetensors.torch.save_file(value, new / "model.safetensors", {"format": "pt"})
    return new


def test_base_model_and_model_with_a_head_load_each_other(tmp_path: Path) -> None:
    for name, base in (("gpt2_tied", "transformer"), ("llama", "model")):
        getattr(build(name), base).save_pretrained(tmp_path / f"{name}-base")
        build(name).save_pretrained(tmp_path / name)
    cases: dict[str, Case] = {
        "tied": ("gpt2_tied", str(tmp_path / "gpt2_tied-base"), {}),
        "down": ("gpt2_base", str(tmp_path / "gpt2_tied"), {}),
        "no head": ("llama", str(tmp_path / "llama-base"), {}),
        "no head, loose": ("llama", str(tmp_path / "llama-base"), {"strict": False, "values": True}),
        "head too many": ("llama_base", str(tmp_path / "llama"), {}),
        "head too many, loose": ("llama_base", str(tmp_path / "llama"), {"strict": False}),
        "around": ("scored", str(tmp_path / "gpt2_tied-base"), {"strict": False, "values": True}),
    }
    plain = {name: build(name) for name in ("gpt2_tied", "llama")}
    head = "lm_head.weight"
    for found in load_each(cases):
        assert same(found["tied"]["outputs"], outputs("gpt2_tied", plain["gpt2_tied"]))
        assert same(found["down"]["outputs"], outputs("gpt2_base", plain["gpt2_tied"].transformer))
        for label in ("no head", "head too many"):
            kind, message = found[label]["error"]
            assert (kind, found[label]["unchanged"]) == ("CheckpointError", True)
            assert head in message
            assert "strict=False" in message
        expected = plain["llama"].state_dict() | {head: build("llama", seed=1).state_dict()[head]}
        assert same(found["no head, loose"]["outputs"], expected)
        assert found["no head, loose"]["notes"] == (f"not in the checkpoint, left as they were: {head!r}",)
        assert same(found["head too many, loose"]["outputs"], outputs("llama_base", plain["llama"].model))
        assert found["head too many, loose"]["notes"] == (
            f"in the checkpoint, but not in the model: {head!r}",
        )
        backbone = {f"backbone.{k}": v for k, v in plain["gpt2_tied"].transformer.state_dict().items()}
        score = {k: v for k, v in build("scored", seed=1).state_dict().items() if k.startswith("score.")}
        assert same(found["around"]["outputs"], backbone | score)


def _with_old_mapping(model: Any) -> None:
    model._checkpoint_conversion_mapping = {r"^language_model\.layers": "model.layers"}


def test_names_of_old_are_found(tmp_path: Path, pretrained: Path) -> None:
    def gammas(state: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        changed = {k: next((k.replace(a, b) for a, b in old.items() if a in k), k) for k in state}
        assert sum(k != v for k, v in changed.items()) >= 10
        return {changed[k]: v for k, v in state.items()}

    def constants(state: dict[str, Tensor]) -> dict[str, Tensor]:
        state = {k.removeprefix("transformer."): v for k, v in state.items()}
        return state | {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(3)}

    def both_tied(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {"lm_head.weight": state["transformer.wte.weight"].clone()}

    def only_the_head(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"lm_head.weight" if k == "transformer.wte.weight" else k: v for k, v in state.items()}

    def rotary(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(3)}

    def other_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k.replace("model.layers", "language_model.layers"): v for k, v in state.items()}

    changes = {"gammas": ("bert", gammas), "constants": ("gpt2_tied", constants), "rotary": ("llama", rotary)}
    changes |= {"both": ("gpt2_tied", both_tied), "head": ("gpt2_tied", only_the_head)}
    changes |= {"mapping": ("llama", other_prefix)}
    cases: dict[str, Case] = {}
    for label, (name, change) in changes.items():
        options = {"prepare": _with_old_mapping} if label == "mapping" else {}
        cases[label] = name, str(_rename(pretrained / name, tmp_path / label, change)), options
    for found in load_each(cases):
        for label, (name, _) in changes.items():
            assert found[label].get("error") is None, (label, found[label])
            assert found[label]["notes"] == (), label
            assert same(found[label]["outputs"], outputs(name, build(name))), label


def test_tensor_that_transformers_does_not_miss_is_noted_and_not_an_error(tmp_path: Path) -> None:
    build("bart").save_pretrained(tmp_path / "whole")

    def without_bias(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v for k, v in state.items() if k != "final_logits_bias"}

    path = str(_rename(tmp_path / "whole", tmp_path / "old", without_bias))
    expected = build("bart").state_dict()
    expected["final_logits_bias"] = build("bart", seed=1).state_dict()["final_logits_bias"]
    for found in load_each({"old": ("bart", path, {"values": True})}):
        assert found["old"]["notes"] == ("not in the checkpoint, left as they were: 'final_logits_bias'",)
        assert same(found["old"]["outputs"], expected)


def test_one_safetensors_file_and_a_cache_of_links_are_loaded(tmp_path: Path, pretrained: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(pretrained / "llama-cut", blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    shutil.copy(pretrained / "llama" / "model.safetensors", tmp_path / "weights.safetensors")
    cases: dict[str, Case] = {
        "links": ("llama", str(snapshot), {}),
        "file": ("llama", str(tmp_path / "weights.safetensors"), {}),
    }
    for found in load_each(cases):
        for label in cases:
            assert same(found[label]["outputs"], outputs("llama", build("llama"))), found[label]


# --- what cannot be loaded -----------------------------------------------------------------------------


def _damages(whole: Path, cut: Path, root: Path) -> dict[str, tuple[Path, str]]:
    """Directories with something wrong, each with what the error must name."""
    found: dict[str, tuple[Path, str]] = {}
    files = sorted(file.name for file in cut.glob("*.safetensors"))

    def damaged(label: str, names: str, source: Path) -> Path:
        folder = root / label
        shutil.copytree(source, folder)
        found[label] = folder, names
        return folder

    def index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
        path = folder / "model.safetensors.index.json"
        said = json.loads(path.read_text())
        change(said)
        path.write_text(json.dumps(said))

    name = "model.norm.weight"
    (damaged("missing", files[1], cut) / files[1]).unlink()
    index(damaged("elsewhere", name, cut), lambda said: said["weight_map"].update({name: files[0]}))
    safetensors.torch.save_file({"a": torch.zeros(1)}, root / "x.safetensors")
    for label, file in (("climbs", "../x.safetensors"), ("absolute", str(root / "x.safetensors"))):
        what = f"{file!r}, which is not a plain file name"
        index(damaged(label, what, cut), lambda said, file=file: said["weight_map"].update(a=file))
    index(damaged("no map", "weight_map", cut), lambda said: said.pop("weight_map"))
    (damaged("no json", "index.json", cut) / "model.safetensors.index.json").write_text("{")
    folder = damaged("twice", name, cut)
    index(folder, lambda said: said["weight_map"].update({"other": "more.safetensors"}))
    safetensors.torch.save_file({name: torch.zeros(1), "other": torch.zeros(1)}, folder / "more.safetensors")
    os.truncate(damaged("short", "model.safetensors", whole) / "model.safetensors", 9_000)
    data = (whole / "model.safetensors").read_bytes()
    (damaged("long", "model.safetensors", whole) / "model.safetensors").write_bytes(data + b"\0")
    folder = damaged("pickled", "pickle", whole)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    folder = damaged("other name", "adapter_model.safetensors", whole)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (damaged("no manifest", "fullshard.json", whole) / "optimizer.safetensors").write_bytes(data)
    damaged(".step-7.saving-0123456789abcdef", "fullshard.json", whole)
    config = damaged("quantised", "'quant_method': 'fp8'", whole) / "config.json"
    said = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(said))
    found["pickled file"] = root / "pickled" / "pytorch_model.bin", "pickle"
    return found


def test_damaged_directories_are_refused_before_anything_changes(tmp_path: Path, pretrained: Path) -> None:
    damages = _damages(pretrained / "llama", pretrained / "llama-cut", tmp_path)
    cases: dict[str, Case] = {label: ("llama", str(path), {}) for label, (path, _) in damages.items()}
    damages["optimizer"] = pretrained / "llama", "holds no optimizer state"
    cases["optimizer"] = "llama", str(pretrained / "llama"), {"optimizer": True}
    for found in load_each(cases):
        for label, (_, names) in damages.items():
            kind, message = found[label].get("error", ("", ""))
            assert kind in ("DamagedCheckpoint", "CheckpointError"), (label, found[label])
            assert found[label]["unchanged"], (label, found[label])
            assert names in message, (label, message)
            if label.startswith("pickled"):
                assert "safe_serialization=True" in message


def test_tied_tensor_with_two_values_in_the_files_is_refused(tmp_path: Path, pretrained: Path) -> None:
    def untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
        head = state["transformer.wte.weight"].clone()
        head[-1, -1] += 1  # the last rank's part alone differs
        return state | {"lm_head.weight": head}

    path = str(_rename(pretrained / "gpt2_tied", tmp_path / "untied", untied))
    for found in load_each({"untied": ("gpt2_tied", path, {})}, 3):
        kind, message = found["untied"]["error"]
        assert (kind, found["untied"]["unchanged"]) == ("CheckpointError", True)
        assert "'lm_head.weight' and 'transformer.wte.weight'" in message
        assert "tie_word_embeddings" in message


def _load_own_copy(root: str) -> tuple[str, str, bool]:
    import fullshard as fs

    model = fs.shard(build("llama", seed=1))
    before = {key: value.clone() for key, value in _resting(model).items()}
    here = Path.cwd()
    os.chdir(Path(root) / os.environ["RANK"])
    try:
        fs.load("/proc/self/cwd/model", model)  # one path, on every host another copy
    except fs.FullshardError as error:
        return type(error).__name__, str(error), same(before, _resting(model))
    finally:
        os.chdir(here)
    return "", "", False


def test_hosts_whose_copies_differ_are_told(tmp_path: Path, pretrained: Path) -> None:
    shutil.copytree(pretrained / "llama", tmp_path / "0" / "model")
    _rename(
        pretrained / "llama", tmp_path / "1" / "model", lambda state: {k: v.half() for k, v in state.items()}
    )
    for kind, message, unchanged in ranks.run(_load_own_copy, 2, str(tmp_path)):
        assert (kind, unchanged) == ("RankMismatch", True)
        assert "different tensors" in message


# --- conversions ---------------------------------------------------------------------------------------


def _turned_llama() -> nn.Module:
    """A model of its own class, for which transformers is told to transpose a weight of the files."""
    from transformers import LlamaForCausalLM, conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    turned = WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", [Transpose(0, 1)])
    kind = type("TurnedLlama", (LlamaForCausalLM,), {})
    conversion_mapping.register_checkpoint_conversion_mapping("TurnedLlama", [turned], overwrite=True)
    return kind(zoo.build(zoo.FAMILIES["llama"]).config)


BUILDS["turned"] = _turned_llama


def test_conversion_that_cannot_be_read_as_bytes_names_tensor_and_remedy(pretrained: Path) -> None:
    for found in load_each({"turned": ("turned", str(pretrained / "llama"), {})}):
        kind, message = found["turned"]["error"]
        assert (kind, found["turned"]["unchanged"]) == ("CheckpointError", True)
        assert "model.layers.0.self_attn.q_proj.weight" in message
        assert "Transpose" in message
        assert "save_original_format=False" in message


OPERATIONS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "stack": lambda ts: [torch.stack(ts)],
    "concatenate": lambda ts: [torch.cat(ts)],
    "stack and concatenate": lambda ts: [torch.cat([torch.stack(ts[:2]), torch.stack(ts[2:])], dim=1)],
    "chunk": lambda ts: list(torch.cat(ts).chunk(3)),
    "interleave": lambda ts: [ts[0].reshape(3, 2, -1).transpose(0, 1).reshape(ts[0].shape)],
    "reverse": lambda ts: [ts[1].flip(0)],
    "a part twice": lambda ts: [torch.cat([ts[3][1:3], ts[3][1:2]])],
}
CHANGES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "transpose": lambda ts: [ts[0].T],
    "flip rows": lambda ts: [ts[0].flip(1)],
    "cut rows": lambda ts: list(ts[0].chunk(2, dim=1)),
    "join rows": lambda ts: [torch.cat(ts[:2], dim=1)],
    "interleave rows": lambda ts: [ts[0].reshape(6, -1, 2).transpose(1, 2).reshape(ts[0].shape)],
    "add": lambda ts: [ts[0] + ts[1]],
    "add one": lambda ts: [ts[0] + 1],
    "halve": lambda ts: [ts[0] // 2],
    "sort": lambda ts: [ts[2].sort(0).values],
    "to floats": lambda ts: [ts[0].float()],
}


def _four(folder: Path, *shapes: tuple[int, ...]) -> tuple[list[Tensor], Any, Any]:
    """Four tensors in two files, how to read them, and where each one is."""
    from fullshard.checkpoint.loading import reading

    values = [torch.randn(shapes[k % len(shapes)]).bfloat16() for k in range(4)]
    blocks = reading.Blocks(folder, None, 512)
    for i in (0, 2):
        parts = {f"{k}": values[k] for k in (i, i + 1)}
        safetensors.torch.save_file(parts, folder / f"{i}.safetensors")
    stored = [reading.tensors_in(blocks, f"{k // 2 * 2}.safetensors")[f"{k}"] for k in range(4)]
    return values, reading.Source(folder, blocks), stored


@pytest.mark.parametrize("shape", [(6, 10), (6, 2), (6,)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_conversion_that_moves_rows_is_read_from_the_files(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    from fullshard.checkpoint.hugging_face.conversions import Rows

    if shape == (6,) and name in ("interleave",):
        shape = (6, 1)
    values, source, stored = _four(tmp_path, shape)
    operation = OPERATIONS[name]
    made = Rows(stored).follow(lambda labels: {f"{i}": t for i, t in enumerate(operation(labels))})
    expected = operation(values)
    assert len(made) == len(expected)
    for i, value in enumerate(expected):
        found = made[f"{i}"]
        assert reference.bitwise(source.read_tensor(found), value)
        low, high = value.numel() // 3, value.numel() - 1
        part = torch.empty(high - low, dtype=value.dtype)
        source.read(found, low, high, part)
        assert reference.bitwise(part, value.reshape(-1)[low:high])
    source.close()


@pytest.mark.parametrize("shapes", [((8,), (2,)), ((8, 5), (2, 5)), ((3, 8, 5), (3, 2, 5))])
def test_tensors_of_different_sizes_are_joined_in_the_files(
    shapes: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    from fullshard.checkpoint.hugging_face.conversions import Rows

    values, source, stored = _four(tmp_path, *shapes)
    dim = 1 if len(shapes[0]) == 3 else 0
    made = Rows(stored).follow(lambda labels: {"joined": [torch.cat(labels, dim)]})
    assert reference.bitwise(source.read_tensor(made["joined"]), torch.cat(values, dim))
    source.close()


@pytest.mark.parametrize("shapes", [((8, 5), (8, 4)), ((8,), (8, 1))])
def test_tensors_whose_rows_differ_in_length_are_refused(
    shapes: tuple[tuple[int, ...], ...], tmp_path: Path
) -> None:
    from fullshard.checkpoint.hugging_face.conversions import NotMoved, Rows

    _, source, stored = _four(tmp_path, *shapes)
    with pytest.raises(NotMoved):
        Rows(stored)
    source.close()


@pytest.mark.parametrize("name", CHANGES)
def test_conversion_that_does_more_than_move_rows_is_refused(name: str, tmp_path: Path) -> None:
    from fullshard.checkpoint.hugging_face.conversions import NotMoved, Rows

    _, source, stored = _four(tmp_path, (6, 10))
    with pytest.raises(NotMoved):
        Rows(stored).follow(lambda labels: {f"{i}": t for i, t in enumerate(CHANGES[name](labels))})
    source.close()


# --- dtypes --------------------------------------------------------------------------------------------


def test_dtypes_are_cast_and_rounding_is_noted(tmp_path: Path, pretrained: Path) -> None:
    half, brain = torch.float16, torch.bfloat16
    build("llama").to(brain).save_pretrained(tmp_path / "bf16")
    build("llama").to(half).save_pretrained(tmp_path / "fp16")
    values = {"values": True}
    low = values | {"dtype": brain}
    paths = {"fp32": str(pretrained / "llama")} | {d: str(tmp_path / d) for d in ("bf16", "fp16")}
    cases: dict[str, Case] = {
        "exact": ("llama", paths["bf16"], values),
        "masters": ("llama", paths["bf16"], low | {"shard": {"precision": "bf16"}}),
        "rounded": ("llama", paths["fp32"], low),
        "same width": ("llama", paths["fp16"], low),
        "the other": ("llama", paths["bf16"], values | {"dtype": half}),
    }
    state = build("llama").state_dict()
    for rank, found in enumerate(load_each(cases)):
        assert same(found["exact"]["outputs"], {k: v.to(brain).float() for k, v in state.items()})
        assert same(found["masters"]["outputs"], {k: v.to(brain).float() for k, v in state.items()})
        assert same(found["rounded"]["outputs"], {k: v.to(brain) for k, v in state.items()})
        assert same(found["same width"]["outputs"], {k: v.to(half).to(brain) for k, v in state.items()})
        assert found["exact"]["notes"] == found["masters"]["notes"] == ()
        for label, kept, now in (
            ("rounded", torch.float32, brain),
            ("same width", half, brain),
            ("the other", brain, half),
        ):
            note = f"values stored as {kept} were rounded to {now}"
            assert found[label]["notes"] == (note,), label
            assert found[label]["warned"] == ([note] if rank == 0 else []), label


# --- adapters and compiled blocks ----------------------------------------------------------------------


def _save_lora(path: str) -> dict[str, Tensor]:
    import fullshard as fs

    family = zoo.FAMILIES["lora"]
    model = fs.shard(build("lora").train())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    family.loss(model, family.batch(0)).backward()
    optimizer.step()
    fs.save(path, model, optimizer)
    with fs.full(model, writeback=False):
        return {name: value.clone() for name, value in model.state_dict().items()}


def test_adapters_and_their_frozen_base_come_back_by_name(tmp_path: Path, pretrained: Path) -> None:
    path = tmp_path / "lora"
    values = ranks.run(_save_lora, 2, str(path))[0]
    before = build("lora").state_dict()
    assert values.keys() == before.keys()
    trained = {name for name in values if not torch.equal(values[name], before[name])}
    assert trained == {name for name in values if ".lora_" in name}
    assert same(tensors_of(path), values)
    assert not (path / "config.json").exists()  # from_pretrained would start from random values
    loose = {"values": True, "strict": False}
    cases: dict[str, Case] = {
        "own": ("lora", str(path), {"values": True}),
        "lora": ("lora", str(pretrained / "llama-cut"), loose),
        "lora_head": ("lora_head", str(pretrained / "llama-cut"), loose),
    }
    for found in load_each(cases, 3):
        assert same(found["own"]["outputs"], values)
        for name in ("lora", "lora_head"):
            other = build(name, seed=1).state_dict()
            assert same(found[name]["outputs"], other | _in_adapters(other, build("llama").state_dict()))
            (note,) = found[name]["notes"]
            assert note.startswith("not in the checkpoint, left as they were:")
            assert "lora_A" in note


def _in_adapters(names: dict[str, Tensor], base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The base model's values under every name that peft has for them; none is left over."""
    found: dict[str, Tensor] = {}
    for name, value in base.items():
        head, _, tail = f"base_model.model.{name}".rpartition(".")
        wrapped = ("", "base_layer.", "original_module.", "modules_to_save.default.")
        places = [f"{head}.{wrap}{tail}" for wrap in wrapped if f"{head}.{wrap}{tail}" in names]
        assert places, name
        found |= dict.fromkeys(places, value)
    return found


def test_config_is_written_for_plain_models_of_transformers_alone() -> None:
    from peft import LoraConfig

    from fullshard.checkpoint.save import model_files

    model = build("llama")
    assert model_files(model, None).keys() == {"config.json", "generation_config.json"}
    assert model_files(build("lora"), None) == {}
    assert model_files(build("scored"), None) == {}
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    assert model_files(model, None) == {}


def _save_compiled(root: str) -> None:
    import fullshard as fs

    blocks = build("llama")
    for i, layer in enumerate(blocks.model.layers):
        blocks.model.layers[i] = torch.compile(layer)
    fs.save(Path(root) / "blocks", fs.shard(blocks))
    in_place = build("llama")
    for layer in in_place.model.layers:
        layer.compile()
    fs.save(Path(root) / "in_place", fs.shard(in_place))
    fs.save(Path(root) / "whole", fs.shard(torch.compile(build("llama"))))


def _with_compiled_blocks(model: Any) -> None:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer)


def test_compiled_blocks_have_plain_names_in_the_files(tmp_path: Path, pretrained: Path) -> None:
    from transformers import AutoModelForCausalLM

    ranks.run(_save_compiled, 2, str(tmp_path))
    plain = build("llama").state_dict()
    for folder in ("blocks", "in_place", "whole"):
        assert same(tensors_of(tmp_path / folder), plain), folder
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), folder
        assert same(model.state_dict(), plain), folder
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
    options = {"prepare": _with_compiled_blocks, "values": True}
    for found in load_each({"blocks": ("llama", str(pretrained / "llama-cut"), options)}):
        values = {k.replace("_orig_mod.", ""): v for k, v in found["blocks"]["outputs"].items()}
        assert same(values, plain)


# --- memory --------------------------------------------------------------------------------------------
# Last, because it needs ranks of its own: what others have left in the allocator would hide its growth.

WIDE = 6144


def _growth(paths: list[str]) -> list[int]:
    """Peak of resident memory while each path is loaded, above what was there before."""
    import fullshard as fs

    model = nn.Linear(WIDE, WIDE, bias=False, device="meta")
    model = fs.shard(model, materialize=lambda module: nn.init.zeros_(module.weight))
    found = []
    for path in paths:
        fs.load(path, model)  # once, so that what is allocated only once is there
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        fs.load(path, model)
        found.append(_status("VmHWM") - before)
    assert sum(p.nbytes for p in model.parameters()) == WIDE * WIDE * 4 // 2
    return found


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def test_loading_a_large_directory_takes_little_memory(tmp_path: Path) -> None:
    value = torch.zeros(WIDE, WIDE)  # 144 MiB
    paths = []
    for dtype in (torch.float32, torch.bfloat16):
        paths.append(tmp_path / str(dtype))
        paths[-1].mkdir()
        safetensors.torch.save_file({"weight": value.to(dtype)}, paths[-1] / "model.safetensors")
    for growths in ranks.run(_growth, 2, [str(path) for path in paths], timeout_s=120, fresh=True):
        assert max(growths) < 32 * 2**20, growths
