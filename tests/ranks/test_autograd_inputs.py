"""torch.autograd.grad and backward(inputs=...) with respect to sharded parameters: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
from cases import assert_gradients, backward, refusal, sharded, whole_gradients
from engines import batch, build, loss_of, my_rank

RANKS = 3


def _loss(model: nn.Module, step: int = 0) -> Tensor:
    return loss_of(model, batch(step, my_rank()))


def _in_one_process(step: int, penalty: float = 0.0) -> nn.Module:
    model = build()
    for rank in range(RANKS):
        (loss_of(model, batch(step, rank)) / RANKS).backward()
    if penalty:
        (penalty * sum(p.abs().sum() for p in model.parameters())).backward()
    return model


def _put(model: nn.Module, names: list[str], gradients: Any) -> dict[str, Any]:
    model.zero_grad()
    parameters = dict(model.named_parameters())
    for name, gradient in zip(names, gradients, strict=True):
        parameters[name].grad = gradient
    return whole_gradients(model)


def _gradients(strategy: str) -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    model = sharded(strategy)
    parameters = dict(model.named_parameters())
    everything = list(parameters)
    first = torch.autograd.grad(_loss(model), list(parameters.values()))
    found["norms"] = [g.norm().item() for g in first]
    found["untouched"] = all(p.grad is None for p in parameters.values())
    backward(model, 1)
    again = torch.autograd.grad(_loss(model), list(parameters.values()))
    kept = [p.grad for p in parameters.values()]
    model.zero_grad()
    found["input"] = _with_an_input(model)
    found["subset"] = [
        float(torch.autograd.grad(_loss(model), parameters[name])[0].norm())
        for name in ("blocks.0.0.weight", "blocks.1.2.bias", "head.weight")
    ]
    unused = nn.Parameter(torch.ones(2))
    some = torch.autograd.grad(_loss(model), [unused, parameters["head.bias"]], allow_unused=True)
    found["unused"] = [some[0] is None, some[1].norm().item()]
    found["torch's own error"] = _message(
        lambda: torch.autograd.grad(_loss(model), [*parameters.values(), unused])
    )
    penalised = _loss(model) + 0.1 * fs.penalty(model, lambda _, p: p.abs())
    found["penalty"] = [g.norm().item() for g in torch.autograd.grad(penalised, list(parameters.values()))]
    model.zero_grad()
    _loss(model).backward(inputs=[parameters["head.weight"]])
    found["some"] = [n for n, p in parameters.items() if p.grad is not None]
    refused = {
        "create_graph": lambda: torch.autograd.grad(
            _loss(model), parameters["head.weight"], create_graph=True
        ),
        "batched": lambda: torch.autograd.grad(
            _loss(model), parameters["head.weight"], torch.ones(2), is_grads_batched=True
        ),
        "at rest": lambda: torch.autograd.grad(parameters["head.weight"].sum(), parameters["head.weight"]),
        "accumulating": lambda: _inside_accumulate(model),
    }
    found["refused"] = [refusal(call)[0] for call in refused.values()]
    found["kept"] = _put(model, everything, kept)
    found["again"] = _put(sharded(strategy), everything, again)
    return found


def _inside_accumulate(model: nn.Module) -> Any:
    import fullshard as fs

    with fs.accumulate(model):
        return torch.autograd.grad(_loss(model), list(model.parameters()))


def _with_an_input(model: nn.Module) -> list[float]:
    x, y = batch(0, my_rank())
    x = x.clone().requires_grad_()
    gradients = torch.autograd.grad(loss_of(model, (x, y)), [x, model.head.weight])
    return [float(g.norm()) for g in gradients]


def _message(call: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)[:60]


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "replicate"])
def test_gradients_with_respect_to_parameters_are_those_of_one_process(strategy: str) -> None:
    plain, other = _in_one_process(0), _in_one_process(1)
    by_name = dict(plain.named_parameters())
    for rank, found in enumerate(ranks.run(_gradients, RANKS, strategy)):
        norms = [p.grad.norm().item() for p in plain.parameters()]
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        assert found["untouched"]
        names = ("blocks.0.0.weight", "blocks.1.2.bias", "head.weight")
        assert found["subset"] == pytest.approx([by_name[n].grad.norm().item() for n in names], rel=1e-5)
        x, y = batch(0, rank)
        x.requires_grad_()
        (of_input,) = torch.autograd.grad(loss_of(build(), (x, y)), x)
        expected = [of_input.norm().item(), by_name["head.weight"].grad.norm().item()]
        assert found["input"] == pytest.approx(expected, rel=1e-5)
        assert found["unused"] == [True, pytest.approx(by_name["head.bias"].grad.norm().item(), rel=1e-5)]
        assert found["torch's own error"].startswith("One of the differentiated Tensors appears")
        penalised = [p.grad.norm().item() for p in _in_one_process(0, penalty=0.1).parameters()]
        assert found["penalty"] == pytest.approx(penalised, rel=1e-5)
        assert found["some"] == ["head.weight"]
        assert found["refused"] == ["NotSupported", "NotSupported", "AtRestError", "StateError"]
        assert_gradients(found["kept"], other)
        assert_gradients(found["again"], plain)
