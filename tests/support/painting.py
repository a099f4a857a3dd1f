"""Models with painted values: every element follows from its tensor's name and its place alone.

What a load must give is then known without a word from the code under test. State of an optimizer is painted,
and looked at, by way of the parameters: `fs.full` knows the whole of those.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

import reference
from engines import build, my_rank, shard_blocks

WIDTH = 6
KEYS = ("exp_avg", "exp_avg_sq")


def pattern(name: str, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """The painted value of a tensor: random numbers that depend on its name."""
    draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    shape = tuple(shape)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=draw)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64, generator=draw).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=draw).to(dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Remembering(nn.Module):
    """Keeps what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        return x

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Zoo(nn.Module):
    """Every kind of tensor that a model may hold, in sizes that no rank count divides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.embed = nn.Embedding(7, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.memory = Remembering()
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.wide = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex64), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(9))
        self.lonely = nn.Parameter(torch.zeros(3, 2))  # ignored
        self.frozen = nn.Parameter(torch.zeros(13), requires_grad=False)
        self.packed = nn.Parameter(torch.zeros(10, dtype=torch.int8), requires_grad=False)
        self.flags = nn.Parameter(torch.zeros(5, dtype=torch.bool), requires_grad=False)
        self.register_buffer("ids", torch.arange(5))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("waves", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0, 2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.memory(self.norm(x))
        for block in self.blocks:
            h = block(h)
        image = self.conv(h.reshape(-1, 3, 2, 1)).mean()
        out = self.head(h) * self.scale + image + self.lonely.sum() + self.frozen.sum() * 0.01
        return out.square().mean() + self.wide.square().sum() + self.phase.abs().sum() + self.empty.sum()


# --- painting, and looking at what is there ------------------------------------------------------------

Optimizer = torch.optim.Optimizer


def paint(model: nn.Module, optimizer: Optimizer | None = None, salt: str = "") -> None:
    """Give every tensor its value. State is painted by way of the parameters: fs.full knows the whole."""
    if optimizer is not None:
        for key in sorted({key for state in optimizer.state.values() for key in state}):
            _paint_state(model, optimizer, key, salt)
    _paint_parameters(model, salt)
    for name, buffer in model.named_buffers():
        buffer.copy_(pattern(f"{salt}{name}", buffer.shape, buffer.dtype))


def scramble(model: nn.Module, optimizer: Optimizer) -> None:
    """Zeros everywhere: nothing of what was painted is left."""
    state = [value for held in optimizer.state.values() for value in held.values()]
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), *state):
            tensor.zero_()


def _paint_parameters(model: nn.Module, salt: str, key: str = "") -> None:
    import fullshard as fs

    with fs.full(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(pattern(f"{salt}{name}{key}", parameter.shape, parameter.dtype))


def _paint_state(model: nn.Module, optimizer: Optimizer, key: str, salt: str) -> None:
    if key != "step":
        _paint_parameters(model, salt, f".{key}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = optimizer.state.get(parameter, {}).get(key)
            if value is None:
                continue
            if value.shape == parameter.shape and value.numel() == parameter.numel() and key != "step":
                value.copy_(parameter)
            else:
                value.fill_(3 + len(name) if not salt else 0)


def whole_state(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """Every parameter, buffer and state, whole, by name."""
    import fullshard as fs

    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with fs.full(model, writeback=False):
        found |= reference.whole_parameters(model)
    if optimizer is None:
        return found
    parameters = dict(model.named_parameters())
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for key in sorted({key for state in optimizer.state.values() for key in state}):
        held = {n: s[key] for n, p in parameters.items() if key in (s := optimizer.state.get(p, {}))}
        whole = {n: v for n, v in held.items() if key != "step" and v.shape == parameters[n].shape}
        with torch.no_grad():
            for name, value in whole.items():
                parameters[name].copy_(value)
        with fs.full(model, writeback=False) if whole else nullcontext():
            values = reference.whole_parameters(model) if whole else {}
        found |= {f"{n}.{key}": values[n] if n in whole else v.clone() for n, v in held.items()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
    return found


def painted(found: dict[str, Tensor], salt: str = "") -> list[str]:
    """What is wrong with tensors that should be as `paint` left them."""
    wrong = []
    for name, value in found.items():
        if name.endswith(".step"):
            expected = torch.tensor(0.0 if salt else 3.0 + len(name) - 5)
        else:
            expected = pattern(f"{salt}{name}", value.shape, value.dtype)
        if not reference.bitwise(value, expected):
            wrong.append(name)
    return wrong


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def shard(make: Callable[[], nn.Module] = Zoo, **options: Any) -> nn.Module:
    if "mesh" in options:
        from torch.distributed.device_mesh import init_device_mesh

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        names = ("replicate" if options.get("strategy") == "hybrid" else "node", "shard")
        options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=names)
    return shard_blocks(build(make), **options)


def trained(model: nn.Module, make: Callable[[Any], Optimizer] = adamw, steps: int = 1) -> Optimizer:
    """A step, so that there is state to paint."""
    optimizer = make(model.parameters())
    for step in range(steps):
        draw = torch.Generator().manual_seed(100 * step + my_rank())
        model(torch.randn(4, WIDTH, generator=draw)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def load(path: Path, model: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> Any:
    """fs.load, with what it warns about only in the notes."""
    import fullshard as fs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fs.load(path, model, optimizer, **options)


IGNORE = {"ignore": ["lonely"]}
NO_STATE = {"unused", "frozen", "packed", "flags", "phase"}


def tensors_of(folder: Path, kind: str) -> dict[str, Tensor]:
    """What a plain reader of safetensors finds."""
    found: dict[str, Tensor] = {}
    for path in folder.glob(f"{kind}*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    return found


class Plain(nn.Module):
    """Blocks and a norm, all of one dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.to(self.norm.weight.dtype))
        for block in self.blocks:
            h = block(h)
        return h.float().square().mean()
