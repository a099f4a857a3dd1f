"""What code reads of a gradient is that of one process, or refused: the same on every rank.

One rank's part never leaves under the name of all, also where a rank holds nothing.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ranks
from cases import backward, sharded
from engines import batch, build, loss_of

RANKS = 3  # of the 40 elements of the head, none falls on the same place on two; small parameters are empty


def _in_one_process() -> nn.Module:
    model = build()
    for rank in range(RANKS):
        (loss_of(model, batch(0, rank)) / RANKS).backward()
    return model


def _outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    """The value of a call, or the class of its error: every rank must have the same."""
    from fullshard import FullshardError

    try:
        value = call()
    except FullshardError as error:
        assert error.remedy
        return "refused", type(error).__name__
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    return "value", value


ROW = torch.linspace(-1, 1, 8)
MASK = torch.rand(5, 8, generator=torch.Generator().manual_seed(3))


def _doubled(norm: Tensor) -> Tensor:
    norm.mul_(2)
    return norm


def _multiplied(gradient: Tensor) -> Tensor:
    gradient *= MASK
    return gradient


def _set(gradient: Tensor, where: Any) -> Tensor:
    gradient[where] = 0.5
    return gradient


RIGHT: dict[str, Callable[[Tensor], Any]] = {
    "root mean square": lambda g: g.norm() / g.numel() ** 0.5,
    "by the count of its shape": lambda g: g.norm() / g.shape.numel() ** 0.5,
    "by its sizes": lambda g: g.norm() / (g.shape[0] * g.size(1)) ** 0.5,
    "mean by hand": lambda g: g.abs().sum() / torch.numel(g),
    "number of elements": lambda g: g.nelement(),
    "number of rows": lambda g: len(g),
    "bytes": lambda g: g.nbytes,
    "rows of a view": lambda g: g.view(g.shape[0], -1).shape[1],
    "size of a vector": lambda g: nn.utils.parameters_to_vector([g, g]).numel(),
    "normalised": lambda g: (g / g.norm()).abs().sum(),
    "normalised by keyword": lambda g: torch.div(g, other=g.norm()).abs().sum(),
    "bounded by a norm": lambda g: torch.clamp(torch.full((3,), 9.0), max=g.norm()).sum(),
    "bounded by two norms": lambda g: torch.clamp(g, min=-g.norm() / 9, max=g.norm() / 9).sum(),
    "norms in nested lists": lambda g: torch.block_diag(*[g.norm(), g.norm(1)]).sum(),
    "norms of a dictionary": lambda g: sum({"a": g.norm(), "b": g.norm(1)}.values()),
    "norm by keyword": lambda g: torch.add(torch.ones(()), other=g.norm()),
    "norm changed in place": lambda g: _doubled(g.norm()),
    "norm used twice": lambda g: (lambda n: n * n + n)(g.norm()),
    "tensor of norms": lambda g: torch.tensor([g.norm(), g.norm(1)]).sum(),
    "tensor of a norm": lambda g: torch.as_tensor(g.norm(), dtype=torch.float64),
    "array of norms": lambda g: np.array([float(n) for n in (g.norm(), g.norm(1))]).sum(),
    "masked": lambda g: (g * MASK).sum(),
    "mask in front": lambda g: (MASK * g).sum(),
    "masked by rows": lambda g: (g * ROW).sum(),
    "masked by columns": lambda g: (g * MASK[:, :1]).sum(),
    "masked in place": lambda g: copy.deepcopy(g).mul_(MASK).sum(),
    "masked by an operator in place": lambda g: _multiplied(copy.deepcopy(g)).sum(),
    "masked list": lambda g: torch._foreach_mul([g], [MASK])[0].sum(),
    "masked fill": lambda g: g.masked_fill(MASK > 0.5, 0.25).sum(),
    "transposed": lambda g: (g.T * MASK.T).sum(),
    "permuted": lambda g: (g.permute(1, 0) - MASK.t()).norm(),
    "flattened": lambda g: (g.flatten() * MASK.flatten()).sum(),
    "like another gradient": lambda g: g.flatten().view_as(g).sub(MASK).norm(),
    "chosen": lambda g: torch.where(MASK > 0.5, g, MASK).sum(),
    "distance": lambda g: (g.detach().clone() - MASK).norm(),
    "dot with another": lambda g: g.flatten().dot(MASK.flatten()),
    "equal to another": lambda g: torch.allclose(g, MASK),
    "copied over": lambda g: copy.deepcopy(g).copy_(MASK).sum(),
    "set where": lambda g: _set(copy.deepcopy(g), MASK > 0.5).sum(),
    "set everywhere": lambda g: _set(copy.deepcopy(g), ...).sum(),
    "deep copy": lambda g: copy.deepcopy({"g": [g]})["g"][0].norm(),
    "of another type": lambda g: g.type(torch.float64).to(MASK).norm(),
}  # fmt: skip


LEAVES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda g: g.numpy(),
    "numpy of a copy": lambda g: g.detach().cpu().float().clone().numpy(),
    "numpy of data": lambda g: g.data.numpy(),
    "numpy of another type": lambda g: g.type(torch.float64).numpy(),
    "array": lambda g: np.asarray(g),
    "array of a copy": lambda g: np.array(g * 2),
    "list": lambda g: g.tolist(),
    "number": lambda g: g.item(),
    "float": lambda g: float(g),
    "truth": lambda g: bool(g),
    "rows": lambda g: list(g),
    "another library": lambda g: torch.from_dlpack(g),
    "tensor": lambda g: torch.tensor(g),
    "tensor of another type": lambda g: torch.as_tensor(g, dtype=torch.float64),
    "tensor of an array": lambda g: torch.asarray(g, copy=True),
    "tensor of a list": lambda g: torch.tensor([g]),
    "new tensor": lambda g: g.new_tensor(g),
    "bits": lambda g: g.view(torch.int32),
    "pickle": lambda g: pickle.dumps({"grad": [g]}),
    "save": lambda g: torch.save({"grad": g.cpu()}, io.BytesIO()),
    "save alone": lambda g: torch.save(g, io.BytesIO()),
    "shallow copy": lambda g: copy.copy(g),
    "histogram": lambda g: torch.histogram(g, 4),
    "quantile": lambda g: g.quantile(0.5),
    "element": lambda g: float(g[0, 0]),
    "first row": lambda g: g[0],
    "one element set": lambda g: _set(g, 0),
    "into an unsharded tensor": lambda g: torch.zeros(5, 8).add_(g),
    "out of the function": lambda g: torch.mul(g, 2, out=torch.zeros(5, 8)),
    "of another shape": lambda g: g * torch.ones(7, 3),
}


def _use(strategy: str) -> dict[str, tuple[str, Any]]:
    model = sharded(strategy)
    backward(model)
    gradient = model.head.weight.grad
    found = {name: _outcome(lambda call=call: float(call(gradient))) for name, call in RIGHT.items()}
    return found | {name: _outcome(lambda call=call: call(gradient) is None) for name, call in LEAVES.items()}


@pytest.mark.filterwarnings("ignore")
def test_gradient_answers_for_all_ranks_or_refuses() -> None:
    expected = _in_one_process().head.weight.grad
    for found in ranks.run(_use, RANKS, "zero3"):
        for name, call in RIGHT.items():
            value = float(call(copy.deepcopy(expected)))
            assert found[name] == ("value", pytest.approx(value, rel=1e-5, abs=1e-6)), name
        for name in LEAVES:
            assert found[name] == ("refused", "GradientError"), name


def _read_complete() -> list[bool]:
    model = sharded("replicate")
    backward(model)
    gradient = model.head.weight.grad
    file = io.BytesIO()
    torch.save({"grad": gradient}, file)
    file.seek(0)
    values = [gradient.tolist(), gradient.numpy().tolist(), torch.tensor(gradient).tolist()]
    values += [torch.load(file)["grad"].tolist(), torch.as_tensor(gradient).tolist()]
    return [value == values[0] for value in values] + [gradient.numel() == 40, bool(gradient[0, 0] != 0)]


@pytest.mark.filterwarnings("ignore")
def test_gradient_that_is_complete_on_every_rank_can_be_read() -> None:
    assert all(map(all, ranks.run(_read_complete, 2)))


def _shapes_in_step() -> list[tuple[int, ...]]:
    class Counting(torch.optim.SGD):
        seen: ClassVar[list[tuple[int, ...]]] = []

        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                made = torch.zeros(p.grad.shape)
                self.seen.append((p.numel(), p.grad.numel(), made.numel(), len(p.grad.numpy())))
            return super().step(closure)

    model = sharded()
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    return optimizer.seen


def test_optimizer_sees_shapes_of_its_own_elements_while_it_steps() -> None:
    for seen in ranks.run(_shapes_in_step, 2):
        assert all(len(set(counts)) == 1 for counts in seen)


def _decayed() -> dict[str, Tensor]:
    """Loops over parameters and gradients that are not an optimizer's."""
    from cases import whole

    model = sharded()
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(2):
        backward(model, step)
        with torch.no_grad():
            for p, buffer in zip(model.parameters(), momentum, strict=True):
                p.grad.add_(p, alpha=0.1)
                p.grad += 0.1 * p.detach()
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(0.1 * buffer.view_as(p))
                p.data -= 0.1 * p.grad.view(p.shape)
        model.zero_grad()
    return whole(model)


def test_loops_over_parameters_and_their_gradients_train_as_in_one_process() -> None:
    plain = build()
    momentum = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(2):
        for rank in range(RANKS):
            (loss_of(plain, batch(step, rank)) / RANKS).backward()
        with torch.no_grad():
            for p, buffer in zip(plain.parameters(), momentum, strict=True):
                gradient = p.grad.add_(p, alpha=0.1).add_(0.1 * p)
                buffer.mul_(0.9).add_(gradient)
                p.sub_(0.1 * buffer)
                p.data -= 0.1 * gradient
        plain.zero_grad()
    for found in ranks.run(_decayed, RANKS):
        for name, value in plain.named_parameters():
            assert torch.allclose(found[name], value, atol=1e-6), name


def _scripts() -> tuple[Any, ...]:
    """After a model was sharded."""
    sharded()
    with torch.device("meta"):
        devices = {torch.tensor([1.0]).device.type, torch.as_tensor([1]).device.type}
    scripted = torch.jit.script(_constructed)
    compiled = torch.compile(_constructed, backend="eager", fullgraph=True)
    pickled = pickle.loads(pickle.dumps(torch.tensor)) is torch.tensor
    return float(scripted(torch.ones(2))), float(compiled(torch.ones(2))), devices, pickled


def _constructed(x: Tensor) -> Tensor:
    return (x * torch.tensor(2.0) + torch.as_tensor(1.0)).sum()


@pytest.mark.filterwarnings("ignore")
def test_constructors_of_torch_work_as_before_in_scripts_compiled_functions_and_device_contexts() -> None:
    assert ranks.run(_scripts, 1, timeout_s=120) == [(6.0, 6.0, {"meta"}, True)]
