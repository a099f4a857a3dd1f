"""Hugging Face's offload options: values rest in host memory, and the steps are those of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from test_hf_accelerate import _loop
from test_hf_trainer import _uses, both
from torch import nn

import hf_runs
import ranks
from fullshard.engine.homes.model_device import show_compute_device

V1 = {"version": 1}
FORMS: list[dict[str, Any]] = [
    {"fsdp": "full_shard offload auto_wrap"},
    {"fsdp": "shard_grad_op offload", "fsdp_config": V1, "gradient_accumulation_steps": 2},
    {"fsdp": True, "fsdp_config": {"cpu_offload": True}, "optim": "adamw_torch_fused", "max_grad_norm": 0.4},
]


def test_trainer_takes_the_steps_of_one_process_however_offload_is_requested(tmp_path: Path) -> None:
    ours, plain = both(tmp_path, FORMS)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine["homes"] == {"host"}
        hf_runs.compare(mine["steps"], theirs["steps"])


def _resumed(folder: str) -> None:
    """Evaluation, prediction and generation; a run that is offloaded continues one that is not, and back."""
    plain, offloaded = {"fsdp": "full_shard"}, {"fsdp": "full_shard offload"}
    assert _uses(f"{folder}/uses", offloaded) == _uses(f"{folder}/uses", plain)
    expected: Any = None
    for first, second in ((plain, offloaded), (offloaded, plain)):
        for options, resume in ((first, False), (second, True)):
            hf_runs.forget()
            saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4 if resume else 2, "bf16": True}
            place = f"{folder}/{first['fsdp'].replace(' ', '-')}"
            saves |= {"lr_scheduler_type": "constant"}
            made = hf_runs.trainer(place, options | saves)
            made.train(resume_from_checkpoint=resume)
        expected = expected or hf_runs.steps(made)
        assert hf_runs.steps(made) == expected, first


def test_evaluation_generation_and_checkpoints_of_an_offloaded_run_have_the_bits_of_one_without(
    tmp_path: Path,
) -> None:
    ranks.run(_resumed, 2, str(tmp_path), timeout_s=240)


def _loops(folder: str) -> None:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    cases = {
        "environment": "true",
        "version 1": CPUOffload(offload_params=True),
        "version 2": True,
        "fp16": CPUOffloadPolicy(pin_memory=False),
    }
    for how, offload in cases.items():
        found = _loop(f"{folder}/{how}-offloaded", how, offload)
        expected = _loop(f"{folder}/{how}", how)
        assert (found.pop("homes"), expected.pop("homes")) == ({"host"}, {"device"}), how
        for key, value in expected.items():
            same = _equal(found[key], value)
            assert same, (how, key, found[key], value)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def test_a_loop_with_accelerate_has_the_bits_of_one_without_offload(tmp_path: Path) -> None:
    """Which has the numbers of one process: test_hf_accelerate.py."""
    ranks.run(_loops, 2, str(tmp_path), timeout_s=240)


class Placed(nn.Module):
    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


class Named(nn.Linear):
    device = "a name"  # type: ignore[assignment]


def test_a_models_own_device_is_where_it_computes_while_its_parameters_rest_on_the_host() -> None:
    class Around(Placed):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Named(2, 2)

    model, other = Around(), Around()
    show_compute_device(model)
    show_compute_device(model)
    gpu = torch.device("cuda", 1)
    for offload, expected in (("host", gpu), (None, torch.device("cpu"))):
        engine = SimpleNamespace(comm=SimpleNamespace(device=gpu), options=SimpleNamespace(offload=offload))
        model.__dict__["_fullshard"] = model.inner.__dict__["_fullshard"] = engine
        assert model.device == expected
    assert other.device == torch.device("cpu")
    assert model.inner.device == "a name"
