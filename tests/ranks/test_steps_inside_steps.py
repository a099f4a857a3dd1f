"""Steps that call another step on the same parameters: of a base class, or of an optimizer that they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engines
import fullshard as fs
import ranks
from engines import my_rank

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class OfBase(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)  # type: ignore[no-untyped-call]


class OfBaseOnTensors(torch.optim.Adafactor):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)  # type: ignore[no-untyped-call]


class Passing(torch.optim.Optimizer):
    """Hands all to the optimizers inside."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__([p for part in inner for group in part.param_groups for p in group["params"]], {})
        self.inner = list(inner)

    def step(self, closure: Any = None) -> Any:
        losses = [part.step(closure) for part in self.inner]  # type: ignore[arg-type]
        return losses[0]


class Averaging(torch.optim.Optimizer):
    """Lookahead, with a state of its own beside that of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.count = inner, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        if not self.state:
            self.state.update({p: {"slow": p.detach().clone()} for p in held})
        loss = self.inner.step(closure)
        self.count += 1
        for p in held if self.count % 2 == 0 else ():
            self.state[p]["slow"].lerp_(p.detach(), 0.5)
            p.copy_(self.state[p]["slow"])
        return loss


class MadeInside(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return torch.optim.SGD([p for group in self.param_groups for p in group["params"]], lr=0.1).step()


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)


def _halves(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Passing(_adamw(parameters[::2]), _adamw(parameters[1::2]))


SAME_AS_ADAMW: dict[str, Make] = {
    "of base": lambda p: OfBase(p, lr=1e-2),
    "passing": lambda p: Passing(_adamw(p)),
    "two inside": _halves,
}
SAME_AS_ADAFACTOR: dict[str, Make] = {"of base": OfBaseOnTensors, "passing": lambda p: Passing(_adafactor(p))}


def _trained(make: Make, closure: bool, **options: Any) -> dict[str, Tensor]:
    model = engines.shard_blocks(engines.build(), **options)
    optimizer = make(list(model.parameters()))
    for step in range(4):

        def backward(step: int = step) -> Tensor:
            model.zero_grad()
            loss = engines.loss_of(model, engines.batch(step, my_rank()))
            loss.backward()
            return loss.detach()

        if closure:
            optimizer.step(backward)  # type: ignore[arg-type]
        else:
            backward()
            optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
    return engines.values(model)


def _compare(cases: dict[str, Make], like: Make, every: list[dict[str, Any]]) -> list[str]:
    for kind in (torch.optim.AdamW, torch.optim.Adafactor):  # from now on these classes have hooks
        kind([nn.Parameter(torch.zeros(2, 2))])
    differing = []
    for options in every:
        expected = _trained(like, closure=False, **options | {"offload": None})
        for name, make in cases.items():
            for closure in (False, True) if name != "two inside" else (False,):
                values = _trained(make, closure, **options)
                if not all(torch.equal(values[key], value) for key, value in expected.items()):
                    differing.append(f"{name}, closure: {closure}, {options}")
                ranks.end_groups_of_models()
    return differing


def _in_chunks(folder: str) -> list[str]:
    disk = fs.Offload(host=12_000, disk=folder, chunk=300)
    every: list[dict[str, Any]] = [{}, {"offload": "host"}, {"state": "8bit"}]
    every.append({"offload": disk, "strategy": "zero1", "precision": "bf16"})
    differing = _compare(SAME_AS_ADAMW, _adamw, every)
    for options in every[1:]:
        averaging = [
            _trained(lambda p: Averaging(_adamw(p)), closure, **changed)
            for closure, changed in ((False, options | {"offload": None}), (False, options), (True, options))
        ]
        if not all(torch.equal(a[key], averaging[0][key]) for a in averaging[1:] for key in a):
            differing.append(f"averaging, {options}")
        ranks.end_groups_of_models()
    return differing


def test_steps_inside_steps_run_in_chunks_once_with_the_same_bits(tmp_path: Path) -> None:
    for differing in ranks.run(_in_chunks, 2, str(tmp_path)):
        assert differing == []


def _on_tensors() -> list[str]:
    return _compare(SAME_AS_ADAFACTOR, _adafactor, [{}, {"strategy": "zero2"}])


def test_steps_inside_steps_are_on_entire_tensors_once_with_closures_too() -> None:
    for differing in ranks.run(_on_tensors, 3):
        assert differing == []


def _made_inside() -> str:
    with pytest.raises(fs.FullshardError) as refused:
        _trained(lambda p: MadeInside(p), closure=False, offload="host")
    return str(refused.value)


def test_an_optimizer_that_another_one_makes_in_its_step_is_refused_by_name_with_offload() -> None:
    for message in ranks.run(_made_inside, 2):
        assert "SGD steps inside the step of MadeInside" in message
        assert "offload=" in message
