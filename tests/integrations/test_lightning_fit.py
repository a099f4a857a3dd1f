"""Lightning's Trainer on shards: the numbers of one plain process, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard as fs
import ranks
from engines import BLOCKS
from lightning_cases import Gan, Lit, Seen, assert_same_run, fitted, sharded

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "clip by norm": ({}, {"gradient_clip_val": 0.5, "val": True}),
    "clip by value, zero2": (
        {"strategy": "zero2"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "accumulate": ({}, {"accumulate_grad_batches": 2, "micro": 2, "gradient_clip_val": 0.5}),
    "accumulate, zero1": ({"strategy": "zero1"}, {"accumulate_grad_batches": 3, "micro": 2}),
    "replicate": ({"strategy": "replicate"}, {"gradient_clip_val": 0.5}),
    "recompute": ({"checkpoint_activations": True, "prefetch": False, "keep_full": 0}, {}),
    "hybrid": ({"strategy": "hybrid", "ranks_inside": 1}, {}),
}


def _all_cases() -> dict[str, Seen]:
    return {name: fitted(Lit, sharded(**(BLOCKS | ours)), **run) for name, (ours, run) in CASES.items()}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Seen]]:
    return ranks.run(_all_cases, 2, timeout_s=240)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_fit_has_the_losses_norms_and_weights_of_plain_lightning(
    name: str, runs: list[dict[str, Seen]]
) -> None:
    plain = fitted(Lit, **CASES[name][1])
    assert len(plain.losses) >= 4
    assert len(plain.norms) > 1
    assert_same_run([run[name] for run in runs], plain)


def _gan() -> Seen:
    return fitted(Gan, sharded())


def test_two_networks_optimized_by_hand_have_the_numbers_of_plain_lightning() -> None:
    plain = fitted(Gan)
    assert max(plain.norms) == pytest.approx(0.05, rel=1e-3)  # clipping did something
    assert_same_run(ranks.run(_gan, 2, timeout_s=120), plain)


def _frozen_part(sharded_too: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = fs.shard(model, units=nn.Linear) if sharded_too else model
    found: list[Any] = []
    for frozen in (1, 0, 1):
        for index, part in enumerate(model):
            part.requires_grad_(index != frozen)
        model.zero_grad()
        model[1](model[0](torch.ones(2, 4))).square().mean().backward()
        found.append([p.grad is None or float(nn.utils.get_total_norm([p.grad])) for p in model.parameters()])
    return found


def test_freezing_takes_effect_where_parts_of_a_model_are_called_by_themselves() -> None:
    plain = _frozen_part(False)
    for found in ranks.run(_frozen_part, 2, True, timeout_s=120):
        for ours, theirs in zip(found, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


# --- precision -----------------------------------------------------------------------------------------


def _scaled(strategy: Any = "auto") -> Seen:
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return fitted(Lit, strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], gradient_clip_val=0.5)


def _precisions() -> dict[str, Any]:
    found: dict[str, Any] = {
        name: fitted(Lit, sharded(), precision=name) for name in ("bf16-mixed", "bf16-true", "64-true")
    }
    found["autocast alone"] = fitted(Lit, sharded(precision="fp32"), precision="bf16-mixed")
    found["16-mixed"] = _scaled(sharded())
    found["engine's own"] = fitted(Lit, sharded(precision="bf16"))
    return found


def test_precision_plugins_compute_as_plain_lightning_does() -> None:
    found = ranks.run(_precisions, 2, timeout_s=240)
    plain = {name: fitted(Lit, precision=name) for name in ("32-true", "bf16-mixed", "bf16-true", "64-true")}
    plain["autocast alone"] = plain["bf16-mixed"]
    plain["16-mixed"] = _scaled()
    plain["engine's own"] = plain["32-true"]
    for name, tolerance in (
        ("64-true", 1e-12),
        ("autocast alone", 2e-2),  # rounded to 8 bits, and halves of a batch are rounded apart
        ("16-mixed", 1e-2),
        ("bf16-mixed", 5e-2),
        ("bf16-true", 5e-2),
        ("engine's own", 5e-2),
    ):
        assert_same_run([run[name] for run in found], plain[name], rtol=tolerance, atol=tolerance)
    dtypes = {name: seen.weights["net.head.weight"].dtype for name, seen in found[0].items()}
    assert dtypes["64-true"] == torch.float64
    assert dtypes["bf16-true"] == torch.bfloat16
    assert {dtypes[n] for n in ("bf16-mixed", "16-mixed", "engine's own")} == {torch.float32}
    # Parameters were gathered in bf16: the losses are not those of autocast over fp32 parameters.
    assert found[0]["bf16-mixed"].losses != found[0]["autocast alone"].losses
