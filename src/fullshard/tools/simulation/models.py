"""Models to simulate: a preset, or a function of the user's that builds one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import FullshardError, OptionError
from fullshard.options import parse
from fullshard.plan.units import find_units
from fullshard.planning.decoder import Decoder, initialize
from fullshard.planning.sizes import Shape
from fullshard.tools.simulation.presets import PRESETS, describe


@dataclass(frozen=True)
class Subject:
    """A model to simulate: how it is built, its batch, and its loss."""

    name: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], Any]
    initialize: Callable[[nn.Module], None] | None = None  # fills a module that was built on meta

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss_in(self.output(model, batch))

    def output(self, model: nn.Module, batch: Any) -> Any:
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)

    def loss_in(self, out: Any) -> Tensor:
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
        if isinstance(loss, tuple | list):
            loss = loss[0]
        if not isinstance(loss, Tensor):
            raise OptionError(
                f"{self.name} returned a {type(out).__name__}, which has no loss",
                "Return a tensor, a dict with a 'loss', or an object with a .loss.",
            )
        return loss if loss.dim() == 0 else loss.float().mean()


class Training:
    """A model and its optimizer: each call is one step on the same batch."""

    def __init__(self, model: nn.Module, blocks: list[nn.Module], what: Subject, batch: Any) -> None:
        self.model, self.blocks, self._what, self._batch = model, blocks, what, batch
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def __call__(self) -> Tensor:
        loss = self._what.loss(self.model, self._batch)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model, outer ones first: fullshard's units, without lone layers."""
    options = parse(checkpoint_activations=True)
    modules = [module for unit in find_units(model, options)[1:] for module in unit.modules]
    return [module for module in modules if next(module.children(), None) is not None]


def subject(name: str, layers: int | None, tokens: int) -> Subject:
    """A preset by name, or FILE.py:FUNCTION or package.module:FUNCTION that returns (model, batch)."""
    if tokens < 2 or (layers is not None and layers < 1):
        raise OptionError(f"{layers} layers and {tokens} tokens", "Give at least 1 layer and 2 tokens.")
    if name in PRESETS:
        shape = PRESETS[name]
        return decoder(name, replace(shape, layers=layers or shape.layers), tokens)
    if ":" not in name:
        raise OptionError(
            f"there is no model {name!r}",
            f"Choose one of {', '.join(PRESETS)}, or give FILE.py:FUNCTION, a function that returns "
            "(model, batch).",
        )
    if layers is not None:
        raise OptionError(f"{name!r} decides its own layers", "Leave out --layers.")
    function = _function(name)
    if not callable(function):
        raise OptionError(f"{name!r} is a {type(function).__name__}", "Name a function.")
    model, batch = _made(name, function)
    ready = [model]
    return Subject(
        name,
        name,
        lambda: ready.pop() if ready else _made(name, function)[0],
        lambda device: _to(batch, device),
    )


def decoder(name: str, shape: Shape, tokens: int) -> Subject:
    length = min(shape.context, tokens)
    batch_size = tokens // length

    def batch(device: torch.device) -> Tensor:
        return torch.randint(0, shape.vocabulary, (batch_size, length + 1), device=device)

    about = f"{name}: {describe(shape)}; {batch_size * length:,} tokens per rank and step"
    return Subject(name, about, lambda: Decoder(shape), batch, initialize)


def _function(name: str) -> Any:
    place, _, function = name.rpartition(":")
    try:
        module = _loaded(place)
    except FileNotFoundError as error:
        if os.path.exists(place):  # it opens another one that is not there
            raise _failed(f"{place!r} cannot be loaded", place, error, _MEND_FILE) from error
        raise OptionError(f"{name!r} cannot be loaded: there is no file {place!r}", _GIVE) from error
    except ModuleNotFoundError as error:
        if place.endswith(".py") or not f"{place}.".startswith(f"{error.name}."):
            raise _failed(f"{place!r} cannot be loaded", place, error, _MEND_FILE) from error
        raise OptionError(f"{name!r} cannot be loaded: {error}", _GIVE) from error
    except FullshardError:
        raise
    except (Exception, SystemExit) as error:  # whatever the file does when it is imported
        raise _failed(f"{place!r} cannot be loaded", place, error, _MEND_FILE) from error
    if not hasattr(module, function):
        raise OptionError(f"{name!r} cannot be loaded: {place!r} has no {function!r}", _GIVE)
    return getattr(module, function)


_GIVE = "Give FILE.py:FUNCTION, a function that returns (model, batch)."
_MEND_FILE = "Mend the file: it must be possible to import it."


def _loaded(place: str) -> Any:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _made(name: str, function: Callable[[], Any]) -> tuple[nn.Module, Any]:
    """What the user's function returns: a model, and its batch."""
    needed = _arguments(function)
    if needed:
        raise OptionError(
            f"{name!r} is called without arguments, and needs {', '.join(needed)}",
            "Name a function that needs none, such as one that calls it.",
        )
    try:
        made = function()
    except FullshardError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise _failed(f"{name!r} fails", name.rpartition(":")[0], error, "Mend the function.") from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise OptionError(f"{name!r} returned a {type(made).__name__}", "Return (model, batch).")
    return made


def _arguments(function: Callable[..., Any]) -> list[str]:
    """Names of those that it cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of something built in
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in optional]


def _failed(what: str, place: str, error: BaseException, remedy: str) -> OptionError:
    """With the innermost line of the user's file in the traceback, or of any file if it has none of that."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        file, line = error.filename or place, error.lineno
        return OptionError(f"{what}: {text.split(' (')[0]} ({file}, line {line})", remedy)
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if one.filename in (place, os.path.abspath(place))]
    at = own[-1:] or [one for one in frames if __file__ != one.filename][-1:]
    where = f" ({at[0].filename}, line {at[0].lineno})" if at else ""
    return OptionError(f"{what}: {text}{where}", remedy)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_to(item, device) for item in value)
    return value
