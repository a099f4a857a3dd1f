"""What blocks may return and how they may be called: sharded as in one process."""

from __future__ import annotations

import traceback
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cases
import engines
import ranks
import reference
from cases import ALL, Case, Outcome, Piece
from engines import WIDTH, Net, batch, build, loss_of, my_rank

# zero1 differs from zero2 only inside fs.accumulate.
STRATEGIES = ("zero3", "zero2", "replicate")
CASES_A_LAUNCH = 10

# --- what a block returns ------------------------------------------------------------------------------


@dataclass
class Result:
    hidden: Tensor
    scores: Tensor | None = None


@dataclass(frozen=True)
class FrozenResult:
    hidden: Tensor
    parts: list[Tensor]


@dataclass(slots=True)
class SlottedResult:
    hidden: Tensor


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As Hugging Face has it: keys are attributes too."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


Pair = namedtuple("Pair", ["hidden", "gate"])


class Returning(nn.Module):
    """A block that hands out its result in many ways; `scale` is a parameter of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, 13)
        self.second = nn.Linear(13, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "its input":
            return x
        y = self.second(torch.tanh(self.first(x)))
        return {
            "tuple": lambda: (y, y.mean()),
            "named tuple": lambda: Pair(y, torch.sigmoid(y)),
            "list in a dict": lambda: {"hidden": [y, {"more": y * 2}], "note": "text", "number": 3},
            "dataclass": lambda: Result(y),
            "frozen dataclass": lambda: FrozenResult(y, [y * 2]),
            "dataclass with slots": lambda: SlottedResult(y),
            "deep nest": lambda: [[[[[[y]]]]]],
            "iterator": lambda: iter([y]),
            "model output": lambda: ModelOutput(hidden=y, scores=y * 2),
            "row view": lambda: (y + self.scale)[:, None].expand(-1, 3, -1)[:, 0],
            "transposed": lambda: (y * 2).t(),
            "chunks": lambda: (y * 2).chunk(2, dim=1),
            "parameter": lambda: (y, self.scale),
            "view of a parameter": lambda: (y, self.scale[1:5].view(2, 2)),
            "detached parameter": lambda: (y, self.scale.detach()),
            "none and tensor": lambda: (None, y),
        }[self.kind]()


def _hidden(kind: str, out: Any) -> Tensor:
    match kind:
        case "tuple":
            return out[0] + out[1]
        case "named tuple":
            return out.hidden * out.gate
        case "list in a dict":
            return out["hidden"][0] + out["hidden"][1]["more"]
        case "dataclass" | "dataclass with slots":
            return out.hidden
        case "deep nest":
            return out[0][0][0][0][0][0]
        case "iterator":
            return next(out)
        case "frozen dataclass":
            return out.hidden + out.parts[0]
        case "model output":
            assert list(out) == ["hidden", "scores"]
            assert out["hidden"] is out.hidden
            return out.hidden + out["scores"]
        case "transposed":
            return out.t()
        case "chunks":
            return torch.cat([out[1], out[0]], dim=1)
        case "parameter" | "detached parameter":
            return out[0] * out[1]
        case "view of a parameter":
            return out[0] * out[1].sum()
        case "none and tensor":
            return out[1]
    return out


class ReturningNet(nn.Module):
    kinds: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returning(kind) for kind in self.kinds)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + _hidden(layer.kind, layer(x))
        return self.head(x)


def _returning(kind: str) -> type[nn.Module]:
    return type("ReturningNet", (ReturningNet,), {"kinds": (kind, kind)})


RETURNS = [
    "tuple", "named tuple", "list in a dict", "dataclass", "frozen dataclass", "model output", "row view",
    "transposed", "chunks", "parameter", "view of a parameter", "detached parameter", "none and tensor",
    "its input", "dataclass with slots", "deep nest", "iterator",
]  # fmt: skip


# --- who writes into what ------------------------------------------------------------------------------


class WritesIntoOutput(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            y = layer(x)
            y.mul_(0.5).add_(x)
            x = y
        return self.head(x)


class WritesIntoAViewOfTheOutput(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            y = layer(x)
            y[:, 0] = 0.25
            y[:, 1:3] += 1.0
            x = x + y
        return self.head(x)


class ReturnsColumn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = engines.block()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(x), x], dim=1)[:, :WIDTH]


class WritesIntoAReturnedView(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ReturnsColumn() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            y = layer(x)
            y[:, :2].mul_(0.5)
            x = x + y
        return self.head(x)


class OverwritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.inner(x)


class WritesIntoItsInput(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OverwritesInput() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.0
        for layer in self.blocks:
            x = x + layer(x)
        return self.head(x)


# --- how often and in what order a block is called -----------------------------------------------------


class TwiceInARow(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + layer(x + layer(x))
        return self.head(x)


class TwiceWithOthersBetween(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.blocks, *self.blocks]:
            x = x + layer(x)
        return self.head(x)


class ListedTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = engines.block()

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = x + self.inner(x)
        return self(y, depth - 1) if depth else y


class CallsItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Recursive() for _ in range(2))


class UnusedOutput(Net):
    """The second block runs, and nobody looks at what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.blocks[0](x)
        self.blocks[1](x)
        x = x + self.blocks[2](x)
        return self.head(x)


class WithoutGradientInside(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.blocks[0](x)
        with torch.no_grad():
            still = self.blocks[1](x)
        x = x + still + self.blocks[2](x)
        return self.head(x)


class NoGradFirst(Net):
    """A frozen trunk, as a feature extractor has it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + self.blocks[0](x)
            x = x + self.blocks[1](x)
        x = x + self.blocks[2](x)
        return self.head(x)


class PassesKeywords(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keyworded() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + layer(hidden=x, others={"more": [x]})
        return self.head(x)


class Keyworded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = engines.block()

    def forward(self, *, hidden: Tensor, others: dict[str, list[Tensor]]) -> Tensor:
        return self.inner(hidden + others["more"][0])


# --- recomputation -------------------------------------------------------------------------------------


class CheckpointsTwoBlocks(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()  # the reentrant kind does nothing for inputs without a gradient
        x = checkpoint(self.two, x, use_reentrant=self.reentrant)
        x = x + self.blocks[2](x)
        return self.head(x)

    def two(self, x: Tensor) -> Tensor:
        for layer in self.blocks[:2]:
            x = x + layer(x)
        return x


class CheckpointsTwoBlocksReentrant(CheckpointsTwoBlocks):
    reentrant = True


class CheckpointsEveryBlockTwice(Net):
    """A checkpoint within a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.all, x, use_reentrant=False))

    def all(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


class Dropping(Net):
    """Random numbers are drawn again alike in the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.blocks:
            layer.insert(1, nn.Dropout(0.5))


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


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.ModuleList([nn.Linear(WIDTH, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        for layer in self.blocks:
            x = x + layer(x)
        return self.head(x), self.other[1](self.other[0](x))


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


class LeavingBlock(nn.Module):
    """As routers of experts do: a loss of its own, computed last and left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = engines.block()
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.loss = torch.softmax(self.router(torch.tanh(x)), -1).pow(2).mean()
        return y


class LeavesLoss(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LeavingBlock() for _ in range(3))


def _with_losses_left(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = (loss_of(model, piece) + sum(layer.loss for layer in model.blocks)) * weight
    loss.backward()
    return loss.item()


def _loss_left_alone(model: nn.Module, piece: Piece, weight: float) -> float:
    model(piece[0])
    loss = model.blocks[1].loss * weight
    loss.backward()
    return loss.item()


class AppendingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = engines.block()

    def forward(self, x: Tensor, results: list[Tensor]) -> None:
        results.append(self.inner(x))


class AppendsToList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AppendingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for layer in self.blocks:
            layer(sum(results), results)
        return self.head(sum(results))


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


CASES = {f"returns {kind}": Case(_returning(kind)) for kind in RETURNS} | {
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
        _returning("list in a dict"), options={"checkpoint_activations": True}
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


def _train_cases(names: list[str]) -> dict[str, dict[str, Outcome] | str]:
    found: dict[str, dict[str, Outcome] | str] = {}
    for name in names:
        try:
            found[name] = {s: cases.on_a_rank(CASES[name], strategy=s) for s in STRATEGIES}
        except Exception:
            found[name] = traceback.format_exc()  # alike on all ranks: the other cases can still run
    return found


@pytest.fixture(scope="module")
def trained() -> Callable[[str], list[Any]]:
    """What each rank made of a case, by strategy. Several cases share one launch."""
    launched: dict[int, Any] = {}
    names = list(CASES)

    def outcomes(name: str) -> list[Any]:
        group = names.index(name) // CASES_A_LAUNCH
        if group not in launched:
            start = group * CASES_A_LAUNCH
            try:
                launched[group] = ranks.run(_train_cases, 2, names[start : start + CASES_A_LAUNCH])
            except ranks.RankFailure as failure:
                launched[group] = failure
        if isinstance(launched[group], ranks.RankFailure):
            raise launched[group]
        return [result[name] for result in launched[group]]

    return outcomes


@pytest.mark.parametrize("name", CASES)
def test_block_trains_as_in_one_process_under_every_strategy(name: str, trained: Any) -> None:
    results = trained(name)
    for rank, result in enumerate(results):
        assert isinstance(result, dict), f"rank {rank}: {result}"
    for strategy in STRATEGIES:
        cases.assert_as_in_one_process(CASES[name], [result[strategy] for result in results])
        losses = results[0][strategy].trace.losses
        assert losses == results[0]["zero3"].trace.losses, f"{strategy} and zero3 are not bitwise equal"


# --- a graph that is older than the weights ------------------------------------------------------------


def _stale(strategy: str, how: str) -> tuple[tuple[str, str, str], Outcome]:
    import fullshard as fs

    model = fs.shard(build(), strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (loss_of(model, batch(step, my_rank())) for step in (0, 1))
    first.backward()
    if how == "step":
        optimizer.step()
    else:
        with torch.no_grad():
            model.blocks[1][0].weight.mul_(0.5)
    return cases.refusal(second.backward), cases.on_a_rank(Case(), strategy=strategy)


def _stale_everywhere() -> dict[tuple[str, str], tuple[tuple[str, str, str], Outcome]]:
    return {(s, how): _stale(s, how) for s in STRATEGIES for how in ("step", "edit")}


def test_backward_of_a_forward_from_before_the_step_is_refused_as_in_one_process() -> None:
    model = build()
    first, second = (loss_of(model, batch(step, 0)) for step in (0, 1))
    first.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    results = ranks.run(_stale_everywhere, 2)
    for key in results[0]:
        cases.assert_as_in_one_process(Case(), [result[key][1] for result in results])
        for result in results:
            kind, message, remedy = result[key][0]
            assert kind == "StateError", key
            assert "backward" in message, key
            assert remedy, key


# --- hooks registered after sharding -------------------------------------------------------------------


def _late_hooks() -> list[tuple[int, ...]]:
    import fullshard as fs

    model = fs.shard(build())
    seen: list[tuple[int, ...]] = []
    for module, weight in (
        (model.blocks[1], model.blocks[1][0]),
        (model, model.head),
        (model.head, model.head),
    ):

        def look(*_: Any, weight: nn.Module = weight) -> None:
            seen.append(tuple(weight.weight.shape))

        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
    loss_of(model, batch(0, my_rank())).backward()
    return seen


def test_forward_hooks_registered_after_shard_see_whole_weights() -> None:
    for seen in ranks.run(_late_hooks, 2):
        assert seen == [(5, 8), (13, 8), (13, 8), (5, 8), (5, 8), (5, 8)]


def _with_and_without_recomputation() -> list[tuple[list[float], dict[str, Tensor]]]:
    found = []
    for options in ({}, {"checkpoint_activations": True}, {"prefetch": False}):
        torch.manual_seed(5 + my_rank())
        outcome = cases.on_a_rank(Case(Dropping), **options)
        found.append((outcome.trace.losses, outcome.trace.parameters))
    return found


def test_recomputation_and_prefetch_change_no_bit_with_dropout() -> None:
    for plain, *others in ranks.run(_with_and_without_recomputation, 2):
        for other in others:
            assert other[0] == plain[0]
            for name, value in plain[1].items():
                assert reference.bitwise(other[1][name], value), name


# --- torch.compile -------------------------------------------------------------------------------------


def _compiled_before(backend: str) -> nn.Module:
    model = Net()
    for index, layer in enumerate(model.blocks):
        model.blocks[index] = torch.compile(layer, backend=backend)
    return model


def _compiled_in_place() -> nn.Module:
    model = Net()
    for layer in model.blocks:
        layer.compile(backend="aot_eager")
    return model


def _compile_blocks(model: nn.Module) -> None:
    for layer in model.blocks:
        layer.compile(backend="aot_eager")


COMPILED = {
    "torch.compile(block) before shard": Case(lambda: _compiled_before("aot_eager")),
    "block.compile() before shard": Case(_compiled_in_place),
    "block.compile() after shard": Case(after_shard=_compile_blocks),
    "checkpoint_activations": Case(
        lambda: _compiled_before("aot_eager"), options={"checkpoint_activations": True}
    ),
    "inductor": Case(lambda: _compiled_before("inductor")),
}


def _train_compiled(names: list[str]) -> dict[str, tuple[Outcome, int]]:
    found = {}
    for name in names:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        outcome = cases.on_a_rank(COMPILED[name])
        names_now = {key.replace("_orig_mod.", ""): v for key, v in outcome.trace.parameters.items()}
        trace = reference.Trace(outcome.trace.losses, outcome.trace.grad_norms, names_now)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found[name] = (Outcome(trace, outcome.without_gradient), graphs)
    return found


def _check_compiled(names: list[str]) -> None:
    results = ranks.run(_train_compiled, 2, names, timeout_s=200.0)
    for name in names:
        cases.assert_as_in_one_process(Case(), [result[name][0] for result in results])
        assert all(result[name][1] >= 1 for result in results), f"{name}: nothing was compiled"


def test_compiled_block_trains_as_in_one_process() -> None:
    _check_compiled([name for name in COMPILED if name != "inductor"])


@pytest.mark.long
def test_block_compiled_by_inductor_trains_as_in_one_process() -> None:
    _check_compiled(["inductor"])


# --- graphs of graphs ----------------------------------------------------------------------------------


def _penalised(model: nn.Module, piece: Piece, weight: float) -> float:
    """A gradient penalty: the loss has a gradient inside."""
    x = piece[0].clone().requires_grad_()
    loss = F.cross_entropy(model(x), piece[1])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    total = (loss + slope.pow(2).sum()) * weight
    total.backward()
    return total.item()


PENALISED = Case(backward=_penalised)


def _gradient_penalty() -> tuple[Outcome, list[tuple[str, str, str]], Outcome]:
    replicated = cases.on_a_rank(PENALISED, strategy="replicate")
    refused = [cases.refusal(lambda s=s: cases.on_a_rank(PENALISED, strategy=s)) for s in ALL[:3]]
    return replicated, refused, cases.on_a_rank(Case())


def test_gradient_penalty_is_right_under_replicate_and_refused_where_values_are_released() -> None:
    results = ranks.run(_gradient_penalty, 2)
    cases.assert_as_in_one_process(PENALISED, [result[0] for result in results])
    cases.assert_as_in_one_process(Case(), [result[2] for result in results])
    for _, refused, _ in results:
        for kind, message, remedy in refused:
            assert kind == "Unsupported"
            assert "create_graph" in message
            assert "replicate" in remedy


# --- calls from outside the model's forward ------------------------------------------------------------


def _by_hand(model: nn.Module, piece: Piece, weight: float) -> float:
    """The model's own forward, spelled out by its caller."""
    x = piece[0]
    for layer in model.blocks:
        x = x + layer(x)
    loss = F.cross_entropy(model.head(x), piece[1]) * weight
    loss.backward()
    return loss.item()


def _one_block_alone(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = model.blocks[1](piece[0]).pow(2).mean() * weight
    loss.backward()
    return loss.item()


def _leaf_of_a_block(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = model.blocks[1][0](piece[0]).pow(2).mean() * weight
    loss.backward()
    return loss.item()


def _block_before_the_model(model: nn.Module, piece: Piece, weight: float) -> float:
    return cases.plainly(model, (model.blocks[0](piece[0]), piece[1]), weight)


def _head_after_the_model(model: nn.Module, piece: Piece, weight: float) -> float:
    loss = loss_of(model, piece) + model.head(piece[0]).pow(2).mean()
    loss = loss * weight
    loss.backward()
    return loss.item()


STRAY = {
    "the whole forward by hand": Case(backward=_by_hand),
    "one block alone": Case(backward=_one_block_alone),
    "a leaf of a block": Case(backward=_leaf_of_a_block),
    "a block before the model": Case(backward=_block_before_the_model),
    "the head after the model": Case(backward=_head_after_the_model),
}


def _train_stray(name: str) -> dict[str, Outcome]:
    return {strategy: cases.on_a_rank(STRAY[name], strategy=strategy) for strategy in STRATEGIES}


@pytest.mark.parametrize("name", STRAY)
def test_submodule_called_from_outside_counts_as_in_one_process(name: str) -> None:
    results = ranks.run(_train_stray, 2, name)
    for strategy in STRATEGIES:
        cases.assert_as_in_one_process(STRAY[name], [result[strategy] for result in results])


# --- exceptions ----------------------------------------------------------------------------------------


class Failing(Net):
    """Raises where it is told to, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.at = ""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.blocks):
            x = x + layer(x)
            if self.at == f"forward after block {index}":
                raise ValueError("on purpose")
            if self.at == f"backward of block {index}":
                x.register_hook(_raise)
        return self.head(x)


class FailsInside(nn.Module):
    def __init__(self, net: Failing) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.net = [net]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.net[0].at == "inside a block":
            raise ValueError("on purpose")
        return torch.tanh(y)


class FailingInside(Failing):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FailsInside(self) for _ in range(3))


def _raise(_: Tensor) -> None:
    raise ValueError("on purpose")


def _fails_first(model: nn.Module, piece: Piece, weight: float) -> float:
    places = ["forward after block 1", "backward of block 1", "backward of block 2", "inside a block"]
    for model.at in places:
        before = [p.shape for p in model.parameters()]
        try:
            cases.plainly(model, piece, weight)
        except ValueError as error:
            assert str(error) == "on purpose"
        else:
            assert model.at == "inside a block", f"nothing was raised at {model.at!r}"
            assert type(model) is Failing
        assert [p.shape for p in model.parameters()] == before, f"full values stayed after {model.at!r}"
        model.zero_grad()
    model.at = ""
    return cases.plainly(model, piece, weight)


def _only_good_steps(model: nn.Module, piece: Piece, weight: float) -> float:
    return cases.plainly(model, piece, weight)


def _train_failing() -> list[dict[str, Outcome]]:
    return [
        {s: cases.on_a_rank(Case(make, _fails_first, steps=3), strategy=s) for s in STRATEGIES}
        for make in (Failing, FailingInside)
    ]


def test_exception_in_forward_or_backward_leaves_no_trace_in_the_next_step() -> None:
    results = ranks.run(_train_failing, 2)
    for index, make in enumerate((Failing, FailingInside)):
        for strategy in STRATEGIES:
            outcomes = [result[index][strategy] for result in results]
            cases.assert_as_in_one_process(Case(make, _only_good_steps, steps=3), outcomes)


# --- methods other than forward ------------------------------------------------------------------------


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.normalised()

    def normalised(self) -> Tensor:
        return self.weight / self.weight.norm()

    def shapes(self) -> str:
        return f"{WIDTH} x {WIDTH}"


class HasMethods(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Quantised() for _ in range(3))


def _call_methods() -> dict[str, Any]:
    import fullshard as fs

    found: dict[str, Any] = {}
    plain = build(HasMethods)
    model = fs.shard(build(HasMethods))
    found["refused"] = cases.refusal(model.blocks[1].normalised)
    found["other"] = model.blocks[1].shapes()
    with fs.full(model):
        found["inside"] = reference.bitwise(
            model.blocks[1].normalised().detach(), plain.blocks[1].normalised().detach()
        )
    replicated = fs.shard(build(HasMethods), strategy="replicate")
    found["replicate"] = reference.bitwise(
        replicated.blocks[1].normalised().detach(), plain.blocks[1].normalised().detach()
    )
    found["trained"] = cases.on_a_rank(Case(HasMethods))
    return found


def test_method_that_reads_parameters_at_rest_is_refused_by_name_and_works_inside_full() -> None:
    results = ranks.run(_call_methods, 2)
    for result in results:
        kind, message, remedy = result["refused"]
        assert kind == "AtRestError"
        assert "'normalised' of Quantised" in message
        assert "weight" in message
        assert "blocks.1" in message
        assert "fs.full" in remedy
        assert result["other"] == "8 x 8"
        assert result["inside"]
        assert result["replicate"]
    cases.assert_as_in_one_process(Case(HasMethods), [result["trained"] for result in results])
