"""ONNX files from live sharded models and from checkpoints, run by onnxruntime beside the unsharded model."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_inference_generate import FAMILIES, _build
from torch import Tensor, nn

import engines
import ranks
from engines import WIDTH, Net, build, my_rank
from fullshard.errors import MissingExtra, OptionError
from fullshard.onnx import files, writing


def _run(file: Path, inputs: dict[str, Tensor]) -> list[np.ndarray[Any, Any]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.numpy() for name, value in inputs.items()})  # type: ignore[no-any-return]


def _x(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


# --- a live model --------------------------------------------------------------------------------------


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


class _Tied(Net):
    """A parameter used twice, a block whose forward somebody replaced, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 5, bias=False)
        self.again.weight = self.head.weight
        self.blocks[0].forward = _doubled  # type: ignore[method-assign]
        self.seen = 0
        self.register_forward_hook(self._look)

    def _look(self, *_: Any) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.again(x)


def _export_live(folder: str) -> tuple[list[str], float]:
    import fullshard as fs
    from fullshard.engine.hooks import Attached
    from fullshard.state.plain_copy import unsharded

    model = fs.shard(build(), precision="bf16", checkpoint_activations=True)
    optimizer = engines.sgd(model.parameters())
    with mock.patch.object(writing, "SEPARATE_BYTES", 0):  # as the weights of a large model are
        lines = files.export(model, Path(folder, "live.onnx"), {"x": _x(3 + my_rank())})
    loss = engines.loss_of(model, engines.batch(0, my_rank()))
    loss.backward()  # the model is as it was
    optimizer.step()

    tied = build(_Tied)
    want = tied(_x(2))
    fs.shard(tied)
    with fs.full(tied, writeback=False):
        plain: Any = unsharded(tied)
        assert not any(isinstance(v, Attached) for m in plain.modules() for v in vars(m).values())
        assert plain.again.weight is plain.head.weight
        torch.testing.assert_close(plain(_x(2)), want)
        assert (plain.seen, tied.seen) == (2, 1)
        assert "_fullshard" not in vars(plain)
        assert list(plain.state_dict()) == list(tied.state_dict())
    torch.testing.assert_close(tied(_x(2)), want)
    return lines, float(loss.detach())


def test_a_live_sharded_model_exports_its_values_at_rest_for_any_batch_and_trains_on(tmp_path: Path) -> None:
    (lines, loss), (also, _) = ranks.run(_export_live, 2, str(tmp_path), timeout_s=200)
    assert lines == also
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live.onnx", "live.onnx.data"]
    assert "x (batch, 8); outputs output" in lines[1]
    assert "onnxruntime" in lines[2]
    plain = build()
    for rows in (1, 7):
        [found] = _run(tmp_path / "live.onnx", {"x": _x(rows)})
        torch.testing.assert_close(torch.from_numpy(found), plain(_x(rows)).detach(), rtol=0, atol=1e-5)
    assert loss == pytest.approx(float(engines.loss_of(plain, engines.batch(0, 0)).detach()), abs=0.05)


class _Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), training=True)


class _Branching(_Random):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.sum()) > 0 else x


def _fail(folder: str) -> list[str]:
    import fullshard as fs

    found = []
    for kind in (_Random, _Branching):
        with pytest.raises(fs.FullshardError) as caught:
            files.export(fs.shard(build(kind)), Path(folder, "none.onnx"), {"x": _x(3)})
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def test_a_model_that_no_graph_computes_is_refused_on_all_ranks_and_nothing_is_left(tmp_path: Path) -> None:
    for random, branching in ranks.run(_fail, 2, str(tmp_path), timeout_s=200):
        assert random.startswith("ModelError")
        assert "differs from torch" in random
        assert branching.startswith("NotSupported")
        assert "_Branching" in branching
    assert list(tmp_path.iterdir()) == []


def test_exporting_an_unsharded_model_leaves_it_in_training(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.Dropout(0.5)).train()
    lines = files.export(model, tmp_path / "plain.onnx", {"input": _x(2)}, axes={})
    assert "input (2, 8)" in lines[1]
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    [found] = _run(tmp_path / "plain.onnx", {"input": _x(2)})
    torch.testing.assert_close(torch.from_numpy(found), model[0](_x(2)).detach())


# --- a checkpoint --------------------------------------------------------------------------------------


def _save(family: str, folder: str) -> list[Any]:
    import fullshard as fs

    model = _build(family, **({"n_layer": 1} if family == "gpt2" else {}))
    plain = copy.deepcopy(model)
    fs.shard(model, precision="bf16")
    fs.save(folder, model, torch.optim.AdamW(model.parameters()), dtype=torch.float32)
    ids = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, :2] = 0
    if family == "t5":
        inputs["decoder_input_ids"] = ids[:, :3]
    with torch.no_grad():
        return [inputs, plain(**inputs).logits]


def _from_checkpoint(folder: str, file: str) -> list[str]:
    return files.export_checkpoint(Path(folder), Path(file))


OTHERS = [pytest.param(family, marks=pytest.mark.long) for family in FAMILIES if family != "gpt2"]


@pytest.mark.parametrize("family", ["gpt2", *OTHERS])
def test_onnx_of_a_checkpoint_has_the_logits_of_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "saved", tmp_path / "model.onnx"
    [[inputs, want], _] = ranks.run(_save, 2, family, str(folder), timeout_s=200)
    [lines] = ranks.run(_from_checkpoint, 1, str(folder), str(file), timeout_s=200)
    assert FAMILIES[family][1] in lines[0]
    assert "input_ids (batch, sequence)" in lines[1]
    [found] = _run(file, inputs)
    kept = inputs["attention_mask"].bool() if family != "t5" else slice(None)
    torch.testing.assert_close(torch.from_numpy(found)[kept], want[kept], rtol=0, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "saved"]


def _gpt_exported(folder: str) -> list[Any]:
    """A built-in GPT as `fullshard train` saves it, through the command, which is a process of its own."""
    import fullshard as fs
    from fullshard.tools.cli import main
    from fullshard.training.gpt import GPT, GPTConfig

    here = Path(folder)
    model = GPT(GPTConfig(num_layers=1, num_heads=2, width=8, context=16, vocabulary=61))
    plain = copy.deepcopy(model)
    fs.save(here / "saved", fs.shard(model), torch.optim.AdamW(model.parameters()))
    torch.distributed.destroy_process_group()
    assert main(["export", str(here / "saved"), "--to", str(here / "plain"), "--dtype", "bf16"]) == 0
    assert main(["export", str(here / "saved"), "--onnx", str(here / "gpt.onnx")]) == 0
    tokens = torch.randint(61, (2, 5), generator=torch.Generator().manual_seed(1))
    return [tokens, plain(tokens).logits.detach(), GPTConfig.read(here / "plain") == plain.config]


def test_checkpoint_of_the_built_in_gpt_exports_with_its_shape_and_as_onnx(tmp_path: Path) -> None:
    [[tokens, want, is_same_shape]] = ranks.run(_gpt_exported, 1, str(tmp_path), init=False, timeout_s=200)
    assert is_same_shape
    [found] = _run(tmp_path / "gpt.onnx", {"tokens": tokens})
    torch.testing.assert_close(torch.from_numpy(found), want, rtol=0, atol=1e-4)


def _refuse(folder: str) -> list[str]:
    """By a process without a group, as the command line is."""
    import fullshard as fs

    here = Path(folder)
    found = []

    def refused(name: str, file: str = "new.onnx") -> None:
        with pytest.raises(fs.FullshardError) as caught:
            files.export_checkpoint(here / name, here / file)
        assert caught.value.remedy
        assert not torch.distributed.is_initialized()
        found.append(f"{type(caught.value).__name__}: {caught.value.what}")

    config = json.loads((here / "saved" / "config.json").read_text())
    for name, changes in {
        "unknown": {"architectures": ["BrandNewForCausalLM"]},
        "nothing": {"architectures": None},
        "images": {"architectures": ["ViTForImageClassification"]},
        "larger": {"n_embd": 64},
        "another": {"n_embd": 64},
    }.items():
        (here / name).mkdir()
        for path in (here / "saved").iterdir():
            (here / name / path.name).write_bytes(path.read_bytes())
        (here / name / "config.json").write_text(json.dumps({**config, **changes}))
    (here / "another" / "fullshard.json").unlink()  # so that nothing says what config.json must be
    (here / "bare").mkdir()
    for path in (here / "saved").iterdir():
        if path.name != "config.json":
            (here / "bare" / path.name).write_bytes(path.read_bytes())
    for name in ("unknown", "nothing", "images", "larger", "another", "bare", "missing", "."):
        refused(name)
    (here / "there.onnx").write_text("mine")
    refused("saved", "there.onnx")
    refused("saved", "nowhere/new.onnx")
    assert (here / "there.onnx").read_text() == "mine"
    return found


def test_a_checkpoint_that_cannot_be_exported_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    ranks.run(_save, 2, "gpt2", str(tmp_path / "saved"), timeout_s=200)
    [found] = ranks.run(_refuse, 1, str(tmp_path), timeout_s=200)
    unknown, nothing, images, larger, another, bare, missing, root, there, nowhere = found
    assert "NotSupported" in unknown
    assert "BrandNewForCausalLM" in unknown
    assert "None" in nothing
    assert "pixel_values" in images
    assert larger.startswith("DamagedCheckpoint: ")  # exit code 1
    assert another.startswith("DamagedCheckpoint: ")
    assert "no config.json" in bare
    assert "there is no" in missing
    assert "contains checkpoints" in root
    assert "exists; it was left as it is" in there
    assert "there is no folder" in nowhere
    left = {"saved", "unknown", "nothing", "images", "larger", "another", "bare", "there.onnx"}
    assert {path.name for path in tmp_path.iterdir()} == left


def _in_a_group() -> None:
    files.export_checkpoint(Path("/nowhere"), Path("/nowhere.onnx"))


def test_a_rank_of_several_does_not_export_a_checkpoint() -> None:
    errors = ranks.run(_in_a_group, 2, expect_error=True)
    assert {error.type_name for error in errors.values()} == {"OptionError"}


# --- what is asked -------------------------------------------------------------------------------------


def test_wrong_inputs_axes_and_missing_libraries_are_errors_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = nn.Linear(WIDTH, 2), tmp_path / "x.onnx"
    for inputs in ((_x(2),), {}, {"input": 3}):
        with pytest.raises(OptionError, match="inputs must be tensors"):
            files.export(model, file, inputs)  # type: ignore[arg-type]
    for axes in ({"other": {0: "batch"}}, {"input": {2: "batch"}}):
        with pytest.raises(OptionError, match="axes names"):
            files.export(model, file, {"input": _x(2)}, axes=axes)
    with pytest.raises(OptionError, match="forward takes no 'tokens'"):
        files.export(model, file, {"tokens": _x(2)})
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtra, match=r"\[onnx\]"):
        files.export(model, file, {"input": _x(2)})
    with pytest.raises(MissingExtra, match=r"\[onnx\]"):
        files.export_checkpoint(tmp_path, file)
    assert list(tmp_path.iterdir()) == []
