"""Models whose blocks return, write, call and leave behind what blocks may."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import engines
from engines import WIDTH, Net

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


def returning(kind: str) -> type[nn.Module]:
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


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.ModuleList([nn.Linear(WIDTH, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        for layer in self.blocks:
            x = x + layer(x)
        return self.head(x), self.other[1](self.other[0](x))


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
