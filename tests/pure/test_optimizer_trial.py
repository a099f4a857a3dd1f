"""The trial that finds out whether an optimizer is element-wise."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import optimizer_kinds as kinds
from fullshard.engine.step.trial import Placed, Verdict, try_in_chunks, try_on_shards, try_owned


def _model() -> nn.Module:
    return nn.Sequential(nn.Embedding(30, 16), nn.Conv1d(16, 16, 3), nn.Linear(16, 40), nn.LayerNorm(40))


def _placed(parameters: Any, align: int = 1) -> dict[int, Placed]:
    """Each parameter on two ranks, cut near its middle at a multiple of `align`."""
    placed = {}
    for p in parameters:
        first = p.numel() // 2 // align * align
        placed[id(p)] = Placed(tuple(p.shape), tuple(range(p.dim())), (first, p.numel() - first))
    return placed


def _try(optimizer: torch.optim.Optimizer, closure: bool = False, align: int = 1) -> Verdict:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return try_on_shards(optimizer, _placed(held, align), closure)


IN_CHUNKS = [
    kinds.Plain, kinds.Signed, kinds.StateInConstructor, kinds.CountsInState,
    torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD,
]  # fmt: skip
NOT_IN_CHUNKS = {
    kinds.CountsInList: "from one call to the next",
    kinds.DecaysAll: "parameters that have no gradient",
    kinds.KeepsBuffers: "from one call to the next",
    kinds.WithForeach: "raises RuntimeError: Tensor list must have at least one tensor",
    kinds.NestedState: "'past' of parameter 'a synthetic parameter' is not one value per element",
}
ELEMENT_WISE = [
    kinds.Plain, kinds.Signed, kinds.ByGradientNorm, kinds.WithForeach, kinds.StateInConstructor,
    torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, torch.optim.Rprop, torch.optim.ASGD,
]  # fmt: skip
NOT_ELEMENT_WISE = {
    kinds.ByParameterNorm: "the norm of a parameter over its entire tensor",
    kinds.ByUpdateNorm: "the mean of what it computes",
    kinds.BySumOverAll: "the sum of what it computes",
    kinds.Late: "the norm of a parameter",
    kinds.LateInSteps: "amax",
    kinds.ByRow: "the mean of what it computes",
    kinds.ByShape: "differently when its tensor is cut",
    kinds.Noisy: "random numbers",
    kinds.RarelyClipped: "the norm of what it computes",
    kinds.ByBlocks: "the max of what it computes",
    torch.optim.Adafactor: "",
    torch.optim.LBFGS: "",
    torch.optim.SparseAdam: "could not be tried (RuntimeError",
}


@pytest.mark.parametrize("kind", ELEMENT_WISE, ids=lambda kind: kind.__name__)
def test_element_wise_optimizer_passes(kind: Any) -> None:
    for closure in (False, True):
        sums = kind is kinds.ByGradientNorm
        assert _try(kind(_model().parameters(), lr=0.01), closure) == Verdict(None, sums=sums)


@pytest.mark.parametrize("kind", NOT_ELEMENT_WISE, ids=lambda kind: kind.__name__)
def test_optimizer_that_mixes_elements_is_found_out_with_the_reason(kind: Any) -> None:
    parts = NOT_ELEMENT_WISE[kind].split(" (")
    finding = _try(kind(_model().parameters(), lr=0.01), closure=kind is torch.optim.LBFGS).finding
    assert finding is not None
    assert parts[-1] in finding


def _try_chunks(kind: Any, closure: bool = False) -> Verdict:
    optimizer = kind(_model().parameters(), lr=0.01)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return try_in_chunks(optimizer, _placed(held), closure)


@pytest.mark.parametrize("kind", IN_CHUNKS, ids=lambda kind: kind.__name__)
def test_optimizer_whose_step_may_run_in_chunks_passes(kind: Any) -> None:
    for closure in (False, True):
        assert _try_chunks(kind, closure) == Verdict(None)


@pytest.mark.parametrize("kind", NOT_IN_CHUNKS, ids=lambda kind: kind.__name__)
def test_optimizer_that_is_element_wise_and_not_right_in_chunks_is_found_out(kind: Any) -> None:
    assert _try(kind(_model().parameters(), lr=0.01)).finding is None
    assert NOT_IN_CHUNKS[kind] in str(_try_chunks(kind).finding)


class ByMark(kinds.Plain):
    """Has a rule of its own for parameters with an attribute."""

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept * p.norm() if getattr(p, "layers", ()) == (3,) else kept


def test_rule_for_one_parameter_with_an_attribute_is_seen() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    assert _try(ByMark(model.parameters())).finding is None
    model[7].weight.layers = (3,)  # type: ignore[assignment]
    assert "the norm" in str(_try(ByMark(model.parameters())).finding)


class EverySo(kinds.Plain):
    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return kept * p.norm() if state["step"] % group["every"] == 0 else kept


@pytest.mark.parametrize("every", [30, 64, 100, 128, 256, 500, 512, 1000, 1024, 10_000])
def test_rule_that_holds_every_so_many_steps_is_seen(every: int) -> None:
    assert "the norm" in str(_try(EverySo(_model().parameters(), every=every)).finding)


class ByCalls(kinds.ByParameterNorm):
    """Counts in a list, which a step in several calls does not set back."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.counts = [getattr(self, "counts", [0])[0] + 1]
        return super().step(closure)

    def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
        return super().update(p, kept, group, state) / (1 + self.counts[0])


class DecayingAll(kinds.DecaysAll, kinds.ByParameterNorm):
    """Also changes parameters without a gradient."""


class CountingUsed(kinds.ByParameterNorm):
    """Counts in its group, if any of its parameters has a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["used"] = group.get("used", 0) + any(p.grad is not None for p in group["params"])
        return super().step(closure)


class NeedsGradients(kinds.ByParameterNorm):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"] if p.grad is not None])
        return super().step(closure)


def _try_owned(optimizer: torch.optim.Optimizer, closure: bool = False) -> Verdict:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return try_owned(optimizer, _placed(held), closure)


BY_TENSOR = [
    kinds.ByParameterNorm, kinds.ByUpdateNorm, kinds.ByGradientNorm, kinds.Late, kinds.LateInSteps,
    kinds.ByRow, kinds.ByShape, kinds.RarelyClipped, kinds.Lamb, kinds.Shampoo, torch.optim.Adafactor,
]  # fmt: skip
ACROSS_TENSORS = {
    kinds.BySumOverAll: "when others have no gradient",
    kinds.Noisy: "random numbers",
    DecayingAll: "changes parameters that have no gradient",
    CountingUsed: "keeps a number",
    NeedsGradients: "without a parameter of its own it raises",
    torch.optim.LBFGS: "",
}


@pytest.mark.parametrize("kind", BY_TENSOR, ids=lambda kind: kind.__name__)
def test_optimizer_that_looks_at_tensors_one_by_one_is_right_on_their_owners(kind: Any) -> None:
    assert _try_owned(kind(_model().parameters(), lr=0.01)) == Verdict(None, bucketed=True)
    assert _try_owned(kind(_model().parameters(), lr=0.01), closure=True) == Verdict(None)


@pytest.mark.parametrize("kind", ACROSS_TENSORS, ids=lambda kind: kind.__name__)
def test_optimizer_that_looks_at_others_than_its_own_tensor_is_found_out(kind: Any) -> None:
    verdict = _try_owned(kind(_model().parameters(), lr=0.01), closure=kind is torch.optim.LBFGS)
    assert ACROSS_TENSORS[kind] in (verdict.finding or "")
    assert verdict.finding is not None
    assert verdict.random == (kind is kinds.Noisy)


def test_matrices_are_tried_among_parameters_of_many_dimensions() -> None:
    class OfMatrices(kinds.Plain):
        def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
            return kept * p.norm() if p.dim() == 2 else kept

    shapes = [(2, 3, 4), (), (5,), (2, 2, 2, 2), (8, 8)]
    assert _try(OfMatrices([nn.Parameter(torch.ones(shape)) for shape in shapes])).finding is not None


def test_optimizer_that_counts_its_calls_unseen_is_called_once_per_step() -> None:
    assert _try_owned(ByCalls(_model().parameters())) == Verdict(None, bucketed=False)


def test_optimizer_with_a_kernel_of_its_own_passes_with_plain_gradients() -> None:
    assert _try(kinds.OwnKernel(_model().parameters())) == Verdict(None, plain_gradients=True)


def test_blocks_pass_only_where_none_is_cut() -> None:
    class Quantised(kinds.Plain):
        """Blocks in a kernel, as 8-bit optimizers have them: no function of torch mixes elements."""

        def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
            out = kept.detach().clone()
            for block in out.view(-1).split(256):
                if block.numel():
                    values = block.numpy()
                    values /= abs(values).max() + 1e-3
            return out

    parameters = [nn.Parameter(torch.zeros(40, 64)), nn.Parameter(torch.zeros(1000))]
    assert _try(Quantised(parameters), align=256).finding is None
    assert _try(Quantised(parameters), align=16).finding is not None


def test_rule_that_begins_at_a_size_is_seen_at_the_real_sizes_and_cuts() -> None:
    parameters = [nn.Parameter(torch.zeros(96, 64))]  # 6144 elements, shards of 3072
    assert _try(kinds.FromSizeOn(parameters)).finding is not None
    assert _try(kinds.FromSizeOn([nn.Parameter(torch.zeros(60, 64))])).finding is None
    assert _try(kinds.FromSizeOn([nn.Parameter(torch.zeros(4096, 64))])).finding is None


def test_one_group_with_another_setting_is_enough() -> None:
    model = _model()
    groups = [{"params": [p], "scaled": i == 4} for i, p in enumerate(model.parameters())]
    assert _try(kinds.BySetting(model.parameters())).finding is None
    assert "norm" in (_try(kinds.BySetting(groups)).finding or "")


def test_rate_of_zero_at_the_start_of_a_warm_up_hides_nothing() -> None:
    assert _try(kinds.ByParameterNorm(_model().parameters(), lr=0.0)).finding is not None


def test_trial_leaves_no_traces() -> None:
    class Counting(kinds.Plain):
        counts: ClassVar[dict[str, int]] = {}
        total = 0

        def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
            Counting.total += 1
            Counting.counts["steps"] = Counting.total
            return kept + 0 * torch.rand_like(p) * random.random()

    model = _model()
    optimizer = Counting(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces `step` on the instance
    before = [p.detach().clone() for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate()
    _try(optimizer)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (Counting.total, Counting.counts, optimizer.calls, len(optimizer.state)) == (0, {}, 0, 0)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert scheduler.optimizer is optimizer


def test_modules_and_foreign_objects_are_not_copied() -> None:
    class Holding(kinds.Plain):
        def __init__(self, params: Any, model: nn.Module, used: bool) -> None:
            super().__init__(params)
            self.model, self.used = model, used

        def update(self, p: torch.Tensor, kept: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
            return kept if not self.used else kept * self.model.training

    model = _model()
    assert _try(Holding(model.parameters(), model, used=False)).finding is None
    verdict = _try(Holding(model.parameters(), model, used=True))
    assert not verdict.tried
    assert "'training'" in (verdict.finding or "")


class Work(TorchDispatchMode):
    """Counts operators and the elements of what they return: unlike a time, the same on a busy machine."""

    operators = elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operators += 1
        self.elements += sum(t.numel() for t in tree_leaves(found) if isinstance(t, torch.Tensor))
        return found


def test_trial_of_a_large_model_computes_as_little_as_that_of_a_small_one() -> None:
    held = [nn.Parameter(torch.empty(0)) for _ in range(50)]  # of 4 million elements each
    placed = {id(p): Placed((4096, 1024), (0, 1), (1 << 21, 1 << 21)) for p in held}
    with Work() as work:
        assert try_on_shards(torch.optim.AdamW(held), placed, False).finding is None
    # 0.5 s on an idle machine.
    assert work.operators < 40_000
    assert work.elements < 50_000_000
