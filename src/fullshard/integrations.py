"""Model libraries: what their models need of the engine, without the engine knowing any of them by name.

A library is registered once (see `fullshard.model_libraries`). Its functions are called with every model and
ignore what is not theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

Initializer = Callable[[], Any]
Parents = Mapping[nn.Module, Sequence[nn.Module]]  # of each module of a model; the root has none


@dataclass(frozen=True)
class ModelLibrary:
    """What the models of one library need.

    initializer: (root, module, parents) to the function that gives the tensors of `module`, which is on the
        meta device, their values; None leaves `module` to other initializers.
    attach: (runtime, model), called once, when `model` has been sharded.
    inference: the context that runs inside fs.inference(model).
    """

    name: str
    initializer: Callable[[nn.Module, nn.Module, Parents], Initializer | None]
    attach: Callable[[Any, nn.Module], None]
    inference: Callable[[nn.Module], AbstractContextManager[None]]


_libraries: dict[str, ModelLibrary] = {}


def register(library: ModelLibrary) -> None:
    """A second library of the same name replaces the first."""
    _libraries[library.name] = library


def initializer_of(root: nn.Module, module: nn.Module, parents: Parents) -> Initializer | None:
    """The first that a library has for `module`."""
    for library in _libraries.values():
        initializer = library.initializer(root, module, parents)
        if initializer is not None:
            return initializer
    return None


def attach(runtime: Any, model: nn.Module) -> None:
    for library in _libraries.values():
        library.attach(runtime, model)


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    with ExitStack() as entered:
        for library in _libraries.values():
            entered.enter_context(library.inference(model))
        yield
