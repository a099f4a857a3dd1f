"""Where we reach into the libraries: when one of their modules is imported, or now if it is there already.

Nothing is imported here, so a script that never imports accelerate pays nothing. Functions and methods are
replaced in place, not classes: scripts, Trainer and trl hold references to the classes already.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Imported by name, because they import libraries' modules only when those are there.
_PATCHES = {
    "accelerate.accelerator": "fullshard.hugging_face.accelerators",
    "transformers.training_args": "fullshard.hugging_face.cpu_ranks",
    "transformers.trainer": "fullshard.hugging_face.trainers",
    "transformers.trainer_utils": "fullshard.hugging_face.trainers",
    "transformers.trainer_pt_utils": "fullshard.hugging_face.trainers",
    "trl.models.utils": "fullshard.hugging_face.reference_models",
}
_HOLDERS = ("accelerate", "transformers", "trl")  # libraries whose modules may hold a replaced function


def turn_on() -> None:
    """From now on FSDP asked for through Hugging Face means our engine. Cheap, and may be called twice."""
    for name in _PATCHES:
        if name in sys.modules:
            _patch(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _patch(module: ModuleType) -> None:
    patches: Any = import_module(_PATCHES[module.__name__])
    patches.apply(module)


class _Finder(MetaPathFinder):
    """Finds the modules that we wait for as everybody does, and has us called when they have run."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Finder) else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _PatchingLoader(spec.loader)
                return spec
        return None


class _PatchingLoader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner  # tracebacks and inspect ask it for the source
        self._inner.exec_module(module)
        _patch(module)


def replace_method(owner: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Put `make(original)` in the place of a method, once."""
    original = owner.__dict__[name]
    if getattr(original, "by_fullshard", False):
        return
    replacement: Any = functools.wraps(original)(make(original))
    replacement.by_fullshard = True
    setattr(owner, name, replacement)


def replace_function(module: ModuleType, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Put `make(original)` in the place of a function, wherever it was imported to."""
    original = vars(module)[name]
    if getattr(original, "by_fullshard", False):
        return
    replacement: Any = functools.wraps(original)(make(original))
    replacement.by_fullshard = True
    for holder_name, holder in list(sys.modules.items()):
        if holder_name.partition(".")[0] in _HOLDERS and vars(holder).get(name) is original:
            setattr(holder, name, replacement)
    setattr(module, name, replacement)
