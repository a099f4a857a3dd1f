"""The unsharded copy of a model that computes beside it, on the same inputs and random numbers.

Plain torch: no hooks of ours, no recomputation of activations. Under mixed precision its parameters are cast
for each call as the engine's are, so that both round alike.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import nn

from fullshard.doctor.fingerprints import RandomState, fingerprint, generators_in
from fullshard.engine.homes.split_masters import address
from fullshard.engine.runtime import Runtime
from fullshard.engine.tensors import cast_floats, map_tensors, tensors_in

_LIBRARIES = (
    os.path.dirname(torch.__file__),
    os.path.dirname(os.path.dirname(__file__)),
    contextlib.__file__,
)
_FRAMES = 12  # of user code by which one backward of a script differs from another
computing = [False]  # whether a reference runs now: what it does is not recorded as the script's


@contextlib.contextmanager
def running() -> Iterator[None]:
    before, computing[0] = computing[0], True
    try:
        yield
    finally:
        computing[0] = before


def plain_copy(model: nn.Module) -> nn.Module:
    """A copy of a model that is not sharded yet. Generators are shared: their states are set before use."""
    memo: dict[int, Any] = {id(generator): generator for generator in generators_in(model)}
    with running():
        return copy.deepcopy(model, memo)


@dataclass
class Computed:
    """One forward of a module and of everything inside it."""

    outputs: Any
    inner: list[tuple[str, list[torch.Tensor]]]  # by module, in the order in which they ended
    nodes: list[tuple[str, list[Any]]]  # of autograd, which made them
    results: list[torch.Tensor]  # that need a gradient: of the output, then in attributes
    kept: list[tuple[str, torch.Tensor, str, int]] = field(default_factory=list)

    def edited(self) -> list[str]:
        """Operations whose kept tensors changed since, without autograd noticing."""
        return [
            where
            for where, tensor, before, version in self.kept
            if tensor._version == version and fingerprint(tensor) != before
        ]


class Reference:
    def __init__(self, copied: nn.Module, runtime: Runtime, points: Sequence[str]) -> None:
        device = runtime.comm.device
        on_meta = any(t.is_meta for t in (*copied.parameters(), *copied.buffers()))
        self.module, self._runtime = copied.to_empty(device=device) if on_meta else copied.to(device), runtime
        self.modules = dict(copied.named_modules())
        self.parameters = dict(copied.named_parameters(remove_duplicate=False))
        self.points = [name for name in points if name in self.modules]
        self.custom: dict[str, set[str]] = {}  # autograd functions of its own, by module
        self._casts: dict[str, torch.dtype] = {}
        for parameter, lane, index in runtime.places():
            name = lane.layout.pieces[index].name
            self.parameters[name].data = self.parameters[name].data.to(parameter.dtype)  # masters at rest
            if lane.dtypes.compute != self.parameters[name].dtype:
                self._casts[name] = lane.dtypes.compute
        self._cast_inputs()

    def _cast_inputs(self) -> None:
        """As the engine casts the inputs of units, and the outputs of the model."""
        names = {module: name for name, module in self._runtime.model.named_modules()}
        for unit in self._runtime.units:
            casts = unit.policy.casts
            dtype = self._runtime.options.precision.compute if casts is None else casts[0]
            outputs = casts[1] if casts else None
            if unit is self._runtime.root and casts is None:
                outputs = self._runtime.options.precision.outputs
            for module in unit.modules:
                own = self.modules.get(names.get(module, "?"))
                if own is not None and dtype is not None:
                    own.register_forward_pre_hook(_input_cast(dtype), with_kwargs=True)
                if own is not None and outputs is not None:
                    own.register_forward_hook(_output_cast(outputs))

    def set_parameters(self, values: dict[str, torch.Tensor | None]) -> None:
        """Only what differs, and unseen by autograd: graphs of earlier calls may still go back."""
        for name, value in values.items():
            own = self.parameters[name].data
            if value is not None and not torch.equal(own, new := value.to(own.device, own.dtype)):
                own.copy_(new)

    def follow(self, model: nn.Module) -> None:
        """Take over buffers, modes and what trains."""
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name, buffer in model.named_buffers(remove_duplicate=False):
                own = buffers.get(name)
                if own is not None and own.shape == buffer.shape and not torch.equal(own, buffer):
                    own.data.copy_(buffer)
        memo: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name in self.modules:
                self.modules[name].__dict__.update(_changed(self.modules[name], _kept_state(module, memo)))
        sharded = {id(parameter) for parameter in self._runtime.parameters}
        with torch.no_grad():
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if id(parameter) not in sharded and name in self.parameters:  # one that fs.shard ignores
                    self.parameters[name].data.copy_(parameter)
        for parameter, lane, index in self._runtime.places():
            self.parameters[lane.layout.pieces[index].name].requires_grad_(parameter.requires_grad)

    def state(self) -> Callable[[], None]:
        """What a forward changes: parameters, buffers, attributes. Calling it sets them back."""
        tensors = [(t, t.detach().clone()) for t in (*self.module.parameters(), *self.module.buffers())]
        memo: dict[int, torch.Tensor] = {}
        states = [(module, _kept_state(module, memo)) for module in self.module.modules()]

        def restore() -> None:
            for tensor, before in tensors:
                if not _equal(tensor.detach(), before):
                    tensor.data.copy_(before)
            for module, state in states:
                module.__dict__.update(_changed(module, state))

        return restore

    def compute(self, name: str, args: Any, kwargs: Any, state: RandomState, keep: bool) -> Computed:
        """Forward of one of its modules from given random numbers. With `keep`, what it keeps is watched."""
        called = self.modules[name]
        inner: list[tuple[str, list[torch.Tensor]]] = []
        nodes: list[tuple[str, list[Any]]] = []
        kept: list[tuple[str, torch.Tensor, str, int]] = []
        hooks = [
            self.modules[point].register_forward_hook(_note_output(inner, nodes, point))
            for point in self.points
        ]
        now = RandomState(self.module)
        state.restore()
        earlier = self._attributes()  # held until the end: an id may be given again
        before = {id(t) for t in earlier}
        buffers = {address(buffer) for buffer in self.module.buffers()}
        watching = _watched_saving(kept, buffers) if keep else contextlib.nullcontext()
        try:
            with running(), watching:
                outputs = self._call(called, name, args, kwargs)
        finally:
            now.restore()
            for hook in hooks:
                hook.remove()
        results = [t for t in tensors_in(outputs) if t.requires_grad]
        results += [t for t in self._attributes() if id(t) not in before]
        return Computed(outputs, inner, nodes, results, kept)

    def _call(self, called: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
        prefix = f"{name}." if name else ""
        cast = {
            full.removeprefix(prefix): self.parameters[full].to(dtype)
            for full, dtype in self._casts.items()
            if full.startswith(prefix)
        }
        if not cast:
            return called(*args, **kwargs)
        return torch.func.functional_call(called, cast, args, kwargs, tie_weights=True)

    def _attributes(self) -> list[torch.Tensor]:
        return results_in_attributes(self.module)

    def penalty(self, term: Callable[[str, torch.Tensor], Any], names: Sequence[str]) -> torch.Tensor:
        """What fs.penalty is for the copy's parameters."""
        with running():
            terms = [torch.as_tensor(term(name, self.parameters[name])).sum() for name in names]
            return torch.stack([one.float() for one in terms]).sum()

    def backward(self, results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        with running():
            torch.autograd.backward(list(results), list(gradients), retain_graph=True)

    def take_gradients(self) -> dict[str, torch.Tensor | None]:
        """What backward has added up since the last time."""
        taken = {}
        for name, parameter in self.parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout != torch.strided:
                gradient = gradient.to_dense()
            taken[name] = gradient
        return taken

    def note_custom_functions(self, computed: Computed) -> bool:
        """Which modules use autograd functions that somebody wrote: from the graph between their outputs.

        Whether there are more than before."""
        seen: set[Any] = set()
        before = sum(map(len, self.custom.values()))
        for name, nodes in computed.nodes:
            found = _custom_functions(list(nodes), seen)
            if found:
                self.custom.setdefault(name, set()).update(found)
        return sum(map(len, self.custom.values())) > before


_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}  # attributes that every module has
_OTHER = object()


def _kept_state(module: nn.Module, memo: dict[int, torch.Tensor]) -> dict[str, Any]:
    """What a module keeps in attributes: numbers, flags, texts, tensors (a hidden state), and lists of them.

    Tensors are copied, one that several modules hold once."""
    kept = {
        key: _kept(value, memo)
        for key, value in vars(module).items()
        if key not in _OF_TORCH and not key.startswith("_fullshard")
    }
    return {key: value for key, value in kept.items() if value is not _OTHER}


def _kept(value: Any, memo: dict[int, torch.Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return _kept_tensor(value, memo)
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        return value.copy()
    if type(value) is dict:
        inner = {key: _kept(one, memo) for key, one in value.items()}
        return _OTHER if any(one is _OTHER for one in inner.values()) else inner
    if type(value) in (list, tuple, deque):
        items = [_kept(one, memo) for one in value]
        return _OTHER if any(one is _OTHER for one in items) else _sequence(value, items)
    return _OTHER


def _sequence(like: Any, items: list[Any]) -> Any:
    return deque(items, like.maxlen) if isinstance(like, deque) else type(like)(items)


def _kept_tensor(tensor: torch.Tensor, memo: dict[int, torch.Tensor]) -> Any:
    if id(tensor) not in memo:
        needed = tensor.numel() * tensor.element_size() if tensor.layout == torch.strided else 0
        try:
            if needed and tensor.untyped_storage().nbytes() == 0:
                return _OTHER  # of a parameter that the engine has released
            memo[id(tensor)] = tensor.detach().clone()
        except (RuntimeError, NotImplementedError):  # a tensor of a kind that has no storage, or no copy
            return _OTHER
    return memo[id(tensor)]


def _changed(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Without what the module has already: its own tensors may be held elsewhere too."""
    own = vars(module)
    return {key: value for key, value in state.items() if key not in own or not _equal(own[key], value)}


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if a.grad_fn is not None or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return False
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(_equal, a, b))
    if type(a).__module__ == "numpy":
        return bool(a.shape == b.shape and (a == b).all())
    return bool(a is b or a == b)


def results_in_attributes(model: nn.Module) -> list[torch.Tensor]:
    """Tensors with a gradient that modules keep beside their output: a router's loss, for example."""
    return [
        tensor
        for module in model.modules()
        for key, value in vars(module).items()
        if key not in ("_parameters", "_buffers", "_modules") and not key.startswith("_fullshard")
        for tensor in ([value] if isinstance(value, torch.Tensor) else _listed(value))
        if tensor.grad_fn is not None
    ]


def _listed(value: Any) -> list[torch.Tensor]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, torch.Tensor)]


def _input_cast(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    return cast


def _output_cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda _module, _args, output: cast_floats(output, dtype)


def _note_output(
    inner: list[tuple[str, list[torch.Tensor]]], nodes: list[tuple[str, list[Any]]], name: str
) -> Callable[..., None]:
    """Copies: the modules that follow may write into an output."""

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        tensors = list(tensors_in(output))
        inner.append((name, [tensor.detach().clone() for tensor in tensors]))
        nodes.append((name, [tensor.grad_fn for tensor in tensors]))

    return note


@contextlib.contextmanager
def _watched_saving(kept: list[tuple[str, torch.Tensor, str, int]], buffers: set[int]) -> Iterator[None]:
    """Note every tensor that autograd keeps, with its values now; buffers change in every forward."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.numel() and address(tensor) not in buffers:
            kept.append((place(), tensor.detach(), fingerprint(tensor), tensor._version))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def place() -> str:
    """The line of user code that runs now."""
    return next(_user_lines(), "?")


def places() -> str:
    """The lines of user code that run now: a method that all losses pass is not one site."""
    return " < ".join(islice(_user_lines(), _FRAMES)) or "?"


def _user_lines() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            yield f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back


def _custom_functions(queue: list[Any], seen: set[Any]) -> set[str]:
    found: set[str] = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            kind = getattr(type(node), "_forward_cls", None)
            found.add(kind.__name__ if kind is not None else type(node).__name__.removesuffix("Backward"))
        queue += [below for below, _ in node.next_functions]
    return found


def cloned(value: Any) -> Any:
    """Arguments as they are now, detached from the script's graph."""
    return map_tensors(value, lambda tensor: tensor.detach().clone())
