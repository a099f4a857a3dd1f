"""The planner's choice through Hugging Face and Lightning; `fullshard train` has it in test_train.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_accelerate import Net
from test_hf_options import _prepared

import fullshard as fs
import hf_runs
import ranks
from fullshard.link_speeds import remember_rates
from fullshard.planning.machines import as_values, described
from lightning_cases import Lit, assert_same_run, fitted, sharded


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rates of a card in place of measured ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remember_rates(as_values(described("h100")))
    return tmp_path


def _choices_of_accelerate(folder: str) -> dict[str, Any]:
    os.environ["XDG_CACHE_HOME"] = folder
    found = {}
    os.environ["FULLSHARD_PLAN"] = "auto"
    try:
        found["variable"] = fs.plan(_prepared({})).choice.to_dict()
        found["kept"] = fs.plan(_prepared({"reshard_after_forward": "SHARD_GRAD_OP"})).choice.to_dict()
        file = Path(folder) / f"plan-{torch.distributed.get_rank()}.json"
        file.write_text(json.dumps({"settings": {"strategy": "replicate"}}))
        os.environ["FULLSHARD_PLAN"] = str(file)
        found["file"] = fs.plan(_prepared({})).strategy
        os.environ["FULLSHARD_PLAN"] = "no/such/plan.yaml"
        found["no file"] = _prepared({})
    finally:
        del os.environ["FULLSHARD_PLAN"]
    assert fs.plan(_prepared({})).choice is None
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from fullshard.hugging_face import options

    hf_runs.forget()
    with options(plan=fs.Planning(tokens=64)):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        model = Net()
        prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
        found["options"] = fs.plan(prepared).choice.to_dict()
    hf_runs.forget()
    return found


def test_accelerate_prepares_models_as_planned(folder: Path) -> None:
    first, second = ranks.run(_choices_of_accelerate, 2, str(folder), timeout_s=120)
    assert first == second
    assert first["variable"]["settings"]["strategy"] in ("replicate", "zero2", "zero3")
    assert first["kept"]["settings"]["strategy"] == "zero2"
    assert first["file"] == "replicate"
    assert first["no file"].startswith("OptionError: the plan 'no/such/plan.yaml' cannot be read")
    assert first["options"]["ranks"] == 2


def _fits(folder: str) -> list[Any]:
    os.environ["XDG_CACHE_HOME"] = folder
    return [fitted(Lit, sharded(strategy="auto")), fitted(Lit, sharded(plan={"tokens": 64}))]


def test_lightning_fits_as_planned_with_the_numbers_of_plain_lightning(folder: Path) -> None:
    found, plain = ranks.run(_fits, 2, str(folder), timeout_s=120), fitted(Lit)
    for runs in zip(*found, strict=True):
        assert_same_run(list(runs), plain)
