"""Optimizers of well-known packages, unmodified, on entire tensors: the bits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import owned_cases
import ranks
from owned_cases import Make, Pair


def _package(name: str, **settings: Any) -> Make:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        import pytorch_optimizer

        made: torch.optim.Optimizer = getattr(pytorch_optimizer, name)(parameters, lr=0.01, **settings)
        return made

    return make


def _muon(name: str) -> Make:
    """Matrices, and Adam for the others, in one class."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if p.dim() != 2]
        groups: Any = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        return _package(name)(groups)

    return make


def _adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=True)


def _adafactor_with_its_own_rate(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, warmup_init=True)


OWNED: dict[str, Make] = {
    "Adafactor of transformers": _adafactor,
    "Adafactor of transformers with its own rate": _adafactor_with_its_own_rate,
    "Muon": _muon("Muon"),
    "AdaMuon": _muon("AdaMuon"),
    **{
        name: _package(name)
        for name in ("SOAP", "Lamb", "LARS", "CAME", "AdaFactor", "Fromage", "NovoGrad", "StableAdamW")
    },
}
FOUND_OUT = {"CAME": "owned", "Lamb": "owned", "ADOPT": "element-wise", "Lion": "element-wise"}


def _train() -> dict[str, list[str]]:
    found = {}
    for name, make in OWNED.items():
        pair = Pair(make, owned_cases.everything, optimizer_step="owned")
        for step in range(5):
            pair.step(step)
        found[name] = pair.differing()
        ranks.end_groups_of_models()
    return found


def test_optimizers_of_packages_have_the_bits_of_one_process() -> None:
    for found in ranks.run(_train, 3):
        assert found == {name: [] for name in OWNED}


def _find_out() -> dict[str, str]:
    from fullshard.engine.step.optimizers import owned_step

    found = {}
    for name in FOUND_OUT:
        pair = Pair(_package(name))
        for step in range(2):
            pair.step(step)
        assert pair.differing() == []
        found[name] = "element-wise" if owned_step(pair.optimizers[1]) is None else "owned"
        ranks.end_groups_of_models()
    return found


@pytest.mark.long
def test_how_an_optimizer_of_a_package_steps_is_found_out() -> None:
    assert ranks.run(_find_out, 2) == [FOUND_OUT] * 2
