"""What blocks may return and how they may be called: sharded as in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import cases
import ranks
import tables
from block_models import (
    RETURNS,
    AppendsToList,
    CallsItself,
    CheckpointsEveryBlockTwice,
    CheckpointsTwoBlocks,
    CheckpointsTwoBlocksReentrant,
    LeavesLoss,
    ListedTwice,
    NoGradFirst,
    PassesKeywords,
    TwiceInARow,
    TwiceWithOthersBetween,
    TwoHeads,
    UnusedOutput,
    WithoutGradientInside,
    WritesIntoAReturnedView,
    WritesIntoAViewOfTheOutput,
    WritesIntoItsInput,
    WritesIntoOutput,
    returning,
)
from cases import Case, Outcome, Piece
from engines import WIDTH, loss_of

# zero1 differs from zero2 only inside fs.accumulate.
STRATEGIES = ("zero3", "zero2", "replicate")
CASES_A_LAUNCH = 10


def _checkpoint_model(reentrant: bool) -> Any:
    def backward(model: nn.Module, piece: Piece, weight: float) -> float:
        x = piece[0].clone().requires_grad_()
        loss = F.cross_entropy(checkpoint(model, x, use_reentrant=reentrant), piece[1]) * weight
        loss.backward()
        return loss.item()

    return backward


# --- other ways backward -------------------------------------------------------------------------------


def _sum_of_two_forwards(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = (loss_of(model, piece) + 0.5 * F.cross_entropy(model(-piece[0]), piece[1])) * weight
    loss.backward()
    return loss.item()


def _fed_to_itself(model: nn.Module, piece: Piece, weight: float) -> float:
    """The second forward takes what the first one returned."""
    first = model(piece[0])
    loss = F.cross_entropy(model(F.pad(first, (0, WIDTH - 5))), piece[1]) * weight
    loss.backward()
    return loss.item()


def _twice_through_one_graph(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = loss_of(model, piece) * weight
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.item()


def _twice_with_a_forward_between(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = loss_of(model, piece) * weight
    loss.backward(retain_graph=True)
    with torch.no_grad():
        model(piece[0])
    loss.backward()
    return loss.item()


def _through_the_first_output(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = F.cross_entropy(model(piece[0])[0], piece[1]) * weight
    loss.backward()
    return loss.item()


def _output_by_output(model: nn.Module, piece: Piece, weight: float) -> float:
    total = 0.0
    outputs = model(piece[0])
    for index, output in enumerate(outputs):
        loss = F.cross_entropy(output, piece[1]) * weight
        loss.backward(retain_graph=index == 0)
        total += loss.item()
    return total


def _gradient_of_the_input_first(model: nn.Module, piece: Piece, weight: float) -> float:
    """A gradient with respect to the input alone leaves no p.grad behind."""
    x = piece[0].clone().requires_grad_()
    loss = F.cross_entropy(model(x), piece[1])
    (slope,) = torch.autograd.grad(loss, x)
    assert all(p.grad is None for p in model.parameters()) or weight < 1
    return cases.plainly(model, ((piece[0] + 0.1 * slope.sign()).detach(), piece[1]), weight)


def _forward_dropped_first(model: nn.Module, piece: Piece, weight: float) -> float:
    loss_of(model, piece)  # never sees a backward
    return cases.plainly(model, piece, weight)


def _with_losses_left(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = (loss_of(model, piece) + sum(layer.loss for layer in model.blocks)) * weight
    loss.backward()
    return loss.item()


def _loss_left_alone(model: nn.Module, piece: Piece, weight: float) -> float:
    model(piece[0])
    loss = model.blocks[1].loss * weight
    loss.backward()
    return loss.item()


def _under_autocast(model: nn.Module, piece: Piece, weight: float) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, piece) * weight
    loss.backward()
    return loss.item()


def _saved_on_the_host(model: nn.Module, piece: Piece, weight: float) -> float:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, piece) * weight
    loss.backward()
    return loss.item()


CASES = {f"returns {kind}": Case(returning(kind)) for kind in RETURNS} | {
    "caller writes into the output": Case(WritesIntoOutput),
    "caller writes into a view of the output": Case(WritesIntoAViewOfTheOutput),
    "caller writes into a returned view": Case(WritesIntoAReturnedView),
    "block writes into its input": Case(WritesIntoItsInput),
    "called twice in a row": Case(TwiceInARow),
    "called twice with others between": Case(TwiceWithOthersBetween),
    "listed twice": Case(ListedTwice),
    "recursion": Case(CallsItself),
    "output not used": Case(UnusedOutput),
    "no_grad around one block": Case(WithoutGradientInside),
    "no_grad around the first blocks": Case(NoGradFirst),
    "keyword arguments": Case(PassesKeywords),
    "checkpoint around two blocks": Case(CheckpointsTwoBlocks),
    "checkpoint around two blocks, reentrant": Case(CheckpointsTwoBlocksReentrant),
    "checkpoint within checkpoint": Case(CheckpointsEveryBlockTwice),
    "checkpoint around the model": Case(backward=_checkpoint_model(False)),
    "checkpoint around the model, reentrant": Case(backward=_checkpoint_model(True)),
    "checkpoint_activations": Case(options={"checkpoint_activations": True}),
    "checkpoint_activations, blocks called twice": Case(
        TwiceWithOthersBetween, options={"checkpoint_activations": True}
    ),
    "checkpoint_activations, dict returned": Case(
        returning("list in a dict"), options={"checkpoint_activations": True}
    ),
    "checkpoint_activations around torch's own": Case(
        CheckpointsTwoBlocks, options={"checkpoint_activations": True}
    ),
    "sum of two forwards": Case(backward=_sum_of_two_forwards),
    "forward of a forward": Case(backward=_fed_to_itself),
    "graph retained and used twice": Case(backward=_twice_through_one_graph),
    "evaluation between two backwards of one graph": Case(backward=_twice_with_a_forward_between),
    "backward through one of two outputs": Case(TwoHeads, _through_the_first_output),
    "backward output by output": Case(TwoHeads, _output_by_output),
    "gradient of the input first": Case(backward=_gradient_of_the_input_first),
    "forward without a backward first": Case(backward=_forward_dropped_first),
    "loss left in an attribute": Case(LeavesLoss, _with_losses_left),
    "loss left in an attribute alone": Case(LeavesLoss, _loss_left_alone),
    "result left in a list": Case(AppendsToList),
    "autocast": Case(backward=_under_autocast),
    "activations saved on the host": Case(backward=_saved_on_the_host),
}


def _strategies(name: str, every: bool) -> list[str]:
    """The first, and every other one, or for two of three cases one of them in turn."""
    first, *others = STRATEGIES
    turn = list(CASES).index(name) % (len(others) + 1)
    return [first, *(others if every else others[turn : turn + 1])]


def _train_cases(names: list[str], every: bool) -> dict[str, dict[str, Outcome] | str]:
    found: dict[str, dict[str, Outcome] | str] = {}
    for name in names:
        try:
            chosen = _strategies(name, every)
            found[name] = {s: cases.on_a_rank(CASES[name], strategy=s) for s in chosen}
        except Exception:
            found[name] = traceback.format_exc()  # alike on all ranks: the other cases can still run
        ranks.end_groups_of_models()
    return found


@pytest.fixture(scope="module")
def trained() -> Callable[[str, bool], list[Any]]:
    """What each rank made of a case, by strategy. Several cases share one launch."""
    launched: dict[tuple[int, bool], Any] = {}
    names = list(CASES)

    def outcomes(name: str, every: bool) -> list[Any]:
        group = names.index(name) // CASES_A_LAUNCH, every
        if group not in launched:
            start = group[0] * CASES_A_LAUNCH
            try:
                launched[group] = ranks.run(_train_cases, 2, names[start : start + CASES_A_LAUNCH], every)
            except ranks.RankFailure as failure:
                launched[group] = failure
        if isinstance(launched[group], ranks.RankFailure):
            raise launched[group]
        return [result[name] for result in launched[group]]

    return outcomes


@tables.some("every", [False, True], False)
@pytest.mark.parametrize("name", CASES)
def test_block_trains_as_in_one_process_under_every_strategy(name: str, every: bool, trained: Any) -> None:
    results = trained(name, every)
    for rank, result in enumerate(results):
        assert isinstance(result, dict), f"rank {rank}: {result}"
    for strategy in _strategies(name, every):
        cases.assert_as_in_one_process(CASES[name], [result[strategy] for result in results])
        losses = results[0][strategy].trace.losses
        assert losses == results[0]["zero3"].trace.losses, f"{strategy} and zero3 are not bitwise equal"
