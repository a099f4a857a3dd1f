"""`fullshard inspect`, `verify` and `export`: what they print, what they find, what they refuse."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fullshard as fs
import ranks
import reference
import warm
from fullshard.checkpoint import files
from fullshard.checkpoint.format import manifest
from fullshard.tools import cli

MIB = 2**20


class Net(nn.Module):
    """A table of two blocks of bytes, tied; statistics that differ by rank; a value that fp16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(600, 512)
        self.blocks = nn.ModuleList(nn.Linear(512, 16) for _ in range(11))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(512, 600, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.tensor([1e6, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        y = self.norm(sum(block(x) for block in self.blocks))
        return y.sum() + self.head(x).square().mean()


def _gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32)
    return GPT2LMHeadModel(config)


def _save(root: str) -> dict[str, torch.Tensor]:
    import torch.distributed as dist

    rank = dist.get_rank()
    model = fs.shard(Net())
    # One group for what has more than one dimension, as is usual.
    parameters = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in parameters if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in parameters if not n.endswith("weight")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    model(torch.arange(16) * 7 + rank * 200).backward()
    optimizer.step()
    extra = {"step": 1, "sampler": {"epoch": 2, "at": (3, 4)}, "seed": 100 + rank, "mask": torch.ones(9000)}
    fs.save(f"{root}/run/step-1", model, optimizer, extra=extra, files="shared")
    fs.save(f"{root}/run/step-2", model, optimizer, extra=extra | {"step": 2}, files="parts")
    gpt = fs.shard(_gpt())
    fs.save(f"{root}/gpt/shared", gpt, files="shared")
    fs.save(f"{root}/gpt/parts", gpt, files="parts")
    with fs.full(model, writeback=False):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class Made:
    """Checkpoints of two ranks, and the first rank's whole values. Tests that change something copy it."""

    root: Path
    values: dict[str, torch.Tensor]

    @property
    def shared(self) -> Path:
        return self.root / "run" / "step-1"

    @property
    def parts(self) -> Path:
        return self.root / "run" / "step-2"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("command")
    return Made(root, ranks.run(_save, 2, str(root), init=True, timeout_s=120)[0])


def _main(*arguments: str | Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(one) for one in arguments])
    return code, out.getvalue(), err.getvalue()


def _json(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code, out, err = _main(*arguments, "--json")
    assert not err
    return code, json.loads(out)


def _command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """As a user runs it."""
    return subprocess.run(
        [f"{warm.commands()}/fullshard", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def _places(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes are, as the safetensors header says."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (8 + length + said["data_offsets"][0], 8 + length + said["data_offsets"][1])
        for name, said in header.items()
    }


def _change_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another manifest, with the checksum that it must have."""
    body = json.loads((folder / manifest.NAME).read_bytes())
    body.pop("sha256")
    change(body)
    rest = b'",' + json.dumps(body, separators=(",", ":")).encode()[1:]
    digest = hashlib.sha256(rest).hexdigest().encode()
    (folder / manifest.NAME).write_bytes(b'{"sha256":"' + digest + rest)


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """The checkpoint with shared files, to be changed."""
    return Path(shutil.copytree(made.shared, tmp_path / "step-1"))


# --- inspect ----------------------------------------------------------------------------------------------


def test_inspect_says_what_a_checkpoint_holds(made: Made) -> None:
    found = _command("inspect", made.shared)
    assert (found.returncode, found.stderr) == (0, "")
    lines = {" ".join(line.split()) for line in found.stdout.splitlines()}
    elements = sum(v.numel() for n, v in made.values.items() if n != "head.weight")
    assert f"{made.shared}: a checkpoint of fullshard" in lines
    assert "ranks 2, strategy zero3, shared files" in lines
    assert f"model 29 tensors, {elements:,} elements (int64 1, float32 {elements - 1:,})" in lines
    assert "tied 'head.weight' is 'table.weight'" in lines
    assert "extra step: 1" in lines
    assert "sampler: {'epoch': 2, 'at': (3, 4)}" in lines
    assert "mask: tensor of float32 [9000]" in lines
    assert "by rank extra seed: 100, 101" in lines
    assert "'norm.running_mean' is not the first rank's on 1" in lines
    assert "random numbers: numpy, python, torch" in lines
    assert "state exp_avg, exp_avg_sq, step" in lines
    assert any(
        line.startswith("group 0 of 13 parameters: lr 0.001, weight_decay 0.1, betas") for line in lines
    )
    assert f"saved {_saved_at(made.shared)} by fullshard {fs.__version__}, torch {torch.__version__}" in lines


def _saved_at(folder: Path) -> str:
    from datetime import UTC, datetime

    said = json.loads((folder / manifest.NAME).read_text())["saved_at_ns"]
    return datetime.fromtimestamp(said // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@pytest.mark.parametrize("which", ["shared", "parts"])
def test_inspect_answers_programs_with_the_same_facts(made: Made, which: str) -> None:
    folder = getattr(made, which)
    code, said = _json("inspect", folder)
    assert code == 0
    own = {name: value for name, value in made.values.items() if name != "head.weight"}
    elements = sum(value.numel() for value in own.values())
    assert said["model"] == {
        "tensors": len(own), "elements": elements, "dtypes": {"float32": elements - 1, "int64": 1},
    }  # fmt: skip
    trained = sum(value.numel() for name, value in own.items() if re.search("weight$|bias$", name))
    assert said["optimizer"]["elements"] == 2 * trained + 25  # and a step for each parameter
    assert [g["parameters"] for g in said["optimizer"]["groups"]] == [13, 12]
    assert [g["options"]["weight_decay"] for g in said["optimizer"]["groups"]] == [0.1, 0.0]
    assert said["extra"]["step"] == (1 if which == "shared" else 2)
    assert said["by_rank"]["extra"] == {"seed": [100, 101]}
    assert said["by_rank"]["values"] == {"norm.running_mean": [1], "norm.running_var": [1]}
    assert said["layout"]["files"] == which
    on_disk = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert said["files"] | {"fullshard.json": said["manifest_bytes"]} == on_disk
    assert said["problems"] == said["not_in_manifest"] == []


def test_inspect_lists_the_tensors_that_another_reader_sees(made: Made) -> None:
    _, said = _json("inspect", made.shared, "--tensors")
    listed = {(one["kind"], one["name"]): (one["dtype"], one["shape"]) for one in said["tensors"]}
    expected = {}
    for kind in ("model", "optimizer"):
        for name, value in load_file(made.shared / f"{kind}.safetensors").items():
            expected[kind, name] = (str(value.dtype).removeprefix("torch."), list(value.shape))
    assert listed == expected
    _, parts = _json("inspect", made.parts, "--tensors")
    assert {(o["kind"], o["name"]): (o["dtype"], o["shape"]) for o in parts["tensors"]} == expected
    _, text, _ = _main("inspect", made.parts, "--tensors")
    assert re.search(r"^  blocks\.10\.bias\.exp_avg +float32 \[16\]$", text, re.MULTILINE)


def test_inspect_shows_a_damaged_checkpoint_and_says_so(copy: Path) -> None:
    with (copy / "optimizer.safetensors").open("r+b") as file:
        file.truncate(100)
    (copy / "extra.safetensors").unlink()
    (copy / "tokenizer.json").write_text("{}")
    code, out, _ = _main("inspect", copy)
    assert code == 1
    assert "DAMAGED    optimizer.safetensors was cut short: it has 100 bytes" in out
    assert "DAMAGED    extra.safetensors is missing" in out
    assert "not in the manifest: 'tokenizer.json'" in out
    assert "step: 1" in out


def test_inspect_finds_a_damaged_header(copy: Path) -> None:
    _flip(copy / "model.safetensors", 12)
    code, said = _json("inspect", copy)
    assert code == 1
    assert "checksum differs" in said["problems"][0]


def test_inspect_of_a_damaged_manifest_is_one_line_and_exit_code_1(copy: Path) -> None:
    _flip(copy / "fullshard.json", 500)
    code, out, err = _main("inspect", copy)
    assert (code, out) == (1, "")
    assert err.startswith("fullshard: 'fullshard.json' does not have the checksum")
    assert err.count("\n") == 1


def test_names_in_a_checkpoint_cannot_steer_the_terminal(copy: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["extra"] = {"\x1b[31mred": "\x1b]0;title\x07", "deep": [[[[[[[[1]]]]]]]], "odd": {"$tensor": 3}}

    _change_manifest(copy, change)
    _, out, _ = _main("inspect", copy, "--tensors")
    assert "\x1b" not in out
    assert "\\x1b[31mred" in out
    assert "odd: a value that cannot be read" in out


def _run_folder(made: Made, tmp_path: Path) -> Path:
    """A folder as a long run leaves it."""
    root = tmp_path / "run"
    shutil.copytree(made.root / "run", root)
    torn = root / ".step-3.saving-0123456789abcdef"
    shutil.copytree(made.shared, torn)
    (torn / manifest.NAME).unlink()
    shutil.copytree(made.shared, root / ".step-1.retired-0123456789abcdef")
    shutil.copytree(made.shared, root / "broken")
    _flip(root / "broken" / manifest.NAME, 300)
    (root / "notes").mkdir()
    (root / "log.txt").write_text("")
    return root


def test_inspect_lists_a_folder_of_checkpoints_and_marks_the_newest(made: Made, tmp_path: Path) -> None:
    root = _run_folder(made, tmp_path)
    code, said = _json("inspect", root)
    assert code == 1  # one is damaged
    found = {one["name"]: one for one in said["checkpoints"]}
    states = {name: one["state"] for name, one in found.items()}
    assert states == {
        "step-1": "complete",
        "step-2": "complete",
        "broken": "damaged",
        ".step-3.saving-0123456789abcdef": "unfinished",
        ".step-1.retired-0123456789abcdef": "complete",
    }
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert fs.latest(root) == root / "step-2"
    assert [name for name, one in found.items() if one["newest"]] == ["step-2"]
    assert (found["step-1"]["step"], found["step-2"]["step"], found["step-2"]["ranks"]) == (1, 2, 2)
    assert found["step-2"]["bytes"] == sum(path.stat().st_size for path in (root / "step-2").iterdir())
    shutil.rmtree(root / "broken")
    code, out, _ = _main("inspect", root)
    assert code == 0
    (newest,) = [line for line in out.splitlines() if "newest" in line]
    assert re.match(r"  step-2 +step 2 +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC +[\d.]+ MB +2 ranks", newest)
    (torn,) = [line for line in out.splitlines() if "unfinished" in line]
    assert torn.split()[0] == ".step-3.saving-0123456789abcdef"


def test_inspect_finds_a_checkpoint_that_a_crash_left_under_a_hidden_name(made: Made, tmp_path: Path) -> None:
    hidden = tmp_path / ".step-1.saving-0123456789abcdef"
    shutil.copytree(made.shared, hidden)
    code, out, _ = _main("inspect", tmp_path / "step-1")
    assert code == 0
    assert out.startswith(f"{hidden}: a checkpoint of fullshard")
    assert "a crash left it under this hidden name" in out
    assert _main("verify", tmp_path / "step-1")[0] == 0


def test_unfinished_save_is_inspected_and_verified_as_what_it_is(made: Made, tmp_path: Path) -> None:
    torn = tmp_path / ".step-1.saving-0123456789abcdef"
    shutil.copytree(made.shared, torn)
    whole = (torn / manifest.NAME).read_bytes()
    with (torn / "optimizer.safetensors").open("r+b") as file:
        file.truncate(1000)
    for left in (whole[:1000], None):  # a manifest that was only begun counts for nothing
        (torn / manifest.NAME).write_bytes(left) if left else (torn / manifest.NAME).unlink()
        code, out, err = _main("inspect", torn)
        assert (code, err) == (1, "")
        assert "a save that was not finished" in out
        assert "model.safetensors" in out
        code, said = _json("verify", torn)
        assert (code, said["kind"], said["sound"]) == (1, "unfinished", False)
        assert said["files"]["model.safetensors"] is None
        assert said["files"]["optimizer.safetensors"]
    code, _, err = _main("inspect", tmp_path / "step-1")
    assert code == 2
    assert "A save of it was not finished" in err


def test_inspect_describes_a_hugging_face_model(tmp_path: Path) -> None:
    model = _gpt()
    model.save_pretrained(tmp_path / "hf", max_shard_size="8KB")  # type: ignore[operator]
    code, said = _json("inspect", tmp_path / "hf", "--tensors")
    assert (code, said["kind"], said["architectures"]) == (0, "model", ["GPT2LMHeadModel"])
    own = dict(model.named_parameters())
    assert {one["name"]: one["shape"] for one in said["tensors"]} == {
        n: list(p.shape) for n, p in own.items()
    }
    assert said["model"]["elements"] == sum(p.numel() for p in own.values())
    one_file = next((tmp_path / "hf").glob("model-00001-*.safetensors"))
    code, out, _ = _main("inspect", one_file)
    assert code == 0
    assert "tensors" in out


# --- verify -----------------------------------------------------------------------------------------------


def test_verify_runs_as_a_command(made: Made) -> None:
    found = _command("verify", made.shared)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(f"{made.shared}: sound. ")


@pytest.mark.parametrize("which", ["shared", "parts"])
def test_verify_finds_a_checkpoint_sound(made: Made, which: str) -> None:
    folder = getattr(made, which)
    code, said = _json("verify", folder)
    sizes = [path.stat().st_size for path in folder.iterdir() if path.name != manifest.NAME]
    assert (code, said["sound"], said["files"], said["bytes"]) == (0, True, len(sizes), sum(sizes))
    assert said["blocks"] == sum(-(-size // MIB) for size in sizes)


def test_verify_names_every_damaged_place_and_the_tensors_there(copy: Path) -> None:
    """Four bits in two files, two of them in one block."""
    path = copy / "optimizer.safetensors"
    size, places = path.stat().st_size, _places(path)
    last = size // MIB * MIB
    assert last > 2 * MIB
    for at in (MIB + 5, 2 * MIB - 1, size - 1):
        _flip(path, at)
    _flip(copy / "extra.safetensors", 5000)
    code, said = _json("verify", copy)
    assert (code, said["sound"], said["damaged_blocks"]) == (1, False, 3)
    damage = {(one["file"], one["begin"], one["end"]): one for one in said["damage"]}
    assert set(damage) == {
        ("optimizer.safetensors", MIB, 2 * MIB),
        ("optimizer.safetensors", last, size),
        ("extra.safetensors", 0, (copy / "extra.safetensors").stat().st_size),
    }
    for (file, begin, end), one in damage.items():
        if file == "extra.safetensors":  # a single block
            assert one["tensors"] == ["extra['mask']"]
            assert "the header is there as well" in one["what"]
        else:
            assert one["what"] == "the checksum differs"
            there = {name for name, (low, high) in places.items() if low < end and begin < high}
            assert set(one["tensors"]) == there
            assert there
    code, out, _ = _main("verify", copy)
    assert code == 1
    assert "DAMAGED" in out
    assert "optimizer.safetensors, bytes 1048576 to " in out


@pytest.mark.parametrize("which", ["shared", "parts"])
def test_verify_finds_a_bit_flipped_in_any_file(made: Made, tmp_path: Path, which: str) -> None:
    folder = Path(shutil.copytree(getattr(made, which), tmp_path / "copy"))
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        for at in (0, 8, size // 2, size - 1):
            _flip(path, at)
            code, said = _json("verify", folder)
            assert (code, said["sound"]) == (1, False), (path, at)
            assert {one["file"] for one in said["damage"]} >= {path.name}
            _flip(path, at)
    assert _main("verify", folder)[0] == 0


def test_verify_says_what_is_missing_cut_short_and_appended(copy: Path) -> None:
    (copy / "extra.safetensors").unlink()
    size = (copy / "optimizer.safetensors").stat().st_size
    cut = MIB + 1000
    with (copy / "optimizer.safetensors").open("r+b") as file:
        file.truncate(cut)
    with (copy / "model.safetensors").open("ab") as file:
        file.write(b"more")
    (copy / "README.md").write_text("not checked")
    code, said = _json("verify", copy)
    assert code == 1
    damage = {one["file"]: one for one in said["damage"]}
    assert set(damage) == {"extra.safetensors", "optimizer.safetensors", "model.safetensors"}
    assert "missing" in damage["extra.safetensors"]["what"]
    assert "cut short" in damage["optimizer.safetensors"]["what"]
    assert (damage["optimizer.safetensors"]["begin"], damage["optimizer.safetensors"]["end"]) == (MIB, size)
    assert "blocks.0.weight.exp_avg" in damage["optimizer.safetensors"]["tensors"]
    model = damage["model.safetensors"]
    assert "appended" in model["what"]
    assert model["end"] - model["begin"] == 4
    assert said["not_in_manifest"] == ["README.md"]


def test_verify_says_that_a_damaged_header_leaves_nothing_to_name(copy: Path) -> None:
    _flip(copy / "model.safetensors", 20)
    _, said = _json("verify", copy)
    (one,) = said["damage"]
    assert "the header is damaged" in one["what"]
    assert one["tensors"] == []


def test_verify_goes_on_with_what_a_damaged_manifest_still_says(copy: Path) -> None:
    path = copy / manifest.NAME
    said = path.read_bytes()
    at = said.index(b'"saved_at_ns":') + len(b'"saved_at_ns":')
    path.write_bytes(said[:at] + b"3" + said[at + 1 :])
    _flip(copy / "extra.safetensors", 4000)
    code, found = _json("verify", copy)
    assert code == 1
    assert [one["file"] for one in found["damage"]] == [manifest.NAME, "extra.safetensors"]
    path.write_bytes(b"\x00" * 100)
    code, found = _json("verify", copy)
    assert (code, [one["file"] for one in found["damage"]]) == (1, [manifest.NAME])


def test_verify_finds_a_value_that_the_files_do_not_hold(copy: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["extra"]["mask"]["$tensor"]["at"] = "elsewhere"
        body["optimizer_state"]["state"]["norm.bias"]["forgotten"] = {"kind": "elements", "device": "host"}

    _change_manifest(copy, change)
    code, said = _json("verify", copy)
    assert code == 1
    assert said["damage"] == []
    assert said["problems"] == [
        "extra.safetensors does not hold 'elsewhere'",
        "optimizer state 'norm.bias.forgotten' is not in the files",
    ]


def test_newer_format_is_not_called_damaged(copy: Path) -> None:
    _change_manifest(copy, lambda body: body.update(version=2))
    for command in (("inspect",), ("verify",), ("export", "--to", str(copy.parent / "out"))):
        code, out, err = _main(*command, copy)
        assert (code, out) == (2, "")
        assert "format version 2" in err


def test_verify_checks_the_form_of_a_hugging_face_model(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    code, out, _ = _main("verify", tmp_path)
    assert code == 0
    assert "1 tensor of 400 B. It has no checksums" in out
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(200)
    code, _, err = _main("verify", tmp_path)
    assert code == 1
    assert "cut short" in err


# --- export -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["shared", "parts"])
def test_exported_model_is_what_safetensors_and_the_module_load(
    made: Made, tmp_path: Path, which: str
) -> None:
    code, _, err = _main("export", getattr(made, which), "--to", tmp_path / "out")
    assert (code, err) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "fullshard.json",
        "model.safetensors",
    ]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    model = Net()
    missing = model.load_state_dict(loaded, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["head.weight"], [])
    for name, value in model.state_dict().items():
        assert reference.bitwise(value, made.values[name]), name
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16"), ("--file-size", "20kB")])
def test_parts_and_shared_files_are_exported_to_the_same_bytes(
    made: Made, tmp_path: Path, options: tuple[str, ...]
) -> None:
    for which in ("shared", "parts"):
        assert _main("export", getattr(made, which), "--to", tmp_path / which, *options)[0] == 0
        assert _main("export", made.root / "gpt" / which, "--to", tmp_path / f"gpt-{which}", *options)[0] == 0
    for one, other in (("shared", "parts"), ("gpt-shared", "gpt-parts")):
        ours = {p.name: p.read_bytes() for p in (tmp_path / one).iterdir() if p.name != manifest.NAME}
        theirs = {p.name: p.read_bytes() for p in (tmp_path / other).iterdir() if p.name != manifest.NAME}
        assert ours == theirs


def test_exported_gpt_is_loaded_by_from_pretrained(made: Made, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = _gpt()
    target = tmp_path / "out"
    assert _main("export", made.root / "gpt" / "parts", "--to", target, "--file-size", "8kB")[0] == 0
    for name in ("config.json", "generation_config.json"):
        assert (target / name).read_bytes() == (made.root / "gpt" / "parts" / name).read_bytes()
    weights = sorted(target.glob("model-*.safetensors"))
    assert len(weights) > 3
    for path in weights:  # at most 8 kB of tensors, unless it is a single one
        places = _places(path)
        assert sum(end - begin for begin, end in places.values()) <= 8000 or len(places) == 1
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert type(loaded) is type(model)
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert reference.bitwise(ours, theirs), name
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_export_casts_floating_point_tensors_alone(made: Made, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert _main("export", made.shared, "--to", tmp_path / "net", "--dtype", "bf16")[0] == 0
    loaded = load_file(tmp_path / "net" / "model.safetensors")
    for name, value in loaded.items():
        own = made.values[name]
        expected = own.bfloat16() if own.is_floating_point() else own
        assert reference.bitwise(value, expected), name
    assert loaded["norm.num_batches_tracked"].dtype == torch.int64
    assert _main("export", made.root / "gpt" / "shared", "--to", tmp_path / "gpt", "--dtype", "bf16")[0] == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt")
    assert model.dtype == torch.bfloat16  # as config.json now says
    assert reference.bitwise(model.transformer.wte.weight, _gpt().transformer.wte.weight.bfloat16())


def test_export_refuses_a_cast_that_would_make_values_infinite(made: Made, tmp_path: Path) -> None:
    code, _, err = _main("export", made.shared, "--to", tmp_path / "out", "--dtype", "fp16")
    assert code == 2
    assert "'scale' holds values beyond torch.float16" in err
    assert list(tmp_path.iterdir()) == []


def test_exported_model_can_be_verified_and_inspected(made: Made, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    found = _command("export", made.root / "gpt" / "shared", "--to", target, "--file-size", "8kB")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(f"{target}: 28 tensors, ")
    code, said = _json("verify", target)
    assert (code, said["sound"]) == (0, True)
    assert said["files"] == len(list(target.iterdir())) - 1
    code, out, _ = _main("inspect", target)
    assert code == 0
    assert "a model exported from a checkpoint of fullshard" in out
    _flip(target / "config.json", 40)
    code, said = _json("verify", target)
    assert (code, [one["file"] for one in said["damage"]]) == (1, ["config.json"])


def _load_export(folder: str, root: str) -> dict[str, torch.Tensor]:
    model = Net()
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.fill_(3)
    model = fs.shard(model)
    loaded = fs.load(folder, model)
    assert loaded == {}
    assert loaded.notes == ()
    fs.save(f"{root}/step-9", model, keep_last=1)
    with fs.full(model, writeback=False):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_exported_model_is_loaded_by_ranks_and_is_nobodys_old_checkpoint(made: Made, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(made.shared, root / "step-1")
    assert _main("export", root / "step-1", "--to", root / "final")[0] == 0
    assert fs.latest(root) == root / "step-1"
    for found in ranks.run(_load_export, 2, str(root / "final"), str(root), init=True):
        for name, value in found.items():
            assert reference.bitwise(value, made.values[name]), name
    # keep_last=1 has removed nothing: step-1 is another run's, and what was exported is nobody's.
    assert sorted(path.name for path in root.iterdir()) == ["final", "step-1", "step-9"]
    assert fs.latest(root) == root / "step-9"
    _, said = _json("inspect", root)
    assert [one["name"] for one in said["checkpoints"] if one["newest"]] == ["step-9"]


def test_export_overwrites_nothing(made: Made, copy: Path, tmp_path: Path) -> None:
    full, file, empty = tmp_path / "full", tmp_path / "file", tmp_path / "empty"
    full.mkdir()
    (full / "mine").write_text("mine")
    file.write_text("mine")
    empty.mkdir()
    for target in (full, file, copy, copy / "inside", copy.parent / ".hidden", made.parts):
        before = sorted(tmp_path.rglob("*"))
        code, out, err = _main("export", copy, "--to", target)
        assert (code, out) == (2, ""), target
        assert err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
    assert (full / "mine").read_text() == file.read_text() == "mine"
    assert _main("export", copy, "--to", empty)[0] == 0
    assert (empty / "model.safetensors").exists()


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_damaged_checkpoint_is_not_exported(copy: Path, tmp_path: Path, form: str) -> None:
    path = copy / "model.safetensors"
    _flip(path, path.stat().st_size - 1)
    code, out, err = _main("export", copy, "--to", tmp_path / "out", "--format", form)
    assert (code, out) == (1, "")
    assert "checksum differs" in err
    assert sorted(tmp_path.iterdir()) == [copy]


def test_export_onto_a_full_disk_leaves_nothing_behind(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.OpenFile, "write_at", full)
    code, _, err = _main("export", made.shared, "--to", tmp_path / "out")
    assert code == 2
    assert "No space left" in err
    assert "Free space there" in err
    assert list(tmp_path.iterdir()) == []


def test_export_says_what_it_did_not_copy(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    code, out, _ = _main("export", copy, "--to", tmp_path / "out")
    assert code == 0
    assert "not copied, because they are not in the manifest: 'tokenizer.json'" in out
    assert not (tmp_path / "out" / "tokenizer.json").exists()


# --- large ones -------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from fullshard.tools import cli
from fullshard.checkpoint.tools import export, inspecting, verifying
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
code = cli.main(sys.argv[1:])
print(code, peak() - before)
"""


def _large(folder: Path, size: int) -> None:
    """A checkpoint of one tensor of zeros, as large as is said; a file with a hole."""
    from fullshard.checkpoint.format.checksums import checksum
    from fullshard.checkpoint.format.headers import Tensor, build

    head, _ = build([Tensor("zeros", torch.float32, (size // 4,))])
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    blocks = [checksum(head.ljust(MIB, b"\0")), *[checksum(bytes(MIB))] * (size // MIB - 1)]
    blocks.append(checksum(bytes(len(head))))
    record = manifest.FileRecord(len(head) + size, tuple(blocks))
    said = manifest.Manifest(
        "0" * 16, 1, {}, {"ranks": 1, "files": "shared"}, MIB, {"model.safetensors": record},
        manifest.Count(1, size // 4), manifest.Count(),
    )  # fmt: skip
    (folder / manifest.NAME).write_bytes(manifest.to_bytes(said))


@pytest.mark.parametrize("command", ["verify", "export"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, command: str) -> None:
    size = 384 * MIB
    _large(tmp_path / "large", size)
    more = () if command == "verify" else ("--to", str(tmp_path / "out"), "--dtype", "bf16")
    found = subprocess.run(
        [sys.executable, "-c", PEAK, command, str(tmp_path / "large"), *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=700,
        check=True,
    )
    code, grown_mib = map(int, found.stdout.splitlines()[-1].split())
    assert code == 0, found.stderr
    assert grown_mib < 200, found.stdout  # a few chunks of 16 or 32 MiB; the tensor has 384
    if command == "export":
        assert (tmp_path / "out" / "model.safetensors").stat().st_size >= size // 2
        shutil.rmtree(tmp_path / "out")


# --- the command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("inspect",), "PATH"),
        (("inspect", "no/such"), "there is no 'no/such'"),
        (("inspect", "{empty}"), "is not a checkpoint, and contains none"),
        (("inspect", "{file}"), "is not a folder"),
        (("verify", "no/such"), "there is no 'no/such'"),
        (("verify", "{empty}"), "is not a checkpoint"),
        (("export", "{run}/step-1"), "--to"),
        (("export", "{run}", "--to", "{empty}/out"), "the newest is"),
        (("export", "{model}", "--to", "{empty}/out"), "not a complete checkpoint of fullshard"),
        (("export", "{run}/step-1", "--to", "{empty}/out", "--dtype", "int8"), "bf16"),
        (("export", "{run}/step-1", "--to", "{empty}/out", "--format", "zip"), "safetensors"),
        (("export", "{run}/step-1", "--to", "{empty}/out", "--file-size", "big"), "5GB"),
        (("export", "{run}/step-1", "--to", "{empty}/out", "--file-size", "0"), "5GB"),
        (("export", "{run}/step-1", "--to", "{empty}/out", "--file-size", "1e999"), "5GB"),
        (("export", "{run}/step-1", "--to", "{empty}/o", "--format", "dcp", "--dtype", "bf16"), "--dtype"),
        (("frobnicate",), "inspect"),
    ],
)
def test_wrong_request_is_one_line_with_its_remedy(
    made: Made, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "model").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    places = {name: tmp_path / name for name in ("empty", "file", "model")} | {"run": made.root / "run"}
    code, out, err = _main(*(one.format(**places) for one in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("fullshard: ")
    assert err.count("\n") == 1
    assert says in err
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize("command", ["inspect", "verify", "export", "simulate"])
def test_help_has_examples_and_exit_codes(command: str) -> None:
    code, out, err = _main(command, "--help")
    assert (code, err) == (0, "")
    assert f"  fullshard {command} " in out
    assert "Exit code 0:" in out
    assert max(map(len, out.splitlines())) <= 100


def test_inspecting_does_not_load_the_simulation(made: Made) -> None:
    code = (
        "import sys; from fullshard.tools import cli; "
        "codes = [cli.main([c, sys.argv[1]]) for c in ('inspect', 'verify')]; "
        "loaded = [n for n in sys.modules if n.startswith(('fullshard.tools.simulation', 'transformers'))]; "
        "assert codes == [0, 0] and not loaded, (codes, loaded)"
    )
    subprocess.run(
        [f"{warm.commands()}/python", "-c", code, str(made.shared)],
        check=True,
        timeout=300,
        capture_output=True,
    )


def test_reader_of_the_output_may_go_away(made: Made) -> None:
    """As in `fullshard inspect ... | head`: no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fullshard", "inspect", str(made.shared), "--tensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    try:
        assert process.stderr.read() == ""
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_cleared(made: Made) -> None:
    terminal = _Terminal()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(terminal):
        assert cli.main(["verify", str(made.shared)]) == 0
    shown = terminal.getvalue()
    size = sum(path.stat().st_size for path in made.shared.iterdir() if path.name != manifest.NAME)
    assert re.search(rf"checked .*{size / 1e6:.1f}/{size / 1e6:.1f} MB", shown), shown
    assert shown.endswith("\x1b[2K")  # the line is wiped


# --- torch.distributed.checkpoint -------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["shared", "parts"])
def test_export_writes_a_folder_that_dcp_reads(made: Made, tmp_path: Path, which: str) -> None:
    import torch.distributed.checkpoint as torch_dcp

    target = tmp_path / "out"
    code, _, err = _main("export", getattr(made, which), "--to", target, "--format", "dcp")
    assert (code, err) == (0, "")
    state = {"model": {name: torch.zeros_like(value) for name, value in made.values.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about the one process
        torch_dcp.load(state, checkpoint_id=target, no_dist=True)
    for name, value in state["model"].items():
        assert reference.bitwise(value, made.values[name]), name
    code, said = _json("inspect", target, "--tensors")
    assert (code, said["kind"]) == (0, "dcp")
    assert _main("verify", target)[0] == 0


def test_inspect_and_verify_count_the_tensors_of_a_dcp_folder(made: Made, tmp_path: Path) -> None:
    assert _main("export", made.shared, "--to", tmp_path / "out", "--format", "dcp")[0] == 0
    _, said = _json("inspect", tmp_path / "out", "--tensors")
    _, own = _json("inspect", made.shared, "--tensors")
    assert said["optimizer"]["tensors"] == own["optimizer"]["tensors"]
    listed = {one["name"]: one["shape"] for one in said["tensors"]}
    for name, value in made.values.items():
        assert listed[f"model.{name}"] == list(value.shape)
    _, checked = _json("verify", tmp_path / "out")
    assert checked["tensors"] == len(listed)
    assert checked["bytes"] > sum(value.nbytes for value in made.values.values())
